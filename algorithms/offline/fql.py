# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Flow Q-learning (FQL): learns from a data set, continuous actions, vector observations.

Nothing is played but evaluations: `global_step` counts gradient steps of the critic.

Paper     Park et al. 2025, https://arxiv.org/abs/2502.02538
Run       solo train fql --dataset data/hopper-medium --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from rebrac.py: a flow imitates the data, however many modes it has; the policy turns noise into an action in
          one step, near the one into which the flow turns it; the mean of two critics counts, without a penalty.
          Evaluations have zero noise, the authors draw it
Not for   discrete actions: bc.py
Details   docs/algorithms/fql.md
"""

import copy
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
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment, for evaluation
    dataset: str = ""  # folders with recorded transitions, separated by commas (see solo record)
    total_timesteps: int = 1_000_000  # gradient steps
    batch_size: int = 256  # transitions per gradient step
    hidden_dim: int = 256  # units of a hidden layer (the paper: 512)
    num_layers: int = 3  # hidden layers of all networks (the paper: 4)
    learning_rate: float = 3e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target critics (1: hard copy), from 0 to 1
    flow_steps: int = 10  # Euler steps in which the flow turns noise into an action
    alpha: float = 10.0  # weight of the distance from the actions of the flow in the actor's loss
    normalize_q: bool = False  # divide the values in the actor's loss by their mean size


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1]
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: torch.Tensor  # (batch_size, obs_dim)


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
    """One environment, for training and for evaluation; actions in [-1, 1] if continuous and bounded."""
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


class Data:
    """Transitions in host memory: an array for each field of Batch, in their order."""

    def __init__(self, batch):
        self.arrays = batch  # a Batch of NumPy arrays (n, ...)

    def sample(self, batch_size, device):
        """A Batch of transitions drawn uniformly with replacement."""
        index = np.random.randint(len(self.arrays.reward), size=batch_size)
        return Batch(*(torch.from_numpy(array[index]).to(device) for array in self.arrays))


def gelu_mlp(*sizes, layer_norm=False):
    """Linear layers with GELU between them, and with layer normalisation after it if asked for."""
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.GELU(), nn.LayerNorm(fan_out) if layer_norm else nn.Identity()]
    return nn.Sequential(*layers[:-2])


class Flow(nn.Module):
    """The velocity at which noise becomes an action of the data, from time 0 to time 1."""

    def __init__(self, obs_dim, action_dim, hidden):
        super().__init__()
        self.net = gelu_mlp(obs_dim + action_dim + 1, *hidden, action_dim)

    def forward(self, obs, x, t):  # (batch, obs_dim), (batch, action_dim), (batch, 1) -> (batch, action_dim)
        return self.net(torch.cat([obs, x, t], 1))


class Actor(nn.Module):
    """A policy that turns noise into an action in one step; where that leaves [-1, 1], whoever uses it clips it."""

    def __init__(self, obs_dim, action_dim, hidden):
        super().__init__()
        self.net = gelu_mlp(obs_dim + action_dim, *hidden, action_dim)

    def forward(self, obs, noise):  # (batch, obs_dim), (batch, action_dim) -> (batch, action_dim)
        return self.net(torch.cat([obs, noise], 1))

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The actions of zero noise; with standard normal noise (batch, action_dim), samples of the policy."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net[0].weight.device).flatten(1)
        noise = torch.as_tensor(noise, dtype=torch.float32, device=obs.device)
        return self(obs, noise.expand(obs.shape[0], self.net[-1].out_features)).clamp(-1, 1).cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the value of an action."""

    def __init__(self, obs_dim, action_dim, hidden):
        super().__init__()
        self.q1, self.q2 = (gelu_mlp(obs_dim + action_dim, *hidden, 1, layer_norm=True) for _ in range(2))

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
        x = torch.cat([obs, action], 1)
        return self.q1(x).squeeze(1), self.q2(x).squeeze(1)


def mean_value(critic, obs, action):
    """The mean of both estimates, (batch,)."""
    q1, q2 = critic(obs, action)
    return (q1 + q2) / 2


