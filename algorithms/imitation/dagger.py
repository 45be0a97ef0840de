# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""DAgger (data set aggregation): imitates an expert where the learner itself goes, continuous or discrete actions,
vector observations.

Paper     Ross et al. 2011, https://arxiv.org/abs/1011.0686 ("Algorithm 3.1" below)
Run       solo train dagger --env-id CartPole-v1 --expert runs/EXPERT
Spaces    vector -> continuous, or discrete
Differs   from bc.py: the data set grows; an expert, the policy of another run, says what it would do in every
          state that is visited, and more and more of the actions there are the learner's
Not for   recorded episodes without an expert to ask: bc.py; image observations: dqn_image.py
Details   docs/algorithms/dagger.md
"""

import inspect
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from solorl import Run, RunArgs, load, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    expert: str = ""  # run folder of the expert, or hf://USER/NAME of one on the Hugging Face hub
    trust_script: bool = False  # execute the script in the expert's folder, whatever it does
    total_timesteps: int = 10_000  # environment steps, summed over environments; the expert labels each
    num_envs: int = 1  # environments stepped in parallel
    num_steps: int = 100  # length of a round in each environment
    beta_rounds: int = 15  # rounds until the learner acts alone: the probability of the expert decays linearly
    gradient_steps: int = 200  # gradient steps after each round
    batch_size: int = 64  # labelled states per gradient step
    learning_rate: float = 1e-3  # learning rate of Adam


class Batch(NamedTuple):
    """Labelled states."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size, action_dim), in [-1, 1]; (batch_size,) if discrete: what the expert would do


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
    """One environment, for training and for evaluation; actions in [-1, 1] if continuous, from 0 if discrete."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete) and (space.start != 0 or space.dtype != np.int64):
        from_0 = gym.spaces.Discrete(space.n)
        return gym.wrappers.TransformAction(env, lambda action: (action + space.start).astype(space.dtype), from_0)
    continuous = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
    return ScaleAction(env) if continuous and np.isfinite([space.low, space.high]).all() else env


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Standardize(nn.Module):
    """(obs - mean) / (std + 1e-3), with mean and standard deviation of a data set; 0 and 1 if it is empty."""

    def __init__(self, obs):  # NumPy (n, obs_dim)
        super().__init__()
        mean, std = np.zeros(obs.shape[1]), np.ones(obs.shape[1])
        if len(obs):
            mean, std = obs.mean(0, np.float64), obs.std(0, np.float64)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std + 1e-3, dtype=torch.float32))

    def forward(self, obs):  # (batch, obs_dim) -> (batch, obs_dim)
        return (obs - self.mean) / self.std


class Actor(nn.Module):
    """A deterministic policy; continuous actions in [-1, 1]."""

    def __init__(self, scale, outputs, discrete):
        super().__init__()
        self.scale, self.discrete = scale, discrete
        self.net = mlp(len(scale.mean), 256, 256, outputs)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, action_dim), or logits (batch, num_actions)
        output = self.net(self.scale(obs))
        return output if self.discrete else output.tanh()

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch, action_dim), or the likeliest actions (batch,)
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.scale.mean.device).flatten(1)
        action = self(obs)
        return (action.argmax(1) if self.discrete else action).cpu().numpy()


def beta_of(iteration, rounds):
    """beta_i, the probability that the expert acts in round i: 1 in the first one, 0 after `rounds`."""
    return max(0.0, 1 - iteration / rounds)


def mixed_action(expert_action, learner_action, beta):
    """pi_i = beta_i pi* + (1 - beta_i) pi-hat_i: in each environment the expert's action with probability beta_i, else
    the learner's. NumPy, all (num_envs, ...)."""
    action, by_expert = learner_action.copy(), np.random.random(len(learner_action)) < beta
    action[by_expert] = expert_action[by_expert]
    return action


def in_unit_box(action, box):
    """Continuous actions in `box`, whose bounds they may overstep, in [-1, 1] as the learner's. NumPy."""
    low, high = box.low.astype(np.float64), box.high.astype(np.float64)
    width = np.where(high > low, high - low, 1)
    return (2 * (np.clip(action, low, high) - low) / width - 1).astype(np.float32)


def discounted_returns(reward, done, so_far, gamma):
    """Sum of the rewards of an episode up to each step, earlier ones discounted. NumPy, both (num_steps, num_envs).

    so_far (num_envs,): the same up to the step before the first, 0 where an episode begins; its new value is returned.
    """
    returns = np.zeros_like(reward)
    for t in range(len(reward)):
        returns[t] = gamma * so_far + reward[t]
        so_far = returns[t] * (1 - done[t])
    return returns, so_far


