# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2"]
# ///
"""Twin delayed deep deterministic policy gradient (TD3), continuous actions, vector observations; in JAX, all compiled.

Paper     Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477 ("Alg. 1" below)
Run       solo train td3_continuous_action_jax --env-id Pendulum-v1 --total-timesteps 20000 --learning-starts 1000
Spaces    vector -> continuous
Differs   from ddpg_continuous_action_jax.py: two critics, the smaller target counts; noise on the target action
Not for   discrete actions: dqn_jax.py
Details   algorithms/actor_critic/README.md
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from solorl import RunArgs, Runs, parse
from solorl.envs.open import open_envs


@dataclass
class Args(RunArgs):
    env_id: str = "Pendulum-v1"  # id of the environment, in JAX or EnvPool for training, in Gymnasium for evaluation
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 1_000_000  # environment steps, summed over environments; whole iterations of them
    num_envs: int = 1  # environments stepped side by side
    learning_starts: int = 25_000  # environment steps of random actions before the first gradient step
    buffer_size: int = 1_000_000  # transitions the replay buffer holds
    batch_size: int = 256  # transitions of one gradient step
    utd_ratio: float = 1.0  # gradient steps per environment step (update-to-data ratio)
    learning_rate: float = 3e-4  # step size of both Adams
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # share of the online networks that the target networks take over
    policy_frequency: int = 2  # gradient steps of the critic per step of the actor and the target networks (d)
    policy_noise: float = 0.2  # standard deviation of the noise on target actions, in half ranges of the action
    noise_clip: float = 0.5  # largest such noise
    exploration_noise: float = 0.1  # standard deviation of the noise on actions, in half ranges of the action


class Learner(NamedTuple):
    """What gradient steps change: vectors of all parameters of a network, and the states of their Adams."""

    actor: jax.Array
    critic: jax.Array
    target_actor: jax.Array
    target_critic: jax.Array
    actor_adam: Any
    critic_adam: Any


class Training(NamedTuple):
    """All that changes while a seed trains."""

    actor: list  # layers of the actor, for acting
    learner: Learner
    replay: jax.Array  # the last transitions, (capacity, width): rows [obs | action | reward | done | next_obs]
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


def init_params(key, obs_dim, action_dim):
    """The layers of the actor and of the two critics."""
    actor, *critics = jax.random.split(key, 3)
    critics = [init_mlp(critic, obs_dim + action_dim, 256, 256, 1) for critic in critics]
    return init_mlp(actor, obs_dim, 256, 256, action_dim), critics


def action_of(actor, obs, bounds):  # (batch, obs_dim) -> (batch, action_dim) within the bounds of each dimension
    low, high = bounds
    return low + (high - low) * (jnp.tanh(mlp(actor, obs)) + 1) / 2


def act(actor, obs, noise=0.0, bounds=()):  # (batch, obs_dim) -> (batch, action_dim)
    """The policy's actions; with noise (batch, action_dim) in half ranges of the action added."""
    low, high = bounds
    return (action_of(actor, obs, bounds) + noise * (high - low) / 2).clip(low, high)


def value_of(critic, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,)
    return mlp(critic, jnp.concatenate([obs, action], 1)).squeeze(1)


def smoothed(action, noise, noise_clip, bounds):
    """Target actions with clipped noise, both (batch, action_dim), kept within the bounds of each dimension."""
    low, high = bounds
    return (action + noise.clip(-noise_clip, noise_clip) * (high - low) / 2).clip(low, high)


def td3_critic_loss(critics, target_critics, target_actor, batch, noise, noise_clip, bounds, gamma):
    """The critics' losses of Alg. 1, added; metrics: mean values, losses, mean loss. `done` is 0 at a time limit."""
    obs, action, reward, done, next_obs = batch
    next_action = smoothed(action_of(target_actor, next_obs, bounds), noise, noise_clip, bounds)
    next_value = jnp.minimum(*(value_of(critic, next_obs, next_action) for critic in target_critics))
    q_target = reward + gamma * (1 - done) * next_value
    q = jnp.stack([value_of(critic, obs, action) for critic in critics])  # (2, batch)
    loss = ((q - q_target) ** 2).mean(1)
    return loss.sum(), jnp.concatenate([q.mean(1), loss, loss.mean(keepdims=True)])


