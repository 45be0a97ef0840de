# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax,pettingzoo]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""Parallelised Q-network with value decomposition (PQN-VDN): games of several agents, discrete actions; in JAX.

Paper     PQN: Gallici et al. 2024, https://arxiv.org/abs/2407.04811; VDN: Sunehag et al. 2017,
          https://arxiv.org/abs/1706.05296
Run       solo train pqn_vdn_jax --env-id team/simple_spread_v3 --num-seeds 4
Spaces    vector -> discrete, of each agent
Differs   from pqn_jax.py: the value of a joint action is the sum of the values of the agents' actions; one network has
          those of each agent by its own observation and who it is; one common reward, the sum of all; action masks
Not for   one agent: pqn_jax.py; other games: vdn.py; a reward of each agent's own: mappo_jax.py; continuous actions:
          maddpg.py
Details   docs/algorithms/pqn_vdn_jax.md
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
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 64  # environments stepped in parallel
    num_steps: int = 32  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 2e-3  # learning rate of RAdam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 10.0  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.95  # discount factor, from 0 to 1
    q_lambda: float = 0.65  # lambda of Q(lambda) (0: targets of one step), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.05  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.5  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    num_iterations: int


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    params: dict  # of the Q-network
    optimizer_state: Any
    env_state: Any
    obs: jax.Array  # (num_envs, num_agents, obs_dim), the current observations
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: jax.Array  # (batch_size, num_agents, obs_dim)
    action: jax.Array  # (batch_size, num_agents)
    returns: jax.Array  # (batch_size,), of the team


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


def layer_norm_mlp(params, x):
    """Linear layers with layer normalisation and ReLU between them, (batch, fan_in) -> (batch, fan_out)."""
    *hidden, last = params["linear"]
    for linear, norm in zip(hidden, params["norm"], strict=True):
        x = x @ linear["weight"] + linear["bias"]
        # variance in two passes, as in torch: standardize's own, mean(x^2) - mean(x)^2, loses digits
        x = jax.nn.standardize(x, variance=x.var(1, keepdims=True), epsilon=1e-5)
        x = jax.nn.relu(x * norm["weight"] + norm["bias"])
    return x @ last["weight"] + last["bias"]


def init_params(key, obs_dim, num_actions):
    return {
        "linear": orthogonal_mlp(key, obs_dim, 120, 84, num_actions, gain=2**0.5),
        "norm": [{"weight": jnp.ones(size), "bias": jnp.zeros(size)} for size in (120, 84)],
    }


def with_agent_id(obs):
    """(..., num_agents, obs_dim) -> (..., num_agents, obs_dim + num_agents): each agent sees who it is."""
    num_agents = obs.shape[-2]
    return jnp.concatenate([obs, jnp.broadcast_to(jnp.eye(num_agents), (*obs.shape[:-1], num_agents))], -1)


def allowed_values(values, mask):
    """The values, -inf for actions that are not allowed: (..., num_actions) twice; mask None: all are allowed."""
    return values if mask is None else jnp.where(mask, values, -jnp.inf)


def q_values(params, obs, mask=None):
    """Q_i(o_i, .) of each agent i: obs (..., num_agents, obs_dim), mask (..., num_agents, num_actions) or None ->
    (..., num_agents, num_actions)."""
    rows = with_agent_id(obs)
    values = layer_norm_mlp(params, rows.reshape(-1, rows.shape[-1]))
    return allowed_values(values.reshape(*obs.shape[:-1], -1), mask)


def act(params, obs, action_mask):
    """The greedy actions: (games, num_agents, *obs_shape) -> (games, num_agents); action_mask None: all are allowed."""
    return q_values(params, obs.reshape(*obs.shape[:2], -1), action_mask).argmax(-1)


def team_value(q):
    """The value of the best joint action, in which every agent takes its own best one: (..., num_agents, num_actions)
    -> (...)."""
    return q.max(-1).sum(-1)


def q_lambda(reward, value, done, final_value, next_value, gamma, lam):
    """Returns of Q(lambda). All (num_steps, num_envs) except next_value (num_envs,).

    value: max_a Q, by the network that acted. next_value: the same of the observation after the last step. done[t]: the
    return ends with step t. final_value[t]: if a time limit ended the episode, the value of its final observation, else
    0. A random action does not end a return (Peng's Q(lambda)).
    """
    assert reward.shape == value.shape == done.shape == final_value.shape and next_value.shape == reward.shape[1:]

    def backwards(after, step):
        (next_return, next_value), (reward, value, done, final_value) = after, step
        mixed = lam * next_return + (1 - lam) * next_value
        returns = reward + gamma * ((1 - done) * mixed + final_value)
        return (returns, value), returns

    steps = (reward, value, done, final_value)
    return jax.lax.scan(backwards, (next_value, next_value), steps, reverse=True, unroll=16)[1]


