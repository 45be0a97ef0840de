# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari]>=0.1", "ale-py>=0.11", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Soft actor-critic (SAC) on Atari: discrete actions, images.

Paper     Christodoulou 2019, https://arxiv.org/abs/1910.07207 ("Eq. n" below); alpha_loss: Eq. 18 of
          Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905
Run       solo train sac_atari --env-id ALE/Pong-v5
Spaces    image -> discrete
Differs   from sac_discrete.py: convolutional networks; targets are copies, made seldom; from dqn_atari.py of the family
          dqn come the wrappers of Atari games, the replay buffer that stores each image once, clipped rewards, and that
          a lost life ends the return, but not the game
Not for   vector observations: sac_discrete.py; continuous actions: sac_continuous_action.py
Details   docs/algorithms/sac_atari.md
"""

import copy
import math
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
    total_timesteps: int = 5_000_000  # environment steps of 4 frames, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 20_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # images in the replay buffer, of 7 kB each
    batch_size: int = 64  # transitions per gradient step
    utd_ratio: float = 0.25  # critic updates per environment step (update-to-data ratio)
    policy_lr: float = 3e-4  # learning rate of the actor's Adam
    q_lr: float = 3e-4  # learning rate of the critics' Adam and of the temperature
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 1.0  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 1  # number of critic updates after which as many actor updates are made
    target_network_frequency: int = 2_000  # critic updates between target network updates
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature (else alpha): the entropy approaches the target entropy
    target_entropy_scale: float = 0.89  # target entropy, as a multiple of the uniform policy's
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


def nature_net(num_outputs):
    """`nature_cnn` and a linear layer, (batch, 4, 84, 84) bytes -> (batch, num_outputs), with He et al.'s weights."""
    net = nn.Sequential(*nature_cnn(), nn.Linear(512, num_outputs))
    for layer in net:
        if hasattr(layer, "weight"):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    return net


class Actor(nn.Module):
    """A categorical policy."""

    def __init__(self, num_actions):
        super().__init__()
        self.net = nature_net(num_actions)

    def forward(self, obs):  # (batch, 4, 84, 84) -> (batch, num_actions): the log-probabilities of all actions
        return self.net(obs).log_softmax(1)

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, 4, 84, 84) -> NumPy (batch,)
        """The most likely actions; with Gumbel noise (batch, num_actions), samples of the policy."""
        obs = torch.as_tensor(obs, device=self.net[-1].weight.device)
        noise = torch.as_tensor(noise, dtype=torch.float32, device=obs.device)
        return (self(obs) + noise).argmax(1).cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the values of all actions."""

    def __init__(self, num_actions):
        super().__init__()
        self.q1, self.q2 = (nature_net(num_actions) for _ in range(2))

    def forward(self, obs):  # (batch, 4, 84, 84) -> (batch, num_actions), (batch, num_actions)
        return self.q1(obs), self.q2(obs)


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


def discrete_critic_loss(critic, target_critic, actor, alpha, batch, gamma):
    """The mean squared errors of both critics, added, and the metrics."""
    with torch.no_grad():
        next_logprob = actor(batch.next_obs)
        next_q = torch.min(*target_critic(batch.next_obs)) - alpha * next_logprob
        next_value = (next_logprob.exp() * next_q).sum(1)  # Eq. 10
        target = batch.reward + gamma * (1 - batch.done) * next_value
    q1, q2 = (q.gather(1, batch.action[:, None]).squeeze(1) for q in critic(batch.obs))
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


def discrete_actor_loss(actor, critic, alpha, batch):
    """Eq. 12, the metrics, and the entropy of the policy."""
    logprob = actor(batch.obs)
    with torch.no_grad():
        q = torch.min(*critic(batch.obs))
    assert logprob.shape == q.shape
    loss = (logprob.exp() * (alpha * logprob - q)).sum(1).mean()
    entropy = -(logprob.exp() * logprob).sum(1).mean()
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
    run.require_spaces(envs, obs="image", action="discrete")
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    run.require(
        args.buffer_size >= 10 * args.num_envs,
        f"--buffer-size must be at least {10 * args.num_envs}, the images of a transition in every environment",
    )
    num_actions = int(envs.single_action_space.n)
    target_entropy = args.target_entropy_scale * math.log(num_actions)

    actor, critic = Actor(num_actions).to(run.device), Critic(num_actions).to(run.device)
    target_critic = copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr, eps=1e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr, eps=1e-4)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.q_lr, eps=1e-4)
    # critic_step(*inputs): an optimiser step on discrete_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(discrete_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(discrete_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    replay = FrameReplay(args.buffer_size, args.num_envs)
    now = SimpleNamespace(lives=np.zeros(args.num_envs, np.int64))  # of each game, before the next step
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, temperature=temperature)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    parts |= dict(replay=replay, envs=envs, now=now)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (num_envs, 4, 84, 84)
    now.lives[run.restarted] = 0  # games that a resume had to begin again: no life is lost yet
    if replay.inserted == 0:
        replay.begin(np.arange(args.num_envs), obs[:, 0])
        if start:  # resumed without --save-replay: the games are under way, and their stacks have 4 different images
            for image in obs[:, 1:].swapaxes(0, 1):
                replay.add(image, -1, 0, 0)  # -1: the action is unknown, this row cannot be sampled
    else:  # resumed with --save-replay
        replay.begin(run.restarted, obs[run.restarted, -1])  # episodes that a resume could not continue
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every environment
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            action = actor.act(obs, np.random.gumbel(size=(args.num_envs, num_actions)))
        obs, reward, terminated, truncated, infos = envs.step(action)
        over = terminated | truncated
        run.episodes(global_step, reward, over)

        # ---- 2. store: done at a lost life, though the game continues; not done at a time limit, though it is over
        lives = infos["lives"].copy()
        for i in np.flatnonzero(over):  # infos["lives"] has those of the next game
            lives[i] = infos["final_info"]["lives"][i]
        done = terminated | (lives < now.lives)
        replay.add(infos["next_obs"][:, -1], action, np.sign(reward), done)  # what the step led to
        now.lives = infos["lives"]
        replay.begin(np.flatnonzero(over), obs[over, -1])

        # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        for update in due_updates(args, global_step, enough):
            # "update the Q-function parameters" (Algorithm 1)
            batch, alpha = replay.sample(args.batch_size, run.device), temperature().detach()
            metrics = critic_step(target_critic, actor, alpha, batch, args.gamma)
            run.learned(metrics)

            # "update policy weights": delayed, with every n-th update (n: policy_frequency), then n steps at once
            if update % args.policy_frequency == 0:
                for _ in range(args.policy_frequency):
                    metrics, entropy = actor_step(critic, temperature().detach(), batch)
                    run.learned(metrics)
                    if args.autotune:  # "adjust temperature", by the entropy of the policy before the actor's step
                        run.learned(alpha_step(entropy, target_entropy))

            # "update target network weights"
            if update % args.target_network_frequency == 0:
                soft_update(target_critic, critic, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"losses/alpha": temperature().detach()})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
