# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2"]
# ///
"""Proximal policy optimisation (PPO), continuous actions, vector observations; in JAX, the whole training compiled.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
Run       solo train ppo_continuous_action_jax --env-id Pendulum-v1 --num-seeds 4
Spaces    vector -> continuous
Differs   from ppo_jax.py: Gaussian policy of a given first deviation; observations and rewards are normalised
Twin      ppo_continuous_action.py
Not for   discrete actions: ppo_jax.py; image observations
Details   algorithms/ppo/README.md
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import optax
from gymnasium.wrappers import ClipAction
from jax.flatten_util import ravel_pytree

from solorl import RunArgs, Runs, parse
from solorl.envs.open import open_envs


@dataclass
class Args(RunArgs):
    env_id: str = "Pendulum-v1"  # id of the environment, in JAX or EnvPool for training, in Gymnasium for evaluation
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 1_000_000  # environment steps, summed over environments; whole iterations of them
    num_envs: int = 1  # environments stepped side by side
    num_steps: int = 2048  # steps of one rollout in each environment
    num_minibatches: int = 32  # minibatches of one epoch
    update_epochs: int = 10  # passes over one rollout
    learning_rate: float = 3e-4  # step size of Adam
    anneal_lr: bool = True  # anneal the step size linearly to 0
    max_grad_norm: float = 0.5  # largest global norm of a gradient
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of GAE: 0 is TD(0), 1 is Monte Carlo
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = True  # clip the change of the value, too
    vf_coef: float = 0.5  # c1 of Eq. 9
    ent_coef: float = 0.0  # c2 of Eq. 9
    std_init: float = 1.0  # standard deviation of the policy in the beginning
    target_kl: float | None = None  # no further epoch once an epoch's mean KL divergence is above this


class Moments(NamedTuple):
    """Mean and variance of all that was seen, by Eq. 2.1 of Chan et al. 1979."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array = 0.0

    def update(self, x):  # (n, *shape)
        count = self.count + len(x)
        share, delta = len(x) / count, x.mean(0) - self.mean
        var = self.var + share * (x.var(0) - self.var + (1 - share) * delta**2)
        return Moments(self.mean + share * delta, var, count)

    def scale(self, x):  # (n, *shape) -> (n, *shape)
        return (x / jnp.sqrt(self.var + 1e-8)).clip(-10, 10)

    def normalize(self, x):  # (n, *shape) -> (n, *shape)
        return self.scale(x - self.mean)


class Agent(NamedTuple):
    """What acting needs."""

    params: dict  # of the two networks, and the logarithm of the policy's standard deviation
    seen_obs: Moments


class Training(NamedTuple):
    """All that changes while a seed trains."""

    agent: "Agent"
    optimizer: Any  # state of Adam, for the vector of all parameters
    state: Any  # of the environments
    seen_returns: "Moments"
    so_far: jax.Array  # (num_envs,), discounted rewards of the running episodes
    obs: jax.Array  # (num_envs, obs_dim), where the environments are
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


def make_env(env_id, **kwargs):
    """One environment, for evaluation; all that is specific to the environment stands here."""
    return ClipAction(gym.make(env_id, **kwargs))


def make_envs(env_id, num_envs):
    """The same environments for training: in JAX if there are any of this kind, else in EnvPool."""
    return open_envs(env_id, num_envs)


def init_mlp(key, *sizes, gain):
    """Layers with orthogonal weights and zero biases; `gain` is that of the last layer."""
    gains = [2**0.5] * (len(sizes) - 2) + [gain]
    weights = [
        jax.nn.initializers.orthogonal(g)(k, shape)
        for g, k, shape in zip(gains, jax.random.split(key, len(gains)), pairwise(sizes), strict=True)
    ]
    return [{"weight": weight, "bias": jnp.zeros(weight.shape[1])} for weight in weights]


