# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""InterAC: a deterministic actor and a critic in one network, continuous actions, vector observations.

Paper     ElegantRL 2020, https://github.com/AI4Finance-Foundation/ElegantRL (AgentInterAC; there is no paper)
          DDPG: Lillicrap et al. 2015, https://arxiv.org/abs/1509.02971 ("Eq. n" below)
Run       solo train inter_ac --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from inter_sac.py: a deterministic policy, explored by noise; one critic, whose last layer is divided by its
          spectral norm; the target is a hard copy, with and without noise on its actions, and holds the policy in
          the place of an anchor
Not for   discrete actions: sac_discrete.py
Details   docs/algorithms/inter_ac.md
"""

import copy
import math
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
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    learning_starts: int = 5_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    growing_batch: bool = True  # let the batch grow with the filled part of the buffer, up to twice its size
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    width: int = 128  # units of a layer, a multiple of 4
    learning_rate: float = 3e-4  # learning rate of Adam
    reward_scale: float = 0.25  # factor of rewards; lambda, exp(-loss**2), is meant for critics' losses of about 1
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 128  # critic updates between target network updates
    exploration_noise: float = 0.2  # standard deviation of the noise on actions
    policy_noise: float = 0.4  # standard deviation of the noise on target actions


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


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


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


class SpectralLinear(nn.Linear):
    """A linear layer whose weight is divided by its spectral norm, the largest singular value."""

    def forward(self, x):  # (batch, fan_in) -> (batch, fan_out)
        return F.linear(x, self.weight / torch.linalg.matrix_norm(self.weight, 2), self.bias)


class Agent(nn.Module):
    """A deterministic policy, actions in [-1, 1], and a critic in one network: encoders, a trunk that both share, and a
    head for each. The trunk sees the code of an observation for the policy, the sum of both codes for the critic."""

    def __init__(self, obs_dim, action_dim, width):
        super().__init__()
        self.encode_obs, self.encode_action = mlp(obs_dim, width, width), mlp(action_dim, width, width)
        self.trunk = DenseNet(width)
        self.action = nn.Sequential(nn.Linear(width * 9 // 4, width), nn.Hardswish(), nn.Linear(width, action_dim))
        self.q = nn.Sequential(nn.Linear(width * 9 // 4, width), nn.Hardswish(), SpectralLinear(width, 1))

    def policy(self, obs):  # (batch, obs_dim) -> (batch, action_dim)
        return self.action(self.trunk(self.encode_obs(obs))).tanh()

    def forward(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,)
        """An estimate of the value of an action."""
        return self.q(self.trunk(self.encode_obs(obs) + self.encode_action(action))).squeeze(1)

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The policy's actions."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.q[0].weight.device).flatten(1)
        return self.policy(obs).cpu().numpy()


def explored(action, noise, uniform):  # 3 x (num_envs, action_dim) -> (num_envs, action_dim)
    """Actions with noise; a number that has left [-1, 1] is replaced by a uniform one."""
    action = action + noise
    return np.where(np.abs(action) > 1, uniform, action).astype(np.float32)


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


def inter_ac_critic_loss(agent, target_agent, batch, next_action, noise, reward_scale, gamma):
    """Eq. 4 with the Huber loss, and the metrics. The next value is the mean of those of the next action with and
    without noise."""
    with torch.no_grad():
        noisy_action = (next_action + noise).clamp(-1, 1)
        next_value = target_agent(batch.next_obs, next_action) + target_agent(batch.next_obs, noisy_action)
        target = reward_scale * batch.reward + gamma * (1 - batch.done) * next_value / 2  # Eq. 5
    q = agent(batch.obs, batch.action)
    assert q.shape == target.shape == batch.reward.shape
    loss = F.smooth_l1_loss(q, target)
    return loss, {"losses/qf1_values": q.mean(), "losses/qf1_loss": loss}


def inter_ac_actor_loss(agent, obs):
    """The negative of the value that Eq. 6 ascends. The critic's weights are constants here: the derivative is that by
    the action alone."""
    constants = {name: x.detach() for name, x in agent.named_parameters()}
    return -torch.func.functional_call(agent, constants, (obs, agent.policy(obs))).mean()


def inter_ac_loss(agent, target_agent, lam, batch, noise, reward_scale, gamma, actor_turn):
    """critic + lam / 2 * actor + (1 - lam) * the distance from the target's policy, and the metrics. The actor's part
    is there in its turn only."""
    with torch.no_grad():
        next_action = target_agent.policy(batch.next_obs)
    loss, metrics = inter_ac_critic_loss(agent, target_agent, batch, next_action, noise, reward_scale, gamma)
    metrics["losses/anchor_loss"] = distance = F.smooth_l1_loss(agent.policy(batch.next_obs), next_action)
    loss = loss + (1 - lam) * distance
    if actor_turn:
        metrics["losses/actor_loss"] = actor_loss = inter_ac_actor_loss(agent, batch.obs)
        loss = loss + 0.5 * lam * actor_loss
    return loss, metrics


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
    run.require(args.width % 4 == 0, f"--width {args.width} must be a multiple of 4")

    agent = Agent(obs_dim, action_dim, args.width).to(run.device)
    target_agent = copy.deepcopy(agent)
    reliability = Reliability(0.5).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate)
    # agent_step(*inputs): an optimiser step on inter_ac_loss(agent, *inputs); returns its metrics
    agent_step = run.gradient_step(inter_ac_loss, agent, optimizer)
    replay = Replay(args.buffer_size, obs_dim, space)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(agent=agent, target_agent=target_agent, optimizer=optimizer, reliability=reliability)
    parts |= dict(replay=replay, envs=envs)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every environment
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            noise = args.exploration_noise * np.random.randn(args.num_envs, action_dim)
            action = explored(agent.act(obs), noise, np.random.uniform(-1, 1, noise.shape))
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
            batch_size = args.batch_size
            if args.growing_batch:
                batch_size = grown(batch_size, replay.inserted, args.buffer_size)
            batch = replay.sample(batch_size, run.device)
            noise = args.policy_noise * torch.randn(batch_size, action_dim, device=run.device)

            # one step for the critic, for the actor in its turn, and for the distance from the target's policy
            actor_turn = reliability.actor_turn()
            inputs = (target_agent, reliability(), batch, noise, args.reward_scale, args.gamma)
            metrics = agent_step(*inputs, actor_turn)
            run.learned(metrics)
            reliability.update(metrics["losses/qf1_loss"])

            # "update the target networks": a hard copy, left out while lambda is small
            if (update + 1) % args.target_network_frequency == 0 and reliability() > 0.1:
                target_agent.load_state_dict(agent.state_dict())

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"losses/reliable_lambda": reliability()})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
