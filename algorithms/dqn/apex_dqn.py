# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[ray]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Ape-X DQN: many actors, a replay buffer in shards and a learner, in processes of their own; vector observations.

Paper     Horgan et al. 2018, https://arxiv.org/abs/1803.00933 ("Alg. 1" below), whose parameters for Atari are those of
          apex_dqn_atari.py; "Schaul": Schaul et al. 2016, https://arxiv.org/abs/1511.05952; "Wang": Wang et al. 2016,
          https://arxiv.org/abs/1511.06581
Run       solo train apex_dqn --env-id CartPole-v1
Spaces    vector -> discrete
Differs   relatives dqn.py, rainbow_atari.py: the loop of the first; n-step returns, double and dueling values and
          priorities of the second; actors, shards of the replay buffer and one learner in processes that Ray places.
          Each actor has a constant epsilon and computes the first priorities of its transitions. Clipped gradients.
          Asynchronous: time decides which rollout comes next, and --seed fixes the first weights only, so two runs with
          one seed differ. With --synchronous (one actor, all in this process) they are equal.
Not for   Atari games: apex_dqn_atari.py; image observations: dqn_image.py; continuous: ddpg_continuous_action.py
Details   docs/algorithms/apex_dqn.md
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

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"  # Gymnasium id of the environment
    total_timesteps: int = 500_000  # environment steps, summed over actors
    num_actors: int = 2  # processes that play, in one environment each
    num_replay_shards: int = 1  # processes that hold the replay buffer, in equal parts
    synchronous: bool = False  # one actor, all in this process: reproducible; with --save-replay resumed exactly
    num_steps: int = 50  # environment steps that an actor takes before it hands them over
    broadcast_frequency: int = 10  # gradient steps between two broadcasts of the Q-network's weights to the actors
    buffer_size: int = 50_000  # transitions in the replay buffer, in all shards together
    batch_size: int = 128  # transitions per gradient step
    learning_starts: int = 1000  # environment steps before the first gradient step; 0: learn at once
    train_frequency: int = 5  # environment steps per gradient step
    learning_rate: float = 2.5e-4  # learning rate of Adam
    max_grad_norm: float = 40.0  # clip the norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 500  # environment steps between target network updates
    n_step: int = 3  # steps of a return before it bootstraps
    base_epsilon: float = 0.4  # the first actor's probability of a random action, from 0 to 1
    epsilon_exponent: float = 7.0  # alpha in the epsilon of actor i, base_epsilon ** (1 + alpha i / (num_actors - 1))
    prioritized_replay_alpha: float = 0.6  # exponent of the error in a priority (0: drawn uniformly), from 0 to 1
    prioritized_replay_beta: float = 0.4  # exponent of the importance weights, from 0 to 1


