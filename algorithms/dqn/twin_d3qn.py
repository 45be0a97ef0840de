# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Twin D3QN (ElegantRL's D3QN): twin DQN whose heads are dueling; discrete actions, vector observations.

Paper     Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477 (Section 4.2, clipped double Q-learning; no actor);
          network: Eq. 9 of Wang et al. 2016, https://arxiv.org/abs/1511.06581; loop: Alg. 1 of
          Mnih et al. 2015, https://www.nature.com/articles/nature14236
Run       solo train twin_d3qn --env-id CartPole-v1
Spaces    vector -> discrete
Differs   from twin_dqn.py: each head has two streams, for the value and for the advantages. The D3QN of others, dueling
          with Double DQN's target, is d3qn.py.
Not for   Atari games: dqn_atari.py; image observations: dqn_image.py; continuous actions: td3_continuous_action.py
Details   docs/algorithms/twin_d3qn.md
"""

import copy
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
    epsilon: float = 0.25  # probability of an action drawn from the softmax of the values, from 0 to 1


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


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class DuelingHead(nn.Module):
    """The values of all actions, from streams for the value of the state and for their advantages."""

    def __init__(self, width, num_actions):
        super().__init__()
        self.value = mlp(width, 84, 1)
        self.advantage = mlp(width, 84, num_actions)

    def forward(self, x):  # (batch, width) -> (batch, num_actions)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)  # Eq. 9 of Wang et al.


class QNetwork(nn.Module):
    """Two estimates of the values of all actions, from two heads on one shared layer."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.torso = mlp(obs_dim, 120)
        self.head1, self.head2 = (DuelingHead(120, num_actions) for _ in range(2))

    def both(self, obs):  # (batch, obs_dim) -> (batch, num_actions), (batch, num_actions)
        x = self.torso(obs).relu()
        return self.head1(x), self.head2(x)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, num_actions): those of the first head, which acts
        return self.head1(self.torso(obs).relu())

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the greedy actions
        obs = torch.as_tensor(obs, dtype=torch.float32, device=next(self.parameters()).device).flatten(1)
        return self(obs).argmax(1).cpu().numpy()


def softmax_sample(q):
    """Actions drawn from softmax(q), NumPy (batch, num_actions) -> (batch,): the largest of q plus Gumbel noise."""
    return (q + np.random.gumbel(size=q.shape)).argmax(1)


def twin_td_loss(q_network, target_network, batch, gamma):
    """Mean squared errors of both heads with one target, that of clipped double Q-learning, added; and the metrics."""
    with torch.no_grad():
        next_q = torch.min(*target_network.both(batch.next_obs))  # at each action the smaller of two values
        target = batch.reward + gamma * (1 - batch.done) * next_q.amax(1)
    q1, q2 = (q.gather(1, batch.action[:, None]).squeeze(1) for q in q_network.both(batch.obs))
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
    return loss, {"losses/td_loss": loss, "losses/q_values": q1.mean()}


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
    # gradient_step(*inputs): an optimiser step on twin_td_loss(q_network, *inputs); returns its metrics
    gradient_step = run.gradient_step(twin_td_loss, q_network, optimizer)
    q_values = run.fast(q_network)  # NumPy (batch, obs_dim) -> NumPy (batch, num_actions), with the current weights
    replay = Replay(args.buffer_size, obs_dim, envs.single_action_space)
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

        # ---- 1. act: at random until learning_starts; then a sample with probability epsilon, else the greedy action
        action = np.random.randint(num_actions, size=shape)
        explores = np.random.random(shape) < args.epsilon
        for step in range(num_steps):
            obs[step] = current_obs.reshape(args.num_envs, obs_dim)
            if global_step - batch_steps >= args.learning_starts:
                q = q_values(obs[step])
                action[step] = np.where(explores[step], softmax_sample(q), q.argmax(1))
            current_obs, reward[step], terminated[step], truncated[step], infos = envs.step(action[step])
            # what the step led to: current_obs, except where an episode has ended
            next_obs[step] = infos["next_obs"].reshape(args.num_envs, obs_dim)
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: a time limit is not the end of the task
        replay.add(Batch(obs, action, reward, terminated, next_obs))

        # ---- 3. learn: a gradient step every train_frequency environment steps, after learning_starts
        enough = replay.inserted >= args.learning_starts  # resuming without --save-replay empties the buffer
        for env_step in range(global_step - batch_steps + 1, global_step + 1):
            if enough and env_step > args.learning_starts and env_step % args.train_frequency == 0:
                metrics = gradient_step(target_network, replay.sample(args.batch_size, run.device), args.gamma)
                run.learned(metrics)
        if global_step % args.target_network_frequency < batch_steps:  # a multiple of it lies in this iteration
            soft_update(target_network, q_network, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)  # a last evaluation; `solo play` takes this policy
