# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[mujoco]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""TD7: TD3 with learned embeddings, prioritised replay and checkpoints of the policy, continuous actions, vectors.

Paper     Fujimoto et al. 2023, https://arxiv.org/abs/2306.02451 ("Eq. n" below)
          LAP, prioritised replay with the Huber loss: Fujimoto et al. 2020, https://arxiv.org/abs/2007.06049
Run       solo train td7 --env-id Hopper-v5
Spaces    vector -> continuous
Differs   from td3_continuous_action.py: actor and critics see learned embeddings of states and actions; transitions
          are drawn by priority; target values are clipped; a policy is assessed by whole episodes, the best one kept
Not for   several environments: td3_continuous_action.py; discrete actions: sac_discrete.py
Details   docs/algorithms/td7.md
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

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "Hopper-v5"  # Gymnasium id of the environment
    total_timesteps: int = 1_000_000  # environment steps
    learning_starts: int = 25_000  # environment steps of random actions before the first gradient step; 0: none
    buffer_size: int = 1_000_000  # transitions in the replay buffer
    batch_size: int = 256  # transitions per gradient step
    utd_ratio: float = 1.0  # critic updates per environment step (update-to-data ratio)
    learning_rate: float = 3e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 250  # critic updates between updates of the target networks and fixed encoder
    policy_frequency: int = 2  # critic updates per actor update (delayed updates)
    exploration_noise: float = 0.1  # standard deviation of the noise on actions
    policy_noise: float = 0.2  # standard deviation of the noise on target actions
    noise_clip: float = 0.5  # largest noise on target actions (c); inf: do not clip
    prioritized_replay_alpha: float = 0.4  # exponent of the error in a priority (0: drawn uniformly), from 0 to 1
    early_steps: int = 750_000  # environment steps after which assessments are late ones; 0: all are
    early_episodes: int = 1  # episodes of an early assessment
    late_episodes: int = 20  # episodes of a late assessment
    reset_weight: float = 0.9  # factor of the best policy's smallest return when late assessments begin, from 0 to 1


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


class LAPReplay:
    """The last `capacity` transitions, in host memory: an array for each field of Batch, in their order. They are drawn
    in proportion to their priorities (LAP); new ones have the largest."""

    def __init__(self, capacity, obs_dim, action_space):
        self.arrays = {
            "obs": np.zeros((capacity, obs_dim), np.float32),
            "action": np.zeros((capacity, *action_space.shape), action_space.dtype),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "next_obs": np.zeros((capacity, obs_dim), np.float32),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: transitions ever inserted
        self.state = SimpleNamespace(priority=np.zeros(capacity), largest=1.0)  # what else a checkpoint holds

    def add(self, batch):
        """Write transitions over the oldest: a Batch of NumPy arrays, (num_envs, ...) or (num_steps, num_envs, ...)."""
        index = (self.inserted + np.arange(batch.reward.size)) % self.capacity
        for array, rows in zip(self.arrays.values(), batch, strict=True):
            array[index] = rows.reshape(len(index), *array.shape[1:])
        self.state.priority[index] = self.state.largest
        self.inserted += len(index)

    def sample(self, batch_size, device):
        """A Batch of transitions, and their indices (batch_size,)."""
        total = self.state.priority[: self.inserted].cumsum()
        index = np.searchsorted(total, np.random.random(batch_size) * total[-1])
        return Batch(*(torch.from_numpy(array[index]).to(device) for array in self.arrays.values())), index

    def update(self, index, error, alpha):
        """Give the transitions of these indices the priorities max(error, 1)^alpha; error: a tensor (batch_size,)."""
        priority = error.clamp(min=1).double().cpu().numpy() ** alpha
        self.state.priority[index] = priority
        self.state.largest = max(self.state.largest, float(priority.max()))

    def forget_largest(self):
        """New transitions get the largest priority in the buffer from now on, no longer the largest ever."""
        self.state.largest = float(self.state.priority.max())


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def elu_mlp(*sizes):
    """Linear layers with ELU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ELU())]
    return nn.Sequential(*layers[:-1])


def avg_l1_norm(x):  # (batch, width) -> (batch, width)
    """Each row divided by its mean absolute value."""
    return x / x.abs().mean(1, keepdim=True).clamp(min=1e-8)


class Encoder(nn.Module):
    """SALE: embeddings of states and of states with actions; the second predicts the next state's."""

    def __init__(self, obs_dim, action_dim):
        super().__init__()
        self.f, self.g = elu_mlp(obs_dim, 256, 256, 256), elu_mlp(256 + action_dim, 256, 256, 256)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, 256), zs
        return avg_l1_norm(self.f(obs))

    def predict(self, zs, action):  # (batch, 256), (batch, action_dim) -> (batch, 256), zsa
        return self.g(torch.cat([zs, action], 1))