def td3_actor_loss(actor, critics, obs, bounds):
    """The negative of the first critic's value, which Alg. 1 ascends."""
    return -value_of(critics[0], obs, action_of(actor, obs, bounds)).mean()


def sample(replay, key, size, batch_size, obs_dim):
    """Transitions drawn uniformly with replacement from the first `size` rows: (batch_size, ...) each."""
    rows, end = replay[jax.random.randint(key, (batch_size,), 0, size)], replay.shape[1] - obs_dim
    return rows[:, :obs_dim], rows[:, obs_dim : end - 2], rows[:, end - 2], rows[:, end - 1], rows[:, end:]


def begin(key, envs, optimizer, capacity):
    """The training of one seed before its first iteration."""
    params_key, envs_key, key = jax.random.split(key, 3)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    actor, critic = init_params(params_key, obs_dim, action_dim)
    (a, _), (c, _) = ravel_pytree(actor), ravel_pytree(critic)
    state, obs = envs.reset(envs_key)
    learner = Learner(a, c, a, c, optimizer.init(a), optimizer.init(c))
    replay = jnp.zeros((capacity, 2 * obs_dim + action_dim + 2))
    return Training(actor, learner, replay, state, obs, key, jnp.int32(0))


def learn_td3(update, learner, batch, noise, unravel, bounds, optimizer, args):
    """A gradient step of the critics and, every policy_frequency updates, of the actor and the target networks; with
    sums and counts (2, number of metrics)."""
    actor_of, critic_of = unravel

    def of_critic(critic):
        targets = critic_of(learner.target_critic), actor_of(learner.target_actor)
        return td3_critic_loss(critic_of(critic), *targets, batch, noise, args.noise_clip, bounds, args.gamma)

    gradient, metrics = jax.grad(of_critic, has_aux=True)(learner.critic)
    direction, critic_adam = optimizer.update(gradient, learner.critic_adam)
    learner = learner._replace(critic=learner.critic - args.learning_rate * direction, critic_adam=critic_adam)

    def step_actor(learner):
        critic = critic_of(learner.critic)
        of_actor = lambda actor: td3_actor_loss(actor_of(actor), critic, batch[0], bounds)  # noqa: E731
        loss, gradient = jax.value_and_grad(of_actor)(learner.actor)
        direction, actor_adam = optimizer.update(gradient, learner.actor_adam)
        actor = learner.actor - args.learning_rate * direction
        target_actor = learner.target_actor + args.tau * (actor - learner.target_actor)
        target_critic = learner.target_critic + args.tau * (learner.critic - learner.target_critic)
        return Learner(actor, learner.critic, target_actor, target_critic, actor_adam, learner.critic_adam), loss

    due = update % args.policy_frequency == 0
    learner, loss = jax.lax.cond(due, step_actor, lambda learner: (learner, 0.0), learner)
    return learner, jnp.stack([jnp.append(metrics, loss), jnp.append(jnp.ones_like(metrics), due)])


