# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax,pettingzoo]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Proximal policy optimisation of independent learners (IPPO) in games of several agents: discrete actions.

Paper     de Witt et al. 2020, https://arxiv.org/abs/2011.09533; settings, value normalisation: Yu et al. 2021,
          https://arxiv.org/abs/2103.01955; PPO: Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("Eq. n" below)
          GAE: https://arxiv.org/abs/1506.02438; PopArt: van Hasselt et al. 2016, https://arxiv.org/abs/1602.07714
Run       solo train ippo --env-id team/simple_spread_v3
Spaces    vector -> discrete, of each agent
Differs   from ppo.py: all agents of a game act and learn with the same weights, each from its own observation and who
          it is; by default from the rewards of all; action masks; values are normalised by statistics of the returns;
          nothing is learned from agents that have left
Not for   one agent: ppo.py; Atari games of several agents: ppo_pettingzoo_atari.py; a critic that sees the whole game:
          mappo.py; observations that need memory: mappo_rnn.py; continuous actions: maddpg.py
Details   docs/algorithms/ippo.md
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
    env_kind = "agents"  # --env-id is a game of several agents
    env_id: str = "team/simple_spread_v3"  # id of the game
    total_timesteps: int = 2_000_000  # environment steps, summed over environments
    num_envs: int = 128  # environments stepped in parallel
    num_steps: int = 32  # length of a rollout in each environment
    common_reward: bool = True  # every agent learns from the sum of all rewards, until it leaves
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 10  # epochs per rollout
    learning_rate: float = 2e-3  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly towards 0
    norm_rate: float = 0.1  # smallest weight of a rollout in the statistics of returns (0: all are equal), from 0 to 1
    max_grad_norm: float = 10.0  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.95  # discount factor, from 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE (0: TD(0), 1: Monte Carlo), from 0 to 1
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # epsilon of Eq. 7
    clip_vloss: bool = False  # also clip how far a value moves from the old one, by clip_coef, as the paper does
    vf_coef: float = 0.5  # c1 of Eq. 9, whose L^VF is halved here, as in the authors' code
    ent_coef: float = 0.01  # c2 of Eq. 9
    target_kl: float | None = None  # stop the epochs of a rollout after one whose mean approx_kl is above this


class Batch(NamedTuple):
    """A rollout, or a minibatch of it: a row is one step of one agent that plays."""

    obs: torch.Tensor  # (batch_size, obs_dim), with who the agent is
    mask: torch.Tensor  # (batch_size, num_actions): whether an action is allowed
    action: torch.Tensor  # (batch_size,), like all that follow
    logprob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


def make_env(env_id, **kwargs):
    """One game, for training and for evaluation."""
    return gym.make(env_id, **kwargs)


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


def with_agent_id(obs):
    """(..., num_agents, obs_dim) -> (..., num_agents, obs_dim + num_agents): each agent sees who it is."""
    num_agents = obs.shape[-2]
    return torch.cat([obs, torch.eye(num_agents, device=obs.device).expand(*obs.shape[:-1], num_agents)], -1)


class Critic(nn.Module):
    """V(o_i). The network gives it in standard deviations from the mean of all returns so far (PopArt)."""

    def __init__(self, obs_dim):
        super().__init__()
        self.net = tanh_mlp(obs_dim, 64, 64, 1, gain=1.0)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("var", torch.ones(()))
        self.register_buffer("count", torch.zeros(()))

    def std(self):  # of the returns
        return (self.var + 1e-5).sqrt()

    def forward(self, obs):  # (batch, obs_dim) -> values (batch,), in the units of the rewards
        return self.mean + self.std() * self.net(obs).squeeze(-1)

    @torch.no_grad()
    def count_returns(self, returns, rate):
        """Take returns (n,) into the statistics, and change the last layer so that no value changes."""
        last, mean, std = self.net[-1], self.mean.clone(), self.std()
        self.count += 1
        weight, delta = (1 / self.count).clamp(min=rate), returns.mean() - mean
        self.var += weight * (returns.var(correction=0) - self.var + (1 - weight) * delta**2)
        self.mean += weight * delta
        last.weight *= std / self.std()
        last.bias.copy_((mean + std * last.bias - self.mean) / self.std())