class EmbeddedMLP(nn.Module):
    """An MLP of an embedding and of x, which passes a linear layer and AvgL1Norm first."""

    def __init__(self, make_mlp, x_dim, embedding_dim, output_dim):
        super().__init__()
        self.inner, self.net = nn.Linear(x_dim, 256), make_mlp(256 + embedding_dim, 256, 256, output_dim)

    def forward(self, x, embedding):  # (batch, x_dim), (batch, embedding_dim) -> (batch, output_dim)
        return self.net(torch.cat([avg_l1_norm(self.inner(x)), embedding], 1))


class Agent(nn.Module):
    """A deterministic policy, actions in [-1, 1]; two critics; and the fixed encoder of which they get embeddings."""

    def __init__(self, encoder, obs_dim, action_dim):
        super().__init__()
        self.encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.actor = EmbeddedMLP(mlp, obs_dim, 256, action_dim)
        self.critics = nn.ModuleList(EmbeddedMLP(elu_mlp, obs_dim + action_dim, 512, 1) for _ in range(2))

    def forward(self, obs):  # (batch, obs_dim) -> (batch, action_dim)
        return self.actor(obs, self.encoder(obs)).tanh()

    def values(self, obs, action):  # (batch, obs_dim), (batch, action_dim) -> (batch,), (batch,)
        zs = self.encoder(obs)
        x, embedding = torch.cat([obs, action], 1), torch.cat([zs, self.encoder.predict(zs, action)], 1)
        return [critic(x, embedding).squeeze(1) for critic in self.critics]

    @torch.no_grad()
    def act(self, obs, noise=0.0):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim)
        """The policy's actions with `noise` (batch, action_dim) added."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor.inner.weight.device).flatten(1)
        return (self(obs).cpu().numpy() + noise).clip(-1, 1)


def smoothed(action, noise, noise_clip):
    """Target actions with clipped noise, both (batch, action_dim), kept within [-1, 1]."""
    return (action + noise.clamp(-noise_clip, noise_clip)).clamp(-1, 1)


def td7_encoder_loss(encoder, batch):
    """The mean squared error of the predicted embeddings of the next states (Eq. 2), and the metrics."""
    loss = F.mse_loss(encoder.predict(encoder(batch.obs), batch.action), encoder(batch.next_obs).detach())
    return loss, {"losses/encoder_loss": loss}


def td7_critic_loss(agent, target_agent, bounds, batch, noise, noise_clip, gamma):
    """The Huber losses of both critics, added; the metrics; the larger of their errors (batch_size,), of which the
    priorities are made; and the targets (batch_size,). `bounds`: least and largest value of the next state."""
    with torch.no_grad():
        next_action = smoothed(target_agent(batch.next_obs), noise, noise_clip)
        next_value = torch.min(*target_agent.values(batch.next_obs, next_action)).clamp(*bounds)
        target = batch.reward + gamma * (1 - batch.done) * next_value
    q1, q2 = agent.values(batch.obs, batch.action)
    assert q1.shape == q2.shape == target.shape == batch.reward.shape
    loss1, loss2 = F.smooth_l1_loss(q1, target), F.smooth_l1_loss(q2, target)
    metrics = {"losses/qf1_values": q1.mean(), "losses/qf1_loss": loss1}
    return loss1 + loss2, metrics, (torch.max((q1 - target).abs(), (q2 - target).abs()), target)


def td7_actor_loss(agent, batch):
    """The negative of the mean of both critics' values, and the metrics."""
    q1, q2 = agent.values(batch.obs, agent(batch.obs))
    loss = -(q1 + q2).mean() / 2
    return loss, {"losses/actor_loss": loss}


def count_step(assessment, reward, done, num_episodes):
    """Count one step of the current policy. Whether its assessment is over: all its episodes are played, or one of them
    has a smaller return than the worst one of the best policy."""
    assessment.steps += 1
    assessment.episode_return += reward
    if done:
        assessment.episodes += 1
        assessment.smallest = min(assessment.smallest, assessment.episode_return)
        assessment.episode_return = 0.0
    return done and (assessment.episodes >= num_episodes or assessment.smallest < assessment.best)


