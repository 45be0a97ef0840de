# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""DrQ-v2: DDPG on images that are shifted at random, with returns of several steps; continuous actions.

Paper     Yarats et al. 2022, https://arxiv.org/abs/2107.09645 ("Eq. n" below)
Run       solo train drq_v2 --env-id games/PoleImage-v0
Spaces    image -> continuous
Differs   relatives ddpg_continuous_action.py: images as in dqn_image.py, each shifted at random by whole pixels; an
          encoder, which learns from the loss of two critics only; returns of several steps; noise by a schedule,
          clipped in targets
Not for   vector observations: sac_continuous_action.py; discrete actions: dqn_image.py; Atari games: dqn_atari.py
Details   docs/algorithms/drq_v2.md
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
    env_id: str = "games/PoleImage-v0"  # Gymnasium id of the environment
    size: int = 0  # height and width of the images after resizing; 0: leave them as they are
    grey: bool = False  # make the images grey
    num_frames: int = 2  # last images in one observation
    total_timesteps: int = 60_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 2_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 100_000  # images in the replay buffer, of 768 bytes each with the default environment
    batch_size: int = 64  # transitions per gradient step
    utd_ratio: float = 0.5  # gradient steps per environment step (update-to-data ratio)
    learning_rate: float = 3e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    n_step: int = 3  # steps of a return before the value of the critics
    tau: float = 0.01  # soft-update coefficient of the target critics (1: hard copy), from 0 to 1
    pad: int = 4  # the largest shift of an image in pixels; 0: no shifts
    start_std: float = 1.0  # initial standard deviation of the noise on actions
    end_std: float = 0.1  # final standard deviation of the noise on actions
    noise_fraction: float = 0.5  # fraction of total_timesteps over which the noise is annealed, from 0 to 1
    noise_clip: float = 0.3  # largest noise on actions in the losses; inf: do not clip
    feature_dim: int = 50  # outputs of the layer after the encoder, of which actor and critics have one each
    hidden_dim: int = 256  # units of the hidden layers


class Batch(NamedTuple):
    """Transitions over n_step steps, over fewer where the episode ends or the newest image comes."""

    obs: torch.Tensor  # (batch_size, *obs_shape), bytes
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1]
    reward: torch.Tensor  # (batch_size,), the discounted sum
    discount: torch.Tensor  # (batch_size,), of the value of next_obs; 0 where the task ended, but not at a time limit
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


def scaled_image_env(*args, **kwargs):
    """`image_env` with actions in [-1, 1] if they are continuous and bounded."""
    env = image_env(*args, **kwargs)
    space = env.action_space
    continuous = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
    return ScaleAction(env) if continuous and np.isfinite([space.low, space.high]).all() else env


