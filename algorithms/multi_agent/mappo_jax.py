# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax,pettingzoo]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""Multi-agent proximal policy optimisation (MAPPO): discrete actions, a critic that sees the whole game; in JAX.

Paper     Yu et al. 2021, https://arxiv.org/abs/2103.01955; PPO: Schulman et al. 2017, https://arxiv.org/abs/1707.06347
          ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438; PopArt: van Hasselt et al. 2016,
          https://arxiv.org/abs/1602.07714
Run       solo train mappo_jax --env-id team/simple_spread_v3 --num-seeds 4
Spaces    vector -> discrete, of each agent
Differs   from ppo_jax.py: all agents of a game act and learn with the same weights, the actor from the agent's own
          observation, the critic from the central state, both from who the agent is; by default from the rewards of
          all; action masks; values are normalised by statistics of the returns
Twin      mappo.py
Not for   one agent: ppo_jax.py; other games: mappo.py; observations that need memory: mappo_rnn.py; continuous actions:
          maddpg.py
Details   docs/algorithms/mappo_jax.md
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
    env_kind = "agents-jax"  # --env-id is a game of several agents written in JAX
    env_id: str = "team/simple_spread_v3"  # id of the game
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 2_000_000  # environment steps, summed over environments
    num_envs: int = 128  # environments stepped in parallel
    num_steps: int = 32  # length of a rollout in each environment
    common_reward: bool = True  # every agent learns from the sum of all rewards, until it leaves
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 10  # epochs per rollout
    learning_rate: float = 2e-3  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    norm_rate: float = 0.1  # smallest weight of a rollout in the statistics of returns (0: all are equal), from 0 to 1
    max_grad_norm: float = 10.0  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.95  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = False  # also clip how far a value moves from the old one, by clip_coef, as the paper does
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

    params: dict  # of the two networks, and the statistics of the returns
    optimizer_state: Any
    env_state: Any
    obs: jax.Array  # (num_envs, num_agents, obs_dim), the current observations
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


class Batch(NamedTuple):
    """A rollout, or a minibatch of it: a row is one step of one agent."""

    obs: jax.Array  # (batch_size, obs_dim), with who the agent is
    state: jax.Array  # (batch_size, state_dim), with who the agent is
    mask: jax.Array | None  # (batch_size, num_actions): whether an action is allowed; None: all are
    action: jax.Array  # (batch_size,), like all that follow
    logprob: jax.Array
    value: jax.Array
    advantage: jax.Array
    returns: jax.Array


def make_env(env_id, **kwargs):
    """One game, for evaluation."""
    return gym.make(env_id, **kwargs)


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


def with_agent_id(obs):
    """(..., num_agents, obs_dim) -> (..., num_agents, obs_dim + num_agents): each agent sees who it is."""
    num_agents = obs.shape[-2]
    return jnp.concatenate([obs, jnp.broadcast_to(jnp.eye(num_agents), (*obs.shape[:-1], num_agents))], -1)


def of_each_agent(state, num_agents):
    """Central states (..., dim) -> (..., num_agents, dim + num_agents): each agent sees who it is."""
    return with_agent_id(jnp.repeat(state[..., None, :], num_agents, -2))


def init_params(key, obs_dim, state_dim, num_actions):
    actor, critic = jax.random.split(key)
    return {
        "actor": orthogonal_mlp(actor, obs_dim, 64, 64, num_actions, gain=0.01),
        "critic": orthogonal_mlp(critic, state_dim, 64, 64, 1, gain=1.0),
        "returns": {"mean": jnp.zeros(()), "var": jnp.ones(()), "count": jnp.zeros(())},
    }


def units_of(params):
    """Mean and standard deviation of all returns so far, in which the critic gives values. No gradient changes them."""
    returns = jax.lax.stop_gradient(params["returns"])
    return returns["mean"], jnp.sqrt(returns["var"] + 1e-5)


def state_value(params, state):
    """V(s), of each agent, in the units of the rewards: (..., state_dim) -> (...)."""
    mean, std = units_of(params)
    return mean + std * tanh_mlp(params["critic"], state).squeeze(-1)


