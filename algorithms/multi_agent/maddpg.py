# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax,pettingzoo]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Multi-agent deep deterministic policy gradient (MADDPG), discrete or continuous actions, vector observations.

Paper     Lowe et al. 2017, https://arxiv.org/abs/1706.02275 ("Eq. n" below)
Run       solo train maddpg --env-id team/simple_spread_v3
Spaces    vector -> continuous, or discrete, of each agent
Differs   from ddpg_continuous_action.py: N agents, each with an actor, which sees its own observation, and a critic of
          its own rewards, which sees the observations and actions of all; with discrete actions a softmax of logits
          and Gumbel noise in place of tanh and Gaussian noise
Not for   one agent: ddpg_continuous_action.py
Details   docs/algorithms/maddpg.md
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
    env_kind = "agents"  # --env-id is a game of several agents
    env_id: str = "team/simple_spread_v3"  # id of the game
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 32  # environments stepped in parallel
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    utd_ratio: float = 0.08  # critic updates per environment step (update-to-data ratio)
    learning_rate: float = 1e-3  # learning rate of Adam
    max_grad_norm: float = 0.5  # clip the global norm of the gradient, of all agents; inf: do not clip
    gamma: float = 0.95  # discount factor, from 0 to 1
    tau: float = 0.01  # soft-update coefficient of the target networks (1: hard copy), from 0 to 1
    policy_frequency: int = 1  # critic updates per actor update (delayed updates)
    exploration_noise: float = 0.1  # standard deviation of the noise on continuous actions
    output_penalty: float = 1e-3  # coefficient of the mean square of the actors' outputs in their loss
    independent: bool = False  # a critic sees the observation and the action of its own agent only


class Batch(NamedTuple):
    """Transitions of games. No loss counts the rows of agents that have left: they do 0, and see 0 from the second step
    on, in the first one their last observation."""

    obs: torch.Tensor  # (batch_size, num_agents, obs_dim)
    action: torch.Tensor  # (batch_size, num_agents, action_dim): in [-1, 1], or of discrete actions one-hot
    reward: torch.Tensor  # (batch_size, num_agents)
    done: torch.Tensor  # (batch_size, num_agents), terminated: 0 at a time limit, which is not the end of the task
    next_obs: torch.Tensor  # (batch_size, num_agents, obs_dim)
    alive: torch.Tensor  # (batch_size, num_agents), 1 for an agent that plays at `obs`
    plays: torch.Tensor  # (batch_size, num_agents), 1 for one that plays at `next_obs`, or would without a time limit
    mask: torch.Tensor  # (batch_size, num_agents, action_dim), True for what is allowed at `obs`
    next_mask: torch.Tensor  # (batch_size, num_agents, action_dim)


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
    """One game, for training and for evaluation; actions in [-1, 1] if continuous and bounded."""
    env = gym.make(env_id, pad=True, **kwargs)
    space = env.action_space
    continuous = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
    return ScaleAction(env) if continuous and np.isfinite([space.low, space.high]).all() else env


