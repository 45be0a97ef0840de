# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Calibrated Q-learning (Cal-QL): from recorded transitions to playing, continuous actions, vector observations.

`global_step` counts gradient steps on the data set and then environment steps.

Paper     Nakamoto et al. 2023, https://arxiv.org/abs/2303.05479; CQL: https://arxiv.org/abs/2006.04779; SAC:
          https://arxiv.org/abs/1812.05905 ("Eq. n" below)
Run       solo train cal_ql --dataset data/hopper-medium --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from cql.py: values of the policy's actions are not pressed below the returns of the data, so that they fit
          when the policy begins to play; then it plays, and learns from both
Not for   discrete actions: iql_discrete.py; without a data set: sac_continuous_action.py
Details   docs/algorithms/cal_ql.md
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
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment
    dataset: str = ""  # folders with recorded transitions, separated by commas (see solo record)
    total_timesteps: int = 2_000_000  # gradient steps on the data set and environment steps, together
    offline_steps: int = 1_000_000  # gradient steps on the data set, before the policy plays; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer of what the policy plays
    mixing: float = 0.5  # fraction of the transitions of a gradient step from the data set while it plays, from 0 to 1
    max_episode: int = 1000  # environment steps after which a longer episode is stored, its return cut off there
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
    mc_return: torch.Tensor  # (batch_size,), discounted rewards to the end of the episode; too high if a time limit
    # or the end of the recording is one and rewards are negative


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


def returns_to_go(reward, last, gamma):
    """The discounted sums of rewards (n,) to the end of the episode, which is where `last` (n,) is True."""
    returns, total = np.zeros_like(reward), 0.0
    for i in reversed(range(len(reward))):
        total = reward[i] + gamma * (0.0 if last[i] else total)
        returns[i] = total
    return returns


def transitions_with_returns(dataset, obs_dim, gamma):
    """A data set of n transitions as a Batch of NumPy arrays (n, ...)."""
    return Batch(
        obs=dataset.obs.reshape(len(dataset), obs_dim).astype(np.float32),
        action=dataset.action,
        reward=dataset.reward,
        done=dataset.terminated.astype(np.float32),
        next_obs=dataset.next_obs.reshape(len(dataset), obs_dim).astype(np.float32),
        mc_return=returns_to_go(dataset.reward, dataset.terminated | dataset.truncated, gamma),
    )


class Data:
    """Transitions in host memory: an array for each field of Batch, in their order."""

    def __init__(self, batch):
        self.arrays = batch  # a Batch of NumPy arrays (n, ...)

    def sample(self, batch_size, device):
        """A Batch of transitions drawn uniformly with replacement."""
        index = np.random.randint(len(self.arrays.reward), size=batch_size)
        return Batch(*(torch.from_numpy(array[index]).to(device) for array in self.arrays))


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


class ReturnReplay(Replay):
    """A replay buffer with the returns of the episodes, which are inserted when they have ended."""

    def __init__(self, capacity, obs_dim, action_space):
        super().__init__(capacity, obs_dim, action_space)
        self.arrays["mc_return"] = np.zeros(capacity, np.float32)


def with_returns(episode, gamma):
    """The transitions of one episode, n tuples of arrays (1, ...), as a Batch of NumPy arrays (n, 1, ...), in which
    mc_return is (n,)."""
    obs, action, reward, done, next_obs = (np.array(x, np.float32) for x in zip(*episode, strict=True))
    last = np.arange(len(episode)) == len(episode) - 1
    return Batch(obs, action, reward, done, next_obs, returns_to_go(reward[:, 0], last, gamma))


def mixture(data, replay, batch_size, mixing, device):
    """A Batch of which the fraction `mixing` is from the data set, the rest from the replay buffer."""
    share = round(mixing * batch_size)
    parts = data.sample(share, device), replay.sample(batch_size - share, device)
    return Batch(*(torch.cat(pair) for pair in zip(*parts, strict=True)))


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


def calibrated_log_sum_exp(critic, actor, batch, uniform, noise):
    """The log-sum-exp of calibrated values over all actions, by each critic (batch,), estimated with
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
    # calibration (section 5 of the paper): values of the policy's actions count as at least the return of the data
    bound = torch.cat([torch.full_like(batch.mc_return, -math.inf).repeat(n), batch.mc_return.repeat(2 * n)])
    return [(torch.maximum(q, bound) - density).view(3 * n, -1).logsumexp(0) - math.log(3 * n) for q in values]


def cal_ql_critic_loss(critic, target_critic, actor, batch, noise, uniform, cql_noise, cql_alpha, gamma):
    """The calibrated loss of both critics, added, and the metrics; the squared error has no factor 1/2. The target has
    the smaller value of the two target critics, without entropy. For the noise see calibrated_log_sum_exp."""
    with torch.no_grad():
        next_action, _ = actor(batch.next_obs, noise)
        target = batch.reward + gamma * (1 - batch.done) * torch.min(*target_critic(batch.next_obs, next_action))
    q1, q2 = critic(batch.obs, batch.action)
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss1, loss2 = F.mse_loss(q1, target), F.mse_loss(q2, target)
    all1, all2 = calibrated_log_sum_exp(critic, actor, batch, uniform, cql_noise)
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
    envs = run.vector_env(make_env, args.env_id, 1)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]
    total = args.total_timesteps
    run.require(args.offline_steps < total, f"--offline-steps must be less than --total-timesteps {total}")
    dataset = run.dataset(args.dataset, envs)  # none for `solo play`, which needs only the policy

    data = Data(transitions_with_returns(dataset, obs_dim, args.gamma))
    replay = ReturnReplay(args.buffer_size, obs_dim, space)
    now = SimpleNamespace(episode=[])  # transitions since the episode began
    scale = Standardize(data.arrays.obs)
    actor, critic = Actor(scale, action_dim).to(run.device), Critic(scale, action_dim).to(run.device)
    target_critic = copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.policy_lr)
    # critic_step(*inputs): an optimiser step on cal_ql_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(cal_ql_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(sac_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, temperature=temperature)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    parts |= dict(replay=replay, envs=envs, now=now)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (1, *obs_shape)
    if run.restarted:  # episodes that a resume could not continue
        now.episode = []
    for iteration in run.loop(start, args.total_timesteps):
        global_step = iteration + 1  # gradient steps on the data set, then environment steps
        is_online = global_step > args.offline_steps

        if is_online:
            # ---- 1. act
            action = actor.act(obs, torch.randn(1, action_dim))
            current_obs, reward, terminated, truncated, infos = envs.step(action)  # current_obs: for the next action
            done = terminated | truncated
            run.episodes(global_step, reward, done)

            # ---- 2. store: the whole episode when it has ended, because its returns are known only then
            now.episode.append((obs, action, reward, terminated, infos["next_obs"]))  # what the step led to
            if done[0] or len(now.episode) == args.max_episode:
                replay.add(with_returns(now.episode, args.gamma))
                now.episode = []
            obs = current_obs

        # ---- 3. learn: one step of the critics, of the policy and of the temperature, all with one batch: from
        # the data set; online, once an episode has ended, from both for each environment step
        if not is_online or replay.inserted:
            if is_online:
                batch = mixture(data, replay, args.batch_size, args.mixing, run.device)
            else:
                batch = data.sample(args.batch_size, run.device)
            shape = batch.action.shape
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

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"losses/alpha": temperature().detach()})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    # a last evaluation; `solo play` takes these policies, greedy and drawn at random
    run.close(actor.act, make_env, sample=lambda obs: actor.act(obs, torch.randn(len(obs), action_dim)))