def updates_between(args, before, after, enough):
    """The numbers of the critic updates due for the environment steps after `before` up to `after`: in total utd_ratio
    for each after learning_starts. None where the buffer does not hold `enough`; they are not made up for."""
    first, last = (int(args.utd_ratio * max(0, step - args.learning_starts)) for step in (before, after))
    return range(first, last if enough else first)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, 1)  # one, by whose whole episodes policies are assessed
    run.require_spaces(envs, obs="vector", action="bounded")
    space = envs.single_action_space
    num_iterations = run.iterations(1, batch=args.batch_size)  # rounded down; the buffer must hold a batch
    obs_dim, action_dim = int(np.prod(envs.single_observation_space.shape)), space.shape[0]

    encoder = Encoder(obs_dim, action_dim).to(run.device)
    agent = Agent(encoder, obs_dim, action_dim).to(run.device)
    # the best agent so far, which evaluations play: the checkpoint of the paper
    target_agent, best_agent = copy.deepcopy(agent), copy.deepcopy(agent)
    encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(agent.critics.parameters(), lr=args.learning_rate)
    actor_optimizer = torch.optim.Adam(agent.actor.parameters(), lr=args.learning_rate)
    # encoder_step(*inputs): an optimiser step on td7_encoder_loss(encoder, *inputs); returns its metrics
    encoder_step = run.gradient_step(td7_encoder_loss, encoder, encoder_optimizer)
    critic_step = run.gradient_step(td7_critic_loss, agent, critic_optimizer)
    actor_step = run.gradient_step(td7_actor_loss, agent, actor_optimizer)
    replay = LAPReplay(args.buffer_size, obs_dim, space)
    assessment = SimpleNamespace(
        steps=0,  # of the current policy, since it was last changed
        episodes=0,
        episode_return=0.0,  # of the episode so far
        smallest=math.inf,  # return of its episodes
        best=-math.inf,  # the smallest return of the best policy
    )
    now = SimpleNamespace(
        smallest_target=torch.tensor(1e8, device=run.device),  # so far: it starts above all targets, and below:
        largest_target=torch.tensor(-1e8, device=run.device),
        bounds=torch.zeros(2, device=run.device),  # both at the last update of the target networks, 0 until the first
    )
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(encoder=encoder, agent=agent, target_agent=target_agent, best_agent=best_agent)
    parts |= dict(encoder_optimizer=encoder_optimizer, critic_optimizer=critic_optimizer)
    parts |= dict(actor_optimizer=actor_optimizer, replay=replay, envs=envs, assessment=assessment, now=now)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (1, *obs_shape)
    if run.restarted:  # episodes that a resume could not continue
        assessment.episode_return = 0.0  # the episode is gone
    for iteration in run.loop(start, num_iterations):
        global_step = iteration + 1  # at the end of this iteration

        # ---- 1. act: one step
        if global_step <= args.learning_starts:
            action = envs.action_space.sample()
        else:
            action = agent.act(obs, args.exploration_noise * np.random.randn(1, action_dim))
        current_obs, reward, terminated, truncated, infos = envs.step(action)  # current_obs: for the next action
        run.episodes(global_step, reward, terminated | truncated)

        # ---- 2. store: a time limit is not the end of the task
        next_obs = infos["next_obs"]  # what the step led to: not current_obs where an episode ended
        replay.add(Batch(obs, action, reward, terminated, next_obs))
        obs = current_obs

        # ---- 3. assess: an agent stays as it is for whole episodes, and is judged by the smallest of their returns
        began = iteration - assessment.steps  # environment steps before this assessment
        num_episodes = args.early_episodes if began < args.early_steps else args.late_episodes
        over = count_step(assessment, float(reward[0]), bool(terminated[0] | truncated[0]), num_episodes)
        if over and began >= args.learning_starts and assessment.smallest >= assessment.best:
            best_agent.load_state_dict(agent.state_dict())
            assessment.best = assessment.smallest
        if over and began < args.early_steps <= global_step:
            # the smallest return of more episodes will be less: go down by a fraction of it, also where it is negative
            assessment.best *= args.reset_weight if assessment.best > 0 else 2 - args.reset_weight
        if over:
            assessment.steps, assessment.episodes, assessment.smallest = 0, 0, math.inf

        # ---- 4. learn, when an assessment is over: utd_ratio critic updates for each of its steps
        # none while the buffer holds too little: learning_starts < batch_size, or a resume without --save-replay
        enough = replay.inserted >= max(args.batch_size, args.learning_starts)
        for update in updates_between(args, began, global_step, over and enough):
            batch, index = replay.sample(args.batch_size, run.device)
            run.learned(encoder_step(batch))

            noise = args.policy_noise * torch.randn(args.batch_size, action_dim, device=run.device)
            metrics, (error, target) = critic_step(target_agent, now.bounds, batch, noise, args.noise_clip, args.gamma)
            run.learned(metrics)
            replay.update(index, error, args.prioritized_replay_alpha)
            now.smallest_target = torch.minimum(now.smallest_target, target.min())
            now.largest_target = torch.maximum(now.largest_target, target.max())

            if (update + 1) % args.policy_frequency == 0:
                run.learned(actor_step(batch))

            if (update + 1) % args.target_network_frequency == 0:
                # the target agent gets the fixed encoder, then the agent the learned one
                target_agent.load_state_dict(agent.state_dict())
                agent.encoder.load_state_dict(encoder.state_dict())
                now.bounds = torch.stack([now.smallest_target, now.largest_target])
                replay.forget_largest()

        # ---- 5. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {})
        run.evaluate(global_step, best_agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(best_agent.act, make_env)  # a last evaluation; `solo play` takes this policy