def bc_loss(actor, batch):
    """The mean squared error of continuous actions, the mean negative log-likelihood of discrete ones; the metrics."""
    output = actor(batch.obs)
    loss = F.cross_entropy(output, batch.action) if actor.discrete else F.mse_loss(output, batch.action)
    return loss, {"losses/bc_loss": loss}


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    space = envs.single_action_space
    discrete = isinstance(space, gym.spaces.Discrete)
    run.require_spaces(envs, obs="vector", action="discrete" if discrete else "bounded")
    num_rounds = run.iterations(args.num_envs * args.num_steps)
    obs_dim = int(np.prod(envs.single_observation_space.shape))
    expert, box, name = None, None, args.expert
    if not run.play:  # a run that is only played needs no expert
        run.require(name, "there is no expert: --expert must name a run folder, or hf://USER/NAME")
        folder = run.keep(name)
        expert = load(folder, trust_script=args.trust_script)
        run.require(expert.env_id == args.env_id, f"{name} was trained on {expert.env_id}, not on {args.env_id}")
        game = expert.make_env()
        theirs = game.action_space
        equal = theirs == space if discrete else isinstance(theirs, gym.spaces.Box) and theirs.shape == space.shape
        equal = equal and game.observation_space == envs.single_observation_space
        mine = f"{envs.single_observation_space} and {space}"
        run.require(equal, f"{name} has the spaces {game.observation_space} and {theirs}, not {mine}")
        known = inspect.signature(expert.policy).parameters
        run.require(not {"state", "action_mask"} & set(known), f"{name} acts by more than an observation alone")
        if not discrete:  # the bounds of the expert's actions; PPO has none: there the environment clips them
            box = theirs if theirs.is_bounded() else gym.make(args.env_id).action_space

    no_obs = np.empty((0, obs_dim), np.float32)
    actor = Actor(Standardize(no_obs), int(space.n) if discrete else space.shape[0], discrete).to(run.device)
    optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    # actor_step(*inputs): an optimiser step on bc_loss(actor, *inputs); returns its metrics
    actor_step = run.gradient_step(bc_loss, actor, optimizer)
    # D of Algorithm 3.1: what was seen in each round, and what the expert would have done
    data = SimpleNamespace(obs=[], action=[])
    now = SimpleNamespace(so_far=np.zeros(args.num_envs, np.float32))  # rewards of the running episodes
    start = run.resume(actor=actor, optimizer=optimizer, data=data, now=now, envs=envs)  # what a checkpoint holds
    now.so_far[run.restarted] = 0  # episodes that a resume could not continue

    # ---- storage of one round
    shape = (args.num_steps, args.num_envs)
    obs, label = np.zeros((*shape, obs_dim), np.float32), np.zeros((*shape, *space.shape), space.dtype)
    reward, done = (np.zeros(shape, np.float32) for _ in range(2))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_rounds):
        global_step = (iteration + 1) * args.num_envs * args.num_steps  # at the end of this round
        beta = beta_of(iteration, args.beta_rounds)

        # ---- 1. act: "sample T-step trajectories using pi_i", and ask the expert in every state
        for step in range(args.num_steps):
            obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            label[step] = expert(next_obs) if discrete else in_unit_box(expert(next_obs), box)
            action = mixed_action(label[step], actor.act(next_obs), beta)
            next_obs, reward[step], terminated, truncated, _ = envs.step(action)
            done[step] = terminated | truncated
        run.episodes(global_step, reward, done)

        # ---- 2. store: "aggregate datasets, D <- D u D_i"
        data.obs.append(obs.reshape(-1, obs_dim).copy())
        data.action.append(label.reshape(-1, *space.shape).copy())
        seen, asked = np.concatenate(data.obs), np.concatenate(data.action)

        # ---- 3. learn: "train classifier pi-hat_i+1 on D", from the weights of the last round
        actor.scale.load_state_dict(Standardize(seen).state_dict())  # mean and standard deviation of all of D
        for _ in range(args.gradient_steps):
            index = np.random.randint(len(seen), size=args.batch_size)
            batch = Batch(*(torch.from_numpy(x[index]).to(run.device) for x in (seen, asked)))
            run.learned(actor_step(batch))

        # returns of the episodes that ended as shares of the expert's score in its evaluation, where that is positive
        returns, now.so_far = discounted_returns(reward, done, now.so_far, 1.0)
        for episodic_return in returns[(done > 0) & ((expert.score or 0) > 0)]:
            run.learned({"charts/expert_share": episodic_return / expert.score})

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/beta": beta})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