def mlp(layers, x):
    """The layers with tanh between them, (batch, fan_in) -> (batch, fan_out)."""
    *hidden, last = layers
    for layer in hidden:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def init_params(key, obs_dim, action_dim, std):
    actor, critic = jax.random.split(key)
    return {
        "actor": init_mlp(actor, obs_dim, 64, 64, action_dim, gain=0.01),
        "critic": init_mlp(critic, obs_dim, 64, 64, 1, gain=1.0),
        "log_std": jnp.full(action_dim, math.log(std)),
    }


def policy(params, obs, action):
    """Normalised (batch, obs_dim), (batch, action_dim) -> log-probabilities (batch,), entropies (batch,)."""
    noise = (action - mlp(params["actor"], obs)) * jnp.exp(-params["log_std"])
    entropy = (params["log_std"] + 0.5 * math.log(2 * math.pi * math.e)).sum()
    return (0.5 - 0.5 * noise**2).sum(1) - entropy, jnp.full(len(obs), entropy)


def value_of(params, obs):  # (batch, obs_dim) -> (batch,)
    return mlp(params["critic"], obs).squeeze(1)


def act(agent, obs, noise=0.0):  # (batch, obs_dim) -> (batch, action_dim)
    """The mean actions; with standard normal noise (batch, action_dim), samples of the policy."""
    params, obs = agent.params, agent.seen_obs.normalize(obs)
    return mlp(params["actor"], obs) + jnp.exp(params["log_std"]) * noise


def discounted_returns(reward, done, so_far, gamma):
    """What an episode has brought up to each step, earlier rewards discounted: both (num_steps, num_envs); so_far
    (num_envs,) is what it had brought before, 0 at its beginning. Returns what it has brought now, too."""

    def forwards(so_far, inputs):
        reward, done = inputs
        returns = gamma * so_far + reward
        return returns * (1 - done), returns

    return jax.lax.scan(forwards, so_far, (reward, done), unroll=16)


def gae(reward, value, done, final_value, next_value, gamma, lam):
    """Advantages by Eq. 11-12. All (num_steps, num_envs) but next_value (num_envs,).

    next_value: of the state behind the rollout; done[t]: the episode ended with step t; final_value[t]: then, the value
    of where it ended, 0 if the task was over.
    """
    alive = 1.0 - done
    next_values = jnp.concatenate([value[1:], next_value[None]])
    delta = reward + gamma * (alive * next_values + final_value) - value  # Eq. 12

    def backwards(next_advantage, inputs):
        delta, alive = inputs
        advantage = delta + gamma * lam * alive * next_advantage  # Eq. 11
        return advantage, advantage

    return jax.lax.scan(backwards, jnp.zeros_like(next_value), (delta, alive), reverse=True, unroll=16)[1]


def ppo_loss(params, obs, action, old_logprob, old_value, advantage, returns, args):
    """The negative of Eq. 9 on a minibatch, its three terms, and log-ratios (minibatch_size,) for the metrics.

    obs and action (minibatch_size, ...), all others (minibatch_size,).
    """
    (logprob, entropy), value = policy(params, obs, action), value_of(params, obs)
    logratio = logprob - old_logprob
    ratio = jnp.exp(logratio)
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    objective = jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()  # Eq. 7
    error = (value - returns) ** 2
    if args.clip_vloss:
        clipped_value = old_value + (value - old_value).clip(-args.clip_coef, args.clip_coef)
        error = jnp.maximum(error, (clipped_value - returns) ** 2)
    value_loss, entropy = 0.5 * error.mean(), entropy.mean()
    loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy)  # Eq. 9
    return loss, (objective, value_loss, entropy, logratio)


def approx_kl(logratio):
    """KL divergence of the old policy from the new: estimator k3 of http://joschu.net/blog/kl-approx.html."""
    return (jnp.exp(logratio) - 1 - logratio).mean()


