# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""FlashSAC: SAC with unit weights, batch normalisation and categorical critics, continuous actions, vectors.

Paper     Kim et al. 2026, https://arxiv.org/abs/2604.04539; SAC: https://arxiv.org/abs/1812.05905 ("Eq. n" below)
          Categorical critics: Bellemare et al. 2017, https://arxiv.org/abs/1707.06887 ("Eq. 7" of `project`)
Run       solo train flash_sac --env-id HalfCheetah-v5
Spaces    vector -> continuous
Differs   from sac_continuous_action.py: residual blocks with unit weights and batch normalisation, which see a
          transition and the next action in one batch; critics of distributions; scaled rewards; repeated noise
Not for   discrete actions: sac_discrete.py
Details   docs/algorithms/flash_sac.md
"""

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "HalfCheetah-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 10_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 512  # transitions per gradient step
    actor_width: int = 128  # units of a residual block of the actor
    critic_width: int = 256  # units of a residual block of the critics
    n_atoms: int = 101  # number of atoms of the return distribution
    max_value: float = 5.0  # largest atom (the smallest one is minus it); sets the scale of rewards
    max_repeat: int = 16  # most environment steps for which the same exploration noise is kept
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    learning_rate: float = 3e-4  # learning rate of Adam for actor, critics and temperature at the start
    final_learning_rate: float = 1.5e-4  # learning rate at the end, reached along half a cosine wave
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.01  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 2  # critic updates per actor update (delayed updates)
    target_network_frequency: int = 1  # critic updates between target network updates
    alpha: float = 0.01  # temperature, the coefficient of the entropy, at the start; for good with --no-autotune
    autotune: bool = True  # learn the temperature for the entropy of a Gaussian with target_std (actions in [-1, 1])
    target_std: float = 0.15  # standard deviation of the Gaussian, in each dimension, whose entropy is the target


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1]
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), terminated: 0 at a time limit, which is not the end of the task
    next_obs: torch.Tensor  # (batch_size, obs_dim)


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


class UnitBatchNorm(nn.Module):
    """Batch normalisation: by the statistics of the batch in training, which are counted, else by the running ones."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x, train):  # (batch, width) -> (batch, width)
        return F.batch_norm(x, self.mean, self.var, self.weight, self.bias, train, momentum=0.01, eps=1e-5)


