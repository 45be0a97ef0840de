# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""ModSAC: SAC whose actor learns as often as its critics are reliable, continuous actions, vector observations.

Paper     ElegantRL 2020, https://github.com/AI4Finance-Foundation/ElegantRL (AgentModSAC; there is no paper)
          SAC: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905 ("Eq. n" below)
Run       solo train mod_sac --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from sac_continuous_action.py: a moving average of the critics' loss sets how often the actor learns; a target
          actor; two critics on one trunk; DenseNet; the batch grows with the buffer; rewards times 0.25, Huber losses
Not for   discrete actions: sac_discrete.py; dict observations: sac_dict.py; goals to reach: sac_her.py
Details   docs/algorithms/mod_sac.md
"""

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    growing_batch: bool = True  # let the batch grow with the filled part of the buffer, up to twice its size
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    width: int = 256  # units of the actor's first layer, a multiple of 16; the critics' has 5/4 as many
    policy_lr: float = 3e-4  # learning rate of the actor's Adam
    q_lr: float = 1e-3  # learning rate of the critics' Adam and of the temperature (SAC's paper: 3e-4)
    reward_scale: float = 0.25  # factor of rewards; lambda, exp(-loss**2), is meant for critics' losses of about 1
    gamma: float = 0.99  # discount factor, from 0 to 1
    tau: float = 0.005  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    reliable_lambda: bool = True  # let the actor learn in n / (2 - lambda) of n updates; off: in all
    alpha: float = 0.2  # temperature, the coefficient of the entropy, with --no-autotune
    autotune: bool = True  # learn the temperature for a target entropy of -action_dim (actions in [-1, 1])


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


class DenseNet(nn.Module):
    """Two layers with a path around each: every layer sees also what the layer before it saw."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width // 2), nn.Linear(width * 3 // 2, width * 3 // 4)
        for linear in (self.first, self.second):
            nn.init.orthogonal_(linear.weight)

    def forward(self, x):  # (batch, width) -> (batch, 9 / 4 * width)
        x = torch.cat([x, self.first(x).relu()], 1)
        return torch.cat([x, F.hardswish(self.second(x))], 1)


