# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Proximal policy optimisation (PPO), continuous actions, vector observations.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
Run       solo train ppo_continuous_action --env-id HalfCheetah-v5
Spaces    vector -> continuous
Differs   from ppo_normalized.py: the policy is a Gaussian, the environment clips its actions; settings for MuJoCo.
          The standard deviation is in the units of the actions: where their bounds are far from 1, set --std-init
Not for   discrete actions: ppo.py; batches of tensors: ppo_continuous_action_batched.py; image observations:
          ppo_image_continuous_action.py; dict observations: ppo_dict_continuous_action.py; observations that need
          memory: ppo_lstm_continuous_action.py
Details   docs/algorithms/ppo_continuous_action.md
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.wrappers import ClipAction

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    num_steps: int = 2048  # length of a rollout in each environment
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # epochs per rollout
    learning_rate: float = 3e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = True  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.0  # c2 of Eq. 9
    std_init: float = 1.0  # standard deviation of the policy at the start, in the units of the actions
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim)
    logprob: torch.Tensor  # (batch_size,), like all that follow
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; it clips actions to its bounds."""
    env = gym.make(env_id, **kwargs)
    return ClipAction(env) if isinstance(env.action_space, gym.spaces.Box) else env  # others will be refused


def tanh_mlp(*sizes, gain):
    """Linear layers with tanh between them, orthogonal weights and zero biases; `gain` is that of the last layer."""
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    nn.init.orthogonal_(linear.weight, gain)  # the last layer again
    return nn.Sequential(*layers[:-1])


class RunningMeanStd(nn.Module):
    """Mean and variance of all that was seen, by Eq. 2.1 of Chan et al. 1979: on the host in float64, so that small
    differences of large numbers count."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def _apply(self, function, recurse=True):  # what `to(device)` calls: the statistics stay where they are
        return self

    def update(self, x):  # NumPy (n, *shape)
        x = torch.as_tensor(x, dtype=torch.float64)
        self.count += len(x)
        weight, delta = len(x) / self.count, x.mean(0) - self.mean
        self.var += weight * (x.var(0, correction=0) - self.var + (1 - weight) * delta**2)
        self.mean += weight * delta

    def scale(self, x):  # NumPy (n, *shape) -> NumPy (n, *shape)
        return (x / (self.var.numpy() + 1e-16) ** 0.5).clip(-10, 10)

    def forward(self, x):  # NumPy (n, *shape) -> NumPy (n, *shape)
        return self.scale(x - self.mean.numpy())


class Agent(nn.Module):
    """Two networks of normalised observations; only `act` takes raw ones."""

    def __init__(self, obs_dim, action_dim, std):
        super().__init__()
        self.obs_normalizer, self.return_normalizer = RunningMeanStd(obs_dim), RunningMeanStd()
        self.actor = tanh_mlp(obs_dim, 64, 64, action_dim, gain=0.01)  # the mean of a Gaussian
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(std)))
        self.critic = tanh_mlp(obs_dim, 64, 64, 1, gain=1.0)

    def forward(self, obs):  # (batch, obs_dim) -> means (batch, action_dim), values (batch,)
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def evaluate_actions(self, obs, action):  # two (batch, width) -> log-probabilities, entropies, values, all (batch,)
        mean, value = self(obs)
        noise = (action - mean) / self.log_std.exp()
        logprobs = -0.5 * noise**2 - self.log_std - 0.5 * math.log(2 * math.pi)
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return logprobs.sum(-1), entropy.expand(len(obs)), value

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim): the mean actions
        obs = self.obs_normalizer(obs.reshape(obs.shape[0], -1))
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device)
        return self.actor(obs).cpu().numpy()


def sample_gaussian(mean, log_std):
    """Actions drawn from a diagonal Gaussian, and their log-probabilities. NumPy, mean (batch, action_dim), log_std
    (action_dim,) -> (batch, action_dim), (batch,)."""
    noise = np.random.standard_normal(mean.shape).astype(np.float32)
    logprobs = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    return mean + np.exp(log_std) * noise, logprobs.sum(-1)


def discounted_returns(reward, done, so_far, gamma):
    """Sum of the rewards of an episode up to each step, earlier ones discounted. NumPy, both (num_steps, num_envs).

    so_far (num_envs,): the same up to the step before the first, 0 where an episode begins; its new value is returned.
    """
    returns = np.zeros_like(reward)
    for t in range(len(reward)):
        returns[t] = gamma * so_far + reward[t]
        so_far = returns[t] * (1 - done[t])
    return returns, so_far


