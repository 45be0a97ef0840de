# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""AlphaZero: a network that plays board games against itself and learns from its own tree search.

Paper     Silver et al. 2018, https://arxiv.org/abs/1712.01815 (AlphaZero, "Eq. 1" below); search: Schrittwieser et al.
          2020, https://arxiv.org/abs/1911.08265 (MuZero, "Eq. n" of its Appendix B below)
Run       solo train alphazero --env-id games/TicTacToe-v0 --total-timesteps 100k --opponents perfect,one-ply
Spaces    vector -> discrete, with info["action_mask"]
Differs   root of its family. Not as in the paper: dense layers, Adam, positions mirrored, openings at random
Not for   one agent: ppo_masked.py; several agents: ippo.py; images: ppo_image.py
Details   docs/algorithms/alphazero.md
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn

from solorl import Run, RunArgs, parse


@dataclass
class Args(RunArgs):
    env_kind = "board"
    env_id: str = "games/ConnectFour-v0"  # a game on a board
    total_timesteps: int = 10_000_000  # moves, summed over games
    num_envs: int = 256  # games of self-play side by side
    num_steps: int = 4  # moves of each game per iteration
    opponents: str = "minimax-4,one-ply,random"  # of evaluations, separated by commas; the first one gives the score
    buffer_size: int = 500_000  # positions in the replay buffer
    batch_size: int = 256  # positions per gradient step
    replay_ratio: float = 4.0  # positions that are learned from per move of self-play
    learning_rate: float = 1e-3  # learning rate of Adam
    weight_decay: float = 1e-4  # 2c of Eq. 1
    hidden_dim: int = 256  # units of each layer
    num_simulations: int = 32  # of the search before each move of self-play
    eval_simulations: int = 64  # of the search before each move in evaluations
    pb_c_init: float = 1.25  # c1 of Eq. 2: how much the search follows the prior
    pb_c_base: float = 19_652.0  # c2 of Eq. 2
    dirichlet_alpha: float = 1.0  # concentration of the noise at the root
    exploration_fraction: float = 0.25  # weight of the noise at the root, from 0 to 1
    opening_moves: int = 4  # most moves at random with which a game of self-play begins; 0: none
    temperature_moves: int = 8  # moves of a game that are drawn by their visits, before the most visited count; 0: none
    mirror: bool = True  # learn from half of the positions mirrored


class Batch(NamedTuple):
    """Positions of finished games."""

    obs: torch.Tensor  # (batch_size, obs_dim)
    mask: torch.Tensor  # (batch_size, num_actions): whether a move is allowed
    policy: torch.Tensor  # (batch_size, num_actions), pi: fraction of the visits of each move
    result: torch.Tensor  # (batch_size,), z: 1, 0 or -1 for the player to move


def make_envs(env_id, num_envs=1, opponent="one-ply", **kwargs):
    """Games against a named opponent side by side, for evaluation."""
    return gym.make_vec(env_id, num_envs, "vector_entry_point", opponent=opponent, **kwargs)


