# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Implicit Q-learning (IQL): from recorded transitions only, discrete actions, vector observations.

Nothing is played but evaluations: `global_step` counts gradient steps; in each all networks learn.

Paper     Kostrikov et al. 2021, https://arxiv.org/abs/2110.06169 ("Eq. n" below)
Run       solo train iql_discrete --dataset data/cartpole --env-id CartPole-v1
Spaces    vector -> discrete
Differs   from iql.py: the policy gives each action a probability, the critics have a value for each
Not for   continuous actions: iql.py; learning by playing: dqn.py
Details   docs/algorithms/iql_discrete.md
"""

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment, for evaluation
    dataset: str = ""  # folders with recorded transitions, separated by commas (see solo record)
    total_timesteps: int = 100_000  # gradient steps
    batch_size: int = 256  # transitions per gradient step
    learning_rate: float = 3e-4  # learning rate of Adam; the actor's is annealed by a cosine
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target critics (1: hard copy), from 0 to 1
    expectile: float = 0.7  # of action values, which V estimates (0.5: mean, towards 1: maximum), from 0 to 1
    beta: float = 3.0  # inverse temperature: how much the policy prefers better actions
    max_weight: float = 100.0  # largest weight of an action in the policy's loss; inf: do not clip, which may overflow


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size,)
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: torch.Tensor  # (batch_size, obs_dim)


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; its actions are int64 and count from 0."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete) and (space.start != 0 or space.dtype != np.int64):
        from_0 = gym.spaces.Discrete(space.n)
        env = gym.wrappers.TransformAction(env, lambda action: (action + space.start).astype(space.dtype), from_0)
    return env


def transitions(dataset, obs_dim):
    """A data set of n transitions as a Batch of NumPy arrays (n, ...)."""
    return Batch(
        obs=dataset.obs.reshape(len(dataset), obs_dim).astype(np.float32),
        action=dataset.action,
        reward=dataset.reward,
        done=dataset.terminated.astype(np.float32),
        next_obs=dataset.next_obs.reshape(len(dataset), obs_dim).astype(np.float32),
    )


class Data:
    """Transitions in host memory: an array for each field of Batch, in their order."""

    def __init__(self, batch):
        self.arrays = batch  # a Batch of NumPy arrays (n, ...)

    def sample(self, batch_size, device):
        """A Batch of transitions drawn uniformly with replacement."""
        index = np.random.randint(len(self.arrays.reward), size=batch_size)
        return Batch(*(torch.from_numpy(array[index]).to(device) for array in self.arrays))


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Standardize(nn.Module):
    """(obs - mean) / (std + 1e-3), with mean and standard deviation of a data set; 0 and 1 if it is empty."""

    def __init__(self, obs):  # NumPy (n, obs_dim)
        super().__init__()
        mean, std = np.zeros(obs.shape[1]), np.ones(obs.shape[1])
        if len(obs):
            mean, std = obs.mean(0, np.float64), obs.std(0, np.float64)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std + 1e-3, dtype=torch.float32))

    def forward(self, obs):  # (batch, obs_dim) -> (batch, obs_dim)
        return (obs - self.mean) / self.std


class Actor(nn.Module):
    """A policy: the probability of each action."""

    def __init__(self, scale, num_actions):
        super().__init__()
        self.scale, self.net = scale, mlp(len(scale.mean), 256, 256, num_actions)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, num_actions), the logits
        return self.net(self.scale(obs))

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the most probable actions
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.scale.mean.device).flatten(1)
        return self(obs).argmax(1).cpu().numpy()

    @torch.no_grad()
    def sample(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): actions drawn from the policy
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.scale.mean.device).flatten(1)
        return self(obs).softmax(1).multinomial(1).squeeze(1).cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the values of all actions."""

    def __init__(self, scale, num_actions):
        super().__init__()
        self.scale = scale
        self.q1, self.q2 = (mlp(len(scale.mean), 256, 256, num_actions) for _ in range(2))

    def forward(self, obs, action):  # (batch, obs_dim), (batch,) -> (batch,), (batch,): the values of these actions
        x, index = self.scale(obs), action[:, None]
        return self.q1(x).gather(1, index).squeeze(1), self.q2(x).gather(1, index).squeeze(1)


