# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Truncated quantile critics (TQC): SAC with distributional critics, continuous actions, vector observations.

Paper     Kuznetsov et al. 2020, https://arxiv.org/abs/2005.04269; SAC: https://arxiv.org/abs/1812.05905 ("Eq. n" below)
Run       solo train tqc --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from sac_continuous_action.py: the critics estimate quantiles of the return, and their target leaves out the
          largest ones, in place of the smaller of two means
Not for   discrete actions: sac_discrete.py
Details   docs/algorithms/tqc.md
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
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    num_critics: int = 2  # critics (the paper: 5, with 3 layers of 512 units)
    num_quantiles: int = 25  # quantiles of the return that a critic estimates
    num_dropped: int = 2  # largest quantiles left out of a target, times num_critics; 0: none (the paper: 0 to 5)
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    policy_lr: float = 3e-4  # learning rate of the actor's Adam
    q_lr: float = 1e-3  # learning rate of the critics' Adam and of the temperature (the paper: 3e-4)
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 2  # number of critic updates after which as many actor updates are made (the paper: 1)
    target_network_frequency: int = 1  # critic updates between target network updates
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature for a target entropy of -action_dim (actions in [-1, 1])


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
    """A Gaussian policy, squashed into [-1, 1] by tanh."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.net = mlp(obs_dim, 256, 256, 2 * action_dim)

    def forward(self, obs, noise):  # (batch, obs_dim), (batch, action_dim) -> (batch, action_dim), (batch,)
        """Actions for standard normal noise, and their log-probabilities (appendix C)."""
        mean, log_std = self.net(obs).chunk(2, 1)
        log_std = 3.5 * log_std.tanh() - 1.5  # in [-5, 2]; SAC's authors clip it instead
        x = mean + log_std.exp() * noise
        logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        logprob = logprob - 2 * (math.log(2) - x - F.softplus(-2 * x))  # log(1 - tanh(x)^2), numerically stable
        return x.tanh(), logprob.sum(1)

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net[0].weight.device).flatten(1)
        noise = torch.as_tensor(noise, dtype=torch.float32, device=obs.device)
        return self(obs, noise)[0].cpu().numpy()


class EnsembleLinear(nn.Module):
    """Linear layers side by side, as many as the ensemble has members."""

    def __init__(self, members, fan_in, fan_out):
        super().__init__()
        bound = fan_in**-0.5  # as in nn.Linear
        self.weight = nn.Parameter(torch.empty(members, fan_in, fan_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, fan_out).uniform_(-bound, bound))

    def forward(self, x):  # (members, batch, fan_in) -> (members, batch, fan_out)
        return torch.baddbmm(self.bias, x, self.weight)


class Critic(nn.Module):
    """Several estimates of the distribution of the return of an action, each by its quantiles."""

    def __init__(self, obs_dim, action_dim, num_critics, num_quantiles):
        super().__init__()
        self.num_critics, widths = num_critics, (obs_dim + action_dim, 256, 256, num_quantiles)
        layers = [x for sizes in pairwise(widths) for x in (EnsembleLinear(num_critics, *sizes), nn.ReLU())]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (num_critics, batch, num_quantiles)
        x = torch.cat([obs, action], 1)
        return self.net(x.expand(self.num_critics, *x.shape))


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


def truncate(quantiles, num_dropped):
    """The quantiles of all critics in ascending order, without the `num_dropped` largest times the number of critics.
    (num_critics, batch, num_quantiles) -> (batch, num_critics * (num_quantiles - num_dropped))."""
    num_critics, _, num_quantiles = quantiles.shape
    kept = num_critics * (num_quantiles - num_dropped)
    return quantiles.transpose(0, 1).flatten(1).sort(1).values[:, :kept]


def quantile_huber(error, fraction):
    """The Huber loss of quantile regression, elementwise (Dabney et al. 2018, Eq. 10 with kappa = 1).
    error: sample of the target minus quantile; fraction: that of the quantile, from 0 to 1."""
    huber = torch.where(error.abs() <= 1, 0.5 * error**2, error.abs() - 0.5)
    return (fraction - (error < 0).float()).abs() * huber


def tqc_critic_loss(critic, target_critic, actor, alpha, batch, noise, gamma, num_dropped):
    """Quantile regression of each critic towards the truncated mixture of the target critics, added (section 3 of the
    paper), and the metrics."""
    with torch.no_grad():
        next_action, next_logprob = actor(batch.next_obs, noise)
        next_value = truncate(target_critic(batch.next_obs, next_action), num_dropped) - alpha * next_logprob[:, None]
        target = batch.reward[:, None] + gamma * (1 - batch.done[:, None]) * next_value
    quantiles = critic(batch.obs, batch.action)
    num_quantiles = quantiles.shape[2]
    fraction = (torch.arange(num_quantiles, device=target.device) + 0.5) / num_quantiles  # of each quantile
    error = target[:, None, :] - quantiles[..., None]  # (num_critics, batch_size, num_quantiles, samples of the target)
    loss = quantile_huber(error, fraction[:, None]).mean((1, 2, 3)).sum()
    return loss, {"losses/qf_values": quantiles.mean(), "losses/qf_loss": loss}


def tqc_actor_loss(actor, critic, alpha, batch, noise):
    """Eq. 9 with the mean over all quantiles of all critics, the metrics, and the entropy of the policy."""
    action, logprob = actor(batch.obs, noise)
    value = critic(batch.obs, action).mean((0, 2))
    assert value.shape == logprob.shape
    loss = (alpha * logprob - value).mean()
    entropy = -logprob.mean()
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
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]
    run.require(
        args.num_dropped < args.num_quantiles,
        f"--num-dropped {args.num_dropped} must be less than --num-quantiles {args.num_quantiles}",
    )

    actor = Actor(obs_dim, action_dim).to(run.device)
    critic = Critic(obs_dim, action_dim, args.num_critics, args.num_quantiles).to(run.device)
    target_critic = copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.q_lr)
    # critic_step(*inputs): an optimiser step on tqc_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(tqc_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(tqc_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    replay = Replay(args.buffer_size, obs_dim, space)
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
            action = actor.act(obs, torch.randn(args.num_envs, action_dim))
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
            noise = torch.randn(args.batch_size, action_dim, device=run.device)
            metrics = critic_step(target_critic, actor, alpha, batch, noise, args.gamma, args.num_dropped)
            run.learned(metrics)

            # "update policy weights": delayed, with every n-th update (n: policy_frequency), then n steps at once
            if update % args.policy_frequency == 0:
                for _ in range(args.policy_frequency):
                    noise = torch.randn(args.batch_size, action_dim, device=run.device)
                    metrics, entropy = actor_step(critic, temperature().detach(), batch, noise)
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
    # a last evaluation; `solo play` takes these policies, greedy and drawn at random
    run.close(actor.act, make_env, sample=lambda obs: actor.act(obs, torch.randn(len(obs), action_dim)))