def fql_critic_loss(critic, target_critic, actor, batch, noise, gamma):
    """The mean squared errors of both critics, added, and the metrics. The next action is the policy's."""
    with torch.no_grad():
        next_action = actor(batch.next_obs, noise).clamp(-1, 1)
        target = batch.reward + gamma * (1 - batch.done) * mean_value(target_critic, batch.next_obs, next_action)
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


def flow_loss(flow, batch, noise, t):
    """Flow matching: at a point between noise and an action of the data the velocity is the way from one to the other;
    and the metrics. noise: (batch, action_dim); t, the time in [0, 1]: (batch, 1)."""
    x = (1 - t) * noise + t * batch.action
    loss = F.mse_loss(flow(batch.obs, x, t), batch.action - noise)
    return loss, {"losses/flow_loss": loss}


@torch.no_grad()
def flow_actions(flow, obs, noise, flow_steps):
    """The actions into which the flow turns noise, both (batch, action_dim), by Euler's method."""
    x = noise
    for step in range(flow_steps):
        t = torch.full_like(x[:, :1], step / flow_steps)
        x = x + flow(obs, x, t) / flow_steps
    return x.clamp(-1, 1)


def fql_actor_loss(actor, critic, obs, noise, flow_action, alpha, normalize_q):
    """The squared distance from the actions into which the flow turns the same noise (distillation), less the mean of
    both values; with normalize_q that is divided by its mean size, a constant. And the metrics."""
    action = actor(obs, noise)
    value = mean_value(critic, obs, action.clamp(-1, 1))
    distill_loss = F.mse_loss(action, flow_action)
    size = value.abs().mean().detach() if normalize_q else 1.0
    loss = alpha * distill_loss - value.mean() / size
    return loss, {"losses/actor_loss": loss, "losses/distill_loss": distill_loss}


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
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]
    dataset = run.dataset(args.dataset, envs)  # empty for `solo play`, which needs only the policy
    envs.close()

    data = Data(transitions(dataset, obs_dim))
    sizes = (obs_dim, action_dim, [args.hidden_dim] * args.num_layers)
    actor, flow, critic = (kind(*sizes).to(run.device) for kind in (Actor, Flow, Critic))
    target_critic = copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    flow_optimizer = torch.optim.Adam(flow.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.learning_rate)
    # critic_step(*inputs): an optimiser step on fql_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(fql_critic_loss, critic, critic_optimizer)
    flow_step = run.gradient_step(flow_loss, flow, flow_optimizer)
    actor_step = run.gradient_step(fql_actor_loss, actor, actor_optimizer)
    # what a checkpoint holds
    parts = dict(actor=actor, flow=flow, critic=critic, target_critic=target_critic)
    parts |= dict(actor_optimizer=actor_optimizer, flow_optimizer=flow_optimizer, critic_optimizer=critic_optimizer)
    start = run.resume(**parts)

    for iteration in run.loop(start, args.total_timesteps):
        global_step = iteration + 1  # gradient steps of the critic

        # ---- 1. learn: the critics, from the policy's next actions
        batch = data.sample(args.batch_size, run.device)
        next_noise, flow_noise, noise = torch.randn(3, args.batch_size, action_dim, device=run.device)
        run.learned(critic_step(target_critic, actor, batch, next_noise, args.gamma))

        # the flow, which knows no values: it imitates the data
        t = torch.rand(args.batch_size, 1, device=run.device)
        run.learned(flow_step(batch, flow_noise, t))

        # the policy: near the flow, where the values are high
        flow_action = flow_actions(flow, batch.obs, noise, args.flow_steps)
        run.learned(actor_step(critic, batch.obs, noise, flow_action, args.alpha, args.normalize_q))
        soft_update(target_critic, critic, args.tau)

        # ---- 2. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    # a last evaluation; `solo play` takes these policies, of zero noise and drawn at random
    run.close(actor.act, make_env, sample=lambda obs: actor.act(obs, torch.randn(len(obs), action_dim)))
