# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax,mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""Implicit Q-learning (IQL): from recorded transitions only, continuous actions, vector observations; in JAX.

Nothing is played but evaluations: `global_step` counts gradient steps; in each all networks learn. All seeds learn from
one data set, which the device holds once.

Paper     Kostrikov et al. 2021, https://arxiv.org/abs/2110.06169 ("Eq. n" below)
Run       solo train iql_jax --dataset data/hopper-medium --env-id Hopper-v5 --num-seeds 4
Spaces    vector -> continuous
Differs   from sac_continuous_action_jax.py: a data set in the place of environment and replay buffer; the value of a
          state is an expectile over its recorded actions, and the policy prefers those that are better
Twin      iql.py
Not for   discrete actions: iql_discrete.py; learning by playing: sac_continuous_action_jax.py
Details   docs/algorithms/iql_jax.md
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

from solorl import RunArgs, Runs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment, for evaluation
    dataset: str = ""  # folders with recorded transitions, separated by commas (see solo record)
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 1_000_000  # gradient steps
    batch_size: int = 256  # transitions per gradient step
    learning_rate: float = 3e-4  # learning rate of Adam; the actor's is annealed by a cosine
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target critics (1: hard copy), from 0 to 1
    expectile: float = 0.7  # of action values, which V estimates (0.5: mean, towards 1: maximum), from 0 to 1
    beta: float = 3.0  # inverse temperature: how much the policy prefers better actions
    max_weight: float = 100.0  # largest weight of an action in the policy's loss; inf: do not clip, which may overflow


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    mean: np.ndarray  # (obs_dim,), of the observations of the data
    std: np.ndarray
    action_dim: int


class Batch(NamedTuple):
    """Transitions."""

    obs: jax.Array  # (batch_size, obs_dim)
    action: jax.Array  # (batch_size, action_dim), in [-1, 1]
    reward: jax.Array  # (batch_size,)
    done: jax.Array  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: jax.Array  # (batch_size, obs_dim)