def iteration(training, envs, unravel, bounds, optimizer, args):
    """One iteration of one seed: the training behind it, and what it reports."""
    step_key, noise_key, start_key, sample_key, key = jax.random.split(training.key, 5)
    capacity, obs_dim, shape = len(training.replay), training.obs.shape[1], (args.num_envs, len(bounds[0]))
    before, global_step = training.iteration * args.num_envs, (training.iteration + 1) * args.num_envs

    # ---- 1. act: one step in every environment
    low, high = bounds
    random = jax.random.uniform(step_key, shape, minval=low, maxval=high)
    noise = args.exploration_noise * jax.random.normal(noise_key, shape)
    action = jnp.where(global_step <= args.learning_starts, random, act(training.actor, training.obs, noise, bounds))
    state, step = envs.step(training.state, action, envs.starts(start_key, 1)[0])

    # ---- 2. store: where a step led and whether the task was over there; a time limit is no end of the task
    columns = (training.obs, action, step.reward, step.terminated, step.final_obs)
    rows = jnp.concatenate([x.reshape(args.num_envs, -1).astype(jnp.float32) for x in columns], 1)
    replay = training.replay.at[(before + jnp.arange(args.num_envs)) % capacity].set(rows)

    # ---- 3. learn: utd_ratio gradient steps for each environment step since learning_starts
    size = jnp.minimum(global_step, capacity)
    first, last = (jnp.floor(args.utd_ratio * jnp.maximum(0, s - args.learning_starts)) for s in (before, global_step))
    last = jnp.where(size >= args.batch_size, last, first)

    def update(i, carry):
        learner, totals = carry
        batch_key, smoothing_key = jax.random.split(jax.random.fold_in(sample_key, i))
        batch = sample(replay, batch_key, size, args.batch_size, obs_dim)
        noise = args.policy_noise * jax.random.normal(smoothing_key, (args.batch_size, shape[1]))
        learner, metrics = learn_td3(i, learner, batch, noise, unravel, bounds, optimizer, args)
        return learner, totals + metrics

    carry = (training.learner, jnp.zeros((2, len(METRICS))))
    learner, totals = jax.lax.fori_loop(first.astype(int), last.astype(int), update, carry)

    # ---- 4. report: sums and numbers of the metrics
    actor = unravel[0](learner.actor)
    training = Training(actor, learner, replay, state, step.obs, key, training.iteration + 1)
    return training, (step.reward, step.terminated | step.truncated, totals)


METRICS = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss", "actor_loss")

if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    num_iterations = args.total_timesteps // args.num_envs
    run.require(num_iterations, f"--total-timesteps {args.total_timesteps} is less than --num-envs {args.num_envs}")
    most = min(args.buffer_size, num_iterations * args.num_envs)  # transitions that a batch can be drawn from
    run.require(args.batch_size <= most, f"--batch-size must be at most {most} by --buffer-size and --total-timesteps")
    envs = make_envs(args.env_id, args.num_envs)
    run.require_spaces(envs, obs="vector", action="continuous")
    bounds = envs.single_action_space.low, envs.single_action_space.high
    run.require(
        np.isfinite(bounds).all() and (bounds[0] < bounds[1]).all(), f"{args.env_id} has actions without finite bounds"
    )
    obs_dim, action_dim = envs.single_observation_space.shape[0], len(bounds[0])

    policy = partial(act, bounds=bounds)
    optimizer = optax.scale_by_adam()
    unravel = [ravel_pytree(layers)[1] for layers in init_params(jax.random.PRNGKey(0), obs_dim, action_dim)]
    capacity = min(args.buffer_size, args.total_timesteps)
    lost = () if envs.saved else ("state", "obs")  # what begins anew in a resumed run
    start = run.resume(partial(begin, envs=envs, optimizer=optimizer, capacity=capacity), model="actor", anew=lost)
    one = partial(iteration, envs=envs, unravel=unravel, bounds=bounds, optimizer=optimizer, args=args)
    train = run.compile(one, chunk=max(1, 500 // args.num_envs))

    for iterations in run.loop(start, num_iterations, args.num_envs):
        global_step = iterations.stop * args.num_envs
        reward, done, totals = train(iterations)  # (num_seeds, len(iterations), ...) each
        run.episodes(global_step, reward[:, :, None], done[:, :, None])
        sums, counts = np.moveaxis(totals.sum(1), 0, 2)  # (number of metrics, num_seeds) each
        run.log(
            global_step, {f"losses/{name}": x / n for name, x, n in zip(METRICS, sums, counts, strict=True) if n.all()}
        )
        run.evaluate(global_step, policy, make_env)
        run.save(global_step)
    run.close(policy, make_env)
