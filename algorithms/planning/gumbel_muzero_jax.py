# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "solorl[planning]>=0.1", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "jax>=0.4.34", "optax>=0.2.3", "mctx>=0.0.71",
# ]
# ///
"""Gumbel MuZero: a tree search in a learned model of the environment, for one agent or a board; in JAX, with mctx.

Paper     Schrittwieser et al. 2020, https://arxiv.org/abs/1911.08265 (MuZero; "App. G" below is its training); search:
          Danihelka et al. 2022, https://openreview.net/forum?id=bERaNdoegnO (Gumbel MuZero)
Run       solo train gumbel_muzero_jax --env-id CartPole-v1
Spaces    vector -> discrete
Differs   from alphazero_jax.py: the search is in a learned model, the environment takes only the real steps; one agent,
          too; a replay buffer of sequences, n-step targets. Not as in the paper: plain squared errors, uniform
          replay, no Reanalyse, no weight decay, a learning rate that decays to 0
Not for   several agents: mappo_jax.py; Atari games: dqn_atari_jax.py; continuous actions: sac_continuous_action_jax.py
Details   docs/algorithms/gumbel_muzero_jax.md
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import mctx
import numpy as np
import optax

from solorl import RunArgs, Runs, parse


@dataclass
class Args(RunArgs):
    env_kind = "jax"  # ids of environments written in JAX, or known to both EnvPool and Gymnasium; and boards
    env_id: str = "CartPole-v1"  # as in dqn_jax.py, or a game on a board, such as games/TicTacToe-v0
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 150_000  # environment steps, summed over environments; on a board moves
    num_envs: int = 32  # environments stepped in parallel; on a board games of self-play
    num_steps: int = 32  # steps in each environment per iteration
    opponents: str = "one-ply,random"  # on a board: of evaluations, separated by commas; the first one gives the score
    buffer_size: int = 20_000  # steps in the replay buffer
    batch_size: int = 128  # sequences per gradient step
    num_updates: int = 64  # gradient steps per iteration
    learning_rate: float = 1e-3  # learning rate of Adam at the start, it decays linearly
    vf_coef: float = 400.0  # weight of the value loss, large, since values are returns times 1 - gamma; boards: 10
    hidden_dim: int = 128  # units of each layer, and of a latent state
    gamma: float = 0.99  # discount factor, from 0 to 1
    td_steps: int = 25  # n: rewards before the bootstrap; on a board all to the end of the game
    unroll_steps: int = 5  # K: steps of the model that are learned from each sequence
    num_simulations: int = 16  # of the search before each step
    eval_simulations: int = 16  # of the search before each step in evaluations
    max_considered: int = 16  # most actions among which the search looks for the best one
    value_scale: float = 0.2  # c_scale of the search: how much its policy follows values
    opening_moves: int = 4  # on a board: most moves at random with which a game of self-play begins; 0: none


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
    envs: Any
    game: Game | None  # the rules of a board; None: one agent
    optimizer: optax.GradientTransformation
    discount: float  # of the next state's value; -1 on a board: what is good for the next player is bad for this one
    reward_scale: float  # 1 - gamma, so that returns are as large as rewards; 1 on a board
    td_steps: int  # n


class Step(NamedTuple):
    """What a move in every game brought; all (num_envs, ...)."""

    obs: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: jax.Array


class Batch(NamedTuple):
    """Steps, (rows, num_envs, ...) in the replay buffer, (window, batch_size, ...) where sequences are drawn."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    done: jax.Array  # terminated or truncated
    policy: jax.Array  # pi: what the search says of each action
    value: jax.Array  # nu: what it says of the state
    end_value: jax.Array  # where done: the value of the final observation, 0 if terminated


