# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Advantage actor-critic (A2C), discrete actions, vector observations.

Paper     Mnih et al. 2016, https://arxiv.org/abs/1602.01783 (A3C, whose workers here act in step); as a special case of
          PPO: Huang et al. 2022, https://arxiv.org/abs/2205.09123; "Eq. n": of PPO, https://arxiv.org/abs/1707.06347
Run       solo train a2c --env-id CartPole-v1
Spaces    vector -> discrete
Differs   from ppo.py: one gradient step on each rollout, so the ratio of probabilities is 1 and nothing is clipped;
          short rollouts, n-step returns and RMSProp
Not for   continuous actions: ppo_continuous_action.py; Atari games: ppo_atari.py; image observations: ppo_image.py;
          dict observations: ppo_dict.py; multidiscrete actions: ppo_multidiscrete.py; tuple actions: ppo_hybrid.py
Details   docs/algorithms/a2c.md
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    total_timesteps: int = 500_000  # environment steps, summed over environments
    num_envs: int = 8  # environments stepped in parallel
    num_steps: int = 5  # length of a rollout in each environment
    learning_rate: float = 7e-4  # learning rate of RMSProp
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    max_grad_norm: float = 0.5  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    gae_lambda: float = 1.0  # lambda of GAE (0: TD(0), 1: n-step returns), from 0 to 1
    vf_coef: float = 0.5  # coefficient of the value loss, which is halved here
    ent_coef: float = 0.01  # coefficient of the entropy


class Batch(NamedTuple):
    """A rollout."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size,), like all that follow
    advantage: torch.Tensor
    returns: torch.Tensor


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; its actions are int64 and count from 0."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete) and (space.start != 0 or space.dtype != np.int64):
        from_0 = gym.spaces.Discrete(space.n)
        env = gym.wrappers.TransformAction(env, lambda action: (action + space.start).astype(space.dtype), from_0)
    return env


def tanh_mlp(*sizes, gain):
    """Linear layers with tanh between them, orthogonal weights and zero biases; `gain` is that of the last layer."""
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    nn.init.orthogonal_(linear.weight, gain)  # the last layer again
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.actor = tanh_mlp(obs_dim, 64, 64, num_actions, gain=0.01)
        self.critic = tanh_mlp(obs_dim, 64, 64, 1, gain=1.0)

    def forward(self, obs):  # (batch, obs_dim) -> logits (batch, num_actions), values (batch,)
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def evaluate_actions(self, obs, action):  # (batch, obs_dim), (batch,) -> logprobs, entropies, values: (batch,)
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, action[:, None]).squeeze(1), entropy, value

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the most likely actions
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device).flatten(1)
        return self.actor(obs).argmax(1).cpu().numpy()


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


def a2c_loss(agent, batch, args):
    """The loss of policy, value and entropy (section 4 of the paper), and the metrics."""
    logprob, entropy, value = agent.evaluate_actions(batch.obs, batch.action)
    assert logprob.shape == entropy.shape == value.shape == batch.advantage.shape
    objective = (logprob * batch.advantage).mean()
    value_loss = 0.5 * ((value - batch.returns) ** 2).mean()
    loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy.mean())
    metrics = {"losses/value_loss": value_loss, "losses/policy_loss": -objective, "losses/entropy": entropy.mean()}
    return loss, metrics


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="discrete")
    batch_size = args.num_envs * args.num_steps
    run.require(batch_size > 1, "a rollout, --num-envs times --num-steps, must have two or more steps")
    num_iterations = run.iterations(batch_size)  # whole ones in total_timesteps
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)

    agent = Agent(obs_dim, num_actions).to(run.device)
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on a2c_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(a2c_loss, agent, optimizer, args.max_grad_norm)
    policy = run.fast(agent)  # NumPy, current weights: (batch, obs_dim) -> logits (batch, num_actions), values (batch,)
    start = run.resume(agent=agent, optimizer=optimizer, envs=envs)  # what a checkpoint holds

    # ---- storage of one rollout
    shape = (args.num_steps, args.num_envs)
    obs, final_obs = (np.zeros((*shape, obs_dim), np.float32) for _ in range(2))
    action, timeout = np.zeros(shape, np.int64), np.zeros(shape, bool)
    value, reward, done = (np.zeros(shape, np.float32) for _ in range(3))

    next_obs = run.reset(envs)  # (num_envs, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: num_steps steps in every environment
        for step in range(args.num_steps):
            obs[step] = next_obs.reshape(args.num_envs, obs_dim)
            logits, value[step] = policy(obs[step])
            action[step], _ = sample_categorical(logits)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, truncated & ~terminated
            final_obs[step] = infos["next_obs"].reshape(args.num_envs, obs_dim)  # where the step led
        run.episodes(global_step, reward, done)

        # ---- 2. credit: returns of up to num_steps steps, then the value
        _, next_value = policy(next_obs.reshape(args.num_envs, obs_dim))
        final_value = np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = policy(final_obs[timeout])[1]
        advantage = gae(reward, value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (obs, action, advantage, advantage + value)
        rollout = Batch(*(torch.as_tensor(x, device=run.device).flatten(0, 1) for x in rollout))

        # ---- 3. learn: one gradient step
        run.learned(gradient_step(rollout, args))

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        explained_variance = 1 - rollout.advantage.var() / (rollout.returns.var() + 1e-8)  # advantage: returns - value
        learning_rate = optimizer.param_groups[0]["lr"]
        run.log(global_step, {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
