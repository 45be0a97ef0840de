# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Soft actor-critic (SAC) with LSTMs: continuous actions, vector observations that need memory.

Paper     Ni et al. 2022, https://arxiv.org/abs/2110.05038; SAC: https://arxiv.org/abs/1812.05905 ("Eq. n" below)
          burn-in: R2D2, Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX
          bias of the forget gates: Gers et al. 2000, https://doi.org/10.1162/089976600300015015
Run       solo train sac_lstm --env-id games/CueContinuous-v0
Spaces    vector -> continuous
Differs   from sac_continuous_action.py: the actor remembers what it saw and did in an episode, with an LSTM, and the
          critics with another; they learn from sequences of the replay buffer
Not for   observations that show all that matters: sac_continuous_action.py; discrete actions: ppo_lstm.py
Details   docs/algorithms/sac_lstm.md
"""

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "games/CueContinuous-v0"  # Gymnasium id of the environment
    total_timesteps: int = 30_000  # environment steps, summed over environments
    num_envs: int = 8  # environments stepped in parallel
    learning_starts: int = 1_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 32  # sequences per gradient step
    sequence_length: int = 32  # transitions of one environment in a sequence, across ends of episodes
    burn_in: int = 16  # transitions of a sequence without loss, fewer where an episode begins in it; 0: none
    utd_ratio: float = 0.125  # critic updates per environment step (update-to-data ratio)
    policy_lr: float = 3e-4  # learning rate of the actor's Adam
    q_lr: float = 1e-3  # learning rate of the critics' Adam and of the temperature (the paper: 3e-4)
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 2  # number of critic updates after which as many actor updates are made (the paper: 1)
    target_network_frequency: int = 1  # critic updates between target network updates
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature for a target entropy of -action_dim (actions in [-1, 1])


class Batch(NamedTuple):
    """Sequences of transitions."""

    obs: torch.Tensor  # (sequence_length, batch_size, obs_dim)
    action: torch.Tensor  # (sequence_length, batch_size, action_dim), in [-1, 1]
    reward: torch.Tensor  # (sequence_length, batch_size)
    done: torch.Tensor  # (sequence_length, batch_size), 0 at a time limit: that is not the end of the task
    next_obs: torch.Tensor  # (sequence_length, batch_size, obs_dim), of the same episode
    last_action: torch.Tensor  # (sequence_length, batch_size, action_dim), the one before obs
    first: torch.Tensor  # (sequence_length, batch_size): whether an episode begins with obs


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


class SequenceReplay:
    """The last `capacity` transitions, in host memory: an array for each field of Batch, in their order."""

    def __init__(self, capacity, obs_dim, action_space):
        self.arrays = {
            "obs": np.zeros((capacity, obs_dim), np.float32),
            "action": np.zeros((capacity, *action_space.shape), action_space.dtype),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "next_obs": np.zeros((capacity, obs_dim), np.float32),
            "last_action": np.zeros((capacity, *action_space.shape), action_space.dtype),
            "first": np.zeros(capacity, bool),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: transitions ever inserted

    def add(self, batch):
        """Write transitions over the oldest: a Batch of NumPy arrays, (num_envs, ...) or (num_steps, num_envs, ...)."""
        index = (self.inserted + np.arange(batch.reward.size)) % self.capacity
        for array, rows in zip(self.arrays.values(), batch, strict=True):
            array[index] = rows.reshape(len(index), *array.shape[1:])
        self.inserted += len(index)

    def sample(self, batch_size, sequence_length, num_envs, device):
        """A Batch of sequences drawn uniformly with replacement from all that the buffer holds as a whole. The
        transitions of an environment are num_envs rows apart."""
        oldest = max(0, self.inserted - self.capacity)
        start = np.random.randint(oldest, self.inserted - (sequence_length - 1) * num_envs, size=batch_size)
        index = (start + num_envs * np.arange(sequence_length)[:, None]) % self.capacity
        return Batch(*(torch.from_numpy(array[index]).to(device) for array in self.arrays.values()))


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Memory(nn.Module):
    """An LSTM over the observations and the actions before them."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(obs_dim + action_dim, 64), nn.ReLU())
        self.lstm = nn.LSTMCell(64, 64)
        nn.init.constant_(self.lstm.bias_ih[64:128], 3.0)  # gates in the order i, f, g, o: at first little is forgotten

    def forward(self, obs, last_action, first, state=None):
        """The state with each observation; before it the memory is empty where an episode begins, and there was no
        action. (steps, batch, ...), state (2, batch, 64), None: empty -> hidden and cell states (2, steps, batch, 64).
        """
        kept, states = (~first).float()[..., None], []
        hidden, cell = torch.zeros(2, first.shape[1], 64, device=obs.device) if state is None else state
        for x, k in zip(self.encoder(torch.cat([obs, kept * last_action], -1)), kept, strict=True):
            hidden, cell = self.lstm(x, (k * hidden, k * cell))
            states.append(torch.stack([hidden, cell]))
        return torch.stack(states, 1)

    def after(self, batch):
        """Hidden states with each `next_obs`, (steps, batch, 64): of the same episode, also where a time limit cut it.
        They come one step after those with `obs`."""
        states = self(batch.obs, batch.last_action, batch.first)
        x = self.encoder(torch.cat([batch.next_obs, batch.action], -1))
        hidden, _ = self.lstm(x.flatten(0, 1), states.flatten(1, 2).unbind())
        return hidden.view_as(states[0])


