# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Hindsight experience replay (HER) with soft actor-critic (SAC): goals, continuous actions.

Paper     Andrychowicz et al. 2017, https://arxiv.org/abs/1707.01495; SAC: Haarnoja et al. 2018,
          https://arxiv.org/abs/1812.05905 ("Eq. n" below)
Run       solo train sac_her --env-id games/PointReach-v0
Spaces    dict -> continuous, with goals
Differs   from sac_continuous_action.py: networks see the observation and the goal; the goal of most sampled transitions
          is replaced by one that their episode reached later, and their reward is computed again
Not for   discrete actions: dqn_her.py; observations without goals: sac_continuous_action.py
Details   docs/algorithms/sac_her.md
"""

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "games/PointReach-v0"  # Gymnasium id of the environment
    total_timesteps: int = 20_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 1_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 100_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    policy_lr: float = 1e-3  # learning rate of the actor's Adam
    q_lr: float = 1e-3  # learning rate of the critics' Adam and of the temperature (the paper: 3e-4)
    gamma: float = 0.95  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 1  # number of critic updates after which as many actor updates are made
    target_network_frequency: int = 1  # critic updates between target network updates
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature for a target entropy of -action_dim (actions in [-1, 1])
    n_sampled_goal: int = 4  # sampled transitions with a replaced goal for each one with its own, k; 0: plain SAC
    goal_strategy: Literal["future", "final"] = "future"  # replace by what a later step reached, or the last one


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, obs_dim + goal_dim)
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1]
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: torch.Tensor  # (batch_size, obs_dim + goal_dim), with the goal of obs


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


def has_goals(env):
    """Whether the observations have the entries of a task with goals, and compute_reward takes batches of them. So must
    compute_terminated, if there is one, unless it is a single False where goals are reached: nothing ends there."""
    spaces = [env.observation_space.spaces.get(name) for name in ("observation", "achieved_goal", "desired_goal")]
    batch = [np.ones((3, *x.shape), x.dtype) for x in spaces if isinstance(x, gym.spaces.Box) and len(x.shape) == 1]
    try:
        ends = env.has_wrapper_attr("compute_terminated") and env.get_wrapper_attr("compute_terminated")(*batch[1:], {})
        reward = env.get_wrapper_attr("compute_reward")(*batch[1:], {})
        return len(batch) == 3 and np.shape(reward) == (3,) and (np.shape(ends) == (3,) or np.array_equal(ends, False))
    except Exception:  # there is none, or its code expects one goal, or something in `info`
        return False


def joined(obs):
    """What the networks see of a batch of observations: NumPy, entries -> (batch, obs_dim + goal_dim)."""
    return np.concatenate([obs["observation"], obs["desired_goal"]], 1, dtype=np.float32)


class GoalReplay:
    """The last `capacity` transitions in the order of time, in host memory. Each step has a row for each environment:
    rows of one environment are num_envs apart. Rows are numbered from 0 on; row n lies at the index n % capacity."""

    def __init__(self, capacity, num_envs, spaces, action_space):
        obs_shape, goal = spaces["observation"].shape, spaces["desired_goal"]
        self.arrays = {
            "obs": np.zeros((capacity, *obs_shape), np.float32),
            "goal": np.zeros((capacity, *goal.shape), goal.dtype),
            "action": np.zeros((capacity, *action_space.shape), action_space.dtype),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "next_obs": np.zeros((capacity, *obs_shape), np.float32),
            "achieved": np.zeros((capacity, *goal.shape), goal.dtype),  # the goal that the step has reached
            "first": np.zeros(capacity, bool),  # whether an episode begins with this step
        }
        self.capacity, self.num_envs, self.inserted = capacity, num_envs, 0  # `inserted`: rows ever inserted

    def add(self, *columns):
        """Write a step of every environment over the oldest rows: NumPy (num_envs, ...), in the order of `arrays`."""
        index = (self.inserted + np.arange(self.num_envs)) % self.capacity
        for array, rows in zip(self.arrays.values(), columns, strict=True):
            array[index] = rows
        self.inserted += self.num_envs

    def last(self, number):
        """The numbers of the last rows of the episodes of these rows; where an episode is under way, of its newest."""
        last = number.copy()
        while True:
            following = last + self.num_envs
            continues = (following < self.inserted) & ~self.arrays["first"][following % self.capacity]
            if not continues.any():
                return last
            last[continues] = following[continues]

    def sample(self, batch_size, k, strategy, compute_reward, compute_terminated, device):
        """A Batch of transitions drawn uniformly with replacement. With probability k / (k + 1) the goal of one is
        replaced by what it or a later step of its episode reached (`strategy`: any of them, or the last one)."""
        number = np.random.randint(max(0, self.inserted - self.capacity), self.inserted, size=batch_size)
        later = last = self.last(number)
        if strategy == "future":
            later = number + self.num_envs * np.random.randint((last - number) // self.num_envs + 1)
        rows = SimpleNamespace(**{name: array[number % self.capacity] for name, array in self.arrays.items()})
        replaced = np.random.random(batch_size) < k / (k + 1)
        goal = np.where(replaced[:, None], self.arrays["achieved"][later % self.capacity], rows.goal)
        # the reward is that of where the step has led; its part that does not depend on goals, as of a crash, is kept
        own, new = (compute_reward(rows.achieved, each, {}) for each in (rows.goal, goal))
        reward = (rows.reward + (new - own)).astype(np.float32)
        obs, next_obs = (joined({"observation": x, "desired_goal": goal}) for x in (rows.obs, rows.next_obs))
        done = np.maximum(rows.done, compute_terminated(rows.achieved, goal, {}))  # some tasks end at the goal
        columns = (obs, rows.action, reward, done, next_obs)
        return Batch(*(torch.from_numpy(column).to(device) for column in columns))


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Actor(nn.Module):
    """A Gaussian policy, squashed into [-1, 1] by tanh. Inputs are observations with their goals, see `joined`."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.net = mlp(obs_dim, 64, 64, 2 * action_dim)

    def forward(self, obs, noise):  # (batch, obs_dim), (batch, action_dim) -> (batch, action_dim), (batch,)
        """Actions for standard normal noise, and their log-probabilities (appendix C)."""
        mean, log_std = self.net(obs).chunk(2, 1)
        log_std = 3.5 * log_std.tanh() - 1.5  # in [-5, 2]; SAC's authors clip it instead
        x = mean + log_std.exp() * noise
        logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        logprob = logprob - 2 * (math.log(2) - x - F.softplus(-2 * x))  # log(1 - tanh(x)^2), numerically stable
        return x.tanh(), logprob.sum(1)

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, size) for each entry -> NumPy (batch, action_dim)
        """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy."""
        obs = torch.as_tensor(joined(obs), device=self.net[0].weight.device)
        noise = torch.as_tensor(noise, dtype=torch.float32, device=obs.device)
        return self(obs, noise)[0].cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the value of an action."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.q1, self.q2 = (mlp(obs_dim + action_dim, 64, 64, 1) for _ in range(2))

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
        x = torch.cat([obs, action], 1)
        return self.q1(x).squeeze(1), self.q2(x).squeeze(1)


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