class Value(nn.Module):
    """The value of a state."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.net = scale, mlp(len(scale.mean), 256, 256, 1)

    def forward(self, obs):  # (batch, obs_dim) -> (batch,)
        return self.net(self.scale(obs)).squeeze(1)


def expectile_loss(difference, expectile):
    """Eq. 3 of difference = Q - V (batch,): the mean of its squares, times `expectile` where Q is above V, times
    1 - `expectile` elsewhere."""
    return (torch.where(difference > 0, expectile, 1 - expectile) * difference**2).mean()


def iql_value_loss(value, target_critic, batch, expectile):
    """Eq. 5, with the smaller value of the two target critics (section 4.3), and the metrics."""
    with torch.no_grad():
        q = torch.min(*target_critic(batch.obs, batch.action))
    v = value(batch.obs)
    assert v.shape == q.shape == batch.reward.shape
    loss = expectile_loss(q - v, expectile)
    return loss, {"losses/value_loss": loss, "losses/values": v.mean()}


def iql_critic_loss(critic, value, batch, gamma):
    """Eq. 6: the mean squared errors of both critics, added, and the metrics."""
    with torch.no_grad():
        target = batch.reward + gamma * (1 - batch.done) * value(batch.next_obs)
    q1, q2 = critic(batch.obs, batch.action)
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss1, loss2 = F.mse_loss(q1, target), F.mse_loss(q2, target)
    metrics = {
        "losses/qf1_values": q1.mean(),
        "losses/qf2_values": q2.mean(),
        "losses/qf1_loss": loss1,
        "losses/qf2_loss": loss2,
        "losses/qf_loss": (loss1 + loss2) / 2,  # half of what is minimised
    }
    return loss1 + loss2, metrics


def iql_discrete_actor_loss(actor, value, target_critic, batch, beta, max_weight):
    """The negative of Eq. 7, the log-probabilities of the actions weighted by their advantages, and the metrics."""
    with torch.no_grad():
        advantage = torch.min(*target_critic(batch.obs, batch.action)) - value(batch.obs)
        weight = (beta * advantage).exp().clamp(max=max_weight)
    logprob = actor(batch.obs).log_softmax(1).gather(1, batch.action[:, None]).squeeze(1)
    assert logprob.shape == weight.shape == batch.reward.shape
    loss = -(weight * logprob).mean()
    return loss, {"losses/actor_loss": loss, "losses/weight": weight.mean(), "losses/advantage": advantage.mean()}


def soft_update(target, online, tau):
    """Polyak averaging: target <- (1 - tau) * target + tau * online."""
    with torch.no_grad():
        for x, y in zip(target.parameters(), online.parameters(), strict=True):
            x.lerp_(y, tau)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, 1)  # for its spaces
    run.require_spaces(envs, obs="vector", action="discrete")
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)
    dataset = run.dataset(args.dataset, envs)  # none for `solo play`, which needs only the policy
    envs.close()

    data = Data(transitions(dataset, obs_dim))
    scale = Standardize(data.arrays.obs)
    actor = Actor(scale, num_actions).to(run.device)
    critic = Critic(scale, num_actions).to(run.device)
    value, target_critic = Value(scale).to(run.device), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.learning_rate)
    value_optimizer = torch.optim.Adam(value.parameters(), lr=args.learning_rate)
    # value_step(*inputs): an optimiser step on iql_value_loss(value, *inputs); returns its metrics
    value_step = run.gradient_step(iql_value_loss, value, value_optimizer)
    actor_step = run.gradient_step(iql_discrete_actor_loss, actor, actor_optimizer)
    critic_step = run.gradient_step(iql_critic_loss, critic, critic_optimizer)
    # what a checkpoint holds
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, value=value)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, value_optimizer=value_optimizer)
    start = run.resume(**parts)

    for iteration in run.loop(start, args.total_timesteps):
        global_step = iteration + 1  # a gradient step of each network

        # ---- 1. learn, all with one batch: the value of states, the policy, the value of actions (Algorithm 1)
        batch = data.sample(args.batch_size, run.device)
        run.learned(value_step(target_critic, batch, args.expectile))
        cosine = math.cos(math.pi * iteration / args.total_timesteps)
        actor_optimizer.param_groups[0]["lr"] = args.learning_rate * (1 + cosine) / 2
        run.learned(actor_step(value, target_critic, batch, args.beta, args.max_weight))
        run.learned(critic_step(value, batch, args.gamma))
        soft_update(target_critic, critic, args.tau)

        # ---- 2. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/learning_rate": actor_optimizer.param_groups[0]["lr"]})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    run.close(actor.act, make_env, sample=actor.sample)  # a last evaluation; `solo play` takes this policy
