# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax,pettingzoo]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Counterfactual multi-agent policy gradients (COMA): several agents with one common reward, discrete actions, vector
observations.

Paper     Foerster et al. 2018, https://arxiv.org/abs/1705.08926
Run       solo train coma --env-id team/simple_spread_v3
Spaces    vector -> discrete, of each agent
Differs   from vdn.py: policies in place of values, learned from the newest episodes only; a critic that sees all, with
          TD(lambda); an agent's advantage is over its own other actions, while the others did what they did
Not for   one agent: ppo.py; continuous actions: maddpg.py; a reward of each agent's own: ippo.py; what agents
          must remember and the central state lacks, because the critic has no memory: qmix.py
Details   docs/algorithms/coma.md
"""

import copy
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
    env_kind = "agents"  # --env-id is a game of several agents
    env_id: str = "team/simple_spread_v3"  # id of the game
    total_timesteps: int = 500_000  # environment steps, summed over environments
    num_envs: int = 8  # environments stepped in parallel
    max_steps: int = 25  # most steps in a segment: a longer episode is cut, and the memory begins empty in each
    batch_size: int = 8  # fewest segments per update: an episode, or a part of a longer one
    critic_steps: int = 16  # gradient steps of the critic per update
    actor_lr: float = 0.002  # learning rate of the actor's Adam
    critic_lr: float = 0.002  # learning rate of the critic's Adam
    max_grad_norm: float = 10.0  # clip the global norm of the gradient; inf: do not clip
    gamma: float = 0.95  # discount factor, from 0 to 1
    td_lambda: float = 0.8  # lambda of the critic's targets (0: TD(0), 1: Monte Carlo), from 0 to 1
    target_network_frequency: int = 50  # gradient steps of the critic between target network updates
    tau: float = 1.0  # soft-update coefficient of the target network (1: hard copy), from 0 to 1
    start_e: float = 0.5  # initial epsilon: probability with which a policy draws uniformly, from 0 to 1
    end_e: float = 0.01  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.5  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1


class Batch(NamedTuple):
    """Segments of episodes: max_steps steps, and what is seen after them. Where one is shorter, nobody is alive."""

    obs: torch.Tensor  # (max_steps + 1, batch_size, num_agents, obs_dim)
    state: torch.Tensor  # (max_steps + 1, batch_size, state_dim), the central state
    mask: torch.Tensor  # (max_steps + 1, batch_size, num_agents, num_actions), True for actions that are allowed
    action: torch.Tensor  # (max_steps, batch_size, num_agents)
    reward: torch.Tensor  # (max_steps, batch_size), the sum over the agents
    alive: torch.Tensor  # (max_steps, batch_size, num_agents), 1 where an agent acts, 0 where it has left
    terminated: torch.Tensor  # (max_steps, batch_size, num_agents), 0 at a time limit: that is not the end of the task


def make_env(env_id, **kwargs):
    """One game, for training and for evaluation."""
    return gym.make(env_id, **kwargs)


def empty_segments(count, max_steps, num_agents, obs_dim, state_dim, num_actions):
    """Arrays for `count` segments, by the names of Batch, with the axes (count, steps, ...)."""
    steps, with_last = (count, max_steps), (count, max_steps + 1)
    return {
        "obs": np.zeros((*with_last, num_agents, obs_dim), np.float32),
        "state": np.zeros((*with_last, state_dim), np.float32),
        "mask": np.ones((*with_last, num_agents, num_actions), bool),  # some are allowed, also where nothing is stored
        "action": np.zeros((*steps, num_agents), np.int64),
        "reward": np.zeros(steps, np.float32),
        "alive": np.zeros((*steps, num_agents), np.float32),
        "terminated": np.zeros((*steps, num_agents), np.float32),
    }


def observed(obs, state, action_mask, num_actions):
    """What is seen before a step of some games, by the names of Batch: obs (games, num_agents, *obs_shape), state
    (games, *state_shape) and action_mask, or None: all actions are allowed."""
    mask = np.ones((*obs.shape[:2], num_actions), bool) if action_mask is None else action_mask
    return {"obs": obs.reshape(*obs.shape[:2], -1), "state": state.reshape(len(state), -1), "mask": mask}


def write(segments, step, values):
    """Write values, arrays (games, ...), into the segments of these games, each at its own `step` (games,)."""
    for name, array in values.items():
        segments[name][np.arange(len(step)), step] = array


def with_agent_id(obs):
    """(..., num_agents, obs_dim) -> (..., num_agents, obs_dim + num_agents): each agent sees who it is."""
    num_agents = obs.shape[-2]
    return torch.cat([obs, torch.eye(num_agents, device=obs.device).expand(*obs.shape[:-1], num_agents)], -1)


class AgentNetwork(nn.Module):
    """Values, in COMA logits, of an agent's actions by what it has seen and done so far. All share the weights."""

    def __init__(self, num_agents, obs_dim, num_actions):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(obs_dim + num_actions + num_agents, 64), nn.ReLU())
        self.memory = nn.GRUCell(64, 64)
        self.head = nn.Linear(64, num_actions)

    def forward(self, obs, last_action, hidden):
        """Some steps of some games, at once for all agents.

        obs (steps, batch, num_agents, obs_dim), last_action (steps, batch, num_agents, num_actions), one-hot, 0 where
        there was none, hidden (batch, num_agents, 64)
        -> values (steps, batch, num_agents, num_actions), hidden (steps, batch, num_agents, 64) after each step
        """
        inputs, outputs, batch = with_agent_id(torch.cat([obs, last_action], -1)), [], hidden.shape[:2]
        hidden = hidden.flatten(0, 1)
        for x in self.encoder(inputs).flatten(1, 2):
            hidden = self.memory(x, hidden)
            outputs.append(hidden)
        hidden = torch.stack(outputs).unflatten(1, batch)
        return self.head(hidden), hidden


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def mixed_policy(logits, mask, epsilon):
    """(1 - epsilon) softmax(logits) + epsilon / number of actions, of those allowed. All (..., num_actions)."""
    softmax = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
    return (1 - epsilon) * softmax + epsilon * mask / mask.sum(-1, keepdim=True)


