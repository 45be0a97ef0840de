# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Behaviour cloning (BC): imitates the actions of a data set, continuous or discrete, vector observations.

Nothing is played but evaluations: `global_step` counts gradient steps.

Paper     Pomerleau 1991, https://doi.org/10.1162/neco.1991.3.1.88; --top: %BC of Chen et al. 2021,
          https://arxiv.org/abs/2106.01345 ("there" below)
Run       solo train bc --dataset data/hopper-medium --env-id Hopper-v5
Spaces    vector -> continuous, or discrete
Differs   root of its family
Not for   image observations: dqn_image.py
Details   docs/algorithms/bc.md
"""

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
    top: float = 1.0  # fraction of the episodes (there: of the steps) with the highest returns to imitate, from 0 to 1


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1]; (batch_size,) if discrete
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
    """One environment, for training and for evaluation; actions in [-1, 1] if continuous, from 0 if discrete."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete) and (space.start != 0 or space.dtype != np.int64):
        from_0 = gym.spaces.Discrete(space.n)
        return gym.wrappers.TransformAction(env, lambda action: (action + space.start).astype(space.dtype), from_0)
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


def best_episodes(dataset, top):
    """Which transitions (n,) are of the fraction `top` of the episodes, at least one, with the highest returns. Those
    that the end of the recording cut come last: with negative rewards their returns are too high."""
    returns = np.where(dataset.cut, -np.inf, dataset.returns())
    best = np.argsort(-returns, kind="stable")[: max(1, round(top * len(returns)))]
    return np.isin(dataset.episode, best)


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
    """A deterministic policy; continuous actions in [-1, 1]."""

    def __init__(self, scale, outputs, discrete):
        super().__init__()
        self.scale, self.discrete = scale, discrete
        self.net = mlp(len(scale.mean), 256, 256, outputs)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, action_dim), or logits (batch, num_actions)
        output = self.net(self.scale(obs))
        return output if self.discrete else output.tanh()

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim), or the likeliest actions (batch,)
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.scale.mean.device).flatten(1)
        action = self(obs)
        return (action.argmax(1) if self.discrete else action).cpu().numpy()


def bc_loss(actor, batch):
    """The mean squared error of continuous actions, the mean negative log-likelihood of discrete ones; the metrics."""
    output = actor(batch.obs)
    loss = F.cross_entropy(output, batch.action) if actor.discrete else F.mse_loss(output, batch.action)
    return loss, {"losses/bc_loss": loss}


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, 1)  # for its spaces
    space = envs.single_action_space
    discrete = isinstance(space, gym.spaces.Discrete)
    run.require_spaces(envs, obs="vector", action="discrete" if discrete else "bounded")
    obs_dim = int(np.prod(envs.single_observation_space.shape))
    dataset = run.dataset(args.dataset, envs)  # none for `solo play`, which needs only the policy
    envs.close()

    chosen = best_episodes(dataset, args.top)
    data = Data(Batch(*(array[chosen] for array in transitions(dataset, obs_dim))))
    outputs = int(space.n) if discrete else space.shape[0]
    actor = Actor(Standardize(data.arrays.obs), outputs, discrete).to(run.device)
    optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    # actor_step(*inputs): an optimiser step on bc_loss(actor, *inputs); returns its metrics
    actor_step = run.gradient_step(bc_loss, actor, optimizer)
    # what a checkpoint holds; start: the first iteration, 0 unless resumed
    start = run.resume(actor=actor, optimizer=optimizer)

    for iteration in run.loop(start, args.total_timesteps):
        global_step = iteration + 1  # gradient steps

        # ---- 1. learn: one gradient step
        run.learned(actor_step(data.sample(args.batch_size, run.device)))

        # ---- 2. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
