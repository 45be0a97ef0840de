# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari,envpool,jax]>=0.1", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""Categorical DQN (C51) on EnvPool's Atari games: learns the distribution of the return; discrete actions, images; JAX.

Paper     Bellemare, Dabney, Munos 2017, https://arxiv.org/abs/1707.06887 ("Alg. 1", "Eq. 7" of the target); loop:
          Alg. 1 of Mnih et al. 2015, https://www.nature.com/articles/nature14236
          EnvPool: Weng et al. 2022, https://arxiv.org/abs/2206.10558
Run       solo train c51_atari_jax --env-id Pong-v5
Spaces    image -> discrete
Differs   from c51_jax.py, dqn_atari_jax.py: the merge of both, with 51 atoms between -10 and 10 and the settings of C51
          on Atari: learning rate, moves of the target network
Twin      c51_atari.py
Not for   vector observations: c51_jax.py; continuous actions: ddpg_continuous_action_jax.py
Details   docs/algorithms/c51_atari_jax.md
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from solorl import EnvPoolVectorEnv, RunArgs, Runs, conv2d, parse


@dataclass
class Args(RunArgs):
    env_kind = "envpool-atari"  # --env-id is one of EnvPool's Atari games
    env_id: str = "Pong-v5"  # id of the game in EnvPool
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    total_timesteps: int = 10_000_000  # environment steps of 4 frames, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    buffer_size: int = 1_000_000  # images in the replay buffer, of 7 kB each
    batch_size: int = 32  # transitions per gradient step
    learning_starts: int = 80_000  # environment steps before the first gradient step; 0: learn at once
    train_frequency: int = 4  # environment steps per gradient step
    learning_rate: float = 2.5e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 10_000  # environment steps between target network updates
    tau: float = 1.0  # soft-update coefficient of the target network (1: hard copy), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.01  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.1  # fraction of total_timesteps over which epsilon is annealed, from 0 to 1
    n_atoms: int = 51  # number of atoms of the return distribution
    v_min: float = -10.0  # smallest atom; may be negative
    v_max: float = 10.0  # largest atom; may be negative
    eval_episodes: int = 10  # games of one evaluation, on environments and seeds of their own


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    optimizer: optax.GradientTransformation
    num_iterations: int
    atoms: jax.Array  # (n_atoms,)


class Batch(NamedTuple):
    """Transitions."""

    obs: jax.Array  # (batch_size, 4, 84, 84), bytes
    action: jax.Array  # (batch_size,)
    reward: jax.Array  # (batch_size,)
    done: jax.Array  # (batch_size,), 1 where the game is over or a life is lost, 0 at a time limit
    next_obs: jax.Array  # (batch_size, 4, 84, 84), bytes