def sampled(policy):
    """Actions drawn from probabilities, (..., num_actions) -> (...); from equal ones where they are NaN."""
    return torch.multinomial(policy.flatten(0, -2).nan_to_num(1.0), 1).view(policy.shape[:-1])


class Critic(nn.Module):
    """Q(s, (u_-i, .)): the values of all actions of an agent, by the central state, its observation, who it is, and
    what the others do that play."""

    def __init__(self, num_agents, obs_dim, state_dim, num_actions):
        super().__init__()
        self.num_actions = num_actions
        self.net = mlp(state_dim + obs_dim + num_agents + num_agents * num_actions, 128, 128, num_actions)

    def forward(self, obs, state, action, alive):
        """(..., num_agents, obs_dim), (..., state_dim), twice (..., num_agents) -> (..., num_agents, num_actions)."""
        num_agents = action.shape[-1]
        others = 1 - torch.eye(num_agents, device=action.device)[..., None]  # nobody sees the own action
        joint = others * (alive[..., None] * F.one_hot(action, self.num_actions))[..., None, :, :]
        state = state[..., None, :].expand(*action.shape, state.shape[-1])
        return self.net(torch.cat([state, with_agent_id(obs), joint.flatten(-2)], -1))


class Actor(nn.Module):
    """The policies of all agents."""

    def __init__(self, num_agents, obs_dim, num_actions):
        super().__init__()
        self.num_actions = num_actions
        self.agents = AgentNetwork(num_agents, obs_dim, num_actions)

    def forward(self, batch):  # Batch -> logits (max_steps + 1, batch_size, num_agents, num_actions)
        action = F.one_hot(batch.action, self.num_actions).float()
        last_action = torch.cat([torch.zeros_like(action[:1]), action])
        hidden = torch.zeros(*batch.obs.shape[1:3], 64, device=batch.obs.device)
        return self.agents(batch.obs, last_action, hidden)[0]

    @torch.no_grad()
    def draw(self, obs, state, first, action_mask, epsilon, greedy=False):
        """Actions drawn from the policy mixed with `epsilon`, or the most likely ones; otherwise as `act`."""
        device = self.agents.head.weight.device
        obs = torch.as_tensor(obs, dtype=torch.float32, device=device).flatten(2)
        if state is None:
            state = torch.zeros(*obs.shape[:2], 64 + self.num_actions, device=device)
        state = state * torch.as_tensor(~first, device=device)[:, None, None]  # nothing where a game begins
        hidden, last_action = state.split([64, self.num_actions], -1)
        logits, hidden = self.agents(obs[None], last_action[None], hidden)
        mask = torch.ones_like(logits[0], dtype=torch.bool) if action_mask is None else torch.as_tensor(action_mask)
        policy = mixed_policy(logits[0], mask.to(device), epsilon)
        action = policy.argmax(-1) if greedy else sampled(policy)
        return action.cpu().numpy(), torch.cat([hidden[0], F.one_hot(action, self.num_actions)], -1)

    def act(self, obs, state, first, action_mask):
        """The most likely actions, NumPy (games, num_agents), and the state after them (games, num_agents, 64 +
        num_actions), which has the memory and the last action. obs NumPy (games, num_agents, *obs_shape), first NumPy
        (games,), action_mask NumPy (games, num_agents, num_actions), or None: all actions are allowed."""
        return self.draw(obs, state, first, action_mask, 0, greedy=True)