class NStepImageReplay:
    """The last `capacity` images (channels, height, width), in host memory. Each is stored once; observations of
    `num_frames` images and returns of several steps are put together when they are sampled.

    A row is what one step led to: the image, and the step's action, reward and done. Rows are numbered from 0 on; the
    row of a number lies at the index number % capacity. `back` and `ahead` are how many rows before and after this one
    the previous and the next image of its episode lie, 0 where there is none: more than 1 where rows of other
    environments lie between. The first row of an episode, to which no step led, has an action that is not a number.
    """

    def __init__(self, capacity, num_envs, num_frames, image_shape, action_dim):
        self.arrays = {
            "image": np.zeros((capacity, *image_shape), np.uint8),
            "action": np.full((capacity, action_dim), np.nan, np.float32),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "back": np.zeros(capacity, np.int32),
        }
        self.capacity, self.num_frames, self.inserted = capacity, num_frames, 0  # `inserted`: number of the next row
        # what a checkpoint holds with the arrays, whose rows do not change. age: how many rows ago the newest one of
        # each episode was inserted
        self.state = SimpleNamespace(age=np.zeros(num_envs, np.int64), ahead=np.zeros(capacity, np.int32))

    def begin(self, env_index, image):
        """Insert the first images (n, *image_shape) of new episodes in the environments of these indices (n,)."""
        self._insert(env_index, image, np.nan, 0, 0, 0)

    def add(self, image, action, reward, done):
        """Insert what one step in every environment led to: images (num_envs, *image_shape), actions (num_envs,
        action_dim), the rest (num_envs,)."""
        env_index, newest = np.arange(len(image)), self.inserted - self.state.age  # newest: the numbers of these rows
        back = self.inserted + env_index - newest
        self.state.ahead[newest % self.capacity] = back
        self._insert(env_index, image, action, reward, done, back)

    def _insert(self, env_index, *columns):
        """Append a row for each of these environments; the columns are those of `arrays`, in their order."""
        number = self.inserted + np.arange(len(env_index))
        for array, values in zip(self.arrays.values(), columns, strict=True):
            array[number % self.capacity] = values
        self.state.ahead[number % self.capacity] = 0
        self.inserted += len(env_index)
        self.state.age += len(env_index)
        self.state.age[env_index] = self.inserted - number

    def images(self, number):
        """The indices (n, num_frames) of the images of the observations that these rows (n,) led to, oldest first, with
        an episode's first image in the place of those before it."""
        numbers = [number]
        for _ in range(self.num_frames - 1):
            numbers.append(numbers[-1] - self.arrays["back"][numbers[-1] % self.capacity])
        return np.stack(numbers[::-1], 1)

    def whole(self, number):
        """Whether (n,) the row can be sampled: a step has led to it, from an observation that is not overwritten."""
        before = number - self.arrays["back"][number % self.capacity]
        stepped = ~np.isnan(self.arrays["action"][number % self.capacity]).any(1)
        return stepped & (self.images(before)[:, 0] >= max(0, self.inserted - self.capacity))

    def steps(self, number, n_step):
        """The numbers (n, n_step) of these rows (n,) and of those after them in their episodes, and whether (n, n_step)
        there is such a row; where there is none, the number is that of the last one."""
        numbers, there = [number], [np.ones(len(number), bool)]
        for _ in range(n_step - 1):
            ahead = self.state.ahead[numbers[-1] % self.capacity]
            numbers.append(numbers[-1] + ahead)
            there.append(ahead > 0)
        return np.stack(numbers, 1), np.stack(there, 1)

    def sample(self, batch_size, n_step, gamma, device):
        """A Batch of transitions drawn uniformly with replacement."""
        oldest = max(0, self.inserted - self.capacity)
        number = np.random.randint(oldest, self.inserted, batch_size)
        while not (whole := self.whole(number)).all():
            number[~whole] = np.random.randint(oldest, self.inserted, np.sum(~whole))
        first, (steps, there) = number - self.arrays["back"][number % self.capacity], self.steps(number, n_step)
        reward, done = (self.arrays[name][steps % self.capacity] for name in ("reward", "done"))
        reward, discount = n_step_return(reward, done[:, -1], there, gamma)
        action, images = self.arrays["action"][number % self.capacity], self.arrays["image"]
        obs, next_obs = (images[self.images(rows) % self.capacity] for rows in (first, steps[:, -1]))
        obs, next_obs = (x.reshape(batch_size, -1, *x.shape[3:]) for x in (obs, next_obs))  # frames are channels
        return Batch(*(torch.from_numpy(x).to(device) for x in (obs, action, reward, discount, next_obs)))


def n_step_return(reward, done, there, gamma):
    """The discounted sum of rewards (Eq. 1) and the discount of the value after them. NumPy, reward and there
    (n, n_step): whether the episode has this step; done (n,): whether the task ended with the last one."""
    discount = (gamma ** np.arange(reward.shape[1])).astype(np.float32)
    return (discount * reward * there).sum(1), (gamma ** there.sum(1) * (1 - done)).astype(np.float32)


