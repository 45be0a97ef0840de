# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""BasicAC: DDPG with noise on the target action and the Huber loss, continuous actions, vector observations.

Paper     ElegantRL 2020, https://github.com/AI4Finance-Foundation/ElegantRL (AgentBasicAC; there is no paper)
          DDPG: Lillicrap et al. 2015, https://arxiv.org/abs/1509.02971 ("Eq. n" below)
Run       solo train basic_ac --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from ddpg_continuous_action.py: noise on the target action; Huber loss; the targets follow at each gradient
          step; less exploration noise; the batch grows with the buffer
Not for   discrete actions: sac_discrete.py
Details   docs/algorithms/basic_ac.md
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
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 25_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    growing_batch: bool = True  # let the batch grow with the filled part of the buffer, up to twice its size
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    learning_rate: float = 3e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 1  # critic updates per actor update (delayed updates)
    exploration_noise: float = 0.05  # standard deviation of the noise on actions
    policy_noise: float = 0.1  # standard deviation of the noise on target actions
    noise_clip: float = 0.5  # largest noise on target actions; inf: do not clip


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


class Replay:
    """The last `capacity` transitions, in host memory: an array for each field of Batch, in their order."""

    def __init__(self, capacity, obs_dim, action_space):
        self.arrays = {
            "obs": np.zeros((capacity, obs_dim), np.float32),
            "action": np.zeros((capacity, *action_space.shape), action_space.dtype),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "next_obs": np.zeros((capacity, obs_dim), np.float32),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: transitions ever inserted

    def add(self, batch):
        """Write transitions over the oldest: a Batch of NumPy arrays, (num_envs, ...) or (num_steps, num_envs, ...)."""
        index = (self.inserted + np.arange(batch.reward.size)) % self.capacity
        for array, rows in zip(self.arrays.values(), batch, strict=True):
            array[index] = rows.reshape(len(index), *array.shape[1:])
        self.inserted += len(index)

    def sample(self, batch_size, device):
        """A Batch of transitions drawn uniformly with replacement."""
        index = np.random.randint(min(self.inserted, self.capacity), size=batch_size)
        return Batch(*(torch.from_numpy(array[index]).to(device) for array in self.arrays.values()))


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Actor(nn.Module):
    """A deterministic policy; actions in [-1, 1]."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.net = mlp(obs_dim, 256, 256, action_dim)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, action_dim)
        return self.net(obs).tanh()

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The policy's actions with `noise` (batch, action_dim) added (Eq. 7)."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net[0].weight.device).flatten(1)
        return (self(obs).cpu().numpy() + noise).clip(-1, 1)


class Critic(nn.Module):
    """An estimate of the value of an action."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.q = mlp(obs_dim + action_dim, 256, 256, 1)

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,)
        return self.q(torch.cat([obs, action], 1)).squeeze(1)


def smoothed(action, noise, noise_clip):
    """Target actions with clipped noise, both (batch, action_dim), kept within [-1, 1]."""
    return (action + noise.clamp(-noise_clip, noise_clip)).clamp(-1, 1)


def basic_critic_loss(critic, target_critic, target_actor, batch, noise, noise_clip, gamma):
    """Eq. 4 with the Huber loss and noise on the target action, and the metrics."""
    with torch.no_grad():
        next_action = smoothed(target_actor(batch.next_obs), noise, noise_clip)
        next_value = target_critic(batch.next_obs, next_action)
        target = batch.reward + gamma * (1 - batch.done) * next_value  # Eq. 5
    q = critic(batch.obs, batch.action)
    assert q.shape == target.shape == batch.reward.shape
    loss = F.smooth_l1_loss(q, target)
    return loss, {"losses/qf1_values": q.mean(), "losses/qf1_loss": loss}


def ddpg_actor_loss(actor, critic, batch):
    """The negative of the value that Eq. 6 ascends, and the metrics."""
    loss = -critic(batch.obs, actor(batch.obs)).mean()
    return loss, {"losses/actor_loss": loss}


def soft_update(target, online, tau):
    """Polyak averaging: target <- (1 - tau) * target + tau * online."""
    with torch.no_grad():
        for x, y in zip(target.parameters(), online.parameters(), strict=True):
            x.lerp_(y, tau)


def grown(batch_size, inserted, capacity):
    """The batch size for a buffer that is filled in part: twice as large for a full one as for an empty one."""
    return int(batch_size * (1 + min(inserted / capacity, 1)))


def due_updates(args, global_step, enough):
    """The critic updates of the iteration that ends at `global_step`, as a range: utd_ratio for each environment step
    since learning_starts, counted from 0. It is empty until the buffer holds `enough`."""
    before = int(args.utd_ratio * max(0, global_step - args.num_envs - args.learning_starts))
    after = int(args.utd_ratio * max(0, global_step - args.learning_starts))
    return range(before, after if enough else before)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # whole ones; the buffer holds a batch
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]

    actor, critic = Actor(obs_dim, action_dim).to(run.device), Critic(obs_dim, action_dim).to(run.device)
    target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.learning_rate)
    # critic_step(*inputs): an optimiser step on basic_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(basic_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(ddpg_actor_loss, actor, actor_optimizer)
    replay = Replay(args.buffer_size, obs_dim, space)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_actor=target_actor, target_critic=target_critic)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer)
    parts |= dict(replay=replay, envs=envs)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every environment, "the current policy and exploration noise" (Algorithm 1)
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            action = actor.act(obs, args.exploration_noise * np.random.randn(args.num_envs, action_dim))
        current_obs, reward, terminated, truncated, infos = envs.step(action)  # current_obs: for the next action
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: a time limit is not the end of the task
        next_obs = infos["next_obs"]  # what the step led to: not current_obs where an episode ended
        replay.add(Batch(obs, action, reward, terminated, next_obs))
        obs = current_obs

        # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        for update in due_updates(args, global_step, enough):
            # "update critic by minimizing the loss" (Algorithm 1)
            batch_size = args.batch_size
            if args.growing_batch:
                batch_size = grown(batch_size, replay.inserted, args.buffer_size)
            batch = replay.sample(batch_size, run.device)
            noise = args.policy_noise * torch.randn(batch_size, action_dim, device=run.device)
            metrics = critic_step(target_critic, target_actor, batch, noise, args.noise_clip, args.gamma)
            run.learned(metrics)

            # "update the actor policy using the sampled policy gradient"
            if update % args.policy_frequency == 0:
                run.learned(actor_step(critic, batch))

            # "update the target networks"
            soft_update(target_actor, actor, args.tau)
            soft_update(target_critic, critic, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
