# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Behaviour-regularised TD3 (ReBRAC): learns from a data set, continuous actions, vector observations.

Nothing is played but evaluations: `global_step` counts gradient steps of the critic.

Paper     Tarasov et al. 2023, https://arxiv.org/abs/2305.09836; TD3: https://arxiv.org/abs/1802.09477 ("Alg. 1" below)
Run       solo train rebrac --dataset data/hopper-medium --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from td3_bc.py: a third hidden layer, layer normalisation in the critics, which also lose value for actions
          far from the next one of the data; the actor's loss has the smaller value and a distance summed over
          the entries of actions; observations as they are
Not for   discrete actions: bc.py
Details   docs/algorithms/rebrac.md
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
    batch_size: int = 1024  # transitions per gradient step
    learning_rate: float = 1e-3  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 2  # critic updates per actor update (delayed updates)
    policy_noise: float = 0.2  # standard deviation of the noise on target actions
    noise_clip: float = 0.5  # largest noise on target actions (c); inf: do not clip
    actor_bc_coef: float = 0.01  # weight of the distance from the actions of the data in the actor's loss
    critic_bc_coef: float = 0.01  # weight of the distance from the next actions of the data in the critics' target


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1]
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: torch.Tensor  # (batch_size, obs_dim)
    next_action: torch.Tensor  # (batch_size, action_dim), that of next_obs; its row's own where there is none
    known: torch.Tensor  # (batch_size,), whether the data has a next action


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


def transitions_in_turn(dataset, obs_dim):
    """A data set of n transitions as a Batch of NumPy arrays (n, ...); the last of an episode has no next action."""
    ends = dataset.terminated | dataset.truncated  # truncated: also where the recording was cut
    return Batch(
        obs=dataset.obs.reshape(len(dataset), obs_dim).astype(np.float32),
        action=dataset.action,
        reward=dataset.reward,
        done=dataset.terminated.astype(np.float32),
        next_obs=dataset.next_obs.reshape(len(dataset), obs_dim).astype(np.float32),
        next_action=np.where(ends[:, None], dataset.action, np.roll(dataset.action, -1, 0)),
        known=(~ends).astype(np.float32),
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


def normed_mlp(*sizes):
    """Linear layers with ReLU and layer normalisation between them."""
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU(), nn.LayerNorm(fan_out)]
    return nn.Sequential(*layers[:-2])


class Actor(nn.Module):
    """A deterministic policy; actions in [-1, 1]."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.net = mlp(obs_dim, 256, 256, 256, action_dim)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, action_dim)
        return self.net(obs).tanh()

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net[0].weight.device).flatten(1)
        return self(obs).cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the value of an action."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        sizes = (obs_dim + action_dim, 256, 256, 256, 1)
        self.q1, self.q2 = (normed_mlp(*sizes) for _ in range(2))

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
        x = torch.cat([obs, action], 1)
        return self.q1(x).squeeze(1), self.q2(x).squeeze(1)


def smoothed(action, noise, noise_clip):
    """Target actions with clipped noise, both (batch, action_dim), kept within [-1, 1]."""
    return (action + noise.clamp(-noise_clip, noise_clip)).clamp(-1, 1)


def rebrac_critic_loss(critic, target_critic, target_actor, batch, noise, noise_clip, gamma, bc_coef):
    """The losses of both critics (Alg. 1), added, and the metrics. The smaller value of the next state is less the
    squared distance of the target action from the next one of the data, where it has one."""
    with torch.no_grad():
        next_action = smoothed(target_actor(batch.next_obs), noise, noise_clip)
        distance = batch.known * ((next_action - batch.next_action) ** 2).sum(1)
        next_value = torch.min(*target_critic(batch.next_obs, next_action)) - bc_coef * distance
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
        "losses/next_bc_loss": distance.mean(),
    }
    return loss1 + loss2, metrics


def rebrac_actor_loss(actor, critic, batch, bc_coef):
    """bc_coef times the squared distance from the data's actions, less the smaller value of both critics divided by its
    mean size, a constant; and the metrics."""
    action = actor(batch.obs)
    value = torch.min(*critic(batch.obs, action))
    bc_loss = ((action - batch.action) ** 2).sum(1).mean()
    loss = bc_coef * bc_loss - value.mean() / value.abs().mean().detach()
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

    data = Data(transitions_in_turn(dataset, obs_dim))
    actor, critic = Actor(obs_dim, action_dim).to(run.device), Critic(obs_dim, action_dim).to(run.device)
    target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.learning_rate)
    # critic_step(*inputs): an optimiser step on rebrac_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(rebrac_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(rebrac_actor_loss, actor, actor_optimizer)
    # what a checkpoint holds
    parts = dict(actor=actor, critic=critic, target_actor=target_actor, target_critic=target_critic)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer)
    start = run.resume(**parts)

    for iteration in run.loop(start, args.total_timesteps):
        global_step = iteration + 1  # gradient steps of the critic

        # ---- 1. learn: "update critics" (Algorithm 1)
        batch = data.sample(args.batch_size, run.device)
        noise = args.policy_noise * torch.randn(args.batch_size, action_dim, device=run.device)
        inputs = (target_critic, target_actor, batch, noise, args.noise_clip, args.gamma, args.critic_bc_coef)
        run.learned(critic_step(*inputs))

        # "if t mod d then: update phi by the deterministic policy gradient, update target networks", with t from 0
        if iteration % args.policy_frequency == 0:
            run.learned(actor_step(critic, batch, args.actor_bc_coef))
            soft_update(target_actor, actor, args.tau)
            soft_update(target_critic, critic, args.tau)

        # ---- 2. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