def random_shift(images, pad):
    """Each of the images (batch, channels, height, width) shifted by up to `pad` pixels in both directions, as if cut
    from an image with `pad` more pixels on each side that repeat those of its edge."""
    batch, _, height, width = images.shape
    down, right = torch.randint(-pad, pad + 1, (2, batch, 1), device=images.device)
    rows = (torch.arange(height, device=images.device) + down).clamp(0, height - 1)  # (batch, height)
    columns = (torch.arange(width, device=images.device) + right).clamp(0, width - 1)  # (batch, width)
    index = torch.arange(batch, device=images.device)[:, None, None]
    return images[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def noise_std(args, progress):
    """The standard deviation of the noise (Eq. 3): linear from start_std to end_std over the first noise_fraction of
    the training, of which `progress` is done."""
    share = min(1.0, progress / max(1e-9, args.noise_fraction))
    return args.start_std + (args.end_std - args.start_std) * share


def with_noise(action, std, clip):
    """Actions (batch, action_dim) with normal noise of at most `clip`, in [-1, 1]; the gradient is that of `action`."""
    noise = (std * torch.randn_like(action)).clamp(-clip, clip)
    return action + ((action + noise).clamp(-1, 1) - action).detach()


def orthogonal_init(module, gain):
    """Orthogonal weights and zero biases for each layer of a module, which is returned."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    return module


class PixelEncoder(nn.Module):
    """Four convolutions of 32 filters without padding; only the first one has stride 2."""

    def __init__(self, obs_shape):
        super().__init__()
        layers, channels = [], obs_shape[0]
        for stride in (2, 1, 1, 1):
            layers += [nn.Conv2d(channels, 32, 3, stride), nn.ReLU()]
            channels = 32
        self.layers = orthogonal_init(nn.Sequential(*layers, nn.Flatten()), 2**0.5)
        with torch.no_grad():
            self.size = self(torch.zeros(1, *obs_shape, dtype=torch.uint8)).shape[1]

    def forward(self, obs):  # (batch, *obs_shape) bytes -> (batch, size)
        return self.layers(obs.float() / 255 - 0.5)


def trunk(size, feature_dim):
    """What makes a few features of those of the encoder: (batch, size) -> (batch, feature_dim), in [-1, 1]."""
    return nn.Sequential(nn.Linear(size, feature_dim), nn.LayerNorm(feature_dim), nn.Tanh())


def two_layers(fan_in, hidden_dim, fan_out):
    """Linear layers with ReLU between them."""
    layers = [nn.Linear(fan_in, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden_dim, fan_out))


class Actor(nn.Module):
    """A deterministic policy of the encoder's features; actions in [-1, 1]."""

    def __init__(self, size, feature_dim, hidden_dim, action_dim):
        super().__init__()
        self.net = nn.Sequential(trunk(size, feature_dim), two_layers(feature_dim, hidden_dim, action_dim), nn.Tanh())
        orthogonal_init(self, 1.0)

    def forward(self, features):  # (batch, size) -> (batch, action_dim)
        return self.net(features)


class Critic(nn.Module):
    """Two estimates of the value of an action, from the encoder's features."""

    def __init__(self, size, feature_dim, hidden_dim, action_dim):
        super().__init__()
        self.trunk = trunk(size, feature_dim)
        self.q1, self.q2 = (two_layers(feature_dim + action_dim, hidden_dim, 1) for _ in range(2))
        orthogonal_init(self, 1.0)

    def forward(self, features, action):  # (batch, size), (batch, action_dim) -> (batch,), (batch,)
        x = torch.cat([self.trunk(features), action], 1)
        return self.q1(x).squeeze(1), self.q2(x).squeeze(1)


class Agent(nn.Module):
    """The encoder, and the actor and the critics, which see its features only."""

    def __init__(self, obs_shape, feature_dim, hidden_dim, action_dim):
        super().__init__()
        self.encoder = PixelEncoder(obs_shape)
        sizes = (self.encoder.size, feature_dim, hidden_dim, action_dim)
        self.actor, self.critic = Actor(*sizes), Critic(*sizes)

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The policy's actions with `noise` (batch, action_dim) added."""
        obs = torch.as_tensor(obs, device=next(self.parameters()).device)
        return (self.actor(self.encoder(obs)).cpu().numpy() + noise).clip(-1, 1)


def drq_critic_loss(agent, target_critic, batch, std, args):
    """Eq. 1, the metrics, and the features of the observations."""
    obs, next_obs = (random_shift(images, args.pad) for images in (batch.obs, batch.next_obs))
    with torch.no_grad():
        next_features = agent.encoder(next_obs)  # there is no target encoder
        next_action = with_noise(agent.actor(next_features), std, args.noise_clip)
        next_value = torch.min(*target_critic(next_features, next_action))
        target = batch.reward + batch.discount * next_value
    features = agent.encoder(obs)
    q1, q2 = agent.critic(features, batch.action)
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss1, loss2 = F.mse_loss(q1, target), F.mse_loss(q2, target)
    metrics = {"losses/qf1_values": q1.mean(), "losses/qf1_loss": loss1, "losses/qf2_loss": loss2}
    return loss1 + loss2, metrics | {"losses/qf_loss": (loss1 + loss2) / 2}, features


def drq_actor_loss(agent, features, std, args):
    """The negative of the value that Eq. 2 ascends, and the metrics. The features come detached from the encoder."""
    action = with_noise(agent.actor(features), std, args.noise_clip)
    loss = -torch.min(*agent.critic(features, action)).mean()
    return loss, {"losses/actor_loss": loss}


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
    run.require(not args.size or find_spec("cv2"), "--size needs OpenCV: pip install 'solorl[atari]', or take --size 0")
    make_env = partial(scaled_image_env, size=args.size, grey=args.grey, num_frames=args.num_frames)
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="image", action="bounded")
    obs_shape, action_dim = envs.single_observation_space.shape, envs.single_action_space.shape[0]
    sentence = f"{args.env_id} has images of shape {obs_shape}, but its first or last axis must have 1, 3 or 4 channels"
    run.require(channels_last(gym.make(args.env_id)) is not None, sentence)
    sentence = f"--grey takes images with 1 or 3 channels, but those of {args.env_id} have 4"
    run.require(not args.grey or obs_shape[0] == args.num_frames, sentence)
    sentence = f"images of {obs_shape[1]} x {obs_shape[2]} pixels are too small: --size must be at least 15"
    run.require(min(obs_shape[1:]) >= 15, sentence)
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    least = 2 * (args.num_frames + args.n_step) * args.num_envs
    sentence = f"--buffer-size must be at least {least}, the images of a transition in every environment"
    run.require(args.buffer_size >= least, sentence)

    agent = Agent(obs_shape, args.feature_dim, args.hidden_dim, action_dim).to(run.device)
    target_critic = copy.deepcopy(agent.critic)
    learn_critic = [*agent.encoder.parameters(), *agent.critic.parameters()]
    critic_optimizer = torch.optim.Adam(learn_critic, lr=args.learning_rate)
    actor_optimizer = torch.optim.Adam(agent.actor.parameters(), lr=args.learning_rate)
    # metrics, features = critic_step(*inputs): an optimiser step on drq_critic_loss(agent, *inputs), outputs detached
    critic_step = run.gradient_step(drq_critic_loss, agent, critic_optimizer)
    actor_step = run.gradient_step(drq_actor_loss, agent, actor_optimizer)
    channels = obs_shape[0] // args.num_frames  # of one image
    image_shape = (channels, *obs_shape[1:])
    replay = NStepImageReplay(args.buffer_size, args.num_envs, args.num_frames, image_shape, action_dim)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(agent=agent, target_critic=target_critic, replay=replay, envs=envs)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (num_envs, *obs_shape)
    known = replay.inserted > 0  # resumed with --save-replay: the buffer has the images of episodes that continue
    begins = run.restarted if known else np.arange(args.num_envs)  # episodes that a resume could not continue
    replay.begin(begins, obs[begins, :channels])
    if start and not known:  # resumed without --save-replay: the later images of episodes that are under way
        for image in np.split(obs, args.num_frames, axis=1)[1:]:
            replay.add(image, np.nan, 0, 0)  # the action is unknown, this row cannot be sampled
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration
        std = noise_std(args, iteration / num_iterations)

        # ---- 1. act: one step in every environment, at first at random
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            action = agent.act(obs, std * np.random.randn(args.num_envs, action_dim))
        obs, reward, terminated, truncated, infos = envs.step(action)
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: a time limit is not the end of the task
        replay.add(infos["next_obs"][:, -channels:], action, reward, terminated)  # the newest images
        over = np.flatnonzero(terminated | truncated)
        replay.begin(over, obs[over, :channels])  # of the next episodes

        # ---- 3. learn: utd_ratio gradient steps for each environment step since learning_starts
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        for _ in due_updates(args, global_step, enough):
            batch = replay.sample(args.batch_size, args.n_step, args.gamma, run.device)
            metrics, features = critic_step(target_critic, batch, std, args)
            run.learned(metrics)
            run.learned(actor_step(features, std, args))
            soft_update(target_critic, agent.critic, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/noise_std": std})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