@torch.no_grad()
def normalize_parameters(module):
    """In place: the weights into each unit of a linear layer get the norm 1; scale and bias of a batch normalisation of
    `width` units together the norm sqrt(width), as does the scale of an RMS normalisation. A head's bias stays free."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.div_(layer.weight.norm(dim=1, keepdim=True))
        elif isinstance(layer, UnitBatchNorm | nn.RMSNorm):
            parameters = list(layer.parameters())
            norm = torch.cat(parameters).norm()
            for x in parameters:
                x.mul_(len(x) ** 0.5 / norm)


class UnitBlock(nn.Module):
    """x plus what two linear layers make of it, each with batch normalisation and ReLU; in between it is 4 times as
    wide."""

    def __init__(self, width):
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.wide_norm, self.norm = UnitBatchNorm(4 * width), UnitBatchNorm(width)

    def forward(self, x, train):  # (batch, width) -> (batch, width)
        wide = self.wide_norm(self.widen(x), train).relu()
        return x + self.norm(self.narrow(wide), train).relu()


class UnitNet(nn.Module):
    """Batch normalisation, a linear layer, two blocks, RMS normalisation and a linear head with a bias."""

    def __init__(self, fan_in, width, fan_out):
        super().__init__()
        self.norm, self.first = UnitBatchNorm(fan_in), nn.Linear(fan_in, width, bias=False)
        self.blocks = nn.ModuleList(UnitBlock(width) for _ in range(2))
        self.last_norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, fan_out)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(self.head.bias)
        normalize_parameters(self)

    def forward(self, x, train):  # (batch, fan_in) -> (batch, fan_out)
        x = self.first(self.norm(x, train))
        for block in self.blocks:
            x = block(x, train)
        return self.head(self.last_norm(x))


class Actor(nn.Module):
    """A Gaussian policy, squashed into [-1, 1] by tanh."""

    def __init__(self, obs_dim, action_dim, width):
        super().__init__()
        self.net = UnitNet(obs_dim, width, 2 * action_dim)

    def forward(self, obs, noise, train=False):  # (n, obs_dim), (n, action_dim) -> (n, action_dim), (n,)
        """Actions for standard normal noise, and their log-probabilities (appendix C)."""
        mean, log_std = self.net(obs, train).chunk(2, 1)
        log_std = 6 * log_std.tanh() - 4  # in [-10, 2]
        x = mean + log_std.exp() * noise
        logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        logprob = logprob - 2 * (math.log(2) - x - F.softplus(-2 * x))  # log(1 - tanh(x)^2), numerically stable
        return x.tanh(), logprob.sum(1)

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net.head.weight.device).flatten(1)
        noise = torch.as_tensor(noise, dtype=torch.float32, device=obs.device)
        return self(obs, noise)[0].cpu().numpy()


class Critic(nn.Module):
    """Two distributions of the return of an action, on the same atoms."""

    def __init__(self, obs_dim, action_dim, width, atoms):
        super().__init__()
        self.nets = nn.ModuleList(UnitNet(obs_dim + action_dim, width, len(atoms)) for _ in range(2))
        self.register_buffer("atoms", atoms)

    def logits(self, obs, action, train=False):  # (n, obs_dim), (n, action_dim) -> (2, n, n_atoms)
        x = torch.cat([obs, action], 1)
        return torch.stack([net(x, train) for net in self.nets])

    def forward(self, obs, action):  # (n, obs_dim), (n, action_dim) -> (2, n): the means
        return self.logits(obs, action).softmax(2) @ self.atoms


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


def project(p, value, atoms):
    """Eq. 7, the projection of probabilities `p` of values, both (batch, n_atoms), on the atoms (n_atoms,): each value,
    clipped to their range, gives its probability to the two atoms next to it, more to the closer one."""
    last = len(atoms) - 1
    b = ((value - atoms[0]) / (atoms[last] - atoms[0]) * last).clamp(0, last)  # position among the atoms
    lower = b.nan_to_num().long()  # an index also for NaN, which stays NaN in the target
    to_upper = p * (b - lower)  # nothing where the value is an atom: the lower one gets all
    target = torch.zeros(len(p), last + 2, device=p.device)  # with a column after the last atom, which gets nothing
    target.scatter_add_(1, lower, p - to_upper).scatter_add_(1, lower + 1, to_upper)
    return target[:, :-1]


def flash_critic_loss(critic, target_critic, actor, alpha, batch, noise, gamma):
    """The mean cross entropy of both critics with the projected target, and the metrics. The target is the distribution
    of the target critic with the smaller mean. All critics are normalised by one batch of (s, a) and (s', a')."""
    atoms, row = critic.atoms, torch.arange(len(batch.obs), device=batch.obs.device)
    with torch.no_grad():
        next_action, next_logprob = actor(batch.next_obs, noise)  # by its running statistics
        obs, action = torch.cat([batch.obs, batch.next_obs]), torch.cat([batch.action, next_action])
        _, next_logits = target_critic.logits(obs, action, train=True).chunk(2, 1)  # those of (s', a')
        next_p = next_logits.softmax(2)  # (2, batch_size, n_atoms)
        next_p = next_p[(next_p @ atoms).argmin(0), row]  # (batch_size, n_atoms)
        soft_atoms = atoms - alpha * next_logprob[:, None]  # Eq. 3
        value = batch.reward[:, None] + gamma * (1 - batch.done[:, None]) * soft_atoms
        target = project(next_p, value, atoms)
    logits, _ = critic.logits(obs, action, train=True).chunk(2, 1)  # those of (s, a)
    logprob = logits.log_softmax(2)  # (2, batch_size, n_atoms)
    assert logprob.shape[1:] == target.shape == (len(batch.reward), len(atoms))
    loss = -(target * logprob).sum(2).mean()
    q = logprob.exp() @ atoms
    return loss, {"losses/qf_values": q.mean(), "losses/qf_loss": loss}


def flash_actor_loss(actor, critic, alpha, batch, noise):
    """Eq. 9 with the smaller mean of both critics, the metrics, and the entropy of the policy. The actor is normalised
    by one batch of s and s', of which s counts; the critics use their running statistics."""
    both = actor(torch.cat([batch.obs, batch.next_obs]), torch.cat([noise, noise]), train=True)
    (action, _), (logprob, _) = (x.chunk(2) for x in both)
    loss = (alpha * logprob - critic(batch.obs, action).amin(0)).mean()
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


def reward_scale(return_var, largest_return, max_value):
    """What rewards are divided by: the standard deviation of the discounted sums of past rewards; more where the
    largest of them, by size, would else exceed max_value."""
    return max(math.sqrt(return_var + 1e-16), largest_return / max_value)


