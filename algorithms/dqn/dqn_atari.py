# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari]>=0.1", "ale-py>=0.11", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Deep Q-network (DQN) on Atari: discrete actions, images.

Paper     Mnih et al. 2015, https://www.nature.com/articles/nature14236 ("Alg. 1" below)
Run       solo train dqn_atari --env-id ALE/Pong-v5
Spaces    image -> discrete
Differs   from dqn.py: the wrappers of Atari games; a convolutional network; a replay buffer that stores each image
          once; clipped rewards; a lost life ends the return, but not the game
Not for   other images: dqn_image.py; vector observations: dqn.py; continuous actions: ddpg_continuous_action.py
Details   docs/algorithms/dqn_atari.md
"""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.wrappers import FrameStackObservation, MaxAndSkipObservation, ResizeObservation, TimeLimit

from solorl import Run, RunArgs, parse

gym.register_envs(ale_py)


@dataclass
class Args(RunArgs):
    env_kind = "atari"  # --env-id is one of Gymnasium's Atari games
    env_id: str = "ALE/Pong-v5"  # Gymnasium id of the game; PongNoFrameskip-v4 has no sticky actions
    total_timesteps: int = 10_000_000  # environment steps of 4 frames, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    buffer_size: int = 1_000_000  # images in the replay buffer, of 7 kB each
    batch_size: int = 32  # transitions per gradient step
    learning_starts: int = 80_000  # environment steps before the first gradient step; 0: learn at once
    train_frequency: int = 4  # environment steps per gradient step
    learning_rate: float = 1e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 1000  # environment steps between target network updates
    tau: float = 1.0  # soft-update coefficient of the target network (1: hard copy), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.01  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.1  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1
    eval_episodes: int = 10  # games of one evaluation, on environments and seeds of their own


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, 4, 84, 84), bytes
    action: torch.Tensor  # (batch_size,)
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), 1 where the game is over or a life is lost, 0 at a time limit
    next_obs: torch.Tensor  # (batch_size, 4, 84, 84), bytes


class RandomNoops(gym.Wrapper):
    """Begins each game with 1 to 30 frames of doing nothing, so that games differ."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        for _ in range(self.unwrapped.np_random.integers(1, 31)):
            obs, _, _, _, info = self.env.step(0)
        return obs, info


class PressFire(gym.Wrapper):
    """Presses FIRE at the start of a game and after a lost life, in all games with this button: some wait for it.
    After a lost life FIRE replaces the agent's action, which is stored as the agent chose it."""

    def __init__(self, env):
        super().__init__(env)
        self.fire, self.lives, self.life_lost = env.unwrapped.get_action_meanings()[1] == "FIRE", 0, False

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        if self.fire:
            obs, _, _, _, info = self.env.step(1)
        self.lives, self.life_lost = info["lives"], False
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(1 if self.fire and self.life_lost else action)
        self.life_lost, self.lives = info["lives"] < self.lives, info["lives"]
        return obs, reward, terminated, truncated, info


def make_env(env_id, **kwargs):
    """One whole game, for training and for evaluation: observations are the last 4 grey images, (4, 84, 84) bytes."""
    env = gym.make(env_id, obs_type="grayscale", frameskip=1, max_num_frames_per_episode=0, **kwargs)
    env = MaxAndSkipObservation(RandomNoops(env), skip=4)  # pixelwise maximum of the last two frames: objects flicker
    env = ResizeObservation(PressFire(env), (84, 84))
    return TimeLimit(FrameStackObservation(env, 4), 27_000)


