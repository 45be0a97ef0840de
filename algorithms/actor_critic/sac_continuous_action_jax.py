# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2"]
# ///
"""Soft actor-critic (SAC), continuous actions, vector observations; in JAX, all of it compiled.

Paper     Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905 ("Eq. n" below)
Run       solo train sac_continuous_action_jax --env-id Pendulum-v1 --total-timesteps 20000 --learning-starts 1000
Spaces    vector -> continuous
Differs   from td3_continuous_action_jax.py: a stochastic policy; its entropy is rewarded, by a learned temperature
Not for   discrete actions: dqn_jax.py
Details   algorithms/actor_critic/README.md
"""

import math
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
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step
    buffer_size: int = 1_000_000  # transitions the replay buffer holds
    batch_size: int = 256  # transitions of one gradient step
    utd_ratio: float = 1.0  # gradient steps of the critics per environment step (update-to-data ratio)
    policy_lr: float = 3e-4  # step size of the actor's Adam
    q_lr: float = 1e-3  # step size of Adam for the critics and the temperature
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # share of the critics that their targets take over
    policy_frequency: int = 2  # every so many gradient steps of the critics, as many of the actor in a row
    target_network_frequency: int = 1  # gradient steps of the critics per move of their targets
    alpha: float = 0.2  # temperature, the weight of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature so that the entropy, actions in half ranges, is minus their dimension


class Learner(NamedTuple):
    """What gradient steps change: vectors of all parameters of a network, and the states of their Adams."""

    actor: jax.Array
    critic: jax.Array
    target_critic: jax.Array
    log_alpha: jax.Array  # logarithm of the temperature, ()
    actor_adam: Any
    critic_adam: Any
    alpha_adam: Any


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
    return init_mlp(actor, obs_dim, 256, 256, 2 * action_dim), critics


def sample_action(actor, obs, noise, bounds):  # (batch, obs_dim), (batch, action_dim) -> (batch, action_dim), (batch,)
    """Actions for standard normal noise, and their log-probabilities: appendix C with the range of the actions as a
    factor more, and with log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)), which is exact for every x."""
    mean, log_std = jnp.split(mlp(actor, obs), 2, axis=1)
    log_std = 3.5 * jnp.tanh(log_std) - 1.5  # in [-5, 2]
    x, (low, high) = mean + jnp.exp(log_std) * noise, bounds
    normal_logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = jnp.log((high - low) / 2) + 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))
    return low + (high - low) / 2 * (jnp.tanh(x) + 1), (normal_logprob - log_slope).sum(1)


def act(actor, obs, noise=0.0, bounds=()):  # (batch, obs_dim) -> (batch, action_dim)
    """The actions of the mean; with standard normal noise (batch, action_dim), actions drawn from the policy."""
    return sample_action(actor, obs, noise, bounds)[0].clip(*bounds)


def value_of(critic, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,)
    return mlp(critic, jnp.concatenate([obs, action], 1)).squeeze(1)


def sac_critic_loss(critics, target_critics, actor, log_alpha, batch, noise, bounds, gamma):
    """Twice Eq. 5, both critics added; metrics: their mean values, losses, mean loss. `done` is 0 at a time limit."""
    obs, action, reward, done, next_obs = batch
    next_action, next_logprob = sample_action(actor, next_obs, noise, bounds)
    next_q = jnp.minimum(*(value_of(critic, next_obs, next_action) for critic in target_critics))
    q_target = reward + gamma * (1 - done) * (next_q - jnp.exp(log_alpha) * next_logprob)  # Eq. 3
    q = jnp.stack([value_of(critic, obs, action) for critic in critics])  # (2, batch)
    loss = ((q - q_target) ** 2).mean(1)
    return loss.sum(), jnp.concatenate([q.mean(1), loss, loss.mean(keepdims=True)])


def sac_actor_loss(actor, critics, log_alpha, obs, noise, target_entropy, bounds):
    """Eq. 9; metrics: the loss, the entropy of the policy and the loss of the temperature (Eq. 18)."""
    action, logprob = sample_action(actor, obs, noise, bounds)
    alpha, entropy = jnp.exp(log_alpha), -logprob.mean()
    loss = (alpha * logprob - jnp.minimum(*(value_of(critic, obs, action) for critic in critics))).mean()
    return loss, jnp.stack([loss, entropy, alpha * (entropy - target_entropy)])


def sample(replay, key, size, batch_size, obs_dim):
    """Transitions drawn uniformly with replacement from the first `size` rows: (batch_size, ...) each."""
    rows, end = replay[jax.random.randint(key, (batch_size,), 0, size)], replay.shape[1] - obs_dim
    return rows[:, :obs_dim], rows[:, obs_dim : end - 2], rows[:, end - 2], rows[:, end - 1], rows[:, end:]


def begin(key, envs, optimizer, capacity, alpha):
    """The training of one seed before its first iteration."""
    params_key, envs_key, key = jax.random.split(key, 3)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    actor, critic = init_params(params_key, obs_dim, action_dim)
    (a, _), (c, _) = ravel_pytree(actor), ravel_pytree(critic)
    state, obs = envs.reset(envs_key)
    log_alpha = jnp.log(alpha)
    learner = Learner(a, c, c, log_alpha, *(optimizer.init(x) for x in (a, c, log_alpha)))
    replay = jnp.zeros((capacity, 2 * obs_dim + action_dim + 2))
    return Training(actor, learner, replay, state, obs, key, jnp.int32(0))