class Targets(NamedTuple):
    """What the model has to predict, from one observation each; k = 0 is the state that was seen."""

    obs: jax.Array  # (batch_size, *obs_shape)
    action: jax.Array  # (K, batch_size): those taken, by chance after an end
    reward: jax.Array  # (K, batch_size)
    value: jax.Array  # (K + 1, batch_size)
    policy: jax.Array  # (K + 1, batch_size, num_actions)
    running: jax.Array  # (K + 1, batch_size): whether the episode has not ended before
    known: jax.Array  # (K + 1, batch_size): the same, or it has terminated: then all that follows is 0


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    params: dict  # of the model
    optimizer_state: Any
    replay: Batch  # the last steps
    env_state: Any
    obs: jax.Array  # (num_envs, *obs_shape), the current observations
    restarted: jax.Array  # bool, (): the current episodes have just begun, also where a resume could not continue them
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


def make_env(env_id, **kwargs):
    """One environment, for evaluation."""
    return gym.make(env_id, **kwargs)


def make_envs(env_id, num_envs=1, opponent="one-ply", **kwargs):
    """Games against a named opponent side by side, for evaluation."""
    return gym.make_vec(env_id, num_envs, "vector_entry_point", opponent=opponent, **kwargs)


# ---- boards: self-play as an environment
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
        lowest = jnp.take_along_axis(empty.sum(1), action[:, None], 1).astype(int) - 1
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


class Boards:
    """`num_envs` games side by side, stepped as other environments are: obs is what the player to move sees, and the
    reward belongs to who moves: 1 for a win. New games begin with random moves."""

    def __init__(self, game, num_envs, opening_moves):
        self.game, self.num_envs, self.opening_moves = game, num_envs, opening_moves
        self.single_observation_space = gym.spaces.Box(0.0, 1.0, (game.height, game.width, 2))
        self.single_action_space = gym.spaces.Discrete(game.width if game.stones_fall else game.height * game.width)

    def reset(self, key):
        """New games everywhere: state, obs, which are the same."""
        obs = openings(key, self.game, self.num_envs, self.opening_moves)
        return obs, obs

    def step(self, key, state, action):
        """A move everywhere: state, Step; a new game where one has ended."""
        after = after_move(self.game, state, action)
        won = lost(self.game, after)  # who has moved, because the next player has lost
        over = won | ~allowed(self.game, after).any(-1)
        obs = jnp.where(over[:, None, None, None], self.reset(key)[1], after)
        return obs, Step(obs, won * 1.0, over, jnp.zeros_like(over), after)


def action_mask(game, envs, obs):  # (num_envs, num_actions): of one agent all actions are allowed
    return jnp.ones((len(obs), envs.single_action_space.n), bool) if game is None else allowed(game, obs)


def points_or_rewards(game, obs, step):
    """What is reported: rewards; on a board the points of who began a game, 1, 0.5 or 0, at its end."""
    if game is None:
        return step.reward
    first = obs.sum((1, 2, 3)) % 2 == 0  # whether who began has moved
    return step.terminated * jnp.where(step.reward == 1, first, 0.5)


# ---- the model: representation h, dynamics g, prediction f
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
    keys = jax.random.split(key, 5)
    return {
        "representation": init_mlp(keys[0], obs_dim, width, width),
        "action": jax.random.normal(keys[1], (num_actions, width)),  # a vector for each
        "dynamics": init_mlp(keys[2], width, width, width),
        "reward": init_mlp(keys[3], width, width, 1),
        "prediction": init_mlp(keys[4], width, width, num_actions + 1),
    }


def scaled(latent):
    """Each latent state to the interval from 0 to 1 (App. G): (batch, width) -> (batch, width)."""
    low, high = latent.min(-1, keepdims=True), latent.max(-1, keepdims=True)
    return (latent - low) / (high - low + 1e-5)


def represent(params, obs):  # s = h(o): (batch, *obs_shape) -> (batch, width)
    return scaled(mlp(params["representation"], obs.reshape(len(obs), -1)))


def imagine(params, latent, action):
    """s', r = g(s, a): the next latent states (batch, width) and rewards (batch,)."""
    change = mlp(params["dynamics"], 2 * latent - 1 + params["action"][action])  # centred inputs are learned faster
    latent = scaled(latent + change)
    return latent, mlp(params["reward"], 2 * latent - 1).squeeze(-1)