class FrameReplay:
    """The last `capacity` images, in host memory. Each is stored once; stacks are put together when they are sampled.

    A row is what one step led to: the image, and the step's action, reward and done. Rows are numbered from 0 on; the
    row of a number lies at the index number % capacity. With 6 rows, one environment and 9 images inserted so far:

        index  number  image        action  done  back
          0       6    game B, 1st    -1      0     0    begins game B: no step led to this image
          1       7    game B, 2nd     3      0     1
          2       8    game B, 3rd     0      0     1    the newest row
          3       3    game A, 4th     2      0     1    the next write, of number 9, goes here
          4       4    game A, 5th     2      0     1
          5       5    game A, 6th     1      1     1    game A ends

    `back` is how many rows before this one the previous image of its game lies, 0 for the first image: more than 1
    where rows of other environments lie between. Row 8 has the images 6, 6, 6, 7, 8: obs is the first four, next_obs
    the last four. Row 5 cannot be sampled: the images with the numbers 1 and 2 are overwritten.
    """

    def __init__(self, capacity, num_envs):
        self.arrays = {
            "image": np.zeros((capacity, 84, 84), np.uint8),
            "action": np.full(capacity, -1, np.int64),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "back": np.zeros(capacity, np.int32),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: the number of the next row
        # what a checkpoint holds with the arrays. age: how many rows ago the newest one of each game was inserted; not
        # its number: a run resumed with a larger capacity counts again, from the oldest row that is left
        self.state = SimpleNamespace(age=np.zeros(num_envs, np.int64))

    def begin(self, env_index, image):
        """Insert the first images (n, 84, 84) of new games in the environments of these indices (n,)."""
        self._insert(env_index, image, -1, 0, 0, 0)

    def add(self, image, action, reward, done):
        """Insert what one step in every environment led to: images (num_envs, 84, 84), and the rest (num_envs,)."""
        env_index, newest = np.arange(len(image)), self.inserted - self.state.age  # newest: the numbers of these rows
        self._insert(env_index, image, action, reward, done, self.inserted + env_index - newest)

    def _insert(self, env_index, *columns):
        """Append a row for each of these environments; the columns are those of `arrays`, in their order."""
        number = self.inserted + np.arange(len(env_index))
        for array, values in zip(self.arrays.values(), columns, strict=True):
            array[number % self.capacity] = values
        self.inserted += len(env_index)
        self.state.age += len(env_index)
        self.state.age[env_index] = self.inserted - number

    def history(self, number):
        """For the rows of these numbers (n,): the indices (n, 5) of the row's image and of the 4 before it in its game,
        oldest first, with a game's first image in the place of those before it; and whether (n,) the row can be
        sampled: a step has led to it, and none of the 5 images is overwritten."""
        numbers = [number]
        for _ in range(4):
            numbers.append(numbers[-1] - self.arrays["back"][numbers[-1] % self.capacity])
        oldest = max(0, self.inserted - self.capacity)
        whole = (self.arrays["action"][number % self.capacity] >= 0) & (numbers[-1] >= oldest)
        return np.stack(numbers[::-1], 1) % self.capacity, whole

    def sample(self, batch_size, device):
        """A Batch of transitions drawn uniformly with replacement."""
        oldest = max(0, self.inserted - self.capacity)
        number = np.random.randint(oldest, self.inserted, batch_size)
        while not (whole := self.history(number)[1]).all():
            number[~whole] = np.random.randint(oldest, self.inserted, np.sum(~whole))
        image = torch.from_numpy(self.arrays["image"][self.history(number)[0]]).to(device)  # (batch_size, 5, 84, 84)
        columns = (self.arrays[name][number % self.capacity] for name in ("action", "reward", "done"))
        return Batch(image[:, :4], *(torch.from_numpy(column).to(device) for column in columns), image[:, 1:])


class Scaled(nn.Module):
    """Bytes to numbers from 0 to 1, on the device: bytes are copied there faster. Channels last: fast convolutions."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255


def nature_cnn():
    """The convolutional network of Mnih et al. 2015, (batch, 4, 84, 84) bytes -> (batch, 512)."""
    convolutions = [nn.Conv2d(4, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
    layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
    return nn.Sequential(Scaled(), *layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU())


class QNetwork(nn.Module):
    """The values of all actions."""

    def __init__(self, num_actions):
        super().__init__()
        self.network, self.head = nature_cnn(), nn.Linear(512, num_actions)

    def forward(self, obs):  # (batch, 4, 84, 84) -> (batch, num_actions)
        return self.head(self.network(obs))

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, 4, 84, 84) -> NumPy (batch,): the greedy actions
        return self(torch.as_tensor(obs, device=self.head.weight.device)).argmax(1).cpu().numpy()


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
    run.require_spaces(envs, obs="image", action="discrete")
    # one iteration: train_frequency environment steps, rounded down to a multiple of num_envs, but at least num_envs
    num_steps = max(1, args.train_frequency // args.num_envs)  # of each environment
    batch_steps = args.num_envs * num_steps
    num_iterations = run.iterations(batch_steps)  # whole ones in total_timesteps
    sentence = f"--target-network-frequency must be at least {batch_steps}, the steps of one iteration"
    run.require(args.target_network_frequency >= batch_steps, sentence)
    sentence = f"--buffer-size must be at least {10 * args.num_envs}, the images of a transition in every environment"
    run.require(args.buffer_size >= 10 * args.num_envs, sentence)
    num_actions = int(envs.single_action_space.n)

    q_network = QNetwork(num_actions).to(run.device)
    target_network = copy.deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    # gradient_step(*inputs): an optimiser step on td_loss(q_network, *inputs); returns its metrics
    gradient_step = run.gradient_step(td_loss, q_network, optimizer)
    q_values = run.fast(q_network)  # NumPy (batch, 4, 84, 84) -> NumPy (batch, num_actions), with the current weights
    replay = FrameReplay(args.buffer_size, args.num_envs)
    now = SimpleNamespace(lives=np.zeros(args.num_envs, np.int64))  # after the last step of each game
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(q_network=q_network, target_network=target_network, optimizer=optimizer, replay=replay)
    parts |= dict(envs=envs, now=now)
    start = run.resume(**parts)

    # ---- storage of one iteration
    shape = (num_steps, args.num_envs)
    reward, over = np.zeros(shape, np.float32), np.zeros(shape, bool)

    obs = run.reset(envs)  # (num_envs, 4, 84, 84)
    now.lives[run.restarted] = 0  # games that a resume had to begin again: no life is lost yet
    known = replay.inserted > 0  # resumed with --save-replay: the buffer has the images of games that continue
    begins = run.restarted if known else np.arange(args.num_envs)  # episodes that a resume could not continue
    replay.begin(begins, obs[begins, 0])
    if start and not known:  # resumed without --save-replay: the later 3 images of games that are under way
        for image in obs[:, 1:].swapaxes(0, 1):
            replay.add(image, -1, 0, 0)  # -1: the action is unknown, this row cannot be sampled
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_steps  # at the end of this iteration

        # ---- 1. act: "with probability epsilon select a random action" (Alg. 1)
        progress = min(1.0, iteration / max(1.0, args.exploration_fraction * num_iterations))
        epsilon = args.start_e + (args.end_e - args.start_e) * progress
        action = np.random.randint(num_actions, size=shape)
        greedy = np.random.random(shape) >= epsilon
        for step in range(num_steps):
            if greedy[step].any():
                action[step] = np.where(greedy[step], q_values(obs).argmax(1), action[step])
            obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            over[step] = terminated | truncated

            # ---- 2. store: done at a lost life, though the game continues; not done at a time limit, though it is over
            # where a game is over, obs and lives are the next game's, next_obs and next_lives its own
            done = terminated | (infos["next_lives"] < now.lives)
            now.lives = infos["lives"]
            replay.add(infos["next_obs"][:, -1], action[step], np.sign(reward[step]), done)  # what the step led to
            replay.begin(np.flatnonzero(over[step]), obs[over[step], 0])
        run.episodes(global_step, reward, over)

        # ---- 3. learn: a gradient step every train_frequency environment steps, after learning_starts
        enough = replay.inserted >= args.learning_starts  # resuming without --save-replay empties the buffer
        for env_step in range(global_step - batch_steps + 1, global_step + 1):
            if enough and env_step > args.learning_starts and env_step % args.train_frequency == 0:
                metrics = gradient_step(target_network, replay.sample(args.batch_size, run.device), args.gamma)
                run.learned(metrics)
        if global_step % args.target_network_frequency < batch_steps:  # a multiple of it lies in this iteration
            soft_update(target_network, q_network, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/epsilon": epsilon})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)  # a last evaluation; `solo play` takes this policy