def gae(reward, value, done, final_value, next_value, gamma, lam):
    """Advantages by Eq. 11-12. NumPy, all (num_steps, num_envs) except next_value (num_envs,).

    next_value: value of the observation after the last step. done[t]: the return ends with step t. final_value[t]: if
    a time limit ended the episode, the value of its final observation, else 0.
    """
    assert reward.shape == value.shape == done.shape == final_value.shape and next_value.shape == reward.shape[1:]
    advantage, next_advantage = np.zeros_like(reward), np.zeros_like(next_value)
    for t in reversed(range(len(reward))):
        bootstrap = (1 - done[t]) * next_value + final_value[t]
        delta = reward[t] + gamma * bootstrap - value[t]  # Eq. 12
        next_advantage = advantage[t] = delta + gamma * lam * (1 - done[t]) * next_advantage  # Eq. 11
        next_value = value[t]
    return advantage


def ppo_loss(agent, batch, args):
    """The negative of Eq. 9, and the metrics."""
    logprob, entropy, value = agent.evaluate_actions(batch.obs, batch.action)
    assert logprob.shape == entropy.shape == value.shape == batch.advantage.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = logratio.exp()
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    objective = torch.min(ratio * advantage, clipped_ratio * advantage).mean()

    # L^VF; with --clip-vloss the larger of two errors: of the value, and of the value clipped around the old one
    error = (value - batch.returns) ** 2
    if args.clip_vloss:
        clipped_value = batch.value + (value - batch.value).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (clipped_value - batch.returns) ** 2)
    value_loss = 0.5 * error.mean()

    loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy.mean())  # Eq. 9
    with torch.no_grad():
        metrics = {
            "losses/value_loss": value_loss,
            "losses/policy_loss": -objective,
            "losses/entropy": entropy.mean(),
            "losses/old_approx_kl": -logratio.mean(),
            "losses/approx_kl": (ratio - 1 - logratio).mean(),  # k3 of http://joschu.net/blog/kl-approx.html
            "losses/clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
        }
    return loss, metrics


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="continuous")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    run.require(args.std_init > 0, f"--std-init {args.std_init} must be above 0")
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), envs.single_action_space.shape[0]

    agent = Agent(obs_dim, action_dim, args.std_init).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_loss, agent, optimizer, args.max_grad_norm)
    policy = run.fast(agent)  # NumPy, current weights: (batch, obs_dim) -> means (batch, action_dim), values (batch,)
    normalize = agent.obs_normalizer  # NumPy (batch, obs_dim) -> NumPy (batch, obs_dim)
    now = SimpleNamespace(so_far=np.zeros(args.num_envs, np.float32))  # discounted rewards of the running episodes
    start = run.resume(agent=agent, optimizer=optimizer, now=now, envs=envs)  # what a checkpoint holds
    now.so_far[run.restarted] = 0  # episodes that a resume could not continue

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    raw_obs = np.zeros((*shape, obs_dim))
    obs, final_obs = (np.zeros((*shape, obs_dim), np.float32) for _ in range(2))  # normalised
    action, timeout = np.zeros((*shape, action_dim), np.float32), np.zeros(shape, bool)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        log_std = agent.log_std.detach().cpu().numpy()
        for step in range(args.num_steps):
            raw_obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            obs[step] = normalize(raw_obs[step])
            mean, value[step] = policy(obs[step])
            action[step], logprob[step] = sample_gaussian(mean, log_std)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            final_obs[step] = normalize(infos["next_obs"].reshape(args.num_envs, obs_dim))  # where the step led
        run.episodes(global_step, reward, done)

        # ---- 2. credit: rewards in units of the standard deviation of the returns
        returns, now.so_far = discounted_returns(reward, done, now.so_far, args.gamma)
        agent.return_normalizer.update(returns.flatten())
        scaled_reward = agent.return_normalizer.scale(reward).astype(np.float32)

        # "compute advantage estimates"
        _, next_value = policy(normalize(next_obs.reshape(args.num_envs, obs_dim)))
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = policy(final_obs[timeout])[1]
        advantage = gae(scaled_reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (obs, action, logprob, value, advantage, advantage + value)
        rollout = Batch(*(torch.as_tensor(x, device=run.device).flatten(0, 1) for x in rollout))

        # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
        for epoch in range(args.update_epochs):
            kl = []
            for index in torch.randperm(batch_size, device=run.device).split(minibatch_size):
                metrics = gradient_step(Batch(*(x[index] for x in rollout)), args)
                run.learned(metrics)
                kl.append(metrics["losses/approx_kl"])
            if args.target_kl is not None and torch.stack(kl).mean() > args.target_kl:
                break

        # the statistics of observations change only now: learning saw the same observations as acting
        agent.obs_normalizer.update(raw_obs.reshape(batch_size, obs_dim))

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        explained_variance = 1 - rollout.advantage.var() / (rollout.returns.var() + 1e-8)  # advantage: returns - value
        learning_rate = optimizer.param_groups[0]["lr"]
        run.log(global_step, {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
