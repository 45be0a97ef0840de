# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Hindsight experience replay (HER) with a deep Q-network (DQN): goals, discrete actions.

Paper     Andrychowicz et al. 2017, https://arxiv.org/abs/1707.01495; DQN: Mnih et al. 2015,
          https://www.nature.com/articles/nature14236 ("Alg. 1" below)
Run       solo train dqn_her --env-id games/BitFlip15-v0
Spaces    dict -> discrete, with goals
Differs   from dqn.py: networks see the observation and the goal; the goal of most sampled transitions is replaced by
          one that their episode reached later; rewards and ends are those of that goal
Not for   continuous actions: sac_her.py; observations without goals: dqn.py
Details   docs/algorithms/dqn_her.md
"""

import copy
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
    env_id: str = "games/BitFlip15-v0"  # Gymnasium id of the environment
    total_timesteps: int = 60_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    buffer_size: int = 60_000  # transitions in the replay buffer
    batch_size: int = 128  # transitions per gradient step
    learning_starts: int = 1_000  # environment steps before the first gradient step; 0: learn at once
    train_frequency: int = 2  # environment steps per gradient step
    learning_rate: float = 1e-3  # learning rate of Adam
    gamma: float = 0.98  # discount factor, from 0 to 1
    target_network_frequency: int = 500  # environment steps between target network updates
    tau: float = 1.0  # soft-update coefficient of the target network (1: hard copy), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.05  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.5  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1
    n_sampled_goal: int = 4  # sampled transitions with a replaced goal for each one with its own, k; 0: plain DQN
    goal_strategy: Literal["future", "final"] = "future"  # replace by what a later step reached, or the last one


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, obs_dim + goal_dim)
    action: torch.Tensor  # (batch_size,)
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: torch.Tensor  # (batch_size, obs_dim + goal_dim), with the goal of obs


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation."""
    return gym.make(env_id, **kwargs)


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


class QNetwork(nn.Module):
    """The values of all actions. Inputs are observations with their goals, see `joined`."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.net = mlp(obs_dim, 256, 256, num_actions)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, num_actions)
        return self.net(obs)

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, size) for each entry -> NumPy (batch,): the greedy actions
        obs = torch.as_tensor(joined(obs), device=next(self.parameters()).device)
        return self(obs).argmax(1).cpu().numpy()


def td_loss(q_network, target_network, batch, gamma):
    """Mean squared error of Alg. 1, and the metrics."""
    with torch.no_grad():
        target = batch.reward + gamma * (1 - batch.done) * target_network(batch.next_obs).amax(1)
    q = q_network(batch.obs).gather(1, batch.action[:, None]).squeeze(1)
    assert q.shape == target.shape == batch.reward.shape
    loss = F.mse_loss(q, target)
    return loss, {"losses/td_loss": loss, "losses/q_values": q.mean()}


def soft_update(target, online, tau):
    """Polyak averaging: target <- (1 - tau) * target + tau * online."""
    with torch.no_grad():
        for x, y in zip(target.parameters(), online.parameters(), strict=True):
            x.lerp_(y, tau)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="dict", action="discrete")
    spaces, num_actions = envs.single_observation_space.spaces, int(envs.single_action_space.n)
    game = make_env(args.env_id)
    sentence = f"{args.env_id} must have vectors observation, achieved_goal, desired_goal, and compute_reward"
    run.require(has_goals(game), f"{sentence}, and any compute_terminated, of batches of goals, without info")
    compute_reward, ends = game.get_wrapper_attr("compute_reward"), game.has_wrapper_attr("compute_terminated")
    # without compute_terminated reaching a goal ends nothing
    compute_terminated = game.get_wrapper_attr("compute_terminated") if ends else lambda x, *_: np.zeros(len(x), bool)
    # one iteration: train_frequency environment steps, rounded down to a multiple of num_envs, but at least num_envs
    num_steps = max(1, args.train_frequency // args.num_envs)  # of each environment
    batch_steps = args.num_envs * num_steps
    num_iterations = run.iterations(batch_steps)  # whole ones in total_timesteps
    sentence = f"--target-network-frequency must be at least {batch_steps}, the steps of one iteration"
    run.require(args.target_network_frequency >= batch_steps, sentence)
    obs_dim = spaces["observation"].shape[0] + spaces["desired_goal"].shape[0]  # of what the networks see

    q_network = QNetwork(obs_dim, num_actions).to(run.device)
    target_network = copy.deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    # gradient_step(*inputs): an optimiser step on td_loss(q_network, *inputs); returns its metrics
    gradient_step = run.gradient_step(td_loss, q_network, optimizer)
    q_values = run.fast(q_network)  # NumPy (batch, obs_dim) -> NumPy (batch, num_actions), with the current weights
    replay = GoalReplay(args.buffer_size, args.num_envs, spaces, envs.single_action_space)
    now = SimpleNamespace(first=np.ones(args.num_envs, bool))  # whether an episode begins with the next step
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(q_network=q_network, target_network=target_network, optimizer=optimizer, replay=replay, envs=envs)
    start = run.resume(**parts, now=now)
    now.first[run.restarted] = True  # episodes that a resume could not continue

    # ---- storage of one iteration
    shape = (num_steps, args.num_envs)
    reward, over = np.zeros(shape, np.float32), np.zeros(shape, bool)

    obs = run.reset(envs)  # (num_envs, size) for each entry
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_steps  # at the end of this iteration

        # ---- 1. act: "with probability epsilon select a random action" (Alg. 1)
        progress = min(1.0, iteration / max(1.0, args.exploration_fraction * num_iterations))
        epsilon = args.start_e + (args.end_e - args.start_e) * progress
        action = np.random.randint(num_actions, size=shape)
        greedy = np.random.random(shape) >= epsilon
        for step in range(num_steps):
            if greedy[step].any():
                action[step] = np.where(greedy[step], q_values(joined(obs)).argmax(1), action[step])
            current_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            over[step], next_obs = terminated | truncated, infos["next_obs"]  # next_obs: what the step led to
            if global_step <= args.learning_starts:  # a check, except at ends, which may be rewarded in their own way
                again = compute_reward(next_obs["achieved_goal"], obs["desired_goal"], {})
                sentence = f"compute_reward of {args.env_id} gives {again}, but the rewards were {reward[step]}"
                run.require((np.isclose(again, reward[step], atol=1e-4) | terminated).all(), sentence)

            # ---- 2. store: a time limit is not the end of the task
            columns = (action[step], reward[step], terminated, next_obs["observation"], next_obs["achieved_goal"])
            replay.add(obs["observation"], obs["desired_goal"], *columns, now.first)
            obs, now.first = current_obs, over[step].copy()
        run.episodes(global_step, reward, over)

        # ---- 3. learn: a gradient step every train_frequency environment steps, after learning_starts
        enough = replay.inserted >= args.learning_starts  # resuming without --save-replay empties the buffer
        goals = (args.n_sampled_goal, args.goal_strategy, compute_reward, compute_terminated)
        for env_step in range(global_step - batch_steps + 1, global_step + 1):
            if enough and env_step > args.learning_starts and env_step % args.train_frequency == 0:
                batch = replay.sample(args.batch_size, *goals, run.device)
                metrics = gradient_step(target_network, batch, args.gamma)
                run.learned(metrics)
        if global_step % args.target_network_frequency < batch_steps:  # a multiple of it lies in this iteration
            soft_update(target_network, q_network, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/epsilon": epsilon})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)  # a last evaluation; `solo play` takes this policy
