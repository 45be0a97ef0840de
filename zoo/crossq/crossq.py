# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""CrossQ: SAC with batch renormalisation and without target networks, continuous actions, vector observations.

Paper     Bhatt et al. 2024, https://arxiv.org/abs/1902.05605; SAC: https://arxiv.org/abs/1812.05905 ("Eq. n" below)
          Batch renormalisation: Ioffe 2017, https://arxiv.org/abs/1702.03275
Run       solo train crossq --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from sac_continuous_action.py: batch renormalisation in actor and critics, which see a transition and the next
          action in one batch; no target critics
Not for   discrete actions: sac_discrete.py
Details   docs/algorithms/crossq.md
"""

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
    width: int = 256  # units of a hidden layer of the critics (the paper: 2048)
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    policy_lr: float = 1e-3  # learning rate of the actor's Adam
    q_lr: float = 1e-3  # learning rate of the critics' Adam and of the temperature
    gamma: float = 0.99  # discount factor, from 0 to 1
    policy_frequency: int = 3  # critic updates per actor update (delayed updates)
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


class BatchRenorm(nn.Module):
    """Batch renormalisation: in training the statistics of the batch, corrected towards the running ones once these
    have seen 100,000 batches; else the running ones."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x, train):  # (batch, width) -> (batch, width)
        running_std = (self.var + 1e-3).sqrt()
        if not train:
            return (x - self.mean) / running_std * self.weight + self.bias
        mean, var = x.mean(0), x.var(0, correction=0)
        std = (var + 1e-3).sqrt()
        with torch.no_grad():
            warm = self.batches >= 100_000
            r = torch.where(warm, (std / running_std).clamp(1 / 3, 3), 1.0)
            d = torch.where(warm, ((mean - self.mean) / running_std).clamp(-5, 5), 0.0)
            self.mean.lerp_(mean, 0.01)
            self.var.lerp_(var, 0.01)
            self.batches += 1
        return ((x - mean) / std * r + d) * self.weight + self.bias


class NormalizedMLP(nn.Module):
    """Linear layers with ReLU between them, and batch renormalisation before each."""

    def __init__(self, *sizes):
        super().__init__()
        self.norms = nn.ModuleList(BatchRenorm(size) for size in sizes[:-1])
        self.layers = nn.ModuleList(nn.Linear(*fan) for fan in pairwise(sizes))

    def forward(self, x, train):
        x = self.layers[0](self.norms[0](x, train))
        for norm, layer in zip(self.norms[1:], self.layers[1:], strict=True):
            x = layer(norm(x.relu(), train))
        return x


class Actor(nn.Module):
    """A Gaussian policy, squashed into [-1, 1] by tanh."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.net = NormalizedMLP(obs_dim, 256, 256, 2 * action_dim)

    def forward(self, obs, noise, train=False):  # (n, obs_dim), (n, action_dim) -> (n, action_dim), (n,)
        """Actions for standard normal noise, and their log-probabilities (appendix C)."""
        mean, log_std = self.net(obs, train).chunk(2, 1)
        log_std = 3.5 * log_std.tanh() - 1.5  # in [-5, 2]; SAC's authors clip it instead
        x = mean + log_std.exp() * noise
        logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        logprob = logprob - 2 * (math.log(2) - x - F.softplus(-2 * x))  # log(1 - tanh(x)^2), numerically stable
        return x.tanh(), logprob.sum(1)

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net.norms[0].mean.device).flatten(1)
        noise = torch.as_tensor(noise, dtype=torch.float32, device=obs.device)
        return self(obs, noise)[0].cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the value of an action."""

    def __init__(self, obs_dim, action_dim, width):
        super().__init__()
        self.q1, self.q2 = (NormalizedMLP(obs_dim + action_dim, width, width, 1) for _ in range(2))

    def forward(self, obs, action, train=False):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
        x = torch.cat([obs, action], 1)
        return self.q1(x, train).squeeze(1), self.q2(x, train).squeeze(1)


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


def crossq_critic_loss(critic, actor, alpha, batch, noise, gamma):
    """The mean squared errors of both critics, added (Eq. 5 has half of each), and the metrics. The target has the
    smaller value of the same critics, without gradient. Both come from one batch: (s, a) and (s', a')."""
    with torch.no_grad():
        next_action, next_logprob = actor(batch.next_obs, noise)
    obs, action = torch.cat([batch.obs, batch.next_obs]), torch.cat([batch.action, next_action])
    (q1, next_q1), (q2, next_q2) = (q.chunk(2) for q in critic(obs, action, train=True))
    next_value = torch.min(next_q1, next_q2).detach() - alpha * next_logprob  # Eq. 3
    target = batch.reward + gamma * (1 - batch.done) * next_value
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


def crossq_actor_loss(actor, critic, alpha, batch, noise):
    """Eq. 9, the metrics, and the entropy of the policy. The critics use their running statistics."""
    action, logprob = actor(batch.obs, noise, train=True)
    loss = (alpha * logprob - torch.min(*critic(batch.obs, action))).mean()
    entropy = -logprob.mean()
    return loss, {"losses/actor_loss": loss, "losses/entropy": entropy}, entropy


def alpha_loss(temperature, entropy, target_entropy):
    """Eq. 18, and the metrics."""
    loss = temperature() * (entropy - target_entropy)
    return loss, {"losses/alpha_loss": loss}


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

    actor = Actor(obs_dim, action_dim).to(run.device)
    critic = Critic(obs_dim, action_dim, args.width).to(run.device)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr, betas=(0.5, 0.999))
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.q_lr)
    # critic_step(*inputs): an optimiser step on crossq_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(crossq_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(crossq_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    replay = Replay(args.buffer_size, obs_dim, space)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, temperature=temperature)
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
            metrics = critic_step(actor, alpha, batch, noise, args.gamma)
            run.learned(metrics)

            # "update policy weights": once in policy_frequency updates
            if (update + 1) % args.policy_frequency == 0:
                noise = torch.randn(args.batch_size, action_dim, device=run.device)
                metrics, entropy = actor_step(critic, temperature().detach(), batch, noise)
                run.learned(metrics)
                if args.autotune:  # "adjust temperature", by the entropy of the policy before the actor's step
                    run.learned(alpha_step(entropy, -action_dim))

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"losses/alpha": temperature().detach()})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    # a last evaluation; `solo play` takes these policies, greedy and drawn at random
    run.close(actor.act, make_env, sample=lambda obs: actor.act(obs, torch.randn(len(obs), action_dim)))
