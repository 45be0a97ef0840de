# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari,envpool]>=0.1", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Parallelised Q-network (PQN) on EnvPool's Atari games: discrete actions, images.

Paper     Gallici et al. 2024, https://arxiv.org/abs/2407.04811
          EnvPool: Weng et al. 2022, https://arxiv.org/abs/2206.10558
Run       solo train pqn_atari_envpool --env-id Pong-v5 --threads 2
Spaces    image -> discrete
Differs   from pqn.py: EnvPool's games, as in ppo_atari_envpool.py; a convolutional network with layer normalisation;
          clipped rewards; a lost life ends the return, but not the game
Not for   vector observations: pqn.py; continuous actions: ppo_continuous_action.py
Details   docs/algorithms/pqn_atari_envpool.md
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from solorl import EnvPoolVectorEnv, Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_kind = "envpool-atari"  # --env-id is one of EnvPool's Atari games
    env_id: str = "Pong-v5"  # id of the game in EnvPool
    total_timesteps: int = 10_000_000  # environment steps of 4 frames, summed over environments
    num_envs: int = 8  # environments stepped in parallel
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 2.5e-4  # learning rate of RAdam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 10.0  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    q_lambda: float = 0.65  # lambda of Q(lambda) (0: targets of one step), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.01  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.1  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1
    eval_episodes: int = 10  # games of one evaluation, on environments and seeds of their own


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, 4, 84, 84), bytes
    action: torch.Tensor  # (batch_size,)
    returns: torch.Tensor  # (batch_size,)


def make_envs(env_id, num_envs, **kwargs):
    """Whole games, for training and for evaluation: observations are the last 4 grey images, (4, 84, 84) bytes."""
    return EnvPoolVectorEnv(env_id, num_envs, **kwargs)


class Scaled(nn.Module):
    """Bytes to numbers from 0 to 1, on the device: bytes are copied there faster. Channels last: fast convolutions."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255


def orthogonal(layer, gain):
    """The layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels, at each place of the image by itself."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x):  # (batch, channels, height, width), channels last in memory
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


def layer_norm_cnn(num_frames):
    """The network of Mnih et al. 2015 with layer normalisation, (batch, num_frames, 84, 84) bytes -> (batch, 512)."""
    convolutions = [nn.Conv2d(num_frames, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
    layers = []
    for convolution in convolutions:
        layers += [orthogonal(convolution, 2**0.5), ChannelNorm(convolution.out_channels), nn.ReLU()]
    last = orthogonal(nn.Linear(64 * 7 * 7, 512), 2**0.5)
    return nn.Sequential(Scaled(), *layers, nn.Flatten(), last, nn.LayerNorm(512), nn.ReLU())


class QNetwork(nn.Module):
    """The values of all actions."""

    def __init__(self, num_actions):
        super().__init__()
        self.network = layer_norm_cnn(4)
        self.head = orthogonal(nn.Linear(512, num_actions), 2**0.5)

    def forward(self, obs):  # (batch, 4, 84, 84) -> (batch, num_actions)
        return self.head(self.network(obs))

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, 4, 84, 84) -> NumPy (batch,): the greedy actions
        return self(torch.as_tensor(obs, device=self.head.weight.device)).argmax(1).cpu().numpy()


def q_lambda(reward, value, done, final_value, next_value, gamma, lam):
    """Returns of Q(lambda). NumPy, all (num_steps, num_envs) except next_value (num_envs,).

    value: max_a Q, by the network that acted. next_value: the same of the observation after the last step. done[t]: the
    return ends with step t. final_value[t]: if a time limit ended the episode, the value of its final observation, else
    0. A random action does not end a return (Peng's Q(lambda)).
    """
    assert reward.shape == value.shape == done.shape == final_value.shape and next_value.shape == reward.shape[1:]
    returns, next_return = np.zeros_like(reward), next_value
    for t in reversed(range(len(reward))):
        mixed = lam * next_return + (1 - lam) * next_value
        next_return = returns[t] = reward[t] + gamma * ((1 - done[t]) * mixed + final_value[t])
        next_value = value[t]
    return returns


def q_lambda_loss(q_network, batch):
    """Mean squared error of the values of the actions taken, and the metrics."""
    q = q_network(batch.obs).gather(1, batch.action[:, None]).squeeze(1)
    assert q.shape == batch.returns.shape
    loss = F.mse_loss(q, batch.returns)
    return loss, {"losses/td_loss": loss, "losses/q_values": q.mean()}


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = make_envs(args.env_id, args.num_envs)  # where a game ends, obs begins the next one
    run.require_spaces(envs, obs="image", action="discrete")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)

    q_network = QNetwork(num_actions).to(run.device)
    optimizer = torch.optim.RAdam(q_network.parameters(), lr=args.learning_rate)
    # gradient_step(*inputs): an optimiser step on q_lambda_loss(q_network, *inputs); returns its metrics
    gradient_step = run.gradient_step(q_lambda_loss, q_network, optimizer, args.max_grad_norm)
    q_values = run.fast(q_network)  # NumPy in and out: (batch, 4, 84, 84) -> (batch, num_actions)
    now = SimpleNamespace(lives=np.zeros(args.num_envs, np.int64))
    start = run.resume(q_network=q_network, optimizer=optimizer, envs=envs, now=now)  # what a checkpoint holds
    now.lives[run.restarted] = 0  # games that a resume had to begin again: no life is lost yet

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, final_obs = (np.zeros((*shape, *obs_shape), np.uint8) for _ in range(2))
    value, reward, done = (np.zeros(shape, np.float32) for _ in range(3))
    over, timeout = np.zeros(shape, bool), np.zeros(shape, bool)

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: with probability epsilon at random, else greedily
        progress = min(1.0, iteration / max(1.0, args.exploration_fraction * num_iterations))
        epsilon = args.start_e + (args.end_e - args.start_e) * progress
        action = np.random.randint(num_actions, size=shape)
        greedy = np.random.random(shape) >= epsilon
        for step in range(args.num_steps):
            obs[step] = next_obs
            q = q_values(next_obs)
            value[step] = q.max(1)
            action[step] = np.where(greedy[step], q.argmax(1), action[step])
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            over[step], timeout[step] = terminated | truncated, truncated & ~terminated
            if timeout[step].any():  # a life lost in the last step allowed ends the return, too
                timeout[step] &= infos["final_info"]["lives"] >= now.lives
            done[step] = over[step] | (infos["lives"] < now.lives)  # a lost life ends the return, but not the game
            now.lives = infos["lives"]
            final_obs[step] = infos["next_obs"]  # what the step led to, also where an episode ended
        run.episodes(global_step, reward, over)

        # ---- 2. credit: the returns of Q(lambda), by the network that acted
        next_value = q_values(next_obs).max(1)
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = q_values(final_obs[timeout]).max(1)
        returns = q_lambda(np.sign(reward), value, done, final_value, next_value, args.gamma, args.q_lambda)
        rollout = Batch(*(torch.as_tensor(x, device=run.device).flatten(0, 1) for x in (obs, action, returns)))

        # ---- 3. learn: epochs of minibatches with fixed targets; no target network, no replay
        for _ in range(args.update_epochs):
            for index in torch.randperm(batch_size, device=run.device).split(minibatch_size):
                metrics = gradient_step(Batch(*(x[index] for x in rollout)))
                run.learned(metrics)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/learning_rate": optimizer.param_groups[0]["lr"], "charts/epsilon": epsilon})
        run.evaluate(global_step, q_network.act, make_envs)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_envs)  # a last evaluation; `solo play` takes this policy