def cosine(first, last, progress):
    """From `first` at progress 0 to `last` at progress 1, along half a cosine wave."""
    return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2


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
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    run.require(args.n_atoms > 1, f"--n-atoms must be 2 or more, got {args.n_atoms}")
    run.require(args.max_value > 0 and args.target_std > 0, "--max-value and --target-std must be greater than 0")
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]
    num_updates = int(args.utd_ratio * max(0, num_iterations * args.num_envs - args.learning_starts))
    target_entropy = 0.5 * action_dim * math.log(2 * math.pi * math.e * args.target_std**2)

    atoms = torch.linspace(-args.max_value, args.max_value, args.n_atoms)
    actor = Actor(obs_dim, action_dim, args.actor_width).to(run.device)
    critic = Critic(obs_dim, action_dim, args.critic_width, atoms).to(run.device)
    target_critic = copy.deepcopy(critic)
    run.require(args.alpha > 0 or not args.autotune, "--alpha must be above 0 to be learned")
    temperature = Temperature(args.alpha).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.learning_rate)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.learning_rate)
    # critic_step(*inputs): an optimiser step on flash_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(flash_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(flash_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    replay = Replay(args.buffer_size, obs_dim, space)
    return_statistics = RunningMeanStd()
    now = SimpleNamespace(
        noise=torch.zeros(args.num_envs, action_dim),  # of the exploration
        steps_left=0,  # for which this noise is kept
        returns=np.zeros(args.num_envs, np.float32),  # discounted, of the episodes so far
        largest_return=0.0,  # by size, ever
    )
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_critic=target_critic, temperature=temperature)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    parts |= dict(return_statistics=return_statistics, replay=replay, envs=envs, now=now)
    start = run.resume(**parts)
    now.returns[run.restarted] = 0  # episodes that a resume could not continue

    obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every environment
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            if now.steps_left == 0:  # new noise for n steps, P(n) in proportion to n^-2 (zeta distribution)
                now.noise = torch.randn(args.num_envs, action_dim)
                now.steps_left = 1 + int((torch.arange(1.0, args.max_repeat + 1) ** -2).multinomial(1))
            now.steps_left -= 1
            action = actor.act(obs, now.noise)
        current_obs, reward, terminated, truncated, infos = envs.step(action)  # current_obs: for the next action
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: a time limit is not the end of the task
        next_obs = infos["next_obs"]  # what the step led to: not current_obs where an episode ended
        replay.add(Batch(obs, action, reward, terminated, next_obs))
        obs = current_obs
        # raw rewards are stored, and scaled by the newest statistics of the returns when they are sampled
        returns = args.gamma * now.returns + reward  # (num_envs,), up to this step, earlier rewards discounted
        now.returns = (returns * ~(terminated | truncated)).astype(np.float32)
        return_statistics.update(returns)
        now.largest_return = max(now.largest_return, float(np.abs(returns).max()))
        scale = reward_scale(return_statistics.var, now.largest_return, args.max_value)

        # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        updates = due_updates(args, global_step, enough)
        learning_rate = cosine(args.learning_rate, args.final_learning_rate, updates.start / max(1, num_updates))
        for optimizer in (actor_optimizer, critic_optimizer, alpha_optimizer):
            optimizer.param_groups[0]["lr"] = learning_rate
        for update in updates:
            batch = replay.sample(args.batch_size, run.device)
            batch = batch._replace(reward=batch.reward / scale)

            # "update policy weights": once in policy_frequency updates, before the critics learn from the same batch
            if update % args.policy_frequency == 0:
                noise = torch.randn(args.batch_size, action_dim, device=run.device)
                metrics, entropy = actor_step(critic, temperature().detach(), batch, noise)
                run.learned(metrics)
                normalize_parameters(actor)
                if args.autotune:  # "adjust temperature", by the entropy of the policy before the actor's step
                    run.learned(alpha_step(entropy, target_entropy))

            # "update the Q-function parameters" (Algorithm 1)
            noise = torch.randn(args.batch_size, action_dim, device=run.device)
            metrics = critic_step(target_critic, actor, temperature().detach(), batch, noise, args.gamma)
            run.learned(metrics)
            normalize_parameters(critic)

            # "update target network weights"; its running statistics are those of its own batches
            if update % args.target_network_frequency == 0:
                soft_update(target_critic, critic, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        metrics = {"charts/learning_rate": learning_rate, "charts/reward_scale": scale}
        run.log(global_step, {"losses/alpha": temperature().detach(), **metrics})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
