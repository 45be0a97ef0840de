# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari,envpool,jax]>=0.1", "jax>=0.4.34", "optax>=0.2.3"]
# ///
"""QDagger on EnvPool's Atari games: a DQN with the IMPALA CNN learns from a trained teacher; images; in JAX, compiled.

Paper     Agarwal et al. 2022, https://arxiv.org/abs/2206.01626 ("Sec. 4.1" below); "DQN": Mnih et al. 2015,
          https://www.nature.com/articles/nature14236; "IMPALA": Espeholt et al. 2018, https://arxiv.org/abs/1802.01561
          EnvPool: Weng et al. 2022, https://arxiv.org/abs/2206.10558
Run       solo train qdagger_dqn_atari_impalacnn_jax --env-id Pong-v5 --teacher runs/TEACHER
Spaces    image -> discrete
Differs   from dqn_atari_jax.py: a teacher, the trained Q-network of a run of that file; before the student plays, the
          teacher fills a replay buffer of its own and the student learns from it; a loss draws the student towards the
          teacher, by a weight that decreases as the student's score rises; the IMPALA CNN
Twin      qdagger_dqn_atari_impalacnn.py
Not for   vector observations: dqn_jax.py; continuous actions: ddpg_continuous_action_jax.py
Details   docs/algorithms/qdagger_dqn_atari_impalacnn_jax.md
"""

from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from solorl import EnvPoolVectorEnv, RunArgs, Runs, conv2d, load, parse


@dataclass
class Args(RunArgs):
    env_kind = "envpool-atari"  # --env-id is one of EnvPool's Atari games
    env_id: str = "Pong-v5"  # id of the game in EnvPool
    num_seeds: int = 1  # seeds trained together, from `seed` on, each with a run folder of its own
    teacher: str = ""  # run folder of the teacher, or hf://USER/NAME of one on the Hugging Face hub
    trust_script: bool = False  # execute the script in the teacher's folder, whatever it does
    total_timesteps: int = 11_000_000  # teacher_steps + offline_steps + environment steps of the student
    teacher_steps: int = 500_000  # environment steps of the teacher; epsilon is annealed over them
    offline_steps: int = 500_000  # gradient steps on what the teacher has played; 0: none
    num_envs: int = 1  # environments stepped in parallel
    buffer_size: int = 1_000_000  # images in the replay buffer, of 7 kB each; that of the teacher has teacher_steps
    batch_size: int = 32  # transitions per gradient step
    learning_starts: int = 80_000  # steps of the student before its first gradient step on them; 0: learn at once
    train_frequency: int = 4  # environment steps per gradient step
    learning_rate: float = 1e-4  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 1000  # steps between target network updates; offline: gradient steps
    temperature: float = 1.0  # of the policies softmax(Q / temperature) that are compared
    tau: float = 1.0  # soft-update coefficient of the target network (1: hard copy), from 0 to 1
    start_e: float = 1.0  # initial epsilon: probability of a random action, from 0 to 1
    end_e: float = 0.01  # final epsilon, from 0 to 1
    exploration_fraction: float = 0.1  # fraction of the student's steps over which epsilon is annealed, from 0 to 1
    eval_episodes: int = 10  # games of one evaluation, on environments and seeds of their own


class Setup(NamedTuple):
    """What stays the same while a seed trains."""

    args: Args
    envs: Any
    optimizer: optax.GradientTransformation
    batch_steps: int  # environment steps of one iteration
    teach_iterations: int
    offline_iterations: int
    online_iterations: int
    teacher_score: float


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
    teacher_params: dict
    optimizer_state: Any
    teacher_replay: FrameReplay
    replay: FrameReplay
    env_state: Any
    obs: jax.Array  # (num_envs, 4, 84, 84) bytes, the current observations
    lives: jax.Array  # (num_envs,), after the last step; 0 before the first, in which no life counts as lost
    new_game: jax.Array  # (num_envs,), where obs is the first of a game
    unfinished: jax.Array  # (num_envs,), the returns so far of the student's games
    returns: jax.Array  # (10,), those of its last games that are over, at first 0
    key: jax.Array  # of the random numbers to come
    iteration: jax.Array  # iterations done in all phases, ()


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