def sac_critic_loss(critic, target_critic, actor, alpha, batch, noise, gamma):
    """The mean squared errors of both critics, added (Eq. 5 has half of each), and the metrics. The target has the
    smaller value of the two target critics (section 6)."""
    with torch.no_grad():
        next_action, next_logprob = actor(batch.next_obs, noise)
        next_value = torch.min(*target_critic(batch.next_obs, next_action)) - alpha * next_logprob  # Eq. 3
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
    }
    return loss1 + loss2, metrics


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
    run.require_spaces(envs, obs="dict", action="bounded")
    spaces, space = envs.single_observation_space.spaces, envs.single_action_space
    game = make_env(args.env_id)
    sentence = f"{args.env_id} must have vectors observation, achieved_goal, desired_goal, and compute_reward"
    run.require(has_goals(game), f"{sentence}, and any compute_terminated, of batches of goals, without info")
    compute_reward, ends = game.get_wrapper_attr("compute_reward"), game.has_wrapper_attr("compute_terminated")
    # without compute_terminated reaching a goal ends nothing
    compute_terminated = game.get_wrapper_attr("compute_terminated") if ends else lambda x, *_: np.zeros(len(x), bool)
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    obs_dim = spaces["observation"].shape[0] + spaces["desired_goal"].shape[0]  # of what the networks see
    action_dim = space.shape[0]

    actor, critic = Actor(obs_dim, action_dim).to(run.device), Critic(obs_dim, action_dim).to(run.device)
    target_critic = copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.q_lr)
    # critic_step(*inputs): an optimiser step on sac_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(sac_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(sac_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    replay = GoalReplay(args.buffer_size, args.num_envs, spaces, space)
    now = SimpleNamespace(first=np.ones(args.num_envs, bool))  # whether an episode begins with the next step
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, temperature=temperature)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    parts |= dict(replay=replay, envs=envs, now=now)
    start = run.resume(**parts)
    now.first[run.restarted] = True  # episodes that a resume could not continue

    obs = run.reset(envs)  # (num_envs, size) for each entry
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every environment
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            action = actor.act(obs, torch.randn(args.num_envs, action_dim))
        current_obs, reward, terminated, truncated, infos = envs.step(action)  # current_obs: for the next action
        next_obs = infos["next_obs"]  # what the step led to: not current_obs where an episode ended
        run.episodes(global_step, reward, terminated | truncated)
        if global_step <= args.learning_starts:  # a check, except at ends, which may be rewarded in their own way
            again = compute_reward(next_obs["achieved_goal"], obs["desired_goal"], {})
            sentence = f"compute_reward of {args.env_id} gives {again}, but the rewards were {reward}"
            run.require((np.isclose(again, reward, atol=1e-4) | terminated).all(), sentence)

        # ---- 2. store: a time limit is not the end of the task
        columns = (action, reward, terminated, next_obs["observation"], next_obs["achieved_goal"])
        replay.add(obs["observation"], obs["desired_goal"], *columns, now.first)
        obs, now.first = current_obs, terminated | truncated

        # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        goals = (args.n_sampled_goal, args.goal_strategy, compute_reward, compute_terminated)
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        for update in due_updates(args, global_step, enough):
            # "update the Q-function parameters" (Algorithm 1)
            batch, alpha = replay.sample(args.batch_size, *goals, run.device), temperature().detach()
            noise = torch.randn(args.batch_size, action_dim, device=run.device)
            metrics = critic_step(target_critic, actor, alpha, batch, noise, args.gamma)
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
    run.close(actor.act, make_env, sample=lambda obs: actor.act(obs, torch.randn(len(joined(obs)), action_dim)))
