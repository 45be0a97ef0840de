# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari,ray]>=0.1", "ale-py>=0.11", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Ape-X DQN on Atari: many actors, a replay buffer in shards and a learner, in processes of their own; images.

Paper     Horgan et al. 2018, https://arxiv.org/abs/1803.00933 ("Alg. 1" below). Its parameters are the defaults,
          except: 360 actors, 2,000,000 transitions, and as many environment steps per gradient step as the actors take
          meanwhile, about 650; weights copied every 400 frames, games of 50,000 frames at most. "Schaul": Schaul et al.
          2016, https://arxiv.org/abs/1511.05952; "Wang": Wang et al. 2016, https://arxiv.org/abs/1511.06581
Run       solo train apex_dqn_atari --env-id ALE/Pong-v5
Spaces    image -> discrete
Differs   from apex_dqn.py: the wrappers and convolutions of Atari games as in dqn_atari.py; each image stored once in
          a rollout; RMSProp and the settings of the paper
Not for   vector observations: apex_dqn.py; continuous actions: ddpg_continuous_action.py
Details   docs/algorithms/apex_dqn_atari.md
"""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.wrappers import FrameStackObservation, MaxAndSkipObservation, ResizeObservation, TimeLimit

from solorl import Run, RunArgs, parse

gym.register_envs(ale_py)


@dataclass
class Args(RunArgs):
    env_kind = "atari"  # --env-id is one of Gymnasium's Atari games
    env_id: str = "ALE/Pong-v5"  # Gymnasium id of the game; PongNoFrameskip-v4 has no sticky actions
    total_timesteps: int = 10_000_000  # environment steps of 4 frames, summed over actors
    num_actors: int = 2  # processes that play, one game at a time each
    num_replay_shards: int = 1  # processes that hold the replay buffer, in equal parts
    synchronous: bool = False  # one actor, all in this process: reproducible; with --save-replay resumed exactly
    num_steps: int = 50  # environment steps that an actor takes before it hands them over
    broadcast_frequency: int = 10  # gradient steps between two broadcasts of the Q-network's weights to the actors
    buffer_size: int = 1_000_000  # images in the replay buffer, of 7 kB each, in all shards together
    batch_size: int = 512  # transitions per gradient step
    learning_starts: int = 50_000  # environment steps before the first gradient step; 0: learn at once
    train_frequency: int = 64  # environment steps per gradient step
    learning_rate: float = 6.25e-5  # learning rate of RMSProp
    max_grad_norm: float = 40.0  # clip the norm of the gradient; inf: do not clip
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 160_000  # environment steps between target network updates
    n_step: int = 3  # steps of a return before it bootstraps
    base_epsilon: float = 0.4  # the first actor's probability of a random action, from 0 to 1
    epsilon_exponent: float = 7.0  # alpha in the epsilon of actor i, base_epsilon ** (1 + alpha i / (num_actors - 1))
    prioritized_replay_alpha: float = 0.6  # exponent of the error in a priority (0: drawn uniformly), from 0 to 1
    prioritized_replay_beta: float = 0.4  # exponent of the importance weights, from 0 to 1
    eval_episodes: int = 10  # games of one evaluation, on environments and seeds of their own


class Batch(NamedTuple):
    """Transitions of up to n_step steps."""

    obs: torch.Tensor  # (batch_size, 4, 84, 84), bytes
    action: torch.Tensor  # (batch_size,)
    reward: torch.Tensor  # (batch_size,), the discounted sum of the steps
    discount: torch.Tensor  # (batch_size,), of the value of next_obs; 0 where the task is over, not at a time limit
    next_obs: torch.Tensor  # (batch_size, 4, 84, 84), bytes


class RandomNoops(gym.Wrapper):
    """Begins each game with 1 to 30 frames of doing nothing, so that games differ."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        for _ in range(self.unwrapped.np_random.integers(1, 31)):
            obs, _, _, _, info = self.env.step(0)
        return obs, info


