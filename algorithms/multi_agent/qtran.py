# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[jax,pettingzoo]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""QTRAN: several agents with one common reward, discrete actions, vector observations.

Paper     Son et al. 2019, https://arxiv.org/abs/1905.05408; double Q-learning: https://arxiv.org/abs/1509.06461
Run       solo train qtran --env-id team/qtran_matrix --max-steps 1 --start-e 1 --end-e 1
Spaces    vector -> discrete, of each agent
Differs   from qmix.py: a network of its own has the value of a joint action, whatever it depends on; two more losses
          bring the sum of the agents' values, and a value of the state, to it at the best action, and not below
          it at others
Not for   one agent: dqn.py; continuous actions: maddpg.py; a reward of each agent's own: ippo.py
Details   docs/algorithms/qtran.md
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
    total_timesteps: int = 1_000_000  # environment steps, summed over environments
    num_envs: int = 8  # environments stepped in parallel
    max_steps: int = 25  # most steps in a segment: a longer episode is cut; in learning the memory begins empty in each
    buffer_size: int = 5_000  # segments in the replay buffer: an episode, or a part of a longer one
    batch_size: int = 32  # segments per gradient step
    train_frequency: int = 1  # segments stored per gradient step
    learning_rate: float = 0.001  # learning rate of Adam
    max_grad_norm: float = 10.0  # clip the global norm of the gradient; inf: do not clip
    alt: bool = False  # QTRAN-alt: of each agent's actions the smallest excess must be 0; else QTRAN-base
    lambda_opt: float = 1.0  # coefficient of the loss at the best joint action
    lambda_nopt: float = 0.1  # coefficient of the loss at other joint actions
    gamma: float = 0.95  # discount factor, from 0 to 1
    target_network_frequency: int = 1  # gradient steps between target network updates
    tau: float = 0.01  # soft-update coefficient of the target network (1: hard copy), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.05  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.1  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1


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


class EpisodeReplay:
    """The last `capacity` segments of episodes, in host memory: an array for each field of Batch, in their order."""

    def __init__(self, capacity, *sizes):
        self.arrays = empty_segments(capacity, *sizes)
        self.capacity, self.inserted = capacity, 0  # `inserted`: segments ever inserted

    def add(self, segments, chosen):
        """Write some of the segments, those with the indices `chosen`, over the oldest."""
        index = (self.inserted + np.arange(len(chosen))) % self.capacity
        for name, array in self.arrays.items():
            array[index] = segments[name][chosen]
        self.inserted += len(index)

    def sample(self, batch_size, device):
        """A Batch of segments drawn uniformly with replacement."""
        index = np.random.randint(min(self.inserted, self.capacity), size=batch_size)
        return Batch(*(torch.from_numpy(array[index]).transpose(0, 1).to(device) for array in self.arrays.values()))


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


class JointNetwork(nn.Module):
    """The value of a joint action Q_jt, and V_jt: both by the memories of all agents and the central state."""

    def __init__(self, state_dim, num_actions):
        super().__init__()
        self.num_actions = num_actions
        self.encoder = mlp(64 + num_actions, 64, 64)
        self.q, self.v = (mlp(64 + state_dim, 64, 64, 1) for _ in range(2))

    def parts(self, hidden, action, alive):
        """(..., num_agents, 64), (..., num_agents), (..., num_agents) -> (..., num_agents, 64), of which Q_jt takes the
        sum. Those of agents that have left are 0."""
        return alive[..., None] * self.encoder(torch.cat([hidden, F.one_hot(action, self.num_actions)], -1))

    def forward(self, hidden, action, alive, state):  # and state (..., state_dim) -> Q_jt (...)
        return self.q(torch.cat([self.parts(hidden, action, alive).sum(-2), state], -1)).squeeze(-1)

    def baseline(self, hidden, alive, state):  # -> V_jt (...)
        return self.v(torch.cat([(alive[..., None] * hidden).sum(-2), state], -1)).squeeze(-1)

    def own_actions(self, hidden, action, alive, state):
        """Q_jt of all actions of one agent, with the others' as they were, (..., num_agents, num_actions)."""
        parts, size = self.parts(hidden, action, alive), (*action.shape, self.num_actions)
        others = parts.sum(-2, keepdim=True) - parts
        every = torch.arange(self.num_actions, device=action.device).expand(size)
        own = self.parts(hidden[..., None, :].expand(*size, 64), every, alive[..., None].expand(size))
        state = state[..., None, None, :].expand(*size, state.shape[-1])
        return self.q(torch.cat([others[..., None, :] + own, state], -1)).squeeze(-1)


