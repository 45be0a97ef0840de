# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Ensemble-diversified actor-critic (EDAC): SAC that learns from a data set, continuous actions, vector observations.

Nothing is played but evaluations: `global_step` counts gradient steps of the critics. With --eta 0 this is SAC-N.

Paper     An et al. 2021, https://arxiv.org/abs/2110.01548; SAC: https://arxiv.org/abs/1812.05905 ("Eq. n" below)
Run       solo train edac --dataset data/hopper-medium --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from sac_continuous_action.py: a data set in place of acting and replay; the smallest of many critics counts,
          whose gradients by the action are kept apart; a third hidden layer
Not for   discrete actions: bc.py
Details   docs/algorithms/edac.md
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
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment, for evaluation
    dataset: str = ""  # folders with recorded transitions, separated by commas (see solo record)
    total_timesteps: int = 3_000_000  # gradient steps
    batch_size: int = 256  # transitions per gradient step
    num_critics: int = 10  # critics of the ensemble, two or more
    eta: float = 1.0  # weight of the similarity of the critics' gradients; with 0 this is SAC-N
    policy_lr: float = 3e-4  # learning rate of the actor's Adam
    q_lr: float = 3e-4  # learning rate of the critics' Adam and of the temperature
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
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


class Actor(nn.Module):
    """A Gaussian policy, squashed into [-1, 1] by tanh."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.net = mlp(obs_dim, 256, 256, 256, 2 * action_dim)

    def forward(self, obs, noise):  # (batch, obs_dim), (batch, action_dim) -> (batch, action_dim), (batch,)
        """Actions for standard normal noise, and their log-probabilities (SAC, appendix C)."""
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
    """An ensemble of estimates of the value of an action."""

    def __init__(self, obs_dim, action_dim, num_critics):
        super().__init__()
        self.num_critics, widths = num_critics, (obs_dim + action_dim, 256, 256, 256, 1)
        layers = [x for sizes in pairwise(widths) for x in (EnsembleLinear(num_critics, *sizes), nn.ReLU())]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (num_critics, batch)
        x = torch.cat([obs, action], 1)
        return self.net(x.expand(self.num_critics, *x.shape)).squeeze(2)

    def value_and_slope(self, obs, action):
        """The values (num_critics, batch) and their gradients by the action (num_critics, batch, action_dim), by the
        chain rule: a derivative of autograd's derivative would be slower and not be compiled."""
        x = torch.cat([obs, action], 1)
        first, _, second, _, third, _, last = self.net
        hidden1 = first(x.expand(self.num_critics, *x.shape))
        hidden2 = second(hidden1.relu())
        hidden3 = third(hidden2.relu())
        slope = last.weight.mT * (hidden3 > 0)  # by the third hidden layer
        slope = slope @ third.weight.mT * (hidden2 > 0)
        slope = slope @ second.weight.mT * (hidden1 > 0)
        return last(hidden3.relu()).squeeze(2), slope @ first.weight[:, obs.shape[1] :].mT


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


def similarity(slope):
    """The mean cosine of the gradients (num_critics, batch, action_dim) of two different critics, times the number of
    critics: the second term of the paper's loss."""
    unit = slope / (slope.norm(dim=2, keepdim=True) + 1e-10)
    pairs = (unit.sum(0) ** 2).sum(1) - (unit**2).sum((0, 2))  # all products of two, less those with themselves
    return pairs.mean() / (len(slope) - 1)


def edac_critic_loss(critic, target_critic, actor, alpha, batch, noise, gamma, eta):
    """The mean squared errors of all critics, added (Eq. 5 has half of each), the weighted similarity of their
    gradients, and the metrics. The target has the smallest value of all target critics."""
    with torch.no_grad():
        next_action, next_logprob = actor(batch.next_obs, noise)
        next_value = target_critic(batch.next_obs, next_action).amin(0) - alpha * next_logprob  # Eq. 3
        target = batch.reward + gamma * (1 - batch.done) * next_value
    q, slope = critic.value_and_slope(batch.obs, batch.action)
    assert q.shape[1:] == target.shape == batch.reward.shape
    loss, alike = ((q - target) ** 2).mean(1).sum(), similarity(slope)
    metrics = {"losses/qf_values": q.mean(), "losses/qf_loss": loss, "losses/similarity": alike}
    return loss + eta * alike, metrics


def edac_actor_loss(actor, critic, alpha, batch, noise):
    """Eq. 9 with the smallest value of all critics, the metrics, and the entropy of the policy."""
    action, logprob = actor(batch.obs, noise)
    value = critic(batch.obs, action).amin(0)
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


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, 1)  # for its spaces
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    run.require(args.num_critics > 1, "--num-critics must be at least 2")
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]
    dataset = run.dataset(args.dataset, envs)  # none for `solo play`, which needs only the policy
    envs.close()

    data = Data(transitions(dataset, obs_dim))
    actor = Actor(obs_dim, action_dim).to(run.device)
    critic = Critic(obs_dim, action_dim, args.num_critics).to(run.device)
    target_critic = copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.q_lr)
    # critic_step(*inputs): an optimiser step on edac_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(edac_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(edac_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    # what a checkpoint holds
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, temperature=temperature)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    start = run.resume(**parts)

    for iteration in run.loop(start, args.total_timesteps):
        global_step = iteration + 1  # gradient steps of the critics

        # ---- 1. learn: the critics, the actor, the temperature by the entropy before the actor's step, the targets
        batch, alpha = data.sample(args.batch_size, run.device), temperature().detach()
        noise = torch.randn(args.batch_size, action_dim, device=run.device)
        metrics = critic_step(target_critic, actor, alpha, batch, noise, args.gamma, args.eta)
        run.learned(metrics)
        noise = torch.randn(args.batch_size, action_dim, device=run.device)
        metrics, entropy = actor_step(critic, alpha, batch, noise)
        run.learned(metrics)
        if args.autotune:
            run.learned(alpha_step(entropy, -action_dim))
        soft_update(target_critic, critic, args.tau)

        # ---- 2. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"losses/alpha": temperature().detach()})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    # a last evaluation; `solo play` takes these policies, greedy and drawn at random
    run.close(actor.act, make_env, sample=lambda obs: actor.act(obs, torch.randn(len(obs), action_dim)))