def learn_sac(update, learner, batch, noise, unravel, bounds, optimizer, args):
    """A gradient step of the critics and, every policy_frequency updates, as many of the actor and the temperature,
    each with its own row of noise (1 + policy_frequency, ...); with sums and counts (2, number of metrics)."""
    actor_of, critic_of = unravel

    def of_critic(critic):
        inputs = critic_of(learner.target_critic), actor_of(learner.actor), learner.log_alpha
        return sac_critic_loss(critic_of(critic), *inputs, batch, noise[0], bounds, args.gamma)

    gradient, metrics = jax.grad(of_critic, has_aux=True)(learner.critic)
    direction, critic_adam = optimizer.update(gradient, learner.critic_adam)
    learner = learner._replace(critic=learner.critic - args.q_lr * direction, critic_adam=critic_adam)

    target_entropy = float(np.log((bounds[1] - bounds[0]) / 2).sum()) - len(bounds[0])

    def step_actor(learner, noise):
        inputs = critic_of(learner.critic), learner.log_alpha, batch[0], noise, target_entropy, bounds
        of_actor = lambda actor: sac_actor_loss(actor_of(actor), *inputs)  # noqa: E731
        gradient, metrics = jax.grad(of_actor, has_aux=True)(learner.actor)
        direction, adam = optimizer.update(gradient, learner.actor_adam)
        learner = learner._replace(actor=learner.actor - args.policy_lr * direction, actor_adam=adam)
        if args.autotune:  # the loss of the temperature is its own derivative in log_alpha
            direction, adam = optimizer.update(metrics[2], learner.alpha_adam)
            learner = learner._replace(log_alpha=learner.log_alpha - args.q_lr * direction, alpha_adam=adam)
        return learner, metrics

    due = update % args.policy_frequency == 0
    steps = lambda learner: jax.lax.scan(step_actor, learner, noise[1:])  # noqa: E731
    skip = lambda learner: (learner, jnp.zeros((args.policy_frequency, 3)))  # noqa: E731
    learner, more = jax.lax.cond(due, steps, skip, learner)
    move = jnp.where(update % args.target_network_frequency == 0, args.tau, 0)
    target_critic = learner.target_critic + move * (learner.critic - learner.target_critic)
    counts = jnp.append(jnp.ones_like(metrics), jnp.full(3, due * args.policy_frequency))
    return learner._replace(target_critic=target_critic), jnp.stack([jnp.append(metrics, more.sum(0)), counts])


def iteration(training, envs, unravel, bounds, optimizer, args):
    """One iteration of one seed: the training behind it, and what it reports."""
    step_key, noise_key, start_key, sample_key, key = jax.random.split(training.key, 5)
    capacity, obs_dim, shape = len(training.replay), training.obs.shape[1], (args.num_envs, len(bounds[0]))
    before, global_step = training.iteration * args.num_envs, (training.iteration + 1) * args.num_envs

    # ---- 1. act: one step in every environment
    low, high = bounds
    random = jax.random.uniform(step_key, shape, minval=low, maxval=high)
    noise = jax.random.normal(noise_key, shape)
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
        batch_key, noise_key = jax.random.split(jax.random.fold_in(sample_key, i))
        batch = sample(replay, batch_key, size, args.batch_size, obs_dim)
        noise = jax.random.normal(noise_key, (1 + args.policy_frequency, args.batch_size, shape[1]))
        learner, metrics = learn_sac(i, learner, batch, noise, unravel, bounds, optimizer, args)
        return learner, totals + metrics

    carry = (training.learner, jnp.zeros((2, len(METRICS))))
    learner, totals = jax.lax.fori_loop(first.astype(int), last.astype(int), update, carry)

    # ---- 4. report: sums and numbers of the metrics
    actor = unravel[0](learner.actor)
    training = Training(actor, learner, replay, state, step.obs, key, training.iteration + 1)
    return training, (step.reward, step.terminated | step.truncated, totals, jnp.exp(learner.log_alpha))


METRICS = "qf1_values qf2_values qf1_loss qf2_loss qf_loss actor_loss entropy alpha_loss".split()

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
    alpha = 1.0 if args.autotune else max(args.alpha, 1e-30)
    start_of = partial(begin, envs=envs, optimizer=optimizer, capacity=capacity, alpha=alpha)
    lost = () if envs.saved else ("state", "obs")  # what begins anew in a resumed run
    start = run.resume(start_of, model="actor", anew=lost)
    one = partial(iteration, envs=envs, unravel=unravel, bounds=bounds, optimizer=optimizer, args=args)
    train = run.compile(one, chunk=max(1, 500 // args.num_envs))

    for iterations in run.loop(start, num_iterations, args.num_envs):
        global_step = iterations.stop * args.num_envs
        reward, done, totals, alpha = train(iterations)  # (num_seeds, len(iterations), ...) each
        run.episodes(global_step, reward[:, :, None], done[:, :, None])
        sums, counts = np.moveaxis(totals.sum(1), 0, 2)  # (number of metrics, num_seeds) each
        losses = {f"losses/{name}": x / n for name, x, n in zip(METRICS, sums, counts, strict=True) if n.all()}
        run.log(global_step, losses | {"losses/alpha": alpha[:, -1]})
        run.evaluate(global_step, policy, make_env)
        run.save(global_step)
    run.close(policy, make_env)