class QNetwork(nn.Module):
    """The values of the agents' actions, and those of joint actions."""

    def __init__(self, num_agents, obs_dim, state_dim, num_actions):
        super().__init__()
        self.num_actions = num_actions
        self.agents = AgentNetwork(num_agents, obs_dim, num_actions)
        self.joint = JointNetwork(state_dim, num_actions)

    def forward(self, batch):  # Batch -> (max_steps + 1, batch_size, num_agents, num_actions), memories (..., 64)
        action = F.one_hot(batch.action, self.num_actions).float()
        last_action = torch.cat([torch.zeros_like(action[:1]), action])
        hidden = torch.zeros(*batch.obs.shape[1:3], 64, device=batch.obs.device)
        return self.agents(batch.obs, last_action, hidden)

    @torch.no_grad()
    def act(self, obs, state, first, action_mask):
        """The greedy actions, NumPy (games, num_agents), and the state after them (games, num_agents, 64 + num_actions)
        which has the memory and the last action. obs NumPy (games, num_agents, *obs_shape), first NumPy (games,),
        action_mask NumPy (games, num_agents, num_actions), or None: all actions are allowed."""
        device = self.agents.head.weight.device
        obs = torch.as_tensor(obs, dtype=torch.float32, device=device).flatten(2)
        if state is None:
            state = torch.zeros(*obs.shape[:2], 64 + self.num_actions, device=device)
        state = state * torch.as_tensor(~first, device=device)[:, None, None]  # nothing where a game begins
        hidden, last_action = state.split([64, self.num_actions], -1)
        values, hidden = self.agents(obs[None], last_action[None], hidden)
        mask = True if action_mask is None else action_mask
        action = greedy(values[0], torch.as_tensor(mask, device=device))
        return action.cpu().numpy(), torch.cat([hidden[0], F.one_hot(action, self.num_actions)], -1)


def greedy(values, mask):
    """The best of the actions that are allowed, (..., num_actions) -> (...)."""
    return values.masked_fill(~mask, -torch.inf).argmax(-1)


def value_of(values, action):
    """The values of some actions, (..., num_actions), (...) -> (...)."""
    return values.gather(-1, action[..., None]).squeeze(-1)


def other_loss(q_network, values, hidden, batch, baseline, alt):
    """L_nopt at the actions that the agents took, (max_steps, batch_size): the square of how far the sum
    is below Q_jt - V_jt. With `alt` L_nopt-min: the square of the smallest difference over the actions of an agent,
    where the others took theirs, mean over the agents."""
    own, taken = batch.alive * value_of(values, batch.action), (hidden, batch.action, batch.alive, batch.state[:-1])
    if not alt:
        with torch.no_grad():
            q = q_network.joint(*taken)
        return (own.sum(-1) - q + baseline).clamp(max=0) ** 2
    with torch.no_grad():
        q = q_network.joint.own_actions(*taken)
    total = (own.sum(-1, keepdim=True) - own)[..., None] + values
    error = (total - q + baseline[..., None, None]).masked_fill(~batch.mask[:-1], torch.inf).amin(-1)
    return (batch.alive * error**2).sum(-1) / batch.alive.sum(-1).clamp(min=1)


