# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax,pettingzoo]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Multi-agent proximal policy optimisation (MAPPO) with GRUs: discrete actions, observations that need memory.

Paper     Yu et al. 2021, https://arxiv.org/abs/2103.01955; PPO: Schulman et al. 2017, https://arxiv.org/abs/1707.06347
          ("Eq. n" below); GAE: https://arxiv.org/abs/1506.02438; PopArt: van Hasselt et al. 2016,
          https://arxiv.org/abs/1602.07714; GRU: Cho et al. 2014, https://arxiv.org/abs/1406.1078
Run       solo train mappo_rnn --env-id team/simple_spread_v3
Spaces    vector -> discrete, of each agent
Differs   from mappo.py: actor and critic remember what they saw in a game, each with a GRU of its own for every agent;
          minibatches are rollouts of some games, in their order, for half as many epochs
Not for   one agent: ppo_lstm.py; Atari games of several agents: ppo_pettingzoo_atari.py; observations that show all
          that matters: mappo.py; continuous actions: maddpg.py
Details   docs/algorithms/mappo_rnn.md
"""

from dataclasses import dataclass
from types import SimpleNamespace
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
    update_epochs: int = 5  # epochs per rollout
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
    """A rollout, or the part of some games of it."""

    obs: torch.Tensor  # (num_steps, num_envs, num_agents, obs_dim), with who the agent is
    state: torch.Tensor  # (num_steps, num_envs, num_agents, state_dim), with who the agent is
    first: torch.Tensor  # (num_steps, num_envs): whether a game begins with obs
    memory: torch.Tensor  # (2, num_envs, num_agents, 64), of actor and critic before the rollout
    mask: torch.Tensor  # (num_steps, num_envs, num_agents, num_actions): whether an action is allowed
    alive: torch.Tensor  # (num_steps, num_envs, num_agents), like all that follow: whether the agent plays
    action: torch.Tensor
    logprob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    returns: torch.Tensor


def make_env(env_id, **kwargs):
    """One game, for training and for evaluation."""
    return gym.make(env_id, **kwargs)


def orthogonal(layer, gain):
    """The layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def with_agent_id(obs):
    """(..., num_agents, obs_dim) -> (..., num_agents, obs_dim + num_agents): each agent sees who it is."""
    num_agents = obs.shape[-2]
    return torch.cat([obs, torch.eye(num_agents, device=obs.device).expand(*obs.shape[:-1], num_agents)], -1)


def of_each_agent(state, num_agents):
    """Central states (games, *state_shape) -> (games, num_agents, state_dim): each agent sees who it is."""
    state = torch.as_tensor(state, dtype=torch.float32).flatten(1)
    return with_agent_id(state[:, None].expand(-1, num_agents, -1))


class Recurrent(nn.Module):
    """A network with memory; `gain` is that of the last layer."""

    def __init__(self, input_dim, output_dim, gain):
        super().__init__()
        layers = orthogonal(nn.Linear(input_dim, 64), 2**0.5), orthogonal(nn.Linear(64, 64), 2**0.5)
        self.encoder = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh())
        self.gru = nn.GRUCell(64, 64)
        for weight in (self.gru.weight_ih, self.gru.weight_hh):
            nn.init.orthogonal_(weight)
        for bias in (self.gru.bias_ih, self.gru.bias_hh):
            nn.init.zeros_(bias)
        self.head = orthogonal(nn.Linear(64, output_dim), gain)

    def forward(self, x, hidden, first):
        """Some steps in some games; the memory is empty where a game begins.

        x (steps, games, num_agents, input_dim), hidden (games, num_agents, 64), first (steps, games)
        -> outputs (steps, games, num_agents, output_dim), hidden after the last step
        """
        outputs = []
        for encoded, begins in zip(self.encoder(x), first, strict=True):
            kept = hidden * (~begins).float()[:, None, None]
            hidden = self.gru(encoded.flatten(0, 1), kept.flatten(0, 1)).view_as(kept)
            outputs.append(hidden)
        return self.head(torch.stack(outputs)), hidden


