# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Soft actor-critic (SAC), discrete actions, vector observations.

Paper     Christodoulou 2019, https://arxiv.org/abs/1910.07207 ("Eq. n" below); alpha_loss: Eq. 18 of
          Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905
Run       solo train sac_discrete --env-id CartPole-v1
Spaces    vector -> discrete
Differs   from sac_continuous_action.py: a categorical policy: expectations and entropies are exact sums over actions
Not for   continuous actions: sac_continuous_action.py; Atari games: sac_atari.py; images of any size: dqn_image.py
Details   docs/algorithms/sac_discrete.md
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
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    total_timesteps: int = 500_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 64  # transitions per gradient step
    utd_ratio: float = 0.25  # critic updates per environment step (update-to-data ratio)
    policy_lr: float = 3e-4  # learning rate of the actor's Adam
    q_lr: float = 3e-4  # learning rate of the critics' Adam and of the temperature
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 1  # number of critic updates after which as many actor updates are made
    target_network_frequency: int = 1  # critic updates between target network updates
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature (else alpha): the entropy approaches the target entropy
    target_entropy_scale: float = 0.89  # target entropy, as a multiple of the uniform policy's


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
    """A categorical policy."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.net = mlp(obs_dim, 256, 256, num_actions)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, num_actions): the log-probabilities of all actions
        return self.net(obs).log_softmax(1)

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch,)
        """The most likely actions; with Gumbel noise (batch, num_actions), samples of the policy."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net[0].weight.device).flatten(1)
        noise = torch.as_tensor(noise, dtype=torch.float32, device=obs.device)
        return (self(obs) + noise).argmax(1).cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the values of all actions."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.q1, self.q2 = (mlp(obs_dim, 256, 256, num_actions) for _ in range(2))

    def forward(self, obs):  # (batch, obs_dim) -> (batch, num_actions), (batch, num_actions)
        return self.q1(obs), self.q2(obs)


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


def discrete_critic_loss(critic, target_critic, actor, alpha, batch, gamma):
    """The mean squared errors of both critics, added, and the metrics."""
    with torch.no_grad():
        next_logprob = actor(batch.next_obs)
        next_q = torch.min(*target_critic(batch.next_obs)) - alpha * next_logprob
        next_value = (next_logprob.exp() * next_q).sum(1)  # Eq. 10
        target = batch.reward + gamma * (1 - batch.done) * next_value
    q1, q2 = (q.gather(1, batch.action[:, None]).squeeze(1) for q in critic(batch.obs))
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


def discrete_actor_loss(actor, critic, alpha, batch):
    """Eq. 12, the metrics, and the entropy of the policy."""
    logprob = actor(batch.obs)
    with torch.no_grad():
        q = torch.min(*critic(batch.obs))
    assert logprob.shape == q.shape
    loss = (logprob.exp() * (alpha * logprob - q)).sum(1).mean()
    entropy = -(logprob.exp() * logprob).sum(1).mean()
    return loss, {"losses/actor_loss": loss, "losses/entropy": entropy}, entropy


def alpha_loss(temperature, entropy, target_entropy):
    """Eq. 18, and the metrics."""
    loss = temperature() * (entropy - target_entropy)
    return loss, {"losses/alpha_loss": loss}


def soft_update(target, online, tau):
    """Polyak averaging: target <- (1 - tau) * target + tau * online."""
    with torch.no_grad():
        for x, y in zip(target.parameters(), online.parameters(), strict=True):
            x.lerp_(y, tau)


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
    run.require_spaces(envs, obs="vector", action="discrete")
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)
    target_entropy = args.target_entropy_scale * math.log(num_actions)

    actor, critic = Actor(obs_dim, num_actions).to(run.device), Critic(obs_dim, num_actions).to(run.device)
    target_critic = copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.q_lr)
    # critic_step(*inputs): an optimiser step on discrete_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(discrete_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(discrete_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    replay = Replay(args.buffer_size, obs_dim, envs.single_action_space)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, temperature=temperature)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    parts |= dict(replay=replay, envs=envs)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every environment
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            action = actor.act(obs, np.random.gumbel(size=(args.num_envs, num_actions)))
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
            # "update the Q-function parameters" (Algorithm 1)
            batch, alpha = replay.sample(args.batch_size, run.device), temperature().detach()
            metrics = critic_step(target_critic, actor, alpha, batch, args.gamma)
            run.learned(metrics)

            # "update policy weights": delayed, with every n-th update (n: policy_frequency), then n steps at once
            if update % args.policy_frequency == 0:
                for _ in range(args.policy_frequency):
                    metrics, entropy = actor_step(critic, temperature().detach(), batch)
                    run.learned(metrics)
                    if args.autotune:  # "adjust temperature", by the entropy of the policy before the actor's step
                        run.learned(alpha_step(entropy, target_entropy))

            # "update target network weights"
            if update % args.target_network_frequency == 0:
                soft_update(target_critic, critic, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"losses/alpha": temperature().detach()})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