def value_of(values, action):
    """The values of some actions, (..., num_actions), (...) -> (...)."""
    return values.gather(-1, action[..., None]).squeeze(-1)


def td_lambda(reward, next_value, goes_on, follows, gamma, lam):
    """The critic's targets, r_t + gamma * ((1 - lam) * V_t+1 + lam * target_t+1), all (steps, batch). V_t+1 takes the
    place of the next target where that does not follow in the segment; nothing is added where the task ends."""
    targets, target = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(len(reward))):
        following = next_value[t] + follows[t] * lam * (target - next_value[t])
        target = targets[t] = reward[t] + gamma * goes_on[t] * following
    return targets


@torch.no_grad()
def all_actions(actor, batch, epsilon):
    """The actions of a batch, and one drawn where none was taken, as after the last step of a segment: (max_steps + 1,
    batch_size, num_agents)."""
    action = sampled(mixed_policy(actor(batch), batch.mask, epsilon))
    action[:-1] = torch.where(batch.alive.bool(), batch.action, action[:-1])
    return action


@torch.no_grad()
def critic_targets(target_critic, batch, action, args):
    """TD(lambda) with the target network, (max_steps, batch_size); `action` as `all_actions` has it. The value of a
    joint action is one for all agents: the mean over those that play in the next step."""
    played = batch.alive.amax(-1)
    arriving = F.pad(batch.alive[1:], (0, 0, 0, 0, 0, 1))  # also who plays from the next step on only
    next_alive = torch.maximum(batch.alive * (1 - batch.terminated), arriving)
    alive = torch.cat([batch.alive[:1], next_alive])  # (max_steps + 1, batch_size, num_agents)
    q = value_of(target_critic(batch.obs, batch.state, action, alive), action)[1:]
    next_value = (next_alive * q).sum(-1) / next_alive.sum(-1).clamp(min=1)
    follows = torch.cat([played[1:], torch.zeros_like(played[:1])])
    return td_lambda(batch.reward, next_value, next_alive.amax(-1), follows, args.gamma, args.td_lambda)


def coma_critic_loss(critic, batch, targets):
    """Mean squared error over all agents that acted, and the metrics."""
    q = value_of(critic(batch.obs[:-1], batch.state[:-1], batch.action, batch.alive), batch.action)
    assert q.shape == batch.alive.shape and targets.shape == batch.reward.shape
    weight = batch.alive / batch.alive.sum()
    loss = (weight * (q - targets[..., None]) ** 2).sum()
    return loss, {"losses/critic_loss": loss, "losses/q_values": (weight * q).sum()}


def coma_actor_loss(actor, critic, batch, epsilon):
    """The policy gradient with the counterfactual advantage, a mean over all agents that acted, and the metrics."""
    policy = mixed_policy(actor(batch)[:-1], batch.mask[:-1], epsilon)
    with torch.no_grad():
        q = critic(batch.obs[:-1], batch.state[:-1], batch.action, batch.alive)
        advantage = value_of(q, batch.action) - (policy * q).sum(-1)
    logprob = value_of(policy, batch.action).clamp(min=1e-10).log()
    assert logprob.shape == advantage.shape == batch.alive.shape
    weight = batch.alive / batch.alive.sum()
    loss = -(weight * advantage * logprob).sum()
    entropy = -(policy * policy.clamp(min=1e-10).log()).sum(-1)
    return loss, {"losses/actor_loss": loss, "losses/entropy": (weight * entropy).sum()}