class Critic(nn.Module):
    """V(s), of each agent. The network gives it in standard deviations from the mean of all returns so far (PopArt)."""

    def __init__(self, state_dim):
        super().__init__()
        self.net = Recurrent(state_dim, 1, gain=1.0)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("var", torch.ones(()))
        self.register_buffer("count", torch.zeros(()))

    def std(self):  # of the returns
        return (self.var + 1e-5).sqrt()

    def forward(self, state, hidden, first):  # as Recurrent; values (steps, games, num_agents), in the units of rewards
        output, hidden = self.net(state, hidden, first)
        return self.mean + self.std() * output.squeeze(-1), hidden

    @torch.no_grad()
    def count_returns(self, returns, rate):
        """Take returns (n,) into the statistics, and change the last layer so that no value changes."""
        last, mean, std = self.net.head, self.mean.clone(), self.std()
        self.count += 1
        weight, delta = (1 / self.count).clamp(min=rate), returns.mean() - mean
        self.var += weight * (returns.var(correction=0) - self.var + (1 - weight) * delta**2)
        self.mean += weight * delta
        last.weight *= std / self.std()
        last.bias.copy_((mean + std * last.bias - self.mean) / self.std())


class Agent(nn.Module):
    """The policy and the values of every agent."""

    def __init__(self, obs_dim, state_dim, num_actions):
        super().__init__()
        self.actor = Recurrent(obs_dim, num_actions, gain=0.01)
        self.critic = Critic(state_dim)

    def evaluate_actions(self, obs, state, first, memory, mask, action):
        """Log-probabilities, entropies and values, all (steps, games, num_agents)."""
        logits, _ = self.actor(obs, memory[0], first)
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)  # probability 0, and finite, as its gradient
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        value, _ = self.critic(state, memory[1], first)
        return logprobs.gather(-1, action[..., None]).squeeze(-1), entropy, value

    @torch.no_grad()
    def act(self, obs, state, first, action_mask):
        """The most likely actions that are allowed: NumPy (games, num_agents, *obs_shape) -> (games, num_agents), and
        the memory after them.

        action_mask (games, num_agents, num_actions), or None: all are allowed.
        """
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor.head.weight.device).flatten(2)
        if state is None:
            state = torch.zeros(*obs.shape[:2], 64, device=obs.device)
        logits, state = one_step(self.actor, with_agent_id(obs), state, first)
        return (logits if action_mask is None else allowed_logits(logits, action_mask)).argmax(-1), state


@torch.no_grad()
def one_step(network, x, hidden, first):
    """x (games, num_agents, dim), NumPy first (games,) -> NumPy output (games, num_agents, ...), memory after it."""
    x, first = (torch.as_tensor(one, device=hidden.device)[None] for one in (x, first))
    output, hidden = network(x, hidden, first)
    return output[0].cpu().numpy(), hidden


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