def begin(key, envs, optimizer, args):
    """The training of one seed before its first iteration."""
    params_key, envs_key, key = jax.random.split(key, 3)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    params = init_params(params_key, obs_dim, action_dim, args.std_init)
    state, obs = envs.reset(envs_key)
    agent = Agent(params, Moments(jnp.zeros(obs_dim), jnp.ones(obs_dim), jnp.float32(0)))
    seen_returns, so_far = Moments(jnp.zeros(()), jnp.ones(()), jnp.float32(0)), jnp.zeros(envs.num_envs)
    adam = optimizer.init(ravel_pytree(params)[0])
    return Training(agent, adam, state, seen_returns, so_far, obs, key, jnp.int32(0))


def rollout(sampler, envs, state, obs, noise, fresh):
    """A step in every environment for each row of noise and of fresh states, both (num_steps, num_envs, ...): the
    environments behind it and the steps (num_steps, num_envs, ...). `sampler` maps observations, noise to actions."""

    def advance(carry, inputs):
        (state, obs), (noise, fresh) = carry, inputs
        action = sampler(obs, noise)
        state, step = envs.step(state, action, fresh)
        return (state, step.obs), (obs, action, step)

    return jax.lax.scan(advance, (state, obs), (noise, fresh))


def pack(arrays):
    """Arrays (num_steps, num_envs, ...) as columns of one matrix, so that one gather shuffles them all, and the shapes
    that `unpack` needs."""
    columns = [x.reshape(x.shape[0] * x.shape[1], -1).astype(jnp.float32) for x in arrays]
    return jnp.concatenate(columns, 1), [x.shape[2:] for x in arrays]


def unpack(rows, shapes):
    """The arrays (n, ...) whose columns stand side by side in `rows`."""
    widths = [shape[0] if shape else 1 for shape in shapes]
    begins = [sum(widths[:i]) for i in range(len(widths))]
    return [rows[:, b : b + w].reshape(-1, *s) for b, w, s in zip(begins, widths, shapes, strict=True)]


def learn_minibatch(learner, minibatch, shapes, unravel, optimizer, learning_rate, args):
    """One step of Adam on a packed minibatch: the vector of all parameters and Adam behind it; the loss's terms."""
    vector, state = learner
    loss_of = lambda vector: ppo_loss(unravel(vector), *unpack(minibatch, shapes), args)  # noqa: E731
    gradient, terms = jax.grad(loss_of, has_aux=True)(vector)
    gradient *= jnp.minimum(1, args.max_grad_norm / (jnp.linalg.norm(gradient) + 1e-6))
    direction, state = optimizer.update(gradient, state)
    return (vector - learning_rate * direction, state), terms