def teacher_values(params, obs):  # (batch, 4, 84, 84) -> (batch, num_actions): those of dqn_atari_jax.py
    return linear(params["head"], nature_cnn(params, obs))


def teacher_shapes(num_actions):
    """The shapes of the parameters of `teacher_values`."""
    weights = {"conv1": (8, 8, 4, 32), "conv2": (4, 4, 32, 64), "conv3": (3, 3, 64, 64)}
    weights |= {"dense": (7 * 7 * 64, 512), "head": (512, num_actions)}
    return {name: {"weight": shape, "bias": shape[-1:]} for name, shape in weights.items()}


def padded(layer, x):
    """A convolution of 3 x 3 with a border of zeros, (batch, side, side, fan_in) -> (batch, side, side, fan_out)."""
    return convolution(layer, jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), 1)


def max_pool(x):
    """The maxima of 3 x 3 pixels around every second one, (batch, side, side, n) -> (batch, new_side, new_side, n)."""
    side = (x.shape[1] + 1) // 2
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    return reduce(jnp.maximum, (x[:, i:, j:][:, : 2 * side : 2, : 2 * side : 2] for i in range(3) for j in range(3)))


def impala_cnn(params, obs):
    """The deep convolutional network of IMPALA (Fig. 3, right), (batch, 4, 84, 84) bytes -> (batch, 256)."""
    x = obs.transpose(0, 2, 3, 1).astype(jnp.float32) / 255
    for stage in params["stages"]:  # each halves height and width: 42, 21, 11
        x = max_pool(padded(stage["conv"], x))
        for first, second in stage["blocks"]:
            x = x + padded(second, jax.nn.relu(padded(first, jax.nn.relu(x))))
    return jax.nn.relu(linear(params["dense"], jax.nn.relu(x).reshape(len(x), -1)))


def init_params(key, num_actions):
    keys = iter(jax.random.split(key, 17))
    stages = []
    for inputs, channels in ((4, 16), (16, 32), (32, 32)):
        first, *others = (uniform(next(keys), (3, 3, size, channels)) for size in (inputs, *[channels] * 4))
        stages.append({"conv": first, "blocks": [others[:2], others[2:]]})
    dense, head = uniform(next(keys), (11 * 11 * 32, 256)), uniform(next(keys), (256, num_actions))
    return {"stages": stages, "dense": dense, "head": head}


def q_values(params, obs):  # (batch, 4, 84, 84) -> (batch, num_actions)
    return linear(params["head"], impala_cnn(params, obs))


def act(params, obs):  # (batch, 4, 84, 84) -> (batch,): the greedy actions
    return q_values(params, obs).argmax(1)


def distill_loss(q, teacher_q, temperature):
    """Cross entropy of the teacher's and the student's policy (Sec. 4.1), -sum_a pi_T(a|s) log pi(a|s), the mean over
    the batch, with pi = softmax(Q / temperature). Least, but not 0, where both are equal. (batch_size, num_actions)."""
    assert q.shape == teacher_q.shape
    cross_entropy = -(jax.nn.softmax(teacher_q / temperature) * jax.nn.log_softmax(q / temperature)).sum(1)
    return cross_entropy.mean()


def qdagger_loss(params, target_params, teacher_params, batch, gamma, temperature, weight):
    """The error of DQN plus `weight` times the distillation (Sec. 4.1), and the metrics."""
    target = batch.reward + gamma * (1 - batch.done) * q_values(target_params, batch.next_obs).max(1)
    q = q_values(params, batch.obs)
    taken = jnp.take_along_axis(q, batch.action[:, None], 1).squeeze(1)
    assert taken.shape == target.shape == batch.reward.shape
    distillation = distill_loss(q, teacher_values(teacher_params, batch.obs), temperature)
    td_loss = ((taken - target) ** 2).mean()
    metrics = {"losses/td_loss": td_loss, "losses/q_values": taken.mean(), "losses/distill_loss": distillation}
    return td_loss + weight * distillation, metrics


