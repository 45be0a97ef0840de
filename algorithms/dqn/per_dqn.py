# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""DQN with prioritised replay (PER): transitions of large errors are drawn more often; discrete, vector observations.

Paper     Schaul et al. 2016, https://arxiv.org/abs/1511.05952 ("Schaul" below), the proportional variant; "Alg. 1" is
          that of Mnih et al. 2015, https://www.nature.com/articles/nature14236
Run       solo train per_dqn --env-id CartPole-v1
Spaces    vector -> discrete
Differs   from dqn.py: transitions are drawn in proportion to a power of their last error, from a sum tree, and their
          losses are weighted to correct for it
Not for   Atari games: rainbow_atari.py; image observations: dqn_image.py; continuous actions: ddpg_continuous_action.py
Details   docs/algorithms/per_dqn.md
"""

import copy
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    total_timesteps: int = 500_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    buffer_size: int = 10_000  # transitions in the replay buffer
    batch_size: int = 128  # transitions per gradient step
    learning_starts: int = 10_000  # environment steps before the first gradient step; 0: learn at once
    train_frequency: int = 10  # environment steps per gradient step
    learning_rate: float = 2.5e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 500  # environment steps between target network updates
    tau: float = 1.0  # soft-update coefficient of the target network (1: hard copy), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.05  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.5  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1
    prioritized_replay_alpha: float = 0.6  # exponent of the error in a priority (0: drawn uniformly), from 0 to 1
    prioritized_replay_beta: float = 0.4  # exponent of the importance weights at the start, rising to 1; from 0 to 1


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


class SumTree:
    """The priorities of `capacity` leaves in a binary tree: each node knows the sum of its leaves' priorities, and the
    smallest of them that is not 0. The root is node 1, the children of node i are 2 i and 2 i + 1."""

    def __init__(self, capacity):
        self.size = 2 ** (capacity - 1).bit_length()  # leaf i is node size + i
        self.sum, self.least = np.zeros(2 * self.size), np.full(2 * self.size, np.inf)

    def set(self, index, priority):
        """Give the leaves of these indices (n,) their priorities (n,)."""
        node = index + self.size
        self.sum[node] = priority
        self.least[node] = np.where(self.sum[node] > 0, self.sum[node], np.inf)
        for _ in range(self.size.bit_length() - 1):
            node = node // 2
            self.sum[node] = self.sum[2 * node] + self.sum[2 * node + 1]
            self.least[node] = np.minimum(self.least[2 * node], self.least[2 * node + 1])

    def draw(self, n):
        """Indices (n,) of leaves, drawn in proportion to priority: one in each of n equal parts of the sum (Schaul,
        B.2.1)."""
        value = (np.arange(n) + np.random.random(n)) / n * self.sum[1]
        node = np.ones(n, np.int64)
        while node[0] < self.size:
            left = self.sum[2 * node]
            right = (value >= left) & (self.sum[2 * node + 1] > 0)  # sums are rounded: never to a side without priority
            value, node = value - right * left, 2 * node + right
        return node - self.size


class PERReplay(Replay):
    """A Replay whose transitions are drawn by priority (Schaul, Alg. 1). The leaf of an index has the priority of the
    transition there, the p^alpha of Schaul's Eq. 1: the probability of being drawn, up to a common factor."""

    def __init__(self, capacity, obs_dim, action_space):
        super().__init__(capacity, obs_dim, action_space)
        self.tree = tree = SumTree(capacity)
        # what a checkpoint holds with the arrays. largest: priority so far; leaves: a view of `sum`, whose own length
        # is a power of 2, by which a checkpoint of another capacity is refused
        leaves = tree.sum[tree.size :][:capacity]
        self.state = SimpleNamespace(largest=1.0, sum=tree.sum, least=tree.least, leaves=leaves)

    def add(self, batch):
        """As in Replay. New transitions get the largest priority so far (Schaul, Alg. 1)."""
        self.tree.set((self.inserted + np.arange(batch.reward.size)) % self.capacity, self.state.largest)
        super().add(batch)

    def sample(self, batch_size, beta, device):
        """A Batch drawn by priority; its importance weights (batch_size,), (N P(i))^-beta divided by the largest of all
        transitions in the buffer (Schaul, 3.4); and the indices (batch_size,) of its transitions."""
        index = self.tree.draw(batch_size)
        batch = Batch(*(torch.from_numpy(array[index]).to(device) for array in self.arrays.values()))
        # the largest weight is that of the smallest priority
        weight = (self.tree.sum[self.tree.size + index] / self.tree.least[1]) ** -beta
        return batch, torch.from_numpy(weight.astype(np.float32)).to(device), index

    def update(self, index, priority):
        """Give the transitions of these indices (batch_size,) their priorities (batch_size,)."""
        self.tree.set(index, priority)
        self.state.largest = max(self.state.largest, priority.max())


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class QNetwork(nn.Module):
    """The values of all actions."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.net = mlp(obs_dim, 120, 84, num_actions)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, num_actions)
        return self.net(obs)

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the greedy actions
        obs = torch.as_tensor(obs, dtype=torch.float32, device=next(self.parameters()).device).flatten(1)
        return self(obs).argmax(1).cpu().numpy()


def per_td_loss(q_network, target_network, batch, weight, gamma):
    """Mean squared error of Alg. 1, times the importance weights; the metrics; and the errors (batch_size,), of which
    the priorities are made."""
    with torch.no_grad():
        target = batch.reward + gamma * (1 - batch.done) * target_network(batch.next_obs).amax(1)
    q = q_network(batch.obs).gather(1, batch.action[:, None]).squeeze(1)
    assert q.shape == target.shape == weight.shape
    error = target - q
    loss = (weight * error**2).mean()
    return loss, {"losses/td_loss": loss, "losses/q_values": q.mean()}, error


def priorities(error, alpha):
    """p^alpha (batch_size,), NumPy, to which the probability of being drawn is proportional (Schaul, Eq. 1). p: size of
    the error and a small number more, so that every transition can be drawn again (Schaul, 3.3)."""
    return (error.detach().abs().double().cpu().numpy() + 1e-6) ** alpha


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
    run.require_spaces(envs, obs="vector", action="discrete")
    # one iteration: train_frequency environment steps, rounded down to a multiple of num_envs, but at least num_envs
    num_steps = max(1, args.train_frequency // args.num_envs)  # of each environment
    batch_steps = args.num_envs * num_steps
    num_iterations = run.iterations(batch_steps)  # whole ones in total_timesteps
    sentence = f"--target-network-frequency must be at least {batch_steps}, the steps of one iteration"
    run.require(args.target_network_frequency >= batch_steps, sentence)
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)

    q_network = QNetwork(obs_dim, num_actions).to(run.device)
    target_network = copy.deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    # gradient_step(*inputs): an optimiser step on per_td_loss(q_network, *inputs); returns its metrics and extra values
    gradient_step = run.gradient_step(per_td_loss, q_network, optimizer)
    q_values = run.fast(q_network)  # NumPy (batch, obs_dim) -> NumPy (batch, num_actions), with the current weights
    replay = PERReplay(args.buffer_size, obs_dim, envs.single_action_space)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(q_network=q_network, target_network=target_network, optimizer=optimizer, replay=replay, envs=envs)
    start = run.resume(**parts)

    # ---- storage of one iteration
    shape = (num_steps, args.num_envs)
    obs, next_obs = (np.zeros((*shape, obs_dim), np.float32) for _ in range(2))
    reward, terminated, truncated = np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, bool)

    current_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_steps  # at the end of this iteration

        # ---- 1. act: "with probability epsilon select a random action" (Alg. 1)
        progress = min(1.0, iteration / max(1.0, args.exploration_fraction * num_iterations))
        epsilon = args.start_e + (args.end_e - args.start_e) * progress
        action = np.random.randint(num_actions, size=shape)
        greedy = np.random.random(shape) >= epsilon
        for step in range(num_steps):
            obs[step] = current_obs.reshape(args.num_envs, obs_dim)
            if greedy[step].any():
                action[step] = np.where(greedy[step], q_values(obs[step]).argmax(1), action[step])
            current_obs, reward[step], terminated[step], truncated[step], infos = envs.step(action[step])
            # what the step led to: current_obs, except where an episode has ended
            next_obs[step] = infos["next_obs"].reshape(args.num_envs, obs_dim)
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: a time limit is not the end of the task
        replay.add(Batch(obs, action, reward, terminated, next_obs))

        # ---- 3. learn: a gradient step every train_frequency environment steps, after learning_starts
        enough = replay.inserted >= args.learning_starts  # resuming without --save-replay empties the buffer
        beta = 1 - (1 - args.prioritized_replay_beta) * (1 - (iteration + 1) / num_iterations)  # rises to 1
        for env_step in range(global_step - batch_steps + 1, global_step + 1):
            if enough and env_step > args.learning_starts and env_step % args.train_frequency == 0:
                batch, weight, index = replay.sample(args.batch_size, beta, run.device)
                metrics, error = gradient_step(target_network, batch, weight, args.gamma)
                replay.update(index, priorities(error, args.prioritized_replay_alpha))
                run.learned(metrics)
        if global_step % args.target_network_frequency < batch_steps:  # a multiple of it lies in this iteration
            soft_update(target_network, q_network, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/epsilon": epsilon, "charts/beta": beta})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)  # a last evaluation; `solo play` takes this policy
