# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""Deep Q-network (DQN), discrete actions, vector observations; in JAX, the whole training compiled.

Paper     Mnih et al. 2015, https://www.nature.com/articles/nature14236 ("Alg. 1" below)
Run       solo train dqn_jax --env-id CartPole-v1 --num-seeds 4
Spaces    vector -> discrete
Differs   root of its family
Twin      dqn.py
Not for   Atari games: dqn_atari_jax.py; other images; continuous actions: ddpg_continuous_action_jax.py
Details   docs/algorithms/dqn_jax.md
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import optax

from solorl import RunArgs, Runs, parse


@dataclass
class Args(RunArgs):
    env_kind = "jax"  # ids of environments written in JAX, or known to both EnvPool and Gymnasium
    env_id: str = "CartPole-v1"  # id of the environment, in JAX or EnvPool for training, in Gymnasium for evaluation
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 500_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    buffer_size: int = 10_000  # transitions in the replay buffer
    batch_size: int = 128  # transitions per gradient step
    learning_starts: int = 10_000  # environment steps before the first gradient step; 0: learn at once
    train_frequency: int = 10  # environment steps per gradient step
    learning_rate: float = 2.5e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 500  # environment steps between target network updates
    tau: float = 1.0  # soft-update coefficient of the target network (1: hard copy), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.05  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.5  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    optimizer: optax.GradientTransformation
    num_iterations: int


class Batch(NamedTuple):
    """Transitions."""

    obs: jax.Array  # (batch_size, obs_dim)
    action: jax.Array  # (batch_size,)
    reward: jax.Array  # (batch_size,)
    done: jax.Array  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: jax.Array  # (batch_size, obs_dim)


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    params: list  # of the Q-network
    target_params: list
    optimizer_state: Any
    replay: Batch  # the last transitions, (buffer_size, ...)
    env_state: Any
    obs: jax.Array  # (num_envs, obs_dim), the current observations
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


def make_env(env_id, **kwargs):
    """One environment, for evaluation."""
    return gym.make(env_id, **kwargs)


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


def init_params(key, obs_dim, num_actions):
    return init_mlp(key, obs_dim, 120, 84, num_actions)


def q_values(params, obs):  # (batch, obs_dim) -> (batch, num_actions)
    return mlp(params, obs)


def act(params, obs):  # (batch, *obs_shape) -> (batch,): the greedy actions
    return q_values(params, obs.reshape(len(obs), -1)).argmax(1)


def td_loss(params, target_params, batch, gamma):
    """Mean squared error of Alg. 1, and the metrics."""
    target = batch.reward + gamma * (1 - batch.done) * q_values(target_params, batch.next_obs).max(1)
    q = jnp.take_along_axis(q_values(params, batch.obs), batch.action[:, None], 1).squeeze(1)
    assert q.shape == target.shape == batch.reward.shape
    loss = ((q - target) ** 2).mean()
    return loss, {"losses/td_loss": loss, "losses/q_values": q.mean()}


def begin(key, setup):
    """The initial training state of one seed."""
    params_key, envs_key, key = jax.random.split(key, 3)
    obs_dim, num_actions = setup.envs.single_observation_space.shape[0], int(setup.envs.single_action_space.n)
    params = init_params(params_key, obs_dim, num_actions)
    env_state, obs = setup.envs.reset(envs_key)
    transition = Batch(jnp.zeros(obs_dim), jnp.int32(0), jnp.float32(0), jnp.float32(0), jnp.zeros(obs_dim))
    replay = jax.tree.map(lambda x: jnp.zeros((setup.args.buffer_size, *x.shape), x.dtype), transition)
    return Training(params, params, setup.optimizer.init(params), replay, env_state, obs, key, jnp.int32(0))


def insert(replay, batch, inserted):
    """Write transitions over the oldest ones: a Batch of arrays, (num_envs, ...) or (num_steps, num_envs, ...).
    `inserted`: transitions ever inserted before."""
    index = (inserted + jnp.arange(batch.reward.size)) % len(replay.reward)
    return jax.tree.map(lambda x, new: x.at[index].set(new.reshape(-1, *x.shape[1:]).astype(x.dtype)), replay, batch)


