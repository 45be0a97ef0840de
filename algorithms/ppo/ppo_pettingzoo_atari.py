# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari,pettingzoo]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3",
#     "opencv-python-headless>=4.9", "torch>=2.5"]
# ///
"""Proximal policy optimisation (PPO) by self-play on Atari's games of several players: discrete actions, images.

Paper     Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438
          Games: Terry and Black 2020, https://arxiv.org/abs/2009.09341
Run       solo train ppo_pettingzoo_atari --env-id atari/pong_v3
Spaces    image -> discrete, of each agent
Differs   from ppo_atari_envpool.py: the games are PettingZoo's, with wrappers; all players act at once, with the same
          network, which sees who it plays; an advantage for each; no training on players who have left; opponents in
          evaluations: random actions (the score) and an earlier copy of the network; images without their mean
Not for   one agent: ppo_atari.py; vector observations: ppo.py
Details   docs/algorithms/ppo_pettingzoo_atari.md
"""

import copy
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.wrappers import TimeLimit

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_kind = "pettingzoo-atari"  # --env-id is one of PettingZoo's Atari games of several agents
    env_id: str = "atari/pong_v3"  # id of the game in PettingZoo
    max_steps: int = 2_500  # steps of 4 frames after which a game is cut, in training and evaluation
    total_timesteps: int = 10_000_000  # environment steps of 4 frames, summed over environments
    num_envs: int = 8  # environments stepped in parallel
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 2.5e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.1  # epsilon of Eq. 7
    clip_vloss: bool = True  # also clip how far a value moves from the old one, by clip_coef; not in the paper
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.01  # c2 of Eq. 9
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this
    eval_episodes: int = 10  # games of one evaluation, on environments and seeds of their own; each seat in turn
    eval_every: int = 250_000  # environment steps between evaluations; 0: only at the end


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, 4 + num_agents, 84, 84), bytes
    action: torch.Tensor  # (batch_size,), like all that follow
    logprob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


class Players(gym.Wrapper):
    """The game as its players see it: (num_agents, 4 + num_agents, 84, 84) bytes. Everybody has the last 4 grey images
    of the one screen, and after them a plane for each player: dark grey for the own one, black for the others. An
    action is repeated for 4 frames. A game begins with 1 to 30 frames of doing nothing; nothing else is random."""

    def __init__(self, env):
        super().__init__(env)
        self.num_agents = len(env.unwrapped.agents)
        self.images, shape = deque(maxlen=4), (self.num_agents, 4 + self.num_agents, 84, 84)
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        for _ in range(self.unwrapped.np_random.integers(1, 31)):
            obs, _, _, _, info = self.env.step(np.zeros(self.num_agents, int))
        self.images.extend([self.screen([obs])] * 4)
        return self.seen(), info

    def step(self, action):
        frames, total = [], np.zeros(self.num_agents)
        for _ in range(4):
            obs, reward, terminated, truncated, info = self.env.step(action)
            frames, total = [*frames, obs], total + reward
            if terminated or truncated:
                break
        self.images.append(self.screen(frames[-2:]))
        return self.seen(), total, terminated, truncated, info

    def screen(self, frames):
        """One image (84, 84) from frames (num_agents, height, width, 1): the larger of two, since objects flicker, and
        of all players, since the frame of one who has left is black."""
        return cv2.resize(np.max(frames, axis=(0, 1)), (84, 84), interpolation=cv2.INTER_AREA)

    def seen(self):
        own = 32 * np.eye(self.num_agents, dtype=np.uint8)  # not 255, which would dominate the images
        obs = np.empty(self.observation_space.shape, np.uint8)
        obs[:, :4], obs[:, 4:] = np.stack(self.images), own[:, :, None, None]
        return obs


class Against(gym.Wrapper):
    """A game in which the policy has one seat, which follows from the seed, and an opponent all others: `act`, or
    uniformly random actions. Only the rewards of the policy's seat count, so the sum over the players is its return."""

    def __init__(self, env, act=None):  # act: NumPy (1, num_agents, *obs_shape) -> NumPy (1, num_agents)
        super().__init__(env)
        self.act = act

    def reset(self, seed=None, **kwargs):
        self.obs, info = self.env.reset(seed=seed, **kwargs)
        self.own = np.arange(len(self.obs)) == (seed or 0) % len(self.obs)
        return self.obs, info

    def step(self, action):
        random = self.unwrapped.np_random.integers(self.action_space.nvec)
        others = random if self.act is None else self.act(self.obs[None])[0]
        self.obs, reward, terminated, truncated, info = self.env.step(np.where(self.own, action, others))
        return self.obs, reward * self.own, terminated, truncated, info