class Actor(nn.Module):
    """A Gaussian policy with memory, squashed into [-1, 1] by tanh."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.action_dim = action_dim
        self.memory = Memory(obs_dim, action_dim)
        self.net = mlp(64 + obs_dim, 128, 128, 2 * action_dim)

    def forward(self, hidden, obs, noise):  # (..., 64), (..., obs_dim), (..., action_dim) -> (..., action_dim), (...)
        """Actions for standard normal noise, and their log-probabilities (appendix C)."""
        mean, log_std = self.net(torch.cat([hidden, obs], -1)).chunk(2, -1)
        log_std = 3.5 * log_std.tanh() - 1.5  # in [-5, 2]; SAC's authors clip it instead
        x = mean + log_std.exp() * noise
        logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        logprob = logprob - 2 * (math.log(2) - x - F.softplus(-2 * x))  # log(1 - tanh(x)^2), numerically stable
        return x.tanh(), logprob.sum(-1)

    @torch.no_grad()
    def act(self, obs, state, first, noise=0.0):  # NumPy (batch, *obs_shape), state, (batch,) -> NumPy actions, state
        """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy. The state
        (batch, 64 + 64 + action_dim) has the memory and the last action."""
        device = self.net[0].weight.device
        obs = torch.as_tensor(obs, dtype=torch.float32, device=device).flatten(1)
        if state is None:
            state = torch.zeros(len(obs), 128 + self.action_dim, device=device)
        hidden, cell, last_action = state.split([64, 64, self.action_dim], 1)
        first = torch.as_tensor(first, device=device)
        hidden, cell = self.memory(obs[None], last_action[None], first[None], (hidden, cell))[:, 0]
        action, _ = self(hidden, obs, torch.as_tensor(noise, dtype=torch.float32, device=device))
        return action.cpu().numpy(), torch.cat([hidden, cell, action], 1)


class Critic(nn.Module):
    """Two estimates of the value of an action, with one memory."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.memory = Memory(obs_dim, action_dim)
        self.q1, self.q2 = (mlp(64 + obs_dim + action_dim, 128, 128, 1) for _ in range(2))

    def forward(self, hidden, obs, action):  # (..., 64), (..., obs_dim), (..., action_dim) -> (...), (...)
        x = torch.cat([hidden, obs, action], -1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


def counted(first, burn_in):
    """Which transitions have a loss, 1 or 0: those whose episode begins in the sequence, and all after `burn_in`.
    (sequence_length, batch_size) -> the same."""
    after_burn_in = torch.arange(len(first), device=first.device)[:, None] >= burn_in
    return ((first.cumsum(0) > 0) | after_burn_in).float()


def sac_lstm_critic_loss(critic, target_critic, actor, alpha, batch, noise, weight, gamma):
    """The mean squared errors of both critics, added (Eq. 5 has half of each), and the metrics. The target has the
    smaller value of the two target critics (section 6)."""
    with torch.no_grad():
        next_action, next_logprob = actor(actor.memory.after(batch), batch.next_obs, noise)
        next_q = target_critic(target_critic.memory.after(batch), batch.next_obs, next_action)
        next_value = torch.min(*next_q) - alpha * next_logprob  # Eq. 3
        target = batch.reward + gamma * (1 - batch.done) * next_value
    hidden, _ = critic.memory(batch.obs, batch.last_action, batch.first)
    q1, q2 = critic(hidden, batch.obs, batch.action)
    assert q1.shape == q2.shape == target.shape == batch.reward.shape == weight.shape
    weight = weight / weight.sum()
    loss1, loss2 = (weight * (q1 - target) ** 2).sum(), (weight * (q2 - target) ** 2).sum()
    metrics = {
        "losses/qf1_values": (weight * q1).sum(),
        "losses/qf2_values": (weight * q2).sum(),
        "losses/qf1_loss": loss1,
        "losses/qf2_loss": loss2,
        "losses/qf_loss": (loss1 + loss2) / 2,  # half of what is minimised
    }
    return loss1 + loss2, metrics


def sac_lstm_actor_loss(actor, critic, alpha, batch, noise, weight):
    """Eq. 9 with the smaller value of both critics, the metrics, and the entropy of the policy."""
    hidden, _ = actor.memory(batch.obs, batch.last_action, batch.first)
    action, logprob = actor(hidden, batch.obs, noise)
    hidden, _ = critic.memory(batch.obs, batch.last_action, batch.first)
    value = torch.min(*critic(hidden, batch.obs, action))
    loss = (weight * (alpha * logprob - value)).sum() / weight.sum()
    entropy = -(weight * logprob).sum() / weight.sum()
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
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    num_iterations = run.iterations(args.num_envs)  # whole ones in total_timesteps
    length = args.sequence_length
    run.require(args.burn_in < length, f"--burn-in {args.burn_in} must be less than --sequence-length {length}")
    # a gradient step needs a sequence of each environment in the buffer, which never holds longer ones than this
    most = min(args.buffer_size // args.num_envs, num_iterations)
    limits = "--buffer-size and --total-timesteps, divided by --num-envs"
    run.require(length <= most, f"--sequence-length must be at most {most} by {limits}")
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]

    actor, critic = Actor(obs_dim, action_dim).to(run.device), Critic(obs_dim, action_dim).to(run.device)
    target_critic = copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.q_lr)
    # critic_step(*inputs): an optimiser step on sac_lstm_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(sac_lstm_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(sac_lstm_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    replay = SequenceReplay(args.buffer_size, obs_dim, space)
    # what the actor's `act` remembers; whether an episode begins with the next step
    state = torch.zeros(args.num_envs, 64 + 64 + action_dim, device=run.device)
    now = SimpleNamespace(state=state, first=np.ones(args.num_envs, bool))
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, temperature=temperature)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    parts |= dict(replay=replay, envs=envs, now=now)
    start = run.resume(**parts)
    now.first[run.restarted] = True  # episodes that a resume could not continue

    obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every environment
        last_action = now.state[:, 128:].cpu().numpy()  # after the 2 * 64 numbers of the memory
        action, now.state = actor.act(obs, now.state, now.first, torch.randn(args.num_envs, action_dim))
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
            now.state[:, 128:] = torch.from_numpy(action)
        current_obs, reward, terminated, truncated, infos = envs.step(action)  # current_obs: for the next action
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: a time limit is not the end of the task
        next_obs = infos["next_obs"]  # what the step led to: not current_obs where an episode ended
        replay.add(Batch(obs, action, reward, terminated, next_obs, last_action, now.first))
        obs, now.first = current_obs, terminated | truncated

        # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
        # none while the buffer holds too little: less than a sequence, or a resume without --save-replay
        enough = replay.inserted >= max(args.sequence_length * args.num_envs, args.learning_starts)
        for update in due_updates(args, global_step, enough):
            # "update the Q-function parameters" (Algorithm 1)
            batch = replay.sample(args.batch_size, args.sequence_length, args.num_envs, run.device)
            weight, alpha = counted(batch.first, args.burn_in), temperature().detach()
            noise = torch.randn(batch.action.shape, device=run.device)
            metrics = critic_step(target_critic, actor, alpha, batch, noise, weight, args.gamma)
            run.learned(metrics)

            # "update policy weights": delayed, with every n-th update (n: policy_frequency), then n steps at once
            if update % args.policy_frequency == 0:
                for _ in range(args.policy_frequency):
                    noise = torch.randn(batch.action.shape, device=run.device)
                    metrics, entropy = actor_step(critic, temperature().detach(), batch, noise, weight)
                    run.learned(metrics)
                    if args.autotune:  # "adjust temperature", by the entropy of the policy before the actor's step
                        run.learned(alpha_step(entropy, -action_dim))

            # "update target network weights"
            if update % args.target_network_frequency == 0:
                soft_update(target_critic, critic, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"losses/alpha": temperature().detach()})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
