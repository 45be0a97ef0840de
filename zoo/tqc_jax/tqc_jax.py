# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""Truncated quantile critics (TQC): SAC with distributional critics, continuous actions, vector observations; in JAX.

Paper     Kuznetsov et al. 2020, https://arxiv.org/abs/2005.04269; SAC: https://arxiv.org/abs/1812.05905 ("Eq. n" below)
Run       solo train tqc_jax --env-id Pendulum-v1 --total-timesteps 20000 --learning-starts 1000
Spaces    vector -> continuous
Differs   from sac_continuous_action_jax.py: the critics estimate quantiles of the return, and their target leaves out
          the largest ones, in place of the smaller of two means
Twin      tqc.py
Not for   discrete actions: dqn_jax.py
Details   docs/algorithms/tqc_jax.md
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax

from solorl import RunArgs, Runs, parse


@dataclass
class Args(RunArgs):
    env_kind = "jax"  # ids of environments written in JAX, or known to both EnvPool and Gymnasium
    env_id: str = "Pendulum-v1"  # id of the environment, in JAX or EnvPool for training, in Gymnasium for evaluation
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    num_critics: int = 2  # critics (the paper: 5, with 3 layers of 512 units)
    num_quantiles: int = 25  # quantiles of the return that a critic estimates
    num_dropped: int = 2  # largest quantiles left out of a target, times num_critics; 0: none (the paper: 0 to 5)
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    policy_lr: float = 3e-4  # learning rate of the actor's Adam
    q_lr: float = 1e-3  # learning rate of the critics' Adam and of the temperature (the paper: 3e-4)
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 2  # number of critic updates after which as many actor updates are made (the paper: 1)
    target_network_frequency: int = 1  # critic updates between target network updates
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature for a target entropy of -action_dim (actions in [-1, 1])


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    actor_optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation
    alpha_optimizer: optax.GradientTransformation


class Batch(NamedTuple):
    """Transitions."""

    obs: jax.Array  # (batch_size, obs_dim)
    action: jax.Array  # (batch_size, action_dim), in [-1, 1]
    reward: jax.Array  # (batch_size,)
    done: jax.Array  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: jax.Array  # (batch_size, obs_dim)


class Learner(NamedTuple):
    """What gradient steps change."""

    actor: list
    critic: list  # of all critics, an axis of them in front of each array
    target_critic: list
    log_alpha: jax.Array  # logarithm of the temperature, ()
    actor_optimizer_state: Any
    critic_optimizer_state: Any
    alpha_optimizer_state: Any


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    learner: Learner
    replay: Batch  # the last transitions, (capacity, ...)
    env_state: Any
    obs: jax.Array  # (num_envs, obs_dim), the current observations
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


class ScaleAction(gym.ActionWrapper):
    """The agent's actions lie in [-1, 1]; the environment gets them in its own finite bounds."""

    def __init__(self, env):
        super().__init__(env)
        self.action_space = gym.spaces.Box(-1.0, 1.0, env.action_space.shape, np.float32)

    def action(self, action):
        space = self.env.action_space
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        share = (action + 1.0) / 2
        scaled = (low * (1 - share) + high * share).astype(space.dtype)
        return np.clip(scaled, space.low, space.high)  # rounding can overstep the bounds