class Learner(NamedTuple):
    """What gradient steps change."""

    actor: dict  # layers `net`, `log_std`; `mean` and `std` of the observations, which no loss depends on
    critic: dict  # of two, q1 and q2
    target_critic: dict
    value: list
    actor_optimizer_state: Any
    critic_optimizer_state: Any
    value_optimizer_state: Any


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    learner: Learner
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
    """One environment, for evaluation; actions in [-1, 1] if continuous and bounded."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    continuous = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
    return ScaleAction(env) if continuous and np.isfinite([space.low, space.high]).all() else env


def transitions(dataset, obs_dim):
    """A data set of n transitions as a Batch of NumPy arrays (n, ...)."""
    return Batch(
        obs=dataset.obs.reshape(len(dataset), obs_dim).astype(np.float32),
        action=dataset.action,
        reward=dataset.reward,
        done=dataset.terminated.astype(np.float32),
        next_obs=dataset.next_obs.reshape(len(dataset), obs_dim).astype(np.float32),
    )


def mean_and_std(obs):
    """The mean and the standard deviation + 1e-3 of the observations of a data set, NumPy (n, obs_dim); 0 and 1.001 if
    it is empty."""
    mean, std = (obs.mean(0, np.float64), obs.std(0, np.float64)) if len(obs) else (obs.sum(0), obs.sum(0) + 1)
    return mean.astype(np.float32), (std + 1e-3).astype(np.float32)


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


def init_params(key, mean, std, action_dim):
    """The actor, the two critics and the value."""
    actor, q1, q2, value = jax.random.split(key, 4)
    obs_dim = len(mean)
    net = init_mlp(actor, obs_dim, 256, 256, action_dim)
    critic = {name: init_mlp(k, obs_dim + action_dim, 256, 256, 1) for name, k in (("q1", q1), ("q2", q2))}
    policy = {"mean": jnp.array(mean), "std": jnp.array(std), "net": net, "log_std": jnp.zeros(action_dim)}
    return policy, critic, init_mlp(value, obs_dim, 256, 256, 1)


def standardize(actor, obs):
    """Observations as all networks see them: see mean_and_std."""
    return (obs - actor["mean"]) / actor["std"]


def gaussian(actor, obs):  # standardised (batch, obs_dim) -> (batch, action_dim), (action_dim,)
    """The means of the policy, squashed into [-1, 1] by tanh, and the logarithm of its standard deviation, the same in
    all states."""
    return jnp.tanh(mlp(actor["net"], obs)), actor["log_std"].clip(-5, 2)


def act(actor, obs, noise=0.0):  # (batch, *obs_shape) -> (batch, action_dim)
    """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy."""
    mean, log_std = gaussian(actor, standardize(actor, obs.reshape(len(obs), -1)))
    return (mean + jnp.exp(log_std) * noise).clip(-1, 1)


def drawn(actor, obs, key):  # (batch, *obs_shape) -> (batch, action_dim)
    """Samples of the policy."""
    return act(actor, obs, jax.random.normal(key, act(actor, obs).shape))


def q_value(critic, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,)
    return mlp(critic, jnp.concatenate([obs, action], 1)).squeeze(1)


def q_pair(critic, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
    return q_value(critic["q1"], obs, action), q_value(critic["q2"], obs, action)


def v_value(value, obs):  # (batch, obs_dim) -> (batch,)
    return mlp(value, obs).squeeze(1)


def expectile_loss(difference, expectile):
    """Eq. 3 of difference = Q - V (batch,): the mean of its squares, times `expectile` where Q is above V, times
    1 - `expectile` elsewhere."""
    return (jnp.where(difference > 0, expectile, 1 - expectile) * difference**2).mean()


def iql_value_loss(value, target_critic, batch, expectile):
    """Eq. 5, with the smaller value of the two target critics (section 4.3), and the metrics."""
    q = jnp.minimum(*q_pair(target_critic, batch.obs, batch.action))
    v = v_value(value, batch.obs)
    assert v.shape == q.shape == batch.reward.shape
    loss = expectile_loss(q - v, expectile)
    return loss, {"losses/value_loss": loss, "losses/values": v.mean()}


def iql_critic_loss(critic, value, batch, gamma):
    """Eq. 6: the mean squared errors of both critics, added, and the metrics."""
    target = batch.reward + gamma * (1 - batch.done) * v_value(value, batch.next_obs)
    q1, q2 = q_pair(critic, batch.obs, batch.action)
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss1, loss2 = ((q1 - target) ** 2).mean(), ((q2 - target) ** 2).mean()
    metrics = {
        "losses/qf1_values": q1.mean(),
        "losses/qf2_values": q2.mean(),
        "losses/qf1_loss": loss1,
        "losses/qf2_loss": loss2,
        "losses/qf_loss": (loss1 + loss2) / 2,  # half of what is minimised
    }
    return loss1 + loss2, metrics


def iql_actor_loss(actor, value, target_critic, batch, beta, max_weight):
    """The negative of Eq. 7, the log-probabilities of the actions weighted by their advantages, and the metrics."""
    advantage = jnp.minimum(*q_pair(target_critic, batch.obs, batch.action)) - v_value(value, batch.obs)
    weight = jnp.minimum(jnp.exp(beta * advantage), max_weight)
    mean, log_std = gaussian(actor, batch.obs)
    squares = ((batch.action - mean) * jnp.exp(-log_std)) ** 2
    logprob = (-0.5 * squares - log_std - 0.5 * math.log(2 * math.pi)).sum(1)
    assert logprob.shape == weight.shape == batch.reward.shape
    loss = -(weight * logprob).mean()
    return loss, {"losses/actor_loss": loss, "losses/weight": weight.mean(), "losses/advantage": advantage.mean()}


def begin(key, setup):
    """The initial training state of one seed."""
    params_key, key = jax.random.split(key)
    actor, critic, value = init_params(params_key, setup.mean, setup.std, setup.action_dim)
    states = (optax.adam(setup.args.learning_rate).init(params) for params in (actor, critic, value))
    return Training(Learner(actor, critic, critic, value, *states), key, jnp.int32(0))


def sample(replay, key, size, batch_size):
    """A Batch of transitions drawn uniformly with replacement from the first `size`."""
    index = jax.random.randint(key, (batch_size,), 0, size)
    return jax.tree.map(lambda x: x[index], replay)


def adam_step(loss_of, params, optimizer_state, learning_rate, *inputs):
    """One step of Adam down the gradient of the loss of (params, *inputs): what has changed, and the metrics."""
    gradients, metrics = jax.grad(loss_of, has_aux=True)(params, *inputs)
    updates, optimizer_state = optax.adam(learning_rate).update(gradients, optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state, metrics


def learn_iql(learner, batch, learning_rate, args):
    """One gradient step of each network with a batch, and the metrics; `learning_rate` is that of the actor."""
    actor, critic, target, value, actor_state, critic_state, value_state = learner
    seen = batch._replace(obs=standardize(actor, batch.obs), next_obs=standardize(actor, batch.next_obs))
    step = partial(adam_step, iql_value_loss, value, value_state, args.learning_rate)
    value, value_state, of_value = step(target, seen, args.expectile)
    step = partial(adam_step, iql_actor_loss, actor, actor_state, learning_rate)
    actor, actor_state, of_actor = step(value, target, seen, args.beta, args.max_weight)
    step = partial(adam_step, iql_critic_loss, critic, critic_state, args.learning_rate)
    critic, critic_state, of_critic = step(value, seen, args.gamma)
    target = optax.incremental_update(critic, target, args.tau)
    learner = Learner(actor, critic, target, value, actor_state, critic_state, value_state)
    return learner, of_value | of_actor | of_critic


def train_iteration(training, data, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, (batch_key, key) = setup.args, jax.random.split(training.key)

    # ---- 1. learn, all with one batch: the value of states, the policy, the value of actions (Algorithm 1)
    batch = sample(data, batch_key, len(data.reward), args.batch_size)
    learning_rate = args.learning_rate * (1 + jnp.cos(math.pi * training.iteration / args.total_timesteps)) / 2
    learner, metrics = learn_iql(training.learner, batch, learning_rate, args)

    # ---- 2. report
    return Training(learner, key, training.iteration + 1), (metrics, learning_rate)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.vector_env(make_env, args.env_id, 1)  # for its spaces
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    dataset = run.dataset(args.dataset, envs)  # none for `solo play`, which needs only the policy
    envs.close()

    data = transitions(dataset, int(np.prod(envs.single_observation_space.shape)))
    setup = Setup(args, *mean_and_std(data.obs), space.shape[0])
    data = jax.tree.map(jnp.asarray, data)  # on the device, once for all seeds
    training, start = run.resume(lambda key: begin(key, setup), model="learner.actor")
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations)
    train = run.compile(lambda training, data: train_iteration(training, data, setup), 500, data)

    for iterations in run.loop(start, args.total_timesteps, 1):  # ranges of at most 500, as in run.compile
        global_step = iterations.stop  # gradient steps of each network
        training, (metrics, learning_rate) = train(training, iterations)
        run.learned(metrics, np.ones_like(learning_rate))  # each iteration has one of each
        run.log(global_step, {"charts/learning_rate": learning_rate[:, -1]})
        run.evaluate(global_step, act, make_env)
        run.save(global_step, training)
    run.close(act, make_env, sample=drawn)  # a last evaluation; `solo play` takes this policy
