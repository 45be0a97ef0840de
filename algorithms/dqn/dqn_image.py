# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Deep Q-network (DQN) on images of any size: discrete actions.

Paper     Mnih et al. 2015, https://www.nature.com/articles/nature14236 ("Alg. 1" below)
Run       solo train dqn_image --env-id games/MovingDot-v0
Spaces    image -> discrete
Differs   from dqn_atari.py: environments of any kind whose images are grey or in colour, of any size and number; no
          wrappers of Atari games, no lives, and rewards as they are
Not for   Atari games: dqn_atari.py; vector observations: dqn.py; continuous actions:
          ppo_image_continuous_action.py
Details   docs/algorithms/dqn_image.md
"""

import copy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation, ResizeObservation, TransformObservation

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "games/MovingDot-v0"  # Gymnasium id of the environment
    size: int = 64  # height and width of the images after resizing; 0: leave them as they are
    grey: bool = False  # make the images grey
    num_frames: int = 4  # last images in one observation
    total_timesteps: int = 50_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    buffer_size: int = 50_000  # images in the replay buffer, of 12 kB each with the default size and colours
    batch_size: int = 32  # transitions per gradient step
    learning_starts: int = 1000  # environment steps before the first gradient step; 0: learn at once
    train_frequency: int = 4  # environment steps per gradient step
    learning_rate: float = 2.5e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 1000  # environment steps between target network updates
    tau: float = 1.0  # soft-update coefficient of the target network (1: hard copy), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.01  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.5  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, *obs_shape), bytes
    action: torch.Tensor  # (batch_size,)
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: torch.Tensor  # (batch_size, *obs_shape), bytes


def channels_last(env):
    """The environment with images (height, width, channels); channels are the axis of size 1, 3 or 4, first or last.
    None where it has no images, or where both axes can be the one of channels, or neither."""
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return None
    shape = space.shape if len(space.shape) == 3 else (*space.shape, 1)  # two axes: grey
    first, last = (shape[axis] in (1, 3, 4) for axis in (0, 2))
    if first == last:
        return None
    order = (1, 2, 0) if first else (0, 1, 2)
    space = gym.spaces.Box(0, 255, tuple(shape[axis] for axis in order), np.uint8)
    return TransformObservation(env, lambda obs: obs.reshape(shape).transpose(order), space)


def image_env(env_id, size, grey, num_frames, **kwargs):
    """One environment, for training and for evaluation: observations are the last images, all channels of one after
    those of the one before, (num_frames * channels, height, width) bytes. Without images it is left as it is."""
    env = gym.make(env_id, **kwargs)
    if (images := channels_last(env)) is None:
        return env
    if grey and images.observation_space.shape[2] == 3:
        images = GrayscaleObservation(images, keep_dim=True)
    if size and images.observation_space.shape[:2] != (size, size):
        images = ResizeObservation(images, (size, size))
    height, width, channels = images.observation_space.shape
    shape = (num_frames * channels, height, width)
    images, space = FrameStackObservation(images, num_frames), gym.spaces.Box(0, 255, shape, np.uint8)
    return TransformObservation(images, lambda obs: obs.transpose(0, 3, 1, 2).reshape(shape), space)


class ImageReplay:
    """The last `capacity` images (channels, height, width), in host memory. Each is stored once; observations of
    `num_frames` images are put together when they are sampled.

    A row is what one step led to: the image, and the step's action, reward and done. Rows are numbered from 0 on; the
    row of a number lies at the index number % capacity. With 2 frames, 5 rows, one environment and 8 images inserted:

        index  number  image           action  done  back
          0       5    episode B, 1st    -1      0     0    begins episode B: no step led to this image
          1       6    episode B, 2nd     3      0     1
          2       7    episode B, 3rd     0      0     1    the newest row
          3       3    episode A, 4th     2      0     1    the next write, of number 8, goes here
          4       4    episode A, 5th     1      1     1    episode A ends

    `back` is how many rows before this one the previous image of its episode lies, 0 for the first image: more than 1
    where rows of other environments lie between. Row 6 has the images 5, 5, 6: obs is all but the last one, next_obs
    all but the first one. Row 4 cannot be sampled: the image with the number 2 is overwritten.
    """

    def __init__(self, capacity, num_envs, num_frames, image_shape):
        self.arrays = {
            "image": np.zeros((capacity, *image_shape), np.uint8),
            "action": np.full(capacity, -1, np.int64),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "back": np.zeros(capacity, np.int32),
        }
        self.capacity, self.num_frames, self.inserted = capacity, num_frames, 0  # `inserted`: number of the next row
        # what a checkpoint holds with the arrays. age: how many rows ago the newest one of each episode was inserted;
        # not its number: a run resumed with a larger capacity counts again, from the oldest row that is left
        self.state = SimpleNamespace(age=np.zeros(num_envs, np.int64))

    def begin(self, env_index, image):
        """Insert the first images (n, *image_shape) of new episodes in the environments of these indices (n,)."""
        self._insert(env_index, image, -1, 0, 0, 0)

    def add(self, image, action, reward, done):
        """Insert what one step in every environment led to: images (num_envs, *image_shape), the rest (num_envs,)."""
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
        """For the rows of these numbers (n,): the indices (n, num_frames + 1) of the row's image and of the num_frames
        before it in its episode, oldest first, with an episode's first image in the place of those before it; and
        whether (n,) the row can be sampled: a step has led to it, and none of these images is overwritten."""
        numbers = [number]
        for _ in range(self.num_frames):
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
        image = torch.from_numpy(self.arrays["image"][self.history(number)[0]]).to(device)
        columns = (self.arrays[name][number % self.capacity] for name in ("action", "reward", "done"))
        action, reward, done = (torch.from_numpy(column).to(device) for column in columns)
        return Batch(image[:, :-1].flatten(1, 2), action, reward, done, image[:, 1:].flatten(1, 2))


class Scaled(nn.Module):
    """Bytes to numbers from 0 to 1, on the device: bytes are copied there faster. Channels last: fast convolutions."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255