def soft_update(target, online, tau):
    """Polyak averaging: target <- (1 - tau) * target + tau * online."""
    with torch.no_grad():
        for x, y in zip(target.parameters(), online.parameters(), strict=True):
            x.lerp_(y, tau)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.multi_agent_env(make_env, args.env_id, args.num_envs)  # where a game ends, obs begins the next one
    run.require_spaces(envs, obs="vector", action="discrete")
    num_iterations = run.iterations(args.num_envs)  # whole ones in total_timesteps
    envs.reset(seed=0)  # for the size of the state; run.reset below has seeds of its own
    num_agents, num_actions, state_dim = envs.num_agents, int(envs.agent_action_space.n), envs.state[0].size
    obs_dim = int(np.prod(envs.agent_observation_space.shape))

    actor = Actor(num_agents, obs_dim, num_actions).to(run.device)
    critic = Critic(num_agents, obs_dim, state_dim, num_actions).to(run.device)
    target_critic = copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.actor_lr, eps=1e-5)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=args.critic_lr, eps=1e-5)
    # actor_step(*inputs): an optimiser step on coma_actor_loss(actor, *inputs); returns its metrics
    actor_step = run.gradient_step(coma_actor_loss, actor, actor_optimizer, args.max_grad_norm)
    critic_step = run.gradient_step(coma_critic_loss, critic, critic_optimizer, args.max_grad_norm)
    sizes = (args.max_steps, num_agents, obs_dim, state_dim, num_actions)
    now = SimpleNamespace(
        segments=empty_segments(args.num_envs, *sizes),  # of the games under way
        length=np.zeros(args.num_envs, np.int64),  # steps in each of them
        waiting=[],  # whole segments, for the next update
        updates=0,  # gradient steps of the critic
        first=np.ones(args.num_envs, bool),  # whether a game begins
        memory=torch.zeros(args.num_envs, num_agents, 64 + num_actions, device=run.device),  # the state of `act`
    )
    parts = dict(actor=actor, critic=critic, target_critic=target_critic)  # what a checkpoint holds
    parts |= dict(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, envs=envs, now=now)
    start = run.resume(**parts)
    # run.restarted: episodes that a resume could not continue
    now.first[run.restarted], now.length[run.restarted], now.segments["alive"][run.restarted] = True, 0, 0.0

    obs = run.reset(envs)  # (num_envs, num_agents, *obs_shape)
    seen = observed(obs, envs.state, envs.action_mask, num_actions)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every game, epsilon of each policy uniform
        progress = min(1.0, iteration / max(1.0, args.exploration_fraction * num_iterations))
        epsilon = args.start_e + (args.end_e - args.start_e) * progress
        alive = envs.alive
        action, now.memory = actor.draw(seen["obs"], now.memory, now.first, seen["mask"], epsilon)
        obs, reward, terminated, truncated, infos = envs.step(action)
        run.episodes(global_step, reward, terminated | truncated, per_agent=True)
        now.first = (terminated | truncated).all(-1)

        # ---- 2. store: what was seen, done and got, and what is seen after it; where a game ends, obs begins the next
        taken = {"action": action, "reward": reward.sum(-1), "alive": alive, "terminated": terminated}
        write(now.segments, now.length, seen | taken)
        now.length += 1
        led_to = (infos["next_obs"], infos["next_state"], infos.get("next_action_mask"))  # what the step led to
        write(now.segments, now.length, observed(*led_to, num_actions))
        seen = observed(obs, envs.state, envs.action_mask, num_actions)
        full = np.flatnonzero(now.first | (now.length == args.max_steps))
        now.waiting += [{name: array[i].copy() for name, array in now.segments.items()} for i in full]
        now.length[full], now.segments["alive"][full] = 0, 0.0
        now.memory[full] = 0  # learning begins each segment with an empty memory

        # ---- 3. learn, once there are enough segments: first the critic, then the actor, and forget them
        if len(now.waiting) >= args.batch_size:
            arrays = (np.stack([segment[name] for segment in now.waiting]) for name in Batch._fields)
            batch = Batch(*(torch.from_numpy(array).transpose(0, 1).to(run.device) for array in arrays))
            action_and_next = all_actions(actor, batch, epsilon)
            for _ in range(args.critic_steps):
                targets = critic_targets(target_critic, batch, action_and_next, args)
                run.learned(critic_step(batch, targets))
                now.updates += 1
                if now.updates % args.target_network_frequency == 0:
                    soft_update(target_critic, critic, args.tau)
            run.learned(actor_step(critic, batch, epsilon))
            now.waiting = []

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/epsilon": epsilon})
        run.evaluate(global_step, actor.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(actor.act, make_env)  # a last evaluation; `solo play` takes this policy