def count_returns(unfinished, returns, reward, over):
    """Count the rewards (num_steps, num_envs) of some steps into `unfinished`, the returns so far of the games
    (num_envs,); where a game is over, its return becomes the newest of `returns`, those of the last games. Both."""

    def one_game(returns, game):
        value, ends = game
        return jnp.where(ends, jnp.append(returns[1:], value), returns), None

    def one_step(carry, step):
        (unfinished, returns), (rewards, ends) = carry, step
        unfinished = unfinished + rewards
        returns, _ = jax.lax.scan(one_game, returns, (unfinished, ends))
        return (jnp.where(ends, 0, unfinished), returns), None

    return jax.lax.scan(one_step, (unfinished, returns), (reward, over))[0]


def begin(key, setup, teacher_params):
    """The initial training state of one seed."""
    params_key, envs_key, key = jax.random.split(key, 3)
    params = init_params(params_key, int(setup.envs.single_action_space.n))
    env_state, obs = setup.envs.reset(envs_key)
    replays, num_envs = map(FrameReplay.empty, (setup.args.teacher_steps, setup.args.buffer_size)), setup.args.num_envs
    games = env_state, obs, jnp.zeros(num_envs, jnp.int32), jnp.ones(num_envs, bool), jnp.zeros(num_envs)
    learned = params, params, teacher_params, setup.optimizer.init(params)
    return Training(*learned, *replays, *games, jnp.zeros(10), key, jnp.int32(0))


