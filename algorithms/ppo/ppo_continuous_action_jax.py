# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""Proximal policy optimisation (PPO), continuous actions, vector observations; in JAX, the whole training compiled.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
Run       solo train ppo_continuous_action_jax --env-id Pendulum-v1 --num-seeds 4
Spaces    vector -> continuous
Differs   from ppo_jax.py: the policy is a Gaussian; observations and rewards are normalised by the statistics of all
          that was seen before; settings for MuJoCo. The standard deviation of the policy is in the units of the
          actions, which the environment clips to its bounds: where those are far from 1, set --std-init
Twin      ppo_continuous_action.py
Not for   discrete actions: ppo_jax.py; image observations: ppo_image_continuous_action.py
Details   docs/algorithms/ppo_continuous_action_jax.md
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import optax
from gymnasium.wrappers import ClipAction

from solorl import RunArgs, Runs, parse


@dataclass
class Args(RunArgs):
    env_kind = "jax"  # ids of environments written in JAX, or known to both EnvPool and Gymnasium
    env_id: str = "Pendulum-v1"  # id of the environment, in JAX or EnvPool for training, in Gymnasium for evaluation
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    num_steps: int = 2048  # length of a rollout in each environment
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # epochs per rollout
    learning_rate: float = 3e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = True  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.0  # c2 of Eq. 9
    std_init: float = 1.0  # standard deviation of the policy at the start, in the units of the actions
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class RunningMeanStd(NamedTuple):
    """Mean and variance of all that was seen, by Eq. 2.1 of Chan et al. 1979; in float32, in torch in float64."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array = 0.0

    def update(self, x):  # (n, *shape)
        count = self.count + len(x)
        weight, delta = len(x) / count, x.mean(0) - self.mean
        var = self.var + weight * (x.var(0) - self.var + (1 - weight) * delta**2)
        return RunningMeanStd(self.mean + weight * delta, var, count)

    def scale(self, x):  # (n, *shape) -> (n, *shape)
        return (x / jnp.sqrt(self.var + 1e-8)).clip(-10, 10)

    def normalize(self, x):  # (n, *shape) -> (n, *shape)
        return self.scale(x - self.mean)


class Agent(NamedTuple):
    """What acting needs."""

    params: dict  # of the two networks, which take normalised observations, and log_std of the policy
    obs_normalizer: RunningMeanStd


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    num_iterations: int


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    agent: Agent
    optimizer_state: Any
    env_state: Any
    obs: jax.Array  # (num_envs, obs_dim), the current observations
    return_normalizer: RunningMeanStd
    so_far: jax.Array  # (num_envs,), discounted rewards of the running episodes
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: jax.Array  # (batch_size, obs_dim)
    action: jax.Array  # (batch_size, action_dim)
    logprob: jax.Array  # (batch_size,), like all that follow
    value: jax.Array
    advantage: jax.Array
    returns: jax.Array


def make_env(env_id, **kwargs):
    """One environment, for evaluation."""
    return ClipAction(gym.make(env_id, **kwargs))


def orthogonal_mlp(key, *sizes, gain):
    """Layers with orthogonal weights and zero biases; `gain` is that of the last layer."""
    gains = [2**0.5] * (len(sizes) - 2) + [gain]
    weights = [
        jax.nn.initializers.orthogonal(g)(k, shape)
        for g, k, shape in zip(gains, jax.random.split(key, len(gains)), pairwise(sizes), strict=True)
    ]
    return [{"weight": weight, "bias": jnp.zeros(weight.shape[1])} for weight in weights]


def tanh_mlp(layers, x):
    """The layers with tanh between them, (batch, fan_in) -> (batch, fan_out)."""
    *hidden, last = layers
    for layer in hidden:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def init_params(key, obs_dim, action_dim, std):
    actor, critic = jax.random.split(key)
    return {
        "actor": orthogonal_mlp(actor, obs_dim, 64, 64, action_dim, gain=0.01),  # the mean of a Gaussian
        "log_std": jnp.full(action_dim, math.log(std)),
        "critic": orthogonal_mlp(critic, obs_dim, 64, 64, 1, gain=1.0),
    }


def value_of(params, obs):  # (batch, obs_dim) -> (batch,)
    return tanh_mlp(params["critic"], obs).squeeze(1)


def evaluate_actions(params, obs, action):  # two (batch, width) -> log-probabilities, entropies, values, all (batch,)
    noise = (action - tanh_mlp(params["actor"], obs)) / jnp.exp(params["log_std"])
    logprobs = -0.5 * noise**2 - params["log_std"] - 0.5 * math.log(2 * math.pi)
    entropy = (params["log_std"] + 0.5 * math.log(2 * math.pi * math.e)).sum()
    return logprobs.sum(1), jnp.full(len(obs), entropy), value_of(params, obs)


def act(agent, obs):  # raw (batch, *obs_shape) -> (batch, action_dim): the mean actions
    return tanh_mlp(agent.params["actor"], agent.obs_normalizer.normalize(obs.reshape(len(obs), -1)))


def sample_gaussian(mean, log_std, noise):
    """Actions drawn from a diagonal Gaussian, and their log-probabilities. mean, noise (batch, action_dim), log_std
    (action_dim,) -> (batch, action_dim), (batch,)."""
    logprobs = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    return mean + jnp.exp(log_std) * noise, logprobs.sum(1)


def discounted_returns(reward, done, so_far, gamma):
    """Sum of the rewards of an episode up to each step, earlier ones discounted. Both (num_steps, num_envs).

    so_far (num_envs,): the same up to the step before the first, 0 where an episode begins; its new value is returned.
    """

    def forwards(so_far, step):
        reward, done = step
        returns = gamma * so_far + reward
        return returns * (1 - done), returns

    so_far, returns = jax.lax.scan(forwards, so_far, (reward, done), unroll=16)
    return returns, so_far


def gae(reward, value, done, final_value, next_value, gamma, lam):
    """Advantages by Eq. 11-12. All (num_steps, num_envs) except next_value (num_envs,).

    next_value: value of the observation after the last step. done[t]: the return ends with step t. final_value[t]: if
    a time limit ended the episode, the value of its final observation, else 0.
    """
    assert reward.shape == value.shape == done.shape == final_value.shape and next_value.shape == reward.shape[1:]
    bootstrap = (1 - done) * jnp.concatenate([value[1:], next_value[None]]) + final_value
    delta = reward + gamma * bootstrap - value  # Eq. 12

    def backwards(next_advantage, step):
        delta, done = step
        advantage = delta + gamma * lam * (1 - done) * next_advantage  # Eq. 11
        return advantage, advantage

    return jax.lax.scan(backwards, jnp.zeros_like(value[0]), (delta, done), reverse=True, unroll=16)[1]


def ppo_loss(params, batch, args):
    """The negative of Eq. 9, and the metrics."""
    logprob, entropy, value = evaluate_actions(params, batch.obs, batch.action)
    assert logprob.shape == entropy.shape == value.shape == batch.advantage.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = jnp.exp(logratio)
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    objective = jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()

    # L^VF; with --clip-vloss the larger of two errors: of the value, and of the value clipped around the old one
    error = (value - batch.returns) ** 2
    if args.clip_vloss:
        clipped_value = batch.value + (value - batch.value).clip(-args.clip_coef, args.clip_coef)
        error = jnp.maximum(error, (clipped_value - batch.returns) ** 2)
    value_loss = 0.5 * error.mean()

    loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy.mean())  # Eq. 9
    metrics = {
        "losses/value_loss": value_loss,
        "losses/policy_loss": -objective,
        "losses/entropy": entropy.mean(),
        "losses/old_approx_kl": -logratio.mean(),
        "losses/approx_kl": (ratio - 1 - logratio).mean(),  # k3 of http://joschu.net/blog/kl-approx.html
        "losses/clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).mean(),
    }
    return loss, metrics


def flat_adam(learning_rate, max_grad_norm):
    """Adam on clipped gradients, all of them as one vector: fewer, larger operations."""
    clip, adam = optax.clip_by_global_norm(max_grad_norm), optax.scale_by_adam(eps=1e-5)
    return optax.flatten(optax.chain(clip, adam, optax.scale_by_learning_rate(learning_rate)))


def begin(key, setup):
    """The initial training state of one seed."""
    params_key, envs_key, key = jax.random.split(key, 3)
    (obs_dim,), (action_dim,) = setup.envs.single_observation_space.shape, setup.envs.single_action_space.shape
    params = init_params(params_key, obs_dim, action_dim, setup.args.std_init)
    env_state, obs = setup.envs.reset(envs_key)
    agent = Agent(params, RunningMeanStd(jnp.zeros(obs_dim), jnp.ones(obs_dim), jnp.float32(0)))
    return_normalizer = RunningMeanStd(jnp.zeros(()), jnp.ones(()), jnp.float32(0))
    so_far = jnp.zeros(setup.envs.num_envs)
    optimizer_state = flat_adam(setup.args.learning_rate, setup.args.max_grad_norm).init(params)
    return Training(agent, optimizer_state, env_state, obs, return_normalizer, so_far, key, jnp.int32(0))


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs, num_iterations = setup
    (params, obs_normalizer), batch_size = training.agent, args.num_envs * args.num_steps
    action_key, steps_key, learn_key, key = jax.random.split(training.key, 4)

    # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
    def env_step(carry, drawn):
        (env_state, raw_obs), (step_key, noise) = carry, drawn
        obs = obs_normalizer.normalize(raw_obs)
        action, logprob = sample_gaussian(tanh_mlp(params["actor"], obs), params["log_std"], noise)
        env_state, step = envs.step(step_key, env_state, action)
        return (env_state, step.obs), (raw_obs, obs, action, logprob, value_of(params, obs), step)

    # random numbers of the whole rollout in one call: faster than a few in each step
    noise = jax.random.normal(action_key, (args.num_steps, args.num_envs, *envs.single_action_space.shape))
    drawn = (jax.random.split(steps_key, args.num_steps), noise)
    (env_state, next_obs), steps = jax.lax.scan(env_step, (training.env_state, training.obs), drawn)
    raw_obs, obs, action, logprob, value, step = steps  # (num_steps, num_envs, ...) each
    done = step.terminated | step.truncated

    # ---- 2. credit: rewards in units of the standard deviation of the returns
    returns, so_far = discounted_returns(step.reward, done, training.so_far, args.gamma)
    return_normalizer = training.return_normalizer.update(returns.reshape(batch_size))
    scaled_reward = return_normalizer.scale(step.reward)

    # "compute advantage estimates"
    # a time limit does not end the task: bootstrap from the value of the final observation
    final_obs = obs_normalizer.normalize(step.final_obs.reshape(batch_size, -1))
    final_value = value_of(params, final_obs).reshape(done.shape)
    final_value = jnp.where(step.truncated & ~step.terminated, final_value, 0)
    next_value = value_of(params, obs_normalizer.normalize(next_obs))
    advantage = gae(scaled_reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
    rollout = Batch(obs, action, logprob, value, advantage, advantage + value)
    rollout = jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), rollout)

    # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
    # not a schedule of optax, which would count gradient steps: --target-kl leaves some of them out
    learning_rate = args.learning_rate * ((1 - training.iteration / num_iterations) if args.anneal_lr else 1)
    optimizer = flat_adam(learning_rate, args.max_grad_norm)  # its state fits any learning rate

    def gradient_step(learner, index):
        params, optimizer_state = learner
        minibatch = jax.tree.map(lambda x: x[index], rollout)
        gradients, metrics = jax.grad(ppo_loss, has_aux=True)(params, minibatch, args)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return (optax.apply_updates(params, updates), optimizer_state), metrics

    def epoch(carry, key):
        learner, stopped = carry
        index = jax.random.permutation(key, batch_size).reshape(args.num_minibatches, -1)
        new_learner, metrics = jax.lax.scan(gradient_step, learner, index)
        if args.target_kl is None:
            return (new_learner, stopped), (metrics, ~stopped)
        # a scan computes all epochs: those after the one that stopped the rollout change nothing
        learner = jax.tree.map(lambda old, new: jnp.where(stopped, old, new), learner, new_learner)
        return (learner, stopped | (metrics["losses/approx_kl"].mean() > args.target_kl)), (metrics, ~stopped)

    carry = ((params, training.optimizer_state), jnp.array(False))
    keys = jax.random.split(learn_key, args.update_epochs)
    ((params, optimizer_state), _), (metrics, epoch_ran) = jax.lax.scan(epoch, carry, keys)

    # the statistics of observations change only now: learning saw the same observations as acting
    agent = Agent(params, obs_normalizer.update(raw_obs.reshape(batch_size, -1)))

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    # metrics: (update_epochs, num_minibatches) each
    assert all(values.ndim == 2 for values in metrics.values()), "a metric of a gradient step must be one number"
    sums = {name: values.sum(where=epoch_ran[:, None]) for name, values in metrics.items()}
    count = epoch_ran.sum() * args.num_minibatches
    # advantage: returns - value
    explained_variance = 1 - rollout.advantage.var(ddof=1) / (rollout.returns.var(ddof=1) + 1e-8)
    charts = {"charts/learning_rate": jnp.float32(learning_rate), "losses/explained_variance": explained_variance}
    new = (env_state, next_obs, return_normalizer, so_far, key, training.iteration + 1)
    return Training(agent, optimizer_state, *new), (step.reward, done, sums, count, charts)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # written in JAX if we have this id, else EnvPool's
    run.require_spaces(envs, obs="vector", action="continuous")
    batch_size = args.num_envs * args.num_steps
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    run.require(args.std_init > 0, f"--std-init {args.std_init} must be above 0")

    setup = Setup(args, envs, num_iterations)
    # model: the fields that `act` needs; envs: those that a resume restarts where EnvPool cannot be saved
    training, start = run.resume(lambda key: begin(key, setup), model="agent", envs=("env_state", "obs", "so_far"))
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=16)

    for iterations in run.loop(start, num_iterations, batch_size):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * batch_size
        training, (reward, done, sums, count, charts) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.learned(sums, count)
        run.log(global_step, {name: values[:, -1] for name, values in charts.items()})  # of the last iteration
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env)  # a last evaluation; `solo play` takes this policy