def players_env(env_id, max_steps, **kwargs):
    """One whole game of the same policy with itself, for training."""
    env = gym.make(env_id, obs_type="grayscale_image", **kwargs)
    return TimeLimit(Players(env), max_steps)


def against_env(env_id, max_steps, act=None, **kwargs):
    """One whole game against an opponent, for evaluation."""
    return Against(players_env(env_id, max_steps, **kwargs), act)


class Centred(nn.Module):
    """Bytes to numbers, each image less its own mean. Most of a screen is background, the same in all states; without
    this it dominates the gradients, and most units become inactive while rewards are still mostly noise.
    On the device: bytes are copied there faster. Channels last: faster convolutions."""

    def forward(self, x):
        x = x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255
        images, planes = x[:, :4], x[:, 4:]
        return torch.cat([images - images.mean((2, 3), keepdim=True), planes], 1)


def player_cnn(channels):
    """The convolutional network of Mnih et al. 2015, (batch, channels, 84, 84) bytes -> (batch, 512)."""
    convolutions = [nn.Conv2d(channels, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
    layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
    return nn.Sequential(Centred(), *layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU())


def orthogonal(layer, gain):
    """The layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, channels, num_actions):
        super().__init__()
        self.network = player_cnn(channels)
        for layer in self.network:
            if hasattr(layer, "weight"):
                orthogonal(layer, 2**0.5)
        self.actor = orthogonal(nn.Linear(512, num_actions), 0.01)
        self.critic = orthogonal(nn.Linear(512, 1), 1.0)

    def forward(self, obs):  # (batch, *obs_shape) -> logits (batch, num_actions), values (batch,)
        features = self.network(obs)
        return self.actor(features), self.critic(features).squeeze(-1)

    def evaluate_actions(self, obs, action):  # (batch, *obs_shape), (batch,) -> logprobs, entropies, values: (batch,)
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, action[:, None]).squeeze(1), entropy, value

    @torch.no_grad()
    def act(self, obs):  # NumPy (games, num_agents, *obs_shape) -> NumPy (games, num_agents): the most likely actions
        flat = torch.as_tensor(obs, device=self.actor.weight.device).flatten(0, 1)
        return self(flat)[0].argmax(1).unflatten(0, obs.shape[:2]).cpu().numpy()


def sample_categorical(logits):
    """Actions drawn from softmax(logits), and their log-probabilities. NumPy, (batch, num_actions) -> (batch,) each."""
    action = (logits + np.random.gumbel(size=logits.shape)).argmax(1)  # the Gumbel-max trick
    logits = logits - logits.max(1, keepdims=True)  # so that exp does not overflow
    return action, logits[np.arange(len(action)), action] - np.log(np.exp(logits).sum(1))


def gae(reward, value, done, final_value, next_value, gamma, lam):
    """Advantages by Eq. 11-12. NumPy, all (num_steps, num_envs) except next_value (num_envs,).

    next_value: value of the observation after the last step. done[t]: the return ends with step t. final_value[t]: if
    a time limit ended the episode, the value of its final observation, else 0.
    """
    assert reward.shape == value.shape == done.shape == final_value.shape and next_value.shape == reward.shape[1:]
    advantage, next_advantage = np.zeros_like(reward), np.zeros_like(next_value)
    for t in reversed(range(len(reward))):
        bootstrap = (1 - done[t]) * next_value + final_value[t]
        delta = reward[t] + gamma * bootstrap - value[t]  # Eq. 12
        next_advantage = advantage[t] = delta + gamma * lam * (1 - done[t]) * next_advantage  # Eq. 11
        next_value = value[t]
    return advantage


def ppo_loss(agent, batch, args):
    """The negative of Eq. 9, and the metrics."""
    logprob, entropy, value = agent.evaluate_actions(batch.obs, batch.action)
    assert logprob.shape == entropy.shape == value.shape == batch.advantage.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = logratio.exp()
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    objective = torch.min(ratio * advantage, clipped_ratio * advantage).mean()

    # L^VF; with --clip-vloss the larger of two errors: of the value, and of the value clipped around the old one
    error = (value - batch.returns) ** 2
    if args.clip_vloss:
        clipped_value = batch.value + (value - batch.value).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (clipped_value - batch.returns) ** 2)
    value_loss = 0.5 * error.mean()

    loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy.mean())  # Eq. 9
    with torch.no_grad():
        metrics = {
            "losses/value_loss": value_loss,
            "losses/policy_loss": -objective,
            "losses/entropy": entropy.mean(),
            "losses/old_approx_kl": -logratio.mean(),
            "losses/approx_kl": (ratio - 1 - logratio).mean(),  # k3 of http://joschu.net/blog/kl-approx.html
            "losses/clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
        }
    return loss, metrics


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    play_all = partial(players_env, max_steps=args.max_steps, teams="each")
    envs = run.multi_agent_env(play_all, args.env_id, args.num_envs)  # where no agent is left, obs begins the next game
    run.require_spaces(envs, obs="image", action="discrete")
    batch_size = args.num_envs * args.num_steps
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    num_agents, *obs_shape = envs.single_observation_space.shape

    agent = Agent(obs_shape[0], int(envs.agent_action_space.n)).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ppo_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ppo_loss, agent, optimizer, args.max_grad_norm)
    policy = run.fast(agent)  # NumPy in and out: (batch, *obs_shape) -> logits (batch, num_actions), values (batch,)
    # an opponent, older: the weights after a quarter to a half of the steps so far; later: those that will replace it
    older = copy.deepcopy(agent)
    past = SimpleNamespace(step=0, older=older.state_dict(), later=copy.deepcopy(agent.state_dict()))
    start = run.resume(agent=agent, optimizer=optimizer, past=past, envs=envs)  # what a checkpoint holds
    older.load_state_dict(past.older)
    make_env = partial(against_env, max_steps=args.max_steps)  # against random actions: the score
    opponents = {"vs_older": partial(make_env, act=older.act)}  # a metric

    # ---- storage of one rollout: an agent, of any game, is to the algorithm what an environment is with one agent
    shape = (args.num_steps, args.num_envs, num_agents)
    obs, final_obs = (np.zeros((*shape, *obs_shape), np.uint8) for _ in range(2))
    action, alive, timeout = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, bool)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, num_agents, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        for step in range(args.num_steps):
            obs[step], alive[step] = next_obs, envs.alive
            logits, values = policy(next_obs.reshape(-1, *obs_shape))  # all agents of all games, one after the other
            actions, logprobs = sample_categorical(logits)
            action[step], logprob[step], value[step] = (x.reshape(shape[1:]) for x in (actions, logprobs, values))
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, alive[step] & truncated & ~terminated
            final_obs[step] = infos["next_obs"]  # what the step led to, also where an episode ended
        run.episodes(global_step, reward, done)

        # ---- 2. credit: "compute advantage estimates"
        next_value = policy(next_obs.reshape(-1, *obs_shape))[1].reshape(shape[1:])
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = policy(final_obs[timeout])[1]
        advantage = gae(np.sign(reward), value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (obs, action, logprob, value, advantage, advantage + value)
        rollout = Batch(*(torch.as_tensor(x[alive], device=run.device) for x in rollout))  # of those who played

        # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
        for epoch in range(args.update_epochs):
            kl = []
            for index in torch.randperm(len(rollout.action), device=run.device).tensor_split(args.num_minibatches):
                metrics = gradient_step(Batch(*(x[index] for x in rollout)), args)
                run.learned(metrics)
                kl.append(metrics["losses/approx_kl"])
            if args.target_kl is not None and torch.stack(kl).mean() > args.target_kl:
                break

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        explained_variance = 1 - rollout.advantage.var() / (rollout.returns.var() + 1e-8)  # advantage: returns - value
        learning_rate = optimizer.param_groups[0]["lr"]
        run.log(global_step, {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance})
        if global_step >= 2 * past.step:
            past.step, past.older, past.later = global_step, past.later, copy.deepcopy(agent.state_dict())
            older.load_state_dict(past.older)
        run.evaluate(global_step, agent.act, make_env, also=opponents)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