def policy_and_value(params, latent):
    """p, v = f(s): logits (batch, num_actions) and values (batch,)."""
    out = mlp(params["prediction"], 2 * latent - 1)
    return out[:, :-1], out[:, -1]


# ---- the search
def plan(params, key, obs, mask, num_simulations, setup, noise):
    """What mctx's Gumbel search finds from these observations: its policy `action_weights`, softmax(logits +
    sigma(completed Q)), an `action`, and its tree. The environment is not asked: all that follows is imagined."""

    def simulate(params, key, action, latent):
        latent, reward = imagine(params, latent, action)
        logits, value = policy_and_value(params, latent)
        reward, discount = setup.reward_scale * reward, jnp.full_like(value, setup.discount)  # after an end, too
        return mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value), latent

    latent = represent(params, obs)
    logits, value = policy_and_value(params, latent)
    root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=latent)
    # no scaling to 0 and 1 in each state: where all values are nearly equal it would magnify noise
    sigma = partial(mctx.qtransform_completed_by_mix_value, value_scale=setup.args.value_scale, rescale_values=False)
    given = (params, key, root, simulate, num_simulations, ~mask)
    most, scale = setup.args.max_considered, float(noise)
    return mctx.gumbel_muzero_policy(*given, qtransform=sigma, max_num_considered_actions=most, gumbel_scale=scale)


# (batch, *obs_shape), (batch, num_actions) or None -> (batch,): the best actions by a search without noise
# action_mask: of a board; None for one agent: all actions are allowed
def act(params, obs, action_mask, setup):
    mask = jnp.ones((len(obs), setup.envs.single_action_space.n), bool) if action_mask is None else action_mask
    return plan(params, jax.random.PRNGKey(0), obs, mask, setup.args.eval_simulations, setup, noise=False).action


# ---- replay
def store(replay, steps, stored):
    """Write rows of steps, (num_steps, num_envs, ...), over the oldest ones. `stored`: rows ever written before."""
    index = (stored + jnp.arange(len(steps.reward))) % len(replay.reward)
    return jax.tree.map(lambda x, new: x.at[index].set(new.astype(x.dtype)), replay, steps)


def sample_windows(replay, key, stored, window, batch_size):
    """A Batch of `window` steps in a row, (window, batch_size, ...), drawn uniformly. `stored`: rows ever written."""
    rows, num_envs = replay.reward.shape
    size = jnp.minimum(stored, rows)
    row_key, env_key = jax.random.split(key)
    first = stored - size + jax.random.randint(row_key, (batch_size,), 0, size - window + 1)
    index = (first + jnp.arange(window)[:, None]) % rows
    env = jax.random.randint(env_key, (batch_size,), 0, num_envs)
    return jax.tree.map(lambda x: x[index, env], replay)


def n_step_targets(batch, n, setup):
    """z_t = r_t + d r_{t+1} + ... + d^n nu_{t+n} for all t that have n steps after them: (window - n, batch_size). An
    end cuts the sum off: nothing follows a termination, and a time limit bootstraps from the final observation."""
    count = len(batch.reward) - n
    z = batch.value[n:]
    for i in reversed(range(n)):
        reward, done, end_value = (x[i : i + count] for x in (batch.reward, batch.done, batch.end_value))
        z = setup.reward_scale * reward + setup.discount * jnp.where(done, end_value, z)
    return z