def iteration(training, envs, optimizer, num_iterations, args):
    """One iteration of one seed: the training behind it, and what it reports."""
    (params, seen_obs), shape = training.agent, (args.num_steps, args.num_envs)
    noise_key, start_key, shuffle_key, key = jax.random.split(training.key, 4)  # all random numbers are drawn at once

    # ---- 1. act: num_steps steps in every environment
    noise = jax.random.normal(noise_key, (*shape, *envs.single_action_space.shape))
    fresh = envs.starts(start_key, args.num_steps)  # where episodes begin anew
    sampler = partial(act, training.agent)
    (state, next_obs), (obs, action, step) = rollout(sampler, envs, training.state, training.obs, noise, fresh)
    done = step.terminated | step.truncated

    # ---- 2. credit: advantages and returns, with values and log-probabilities of the policy that acted
    so_far, returns = discounted_returns(step.reward, done, training.so_far, args.gamma)
    seen_returns = training.seen_returns.update(returns.reshape(-1))
    normal_obs, final_obs, next = (seen_obs.normalize(x) for x in (obs, step.final_obs, next_obs))
    logprob, _ = jax.vmap(partial(policy, params))(normal_obs, action)  # (num_steps, num_envs)
    value, final_value = (jax.vmap(partial(value_of, params))(x) for x in (normal_obs, final_obs))
    # a time limit is no end of the task: what would have come has the value of the final observation
    final_value = jnp.where(step.truncated, final_value, 0)
    inputs = (seen_returns.scale(step.reward), value, done, final_value, value_of(params, next))
    advantage = gae(*inputs, args.gamma, args.gae_lambda)
    batch, shapes = pack([normal_obs, action, logprob, value, advantage, advantage + value])

    # ---- 3. learn: update_epochs passes over the rollout in shuffled minibatches
    vector, unravel = ravel_pytree(params)
    learning_rate = args.learning_rate * (1 - training.iteration / num_iterations if args.anneal_lr else 1)
    learn = partial(learn_minibatch, shapes=shapes, unravel=unravel, optimizer=optimizer)
    learn = partial(learn, learning_rate=learning_rate, args=args)

    def epoch(carry, key):
        learner, go_on = carry
        minibatches = jax.random.permutation(key, batch).reshape(args.num_minibatches, -1, batch.shape[1])
        new, terms = jax.lax.scan(learn, learner, minibatches)
        if args.target_kl is None:
            return (new, go_on), (terms, go_on)
        learner = jax.tree.map(partial(jnp.where, go_on), new, learner)
        return (learner, go_on & (approx_kl(terms[-1]) <= args.target_kl)), (terms, go_on)

    learner, go_on = (vector, training.optimizer), jnp.array(True)
    ((vector, adam), _), (terms, done_epochs) = jax.lax.scan(
        epoch, (learner, go_on), jax.random.split(shuffle_key, args.update_epochs)
    )

    seen_obs = seen_obs.update(obs.reshape(-1, obs.shape[2]))  # not before: learning sees what acting saw

    # ---- 4. report: means over all minibatches
    mean = partial(jnp.mean, where=done_epochs[:, None])
    objective, value_loss, entropy, logratio = terms
    kl = jnp.exp(logratio) - 1 - logratio
    metrics = {
        "charts/learning_rate": jnp.float32(learning_rate),
        "losses/value_loss": mean(value_loss),
        "losses/policy_loss": -mean(objective),
        "losses/entropy": mean(entropy),
        "losses/old_approx_kl": -mean(logratio.mean(2)),
        "losses/approx_kl": mean(kl.mean(2)),
        "losses/clipfrac": mean((jnp.abs(jnp.exp(logratio) - 1) > args.clip_coef).mean(2)),
        "losses/explained_variance": 1 - advantage.var(ddof=1) / ((advantage + value).var(ddof=1) + 1e-8),
    }
    agent = Agent(unravel(vector), seen_obs)
    training = Training(agent, adam, state, seen_returns, so_far, next_obs, key, training.iteration + 1)
    return training, (step.reward, done, metrics)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    run.require(
        num_iterations, f"--total-timesteps {args.total_timesteps} is less than one batch of {batch_size} steps"
    )
    run.require(
        batch_size % args.num_minibatches == 0 and batch_size > args.num_minibatches,
        f"--num-minibatches {args.num_minibatches} must divide the batch of {batch_size} steps into parts of 2 or more",
    )
    run.require(args.std_init > 0, f"--std-init {args.std_init} must be above 0")
    envs = make_envs(args.env_id, args.num_envs)
    run.require_spaces(envs, obs="vector", action="continuous")

    optimizer = optax.scale_by_adam(eps=1e-5)
    lost = () if envs.saved else ("state", "obs", "so_far")  # what begins anew in a resumed run
    start = run.resume(partial(begin, envs=envs, optimizer=optimizer, args=args), model="agent", anew=lost)
    one = partial(iteration, envs=envs, optimizer=optimizer, num_iterations=num_iterations, args=args)
    train = run.compile(one, chunk=16)

    for iterations in run.loop(start, num_iterations, batch_size):
        global_step = iterations.stop * batch_size
        reward, done, metrics = train(iterations)  # (num_seeds, len(iterations), ...) each
        run.episodes(global_step, reward, done)
        run.log(global_step, {name: values.mean(1) for name, values in metrics.items()})
        run.evaluate(global_step, act, make_env)
        run.save(global_step)
    run.close(act, make_env)
