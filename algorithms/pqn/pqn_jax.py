# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""Parallelised Q-network (PQN), discrete actions, vector observations; in JAX, the whole training compiled.

Paper     Gallici et al. 2024, https://arxiv.org/abs/2407.04811
Run       solo train pqn_jax --env-id CartPole-v1 --num-seeds 4
Spaces    vector -> discrete
Differs   from ppo_jax.py: one network, with layer normalisation, gives the values of all actions; an action is random
          with probability epsilon, else greedy; returns of Q(lambda) instead of advantages; RAdam
Twin      pqn.py
Not for   continuous actions: ppo_continuous_action_jax.py; Atari games: pqn_atari_envpool.py; images: ppo_image.py
Details   docs/algorithms/pqn_jax.md
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
    num_envs: int = 4  # environments stepped in parallel
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 2.5e-4  # learning rate of RAdam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 10.0  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
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
    obs: jax.Array  # (num_envs, obs_dim), the current observations
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: jax.Array  # (batch_size, obs_dim)
    action: jax.Array  # (batch_size,)
    returns: jax.Array  # (batch_size,)


def make_env(env_id, **kwargs):
    """One environment, for evaluation."""
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


def act(params, obs):  # (batch, *obs_shape) -> (batch,): the greedy actions
    return layer_norm_mlp(params, obs.reshape(len(obs), -1)).argmax(1)


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


def q_lambda_loss(params, batch):
    """Mean squared error of the values of the actions taken, and the metrics."""
    q = jnp.take_along_axis(layer_norm_mlp(params, batch.obs), batch.action[:, None], 1).squeeze(1)
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
    obs_dim, num_actions = setup.envs.single_observation_space.shape[0], int(setup.envs.single_action_space.n)
    params = init_params(params_key, obs_dim, num_actions)
    env_state, obs = setup.envs.reset(envs_key)
    optimizer_state = flat_radam(setup.args.learning_rate, setup.args.max_grad_norm).init(params)
    return Training(params, optimizer_state, env_state, obs, key, jnp.int32(0))


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs, num_iterations = setup
    params, batch_size = training.params, args.num_envs * args.num_steps
    coin_key, action_key, step_key, learn_key, key = jax.random.split(training.key, 5)

    # ---- 1. act: with probability epsilon at random, else greedily
    progress = jnp.minimum(1, training.iteration / max(1.0, args.exploration_fraction * num_iterations))
    epsilon = args.start_e + (args.end_e - args.start_e) * progress

    def env_step(carry, drawn):
        (env_state, obs), (key, greedy, random) = carry, drawn
        q = layer_norm_mlp(params, obs)
        action = jnp.where(greedy, q.argmax(1), random)
        env_state, step = envs.step(key, env_state, action)
        return (env_state, step.obs), (obs, action, q.max(1), step)

    shape = (args.num_steps, args.num_envs)
    random = jax.random.randint(action_key, shape, 0, int(envs.single_action_space.n))
    greedy = jax.random.uniform(coin_key, shape) >= epsilon
    drawn = (jax.random.split(step_key, args.num_steps), greedy, random)
    (env_state, next_obs), (obs, action, value, step) = jax.lax.scan(
        env_step, (training.env_state, training.obs), drawn
    )
    done = step.terminated | step.truncated  # (num_steps, num_envs), like action, value and step.reward

    # ---- 2. credit: the returns of Q(lambda), by the network that acted
    # a time limit does not end the task: bootstrap from the value of the final observation
    final_value = layer_norm_mlp(params, step.final_obs.reshape(batch_size, -1)).max(1).reshape(shape)
    final_value = jnp.where(step.truncated & ~step.terminated, final_value, 0)
    next_value = layer_norm_mlp(params, next_obs).max(1)
    returns = q_lambda(step.reward, value, done, final_value, next_value, args.gamma, args.q_lambda)
    rollout = Batch(obs.reshape(batch_size, -1), action.reshape(batch_size), returns.reshape(batch_size))

    # ---- 3. learn: epochs of minibatches with fixed targets; no target network, no replay
    learning_rate = args.learning_rate * ((1 - training.iteration / num_iterations) if args.anneal_lr else 1)
    optimizer = flat_radam(learning_rate, args.max_grad_norm)  # its state fits any learning rate

    def gradient_step(learner, index):
        params, optimizer_state = learner
        minibatch = jax.tree.map(lambda x: x[index], rollout)
        gradients, metrics = jax.grad(q_lambda_loss, has_aux=True)(params, minibatch)
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
    return training, (step.reward, done, sums, count, charts)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # written in JAX if we have this id, else EnvPool's
    run.require_spaces(envs, obs="vector", action="discrete")
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
        run.log(global_step, {name: values[:, -1] for name, values in charts.items()})
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env)  # a last evaluation; `solo play` takes this policy
