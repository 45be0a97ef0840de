# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Soft actor-critic (SAC), continuous actions, observations of several entries.

Paper     Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905 ("Eq. n" below)
Run       solo train sac_dict --env-id games/TwoSensesContinuous-v0
Spaces    dict -> continuous, vectors and images
Differs   from sac_continuous_action.py: actor and critics have an encoder for each entry of the observation, whose
          features are concatenated; the replay buffer stores each observation once, images as bytes
Not for   vector observations: sac_continuous_action.py; discrete actions: ppo_dict.py; goals to reach: sac_her.py
Details   docs/algorithms/sac_dict.md
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
from gymnasium.spaces import Box

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "games/TwoSensesContinuous-v0"  # Gymnasium id of the environment
    total_timesteps: int = 10_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 1_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 100_000  # observations in the replay buffer
    batch_size: int = 128  # transitions per gradient step
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    policy_lr: float = 1e-3  # learning rate of the actor's Adam
    q_lr: float = 1e-3  # learning rate of the critics' Adam and of the temperature (the paper: 3e-4)
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 2  # number of critic updates after which as many actor updates are made (the paper: 1)
    target_network_frequency: int = 1  # critic updates between target network updates
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature for a target entropy of -action_dim (actions in [-1, 1])


class Batch(NamedTuple):
    """Transitions."""

    obs: dict[str, torch.Tensor]  # (batch_size, *shape of the entry)
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1]
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: dict[str, torch.Tensor]  # (batch_size, *shape of the entry)


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


def compact(x):
    """Bytes stay bytes, all other numbers become float32. NumPy."""
    return x.astype(np.uint8 if x.dtype == np.uint8 else np.float32, copy=False)


def is_image(space):
    """Bytes with 3 axes, which are taken as height, width, channels."""
    return space.dtype == np.uint8 and len(space.shape) == 3