def qtran_loss(q_network, target_network, batch, args):
    """L_td + lambda_opt * L_opt + lambda_nopt * L_nopt, means over all steps of games, and the metrics. The last two
    do not move the layers of Q_jt, but the memories that it reads.

    Values of agents that have left are 0. At a time limit the target has the value of the final observation, for which
    the memory runs a step further.
    """
    (values, hidden), state = q_network(batch), batch.state[:-1]
    best, next_best = greedy(values[:-1], batch.mask[:-1]), greedy(values[1:], batch.mask[1:])
    values, hidden = values[:-1], hidden[:-1]
    with torch.no_grad():
        arriving = F.pad(batch.alive[1:], (0, 0, 0, 0, 0, 1))  # also who plays from the next step on only
        next_alive = torch.maximum(batch.alive * (1 - batch.terminated), arriving)
        next_hidden = target_network(batch)[1][1:]
        next_q = target_network.joint(next_hidden, next_best, next_alive, batch.state[1:])
        target = batch.reward + args.gamma * next_alive.amax(-1) * next_q
        best_q = q_network.joint(hidden, best, batch.alive, state)
    q = q_network.joint(hidden, batch.action, batch.alive, state)
    baseline = q_network.joint.baseline(hidden, batch.alive, state)
    best_error = (batch.alive * value_of(values, best)).sum(-1) - best_q + baseline
    errors = ((q - target) ** 2, best_error**2, other_loss(q_network, values, hidden, batch, baseline, args.alt))
    weight = batch.alive.amax(-1)
    weight = weight / weight.sum()
    assert all(error.shape == weight.shape == target.shape == batch.reward.shape for error in errors)
    td, opt, nopt = ((weight * error).sum() for error in errors)
    metrics = {"losses/td_loss": td, "losses/opt_loss": opt, "losses/nopt_loss": nopt}
    return td + args.lambda_opt * opt + args.lambda_nopt * nopt, metrics | {"losses/q_values": (weight * q).sum()}


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

    q_network = QNetwork(num_agents, obs_dim, state_dim, num_actions).to(run.device)
    target_network = copy.deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, eps=1e-5)
    # gradient_step(*inputs): an optimiser step on qtran_loss(q_network, *inputs); returns its metrics
    gradient_step = run.gradient_step(qtran_loss, q_network, optimizer, args.max_grad_norm)
    sizes = (args.max_steps, num_agents, obs_dim, state_dim, num_actions)
    replay = EpisodeReplay(args.buffer_size, *sizes)
    now = SimpleNamespace(
        segments=empty_segments(args.num_envs, *sizes),  # of the games under way
        length=np.zeros(args.num_envs, np.int64),  # steps in each of them
        stored=0,  # segments ever stored
        first=np.ones(args.num_envs, bool),  # whether a game begins
        memory=torch.zeros(args.num_envs, num_agents, 64 + num_actions, device=run.device),  # the state of `act`
    )
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(q_network=q_network, target_network=target_network, optimizer=optimizer)
    parts |= dict(replay=replay, envs=envs, now=now)
    start = run.resume(**parts)
    # run.restarted: episodes that a resume could not continue
    now.first[run.restarted], now.length[run.restarted], now.segments["alive"][run.restarted] = True, 0, 0.0

    obs = run.reset(envs)  # (num_envs, num_agents, *obs_shape)
    seen = observed(obs, envs.state, envs.action_mask, num_actions)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_envs  # at the end of this iteration

        # ---- 1. act: one step in every game, each agent at random with probability epsilon
        progress = min(1.0, iteration / max(1.0, args.exploration_fraction * num_iterations))
        epsilon = args.start_e + (args.end_e - args.start_e) * progress
        alive, mask = envs.alive, seen["mask"]
        action, now.memory = q_network.act(seen["obs"], now.memory, now.first, mask)
        random = np.where(mask, np.random.random(mask.shape), -1.0).argmax(-1)  # one of the actions allowed
        action = np.where(np.random.random(action.shape) < epsilon, random, action)
        now.memory[..., 64:] = F.one_hot(torch.from_numpy(action), num_actions)  # what is done in fact
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
        replay.add(now.segments, full)
        now.length[full], now.segments["alive"][full] = 0, 0.0

        # ---- 3. learn: a gradient step every train_frequency segments, once the replay buffer has a batch of them
        updates_before = now.stored // args.train_frequency
        now.stored += len(full)
        enough = replay.inserted >= args.batch_size  # resuming without --save-replay empties the buffer
        for update in range(updates_before, now.stored // args.train_frequency if enough else updates_before):
            metrics = gradient_step(target_network, replay.sample(args.batch_size, run.device), args)
            run.learned(metrics)
            if (update + 1) % args.target_network_frequency == 0:
                soft_update(target_network, q_network, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/epsilon": epsilon})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)  # a last evaluation; `solo play` takes this policy
