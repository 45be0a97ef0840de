# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "solorl[planning]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3", "mctx>=0.0.71",
# ]
# ///
"""AlphaZero: a network that plays board games against itself and learns from its own tree search; in JAX, with mctx.

Paper     Silver et al. 2018, https://arxiv.org/abs/1712.01815 (AlphaZero, "Eq. 1" below); search: Danihelka et al.
          2022, https://openreview.net/forum?id=bERaNdoegnO (Gumbel AlphaZero), or Schrittwieser et al. 2020,
          https://arxiv.org/abs/1911.08265 (MuZero, "Eq. n" of its Appendix B below)
Run       solo train alphazero_jax --env-id games/TicTacToe-v0 --num-envs 128 --num-steps 16 --num-minibatches 8
          --total-timesteps 100k --opponents perfect,one-ply
Spaces    vector -> discrete, with info["action_mask"]
Differs   root of its family. Not as in the paper: dense layers, Adam, positions mirrored, openings at random, no
          replay buffer: each iteration learns from its own games
Twin      alphazero.py
Not for   one agent: ppo_masked.py; several agents: mappo_jax.py; images: ppo_image.py
Details   docs/algorithms/alphazero_jax.md
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import mctx
import numpy as np
import optax

from solorl import RunArgs, Runs, parse


@dataclass
class Args(RunArgs):
    env_kind = "board"
    env_id: str = "games/ConnectFour-v0"  # a game on a board
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 10_000_000  # moves, summed over games
    num_envs: int = 512  # games of self-play side by side
    num_steps: int = 64  # moves of each game per iteration; of games that are cut only the policy is learned
    opponents: str = "minimax-4,one-ply,random"  # of evaluations, separated by commas; the first one gives the score
    update_epochs: int = 4  # how often a position is learned from
    num_minibatches: int = 64  # gradient steps per epoch
    learning_rate: float = 1e-3  # learning rate of Adam
    weight_decay: float = 1e-4  # 2c of Eq. 1
    hidden_dim: int = 256  # units of each layer
    search: Literal["gumbel", "classic"] = "gumbel"  # by Gumbel noise and sequential halving, or by Eq. 2
    num_simulations: int = 32  # of the search before each move of self-play
    eval_simulations: int = 64  # of the search before each move in evaluations
    max_considered: int = 16  # with Gumbel: most moves among which the search looks for the best one
    pb_c_init: float = 1.25  # classic: c1 of Eq. 2: how much the search follows the prior
    pb_c_base: float = 19_652.0  # classic: c2 of Eq. 2
    dirichlet_alpha: float = 1.0  # classic: concentration of the noise at the root
    exploration_fraction: float = 0.25  # classic: weight of the noise at the root, from 0 to 1
    opening_moves: int = 4  # most moves at random with which a game of self-play begins; 0: none
    temperature_moves: int = 8  # classic: first moves of a game that are drawn by visit counts; 0: none
    mirror: bool = True  # learn from half of the positions mirrored


class Game(NamedTuple):
    """The rules of a board on which a row of stones wins. A position is what the network sees, (height, width, 2): 1
    where the player to move has a stone, and 1 where the other one has."""

    height: int
    width: int
    stones_fall: bool  # to the lowest empty cell of a column; row 0 is the top one
    rows: jax.Array  # (number of rows that win, height * width): 1 where they have a stone
    length: int  # stones of such a row


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    game: Game
    optimizer: optax.GradientTransformation


class Batch(NamedTuple):
    """Positions of self-play."""

    obs: jax.Array  # (batch_size, height, width, 2)
    policy: jax.Array  # (batch_size, num_actions), pi: what the search says of each move
    result: jax.Array  # (batch_size,), z: 1, 0 or -1 for the player to move
    known: jax.Array  # (batch_size,): whether the game has ended in this iteration, so that there is a z


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    params: dict  # of the network
    optimizer_state: Any
    obs: jax.Array  # (num_envs, height, width, 2), the current positions
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


def make_envs(env_id, num_envs=1, opponent="one-ply", **kwargs):
    """Games against a named opponent side by side, for evaluation."""
    return gym.make_vec(env_id, num_envs, "vector_entry_point", opponent=opponent, **kwargs)


# ---- the rules
def make_game(height, width, length, stones_fall):
    """With all rows of `length` cells: to the right, down, and down to both sides."""
    rows = []
    for y, x, (down, right) in product(range(height), range(width), ((0, 1), (1, 0), (1, 1), (1, -1))):
        cells = [(y + i * down, x + i * right) for i in range(length)]
        if all(0 <= a < height and 0 <= b < width for a, b in cells):
            board = np.zeros((height, width), np.float32)
            board[tuple(zip(*cells, strict=True))] = 1
            rows.append(board.ravel())
    return Game(height, width, stones_fall, np.stack(rows), length)


def allowed(game, obs):  # (batch, *obs_shape) -> (batch, num_actions): columns, or cells row by row, that are free
    empty = obs.sum(-1) == 0
    return empty[:, 0] if game.stones_fall else empty.reshape(len(obs), -1)


def after_move(game, obs, action):
    """The positions after these moves, seen by the next player; a move that is not allowed sets no stone."""
    empty = 1 - obs.sum(-1)
    if game.stones_fall:  # the empty cells of a column are above its stones: the lowest is the last of them
        lowest = jnp.take_along_axis(empty.sum(1), action[:, None], 1).astype(int) - 1  # (batch, 1); -1: full, no stone
        stone = jax.nn.one_hot(lowest, game.height, axis=1) * jax.nn.one_hot(action, game.width)[:, None]
    else:
        stone = jax.nn.one_hot(action, game.height * game.width).reshape(empty.shape)
    return jnp.stack([obs[..., 1], obs[..., 0] + stone * empty], -1)


def lost(game, obs):  # (batch, *obs_shape) -> (batch,): whether the other player has a row
    return (obs[..., 1].reshape(len(obs), -1) @ game.rows.T == game.length).any(-1)


def openings(key, game, count, most):
    """Positions (count, *obs_shape) after 0 to `most` random moves, each as often; those that end games are skipped."""
    length_key, moves_key = jax.random.split(key)
    length = jax.random.randint(length_key, (count,), 0, most + 1)

    def move(obs, drawn):
        number, key = drawn
        action = jax.random.categorical(key, jnp.where(allowed(game, obs), 0.0, -jnp.inf))
        after = after_move(game, obs, action)
        goes_on = (number < length) & ~lost(game, after) & allowed(game, after).any(-1)
        return jnp.where(goes_on[:, None, None, None], after, obs), None

    empty = jnp.zeros((count, game.height, game.width, 2))
    return jax.lax.scan(move, empty, (jnp.arange(most), jax.random.split(moves_key, most)))[0]


# ---- the network f(s) = (p, v)
def init_mlp(key, *sizes):
    """Layers with weights and biases uniform within 1 / sqrt(fan_in), as in torch."""
    keys = jax.random.split(key, (len(sizes) - 1, 2))
    return [
        {
            "weight": jax.random.uniform(k[0], (i, o), minval=-(i**-0.5), maxval=i**-0.5),
            "bias": jax.random.uniform(k[1], (o,), minval=-(i**-0.5), maxval=i**-0.5),
        }
        for k, (i, o) in zip(keys, pairwise(sizes), strict=True)
    ]


def mlp(layers, x):
    """The layers with ReLU between them, (batch, fan_in) -> (batch, fan_out)."""
    *hidden, last = layers
    for layer in hidden:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def init_params(key, obs_dim, num_actions, width):
    keys = jax.random.split(key, 4)
    return {
        "first": init_mlp(keys[0], obs_dim, width),
        "residual": init_mlp(keys[1], width, width, width),
        "policy": init_mlp(keys[2], width, num_actions),
        "value": init_mlp(keys[3], width, width, 1),
    }


def predict(params, game, obs):
    """Logits (batch, num_actions), the lowest finite number where a move is not allowed, and values (batch,)."""
    x = jax.nn.relu(mlp(params["first"], obs.reshape(len(obs), -1)))
    x = jax.nn.relu(x + mlp(params["residual"], x))
    logits = jnp.where(allowed(game, obs), mlp(params["policy"], x), jnp.finfo(x.dtype).min)
    return logits, jnp.tanh(mlp(params["value"], x)).squeeze(-1)


# ---- the search
def search(params, key, obs, num_simulations, setup, noise):
    """What mctx's search finds in these positions: its policy `action_weights`, a move `action`, and its tree. With
    noise at the root, for self-play, or without."""
    args, game, _ = setup

    def simulate(params, key, action, obs):
        """One more move in the search: the game itself is the model."""
        obs = after_move(game, obs, action)
        logits, value = predict(params, game, obs)
        won = lost(game, obs)  # who has moved, because the next player has lost
        over = won | ~allowed(game, obs).any(-1)
        # what is good for the next player is bad for who has moved; what the search plays after an end does not count
        discount = jnp.where(over, 0.0, -1.0)
        return mctx.RecurrentFnOutput(reward=won * 1.0, discount=discount, prior_logits=logits, value=value), obs

    logits, value = predict(params, game, obs)
    root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=obs)
    given = (params, key, root, simulate, num_simulations, ~allowed(game, obs))
    if args.search == "gumbel":  # sequential halving; its policy is softmax(logits + sigma(completed Q))
        noise, most = float(noise), args.max_considered
        return mctx.gumbel_muzero_policy(*given, max_num_considered_actions=most, gumbel_scale=noise)
    # Eq. 2, values scaled at each node, not by those of the tree (Eq. 5); its policy are the fractions of the visits
    return mctx.muzero_policy(
        *given,
        dirichlet_fraction=args.exploration_fraction * noise,
        dirichlet_alpha=args.dirichlet_alpha,
        pb_c_init=args.pb_c_init,
        pb_c_base=args.pb_c_base,
    )


# (batch, *obs_shape), (batch, num_actions) -> (batch,): the best moves by a search without noise; the mask is `allowed`
def act(params, obs, action_mask, setup):
    found = search(params, jax.random.PRNGKey(0), obs, setup.args.eval_simulations, setup, noise=False)
    return found.action if setup.args.search == "gumbel" else found.action_weights.argmax(-1)


# the same -> values (batch,) and visits (batch, num_actions) of that search, for a human opponent
def tell(params, obs, action_mask, setup):
    found = search(params, jax.random.PRNGKey(0), obs, setup.args.eval_simulations, setup, noise=False)
    root = found.search_tree.summary()
    return root.value, root.visit_counts


# ---- learning
def results(won, done):
    """z of all moves of a rollout, backwards from the ends of games, and whether there is one: (num_steps, num_envs)
    each. Who makes the last move has won or it is a draw; one move before the other player was to move."""

    def backwards(following, step):
        (z, known), (won, done) = following, step  # z of the move after this one, for the other player
        here = jnp.where(done, won, -z), done | known
        return here, here

    start = jnp.zeros(won.shape[1]), jnp.zeros(won.shape[1], bool)
    return jax.lax.scan(backwards, start, (won * 1.0, done), reverse=True)[1]


def mirrored(game, batch, coin):
    """A Batch whose positions and moves are mirrored left to right where `coin` (batch_size,)."""
    shape = (-1, game.width) if game.stones_fall else (-1, game.height, game.width)
    policy = batch.policy.reshape(shape)[..., ::-1].reshape(batch.policy.shape)
    obs = jnp.where(coin[:, None, None, None], batch.obs[:, :, ::-1], batch.obs)
    return batch._replace(obs=obs, policy=jnp.where(coin[:, None], policy, batch.policy))


def alphazero_loss(params, game, batch):
    """Eq. 1, whose last term is the weight decay of the optimizer, and the metrics."""
    logits, value = predict(params, game, batch.obs)
    policy_loss = -(batch.policy * jax.nn.log_softmax(logits)).sum(-1).mean()
    assert value.shape == batch.result.shape
    value_loss = jnp.square(batch.result - value).sum(where=batch.known) / jnp.maximum(1, batch.known.sum())
    return value_loss + policy_loss, {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss}


def begin(key, setup):
    """The initial training state of one seed."""
    args, game, optimizer = setup
    params_key, games_key, key = jax.random.split(key, 3)
    num_actions = game.width if game.stones_fall else game.height * game.width
    params = init_params(params_key, 2 * game.height * game.width, num_actions, args.hidden_dim)
    obs = openings(games_key, game, args.num_envs, args.opening_moves)
    return Training(params, optimizer.init(params), obs, key, jnp.int32(0))


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, game, optimizer = setup
    steps_key, learn_key, key = jax.random.split(training.key, 3)

    # ---- 1. act: a search from the position of every game, then a move; a new game where one has ended
    def env_step(obs, key):
        search_key, draw_key, opening_key = jax.random.split(key, 3)
        found = search(training.params, search_key, obs, args.num_simulations, setup, noise=True)
        action, moves = found.action, obs.sum((1, 2, 3))
        if args.search == "classic":
            drawn = jax.random.categorical(draw_key, jnp.log(found.action_weights))
            action = jnp.where(moves < args.temperature_moves, drawn, found.action_weights.argmax(-1))
        after = after_move(game, obs, action)
        won = lost(game, after)  # who has moved
        done = won | ~allowed(game, after).any(-1)
        # random openings, so that the network also knows positions that good players do not come to
        opening = openings(opening_key, game, args.num_envs, args.opening_moves)
        next_obs = jnp.where(done[:, None, None, None], opening, after)
        # the points of who began: the players move in turn
        reward = done * jnp.where(won, moves % 2 == 0, 0.5)
        return next_obs, (obs, found.action_weights, reward, won, done)

    next_obs, steps = jax.lax.scan(env_step, training.obs, jax.random.split(steps_key, args.num_steps))
    obs, policy, reward, won, done = steps  # (num_steps, num_envs, ...) each

    # ---- 2. credit: the result of each game that has ended; of the others only the policy is learned
    result, known = results(won, done)
    rollout = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), Batch(obs, policy, result, known))

    # ---- 3. learn: all positions in several epochs, half of them mirrored
    def gradient_step(learner, drawn):
        params, optimizer_state = learner
        index, coin = drawn
        minibatch = mirrored(game, jax.tree.map(lambda x: x[index], rollout), coin)
        gradients, metrics = jax.grad(alphazero_loss, has_aux=True)(params, game, minibatch)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), metrics

    def epoch(learner, key):
        index_key, coin_key = jax.random.split(key)
        index = jax.random.permutation(index_key, len(rollout.obs)).reshape(args.num_minibatches, -1)
        coin = jax.random.bernoulli(coin_key, 0.5 * args.mirror, index.shape)
        return jax.lax.scan(gradient_step, learner, (index, coin))

    learner = (training.params, training.optimizer_state)
    learner, metrics = jax.lax.scan(epoch, learner, jax.random.split(learn_key, args.update_epochs))

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    sums, count = jax.tree.map(jnp.sum, metrics), jnp.int32(args.update_epochs * args.num_minibatches)
    return Training(*learner, next_obs, key, training.iteration + 1), (reward, done, sums, count)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    names = args.opponents.split(",")
    rules, *_ = [gym.make(args.env_id, opponent=name).spec.kwargs["rules"] for name in names]  # refuses unknown ones
    run.require(isinstance(rules, tuple | list), f"{args.env_id} has rules of its own: use alphazero.py")
    run.require(args.dirichlet_alpha > 0, f"--dirichlet-alpha {args.dirichlet_alpha} must be above 0")
    run.require(args.pb_c_base > 0, f"--pb-c-base {args.pb_c_base} must be above 0")
    batch_steps = args.num_envs * args.num_steps
    num_iterations = run.iterations(batch_steps, minibatches=args.num_minibatches)  # rounded down; checks minibatches
    make_env = partial(make_envs, opponent=names[0])  # the agent begins every second game; side 0: all, side 1: none
    also = {
        f"vs_{name.replace('-', '_')}_{word}": partial(make_envs, opponent=name, side=side)
        for name in names
        for side, word in enumerate(("first", "second"))
    }

    # the gradients as one vector: fewer, larger operations
    optimizer = optax.flatten(optax.chain(optax.add_decayed_weights(args.weight_decay), optax.adam(args.learning_rate)))
    setup = Setup(args, make_game(*rules), optimizer)
    act, tell = partial(act, setup=setup), partial(tell, setup=setup)
    training, start = run.resume(lambda key: begin(key, setup), model="params")
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=1)

    for iterations in run.loop(start, num_iterations, batch_steps):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * batch_steps
        training, (reward, done, sums, count) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.learned(sums, count)
        run.log(global_step, {"charts/learning_rate": np.full(args.num_seeds, args.learning_rate)})
        run.evaluate(global_step, act, make_env, also=also)
        run.save(global_step, training)
    # a last evaluation; `solo play` takes this policy, and shows what it tells to a human opponent
    run.close(act, make_env, tell=tell)