def targets_of(batch, key, setup):
    """Targets of sequences. After a termination the state is absorbing: rewards and values are 0 whatever is done, and
    there is no policy to learn; after a time limit nothing is known."""
    k = setup.args.unroll_steps
    running = jnp.cumprod(1 - batch.done[:k], 0) == 1  # after each step
    # whether the episode of the first observation has terminated by this step; later episodes do not count
    over = jnp.cumsum(batch.terminated[:k] & jnp.roll(running, 1, 0).at[0].set(True), 0) > 0
    start = jnp.ones((1, batch.done.shape[1]), bool)
    running, known = jnp.concatenate([start, running]), jnp.concatenate([start, running | over])
    policy = batch.policy[: k + 1]
    by_chance = jax.random.randint(key, batch.action[:k].shape, 0, policy.shape[-1])
    action = jnp.where(running[:-1], batch.action[:k], by_chance)
    reward = jnp.where(running[:-1], batch.reward[:k], 0)
    value = jnp.where(running, n_step_targets(batch, setup.td_steps, setup), 0)
    return Targets(batch.obs[0], action, reward, value, policy, running, known)


# ---- learning
def muzero_loss(params, targets, setup):
    """The sum over the first state and K unrolled steps of the cross entropy of the policy, the squared error of the
    reward, and vf_coef times that of the value; unrolled steps count 1/K each, and the gradient is halved at each
    entrance to the dynamics (App. G). And the metrics."""
    unroll_steps, latent, losses = len(targets.action), represent(params, targets.obs), []
    for k in range(unroll_steps + 1):
        reward_loss, weight = jnp.zeros(()), 1.0 if k == 0 else 1 / unroll_steps
        if k > 0:
            latent, reward = imagine(params, (latent + jax.lax.stop_gradient(latent)) / 2, targets.action[k - 1])
            reward_loss = (jnp.square(reward - targets.reward[k - 1]) * targets.known[k - 1]).mean()
        logits, value = policy_and_value(params, latent)
        assert value.shape == targets.value[k].shape
        value_loss = (jnp.square(value - targets.value[k]) * targets.known[k]).mean()
        policy_loss = -((targets.policy[k] * jax.nn.log_softmax(logits)).sum(-1) * targets.running[k]).mean()
        losses.append(weight * jnp.stack([policy_loss, value_loss, reward_loss]))
    policy_loss, value_loss, reward_loss = sum(losses)
    metrics = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss, "losses/reward_loss": reward_loss}
    return policy_loss + setup.args.vf_coef * value_loss + reward_loss, metrics