class PressFire(gym.Wrapper):
    """Presses FIRE at the start of a game and after a lost life, in all games with this button: some wait for it.
    After a lost life FIRE replaces the agent's action, which is stored as the agent chose it."""

    def __init__(self, env):
        super().__init__(env)
        self.fire, self.lives, self.life_lost = env.unwrapped.get_action_meanings()[1] == "FIRE", 0, False

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        if self.fire:
            obs, _, _, _, info = self.env.step(1)
        self.lives, self.life_lost = info["lives"], False
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(1 if self.fire and self.life_lost else action)
        self.life_lost, self.lives = info["lives"] < self.lives, info["lives"]
        return obs, reward, terminated, truncated, info


def make_env(env_id, **kwargs):
    """One whole game, for training and for evaluation: observations are the last 4 grey images, (4, 84, 84) bytes."""
    env = gym.make(env_id, obs_type="grayscale", frameskip=1, max_num_frames_per_episode=0, **kwargs)
    env = MaxAndSkipObservation(RandomNoops(env), skip=4)  # pixelwise maximum of the last two frames: objects flicker
    env = ResizeObservation(PressFire(env), (84, 84))
    return TimeLimit(FrameStackObservation(env, 4), 27_000)


class ShardSummary(NamedTuple):
    """What the learner must know of a whole shard."""

    inserted: int  # how many rows were ever inserted
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