class Batch(NamedTuple):
    """Transitions of up to n_step steps."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    action: torch.Tensor  # (batch_size,)
    reward: torch.Tensor  # (batch_size,), the discounted sum of the steps
    discount: torch.Tensor  # (batch_size,), of the value of next_obs; 0 where the task is over, not at a time limit
    next_obs: torch.Tensor  # (batch_size, obs_dim)


def make_env(env_id, **kwargs):
    """One environment, for training and for evaluation; its actions are int64 and count from 0."""
    env = gym.make(env_id, **kwargs)
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete) and (space.start != 0 or space.dtype != np.int64):
        from_0 = gym.spaces.Discrete(space.n)
        env = gym.wrappers.TransformAction(env, lambda action: (action + space.start).astype(space.dtype), from_0)
    return env


class ShardSummary(NamedTuple):
    """What the learner must know of a whole shard."""

    inserted: int  # how many transitions were ever inserted
    priority_sum: float
    least_priority: float  # the smallest; inf where there are no transitions


class Sample(NamedTuple):
    """Transitions drawn from one shard, NumPy."""

    columns: list  # those of a Batch, (n, ...) each
    priority: np.ndarray  # (n,), as `priorities` gives it
    number: np.ndarray  # (n,): which transitions of the shard they are, counted from 0
    summary: ShardSummary


class SumTree:
    """The priorities of `capacity` leaves in a binary tree: each node knows the sum of its leaves' priorities, and the
    smallest of them that is not 0. The root is node 1, the children of node i are 2 i and 2 i + 1."""

    def __init__(self, capacity):
        self.size = 2 ** (capacity - 1).bit_length()  # leaf i is node size + i
        self.sum, self.least = np.zeros(2 * self.size), np.full(2 * self.size, np.inf)

    def set(self, index, priority):
        """Give the leaves of these indices (n,) their priorities (n,)."""
        node = index + self.size
        self.sum[node] = priority
        self.least[node] = np.where(self.sum[node] > 0, self.sum[node], np.inf)
        for _ in range(self.size.bit_length() - 1):
            node = node // 2
            self.sum[node] = self.sum[2 * node] + self.sum[2 * node + 1]
            self.least[node] = np.minimum(self.least[2 * node], self.least[2 * node + 1])

    def draw(self, n):
        """Indices (n,) of leaves, drawn in proportion to priority: one in each of n equal parts of the sum (Schaul,
        B.2.1)."""
        value = (np.arange(n) + np.random.random(n)) / n * self.sum[1]
        node = np.ones(n, np.int64)
        while node[0] < self.size:
            left = self.sum[2 * node]
            right = (value >= left) & (self.sum[2 * node + 1] > 0)  # sums are rounded: never to a side without priority
            value, node = value - right * left, 2 * node + right
        return node - self.size


class ReplayShard:
    """A part of the replay buffer: its last `capacity` transitions, drawn in proportion to their priorities."""

    def __init__(self, capacity, obs_dim):
        self.arrays = {
            "obs": np.zeros((capacity, obs_dim), np.float32),
            "action": np.zeros(capacity, np.int64),
            "reward": np.zeros(capacity, np.float32),
            "discount": np.zeros(capacity, np.float32),
            "next_obs": np.zeros((capacity, obs_dim), np.float32),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: the number of the next transition
        self.tree = tree = SumTree(capacity)
        # what a checkpoint holds with the arrays. leaves: a view of `sum`, whose own length is a power of 2, by which a
        # checkpoint of another capacity is refused
        leaves = tree.sum[tree.size :][:capacity]
        self.state = SimpleNamespace(sum=tree.sum, least=tree.least, leaves=leaves)

    def summary(self):
        """A ShardSummary."""
        return ShardSummary(self.inserted, self.tree.sum[1], self.tree.least[1])

    def add(self, batch, priority):
        """Write n transitions over the oldest: a Batch of NumPy arrays, (n, ...) each, and their priorities (n,)."""
        index = (self.inserted + np.arange(len(priority))) % self.capacity
        for array, values in zip(self.arrays.values(), batch, strict=True):
            array[index] = values
        self.tree.set(index, priority)
        self.inserted += len(priority)

    def sample(self, n):
        """A Sample of n transitions, of none if there are none yet."""
        index = self.tree.draw(n) if self.tree.sum[1] > 0 else np.zeros(0, int)
        number = self.inserted - 1 - (self.inserted - 1 - index) % self.capacity  # the newest number at each index
        columns = [array[index] for array in self.arrays.values()]
        return Sample(columns, self.tree.sum[self.tree.size + index], number, self.summary())

    def update(self, number, priority):
        """Give the transitions of these numbers (n,) their priorities (n,), except those overwritten meanwhile."""
        # after a restart old numbers are too high and left out, or set a wrong priority until the transition is drawn
        kept = (number >= self.inserted - self.capacity) & (number < self.inserted)
        self.tree.set(number[kept] % self.capacity, priority[kept])


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [layer for fan_in, fan_out in pairwise(sizes) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class QNetwork(nn.Module):
    """The values of all actions."""

    def __init__(self, obs_dim, num_actions):
        super().__init__()
        self.torso = mlp(obs_dim, 120)
        self.value = mlp(120, 84, 1)
        self.advantage = mlp(120, 84, num_actions)

    def forward(self, obs):  # (batch, obs_dim) -> (batch, num_actions)
        x = self.torso(obs).relu()
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)  # Eq. 9 of Wang

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, *obs_shape) -> NumPy (batch,): the greedy actions
        obs = torch.as_tensor(obs, dtype=torch.float32, device=next(self.parameters()).device).flatten(1)
        return self(obs).argmax(1).cpu().numpy()


class Actor:
    """Plays one environment and adds its transitions, with their first priorities, to the replay buffer (Alg. 1)."""

    def __init__(self, args, position, shards, envs):  # position: i / (N - 1) of actor i of N, from 0
        self.args, self.shards, self.envs = args, shards, envs
        self.epsilon = args.base_epsilon ** (1 + args.epsilon_exponent * position)
        self.num_actions = int(self.envs.single_action_space.n)
        obs_dim = int(np.prod(self.envs.single_observation_space.shape))
        self.q_network = QNetwork(obs_dim, self.num_actions)
        self.obs = None  # (1, *obs_shape)
        self.now = SimpleNamespace()  # what a checkpoint holds
        self.begin()

    def begin(self):
        """Forget the episode before: what was played of it is not complete."""
        self.now.steps = []  # the last ones, whose returns are not complete
        self.now.rewards = []  # all of the episode so far

    def rollout(self, weights, shard):
        """Take num_steps steps with these weights, and add to a shard the transitions whose returns are complete.
        Returns the raw rewards of each episode that has ended, and the future of the shard's `add`."""
        episodes = []
        for parameter, array in zip(self.q_network.parameters(), weights, strict=True):
            parameter.data.numpy()[...] = array
        if self.obs is None:
            self.obs = self.envs.reset()[0]
        for _ in range(self.args.num_steps):
            obs, action = self.obs, self.q_network.act(self.obs)
            if np.random.random() < self.epsilon:
                action[0] = np.random.randint(self.num_actions)
            self.obs, reward, terminated, truncated, infos = self.envs.step(action)
            over = bool(terminated[0] | truncated[0])
            # where the episode is over, self.obs is the next one's
            vectors = (np.array(x, np.float32).flatten() for x in (obs, infos["next_obs"]))
            # obs, next_obs, action, reward, done (0 at a time limit), end of the episode
            self.now.steps.append((*vectors, int(action[0]), float(reward[0]), bool(terminated[0]), over))
            self.now.rewards.append(float(reward[0]))
            if over:
                episodes.append(self.now.rewards)
                self.now.rewards = []
        obs, next_obs, action, reward, done, end = map(np.array, zip(*self.now.steps, strict=True))
        reward, discount, last = n_step_returns(reward, done, end, self.args.n_step, self.args.gamma)
        self.now.steps = self.now.steps[len(last) :]
        batch = Batch(obs[: len(last)], action[: len(last)], reward, discount, next_obs[last])
        with torch.no_grad():  # an actor has no target network
            error, _ = td_errors(self.q_network, self.q_network, Batch(*map(torch.from_numpy, batch)))
        added = self.shards[shard].add(batch, priorities(error, self.args.prioritized_replay_alpha))
        return episodes, added


