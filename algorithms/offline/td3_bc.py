# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""TD3 with behaviour cloning (TD3+BC): learns from a data set, continuous actions, vector observations.

Nothing is played but evaluations: `global_step` counts gradient steps of the critic.

Paper     Fujimoto & Gu 2021, https://arxiv.org/abs/2106.06860; TD3: https://arxiv.org/abs/1802.09477 ("Alg. 1" below)
Run       solo train td3_bc --dataset data/hopper-medium --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from td3_continuous_action.py: a data set in place of acting and replay; the actor also imitates the actions
          of the data; observations are standardised
Not for   discrete actions: bc.py
Details   docs/algorithms/td3_bc.md
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
    learning_rate: float = 3e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 2  # critic updates per actor update (delayed updates)
    policy_noise: float = 0.2  # standard deviation of the noise on target actions
    noise_clip: float = 0.5  # largest noise on target actions (c); inf: do not clip
    alpha: float = 2.5  # weight of the values in the actor's loss; that of imitation is 1


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
    """A deterministic policy; actions in [-1, 1]."""

    def __init__(self, scale, action_dim):
        super().__init__()
        self.scale, self.net = scale, mlp(len(scale.mean), 256, 256, action_dim)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, action_dim)
        return self.net(self.scale(obs)).tanh()

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net[0].weight.device).flatten(1)
        return self(obs).cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the value of an action."""

    def __init__(self, scale, action_dim):
        super().__init__()
        self.scale, sizes = scale, (len(scale.mean) + action_dim, 256, 256, 1)
        self.q1, self.q2 = (mlp(*sizes) for _ in range(2))

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
        x = torch.cat([self.scale(obs), action], 1)
        return self.q1(x).squeeze(1), self.q2(x).squeeze(1)

    def first(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), the first estimate
        return self.q1(torch.cat([self.scale(obs), action], 1)).squeeze(1)


def smoothed(action, noise, noise_clip):
    """Target actions with clipped noise, both (batch, action_dim), kept within [-1, 1]."""
    return (action + noise.clamp(-noise_clip, noise_clip)).clamp(-1, 1)


def td3_critic_loss(critic, target_critic, target_actor, batch, noise, noise_clip, gamma):
    """The losses of both critics (Alg. 1), added, and the metrics."""
    with torch.no_grad():
        next_action = smoothed(target_actor(batch.next_obs), noise, noise_clip)
        next_value = torch.min(*target_critic(batch.next_obs, next_action))
        target = batch.reward + gamma * (1 - batch.done) * next_value
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


def td3_bc_actor_loss(actor, critic, batch, alpha):
    """The negative of TD3+BC's Eq. 3, and the metrics. Its Eq. 5: the weight is alpha / mean |Q|, a constant."""
    action = actor(batch.obs)
    value = critic.first(batch.obs, action)
    weight = alpha / value.abs().mean().detach()  # Eq. 5 with the policy's actions, as in the authors' code
    bc_loss = F.mse_loss(action, batch.action)
    loss = bc_loss - weight * value.mean()
    return loss, {"losses/actor_loss": loss, "losses/bc_loss": bc_loss}


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
    dataset = run.dataset(args.dataset, envs)  # none for `solo play`, which needs only the policy
    envs.close()

    data = Data(transitions(dataset, obs_dim))
    scale = Standardize(data.arrays.obs)
    actor = Actor(scale, action_dim).to(run.device)
    critic = Critic(scale, action_dim).to(run.device)
    target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.learning_rate)
    # critic_step(*inputs): an optimiser step on td3_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(td3_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(td3_bc_actor_loss, actor, actor_optimizer)
    # what a checkpoint holds
    parts = dict(actor=actor, critic=critic, target_actor=target_actor, target_critic=target_critic)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer)
    start = run.resume(**parts)

    for iteration in run.loop(start, args.total_timesteps):
        global_step = iteration + 1  # gradient steps of the critic

        # ---- 1. learn: "update critics" (Algorithm 1)
        batch = data.sample(args.batch_size, run.device)
        noise = args.policy_noise * torch.randn(args.batch_size, action_dim, device=run.device)
        metrics = critic_step(target_critic, target_actor, batch, noise, args.noise_clip, args.gamma)
        run.learned(metrics)

        # "if t mod d then: update phi by the deterministic policy gradient, update target networks", with t from 0
        if iteration % args.policy_frequency == 0:
            run.learned(actor_step(critic, batch, args.alpha))
            soft_update(target_actor, actor, args.tau)
            soft_update(target_critic, critic, args.tau)

        # ---- 2. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