def make_env(env_id, **kwargs):
    """One environment, for evaluation; actions in [-1, 1] if it has finite bounds."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    bounded = isinstance(space, gym.spaces.Box) and np.isfinite([space.low, space.high]).all()
    return ScaleAction(env) if bounded else env


def scale_action(action, low, high):
    """What ScaleAction does, in training; without the difference of the bounds, which can be infinite in float32."""
    share = (action + 1) / 2
    return (low * (1 - share) + high * share).clip(low, high)  # rounding can overstep the bounds


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


def init_critics(key, obs_dim, action_dim, num_critics, num_quantiles):
    """Critics side by side: an axis of them in front of each array of the layers."""
    sizes = (obs_dim + action_dim, 256, 256, num_quantiles)
    return jax.vmap(lambda k: init_mlp(k, *sizes))(jax.random.split(key, num_critics))


def sample_action(actor, obs, noise):  # (batch, obs_dim), (batch, action_dim) -> (batch, action_dim), (batch,)
    """Actions for standard normal noise, and their log-probabilities (appendix C)."""
    mean, log_std = jnp.split(mlp(actor, obs), 2, axis=1)
    log_std = 3.5 * jnp.tanh(log_std) - 1.5  # in [-5, 2]; SAC's authors clip it instead
    x = mean + jnp.exp(log_std) * noise
    logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    logprob = logprob - 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))  # log(1 - tanh(x)^2), numerically stable
    return jnp.tanh(x), logprob.sum(1)


def act(actor, obs, noise=0.0):  # (batch, *obs_shape) -> (batch, action_dim)
    """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy."""
    obs = obs.reshape(len(obs), -1)
    return sample_action(actor, obs, noise)[0]


def drawn(actor, obs, key):  # (batch, *obs_shape) -> (batch, action_dim)
    """Samples of the policy."""
    return act(actor, obs, jax.random.normal(key, act(actor, obs).shape))


def quantiles_of(critics, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (num_critics, batch, num_quantiles)
    """Several estimates of the distribution of the return of an action, each by its quantiles."""
    return jax.vmap(mlp, (0, None))(critics, jnp.concatenate([obs, action], 1))


def truncate(quantiles, num_dropped):
    """The quantiles of all critics in ascending order, without the `num_dropped` largest times the number of critics.
    (num_critics, batch, num_quantiles) -> (batch, num_critics * (num_quantiles - num_dropped))."""
    num_critics, batch_size, num_quantiles = quantiles.shape
    kept = num_critics * (num_quantiles - num_dropped)
    return jnp.sort(quantiles.swapaxes(0, 1).reshape(batch_size, -1), 1)[:, :kept]


def quantile_huber(error, fraction):
    """The Huber loss of quantile regression, elementwise (Dabney et al. 2018, Eq. 10 with kappa = 1).
    error: sample of the target minus quantile; fraction: that of the quantile, from 0 to 1."""
    huber = jnp.where(jnp.abs(error) <= 1, 0.5 * error**2, jnp.abs(error) - 0.5)
    return jnp.abs(fraction - (error < 0)) * huber


def tqc_critic_loss(critic, target_critic, actor, alpha, batch, noise, gamma, num_dropped):
    """Quantile regression of each critic towards the truncated mixture of the target critics, added (section 3 of the
    paper), and the metrics."""
    next_action, next_logprob = sample_action(actor, batch.next_obs, noise)
    mixture = truncate(quantiles_of(target_critic, batch.next_obs, next_action), num_dropped)
    next_value = mixture - alpha * next_logprob[:, None]
    target = batch.reward[:, None] + gamma * (1 - batch.done[:, None]) * next_value
    quantiles = quantiles_of(critic, batch.obs, batch.action)
    num_quantiles = quantiles.shape[2]
    fraction = (jnp.arange(num_quantiles) + 0.5) / num_quantiles  # of each quantile
    error = target[:, None, :] - quantiles[..., None]  # (num_critics, batch_size, num_quantiles, samples of the target)
    loss = quantile_huber(error, fraction[:, None]).mean((1, 2, 3)).sum()
    return loss, {"losses/qf_values": quantiles.mean(), "losses/qf_loss": loss}


def tqc_actor_loss(actor, critic, alpha, batch, noise):
    """Eq. 9 with the mean over all quantiles of all critics, the metrics, and the entropy of the policy."""
    action, logprob = sample_action(actor, batch.obs, noise)
    value = quantiles_of(critic, batch.obs, action).mean((0, 2))
    assert value.shape == logprob.shape
    loss = (alpha * logprob - value).mean()
    entropy = -logprob.mean()
    return loss, ({"losses/actor_loss": loss, "losses/entropy": entropy}, entropy)


def alpha_loss(log_alpha, entropy, target_entropy):
    """Eq. 18, and the metrics."""
    loss = jnp.exp(log_alpha) * (entropy - target_entropy)
    return loss, {"losses/alpha_loss": loss}


def begin(key, setup):
    """The initial training state of one seed."""
    args, envs = setup.args, setup.envs
    actor_key, critic_key, envs_key, key = jax.random.split(key, 4)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    actor = init_mlp(actor_key, obs_dim, 256, 256, 2 * action_dim)
    critic = init_critics(critic_key, obs_dim, action_dim, args.num_critics, args.num_quantiles)
    log_alpha = jnp.log(1.0 if args.autotune else max(args.alpha, 1e-30))  # 0 has no logarithm
    optimizers = setup.actor_optimizer, setup.critic_optimizer, setup.alpha_optimizer
    states = (optimizer.init(x) for optimizer, x in zip(optimizers, (actor, critic, log_alpha), strict=True))
    learner = Learner(actor, critic, critic, log_alpha, *states)
    env_state, obs = envs.reset(envs_key)
    transition = Batch(jnp.zeros(obs_dim), jnp.zeros(action_dim), jnp.float32(0), jnp.float32(0), jnp.zeros(obs_dim))
    capacity = min(args.buffer_size, args.total_timesteps)
    replay = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), transition)
    return Training(learner, replay, env_state, obs, key, jnp.int32(0))


def insert(replay, batch, inserted):
    """Write transitions over the oldest ones: a Batch of arrays, (num_envs, ...) or (num_steps, num_envs, ...).
    `inserted`: transitions ever inserted before."""
    index = (inserted + jnp.arange(batch.reward.size)) % len(replay.reward)
    return jax.tree.map(lambda x, new: x.at[index].set(new.reshape(-1, *x.shape[1:]).astype(x.dtype)), replay, batch)


def sample(replay, key, size, batch_size):
    """A Batch of transitions drawn uniformly with replacement from the first `size`."""
    index = jax.random.randint(key, (batch_size,), 0, size)
    return jax.tree.map(lambda x: x[index], replay)


def learn_tqc(update, learner, learned, batch, noise, setup):
    """One update with a batch; `learned` are the sums of the metrics of the critics and of the actor, each with the
    number of gradient steps. Standard normal noise (1 + policy_frequency, batch_size, action_dim)."""
    args, (of_critic, of_actor) = setup.args, learned

    # "update the Q-function parameters" (Algorithm 1)
    inputs = learner.target_critic, learner.actor, jnp.exp(learner.log_alpha), batch, noise[0]
    inputs += (args.gamma, args.num_dropped)
    gradients, metrics = jax.grad(tqc_critic_loss, has_aux=True)(learner.critic, *inputs)
    updates, optimizer_state = setup.critic_optimizer.update(gradients, learner.critic_optimizer_state)
    critic = optax.apply_updates(learner.critic, updates)
    learner = learner._replace(critic=critic, critic_optimizer_state=optimizer_state)
    of_critic = jax.tree.map(jnp.add, of_critic, (metrics, 1))

    # "update policy weights", "adjust temperature": delayed, with every n-th update, then n steps at once
    def actor_step(k, carry):
        learner, of_actor = carry
        inputs = learner.critic, jnp.exp(learner.log_alpha), batch, noise[1 + k]
        gradients, (metrics, entropy) = jax.grad(tqc_actor_loss, has_aux=True)(learner.actor, *inputs)
        updates, optimizer_state = setup.actor_optimizer.update(gradients, learner.actor_optimizer_state)
        actor = optax.apply_updates(learner.actor, updates)
        learner = learner._replace(actor=actor, actor_optimizer_state=optimizer_state)
        if args.autotune:
            inputs = entropy, -batch.action.shape[1]
            gradient, alpha_metrics = jax.grad(alpha_loss, has_aux=True)(learner.log_alpha, *inputs)
            updates, optimizer_state = setup.alpha_optimizer.update(gradient, learner.alpha_optimizer_state)
            log_alpha = optax.apply_updates(learner.log_alpha, updates)
            learner = learner._replace(log_alpha=log_alpha, alpha_optimizer_state=optimizer_state)
            metrics |= alpha_metrics
        return learner, jax.tree.map(jnp.add, of_actor, (metrics, 1))

    steps = jnp.where(update % args.policy_frequency == 0, args.policy_frequency, 0)
    learner, of_actor = jax.lax.fori_loop(0, steps, actor_step, (learner, of_actor))

    # "update target network weights"
    tau = jnp.where(update % args.target_network_frequency == 0, args.tau, 0)
    target_critic = optax.incremental_update(learner.critic, learner.target_critic, tau)
    return learner._replace(target_critic=target_critic), (of_critic, of_actor)


def due_updates(args, global_step, enough):
    """Number of the first critic update due in the iteration that ends at `global_step`, and the one after the last: in
    total utd_ratio for each environment step after learning_starts. None where the buffer does not hold `enough`; they
    are not made up for."""
    steps = jnp.stack([global_step - args.num_envs, global_step])
    first, last = jnp.floor(args.utd_ratio * jnp.maximum(0, steps - args.learning_starts)).astype(int)
    return first, jnp.where(enough, last, first)


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs = setup.args, setup.envs
    random_key, noise_key, step_key, sample_key, key = jax.random.split(training.key, 5)
    space, shape = envs.single_action_space, (args.num_envs, envs.single_action_space.shape[0])
    before, global_step = training.iteration * args.num_envs, (training.iteration + 1) * args.num_envs

    # ---- 1. act: one step in every environment
    random = jax.random.uniform(random_key, shape, minval=-1, maxval=1)
    noise = jax.random.normal(noise_key, shape)
    action = jnp.where(global_step <= args.learning_starts, random, act(training.learner.actor, training.obs, noise))
    env_state, step = envs.step(step_key, training.env_state, scale_action(action, space.low, space.high))

    # ---- 2. store: a time limit is not the end of the task
    batch = Batch(training.obs, action, step.reward, step.terminated, step.final_obs)
    replay = insert(training.replay, batch, before)

    # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
    size = jnp.minimum(global_step, len(replay.reward))  # transitions in the buffer

    def update(i, carry):
        batch_key, noise_key = jax.random.split(jax.random.fold_in(sample_key, i))
        batch = sample(replay, batch_key, size, args.batch_size)
        noise = jax.random.normal(noise_key, (1 + args.policy_frequency, *batch.action.shape))
        return learn_tqc(i, *carry, batch, noise, setup)

    first, last = due_updates(args, global_step, size >= args.batch_size)
    critics = ("losses/qf_values", "losses/qf_loss")
    actor = ("losses/actor_loss", "losses/entropy", *(["losses/alpha_loss"] if args.autotune else []))
    nothing = (dict.fromkeys(critics, 0.0), 0), (dict.fromkeys(actor, 0.0), 0)
    learner, learned = jax.lax.fori_loop(first, last, update, (training.learner, nothing))

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    training = Training(learner, replay, env_state, step.obs, key, training.iteration + 1)
    return training, (step.reward, step.terminated | step.truncated, learned, jnp.exp(learner.log_alpha))


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # written in JAX if we have this id, else EnvPool's
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    run.require(
        args.num_dropped < args.num_quantiles,
        f"--num-dropped {args.num_dropped} must be less than --num-quantiles {args.num_quantiles}",
    )

    setup = Setup(args, envs, optax.adam(args.policy_lr), optax.adam(args.q_lr), optax.adam(args.q_lr))
    training, start = run.resume(lambda key: begin(key, setup), model="learner.actor", envs=("env_state", "obs"))
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=max(1, 500 // args.num_envs))

    for iterations in run.loop(start, num_iterations, args.num_envs):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * args.num_envs
        training, (reward, done, (of_critic, of_actor), alpha) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.learned(*of_critic)
        run.learned(*of_actor)
        run.log(global_step, {"losses/alpha": alpha[:, -1]})
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env, sample=drawn)  # a last evaluation; `solo play` takes this policy