def sample(replay, key, size, batch_size):
    """A Batch of transitions drawn uniformly with replacement from the first `size`."""
    index = jax.random.randint(key, (batch_size,), 0, size)
    return jax.tree.map(lambda x: x[index], replay)


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs, optimizer, num_iterations = setup
    coin_key, action_key, step_key, sample_key, key = jax.random.split(training.key, 5)
    num_steps = max(1, args.train_frequency // args.num_envs)  # of each environment in one iteration
    batch_steps = args.num_envs * num_steps
    before, global_step = training.iteration * batch_steps, (training.iteration + 1) * batch_steps

    # ---- 1. act: "with probability epsilon select a random action" (Alg. 1)
    progress = jnp.minimum(1, training.iteration / max(1.0, args.exploration_fraction * num_iterations))
    epsilon = args.start_e + (args.end_e - args.start_e) * progress

    def env_step(carry, drawn):
        (env_state, obs), (key, greedy, random) = carry, drawn
        action = jnp.where(greedy, act(training.params, obs), random)
        env_state, step = envs.step(key, env_state, action)
        return (env_state, step.obs), (obs, action, step)

    shape = (num_steps, args.num_envs)
    random = jax.random.randint(action_key, shape, 0, int(envs.single_action_space.n))
    greedy = jax.random.uniform(coin_key, shape) >= epsilon
    drawn = (jax.random.split(step_key, num_steps), greedy, random)
    (env_state, next_obs), (obs, action, step) = jax.lax.scan(env_step, (training.env_state, training.obs), drawn)

    # ---- 2. store: a time limit is not the end of the task
    replay = insert(training.replay, Batch(obs, action, step.reward, step.terminated, step.final_obs), before)

    # ---- 3. learn: a gradient step for every train_frequency environment steps after learning_starts
    def gradient_step(i, carry):
        params, optimizer_state, sums = carry
        batch = sample(replay, jax.random.fold_in(sample_key, i), size, args.batch_size)
        gradients, metrics = jax.grad(td_loss, has_aux=True)(params, training.target_params, batch, args.gamma)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return optax.apply_updates(params, updates), optimizer_state, jax.tree.map(jnp.add, sums, metrics)

    size = jnp.minimum(global_step, args.buffer_size)
    first, last = jnp.maximum(before, args.learning_starts) // args.train_frequency, global_step // args.train_frequency
    carry = (training.params, training.optimizer_state, {"losses/td_loss": 0.0, "losses/q_values": 0.0})
    params, optimizer_state, sums = jax.lax.fori_loop(first, last, gradient_step, carry)
    # the target network moves in iterations in which a multiple of target_network_frequency lies
    move = jnp.where(global_step % args.target_network_frequency < batch_steps, args.tau, 0.0)
    target_params = optax.incremental_update(params, training.target_params, move)

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    training = Training(
        params, target_params, optimizer_state, replay, env_state, next_obs, key, training.iteration + 1
    )
    done = step.terminated | step.truncated  # (num_steps, num_envs), like step.reward
    return training, (step.reward, done, epsilon, sums, jnp.maximum(0, last - first))


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # written in JAX if we have this id, else EnvPool's
    run.require_spaces(envs, obs="vector", action="discrete")
    batch_steps = args.num_envs * max(1, args.train_frequency // args.num_envs)
    num_iterations = run.iterations(batch_steps)  # whole ones in total_timesteps
    sentence = f"--target-network-frequency and --buffer-size must be at least {batch_steps}, one iteration"
    run.require(min(args.target_network_frequency, args.buffer_size) >= batch_steps, sentence)

    optimizer = optax.adam(args.learning_rate)
    optimizer = optax.flatten(optimizer)  # the gradients as one vector: fewer, larger operations
    setup = Setup(args, envs, optimizer, num_iterations)
    training, start = run.resume(lambda key: begin(key, setup), model="params", envs=("env_state", "obs"))
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=max(1, 1000 // batch_steps))

    for iterations in run.loop(start, num_iterations, batch_steps):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * batch_steps
        training, (reward, done, epsilon, sums, count) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.learned(sums, count)
        run.log(global_step, {"charts/epsilon": epsilon[:, -1]})
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env)  # a last evaluation; `solo play` takes this policy