class FrameReplay(NamedTuple):
    """The last `capacity` images. Each is stored once; stacks are put together when they are sampled.

    A row is what one step led to: the image, and the step's action, reward and done. Rows are numbered from 0 on; the
    row of a number lies at the index number % capacity. With 6 rows, one environment and 9 images inserted so far:

        index  number  image        action  done  back
          0       6    game B, 1st     0      0     0    begins game B: no step led to this image
          1       7    game B, 2nd     3      0     1
          2       8    game B, 3rd     0      0     1    the newest row
          3       3    game A, 4th     2      0     1    the next write, of number 9, goes here
          4       4    game A, 5th     2      0     1
          5       5    game A, 6th     1      1     1    game A ends

    `back` is how many rows before this one the previous image of its game lies, 0 for the first image: more than 1
    where rows of other environments lie between. Row 8 has the images 6, 6, 6, 7, 8: obs is the first four, next_obs
    the last four. Row 5 cannot be sampled: the images with the numbers 1 and 2 are overwritten.
    """

    image: jax.Array  # (capacity, 84, 84), bytes
    action: jax.Array  # (capacity,), like the next three
    reward: jax.Array
    done: jax.Array
    back: jax.Array
    inserted: jax.Array  # the number of the next row, ()

    @classmethod
    def empty(cls, capacity):
        image, (action, back) = jnp.zeros((capacity, 84, 84), jnp.uint8), jnp.zeros((2, capacity), jnp.int32)
        reward, done = jnp.zeros((2, capacity))
        return cls(image, action, reward, done, back, jnp.int32(0))

    def insert(self, new_game, obs_image, image, action, reward, done):
        """Insert what num_steps steps in every environment led to, all (num_steps, num_envs, ...). The first step of a
        game (`new_game`) has two rows, of which the first is the image before it, `obs_image`."""
        capacity = len(self.image)
        exists = jnp.stack([new_game, jnp.ones_like(new_game)], 1)  # (num_steps, 2, num_envs): which rows there are
        number = self.inserted + exists.cumsum().reshape(exists.shape) - 1
        # back to the game's first image, else to the step before: as its last num_envs rows have one of every
        # environment, that is as far as this step has rows
        back = jnp.where(new_game, number[:, 1] - number[:, 0], exists.sum((1, 2))[:, None])
        index = jnp.where(exists, number % capacity, capacity)  # after the end where there is no row
        columns = (obs_image, image), *((jnp.zeros_like(x), x) for x in (action, reward, done, back))
        arrays = [
            array.at[index].set(jnp.stack(column, 1).astype(array.dtype), mode="drop")
            for array, column in zip(self[:-1], columns, strict=True)
        ]
        return FrameReplay(*arrays, number[-1, 1, -1] + 1)

    def history(self, number):
        """For the rows of these numbers (n,): the indices (n, 5) of the row's image and of the 4 before it in its game,
        oldest first, with a game's first image in the place of those before it; and whether (n,) the row can be
        sampled: a step has led to it, and none of the 5 images is overwritten."""
        numbers, capacity = [number], len(self.image)
        for _ in range(4):
            numbers.append(numbers[-1] - self.back[numbers[-1] % capacity])
        whole = (numbers[1] < number) & (numbers[-1] >= jnp.maximum(0, self.inserted - capacity))
        return jnp.stack(numbers[::-1], 1) % capacity, whole

    def sample(self, key, batch_size):
        """A Batch of transitions drawn uniformly with replacement."""
        capacity = len(self.image)
        oldest = jnp.maximum(0, self.inserted - capacity)

        def draw(carry):
            key, number, whole = carry
            key, number_key = jax.random.split(key)
            drawn = jax.random.randint(number_key, (batch_size,), oldest, self.inserted)
            number = jnp.where(whole, number, drawn)
            return key, number, self.history(number)[1]

        none = jnp.zeros(batch_size, jnp.int32), jnp.zeros(batch_size, bool)
        _, number, _ = jax.lax.while_loop(lambda carry: ~carry[2].all(), draw, (key, *none))
        image = self.image[self.history(number)[0]]  # (batch_size, 5, 84, 84)
        columns = (array[number % capacity] for array in (self.action, self.reward, self.done))
        return Batch(image[:, :4], *columns, image[:, 1:])


class Training(NamedTuple):
    """The training state of one seed: all that changes."""

    params: dict  # of the Q-network
    target_params: dict
    optimizer_state: Any
    replay: FrameReplay
    env_state: Any
    obs: jax.Array  # (num_envs, 4, 84, 84) bytes, the current observations
    lives: jax.Array  # (num_envs,), after the last step; 0 before the first, in which no life counts as lost
    new_game: jax.Array  # (num_envs,), where obs is the first of a game
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done, ()


def make_envs(env_id, num_envs, **kwargs):
    """Whole games, for evaluation: observations are the last 4 grey images, (4, 84, 84) bytes."""
    return EnvPoolVectorEnv(env_id, num_envs, **kwargs)


def uniform(key, shape):
    """A layer with weights (..., fan_out) and biases uniform within 1 / sqrt(fan_in), as in torch."""
    keys, bound = jax.random.split(key), prod(shape[:-1]) ** -0.5
    shapes = {"weight": (keys[0], shape), "bias": (keys[1], shape[-1:])}
    return {name: jax.random.uniform(*each, minval=-bound, maxval=bound) for name, each in shapes.items()}


def linear(layer, x):  # (batch, fan_in) -> (batch, fan_out)
    return x @ layer["weight"] + layer["bias"]


def convolution(layer, x, stride):  # (batch, side, side, fan_in) -> (batch, new_side, new_side, fan_out)
    return conv2d(x, layer["weight"], stride) + layer["bias"]


def nature_cnn(params, obs):
    """The convolutional network of Mnih et al. 2015, (batch, 4, 84, 84) bytes -> (batch, 512)."""
    x = obs.transpose(0, 2, 3, 1).astype(jnp.float32) / 255
    for name, stride in (("conv1", 4), ("conv2", 2), ("conv3", 1)):
        x = jax.nn.relu(convolution(params[name], x, stride))
    return jax.nn.relu(linear(params["dense"], x.reshape(len(x), -1)))


