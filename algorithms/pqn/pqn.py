# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Parallelised Q-network (PQN), discrete actions, vector observations.

Paper     Gallici et al. 2024, https://arxiv.org/abs/2407.04811
Run       solo train pqn --env-id CartPole-v1
Spaces    vector -> discrete
Differs   root of its family
Not for   Atari games: pqn_atari_envpool.py; other images; continuous actions: ppo_continuous_action.py
Details   docs/algorithms/pqn.md
"""

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
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    total_timesteps: int = 500_000  # environment steps, summed over environments
    num_envs: int = 4  # environments stepped in parallel
    num_steps: int = 128  # length of a rollout in each environment
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 2.5e-4  # learning rate of RAdam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 10.0  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    q_lambda: float = 0.65  # lambda of Q(lambda) (0: targets of one step), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.05  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.5  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1


class Batch(NamedTuple):
    """A rollout, or a minibatch of it."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size,)
    returns: torch.Tensor  # (batch_size,)


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; its actions are int64 and count from 0."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete) and (space.start != 0 or space.dtype != np.int64):
        from_0 = gym.spaces.Discrete(space.n)
        env = gym.wrappers.TransformAction(env, lambda action: (action + space.start).astype(space.dtype), from_0)
    return env


def orthogonal(layer, gain):
    """The layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def layer_norm_mlp(*sizes):
    """Linear layers with layer normalisation and ReLU between them, orthogonal weights and zero biases."""
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [orthogonal(nn.Linear(fan_in, fan_out), 2**0.5), nn.LayerNorm(fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-2])


class QNetwork(nn.Module):
    """The values of all actions."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.net = layer_norm_mlp(obs_dim, 120, 84, num_actions)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, num_actions)
        return self.net(obs)

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the greedy actions
        obs = torch.as_tensor(obs, dtype=torch.float32, device=next(self.parameters()).device).flatten(1)
        return self(obs).argmax(1).cpu().numpy()


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
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="discrete")
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)

    q_network = QNetwork(obs_dim, num_actions).to(run.device)
    optimizer = torch.optim.RAdam(q_network.parameters(), lr=args.learning_rate)
    # gradient_step(*inputs): an optimiser step on q_lambda_loss(q_network, *inputs); returns its metrics
    gradient_step = run.gradient_step(q_lambda_loss, q_network, optimizer, args.max_grad_norm)
    q_values = run.fast(q_network)  # the network in NumPy: (batch, obs_dim) -> (batch, num_actions)
    start = run.resume(q_network=q_network, optimizer=optimizer, envs=envs)  # what a checkpoint holds

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, final_obs = (np.zeros((*shape, obs_dim), np.float32) for _ in range(2))
    value, reward, done = (np.zeros(shape, np.float32) for _ in range(3))
    timeout = np.zeros(shape, bool)

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
            obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            q = q_values(obs[step])
            value[step] = q.max(1)
            action[step] = np.where(greedy[step], q.argmax(1), action[step])
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            final_obs[step] = infos["next_obs"].reshape(args.num_envs, obs_dim)  # where the step led
        run.episodes(global_step, reward, done)

        # ---- 2. credit: the returns of Q(lambda), by the network that acted
        next_value = q_values(next_obs.reshape(args.num_envs, obs_dim)).max(1)
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = q_values(final_obs[timeout]).max(1)
        returns = q_lambda(reward, value, done, final_value, next_value, args.gamma, args.q_lambda)
        rollout = Batch(*(torch.as_tensor(x, device=run.device).flatten(0, 1) for x in (obs, action, returns)))

        # ---- 3. learn: epochs of minibatches with fixed targets; no target network, no replay
        for _ in range(args.update_epochs):
            for index in torch.randperm(batch_size, device=run.device).split(minibatch_size):
                metrics = gradient_step(Batch(*(x[index] for x in rollout)))
                run.learned(metrics)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/learning_rate": optimizer.param_groups[0]["lr"], "charts/epsilon": epsilon})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)  # a last evaluation; `solo play` takes this policy
