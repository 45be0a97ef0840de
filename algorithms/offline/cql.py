# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Conservative Q-learning, CQL(H): from recorded transitions only, continuous actions, vector observations.

Nothing is played but evaluations: `global_step` counts gradient steps; in each all networks learn.

Paper     Kumar et al. 2020, https://arxiv.org/abs/2006.04779 ("CQL's Eq. n" below); SAC:
          https://arxiv.org/abs/1812.05905 ("Eq. n")
Run       solo train cql --dataset data/hopper-medium --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from sac_continuous_action.py: learns from a data set; the critics' loss lowers the values of all actions and
          raises those of the data's actions; targets without entropy, a third hidden layer; observations standardised
Not for   discrete actions: iql_discrete.py; learning by playing: sac_continuous_action.py
Details   docs/algorithms/cql.md
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
    total_timesteps: int = 1_000_000  # gradient steps
    batch_size: int = 256  # transitions per gradient step
    policy_lr: float = 3e-5  # learning rate of the actor's Adam and of the temperature
    q_lr: float = 3e-4  # learning rate of the critics' Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature for a target entropy of -action_dim (actions in [-1, 1])
    cql_alpha: float = 10.0  # how conservative: the weight of what lowers the values of unknown actions
    cql_actions: int = 10  # actions drawn from each of three distributions, for the log-sum-exp over all actions


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
    """A Gaussian policy, squashed into [-1, 1] by tanh."""

    def __init__(self, scale, action_dim):
        super().__init__()
        self.scale, self.net = scale, mlp(len(scale.mean), 256, 256, 256, 2 * action_dim)

    def forward(self, obs, noise):  # (batch, obs_dim), (batch, action_dim) -> (batch, action_dim), (batch,)
        """Actions for standard normal noise, and their log-probabilities (SAC, appendix C)."""
        mean, log_std = self.net(self.scale(obs)).chunk(2, 1)
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


class Critic(nn.Module):
    """Two estimates of the value of an action."""

    def __init__(self, scale, action_dim):
        super().__init__()
        self.scale = scale
        self.q1, self.q2 = (mlp(len(scale.mean) + action_dim, 256, 256, 256, 1) for _ in range(2))

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
        x = torch.cat([self.scale(obs), action], 1)
        return self.q1(x).squeeze(1), self.q2(x).squeeze(1)


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


def log_sum_exp(critic, actor, batch, uniform, noise):
    """The logarithms of the integrals of exp(value) over all actions, by each critic (batch,), estimated with
    importance weights from three times N actions (CQL's appendix F, the last ones as in its authors' code): `uniform`
    ones (N, batch, action_dim), the policy's in the state, and in the next one, for standard normal noise (2, N, batch,
    action_dim)."""
    n, _, action_dim = uniform.shape
    with torch.no_grad():
        action, logprob = actor(batch.obs.repeat(n, 1), noise[0].flatten(0, 1))
        next_action, next_logprob = actor(batch.next_obs.repeat(n, 1), noise[1].flatten(0, 1))
    actions = torch.cat([uniform.flatten(0, 1), action, next_action])
    density = torch.cat([torch.full_like(logprob, -action_dim * math.log(2)), logprob, next_logprob])
    values = critic(batch.obs.repeat(3 * n, 1), actions)
    return [(q - density).view(3 * n, -1).logsumexp(0) - math.log(3 * n) for q in values]


def cql_critic_loss(critic, target_critic, actor, batch, noise, uniform, cql_noise, cql_alpha, gamma):
    """CQL's Eq. 4 for both critics, added, and the metrics; the squared error has no factor 1/2, as in the authors'
    code. The target has the smaller value of the two target critics, without entropy. For the noise see log_sum_exp."""
    with torch.no_grad():
        next_action, _ = actor(batch.next_obs, noise)
        target = batch.reward + gamma * (1 - batch.done) * torch.min(*target_critic(batch.next_obs, next_action))
    q1, q2 = critic(batch.obs, batch.action)
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss1, loss2 = F.mse_loss(q1, target), F.mse_loss(q2, target)
    all1, all2 = log_sum_exp(critic, actor, batch, uniform, cql_noise)
    assert all1.shape == all2.shape == q1.shape
    gap1, gap2 = (all1 - q1).mean(), (all2 - q2).mean()  # of all actions above those of the data
    metrics = {
        "losses/qf1_values": q1.mean(),
        "losses/qf2_values": q2.mean(),
        "losses/qf1_loss": loss1,
        "losses/qf2_loss": loss2,
        "losses/qf_loss": (loss1 + loss2) / 2,  # half of the squared errors that are minimised
        "losses/cql_gap": (gap1 + gap2) / 2,
    }
    return loss1 + loss2 + cql_alpha * (gap1 + gap2), metrics


def sac_actor_loss(actor, critic, alpha, batch, noise):
    """Eq. 9 with the smaller value of both critics, the metrics, and the entropy of the policy."""
    action, logprob = actor(batch.obs, noise)
    loss = (alpha * logprob - torch.min(*critic(batch.obs, action))).mean()
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
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]
    dataset = run.dataset(args.dataset, envs)  # none for `solo play`, which needs only the policy
    envs.close()

    data = Data(transitions(dataset, obs_dim))
    scale = Standardize(data.arrays.obs)
    actor, critic = Actor(scale, action_dim).to(run.device), Critic(scale, action_dim).to(run.device)
    target_critic = copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.policy_lr)
    # critic_step(*inputs): an optimiser step on cql_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(cql_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(sac_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    # what a checkpoint holds
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, temperature=temperature)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    start = run.resume(**parts)

    for iteration in run.loop(start, args.total_timesteps):
        global_step = iteration + 1  # gradient steps

        # ---- 1. learn: the critics, the policy, the temperature, all with one batch (Algorithm 1)
        batch, shape = data.sample(args.batch_size, run.device), (args.batch_size, action_dim)
        noise = torch.randn(shape, device=run.device)
        uniform = 2 * torch.rand(args.cql_actions, *shape, device=run.device) - 1
        cql_noise = torch.randn(2, args.cql_actions, *shape, device=run.device)
        inputs = (target_critic, actor, batch, noise, uniform, cql_noise, args.cql_alpha, args.gamma)
        run.learned(critic_step(*inputs))
        noise = torch.randn(shape, device=run.device)
        metrics, entropy = actor_step(critic, temperature().detach(), batch, noise)
        run.learned(metrics)
        if args.autotune:  # by the entropy of the policy before the actor's step
            run.learned(alpha_step(entropy, -action_dim))
        soft_update(target_critic, critic, args.tau)

        # ---- 2. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"losses/alpha": temperature().detach()})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    # a last evaluation; `solo play` takes these policies, greedy and drawn at random
    run.close(actor.act, make_env, sample=lambda obs: actor.act(obs, torch.randn(len(obs), action_dim)))