def dense_mlp(fan_in, width, fan_out):
    """A linear layer with ReLU, a DenseNet, and a linear layer for all outputs."""
    return nn.Sequential(nn.Linear(fan_in, width), nn.ReLU(), DenseNet(width), nn.Linear(width * 9 // 4, fan_out))


class Actor(nn.Module):
    """A Gaussian policy, squashed into [-1, 1] by tanh."""

    def __init__(self, obs_dim, action_dim, width):
        super().__init__()
        self.net = dense_mlp(obs_dim, width, 2 * action_dim)

    def forward(self, obs, noise):  # (batch, obs_dim), (batch, action_dim) -> (batch, action_dim), (batch,)
        """Actions for standard normal noise, and their log-probabilities (appendix C)."""
        mean, log_std = self.net(obs).chunk(2, 1)
        log_std = 3.5 * log_std.tanh() - 1.5  # in [-5, 2]; SAC's authors clip it instead
        x = mean + log_std.exp() * noise
        logprob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        logprob = logprob - 2 * (math.log(2) - x - F.softplus(-2 * x))  # log(1 - tanh(x)^2), numerically stable
        return x.tanh(), logprob.sum(1)

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The actions of the mean; with standard normal noise (batch, action_dim), samples of the policy."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.net[0].weight.device).flatten(1)
        noise = torch.as_tensor(noise, dtype=torch.float32, device=obs.device)
        return self(obs, noise)[0].cpu().numpy()


class Critic(nn.Module):
    """Two estimates of the value of an action, which share all layers except the last."""

    def __init__(self, obs_dim, action_dim, width):
        super().__init__()
        self.net = dense_mlp(obs_dim + action_dim, width, 2)

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
        return self.net(torch.cat([obs, action], 1)).unbind(1)


class Temperature(nn.Module):
    """alpha, the coefficient of the entropy."""

    def __init__(self, alpha):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(max(alpha, 1e-30)).log())  # 0 has no logarithm

    def forward(self):
        return self.log_alpha.exp()


class Reliability(nn.Module):
    """lambda, how far the critics can be relied on: from 0 (large losses) to 1; and when it is the actor's turn."""

    def __init__(self, start):
        super().__init__()
        self.register_buffer("mean_loss", torch.tensor(-math.log(start)).sqrt())  # so that lambda is `start` at first
        self.register_buffer("due", torch.zeros(()))  # updates of the actor that are due, a fraction of one

    def forward(self):  # -> ()
        return (-(self.mean_loss**2)).exp()

    def update(self, loss):
        """Count the loss of the critics in the moving average."""
        self.mean_loss.lerp_(loss, 0.005)

    def actor_turn(self):
        """Whether the actor learns in this update: in n of them n / (2 - lambda) times, evenly spread."""
        self.due += 1 / (2 - self())
        turn = self.due.floor()
        self.due -= turn
        return bool(turn)


def mod_critic_loss(critic, target_critic, target_actor, alpha, batch, noise, reward_scale, gamma):
    """The Huber losses of both critics, added, and the metrics. The target has the smaller value of the two target
    critics (section 6) for an action of the target actor."""
    with torch.no_grad():
        next_action, next_logprob = target_actor(batch.next_obs, noise)
        next_value = torch.min(*target_critic(batch.next_obs, next_action)) - alpha * next_logprob  # Eq. 3
        target = reward_scale * batch.reward + gamma * (1 - batch.done) * next_value
    q1, q2 = critic(batch.obs, batch.action)
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss1, loss2 = F.smooth_l1_loss(q1, target), F.smooth_l1_loss(q2, target)
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


def grown(batch_size, inserted, capacity):
    """The batch size for a buffer that is filled in part: twice as large for a full one as for an empty one."""
    return int(batch_size * (1 + min(inserted / capacity, 1)))


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
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]
    run.require(args.width % 16 == 0, f"--width {args.width} must be a multiple of 16")

    actor = Actor(obs_dim, action_dim, args.width).to(run.device)
    critic = Critic(obs_dim, action_dim, args.width * 5 // 4).to(run.device)
    target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(run.device)
    reliability = Reliability(0.5 if args.reliable_lambda else 1.0).to(run.device)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.q_lr)
    alpha_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.q_lr)
    # critic_step(*inputs): an optimiser step on mod_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(mod_critic_loss, critic, critic_optimizer)
    actor_step = run.gradient_step(sac_actor_loss, actor, actor_optimizer)  # also returns the entropy, detached
    alpha_step = run.gradient_step(alpha_loss, temperature, alpha_optimizer)
    replay = Replay(args.buffer_size, obs_dim, space)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_actor=target_actor, target_critic=target_critic)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer)
    parts |= dict(temperature=temperature, reliability=reliability, replay=replay, envs=envs)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every environment
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            action = actor.act(obs, torch.randn(args.num_envs, action_dim))
        current_obs, reward, terminated, truncated, infos = envs.step(action)  # current_obs: for the next action
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: a time limit is not the end of the task
        next_obs = infos["next_obs"]  # what the step led to: not current_obs where an episode ended
        replay.add(Batch(obs, action, reward, terminated, next_obs))
        obs = current_obs

        # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        for update in due_updates(args, global_step, enough):
            # "update the Q-function parameters" (Algorithm 1)
            batch_size = args.batch_size
            if args.growing_batch:
                batch_size = grown(batch_size, replay.inserted, args.buffer_size)
            batch, alpha = replay.sample(batch_size, run.device), temperature().detach()
            noise = torch.randn(batch_size, action_dim, device=run.device)
            metrics = critic_step(target_critic, target_actor, alpha, batch, noise, args.reward_scale, args.gamma)
            run.learned(metrics)
            if args.reliable_lambda:
                reliability.update(metrics["losses/qf_loss"])

            # "update policy weights", in n / (2 - lambda) of n updates
            if reliability.actor_turn():
                noise = torch.randn(batch_size, action_dim, device=run.device)
                metrics, entropy = actor_step(critic, temperature().detach(), batch, noise)
                run.learned(metrics)
                soft_update(target_actor, actor, args.tau)
                if args.autotune:  # "adjust temperature", by the entropy of the policy before the actor's step
                    run.learned(alpha_step(entropy, -action_dim))

            # "update target network weights"
            soft_update(target_critic, critic, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"losses/alpha": temperature().detach(), "losses/reliable_lambda": reliability()})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    # a last evaluation; `solo play` takes these policies, greedy and drawn at random
    run.close(actor.act, make_env, sample=lambda obs: actor.act(obs, torch.randn(len(obs), action_dim)))