def count_team_returns(params, returns, rate):
    """Take returns (n,) into the statistics, and change the last layer so that no value changes (PopArt)."""
    old, (mean, std) = params["returns"], units_of(params)
    count = old["count"] + 1
    weight, delta = jnp.maximum(1 / count, rate), returns.mean() - mean
    var = old["var"] + weight * (returns.var() - old["var"] + (1 - weight) * delta**2)
    params = params | {"returns": {"mean": mean + weight * delta, "var": var, "count": count}}
    new_mean, new_std = units_of(params)
    *hidden, last = params["critic"]
    last = {"weight": last["weight"] * std / new_std, "bias": (mean + std * last["bias"] - new_mean) / new_std}
    return params | {"critic": [*hidden, last]}


def allowed_logits(logits, mask):
    """The logits, those of actions that are not allowed so low that softmax gives 0. (..., num_actions) twice; mask
    None: all are allowed."""
    return logits if mask is None else jnp.where(mask, logits, jnp.finfo(logits.dtype).min)  # finite, as its gradient


def evaluate_actions(params, batch):  # -> log-probabilities, entropies, values: (batch,)
    logprobs = jax.nn.log_softmax(allowed_logits(tanh_mlp(params["actor"], batch.obs), batch.mask))
    entropy = -(jnp.exp(logprobs) * logprobs).sum(1)
    logprob = jnp.take_along_axis(logprobs, batch.action[:, None], 1).squeeze(1)
    return logprob, entropy, state_value(params, batch.state)


def act(params, obs, action_mask):
    """The most likely actions that are allowed: (games, num_agents, *obs_shape) -> (games, num_agents).

    action_mask (games, num_agents, num_actions), or None: all are allowed.
    """
    obs = with_agent_id(obs.reshape(*obs.shape[:2], -1))
    return allowed_logits(tanh_mlp(params["actor"], obs), action_mask).argmax(-1)


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


