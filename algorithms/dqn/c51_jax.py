# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2"]
# ///
"""Categorical DQN (C51): learns the distribution of the return; discrete actions, vector observations; in JAX.

Paper     Bellemare, Dabney, Munos 2017, https://arxiv.org/abs/1707.06887 ("Alg. 1", "Eq. n" below)
Run       solo train c51_jax --env-id CartPole-v1 --num-seeds 4
Spaces    vector -> discrete
Differs   from dqn_jax.py: the network gives a distribution over n_atoms returns between v_min and v_max for each
          action; cross entropy with the projected target distribution; larger epsilon of Adam
Not for   image observations; continuous actions: ddpg_continuous_action_jax.py
Details   algorithms/dqn/README.md
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from solorl import RunArgs, Runs, parse
from solorl.envs.open import open_envs


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # id of the environment, in JAX or EnvPool for training, in Gymnasium for evaluation
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 500_000  # environment steps, summed over environments; whole iterations of them
    num_envs: int = 1  # environments stepped side by side
    n_atoms: int = 101  # returns that a distribution knows: the atoms
    v_min: float = -100.0  # the least of them
    v_max: float = 100.0  # the largest of them
    buffer_size: int = 10_000  # transitions the replay buffer holds
    batch_size: int = 128  # transitions of one update
    learning_starts: int = 10_000  # environment steps before the first update
    train_frequency: int = 10  # environment steps per update
    learning_rate: float = 2.5e-4  # step size of Adam
    gamma: float = 0.99  # discount factor
    target_network_frequency: int = 500  # environment steps between moves of the target network
    tau: float = 1.0  # how far it moves towards the Q-network: 1 is a copy
    start_e: float = 1.0  # epsilon at the start: probability of a random action
    end_e: float = 0.05  # epsilon at the end
    exploration_fraction: float = 0.5  # share of total_timesteps in which epsilon falls linearly


class Training(NamedTuple):
    """All that changes while a seed trains."""

    params: list  # of the Q-network
    target_params: list
    optimizer: Any  # state of Adam, for the vector of all parameters
    replay: (
        jax.Array
    )  # the last transitions, (capacity, 2 * obs_dim + 3): rows [obs | action | reward | done | next_obs]
    state: Any  # of the environments
    obs: jax.Array  # (num_envs, obs_dim), where the environments are
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


def make_env(env_id, **kwargs):
    """One environment, for evaluation; all that is specific to the environment stands here."""
    return gym.make(env_id, **kwargs)


def make_envs(env_id, num_envs):
    """The same environments for training: in JAX if there are any of this kind, else in EnvPool."""
    return open_envs(env_id, num_envs)


def init_mlp(key, *sizes):
    """Layers with weights and biases uniform within 1 / sqrt(fan_in), as in torch."""
    keys = jax.random.split(key, (len(sizes) - 1, 2))
    return [
        {
            "weight": jax.random.uniform(k[0], (i, o), minval=-(i**-0.5), maxval=i**-0.5),
            "bias": jax.random.uniform(k[1], (o,), minval=-(i**-0.5), maxval=i**-0.5),
        }
        for k, (i, o) in zip(keys, pairwise(sizes), strict=True)
    ]


def mlp(layers, x):
    """The layers with ReLU between them, (batch, fan_in) -> (batch, fan_out)."""
    *hidden, last = layers
    for layer in hidden:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def init_params(key, obs_dim, num_actions, n_atoms):
    return init_mlp(key, obs_dim, 120, 84, num_actions * n_atoms)


def logits_of(params, obs, atoms):  # (batch, obs_dim) -> (batch, num_actions, n_atoms)
    return mlp(params, obs).reshape(len(obs), -1, len(atoms))


def act(params, obs, atoms):  # (batch, obs_dim) -> (batch,)
    return (jax.nn.softmax(logits_of(params, obs, atoms)) @ atoms).argmax(1)


def project(p, value, atoms):
    """The distribution on the atoms (n_atoms,) that stands for probabilities p of values, both (batch, n_atoms): each
    value, clipped to their range, gives its probability to the two atoms beside it, more to the closer one (Eq. 7)."""
    last, row = len(atoms) - 1, jnp.arange(len(p))[:, None]
    b = ((value - atoms[0]) / (atoms[last] - atoms[0]) * last).clip(0, last)  # position among the atoms
    lower = b.astype(jnp.int32)
    to_upper = p * (b - lower)  # nothing where the value is an atom: the lower one gets all
    target = jnp.zeros((len(p), last + 2))  # with a column behind the last atom, which gets nothing
    return target.at[row, lower].add(p - to_upper).at[row, lower + 1].add(to_upper)[:, :-1]


def c51_loss(params, target_params, obs, action, reward, done, next_obs, atoms, gamma):
    """Cross entropy of Alg. 1; metrics: the loss, the mean value.

    obs, next_obs (batch_size, obs_dim), all others (batch_size,). `done` is 0 at a time limit.
    """
    row = jnp.arange(len(obs))
    next_p = jax.nn.softmax(logits_of(target_params, next_obs, atoms))
    next_p = next_p[row, (next_p @ atoms).argmax(1)]  # (batch_size, n_atoms), of the best action
    target = project(next_p, reward[:, None] + gamma * (1 - done[:, None]) * atoms, atoms)
    logp = jax.nn.log_softmax(logits_of(params, obs, atoms)[row, action.astype(jnp.int32)])
    loss = -(target * logp).sum(1).mean()
    return loss, jnp.stack([loss, (jnp.exp(logp) @ atoms).mean()])


def begin(key, envs, optimizer, capacity, n_atoms):
    """The training of one seed before its first iteration."""
    params_key, envs_key, key = jax.random.split(key, 3)
    obs_dim, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    params = init_params(params_key, obs_dim, num_actions, n_atoms)
    state, obs = envs.reset(envs_key)
    replay = jnp.zeros((capacity, 2 * obs_dim + 3))
    adam = optimizer.init(ravel_pytree(params)[0])
    return Training(params, params, adam, replay, state, obs, key, jnp.int32(0))


def explore(policy, envs, state, obs, key, num_steps, epsilon):
    """num_steps steps in every environment, at random with probability epsilon: the environments behind them, and the
    steps (num_steps, num_envs, ...)."""
    coin_key, action_key, start_key = jax.random.split(key, 3)
    shape = (num_steps, envs.num_envs)
    greedy = jax.random.uniform(coin_key, shape) >= epsilon
    random = jax.random.randint(action_key, shape, 0, int(envs.single_action_space.n))
    fresh = envs.starts(start_key, num_steps)  # where episodes begin anew; all random numbers are drawn at once

    def advance(carry, inputs):
        (state, obs), (greedy, random, fresh) = carry, inputs
        action = jnp.where(greedy, policy(obs), random)
        state, step = envs.step(state, action, fresh)
        return (state, step.obs), (obs, action, step)

    return jax.lax.scan(advance, (state, obs), (greedy, random, fresh))


def sample(replay, key, size, batch_size, obs_dim):
    """Transitions drawn uniformly with replacement from the first `size` rows: (batch_size, ...) each."""
    rows = replay[jax.random.randint(key, (batch_size,), 0, size)]
    obs, (action, reward, done), next_obs = rows[:, :obs_dim], rows[:, obs_dim : obs_dim + 3].T, rows[:, obs_dim + 3 :]
    return obs, action, reward, done, next_obs


def iteration(training, envs, atoms, optimizer, num_iterations, args):
    """One iteration of one seed: the training behind it, and what it reports."""
    params, replay = training.params, training.replay
    capacity, obs_dim = len(replay), training.obs.shape[1]
    explore_key, sample_key, key = jax.random.split(training.key, 3)
    num_steps = max(1, args.train_frequency // args.num_envs)  # of each environment in one iteration
    batch_steps = args.num_envs * num_steps
    before, global_step = training.iteration * batch_steps, (training.iteration + 1) * batch_steps

    # ---- 1. act: num_steps steps in every environment, at random with probability epsilon
    progress = jnp.minimum(1, training.iteration / max(1.0, args.exploration_fraction * num_iterations))
    epsilon = args.start_e + (args.end_e - args.start_e) * progress
    inputs = (partial(act, params, atoms=atoms), envs, training.state, training.obs, explore_key, num_steps, epsilon)
    (state, next_obs), (obs, action, step) = explore(*inputs)

    # ---- 2. store: where a step led and whether the task was over there; a time limit is no end of the task
    columns = (obs, action, step.reward, step.terminated, step.final_obs)
    rows = jnp.concatenate([x.reshape(batch_steps, -1).astype(jnp.float32) for x in columns], 1)
    replay = replay.at[(before + jnp.arange(batch_steps)) % capacity].set(rows)

    # ---- 3. learn: an update for every train_frequency environment steps after learning_starts
    vector, unravel = ravel_pytree(params)
    target_params, size = training.target_params, jnp.minimum(global_step, capacity)

    def update(i, learner):
        vector, adam, metrics = learner
        batch = sample(replay, jax.random.fold_in(sample_key, i), size, args.batch_size, obs_dim)
        loss_of = lambda vector: c51_loss(unravel(vector), target_params, *batch, atoms, args.gamma)  # noqa: E731
        gradient, new = jax.grad(loss_of, has_aux=True)(vector)
        direction, adam = optimizer.update(gradient, adam)
        return vector - args.learning_rate * direction, adam, metrics + jnp.append(new, 1)

    first = jnp.maximum(before, args.learning_starts) // args.train_frequency
    learner = (vector, training.optimizer, jnp.zeros(3))
    vector, adam, metrics = jax.lax.fori_loop(first, global_step // args.train_frequency, update, learner)
    params = unravel(vector)
    move = jnp.where(global_step % args.target_network_frequency < batch_steps, args.tau, 0.0)
    target_params = jax.tree.map(lambda target, new: target + move * (new - target), target_params, params)

    # ---- 4. report: sums of the two metrics, and the number of updates
    training = Training(params, target_params, adam, replay, state, next_obs, key, training.iteration + 1)
    return training, (step.reward, step.terminated | step.truncated, epsilon, metrics)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    batch_steps = args.num_envs * max(1, args.train_frequency // args.num_envs)
    num_iterations = args.total_timesteps // batch_steps
    run.require(num_iterations, f"--total-timesteps {args.total_timesteps} is less than one iteration of {batch_steps}")
    often = args.target_network_frequency >= batch_steps
    run.require(often, f"--target-network-frequency must be at least {batch_steps}, the steps of one iteration")
    run.require(args.n_atoms > 1 and args.v_min < args.v_max, "--n-atoms must be 2 or more, --v-min less than --v-max")
    envs = make_envs(args.env_id, args.num_envs)
    run.require_spaces(envs, obs="vector", action="discrete")

    atoms = jnp.linspace(args.v_min, args.v_max, args.n_atoms)
    policy = partial(act, atoms=atoms)
    optimizer = optax.scale_by_adam(eps=0.01 / args.batch_size)
    start_of = partial(begin, envs=envs, optimizer=optimizer, capacity=args.buffer_size, n_atoms=args.n_atoms)
    lost = () if envs.saved else ("state", "obs")  # what begins anew in a resumed run
    start = run.resume(start_of, model="params", anew=lost)
    one = partial(iteration, envs=envs, atoms=atoms, optimizer=optimizer, num_iterations=num_iterations, args=args)
    train = run.compile(one, chunk=max(1, 1000 // batch_steps))

    for iterations in run.loop(start, num_iterations, batch_steps):
        global_step = iterations.stop * batch_steps
        reward, done, epsilon, metrics = train(iterations)  # (num_seeds, len(iterations), ...) each
        run.episodes(global_step, reward, done)
        td_error, q, n = metrics.sum(1).T  # (num_seeds,) each
        losses = {"losses/td_loss": td_error / n, "losses/q_values": q / n} if n.all() else {}
        run.log(global_step, {"charts/epsilon": epsilon[:, -1], **losses})
        run.evaluate(global_step, policy, make_env)
        run.save(global_step)
    run.close(policy, make_env)