def n_step_returns(reward, done, end, n_step, gamma):
    """The returns that begin at consecutive steps (steps,) and are complete, after n_step steps or an `end` before.
    These are the first k; the others wait for steps to come. Three arrays (k,): the discounted sum of the rewards; the
    discount of the value of what comes after, 0 after `done`; and the index of the return's last step."""
    step = np.arange(len(reward))
    last, total, discount = step, reward.astype(np.float32), np.full(len(reward), gamma, np.float32)
    for _ in range(n_step - 1):
        has_next = ~end[last] & (last + 1 < len(reward))
        last = last + has_next
        total += np.where(has_next, discount * reward[last], 0)
        discount = np.where(has_next, gamma * discount, discount)
    complete = end[last] | (last - step == n_step - 1)
    return total[complete], (discount * ~done[last])[complete], last[complete]


def td_errors(q_network, target_network, batch):
    """(batch_size,): the target of double Q-learning minus the values; and the values."""
    with torch.no_grad():
        next_action = q_network(batch.next_obs).argmax(1, keepdim=True)  # chosen by one network, judged by the other
        next_value = target_network(batch.next_obs).gather(1, next_action).squeeze(1)
        target = batch.reward + batch.discount * next_value
    q = q_network(batch.obs).gather(1, batch.action[:, None]).squeeze(1)
    assert q.shape == target.shape == batch.discount.shape
    return target - q, q