class Residual(nn.Module):
    """Two linear layers that are added to their input."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        return torch.relu(x + self.net(x))


class Agent(nn.Module):
    """The network f(s) = (p, v), and the player that searches with it."""

    def __init__(self, game, args):
        super().__init__()
        self.game, self.args = game, args
        width = args.hidden_dim
        obs_dim = 2 * game.max_moves  # the stones of both players: a game has as many moves as cells
        self.body = nn.Sequential(nn.Linear(obs_dim, width), nn.ReLU(), Residual(width))
        self.policy = nn.Linear(width, game.num_actions)
        self.value = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1), nn.Tanh())

    def forward(self, obs):  # (batch, obs_dim) -> logits (batch, num_actions), values (batch,)
        x = self.body(obs)
        return self.policy(x), self.value(x).squeeze(-1)

    @torch.no_grad()
    def predict(self, obs):  # NumPy (batch, obs_dim) -> NumPy logits (batch, num_actions), values (batch,)
        outputs = self(torch.as_tensor(obs, device=self.policy.weight.device))
        return tuple(x.cpu().numpy() for x in outputs)

    def search(self, obs):  # NumPy (batch, *obs_shape) -> a Tree
        position = self.game.position(obs)
        return search(self.game, self.predict, position, self.args.eval_simulations, self.args)

    # NumPy (batch, *obs_shape), (batch, num_actions) -> the most visited moves; game.mask is the mask
    def act(self, obs, action_mask):
        return self.search(obs).root_visits().argmax(1)

    def tell(self, obs, action_mask):  # values (batch,) and visits (batch, num_actions), for a human opponent
        tree = self.search(obs)
        return tree.value[tree.root], tree.root_visits()


class Tree:
    """A search tree for each of n positions. All nodes are in the same arrays: nodes 0 to n - 1 are the roots, and an
    edge to node 0 is one that has not been taken. Values are those of who is to move at the node."""

    def __init__(self, game, num_trees, num_simulations):
        size, self.game, self.root = num_trees * (1 + num_simulations), game, np.arange(num_trees)
        self.position = game.start(size)
        self.over = np.zeros(size, bool)
        self.prior = np.zeros((size, game.num_actions))  # P(s, a); 0: not allowed
        self.child = np.zeros((size, game.num_actions), int)
        self.parent = np.full(size, -1)
        self.visits = np.zeros(size, int)  # N(s)
        self.value = np.zeros(size)  # mean of what was found below a node, Q of the edge to it with the other sign

    def expand(self, node, position, predict):
        """Fill in new nodes with these positions, the prior and the value of the network; returns the values."""
        self.position[node], self.over[node] = position, self.game.over(position)
        obs, mask = self.game.observation(position), self.game.mask(position)
        logits, value = predict(obs.reshape(len(node), -1))
        prior = np.exp(logits - logits.max(1, keepdims=True)) * mask
        self.prior[node] = prior / np.maximum(prior.sum(1, keepdims=True), 1e-30)  # no move where the board is full
        # the rules know better than the network: -1 for who is to move and has lost, 0 for a draw
        return np.where(self.game.lost(position), -1.0, np.where(self.over[node], 0.0, value))

    def select_action(self, node, pb_c_init, pb_c_base):
        """Eq. 2, with Q scaled by the lowest and the highest value at the node, as mctx does, not by those of the tree
        (Eq. 5): (k,) -> (k,). The visits of a node count its own evaluation, too; moves that were not visited have the
        lowest value there, scaled 0."""
        child, parent_visits = self.child[node], self.visits[node][:, None]
        known, value = child > 0, self.value[node][:, None]
        visits = np.where(known, self.visits[child], 0)
        q = np.where(known, -self.value[child], value)
        low, high = np.minimum(q.min(1, keepdims=True), value), np.maximum(q.max(1, keepdims=True), value)
        q = (np.where(known, q, low) - low) / np.maximum(high - low, 1e-8)
        explore = pb_c_init + np.log((parent_visits + pb_c_base + 1) / pb_c_base)
        score = q + self.prior[node] * np.sqrt(parent_visits) / (1 + visits) * explore
        return np.where(self.prior[node] > 0, score, -np.inf).argmax(1)

    def select(self, pb_c_init, pb_c_base):
        """Walk down from all roots: the last nodes (n,), and the moves (n,) that leave them to new ones; -1 where the
        game is over."""
        node, action = self.root.copy(), np.full(len(self.root), -1)
        walking = np.flatnonzero(~self.over[node])  # the trees in which the walk continues
        while walking.size:
            chosen = self.select_action(node[walking], pb_c_init, pb_c_base)
            child = self.child[node[walking], chosen]
            new, over = child == 0, self.over[child]
            action[walking] = np.where(new, chosen, -1)
            node[walking[~new]] = child[~new]
            walking = walking[~new & ~over]
        return node, action

    def backup(self, node, value):
        """Count a visit of these nodes and of all above them; at each step up the other player is to move."""
        while node.size:
            self.visits[node] += 1
            self.value[node] += (value - self.value[node]) / self.visits[node]
            node, value = self.parent[node], -value
            node, value = node[node >= 0], value[node >= 0]

    def root_visits(self):
        """Visit counts of all moves from the roots, (n, num_actions)."""
        child = self.child[self.root]
        return np.where(child > 0, self.visits[child], 0)


def search(game, predict, position, num_simulations, args, noise=None):
    """A Tree of `num_simulations` from each of these positions (n, 2). `predict` gives logits and values of
    observations; `noise` (n, num_actions) is mixed into the prior of the roots. A position is two integers, the stones
    of who is to move and of the other player, a bit for each cell."""
    tree = Tree(game, len(position), num_simulations)
    tree.backup(tree.root, tree.expand(tree.root, position, predict))
    if noise is not None:
        prior = tree.prior[tree.root]
        tree.prior[tree.root] = (1 - args.exploration_fraction) * prior + args.exploration_fraction * noise
    for simulation in range(1, num_simulations + 1):
        node, action = tree.select(args.pb_c_init, args.pb_c_base)
        grows = np.flatnonzero(action >= 0)
        parent, action, new = node[grows], action[grows], tree.root[grows] + simulation * len(position)
        node[grows], tree.child[parent, action], tree.parent[new] = new, new, parent
        value = tree.value[node]  # of a node where the game is over, which has been there before
        if grows.size:
            value[grows] = tree.expand(new, game.play(tree.position[parent], action), predict)
        tree.backup(node, value)
    return tree


def dirichlet(alpha, mask):
    """Dirichlet noise over the moves that are allowed. NumPy, (n, num_actions) -> (n, num_actions)."""
    noise = np.random.gamma(alpha, size=mask.shape) * mask
    return noise / np.maximum(noise.sum(1, keepdims=True), 1e-30)


def results(lost, length, max_moves):
    """z of every move of games that are over: (n,), (n,) -> (max_moves, n). Who is to move at the end has lost, where
    `lost`; one move before it the other player was to move, who has won."""
    before_end = length - np.arange(max_moves)[:, None]
    return np.where(lost, np.where(before_end % 2 == 1, 1.0, -1.0), 0.0)


class SelfPlayReplay:
    """The last `capacity` positions of finished games, in host memory."""

    def __init__(self, game, capacity):
        self.arrays = {
            "position": np.zeros((capacity, 2), np.int64),
            "policy": np.zeros((capacity, game.num_actions), np.float32),
            "result": np.zeros(capacity, np.float32),
        }
        self.game, self.capacity, self.inserted = game, capacity, 0  # `inserted`: positions ever inserted

    def add(self, *rows):
        """Write over the oldest positions: an array for each of `arrays`."""
        index = (self.inserted + np.arange(len(rows[0]))) % self.capacity
        for array, x in zip(self.arrays.values(), rows, strict=True):
            array[index] = x
        self.inserted += len(index)

    def sample(self, batch_size, mirror, device):
        """A Batch of positions drawn uniformly with replacement, half of them mirrored if `mirror`."""
        index = np.random.randint(min(self.inserted, self.capacity), size=batch_size)
        position, policy, result = (array[index] for array in self.arrays.values())
        obs, mask = self.game.observation(position), self.game.mask(position)
        mask, policy = (x.reshape(-1, *self.game.action_shape) for x in (mask, policy))
        if mirror:
            half = slice(batch_size // 2)
            obs[half], mask[half], policy[half] = obs[half, :, ::-1], mask[half, ..., ::-1], policy[half, ..., ::-1]
        arrays = obs.reshape(batch_size, -1), mask.reshape(batch_size, -1), policy.reshape(batch_size, -1), result
        return Batch(*(torch.from_numpy(x).to(device) for x in arrays))


def alphazero_loss(agent, batch):
    """Eq. 1, whose last term is the weight decay of the optimizer, and the metrics."""
    logits, value = agent(batch.obs)
    logits = logits.masked_fill(~batch.mask, torch.finfo(logits.dtype).min)  # probability 0, and finite
    policy_loss = -(batch.policy * logits.log_softmax(-1)).sum(-1).mean()
    assert value.shape == batch.result.shape
    value_loss = (batch.result - value).square().mean()
    metrics = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss}
    return value_loss + policy_loss, metrics


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    names = args.opponents.split(",")
    matches = [gym.make(args.env_id, opponent=name).unwrapped for name in names]  # refuses unknown opponents
    game = matches[0].game  # the rules, for many games at once
    run.require(args.dirichlet_alpha > 0, f"--dirichlet-alpha {args.dirichlet_alpha} must be above 0")
    run.require(args.pb_c_base > 0, f"--pb-c-base {args.pb_c_base} must be above 0")
    batch_steps = args.num_envs * args.num_steps
    num_iterations = run.iterations(batch_steps)
    updates = args.replay_ratio * batch_steps / args.batch_size  # gradient steps per iteration, may be a fraction
    make_env = partial(make_envs, opponent=names[0])  # the agent begins every second game; side 0: all, side 1: none
    also = {
        f"vs_{name.replace('-', '_')}_{word}": partial(make_envs, opponent=name, side=side)
        for name in names
        for side, word in enumerate(("first", "second"))
    }

    agent = Agent(game, args).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    gradient_step = run.gradient_step(alphazero_loss, agent, optimizer)
    replay = SelfPlayReplay(game, args.buffer_size)
    envs = np.arange(args.num_envs)
    now = SimpleNamespace(
        move=np.zeros(args.num_envs, int),  # how many moves each game has had
        opening=np.random.randint(args.opening_moves + 1, size=args.num_envs),  # how many of them are random
        position=np.zeros((game.max_moves + 1, args.num_envs, 2), np.int64),  # of the games that are played
        policy=np.zeros((game.max_moves, args.num_envs, game.num_actions), np.float32),  # pi at each of them
        updates_due=0.0,
    )
    parts = dict(agent=agent, optimizer=optimizer, replay=replay, now=now)  # what a checkpoint holds
    start = run.resume(**parts)
    now.position[0] = game.start(args.num_envs)  # of every game

    reward, done = np.zeros((args.num_steps, args.num_envs)), np.zeros((args.num_steps, args.num_envs), bool)
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_steps  # at the end of this iteration

        for step in range(args.num_steps):
            # ---- 1. act: a search from the position of every game, then a move by its visit counts
            position = now.position[now.move, envs]
            noise = dirichlet(args.dirichlet_alpha, game.mask(position))
            visits = search(game, agent.predict, position, args.num_simulations, args, noise).root_visits()
            policy = visits / args.num_simulations
            drawn = (np.log(np.maximum(policy, 1e-30)) + np.random.gumbel(size=policy.shape)).argmax(1)
            action = np.where(now.move < args.temperature_moves, drawn, visits.argmax(1))
            # random openings, so that the network also knows positions that good players do not come to
            random = (np.random.random(visits.shape) * game.mask(position)).argmax(1)
            action = np.where(now.move < now.opening, random, action)
            now.policy[now.move, envs] = policy
            now.move += 1
            now.position[now.move, envs] = game.play(position, action)

            # ---- 2. store: games that are over, with z for every move after the opening; there new ones begin
            position = now.position[now.move, envs]
            lost, done[step] = game.lost(position), game.over(position)
            # the points of who began: after an odd number of moves the other player is to move
            reward[step] = done[step] * np.where(lost, now.move % 2, 0.5)
            number, z = np.arange(game.max_moves)[:, None], results(lost, now.move, game.max_moves)
            found = (number >= now.opening) & (number < now.move) & done[step]
            replay.add(now.position[:-1][found], now.policy[found], z[found])
            now.opening = np.where(done[step], np.random.randint(args.opening_moves + 1, size=lost.size), now.opening)
            now.move[done[step]] = 0
        run.episodes(global_step, reward, done)

        # ---- 3. learn: as many gradient steps as the replay ratio asks for, once a batch is there
        now.updates_due += updates if replay.inserted >= args.batch_size else 0.0
        while now.updates_due >= 1.0:
            metrics = gradient_step(replay.sample(args.batch_size, args.mirror, run.device))
            run.learned(metrics)
            now.updates_due -= 1.0

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/learning_rate": args.learning_rate})
        run.evaluate(global_step, agent.act, make_env, also=also)
        run.save(global_step)

    # a last evaluation; `solo play` takes this policy, and shows what it tells to a human opponent
    run.close(agent.act, make_env, tell=agent.tell)