def vdn_q_lambda_loss(params, batch):
    """Mean squared error of the values of the joint actions taken, and the metrics."""
    q = jnp.take_along_axis(q_values(params, batch.obs), batch.action[..., None], -1).squeeze(-1)
    q = q.sum(-1)  # VDN: Q(s, a_1, ..., a_n) is the sum of all Q_i(o_i, a_i)
    assert q.shape == batch.returns.shape
    loss = ((q - batch.returns) ** 2).mean()
    return loss, {"losses/td_loss": loss, "losses/q_values": q.mean()}


def flat_radam(learning_rate, max_grad_norm):
    """RAdam on clipped gradients, all of them as one vector: fewer, larger operations."""
    clip, radam = optax.clip_by_global_norm(max_grad_norm), optax.scale_by_radam()
    return optax.flatten(optax.chain(clip, radam, optax.scale_by_learning_rate(learning_rate)))


def begin(key, setup):
    """The initial training state of one seed."""
    params_key, envs_key, key = jax.random.split(key, 3)
    env_state, obs = setup.envs.reset(envs_key)
    obs_dim, num_actions = with_agent_id(obs).shape[2], int(setup.envs.agent_action_space.n)
    params = init_params(params_key, obs_dim, num_actions)
    optimizer_state = flat_radam(setup.args.learning_rate, setup.args.max_grad_norm).init(params)
    return Training(params, optimizer_state, env_state, obs, key, jnp.int32(0))


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs, num_iterations = setup
    params, batch_size = training.params, args.num_envs * args.num_steps
    coin_key, action_key, step_key, learn_key, key = jax.random.split(training.key, 5)

    # ---- 1. act: each agent with probability epsilon at random, else greedily
    progress = jnp.minimum(1, training.iteration / max(1.0, args.exploration_fraction * num_iterations))
    epsilon = args.start_e + (args.end_e - args.start_e) * progress

    def env_step(carry, drawn):
        (env_state, obs), (key, greedy, noise) = carry, drawn
        mask = envs.action_mask(env_state)
        q = q_values(params, obs, mask)
        action = jnp.where(greedy, q.argmax(-1), allowed_values(noise, mask).argmax(-1))
        env_state, step = envs.step(key, env_state, action)
        return (env_state, step.obs), (obs, action, team_value(q), step)

    shape = (args.num_steps, args.num_envs, envs.num_agents)
    noise = jax.random.uniform(action_key, (*shape, int(envs.agent_action_space.n)))  # the largest: a random action
    greedy = jax.random.uniform(coin_key, shape) >= epsilon
    drawn = (jax.random.split(step_key, args.num_steps), greedy, noise)
    (env_state, next_obs), (obs, action, value, step) = jax.lax.scan(
        env_step, (training.env_state, training.obs), drawn
    )
    done = step.terminated | step.truncated  # (num_steps, num_envs), like value

    # ---- 2. credit: the returns of Q(lambda), by the network that acted
    # a time limit does not end the task: bootstrap from the value of the final observation
    final_value = team_value(q_values(params, step.final_obs, step.final_action_mask))
    final_value = jnp.where(step.truncated & ~step.terminated, final_value, 0)
    next_value = team_value(q_values(params, next_obs, envs.action_mask(env_state)))
    team_reward = step.reward.sum(-1)
    returns = q_lambda(team_reward, value, done, final_value, next_value, args.gamma, args.q_lambda)
    rollout = jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), Batch(obs, action, returns))

    # ---- 3. learn: epochs of minibatches with fixed targets; no target network, no replay
    learning_rate = args.learning_rate * ((1 - training.iteration / num_iterations) if args.anneal_lr else 1)
    optimizer = flat_radam(learning_rate, args.max_grad_norm)

    def gradient_step(learner, index):
        params, optimizer_state = learner
        minibatch = jax.tree.map(lambda x: x[index], rollout)
        gradients, metrics = jax.grad(vdn_q_lambda_loss, has_aux=True)(params, minibatch)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return (optax.apply_updates(params, updates), optimizer_state), metrics

    def epoch(learner, key):
        index = jax.random.permutation(key, batch_size).reshape(args.num_minibatches, -1)
        return jax.lax.scan(gradient_step, learner, index)

    keys = jax.random.split(learn_key, args.update_epochs)
    (params, optimizer_state), metrics = jax.lax.scan(epoch, (params, training.optimizer_state), keys)

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    sums = {name: values.sum() for name, values in metrics.items()}
    count = jnp.int32(args.update_epochs * args.num_minibatches)
    charts = {"charts/learning_rate": jnp.float32(learning_rate), "charts/epsilon": epsilon}
    training = Training(params, optimizer_state, env_state, next_obs, key, training.iteration + 1)
    done = jnp.broadcast_to(done[..., None], shape)  # of each agent, like the reward
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
    training, start = run.resume(lambda key: begin(key, setup), model="params", envs=("env_state", "obs"))
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=16)

    for iterations in run.loop(start, num_iterations, batch_size):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * batch_size
        training, (reward, done, sums, count, charts) = train(training, iterations)
        run.episodes(global_step, reward, done, per_agent=True)
        run.learned(sums, count)
        run.log(global_step, {name: values[:, -1] for name, values in charts.items()})
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env)  # a last evaluation; `solo play` takes this policy