class FrameShard:
    """A part of the replay buffer: its last `capacity` images, and the transitions of which all images are there,
    drawn in proportion to their priorities.

    A row is an image and the transition that begins there, if one does. Rows are numbered from 0 on; the row of a
    number lies at the index number % capacity. With 6 rows, 9 images inserted so far, and returns of one step:

        index  number  image        near: obs    near: next_obs  discount
          0       6    game B, 1st   0  0  0  0    0  0  0  1      0.99
          1       7    game B, 2nd  -1 -1 -1  0   -1 -1  0  1      0.99
          2       8    game B, 3rd                                          the newest row: no transition yet
          3       3    game A, 4th  -3 -2 -1  0   -2 -1  0  1      0.99     the next write, of number 9, goes here
          4       4    game A, 5th  -3 -2 -1  0   -2 -1  0  1      0
          5       5    game A, 6th                                          game A ends: no transition begins here

    `near`: where the 8 images of the row's transition lie, in rows after this one (before it: less than 0). Rows 3 and
    4 have the priority 0 and are not drawn: some of their images are overwritten.
    """

    def __init__(self, capacity):
        self.arrays = {
            "image": np.zeros((capacity, 84, 84), np.uint8),
            "near": np.zeros((capacity, 8), np.int32),
            "action": np.zeros(capacity, np.int64),
            "reward": np.zeros(capacity, np.float32),
            "discount": np.zeros(capacity, np.float32),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: the number of the next row
        self.tree = tree = SumTree(capacity)
        # what a checkpoint holds with the arrays. leaves: a view of `sum`, whose own length is a power of 2, by which a
        # checkpoint of another capacity is refused
        leaves = tree.sum[tree.size :][:capacity]
        self.state = SimpleNamespace(sum=tree.sum, least=tree.least, leaves=leaves)

    def summary(self):
        """A ShardSummary."""
        return ShardSummary(self.inserted, self.tree.sum[1], self.tree.least[1])

    def add(self, image, first, priority, *columns):
        """Write images (rows, 84, 84) over the oldest rows, and the n transitions that begin at these of them: `first`
        (n,). Their priorities (n,); near (n, 8), action, reward, discount (n,) are the columns. Transitions that begin
        in the 3 rows after the last one are removed, too: one of their images may be overwritten."""
        number = self.inserted + np.arange(len(image))
        self.tree.set((self.inserted + np.arange(len(image) + 3)) % self.capacity, 0)
        self.arrays["image"][number % self.capacity] = image
        index = number[first] % self.capacity
        for name, values in zip(("near", "action", "reward", "discount"), columns, strict=True):
            self.arrays[name][index] = values
        self.tree.set(index, priority)
        self.inserted += len(image)

    def sample(self, n):
        """A Sample of n transitions, of none if there are none yet."""
        index = self.tree.draw(n) if self.tree.sum[1] > 0 else np.zeros(0, int)
        number = self.inserted - 1 - (self.inserted - 1 - index) % self.capacity  # the newest number at each index
        image = self.arrays["image"][(index[:, None] + self.arrays["near"][index]) % self.capacity]
        action, reward, discount = (self.arrays[name][index] for name in ("action", "reward", "discount"))
        columns = [image[:, :4], action, reward, discount, image[:, 4:]]
        return Sample(columns, self.tree.sum[self.tree.size + index], number, self.summary())

    def update(self, number, priority):
        """Give the transitions of these rows (n,) their priorities (n,), except those overwritten meanwhile."""
        index = number % self.capacity
        # after a restart old numbers are too high and left out, or set a wrong priority until the transition is drawn
        kept = (number >= self.inserted - self.capacity) & (number < self.inserted)
        kept &= self.tree.sum[self.tree.size + index] > 0
        self.tree.set(index[kept], priority[kept])


class Scaled(nn.Module):
    """Bytes to numbers from 0 to 1, on the device: bytes are copied there faster. Channels last: fast convolutions."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255


def nature_cnn():
    """The convolutional network of Mnih et al. 2015, (batch, 4, 84, 84) bytes -> (batch, 512)."""
    convolutions = [nn.Conv2d(4, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
    layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
    return nn.Sequential(Scaled(), *layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU())


class QNetwork(nn.Module):
    """The values of all actions, from streams for the value of the state and for the advantages."""

    def __init__(self, num_actions):
        super().__init__()
        self.torso = nature_cnn()[:-2]  # without its linear layer: each stream has one
        self.value = nn.Sequential(nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 1))
        self.advantage = nn.Sequential(nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, num_actions))

    def forward(self, obs):  # (batch, 4, 84, 84) -> (batch, num_actions)
        x = self.torso(obs)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)  # Eq. 9 of Wang

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, 4, 84, 84) -> NumPy (batch,): the greedy actions
        return self(torch.as_tensor(obs, device=self.value[0].weight.device)).argmax(1).cpu().numpy()


class Actor:
    """Plays one game after the other and adds its transitions, with their first priorities, to the replay buffer
    (Alg. 1)."""

    def __init__(self, args, position, shards, envs):  # position: i / (N - 1) of actor i of N, from 0
        self.args, self.shards, self.envs = args, shards, envs
        self.epsilon = args.base_epsilon ** (1 + args.epsilon_exponent * position)
        self.num_actions = int(self.envs.single_action_space.n)
        self.q_network = QNetwork(self.num_actions)
        self.obs = None  # (1, 4, 84, 84)
        self.now = SimpleNamespace()  # what a checkpoint holds
        self.begin()

    def begin(self):
        """Forget the game before: what was played of it is not complete."""
        self.now.images, self.now.stack = [], []  # the last images; which of them, by index, are the 4 of obs
        self.now.steps = []  # the last ones, whose returns are not complete
        self.now.rewards, self.now.lives = [], 0  # all rewards of the game so far; lives left

    def rollout(self, weights, shard):
        """Take num_steps steps with these weights, and add to a shard the transitions whose returns are complete.
        Returns the raw rewards of each game that has ended, and the future of the shard's `add`."""
        games, now = [], self.now
        for parameter, array in zip(self.q_network.parameters(), weights, strict=True):
            parameter.data.numpy()[...] = array
        if self.obs is None:
            self.obs = self.envs.reset()[0]
        if not now.images:
            now.images, now.stack = [self.obs[0, -1]], [0] * 4
        for _ in range(self.args.num_steps):
            action = self.q_network.act(self.obs)
            if np.random.random() < self.epsilon:
                action[0] = np.random.randint(self.num_actions)
            self.obs, reward, terminated, truncated, infos = self.envs.step(action)
            over = bool(terminated[0] | truncated[0])
            # done at a lost life, though the game continues; not done at a time limit, though it is over
            done, now.lives = bool(terminated[0] | (infos["next_lives"][0] < now.lives)), int(infos["lives"][0])
            before, now.stack = now.stack, [*now.stack[1:], len(now.images)]
            now.images.append(np.array(infos["next_obs"][0, -1]))
            # where the 8 images are, action, clipped reward, done, end of the return
            now.steps.append(([*before, *now.stack], int(action[0]), float(np.sign(reward[0])), done, done or over))
            now.rewards.append(float(reward[0]))
            if over:  # self.obs is the next game's
                games.append(now.rewards)
                now.rewards, now.stack = [], [len(now.images)] * 4
                now.images.append(np.array(self.obs[0, -1]))
        stacks, action, reward, done, end = map(np.array, zip(*now.steps, strict=True))
        reward, discount, last = n_step_returns(reward, done, end, self.args.n_step, self.args.gamma)
        count, images = len(last), np.array(now.images)
        first, where = stacks[:count, 3], np.hstack([stacks[:count, :4], stacks[last, 4:]])  # images of each transition
        columns = (images[where[:, :4]], action[:count], reward, discount, images[where[:, 4:]])
        with torch.no_grad():  # an actor has no target network
            error, _ = td_errors(self.q_network, self.q_network, Batch(*map(torch.from_numpy, columns)))
        priority = priorities(error, self.args.prioritized_replay_alpha)
        rows = (first, priority, where - first[:, None], action[:count], reward, discount)
        added = self.shards[shard].add(images, *rows)
        oldest = min([*now.stack, *(i for numbers, *_ in now.steps[count:] for i in numbers)])  # still needed
        now.images, now.stack = now.images[oldest:], [i - oldest for i in now.stack]
        now.steps = [([i - oldest for i in numbers], *rest) for numbers, *rest in now.steps[count:]]
        return games, added


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
    run.require_spaces(envs, obs="image", action="discrete")
    num_actors = 1 if args.synchronous else args.num_actors
    capacity = args.buffer_size // args.num_replay_shards
    num_iterations = run.iterations(args.num_steps)  # a rollout of one actor each
    target = args.target_network_frequency
    run.require(target >= args.num_steps, f"--target-network-frequency must be at least {args.num_steps}, one rollout")
    # the images of a rollout in each shard
    least = (2 * args.num_steps + args.n_step + 10) * args.num_replay_shards
    run.require(args.buffer_size >= least, f"--buffer-size must be at least {least}, a rollout in each shard")

    q_network = QNetwork(int(envs.single_action_space.n)).to(run.device)
    target_network, actor_network = copy.deepcopy(q_network), copy.deepcopy(q_network).cpu()  # the actors' copy
    optimizer = torch.optim.RMSprop(q_network.parameters(), args.learning_rate, 0.95, 1.5e-7, centered=True)
    # gradient_step(*inputs): an optimiser step on apex_loss(q_network, *inputs); returns its metrics and extra values
    gradient_step = run.gradient_step(apex_loss, q_network, optimizer, args.max_grad_norm)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(q_network=q_network, target_network=target_network, actor_network=actor_network, optimizer=optimizer)
    # shards and actors live in processes of Ray: their methods return futures, for which run.first and run.answers
    # wait. With --synchronous they are plain objects, and methods return the results
    shards = run.place(FrameShard, [(capacity,)] * args.num_replay_shards, here=args.synchronous)
    # what is sent to another process is a copy there; of envs, environments of its own
    inputs = [(args, i / max(1, num_actors - 1), shards, envs) for i in range(num_actors)]
    actors = run.place(Actor, inputs, here=args.synchronous)
    if args.synchronous:
        parts |= dict(envs=envs, now=actors[0].now) | {f"replay_{i}": shard for i, shard in enumerate(shards)}
    start = run.resume(**parts)
    if args.synchronous:
        actors[0].obs = run.reset(envs)
        if run.restarted:  # the game is gone, and with it the steps whose returns were not complete
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