class GameReplay:
    """The last `capacity` transitions, in host memory: an array for each field of Batch, in their order."""

    def __init__(self, capacity, num_agents, obs_dim, action_dim):
        shape = (capacity, num_agents)
        self.arrays = {
            "obs": np.zeros((*shape, obs_dim), np.float32),
            "action": np.zeros((*shape, action_dim), np.float32),
            "reward": np.zeros(shape, np.float32),
            "done": np.zeros(shape, np.float32),
            "next_obs": np.zeros((*shape, obs_dim), np.float32),
            "alive": np.zeros(shape, np.float32),
            "plays": np.zeros(shape, np.float32),
            "mask": np.zeros((*shape, action_dim), bool),
            "next_mask": np.zeros((*shape, action_dim), bool),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: transitions ever inserted

    def add(self, batch):
        """Write transitions over the oldest: a Batch of NumPy arrays, (num_envs, num_agents, ...)."""
        index = (self.inserted + np.arange(len(batch.reward))) % self.capacity
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


def action_noise(shape, discrete, std, device):
    """Gaussian noise on continuous actions; Gumbel noise on logits, whose largest is then a sample of their softmax."""
    noise = np.random.gumbel(size=shape) if discrete else std * np.random.randn(*shape)
    return torch.as_tensor(noise, dtype=torch.float32, device=device)


def straight_through(logits):
    """One-hot of the largest, with the gradient of the softmax. (..., num_actions) -> (..., num_actions)"""
    soft = logits.softmax(-1)
    hard = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(soft.dtype)
    return hard + (soft - soft.detach())


class Actor(nn.Module):
    """A policy for each agent, with its own weights, of its own observation. Dims: lists, one size per agent."""

    def __init__(self, obs_dims, action_dims, discrete):
        super().__init__()
        self.obs_dims, self.action_dim, self.discrete = obs_dims, max(action_dims), discrete
        sizes = zip(obs_dims, action_dims, strict=True)
        self.nets = nn.ModuleList(mlp(obs_dim, 64, 64, action_dim) for obs_dim, action_dim in sizes)

    def forward(self, obs):  # (batch, num_agents, obs_dim) -> (batch, num_agents, action_dim), padded with 0
        outputs = [net(obs[:, k, :size]) for k, (net, size) in enumerate(zip(self.nets, self.obs_dims, strict=True))]
        return torch.stack([F.pad(x, (0, self.action_dim - x.shape[1])) for x in outputs], 1)

    def action(self, output, mask, noise=0.0):
        """Actions as in Batch, of outputs, masks and noise: all (batch, num_agents, action_dim)."""
        if self.discrete:
            return straight_through((output + noise).masked_fill(~mask, -torch.inf))
        return (output.tanh() + noise).clamp(-1, 1) * mask

    @torch.no_grad()
    def act(self, obs, action_mask, noise=0.0):  # NumPy (batch, num_agents, *obs_shape) -> (batch, num_agents, ...)
        """The policies' actions, as the games take them, with `noise` (batch, num_agents, action_dim)."""
        device = self.nets[0][0].weight.device
        output = self(torch.as_tensor(obs, dtype=torch.float32, device=device).flatten(2))
        mask = torch.ones_like(output) if action_mask is None else torch.as_tensor(action_mask, device=device)
        action = self.action(output, mask.bool(), noise)
        return (action.argmax(2) if self.discrete else action).cpu().numpy()


class Critic(nn.Module):
    """For each agent an estimate, with its own weights, of the value of the actions of all."""

    def __init__(self, obs_dims, action_dims, independent):
        super().__init__()
        self.sizes = list(zip(obs_dims, action_dims, strict=True))
        self.seen = [[k] if independent else list(range(len(obs_dims))) for k in range(len(obs_dims))]
        self.q = nn.ModuleList(mlp(sum(sum(self.sizes[j]) for j in seen), 64, 64, 1) for seen in self.seen)

    def inputs(self, k, obs, action):
        """What the critic of agent k sees, without padding: (batch, the sum of true sizes)."""
        parts = [(obs[:, j, : self.sizes[j][0]], action[:, j, : self.sizes[j][1]]) for j in self.seen[k]]
        return torch.cat([x for part in parts for x in part], 1)

    def of_agent(self, k, obs, action):  # (batch, num_agents, obs_dim), (batch, num_agents, action_dim) -> (batch,)
        return self.q[k](self.inputs(k, obs, action)).squeeze(1)

    def forward(self, obs, action):  # (batch, num_agents, obs_dim), (batch, num_agents, action_dim)
        return torch.stack([self.of_agent(k, obs, action) for k in range(len(self.q))], 1)  # (batch, num_agents)


def mean_of_alive(x, alive):
    """For each agent the mean over the transitions in which it plays, 0 without any. (batch, num_agents), twice."""
    return (x * alive).sum(0) / alive.sum(0).clamp(min=1)


def maddpg_critic_loss(critic, target_critic, target_actor, batch, noise, gamma):
    """Eq. 6 of each agent, added, and the metrics, means over agents. Discrete target actions are sampled."""
    with torch.no_grad():
        next_action = target_actor.action(target_actor(batch.next_obs), batch.next_mask, noise) * batch.plays[..., None]
        next_value = target_critic(batch.next_obs, next_action)
        target = batch.reward + gamma * (1 - batch.done) * next_value  # y of Eq. 6
    q = critic(batch.obs, batch.action)
    assert q.shape == target.shape == batch.reward.shape
    losses = mean_of_alive((q - target) ** 2, batch.alive)
    return losses.sum(), {"losses/qf1_values": mean_of_alive(q, batch.alive).mean(), "losses/qf1_loss": losses.mean()}


def maddpg_actor_loss(actor, critic, batch, noise, output_penalty):
    """The negative of what Eq. 5 ascends, for each agent, added, and the metrics, means over agents.

    Agent k takes the action of its policy, all others those of the batch, as in the authors' code.
    """
    output = actor(batch.obs)
    action = actor.action(output, batch.mask, noise)
    q = []
    for k in range(action.shape[1]):
        own = [batch.action[:, :k], action[:, k : k + 1], batch.action[:, k + 1 :]]
        q.append(critic.of_agent(k, batch.obs, torch.cat(own, 1)))
    losses = mean_of_alive(output_penalty * output.square().mean(2) - torch.stack(q, 1), batch.alive)
    return losses.sum(), {"losses/actor_loss": losses.mean()}


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
    envs = run.multi_agent_env(make_env, args.env_id, args.num_envs)  # where a game ends, obs begins the next one
    space = envs.agent_action_space
    discrete = isinstance(space, gym.spaces.Discrete)
    run.require_spaces(envs, obs="vector", action="discrete" if discrete else "bounded")
    num_iterations = run.iterations(args.num_envs, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    obs_dims, action_dims, num_agents = envs.agent_obs_dims, envs.agent_action_dims, envs.num_agents
    shape = (args.num_envs, num_agents, max(action_dims))
    own = np.array([np.arange(shape[2]) < np.array(action_dims)[:, None]] * args.num_envs)  # not padding

    actor = Actor(obs_dims, action_dims, discrete).to(run.device)
    critic = Critic(obs_dims, action_dims, args.independent).to(run.device)
    target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.learning_rate)
    # critic_step(*inputs): an optimiser step on maddpg_critic_loss(critic, *inputs); returns its metrics
    critic_step = run.gradient_step(maddpg_critic_loss, critic, critic_optimizer, args.max_grad_norm)
    actor_step = run.gradient_step(maddpg_actor_loss, actor, actor_optimizer, args.max_grad_norm)
    replay = GameReplay(args.buffer_size, num_agents, max(obs_dims), max(action_dims))
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(actor=actor, critic=critic, target_actor=target_actor, target_critic=target_critic)
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, replay=replay, envs=envs)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (num_envs, num_agents, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every game, "w.r.t. the current policy and exploration" (Algorithm 1)
        alive, mask = envs.alive, own if envs.action_mask is None else envs.action_mask
        if global_step <= args.learning_starts:
            action = np.random.uniform(-1, 1, shape).astype(np.float32)
            action = np.where(mask, action, -np.inf).argmax(2) if discrete else action
        else:
            action = actor.act(obs, mask, action_noise(shape, discrete, args.exploration_noise, run.device))
        current_obs, reward, terminated, truncated, infos = envs.step(action)  # current_obs: for the next action
        run.episodes(global_step, reward, terminated | truncated, per_agent=True)

        # ---- 2. store: a time limit is not the end of the task; where a game ends, current_obs is the next one's
        vector = alive[..., None] * (np.eye(shape[2])[action] if discrete else action * own)
        next_obs, next_mask = infos["next_obs"], infos.get("next_action_mask", own)  # what the step led to
        plays = ~terminated & (alive | ~truncated)  # also who comes in the next step
        replay.add(Batch(obs, vector, reward, terminated, next_obs, alive, plays, mask, next_mask))
        obs = current_obs

        # ---- 3. learn: utd_ratio critic updates for each environment step since learning_starts
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        for update in due_updates(args, global_step, enough):
            # "update critic by minimizing the loss" (Algorithm 1)
            batch = replay.sample(args.batch_size, run.device)
            noise = action_noise((args.batch_size, *shape[1:]), discrete, 0.0, run.device)
            metrics = critic_step(target_critic, target_actor, batch, noise, args.gamma)
            run.learned(metrics)

            # "update actor using the sampled policy gradient", "update target network parameters"
            if update % args.policy_frequency == 0:
                noise = action_noise((args.batch_size, *shape[1:]), discrete, 0.0, run.device)
                metrics = actor_step(critic, batch, noise, args.output_penalty)
                run.learned(metrics)
                soft_update(target_actor, actor, args.tau)
                soft_update(target_critic, critic, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