def play(training, values, epsilon, new_games, keys, setup):
    """Steps in every environment, "with probability epsilon" at random (Alg. 1 of DQN), else the best of `values`; in
    new games if `new_games`. The training after them; rows for `FrameReplay.insert`, raw reward and over
    (num_steps, num_envs, ...)."""
    envs, num_envs, (coin_key, action_key, step_key) = setup.envs, setup.args.num_envs, keys

    def begin_games(games):
        return *envs.restart(games[0]), jnp.zeros_like(games[2]), jnp.ones_like(games[3])

    def env_step(carry, drawn):
        (env_state, obs, lives, new_game), (key, greedy, random) = carry, drawn
        action = jax.lax.cond(greedy.any(), lambda: jnp.where(greedy, values(obs).argmax(1), random), lambda: random)
        env_state, step = envs.step(key, env_state, action)
        over = step.terminated | step.truncated
        # done at a lost life, though the game continues; not done at a time limit, though it is over
        done = step.terminated | (step.final_lives < lives)
        # final_obs, final_lives: what the step led to; obs, lives: where a game is over, the next one's first
        rows = new_game, obs[:, -1], step.final_obs[:, -1], action, jnp.sign(step.reward), done
        return (env_state, step.obs, step.lives, over), (rows, step.reward, over)

    shape = (setup.batch_steps // num_envs, num_envs)
    random = jax.random.randint(action_key, shape, 0, int(envs.single_action_space.n))
    greedy = jax.random.uniform(coin_key, shape) >= epsilon
    drawn = (jax.random.split(step_key, len(random)), greedy, random)
    games = training.env_state, training.obs, training.lives, training.new_game
    games = jax.lax.cond(new_games, begin_games, lambda games: games, games)
    (env_state, obs, lives, new_game), (rows, reward, over) = jax.lax.scan(env_step, games, drawn)
    return training._replace(env_state=env_state, obs=obs, lives=lives, new_game=new_game), rows, reward, over


def learn(training, replay, count, weight, key, setup):
    """`count` gradient steps on batches from `replay`, and a move of the target network if one is due. The training
    after them, and the sums of the metrics."""
    args = setup.args

    def gradient_step(i, carry):
        params, optimizer_state, sums = carry
        batch = replay.sample(jax.random.fold_in(key, i), args.batch_size)
        inputs = training.target_params, training.teacher_params, batch, args.gamma, args.temperature, weight
        gradients, metrics = jax.grad(qdagger_loss, has_aux=True)(params, *inputs)
        updates, optimizer_state = setup.optimizer.update(gradients, optimizer_state)
        return optax.apply_updates(params, updates), optimizer_state, jax.tree.map(jnp.add, sums, metrics)

    none = dict.fromkeys(("losses/td_loss", "losses/q_values", "losses/distill_loss"), 0.0)
    carry = (training.params, training.optimizer_state, none)
    params, optimizer_state, sums = jax.lax.fori_loop(0, count, gradient_step, carry)
    global_step = (training.iteration + 1) * setup.batch_steps
    # the target network moves in iterations in which a multiple of target_network_frequency lies
    move = jnp.where(global_step % args.target_network_frequency < setup.batch_steps, args.tau, 0.0)
    target_params = optax.incremental_update(params, training.target_params, move)
    return training._replace(params=params, target_params=target_params, optimizer_state=optimizer_state), sums


def teach(training, setup):
    """One iteration in which the teacher plays: the next training state, and what is reported."""
    args, (*keys, _, key) = setup.args, jax.random.split(training.key, 5)
    epsilon = args.start_e + (args.end_e - args.start_e) * (training.iteration / setup.teach_iterations)
    values = partial(teacher_values, training.teacher_params)
    training, rows, _, _ = play(training, values, epsilon, False, keys, setup)
    replay = training.teacher_replay.insert(*rows)
    return training._replace(teacher_replay=replay, key=key, iteration=training.iteration + 1), epsilon


def offline(training, setup):
    """One iteration in which the student learns from what the teacher has played, and nobody plays."""
    *_, sample_key, key = jax.random.split(training.key, 5)
    replay, weight = training.teacher_replay, jnp.float32(1)  # of the distillation: the student has not played
    count = jnp.where(replay.inserted > 0, setup.batch_steps, 0)  # resumed without --save-replay: nothing is there
    training, sums = learn(training, replay, count, weight, sample_key, setup)
    return training._replace(key=key, iteration=training.iteration + 1), (weight, sums, count)


def online(training, setup):
    """One iteration in which the student plays and learns as DQN from its own replay buffer."""
    args, (*keys, sample_key, key) = setup.args, jax.random.split(training.key, 5)
    iteration = training.iteration - setup.teach_iterations - setup.offline_iterations  # of the student

    # ---- 1. act: in the first iteration in new games
    progress = jnp.minimum(1, iteration / max(1.0, args.exploration_fraction * setup.online_iterations))
    epsilon = args.start_e + (args.end_e - args.start_e) * progress
    values = partial(q_values, training.params)
    training, rows, reward, over = play(training, values, epsilon, iteration == 0, keys, setup)
    unfinished, returns = count_returns(training.unfinished, training.returns, reward, over)

    # ---- 2. store: each image once
    replay = training.replay.insert(*rows)

    # ---- 3. learn: a gradient step for every train_frequency environment steps after learning_starts
    weight = jnp.maximum(0, 1 - returns.mean() / setup.teacher_score)
    first = jnp.maximum(iteration * setup.batch_steps, args.learning_starts) // args.train_frequency
    count = jnp.maximum(0, (iteration + 1) * setup.batch_steps // args.train_frequency - first)
    count = count * (replay.inserted >= args.learning_starts)  # 0 if resumed without --save-replay
    training, sums = learn(training, replay, count, weight, sample_key, setup)

    # ---- 4. report: sums of the metrics over the gradient steps, and how many there were
    changed = {"replay": replay, "unfinished": unfinished, "returns": returns, "key": key}
    training = training._replace(iteration=training.iteration + 1, **changed)
    return training, (reward, over, epsilon, weight, sums, count)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, args.num_envs)  # EnvPool's, stepped inside of the compiled code
    run.require_spaces(envs, obs="image", action="discrete")
    batch_steps = args.num_envs * max(1, args.train_frequency // args.num_envs)
    # three loops, one after the other: the teacher plays; the student learns from that offline; the student plays
    teach_iterations, offline_iterations = args.teacher_steps // batch_steps, args.offline_steps // batch_steps
    online_iterations = args.total_timesteps // batch_steps - teach_iterations - offline_iterations
    run.require(teach_iterations, f"--teacher-steps {args.teacher_steps} is less than one iteration of {batch_steps}")
    sentence = f"--total-timesteps {args.total_timesteps} leaves no iteration of {batch_steps} steps to the student"
    before = f"after --teacher-steps {args.teacher_steps} and --offline-steps {args.offline_steps}"
    run.require(online_iterations > 0, f"{sentence}, {before}")
    run.require(args.temperature > 0, "--temperature must be more than 0")
    sentence = f"--target-network-frequency must be at least {batch_steps}, the steps of one iteration"
    run.require(args.target_network_frequency >= batch_steps, sentence)
    least = max(10 * args.num_envs, 2 * batch_steps)
    sentence = f"--teacher-steps and --buffer-size must be at least {least}, the images of one iteration"
    run.require(min(args.teacher_steps, args.buffer_size) >= least, sentence)

    teacher_params, teacher_score, name = None, 1.0, args.teacher
    if not run.play:  # a run that is only played needs no teacher
        run.require(name, "there is no teacher: --teacher must name a run folder, or hf://USER/NAME")
        folder = run.keep(name)
        teacher = load(folder, trust_script=args.trust_script)
        run.require(teacher.env_id == args.env_id, f"{name} was trained on {teacher.env_id}, not on {args.env_id}")
        shapes = jax.tree.map(jnp.shape, teacher.models.get("params"))
        fits = shapes == teacher_shapes(int(envs.single_action_space.n))
        run.require(fits, f"{name} must be a run of dqn_atari_jax.py, or have its network")
        run.require(teacher.score is not None, f"{name} does not say what its model scored")
        run.require(teacher.score > 0, f"{name} must have scored more than 0: the student's score is divided by it")
        teacher_params = jax.tree.map(jnp.asarray, jax.device_get(teacher.models["params"]))  # on our device
        teacher_score = teacher.score
    phases = teach_iterations, offline_iterations, online_iterations
    setup = Setup(args, envs, optax.adam(args.learning_rate), batch_steps, *phases, teacher_score)
    # what begins again when a run is resumed: EnvPool cannot save games
    games = ("env_state", "obs", "lives", "new_game", "unfinished")
    training, start = run.resume(lambda key: begin(key, setup, teacher_params), model="params", envs=games)
    chunk = max(1, 64 // batch_steps)  # iterations in one call of `train`, together 64 steps

    # ---- teach: the teacher plays and fills its replay buffer
    # train(training, iterations): those iterations in compiled code; reports: NumPy (num_seeds, iterations, ...)
    train = run.compile(lambda training: teach(training, setup), chunk)
    for iterations in run.loop(start, teach_iterations, batch_steps, last=False):
        global_step = iterations.stop * batch_steps  # environment steps after these iterations
        training, epsilon = train(training, iterations)  # (num_seeds, len(iterations))
        run.log(global_step, {"charts/epsilon": epsilon[:, -1]})
        run.save(global_step, training)

    # ---- offline: the student learns from what the teacher has played; each gradient step counts as a step
    train = run.compile(lambda training: offline(training, setup), chunk)
    for iterations in run.loop(start, offline_iterations, batch_steps, last=False):
        global_step = (teach_iterations + iterations.stop) * batch_steps
        training, (weight, sums, count) = train(training, iterations)  # (num_seeds, len(iterations)) each
        run.learned(sums, count)
        run.log(global_step, {"charts/distill_coeff": weight[:, -1]})
        run.evaluate(global_step, act, make_envs)  # the first time at once, then at multiples of --eval-every
        run.save(global_step, training)

    # ---- online: the student plays new games and learns as DQN from its own replay buffer
    train = run.compile(lambda training: online(training, setup), chunk)
    for iterations in run.loop(start, online_iterations, batch_steps):  # ranges of at most `chunk` iterations
        global_step = (teach_iterations + offline_iterations + iterations.stop) * batch_steps
        training, (reward, over, epsilon, weight, sums, count) = train(training, iterations)
        run.episodes(global_step, reward, over)
        run.learned(sums, count)
        run.log(global_step, {"charts/epsilon": epsilon[:, -1], "charts/distill_coeff": weight[:, -1]})
        run.evaluate(global_step, act, make_envs)
        run.save(global_step, training)
    run.close(act, make_envs)  # a last evaluation; `solo play` takes this policy