def begin(key, setup):
    """The initial training state of one seed."""
    args, envs, _, optimizer, *_ = setup
    params_key, envs_key, key = jax.random.split(key, 3)
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)
    params = init_params(params_key, int(np.prod(obs_shape)), num_actions, args.hidden_dim)
    env_state, obs = envs.reset(envs_key)
    number, flag, rows = jnp.float32(0), jnp.bool_(False), args.buffer_size // args.num_envs
    step = Batch(jnp.zeros(obs_shape), jnp.int32(0), number, flag, flag, jnp.zeros(num_actions), number, number)
    replay = jax.tree.map(lambda x: jnp.zeros((rows, args.num_envs, *x.shape), x.dtype), step)
    return Training(params, optimizer.init(params), replay, env_state, obs, jnp.bool_(True), key, jnp.int32(0))


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs, game, optimizer, *_ = setup
    steps_key, learn_key, key = jax.random.split(training.key, 3)

    # ---- 1. act: a search in the model from each state, then one real step
    def env_step(carry, key):
        env_state, obs = carry
        search_key, step_key = jax.random.split(key)
        mask = action_mask(game, envs, obs)
        found = plan(training.params, search_key, obs, mask, args.num_simulations, setup, noise=True)
        env_state, step = envs.step(step_key, env_state, found.action)
        done = step.terminated | step.truncated
        # a time limit is not the end of the task: the return continues with the value of the final observation
        _, final_value = policy_and_value(training.params, represent(training.params, step.final_obs))
        end_value = jnp.where(step.terminated, 0, final_value)
        policy, value = found.action_weights, found.search_tree.summary().value
        stored = Batch(obs, found.action, step.reward, step.terminated, done, policy, value, end_value)
        return (env_state, step.obs), (stored, points_or_rewards(game, obs, step))

    keys = jax.random.split(steps_key, args.num_steps)
    (env_state, next_obs), (steps, reward) = jax.lax.scan(env_step, (training.env_state, training.obs), keys)

    # ---- 2. store: steps, of which sequences are drawn later; where episodes have restarted those before are cut off
    rows = training.iteration * args.num_steps  # stored before
    cut = training.replay.done.at[(rows - 1) % len(training.replay.done)].max(training.restarted)
    replay = store(training.replay._replace(done=cut), steps, rows)

    # ---- 3. learn: the model, on sequences of K steps and the n after them
    def gradient_step(learner, key):
        params, optimizer_state = learner
        window_key, action_key = jax.random.split(key)
        window = args.unroll_steps + setup.td_steps + 1
        batch = sample_windows(replay, window_key, rows + args.num_steps, window, args.batch_size)
        targets = targets_of(batch, action_key, setup)
        gradients, metrics = jax.grad(muzero_loss, has_aux=True)(params, targets, setup)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), metrics

    learner = (training.params, training.optimizer_state)
    learner, metrics = jax.lax.scan(gradient_step, learner, jax.random.split(learn_key, args.num_updates))

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    report = (reward, steps.done, jax.tree.map(jnp.sum, metrics), jnp.int32(args.num_updates))
    return Training(*learner, replay, env_state, next_obs, jnp.bool_(False), key, training.iteration + 1), report


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    rules, also = gym.spec(args.env_id.rpartition(":")[2]).kwargs.get("rules"), None
    if rules:  # of a board: height, width, stones of a row, whether stones fall
        names = args.opponents.split(",")
        matches = [gym.make(args.env_id, opponent=name) for name in names]  # refuses unknown opponents
        run.require(isinstance(rules, tuple | list), f"{args.env_id} has rules of its own: use alphazero.py")
        envs = Boards(make_game(*rules), args.num_envs, args.opening_moves)
        make_env = partial(make_envs, opponent=names[0])  # the agent begins every second game; side 0: all, 1: none
        also = {
            f"vs_{name.replace('-', '_')}_{word}": partial(make_envs, opponent=name, side=side)
            for name in names
            for side, word in enumerate(("first", "second"))
        }
        game, discount, reward_scale, td_steps = envs.game, -1.0, 1.0, envs.game.height * envs.game.width
    else:
        envs = run.open_envs(args.env_id, args.num_envs)  # written in JAX if we have this id, else EnvPool's
        game, discount, reward_scale, td_steps = None, args.gamma, 1 - args.gamma, args.td_steps
    run.require_spaces(envs, obs="vector", action="discrete")
    batch_steps = args.num_envs * args.num_steps
    num_iterations = run.iterations(batch_steps)  # whole ones in total_timesteps
    window = args.unroll_steps + td_steps + 1
    run.require(args.gamma < 1, f"--gamma {args.gamma} must be below 1")
    run.require(args.num_steps >= window, f"--num-steps must be at least {window}: a sequence and its value targets")
    run.require(args.buffer_size >= batch_steps, f"--buffer-size must be at least {batch_steps}, one iteration")

    learning_rate = optax.linear_schedule(args.learning_rate, 0, num_iterations * args.num_updates)
    optimizer = optax.flatten(optax.adam(learning_rate))  # the gradients as one vector: fewer, larger operations
    setup = Setup(args, envs, game, optimizer, discount, reward_scale, td_steps)
    act = partial(act, setup=setup)
    fields = () if rules else ("env_state", "obs", "restarted")  # begin again where no checkpoint holds episodes
    training, start = run.resume(lambda key: begin(key, setup), model="params", envs=fields)
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=1)

    for iterations in run.loop(start, num_iterations, batch_steps):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * batch_steps
        training, (reward, done, sums, count) = train(training, iterations)
        run.episodes(global_step, reward, done)
        run.learned(sums, count)
        rate = learning_rate(iterations.stop * args.num_updates)
        run.log(global_step, {"charts/learning_rate": np.full(args.num_seeds, rate)})
        run.evaluate(global_step, act, make_env, also=also)
        run.save(global_step, training)
    run.close(act, make_env)  # a last evaluation; `solo play` takes this policy