class Agent(nn.Module):
    """The policy and the values of every agent."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.actor = tanh_mlp(obs_dim, 64, 64, num_actions, gain=0.01)
        self.critic = Critic(obs_dim)

    def evaluate_actions(self, obs, mask, action):  # -> log-probabilities, entropies, values: (batch,)
        logits = self.actor(obs)
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)  # probability 0, and finite, as its gradient
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, action[:, None]).squeeze(1), entropy, self.critic(obs)

    @torch.no_grad()
    def act(self, obs, action_mask):
        """The most likely actions that are allowed: NumPy (games, num_agents, *obs_shape) -> (games, num_agents).

        action_mask (games, num_agents, num_actions), or None: all are allowed.
        """
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device).flatten(2)
        logits = self.actor(with_agent_id(obs)).cpu().numpy()
        return (logits if action_mask is None else allowed_logits(logits, action_mask)).argmax(-1)


def allowed_logits(logits, mask):
    """The logits, those of actions that are not allowed so low that softmax gives 0. NumPy, (batch, num_actions)."""
    return np.where(mask, logits, np.finfo(np.float32).min)


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


def ippo_loss(agent, batch, args):
    """The negative of Eq. 9, and the metrics."""
    logprob, entropy, value = agent.evaluate_actions(batch.obs, batch.mask, batch.action)
    assert logprob.shape == entropy.shape == value.shape == batch.advantage.shape

    # L^CLIP, Eq. 7
    logratio = logprob - batch.logprob
    ratio = logratio.exp()
    advantage = batch.advantage
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    objective = torch.min(ratio * advantage, clipped_ratio * advantage).mean()

    # L^VF of normalised values; with --clip-vloss the larger of two errors: of the value, and of the value clipped
    # around the old one
    std = agent.critic.std()
    error = ((value - batch.returns) / std) ** 2
    if args.clip_vloss:
        change = ((value - batch.value) / std).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, ((batch.value - batch.returns) / std + change) ** 2)
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
    envs = run.multi_agent_env(make_env, args.env_id, args.num_envs)  # where a game ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="discrete")
    batch_size = args.num_envs * args.num_steps
    num_iterations = run.iterations(batch_size, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    num_agents, num_actions = envs.num_agents, int(envs.agent_action_space.n)
    obs_dim = int(np.prod(envs.agent_observation_space.shape)) + num_agents  # with who the agent is

    agent = Agent(obs_dim, num_actions).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on ippo_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(ippo_loss, agent, optimizer, args.max_grad_norm)
    # NumPy (batch, obs_dim) -> NumPy logits (batch, num_actions); NumPy values (batch,)
    actor, critic = run.fast(agent.actor), run.fast(agent.critic)
    parts = dict(agent=agent, optimizer=optimizer, envs=envs)  # what a checkpoint holds
    start = run.resume(**parts)

    # ---- storage of one rollout: an agent, of any game, is to the algorithm what an environment is with one agent
    shape = (args.num_steps, args.num_envs, num_agents)
    obs, final_obs = (np.zeros((*shape, obs_dim), np.float32) for _ in range(2))
    mask, action = np.ones((*shape, num_actions), bool), np.zeros(shape, np.int64)
    alive, timeout = np.zeros(shape, bool), np.zeros(shape, bool)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, num_agents, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        for step in range(args.num_steps):
            obs[step], alive[step] = with_agent_id(torch.as_tensor(next_obs).flatten(2)), envs.alive
            mask[step] = True if envs.action_mask is None else envs.action_mask
            logits = actor(obs[step].reshape(-1, obs_dim))
            logits = allowed_logits(logits, mask[step].reshape(-1, num_actions))
            drawn = (*sample_categorical(logits), critic(obs[step].reshape(-1, obs_dim)))
            action[step], logprob[step], value[step] = (x.reshape(shape[1:]) for x in drawn)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, alive[step] & truncated & ~terminated
            final_obs[step] = with_agent_id(torch.as_tensor(infos["next_obs"]).flatten(2))  # what the step led to
        run.episodes(global_step, reward, done, per_agent=True)

        # ---- 2. credit: "compute advantage estimates"
        rows = with_agent_id(torch.as_tensor(next_obs).flatten(2)).flatten(0, 1).numpy()
        next_value, final_value = critic(rows).reshape(shape[1:]), np.zeros(shape, np.float32)
        if timeout.any():  # a time limit does not end the task: bootstrap from the value of the final observation
            final_value[timeout] = critic(final_obs[timeout])
        credited = np.repeat(reward.sum(2, keepdims=True), num_agents, 2) if args.common_reward else reward
        advantage = gae(credited, value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (obs, mask, action, logprob, value, advantage, advantage + value)
        rollout = Batch(*(torch.as_tensor(x[alive], device=run.device) for x in rollout))  # of those who played
        agent.critic.count_returns(rollout.returns, args.norm_rate)

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
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