def apex_loss(q_network, target_network, batch, weight):
    """Half the mean squared error, times the importance weights; the metrics; and the errors (batch_size,), of which
    the priorities are made."""
    error, q = td_errors(q_network, target_network, batch)
    loss = 0.5 * (weight * error**2).mean()
    return loss, {"losses/td_loss": loss, "losses/q_values": q.mean()}, error


def priorities(error, alpha):
    """p^alpha (batch_size,), NumPy, to which the probability of being drawn is proportional (Schaul, Eq. 1). p: size of
    the error and a small number more, so that every transition can be drawn again (Schaul, 3.3)."""
    return (error.detach().abs().double().cpu().numpy() + 1e-6) ** alpha


def draw_counts(summaries, n):
    """How many of n transitions to draw from each shard (num_shards,), as if one buffer held all their transitions: one
    is drawn in each of n equal parts of the sum of all priorities (Schaul, B.2.1)."""
    ends = np.cumsum([summary.priority_sum for summary in summaries])
    value = (np.arange(n) + np.random.random(n)) / n * ends[-1]
    return np.bincount(np.searchsorted(ends[:-1], value, side="right"), minlength=len(summaries))


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, 1)
    run.require_spaces(envs, obs="vector", action="discrete")
    num_actors = 1 if args.synchronous else args.num_actors
    capacity = args.buffer_size // args.num_replay_shards
    num_iterations = run.iterations(args.num_steps)  # a rollout of one actor each
    target = args.target_network_frequency
    run.require(target >= args.num_steps, f"--target-network-frequency must be at least {args.num_steps}, one rollout")
    least = (args.num_steps + args.n_step) * args.num_replay_shards  # the transitions of a rollout in each shard
    run.require(args.buffer_size >= least, f"--buffer-size must be at least {least}, a rollout in each shard")
    obs_dim, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)

    q_network = QNetwork(obs_dim, num_actions).to(run.device)
    target_network, actor_network = copy.deepcopy(q_network), copy.deepcopy(q_network).cpu()  # the actors' copy
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)  # the paper: centred RMSProp
    # gradient_step(*inputs): an optimiser step on apex_loss(q_network, *inputs); returns its metrics and extra values
    gradient_step = run.gradient_step(apex_loss, q_network, optimizer, args.max_grad_norm)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(q_network=q_network, target_network=target_network, actor_network=actor_network, optimizer=optimizer)
    # shards and actors live in processes of Ray: their methods return futures, for which run.first and run.answers
    # wait. With --synchronous they are plain objects, and methods return the results
    shards = run.place(ReplayShard, [(capacity, obs_dim)] * args.num_replay_shards, here=args.synchronous)
    # what is sent to another process is a copy there; of envs, environments of its own
    inputs = [(args, i / max(1, num_actors - 1), shards, envs) for i in range(num_actors)]
    actors = run.place(Actor, inputs, here=args.synchronous)
    if args.synchronous:
        parts |= dict(envs=envs, now=actors[0].now) | {f"replay_{i}": shard for i, shard in enumerate(shards)}
    start = run.resume(**parts)
    if args.synchronous:
        actors[0].obs = run.reset(envs)
        if run.restarted:  # the episode is gone, and with it the steps whose returns were not complete
            actors[0].begin()

    # ---- what is under way, so that nobody waits: two rollouts of each actor, two batches in advance
    rollouts_ahead, batches_ahead = (1, 0) if args.synchronous else (2, 2)
    to_ask = [*range(num_actors)] * rollouts_ahead  # actors that a rollout will be asked of
    pending_rollouts = []  # of each: (actor, future of what `rollout` returns)
    pending_batches = []  # of each: [(shard, future of its sample), ...]
    updated = []  # futures of the shards' `update`
    weights = run.share([parameter.detach().numpy() for parameter in actor_network.parameters()])
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * args.num_steps  # at the end of this iteration

        # ---- 1. act: take the first rollout to finish; ask its actor again in the next iteration, a dead one at once
        rollout = None
        while rollout is None:
            for k, i in enumerate(to_ask):  # the shards take turns
                pending_rollouts.append((i, actors[i].rollout(weights, (iteration + k) % len(shards))))
            first, rollout = run.first([future for _, future in pending_rollouts])
            to_ask = [pending_rollouts.pop(first)[0]]
        episodes, added = rollout
        for rewards in episodes:  # one that has ended, of one environment: (steps, 1)
            reward, done = np.array(rewards)[:, None], np.zeros((len(rewards), 1), bool)
            done[-1] = True
            run.episodes(global_step, reward, done)

        # ---- 2. store: the actor has sent the transitions to a shard; one that has died begins again without any
        run.answers([added, *updated])  # an exception in a shard ends the run here; a dead shard answers None
        updated.clear()
        known = run.answers([shard.summary() for shard in shards])
        summaries = [ShardSummary(0, 0.0, np.inf) if summary is None else summary for summary in known]

        # ---- 3. learn: a gradient step every train_frequency environment steps, after learning_starts
        inserted = sum(summary.inserted for summary in summaries)
        # each actor holds back fewer than n_step steps; where even more are missing (a shard has died, or the run is
        # resumed), learning waits
        enough = inserted >= max(1, args.learning_starts - args.n_step * num_actors)
        for env_step in range(global_step - args.num_steps + 1, global_step + 1):
            if not (enough and env_step > args.learning_starts and env_step % args.train_frequency == 0):
                continue
            while len(pending_batches) <= batches_ahead:
                count = draw_counts(summaries, args.batch_size)  # how many transitions each shard is asked for
                pending_batches.append([(i, shards[i].sample(count[i])) for i in np.flatnonzero(count)])
            indices, futures = zip(*pending_batches.pop(0), strict=True)
            answers = run.answers(futures)
            samples = {i: x for i, x in zip(indices, answers, strict=True) if x is not None and len(x.priority)}
            for i, sample in samples.items():
                summaries[i] = sample.summary
            if not samples:  # the shards that were asked have died: there is nothing to learn from yet
                continue
            columns = map(np.concatenate, zip(*(sample.columns for sample in samples.values()), strict=True))
            batch = Batch(*(torch.from_numpy(column).to(run.device) for column in columns))
            priority = np.concatenate([sample.priority for sample in samples.values()])
            # importance weights, divided by the largest, that of the smallest priority (Schaul, 3.4); what is known of
            # shards that gave nothing to this batch is a little old
            least_priority = min(summary.least_priority for summary in summaries)
            weight = (priority / least_priority) ** -args.prioritized_replay_beta
            metrics, error = gradient_step(target_network, batch, torch.tensor(weight).float().to(run.device))
            new_priority = priorities(error, args.prioritized_replay_alpha)
            run.learned(metrics)
            for i, sample in samples.items():
                updated.append(shards[i].update(sample.number, new_priority[: len(sample.number)]))
                new_priority = new_priority[len(sample.number) :]
            if env_step // args.train_frequency % args.broadcast_frequency == 0:  # for the rollouts asked from now on
                actor_network.load_state_dict(q_network.state_dict())
                weights = run.share([parameter.detach().numpy() for parameter in actor_network.parameters()])
        if global_step % args.target_network_frequency < args.num_steps:  # a multiple of it lies in this iteration
            target_network.load_state_dict(q_network.state_dict())

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)  # a last evaluation; `solo play` takes this policy