def mappo_loss(params, batch, args):
    """The negative of Eq. 9, and the metrics."""
    logprob, entropy, value = evaluate_actions(params, batch)
    assert logprob.shape == entropy.shape == value.shape == batch.advantage.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = jnp.exp(logratio)
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    objective = jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()

    # L^VF of normalised values; with --clip-vloss the larger of two errors: of the value, and of the value clipped
    # around the old one
    _, std = units_of(params)
    error = ((value - batch.returns) / std) ** 2
    if args.clip_vloss:
        change = ((value - batch.value) / std).clip(-args.clip_coef, args.clip_coef)
        error = jnp.maximum(error, ((batch.value - batch.returns) / std + change) ** 2)
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
    env_state, obs = setup.envs.reset(envs_key)
    obs_dim, num_actions = with_agent_id(obs).shape[2], int(setup.envs.agent_action_space.n)
    state_dim = setup.envs.central(env_state).shape[1] + setup.envs.num_agents
    params = init_params(params_key, obs_dim, state_dim, num_actions)
    optimizer_state = flat_adam(setup.args.learning_rate, setup.args.max_grad_norm).init(params)
    return Training(params, optimizer_state, env_state, obs, key, jnp.int32(0))


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs, num_iterations = setup
    params, shape = training.params, (args.num_steps, args.num_envs, envs.num_agents)
    action_key, steps_key, learn_key, key = jax.random.split(training.key, 4)

    # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
    def env_step(carry, drawn):
        (env_state, obs), (step_key, gumbel) = carry, drawn
        obs, mask = with_agent_id(obs), envs.action_mask(env_state)
        state = of_each_agent(envs.central(env_state), envs.num_agents)
        logits = allowed_logits(tanh_mlp(params["actor"], obs), mask)
        action, logprob = jax.vmap(sample_categorical)(logits, gumbel)  # in every game
        env_state, step = envs.step(step_key, env_state, action)
        return (env_state, step.obs), (obs, state, mask, action, logprob, state_value(params, state), step)

    # random numbers of the whole rollout in one call: faster than a few in each step
    gumbel = jax.random.gumbel(action_key, (*shape, int(envs.agent_action_space.n)))
    drawn = (jax.random.split(steps_key, args.num_steps), gumbel)
    (env_state, next_obs), steps = jax.lax.scan(env_step, (training.env_state, training.obs), drawn)
    obs, state, mask, action, logprob, value, step = steps  # (num_steps, num_envs, num_agents, ...) before `step`
    done = jnp.broadcast_to((step.terminated | step.truncated)[..., None], shape)  # all agents end together

    # ---- 2. credit: "compute advantage estimates"
    # a time limit does not end the task: bootstrap from the value of the final state
    final_value = state_value(params, of_each_agent(step.final_central, envs.num_agents))
    final_value = jnp.where((step.truncated & ~step.terminated)[..., None], final_value, 0)
    next_value = state_value(params, of_each_agent(envs.central(env_state), envs.num_agents))
    reward = jnp.broadcast_to(step.reward.sum(-1, keepdims=True), shape) if args.common_reward else step.reward
    advantage = gae(reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
    rollout = Batch(obs, state, mask, action, logprob, value, advantage, advantage + value)
    rollout = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), rollout)
    params = count_team_returns(params, rollout.returns, args.norm_rate)

    # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
    # not a schedule of optax, which would count gradient steps: --target-kl leaves some of them out
    learning_rate = args.learning_rate * ((1 - training.iteration / num_iterations) if args.anneal_lr else 1)
    optimizer = flat_adam(learning_rate, args.max_grad_norm)

    def gradient_step(learner, index):
        params, optimizer_state = learner
        minibatch = jax.tree.map(lambda x: x[index], rollout)
        gradients, metrics = jax.grad(mappo_loss, has_aux=True)(params, minibatch, args)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return (optax.apply_updates(params, updates), optimizer_state), metrics

    def epoch(carry, key):
        learner, running = carry
        index = jax.random.permutation(key, len(rollout.action)).reshape(args.num_minibatches, -1)
        new_learner, metrics = jax.lax.scan(gradient_step, learner, index)
        if args.target_kl is None:
            return (new_learner, running), (metrics, running)
        # a scan computes all epochs: once `running` is False, the results of further ones are thrown away
        learner = jax.tree.map(lambda new, old: jnp.where(running, new, old), new_learner, learner)
        return (learner, running & (metrics["losses/approx_kl"].mean() <= args.target_kl)), (metrics, running)

    carry = ((params, training.optimizer_state), jnp.array(True))
    keys = jax.random.split(learn_key, args.update_epochs)
    ((params, optimizer_state), _), (metrics, epoch_ran) = jax.lax.scan(epoch, carry, keys)

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    assert all(values.ndim == 2 for values in metrics.values()), "a metric of a gradient step must be one number"
    sums = {name: values.sum(where=epoch_ran[:, None]) for name, values in metrics.items()}
    count = epoch_ran.sum() * args.num_minibatches
    # advantage: returns - value
    explained_variance = 1 - rollout.advantage.var(ddof=1) / (rollout.returns.var(ddof=1) + 1e-8)
    charts = {"charts/learning_rate": jnp.float32(learning_rate), "losses/explained_variance": explained_variance}
    training = Training(params, optimizer_state, env_state, next_obs, key, training.iteration + 1)
    return training, (step.reward, done, sums, count, charts)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # games side by side in JAX; where one ends, obs begins the next
    run.require_spaces(envs, obs="vector", action="discrete")
    batch_size = args.num_envs * args.num_steps
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches

    setup = Setup(args, envs, num_iterations)
    # model: the fields that `act` needs; envs: those that a resume restarts where games cannot be saved
    training, start = run.resume(lambda key: begin(key, setup), model="params", envs=("env_state", "obs"))
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=16)

    for iterations in run.loop(start, num_iterations, batch_size):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * batch_size
        training, (reward, done, sums, count, charts) = train(training, iterations)
        run.episodes(global_step, reward, done, per_agent=True)
        run.learned(sums, count)
        run.log(global_step, {name: values[:, -1] for name, values in charts.items()})  # of the last iteration
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env)  # a last evaluation; `solo play` takes this policy
