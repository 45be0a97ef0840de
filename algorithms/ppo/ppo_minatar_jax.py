# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax,gymnax]>=0.1", "gymnasium>=1.2,<1.4", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""Proximal policy optimisation (PPO) on MinAtar's games: a convolutional network; in JAX, the whole training compiled.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
          MinAtar: Young & Tian 2019, https://arxiv.org/abs/1903.03176
Run       solo train ppo_minatar_jax --env-id Asterix-MinAtar
Spaces    vector -> discrete, with MinAtar's planes
Differs   from ppo_jax.py: one convolutional network over the 10 x 10 planes, which come as one vector, gives logits and
          value; 64 environments, learning rate 0.001
Not for   Atari games: ppo_atari_envpool_jax.py; other images; continuous actions: ppo_continuous_action_jax.py
Details   docs/algorithms/ppo_minatar_jax.md
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import optax

from solorl import RunArgs, Runs, conv2d, parse


@dataclass
class Args(RunArgs):
    env_kind = "jax"  # ids of environments written in JAX, or known to both EnvPool and Gymnasium
    env_id: str = "Asterix-MinAtar"  # or Breakout-, Freeway-, SpaceInvaders-MinAtar: games of gymnax
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 10_000_000  # environment steps, summed over environments
    num_envs: int = 64  # environments stepped in parallel
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 1e-3  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = True  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.01  # c2 of Eq. 9
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    num_iterations: int


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    params: dict  # of the network
    optimizer_state: Any
    env_state: Any
    obs: jax.Array  # (num_envs, obs_dim), the current observations
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: jax.Array  # (batch_size, obs_dim)
    action: jax.Array  # (batch_size,), like all that follow
    logprob: jax.Array
    value: jax.Array
    advantage: jax.Array
    returns: jax.Array


def make_env(env_id, **kwargs):
    """One environment, for evaluation."""
    return gym.make(env_id, **kwargs)


def orthogonal(key, shape, gain):
    """A layer with orthogonal weights (..., fan_out) and zero biases."""
    return {"weight": jax.nn.initializers.orthogonal(gain)(key, shape), "bias": jnp.zeros(shape[-1])}


def linear(layer, x):  # (batch, fan_in) -> (batch, fan_out)
    return x @ layer["weight"] + layer["bias"]


def convolution(layer, x, stride):  # (batch, side, side, fan_in) -> (batch, new_side, new_side, fan_out)
    return conv2d(x, layer["weight"], stride) + layer["bias"]


def minatar_cnn(params, obs):
    """The network of Young & Tian's DQN up to its last layer, (batch, 100 * planes) -> (batch, 128)."""
    x = obs.reshape(len(obs), 10, 10, -1)
    x = jax.nn.relu(convolution(params["conv"], x, 1))
    return jax.nn.relu(linear(params["dense"], x.reshape(len(x), -1)))


def init_params(key, obs_dim, num_actions):
    gain = 2**0.5
    shapes = {
        "conv": ((3, 3, obs_dim // 100, 16), gain),
        "dense": ((8 * 8 * 16, 128), gain),
        "actor": ((128, num_actions), 0.01),
        "critic": ((128, 1), 1.0),
    }
    keys = jax.random.split(key, len(shapes))
    return {name: orthogonal(key, *each) for key, (name, each) in zip(keys, shapes.items(), strict=True)}


def logits_and_value(params, obs):  # (batch, obs_dim) -> logits (batch, num_actions), values (batch,)
    features = minatar_cnn(params, obs)
    return linear(params["actor"], features), linear(params["critic"], features).squeeze(1)


def evaluate_actions(params, obs, action):  # (batch, obs_dim), (batch,) -> logprobs, entropies, values: (batch,)
    logits, value = logits_and_value(params, obs)
    logprobs = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(logprobs) * logprobs).sum(1)
    return jnp.take_along_axis(logprobs, action[:, None], 1).squeeze(1), entropy, value


def act(params, obs):  # (batch, *obs_shape), as Gymnasium has them -> (batch,): the most likely actions
    return logits_and_value(params, obs)[0].argmax(1)


def sample_categorical(logits, gumbel):
    """Actions drawn from softmax(logits), and their log-probabilities. (batch, num_actions) twice -> (batch,) each."""
    action = (logits + gumbel).argmax(1)  # the Gumbel-max trick
    return action, jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1).squeeze(1)


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
    obs_dim, num_actions = setup.envs.single_observation_space.shape[0], int(setup.envs.single_action_space.n)
    params = init_params(params_key, obs_dim, num_actions)
    env_state, obs = setup.envs.reset(envs_key)
    optimizer_state = flat_adam(setup.args.learning_rate, setup.args.max_grad_norm).init(params)
    return Training(params, optimizer_state, env_state, obs, key, jnp.int32(0))


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs, num_iterations = setup
    params, batch_size = training.params, args.num_envs * args.num_steps
    action_key, steps_key, learn_key, key = jax.random.split(training.key, 4)

    # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
    def env_step(carry, drawn):
        (env_state, obs), (step_key, gumbel) = carry, drawn
        logits, value = logits_and_value(params, obs)
        action, logprob = sample_categorical(logits, gumbel)
        env_state, step = envs.step(step_key, env_state, action)
        # a time limit does not end the task: bootstrap from the value of the final observation
        timeout = step.truncated & ~step.terminated
        final_value = jax.lax.cond(
            timeout.any(),
            lambda: jnp.where(timeout, logits_and_value(params, step.final_obs)[1], 0),
            lambda: jnp.zeros_like(value),
        )
        done = step.terminated | step.truncated
        return (env_state, step.obs), (obs, action, logprob, value, final_value, step.reward, done)

    # random numbers of the whole rollout in one call: faster than a few in each step
    gumbel = jax.random.gumbel(action_key, (args.num_steps, args.num_envs, int(envs.single_action_space.n)))
    drawn = (jax.random.split(steps_key, args.num_steps), gumbel)
    (env_state, next_obs), steps = jax.lax.scan(env_step, (training.env_state, training.obs), drawn)
    obs, action, logprob, value, final_value, reward, done = steps  # (num_steps, num_envs, ...) each

    # ---- 2. credit: "compute advantage estimates"
    _, next_value = logits_and_value(params, next_obs)
    advantage = gae(reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
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

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    # metrics: (update_epochs, num_minibatches) each
    assert all(values.ndim == 2 for values in metrics.values()), "a metric of a gradient step must be one number"
    sums = {name: values.sum(where=epoch_ran[:, None]) for name, values in metrics.items()}
    count = epoch_ran.sum() * args.num_minibatches
    # advantage: returns - value
    explained_variance = 1 - rollout.advantage.var(ddof=1) / (rollout.returns.var(ddof=1) + 1e-8)
    charts = {"charts/learning_rate": jnp.float32(learning_rate), "losses/explained_variance": explained_variance}
    training = Training(params, optimizer_state, env_state, next_obs, key, training.iteration + 1)
    return training, (reward, done, sums, count, charts)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # gymnax's, stepped inside of the compiled code
    run.require_spaces(envs, obs="vector", action="discrete")
    is_minatar = args.env_id.endswith("-MinAtar")
    run.require(is_minatar, f"{args.env_id} is not a MinAtar game (Asterix-MinAtar, ...); use ppo_jax.py for others")
    batch_size = args.num_envs * args.num_steps
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches

    setup = Setup(args, envs, num_iterations)
    # model: the fields that `act` needs; envs: those that a resume restarts where EnvPool cannot be saved
    training, start = run.resume(lambda key: begin(key, setup), model="params", envs=("env_state", "obs"))
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