def image_cnn(obs_shape):
    """The convolutional network of Mnih et al. 2015, (batch, *obs_shape) bytes -> (batch, 512). Its kernels need images
    of at least 36 pixels; those of smaller images are smaller, and need 15."""
    small = min(obs_shape[1:]) < 36
    convolutions = [(32, 3, 2), (64, 3, 2), (64, 3, 1)] if small else [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    layers, channels = [Scaled()], obs_shape[0]
    for filters, kernel, stride in convolutions:
        layers += [nn.Conv2d(channels, filters, kernel, stride), nn.ReLU()]
        channels = filters
    layers = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        size = layers(torch.zeros(1, *obs_shape, dtype=torch.uint8)).shape[1]
    return layers.extend([nn.Linear(size, 512), nn.ReLU()])


class QNetwork(nn.Module):
    """The values of all actions."""

    def __init__(self, obs_shape, num_actions):
        super().__init__()
        self.network, self.head = image_cnn(obs_shape), nn.Linear(512, num_actions)

    def forward(self, obs):  # (batch, *obs_shape) -> (batch, num_actions)
        return self.head(self.network(obs))

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the greedy actions
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
    run.require(not args.size or find_spec("cv2"), "--size needs OpenCV: pip install 'solorl[atari]', or take --size 0")
    make_env = partial(image_env, size=args.size, grey=args.grey, num_frames=args.num_frames)
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="image", action="discrete")
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)
    sentence = f"{args.env_id} has images of shape {obs_shape}, but its first or last axis must have 1, 3 or 4 channels"
    run.require(channels_last(gym.make(args.env_id)) is not None, sentence)
    sentence = f"--grey takes images with 1 or 3 channels, but those of {args.env_id} have 4"
    run.require(not args.grey or obs_shape[0] == args.num_frames, sentence)
    sentence = f"images of {obs_shape[1]} x {obs_shape[2]} pixels are too small: --size must be at least 15"
    run.require(min(obs_shape[1:]) >= 15, sentence)
    # one iteration: train_frequency environment steps, rounded down to a multiple of num_envs, but at least num_envs
    num_steps = max(1, args.train_frequency // args.num_envs)  # of each environment
    batch_steps = args.num_envs * num_steps
    num_iterations = run.iterations(batch_steps)  # whole ones in total_timesteps
    sentence = f"--target-network-frequency must be at least {batch_steps}, the steps of one iteration"
    run.require(args.target_network_frequency >= batch_steps, sentence)
    least = 2 * (args.num_frames + 1) * args.num_envs
    sentence = f"--buffer-size must be at least {least}, the images of a transition in every environment"
    run.require(args.buffer_size >= least, sentence)

    q_network = QNetwork(obs_shape, num_actions).to(run.device)
    target_network = copy.deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    # gradient_step(*inputs): an optimiser step on td_loss(q_network, *inputs); returns its metrics
    gradient_step = run.gradient_step(td_loss, q_network, optimizer)
    q_values = run.fast(q_network)  # NumPy (batch, *obs_shape) -> NumPy (batch, num_actions), with the current weights
    channels = obs_shape[0] // args.num_frames  # of one image
    replay = ImageReplay(args.buffer_size, args.num_envs, args.num_frames, (channels, *obs_shape[1:]))
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(q_network=q_network, target_network=target_network, optimizer=optimizer, replay=replay, envs=envs)
    start = run.resume(**parts)

    # ---- storage of one iteration
    shape = (num_steps, args.num_envs)
    reward, over = np.zeros(shape, np.float32), np.zeros(shape, bool)

    obs = run.reset(envs)  # (num_envs, *obs_shape)
    known = replay.inserted > 0  # resumed with --save-replay: the buffer has the images of episodes that continue
    begins = run.restarted if known else np.arange(args.num_envs)  # episodes that a resume could not continue
    replay.begin(begins, obs[begins, :channels])
    if start and not known:  # resumed without --save-replay: the later images of episodes that are under way
        for image in np.split(obs, args.num_frames, axis=1)[1:]:
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

            # ---- 2. store: a time limit is not the end of the task
            replay.add(infos["next_obs"][:, -channels:], action[step], reward[step], terminated)  # the newest images
            replay.begin(np.flatnonzero(over[step]), obs[over[step], :channels])  # of the next episodes
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
