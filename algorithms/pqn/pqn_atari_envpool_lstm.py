# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari,envpool]>=0.1", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Parallelised Q-network (PQN) on EnvPool's Atari games with an LSTM: discrete actions, images, one at a time.

Paper     Gallici et al. 2024, https://arxiv.org/abs/2407.04811
          EnvPool: Weng et al. 2022, https://arxiv.org/abs/2206.10558
          LSTM: Hochreiter & Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735
Run       solo train pqn_atari_envpool_lstm --env-id Pong-v5 --threads 2
Spaces    image -> discrete, one frame
Differs   from pqn_atari_envpool.py: the network sees one image and remembers the others with an LSTM, which forgets
          where a game begins, not where a life is lost; minibatches are rollouts of some environments, in their order
Not for   vector observations: pqn.py; continuous actions: ppo_continuous_action.py
Details   docs/algorithms/pqn_atari_envpool_lstm.md
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
    """A rollout, or the part of some environments of it."""

    obs: torch.Tensor  # (num_steps, num_envs, 1, 84, 84), bytes
    first: torch.Tensor  # (num_steps, num_envs): whether a game begins with obs
    state: torch.Tensor  # (2, num_envs, 128), the memory before the rollout
    action: torch.Tensor  # (num_steps, num_envs)
    returns: torch.Tensor  # (num_steps, num_envs)


def make_envs(env_id, num_envs, **kwargs):
    """Whole games, for training and for evaluation: observations are grey images, (1, 84, 84) bytes."""
    return EnvPoolVectorEnv(env_id, num_envs, stack_num=1, **kwargs)


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
    """The values of all actions, from the image seen and the memory of those before it."""

    def __init__(self, num_actions):
        super().__init__()
        self.network = layer_norm_cnn(1)
        self.lstm = nn.LSTMCell(512, 128)
        for parameter in self.lstm.parameters():
            nn.init.orthogonal_(parameter) if parameter.ndim == 2 else nn.init.zeros_(parameter)
        self.head = orthogonal(nn.Linear(128, num_actions), 2**0.5)

    def forward(self, obs, state, first):
        """Some steps in some environments; the memory is empty where a game begins.

        obs (steps, envs, 1, 84, 84), state (2, envs, 128), first (steps, envs)
        -> values (steps, envs, num_actions), state after the last step
        """
        features = self.network(obs.flatten(0, 1)).unflatten(0, first.shape)  # all images in one batch
        (hidden, cell), outputs = state, []
        for x, begins in zip(features, first, strict=True):
            kept = (~begins).float()[:, None]
            hidden, cell = self.lstm(x, (kept * hidden, kept * cell))
            outputs.append(hidden)
        return self.head(torch.stack(outputs)), torch.stack([hidden, cell])

    @torch.no_grad()
    def step(self, obs, state, first):  # NumPy (envs, 1, 84, 84), state, (envs,) -> NumPy (envs, num_actions), state
        obs, first = (torch.as_tensor(x, device=state.device)[None] for x in (obs, first))
        q, state = self(obs, state, first)
        return q[0].cpu().numpy(), state

    def act(self, obs, state, first):  # the greedy actions, NumPy (envs,), and the state after them
        if state is None:
            state = torch.zeros(2, len(obs), 128, device=self.head.weight.device)
        q, state = self.step(obs, state, first)
        return q.argmax(1), state


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


def q_lambda_lstm_loss(q_network, batch):
    """Mean squared error of the values of the actions taken, and the metrics; the LSTM runs again from the state
    stored before the rollout."""
    q, _ = q_network(batch.obs, batch.state, batch.first)
    q = q.gather(-1, batch.action[..., None]).squeeze(-1)
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
    minibatch_envs = args.num_envs // args.num_minibatches
    run.require(args.num_envs % args.num_minibatches == 0, "--num-minibatches must divide --num-envs (whole rollouts)")
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)

    q_network = QNetwork(num_actions).to(run.device)
    optimizer = torch.optim.RAdam(q_network.parameters(), lr=args.learning_rate)
    # gradient_step(*inputs): an optimiser step on q_lambda_lstm_loss(q_network, *inputs); returns its metrics
    gradient_step = run.gradient_step(q_lambda_lstm_loss, q_network, optimizer, args.max_grad_norm)
    state = torch.zeros(2, args.num_envs, 128, device=run.device)  # hidden and cell state of each environment
    # first: whether a game begins with next_obs
    now = SimpleNamespace(state=state, first=np.ones(args.num_envs, bool), lives=np.zeros(args.num_envs, np.int64))
    start = run.resume(q_network=q_network, optimizer=optimizer, envs=envs, now=now)  # what a checkpoint holds
    now.lives[run.restarted] = 0  # games that a resume had to begin again: no life is lost yet
    now.first[run.restarted] = True  # episodes that a resume could not continue

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, first = np.zeros((*shape, *obs_shape), np.uint8), np.zeros(shape, bool)
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
        state_before, final_value = now.state, np.zeros(shape, np.float32)
        for step in range(args.num_steps):
            obs[step], first[step] = next_obs, now.first
            q, now.state = q_network.step(next_obs, now.state, now.first)
            value[step] = q.max(1)
            action[step] = np.where(greedy[step], q.argmax(1), action[step])
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            over[step], timeout[step] = terminated | truncated, truncated & ~terminated
            if timeout[step].any():  # a life lost in the last step allowed ends the return, too
                timeout[step] &= infos["final_info"]["lives"] >= now.lives
            done[step] = over[step] | (infos["lives"] < now.lives)  # a lost life ends the return, but not the game
            now.lives, now.first = infos["lives"], terminated | truncated
            if timeout[step].any():
                # A time limit does not end the task: bootstrap from the value of the final observation, computed with
                # the memory of the episode that was cut.
                cut = np.flatnonzero(timeout[step])
                final_obs, memory = infos["next_obs"][cut], now.state[:, cut]  # what the step led to
                final_value[step, cut] = q_network.step(final_obs, memory, np.zeros(len(cut), bool))[0].max(1)
        run.episodes(global_step, reward, over)

        # ---- 2. credit: the returns of Q(lambda), by the network that acted
        next_value = q_network.step(next_obs, now.state, now.first)[0].max(1)
        returns = q_lambda(np.sign(reward), value, done, final_value, next_value, args.gamma, args.q_lambda)
        rollout = (obs, first, state_before, action, returns)
        rollout = Batch(*(torch.as_tensor(x, device=run.device) for x in rollout))

        # ---- 3. learn: epochs of minibatches with fixed targets; no target network, no replay
        for _ in range(args.update_epochs):
            for index in torch.randperm(args.num_envs, device=run.device).split(minibatch_envs):
                metrics = gradient_step(Batch(*(x[:, index] for x in rollout)))
                run.learned(metrics)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/learning_rate": optimizer.param_groups[0]["lr"], "charts/epsilon": epsilon})
        run.evaluate(global_step, q_network.act, make_envs)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_envs)  # a last evaluation; `solo play` takes this policy