def mappo_rnn_loss(agent, batch, args):
    """The negative of Eq. 9, and the metrics; the GRUs run again from the memory stored before the rollout."""
    outputs = agent.evaluate_actions(batch.obs, batch.state, batch.first, batch.memory, batch.mask, batch.action)
    logprob, entropy, value = (x[batch.alive] for x in outputs)  # of those who played
    old_logprob, old_value, advantage, returns = (x[batch.alive] for x in batch[-4:])
    assert logprob.shape == entropy.shape == value.shape == advantage.shape

    # L^CLIP, Eq. 7
    logratio = logprob - old_logprob
    ratio = logratio.exp()
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    objective = torch.min(ratio * advantage, clipped_ratio * advantage).mean()

    # L^VF of normalised values; with --clip-vloss the larger of two errors: of the value, and of the value clipped
    # around the old one
    std = agent.critic.std()
    error = ((value - returns) / std) ** 2
    if args.clip_vloss:
        change = ((value - old_value) / std).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, ((old_value - returns) / std + change) ** 2)
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
    minibatch_envs = args.num_envs // args.num_minibatches
    num_iterations = run.iterations(batch_size)  # whole ones in total_timesteps
    divides = args.num_envs % args.num_minibatches == 0 and minibatch_envs * args.num_steps > 1
    sentence = f"--num-minibatches {args.num_minibatches} must divide the {args.num_envs} environments of --num-envs"
    run.require(divides, f"{sentence}, whose rollouts stay whole, into parts of 2 or more steps")
    num_agents, num_actions = envs.num_agents, int(envs.agent_action_space.n)
    obs_dim = int(np.prod(envs.agent_observation_space.shape)) + num_agents  # with who the agent is
    envs.reset(seed=0)  # for the central state; run.reset below has seeds of its own
    state_dim = of_each_agent(envs.state, num_agents).shape[2]

    agent = Agent(obs_dim, state_dim, num_actions).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on mappo_rnn_loss(agent, *inputs); returns its metrics
    gradient_step = run.gradient_step(mappo_rnn_loss, agent, optimizer, args.max_grad_norm)
    now = SimpleNamespace(
        memory=torch.zeros(2, args.num_envs, num_agents, 64, device=run.device),  # of actor and critic
        first=np.ones(args.num_envs, bool),  # whether a game begins
    )
    parts = dict(agent=agent, optimizer=optimizer, envs=envs, now=now)  # what a checkpoint holds
    start = run.resume(**parts)
    now.first[run.restarted] = True  # episodes that a resume could not continue

    # ---- storage of one rollout: an agent, of any game, is to the algorithm what an environment is with one agent
    shape = (args.num_steps, args.num_envs, num_agents)
    obs = np.zeros((*shape, obs_dim), np.float32)
    state, first = np.zeros((*shape, state_dim), np.float32), np.zeros(shape[:2], bool)
    mask, action = np.ones((*shape, num_actions), bool), np.zeros(shape, np.int64)
    alive, timeout = np.zeros(shape, bool), np.zeros(shape, bool)
    logprob, value, reward, done = (np.zeros(shape, np.float32) for _ in range(4))

    next_obs = run.reset(envs)  # (num_envs, num_agents, *obs_shape)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_size  # at the end of this iteration
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # ---- 1. act: "run policy in environment for T timesteps" (Algorithm 1)
        memory_before, final_value = now.memory.clone(), np.zeros(shape, np.float32)
        for step in range(args.num_steps):
            obs[step], alive[step] = with_agent_id(torch.as_tensor(next_obs).flatten(2)), envs.alive
            state[step], first[step] = of_each_agent(envs.state, num_agents), now.first
            mask[step] = True if envs.action_mask is None else envs.action_mask
            logits, now.memory[0] = one_step(agent.actor, obs[step], now.memory[0], now.first)
            value[step], now.memory[1] = one_step(agent.critic, state[step], now.memory[1], now.first)
            drawn = sample_categorical(allowed_logits(logits, mask[step]).reshape(-1, num_actions))
            action[step], logprob[step] = (x.reshape(shape[1:]) for x in drawn)
            next_obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            done[step], timeout[step] = terminated | truncated, alive[step] & truncated & ~terminated
            now.first = done[step].all(1)
            if (cut := np.flatnonzero(timeout[step].any(1))).size:
                # A time limit does not end the task: bootstrap from the value of the final state, with the memory so
                # far, of agents that it takes out of the game, also where others still play.
                last, begins = of_each_agent(infos["next_state"][cut], num_agents), np.zeros(len(cut), bool)
                last_value, _ = one_step(agent.critic, last, now.memory[1, cut], begins)
                final_value[step, cut] = timeout[step, cut] * last_value
        run.episodes(global_step, reward, done, per_agent=True)

        # ---- 2. credit: "compute advantage estimates"
        next_state = of_each_agent(envs.state, num_agents)
        next_value, _ = one_step(agent.critic, next_state, now.memory[1], now.first)
        credited = np.repeat(reward.sum(2, keepdims=True), num_agents, 2) if args.common_reward else reward
        advantage = gae(credited, value, done, final_value, next_value, args.gamma, args.gae_lambda)
        rollout = (obs, state, first, memory_before, mask, alive, action, logprob, value, advantage, advantage + value)
        rollout = Batch(*(torch.as_tensor(x, device=run.device) for x in rollout))
        agent.critic.count_returns(rollout.returns[rollout.alive], args.norm_rate)

        # ---- 3. learn: "optimize surrogate L wrt theta, with K epochs and minibatch size M <= NT"
        for epoch in range(args.update_epochs):
            kl = []
            for index in torch.randperm(args.num_envs, device=run.device).split(minibatch_envs):
                metrics = gradient_step(Batch(*(x[:, index] for x in rollout)), args)
                run.learned(metrics)
                kl.append(metrics["losses/approx_kl"])
            if args.target_kl is not None and torch.stack(kl).mean() > args.target_kl:
                break

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        error, target = rollout.advantage[rollout.alive], rollout.returns[rollout.alive]  # advantage: returns - value
        explained_variance = 1 - error.var() / (target.var() + 1e-8)
        learning_rate = optimizer.param_groups[0]["lr"]
        run.log(global_step, {"charts/learning_rate": learning_rate, "losses/explained_variance": explained_variance})
        run.evaluate(global_step, agent.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(agent.act, make_env)  # a last evaluation; `solo play` takes this policy