class DictReplay:
    """The last `capacity` observations, in host memory, each stored once, and the steps between them.

    A row is what one step led to: the entries of the observation, and the step's action, reward and done. Rows are
    numbered from 0 on; row n lies at the index n % capacity. `back` is how many rows before this one the previous
    observation of its episode lies, with two environments mostly 2; 0 where the row begins an episode, so that no step
    led to it. A transition is a row with `back` rows before it, if that one is not overwritten.
    """

    def __init__(self, capacity, num_envs, spaces, action_space):
        self.names = list(spaces)
        entries = {
            f"obs.{name}": compact(np.zeros((capacity, *spaces[name].shape), spaces[name].dtype)) for name in spaces
        }
        self.arrays = entries | {
            "action": np.zeros((capacity, *action_space.shape), action_space.dtype),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "back": np.zeros(capacity, np.int32),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: number of the next row
        # what a checkpoint holds with the arrays: how many rows ago the newest one of each environment was inserted
        self.state = SimpleNamespace(age=np.zeros(num_envs, np.int64))

    def begin(self, env_index, obs):
        """Insert the first observations (n, ...) of new episodes in the environments of these indices (n,)."""
        self._insert(env_index, obs, 0, 0, 0, 0)

    def add(self, obs, action, reward, done):
        """Insert what one step in every environment led to: all (num_envs, ...)."""
        env_index, newest = np.arange(len(reward)), self.inserted - self.state.age  # newest: the numbers of these rows
        self._insert(env_index, obs, action, reward, done, self.inserted + env_index - newest)

    def _insert(self, env_index, obs, *columns):
        """Append a row for each of these environments; entries and columns are in the order of `arrays`."""
        number = self.inserted + np.arange(len(env_index))
        for array, values in zip(self.arrays.values(), (*(obs[name] for name in self.names), *columns), strict=True):
            array[number % self.capacity] = values
        self.inserted += len(env_index)
        self.state.age += len(env_index)
        self.state.age[env_index] = self.inserted - number

    def sample(self, batch_size, device):
        """A Batch of transitions drawn uniformly with replacement."""
        oldest, back = max(0, self.inserted - self.capacity), self.arrays["back"]
        number, whole = np.zeros(batch_size, np.int64), np.zeros(batch_size, bool)
        while not whole.all():
            number[~whole] = np.random.randint(oldest, self.inserted, np.sum(~whole))
            before = number - back[number % self.capacity]
            whole = (before < number) & (before >= oldest)

        def rows(name, number):
            return torch.from_numpy(self.arrays[name][number % self.capacity]).to(device)

        obs, next_obs = ({name: rows(f"obs.{name}", each) for name in self.names} for each in (before, number))
        return Batch(obs, *(rows(name, number) for name in ("action", "reward", "done")), next_obs)


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


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


def orthogonal(layer, gain):
    """The layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Vectors(nn.Module):
    """The encoder of vectors, or arrays of any shape: (batch, *shape) -> (batch, 64)."""

    def __init__(self, *shape):
        super().__init__()
        self.network = tanh_mlp(math.prod(shape), 64, 64, gain=2**0.5)

    def forward(self, x):
        return self.network(x.to(torch.float32).flatten(1)).tanh()


class Images(nn.Module):
    """The encoder of images: (batch, height, width, channels) bytes -> (batch, 64). A convolution halves both sides."""

    def __init__(self, height, width, channels):
        super().__init__()
        first, second = nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        last = nn.Linear(32 * math.ceil(height / 4) * math.ceil(width / 4), 64)
        for layer in (first, second, last):
            orthogonal(layer, 2**0.5)
        self.network = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), last, nn.Tanh())

    def forward(self, x):
        return self.network(x.permute(0, 3, 1, 2).to(torch.float32) / 255)


class Encoders(nn.Module):
    """An encoder for each entry, by the `spaces` of their names; the features of all are concatenated."""

    def __init__(self, spaces):
        super().__init__()
        self.names, self.size = list(spaces), 64 * len(spaces)
        encoders = ((Images if is_image(space) else Vectors)(*space.shape) for space in spaces.values())
        self.encoders = nn.ModuleList(encoders)

    def forward(self, obs):  # (batch, *shape) for each entry -> (batch, size)
        return torch.cat([encode(obs[name]) for name, encode in zip(self.names, self.encoders, strict=True)], 1)


class Actor(nn.Module):
    """A Gaussian policy, squashed into [-1, 1] by tanh."""

    def __init__(self, spaces, action_dim):
        super().__init__()
        self.encoders = Encoders(spaces)
        self.net = mlp(self.encoders.size, 256, 256, 2 * action_dim)

    def forward(self, obs, noise):  # entries, (batch, action_dim) -> (batch, action_dim), (batch,)
        """Actions for standard normal noise, and their log-probabilities (appendix C)."""
        mean, log_std = self.net(self.encoders(obs)).chunk(2, 1)
        log_std = 3.5 * log_std.tanh() - 1.5  # in [-5, 2]; SAC's authors clip it instead
        x = mean + log_std.exp() * noise
        logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        logprob = logprob - 2 * (math.log(2) - x - F.softplus(-2 * x))  # log(1 - tanh(x)^2), numerically stable
        return x.tanh(), logprob.sum(1)

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *shape) for each entry -> NumPy (batch, action_dim)
        """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy."""
        device = self.net[0].weight.device
        obs = {name: torch.as_tensor(compact(obs[name]), device=device) for name in self.encoders.names}
        noise = torch.as_tensor(noise, dtype=torch.float32, device=device)
        return self(obs, noise)[0].cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the value of an action, which share the encoders."""

    def __init__(self, spaces, action_dim):
        super().__init__()
        self.encoders = Encoders(spaces)
        self.q1, self.q2 = (mlp(self.encoders.size + action_dim, 256, 256, 1) for _ in range(2))

    def forward(self, obs, action):  # entries, (batch, action_dim) -> (batch,), (batch,)
        x = torch.cat([self.encoders(obs), action], 1)
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
    spaces, action_dim = envs.single_observation_space.spaces, envs.single_action_space.shape[0]
    for name, space in spaces.items():
        has_axes = isinstance(space, Box) and len(space.shape) > 0
        run.require(has_axes, f"{args.env_id}: {name} must be a Box with one axis or more, but is {space!s:.60}")
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    sentence = f"--buffer-size must be at least {4 * args.num_envs}, some transitions in every environment"
    run.require(args.buffer_size >= 4 * args.num_envs, sentence)

    actor, critic = Actor(spaces, action_dim).to(run.device), Critic(spaces, action_dim).to(run.device)
    target_critic = copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.q_lr)
    # critic_step(*inputs): an optimiser step on sac_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(sac_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(sac_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    replay = DictReplay(args.buffer_size, args.num_envs, spaces, envs.single_action_space)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, temperature=temperature)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    parts |= dict(replay=replay, envs=envs)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (num_envs, *shape) for each entry
    # resumed with --save-replay, the buffer has the newest observations: begin only what could not continue
    begins = np.array(run.restarted if replay.inserted else range(args.num_envs), int)
    replay.begin(begins, {name: x[begins] for name, x in obs.items()})
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every environment
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            action = actor.act(obs, torch.randn(args.num_envs, action_dim))
        obs, reward, terminated, truncated, infos = envs.step(action)
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: a time limit is not the end of the task
        replay.add(infos["next_obs"], action, reward, terminated)  # what the step led to: final where an episode ended
        over = np.flatnonzero(terminated | truncated)
        replay.begin(over, {name: x[over] for name, x in obs.items()})  # of the next episodes

        # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        for update in due_updates(args, global_step, enough):
            # "update the Q-function parameters" (Algorithm 1)
            batch, alpha = replay.sample(args.batch_size, run.device), temperature().detach()
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
    # a last evaluation; `solo play` takes these policies, greedy and drawn at random; `name` is that of any entry
    run.close(actor.act, make_env, sample=lambda obs: actor.act(obs, torch.randn(len(obs[name]), action_dim)))