def init_params(key, num_actions, n_atoms):
    shapes = {
        "conv1": (8, 8, 4, 32),
        "conv2": (4, 4, 32, 64),
        "conv3": (3, 3, 64, 64),
        "dense": (7 * 7 * 64, 512),
        "head": (512, num_actions * n_atoms),
    }
    keys = jax.random.split(key, len(shapes))
    return {name: uniform(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def logits_of(params, obs, atoms):  # (batch, 4, 84, 84) -> (batch, num_actions, n_atoms)
    return linear(params["head"], nature_cnn(params, obs)).reshape(len(obs), -1, len(atoms))


def act(params, obs, atoms):  # (batch, 4, 84, 84) -> (batch,): the greedy actions
    return (jax.nn.softmax(logits_of(params, obs, atoms)) @ atoms).argmax(1)


def project(p, value, atoms):
    """Eq. 7, the projection of probabilities `p` of values, both (batch, n_atoms), on the atoms (n_atoms,): each value,
    clipped to their range, gives its probability to the two atoms next to it, more to the closer one."""
    last, row = len(atoms) - 1, jnp.arange(len(p))[:, None]
    b = ((value - atoms[0]) / (atoms[last] - atoms[0]) * last).clip(0, last)  # position among the atoms
    lower = jnp.nan_to_num(b).astype(jnp.int32)  # an index also for NaN, which stays NaN in the target
    to_upper = p * (b - lower)  # nothing where the value is an atom: the lower one gets all
    target = jnp.zeros((len(p), last + 2))  # with a column after the last atom, which gets nothing
    return target.at[row, lower].add(p - to_upper).at[row, lower + 1].add(to_upper)[:, :-1]


def c51_loss(params, target_params, batch, atoms, gamma):
    """Cross entropy of Alg. 1, and the metrics."""
    row = jnp.arange(len(batch.action))
    next_p = jax.nn.softmax(logits_of(target_params, batch.next_obs, atoms))
    next_p = next_p[row, (next_p @ atoms).argmax(1)]  # (batch_size, n_atoms), of the best action
    value = batch.reward[:, None] + gamma * (1 - batch.done[:, None]) * atoms
    target = project(next_p, value, atoms)
    logprob = jax.nn.log_softmax(logits_of(params, batch.obs, atoms)[row, batch.action])
    assert logprob.shape == target.shape == (len(batch.reward), len(atoms))
    loss = -(target * logprob).sum(1).mean()
    q = jnp.exp(logprob) @ atoms
    return loss, {"losses/td_loss": loss, "losses/q_values": q.mean()}


def begin(key, setup):
    """The initial training state of one seed."""
    params_key, envs_key, key = jax.random.split(key, 3)
    params = init_params(params_key, int(setup.envs.single_action_space.n), setup.args.n_atoms)
    env_state, obs = setup.envs.reset(envs_key)
    replay, num_envs = FrameReplay.empty(setup.args.buffer_size), setup.args.num_envs
    games = env_state, obs, jnp.zeros(num_envs, jnp.int32), jnp.ones(num_envs, bool)
    return Training(params, params, setup.optimizer.init(params), replay, *games, key, jnp.int32(0))


def train_iteration(training, setup):
    """One iteration of one seed: the next training state, and what is reported."""
    args, envs, optimizer, num_iterations, atoms = setup
    coin_key, action_key, step_key, sample_key, key = jax.random.split(training.key, 5)
    num_steps = max(1, args.train_frequency // args.num_envs)  # of each environment in one iteration
    batch_steps = args.num_envs * num_steps
    before, global_step = training.iteration * batch_steps, (training.iteration + 1) * batch_steps

    # ---- 1. act: "with probability epsilon select a random action" (Alg. 1 of Mnih et al.)
    progress = jnp.minimum(1, training.iteration / max(1.0, args.exploration_fraction * num_iterations))
    epsilon = args.start_e + (args.end_e - args.start_e) * progress

    def env_step(carry, drawn):
        (env_state, obs, lives, new_game), (key, greedy, random) = carry, drawn
        action = jax.lax.cond(
            greedy.any(), lambda: jnp.where(greedy, act(training.params, obs, atoms), random), lambda: random
        )
        env_state, step = envs.step(key, env_state, action)
        over = step.terminated | step.truncated
        # done at a lost life, though the game continues; not done at a time limit, though it is over
        done = step.terminated | (step.final_lives < lives)
        # final_obs, final_lives: what the step led to; obs, lives: where a game is over, the next one's first
        rows = new_game, obs[:, -1], step.final_obs[:, -1], action, jnp.sign(step.reward), done
        return (env_state, step.obs, step.lives, over), (rows, step.reward, over)

    shape = (num_steps, args.num_envs)
    random = jax.random.randint(action_key, shape, 0, int(envs.single_action_space.n))
    greedy = jax.random.uniform(coin_key, shape) >= epsilon
    drawn = (jax.random.split(step_key, num_steps), greedy, random)
    games = training.env_state, training.obs, training.lives, training.new_game
    games, (rows, reward, over) = jax.lax.scan(env_step, games, drawn)  # (num_steps, num_envs, ...)

    # ---- 2. store: each image once
    replay = training.replay.insert(*rows)

    # ---- 3. learn: a gradient step for every train_frequency environment steps after learning_starts
    def gradient_step(i, carry):
        params, optimizer_state, sums = carry
        batch = replay.sample(jax.random.fold_in(sample_key, i), args.batch_size)
        gradients, metrics = jax.grad(c51_loss, has_aux=True)(params, training.target_params, batch, atoms, args.gamma)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return optax.apply_updates(params, updates), optimizer_state, jax.tree.map(jnp.add, sums, metrics)

    first, last = jnp.maximum(before, args.learning_starts) // args.train_frequency, global_step // args.train_frequency
    last = jnp.where(replay.inserted < args.learning_starts, first, last)  # a resume without --save-replay empties it
    carry = (training.params, training.optimizer_state, {"losses/td_loss": 0.0, "losses/q_values": 0.0})
    params, optimizer_state, sums = jax.lax.fori_loop(first, last, gradient_step, carry)
    # the target network moves in iterations in which a multiple of target_network_frequency lies
    move = jnp.where(global_step % args.target_network_frequency < batch_steps, args.tau, 0.0)
    target_params = optax.incremental_update(params, training.target_params, move)

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    training = Training(params, target_params, optimizer_state, replay, *games, key, training.iteration + 1)
    return training, (reward, over, epsilon, sums, jnp.maximum(0, last - first))


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # EnvPool's, stepped inside of the compiled code
    run.require_spaces(envs, obs="image", action="discrete")
    batch_steps = args.num_envs * max(1, args.train_frequency // args.num_envs)
    num_iterations = run.iterations(batch_steps)  # whole ones in total_timesteps
    sentence = f"--target-network-frequency must be at least {batch_steps}, the steps of one iteration"
    run.require(args.target_network_frequency >= batch_steps, sentence)
    run.require(args.n_atoms > 1 and args.v_min < args.v_max, "--n-atoms must be 2 or more, --v-min less than --v-max")
    least = max(10 * args.num_envs, 2 * batch_steps)  # for a transition of each environment, and one iteration
    run.require(args.buffer_size >= least, f"--buffer-size must be at least {least}, the images of one iteration")

    atoms = jnp.linspace(args.v_min, args.v_max, args.n_atoms)
    optimizer = optax.adam(args.learning_rate, eps=0.01 / args.batch_size)
    setup = Setup(args, envs, optimizer, num_iterations, atoms)
    greedy = partial(act, atoms=atoms)
    games = ("env_state", "obs", "lives", "new_game")  # begin again when resumed: EnvPool cannot save them
    training, start = run.resume(lambda key: begin(key, setup), model="params", envs=games)
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: train_iteration(training, setup), chunk=max(1, 64 // batch_steps))

    for iterations in run.loop(start, num_iterations, batch_steps):  # ranges of at most `chunk` iterations
        global_step = iterations.stop * batch_steps
        training, (reward, over, epsilon, sums, count) = train(training, iterations)
        run.episodes(global_step, reward, over)
        run.learned(sums, count)
        run.log(global_step, {"charts/epsilon": epsilon[:, -1]})
        run.evaluate(global_step, greedy, make_envs)
        run.save(global_step, training)
    run.close(greedy, make_envs)  # a last evaluation; `solo play` takes this policy
