# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari]>=0.1", "ale-py>=0.11", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""QDagger on Atari: a deep Q-network (DQN) with the IMPALA CNN that learns from a trained teacher; images.

Paper     Agarwal et al. 2022, https://arxiv.org/abs/2206.01626 ("Sec. 4.1" below); "DQN": Mnih et al. 2015,
          https://www.nature.com/articles/nature14236; "IMPALA": Espeholt et al. 2018, https://arxiv.org/abs/1802.01561
Run       solo train qdagger_dqn_atari_impalacnn --env-id ALE/Pong-v5 --teacher runs/TEACHER
Spaces    image -> discrete
Differs   from dqn_atari.py: a teacher, the trained Q-network of a run of dqn_atari.py or of another file that has one;
          before the student plays, the teacher fills a replay buffer of its own and the student learns from it; a loss
          draws the student towards the teacher, by a weight that decreases as the student's score rises; the IMPALA CNN
Not for   vector observations: dqn.py; continuous actions: ddpg_continuous_action.py
Details   docs/algorithms/qdagger_dqn_atari_impalacnn.md
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
import torch.nn.functional as F
from gymnasium.wrappers import FrameStackObservation, MaxAndSkipObservation, ResizeObservation, TimeLimit

from solorl import Run, RunArgs, load, parse

gym.register_envs(ale_py)


@dataclass
class Args(RunArgs):
    env_kind = "atari"  # --env-id is one of Gymnasium's Atari games
    env_id: str = "ALE/Pong-v5"  # Gymnasium id of the game; PongNoFrameskip-v4 has no sticky actions
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


class Batch(NamedTuple):
    """Transitions."""

    obs: torch.Tensor  # (batch_size, 4, 84, 84), bytes
    action: torch.Tensor  # (batch_size,)
    reward: torch.Tensor  # (batch_size,)
    done: torch.Tensor  # (batch_size,), 1 where the game is over or a life is lost, 0 at a time limit
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


class FrameReplay:
    """The last `capacity` images, in host memory. Each is stored once; stacks are put together when they are sampled.

    A row is what one step led to: the image, and the step's action, reward and done. Rows are numbered from 0 on; the
    row of a number lies at the index number % capacity. With 6 rows, one environment and 9 images inserted so far:

        index  number  image        action  done  back
          0       6    game B, 1st    -1      0     0    begins game B: no step led to this image
          1       7    game B, 2nd     3      0     1
          2       8    game B, 3rd     0      0     1    the newest row
          3       3    game A, 4th     2      0     1    the next write, of number 9, goes here
          4       4    game A, 5th     2      0     1
          5       5    game A, 6th     1      1     1    game A ends

    `back` is how many rows before this one the previous image of its game lies, 0 for the first image: more than 1
    where rows of other environments lie between. Row 8 has the images 6, 6, 6, 7, 8: obs is the first four, next_obs
    the last four. Row 5 cannot be sampled: the images with the numbers 1 and 2 are overwritten.
    """

    def __init__(self, capacity, num_envs):
        self.arrays = {
            "image": np.zeros((capacity, 84, 84), np.uint8),
            "action": np.full(capacity, -1, np.int64),
            "reward": np.zeros(capacity, np.float32),
            "done": np.zeros(capacity, np.float32),
            "back": np.zeros(capacity, np.int32),
        }
        self.capacity, self.inserted = capacity, 0  # `inserted`: the number of the next row
        # what a checkpoint holds with the arrays. age: how many rows ago the newest one of each game was inserted; not
        # its number: a run resumed with a larger capacity counts again, from the oldest row that is left
        self.state = SimpleNamespace(age=np.zeros(num_envs, np.int64))

    def begin(self, env_index, image):
        """Insert the first images (n, 84, 84) of new games in the environments of these indices (n,)."""
        self._insert(env_index, image, -1, 0, 0, 0)

    def add(self, image, action, reward, done):
        """Insert what one step in every environment led to: images (num_envs, 84, 84), and the rest (num_envs,)."""
        env_index, newest = np.arange(len(image)), self.inserted - self.state.age  # newest: the numbers of these rows
        self._insert(env_index, image, action, reward, done, self.inserted + env_index - newest)

    def _insert(self, env_index, *columns):
        """Append a row for each of these environments; the columns are those of `arrays`, in their order."""
        number = self.inserted + np.arange(len(env_index))
        for array, values in zip(self.arrays.values(), columns, strict=True):
            array[number % self.capacity] = values
        self.inserted += len(env_index)
        self.state.age += len(env_index)
        self.state.age[env_index] = self.inserted - number

    def history(self, number):
        """For the rows of these numbers (n,): the indices (n, 5) of the row's image and of the 4 before it in its game,
        oldest first, with a game's first image in the place of those before it; and whether (n,) the row can be
        sampled: a step has led to it, and none of the 5 images is overwritten."""
        numbers = [number]
        for _ in range(4):
            numbers.append(numbers[-1] - self.arrays["back"][numbers[-1] % self.capacity])
        oldest = max(0, self.inserted - self.capacity)
        whole = (self.arrays["action"][number % self.capacity] >= 0) & (numbers[-1] >= oldest)
        return np.stack(numbers[::-1], 1) % self.capacity, whole

    def sample(self, batch_size, device):
        """A Batch of transitions drawn uniformly with replacement."""
        oldest = max(0, self.inserted - self.capacity)
        number = np.random.randint(oldest, self.inserted, batch_size)
        while not (whole := self.history(number)[1]).all():
            number[~whole] = np.random.randint(oldest, self.inserted, np.sum(~whole))
        image = torch.from_numpy(self.arrays["image"][self.history(number)[0]]).to(device)  # (batch_size, 5, 84, 84)
        columns = (self.arrays[name][number % self.capacity] for name in ("action", "reward", "done"))
        return Batch(image[:, :4], *(torch.from_numpy(column).to(device) for column in columns), image[:, 1:])


class Scaled(nn.Module):
    """Bytes to numbers from 0 to 1, on the device: bytes are copied there faster. Channels last: fast convolutions."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255


class ResidualBlock(nn.Module):
    """x + f(x) with two convolutions as f, (batch, channels, height, width) -> the same."""

    def __init__(self, channels):
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.layers = nn.Sequential(*(layer for convolution in convolutions for layer in (nn.ReLU(), convolution)))

    def forward(self, x):
        return x + self.layers(x)


def impala_cnn():
    """The deep convolutional network of IMPALA (Fig. 3, right), (batch, 4, 84, 84) bytes -> (batch, 256)."""
    layers = []
    for inputs, channels in ((4, 16), (16, 32), (32, 32)):  # each halves height and width: 42, 21, 11
        layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
        layers += [ResidualBlock(channels), ResidualBlock(channels)]
    return nn.Sequential(Scaled(), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 11 * 11, 256), nn.ReLU())


class QNetwork(nn.Module):
    """The values of all actions."""

    def __init__(self, num_actions):
        super().__init__()
        self.network, self.head = impala_cnn(), nn.Linear(256, num_actions)

    def forward(self, obs):  # (batch, 4, 84, 84) -> (batch, num_actions)
        return self.head(self.network(obs))

    @torch.no_grad()
    def act(self, obs):  # NumPy (batch, 4, 84, 84) -> NumPy (batch,): the greedy actions
        return self(torch.as_tensor(obs, device=self.head.weight.device)).argmax(1).cpu().numpy()


def distill_loss(q, teacher_q, temperature):
    """Cross entropy of the teacher's and the student's policy (Sec. 4.1), -sum_a pi_T(a|s) log pi(a|s), the mean over
    the batch, with pi = softmax(Q / temperature). Least, but not 0, where both are equal. (batch_size, num_actions)."""
    assert q.shape == teacher_q.shape
    cross_entropy = -(F.softmax(teacher_q / temperature, 1) * F.log_softmax(q / temperature, 1)).sum(1)
    return cross_entropy.mean()


def qdagger_loss(q_network, target_network, teacher, batch, gamma, temperature, weight):
    """The error of DQN plus `weight` times the distillation (Sec. 4.1), and the metrics."""
    with torch.no_grad():
        target = batch.reward + gamma * (1 - batch.done) * target_network(batch.next_obs).amax(1)
        teacher_q = teacher(batch.obs)
    q = q_network(batch.obs)
    taken = q.gather(1, batch.action[:, None]).squeeze(1)
    assert taken.shape == target.shape == batch.reward.shape
    td_loss, distillation = F.mse_loss(taken, target), distill_loss(q, teacher_q, temperature)
    metrics = {"losses/td_loss": td_loss, "losses/q_values": taken.mean(), "losses/distill_loss": distillation}
    return td_loss + weight * distillation, metrics


def play(envs, policy, replay, obs, lives, epsilon, num_steps):
    """Take `num_steps` steps in every environment, "with probability epsilon" at random (Alg. 1 of DQN), else as the
    policy says, and store them. The next obs and lives; raw reward, over (num_steps, num_envs)."""
    shape = (num_steps, envs.num_envs)
    action = np.random.randint(envs.single_action_space.n, size=shape)
    greedy = np.random.random(shape) >= epsilon
    reward, over = np.zeros(shape, np.float32), np.zeros(shape, bool)
    if replay.inserted == 0:
        replay.begin(np.arange(envs.num_envs), obs[:, 0])
        for image in obs[:, 1:].swapaxes(0, 1):  # copies of the first image; after resuming, of a game under way
            replay.add(image, -1, 0, 0)  # -1: the action is unknown, this row cannot be sampled
    for step in range(num_steps):
        if greedy[step].any():
            action[step] = np.where(greedy[step], policy(obs), action[step])
        obs, reward[step], terminated, truncated, infos = envs.step(action[step])
        over[step] = terminated | truncated

        # store: done at a lost life, though the game continues; not done at a time limit, though it is over
        # where a game is over, obs and lives are the next game's, next_obs and next_lives its own
        done = terminated | (infos["next_lives"] < lives)
        lives = infos["lives"]
        replay.add(infos["next_obs"][:, -1], action[step], np.sign(reward[step]), done)
        replay.begin(np.flatnonzero(over[step]), obs[over[step], 0])
    return obs, lives, reward, over


def count_returns(unfinished, returns, reward, over):
    """Count the rewards (num_steps, num_envs) of some steps into `unfinished`, the returns so far of the games
    (num_envs,); where a game is over, its return becomes the newest of `returns`, those of the last games. Both."""
    for rewards, ends in zip(reward, over, strict=True):
        unfinished = unfinished + rewards
        for i in np.flatnonzero(ends):
            returns = np.append(returns[1:], unfinished[i])
        unfinished = np.where(ends, 0, unfinished)
    return unfinished, returns


def soft_update(target, online, tau):
    """Polyak averaging: target <- (1 - tau) * target + tau * online."""
    with torch.no_grad():
        for x, y in zip(target.parameters(), online.parameters(), strict=True):
            x.lerp_(y, tau)


if __name__ == "__main__":
    # ---- setup
    args = parse(Args)
    run = Run(args)  # seeds Python, NumPy and torch
    envs = run.vector_env(make_env, args.env_id, args.num_envs)  # where an episode ends, obs begins the next one
    run.require_spaces(envs, obs="image", action="discrete")
    # one iteration: train_frequency environment steps, rounded down to a multiple of num_envs, but at least num_envs
    num_steps = max(1, args.train_frequency // args.num_envs)  # of each environment
    batch_steps = args.num_envs * num_steps
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
    least = 10 * args.num_envs
    sentence = f"--teacher-steps and --buffer-size must be at least {least}, the images of a transition in each game"
    run.require(min(args.teacher_steps, args.buffer_size) >= least, sentence)
    num_actions = int(envs.single_action_space.n)
    teacher, name = None, args.teacher
    if not run.play:  # a run that is only played needs no teacher
        run.require(name, "there is no teacher: --teacher must name a run folder, or hf://USER/NAME")
        folder = run.keep(name)
        teacher = load(folder, trust_script=args.trust_script)
        run.require(teacher.env_id == args.env_id, f"{name} was trained on {teacher.env_id}, not on {args.env_id}")
        run.require("q_network" in teacher.models, f"{name} has no q_network, but {' and '.join(teacher.models)}")
        run.require(teacher.score is not None, f"{name} does not say what its model scored")
        run.require(teacher.score > 0, f"{name} must have scored more than 0: the student's score is divided by it")
        game = teacher.make_env()
        equal = (game.observation_space, game.action_space) == (envs.single_observation_space, envs.single_action_space)
        mine = f"{envs.single_observation_space} and {envs.single_action_space}"
        run.require(equal, f"{name} has the spaces {game.observation_space} and {game.action_space}, not {mine}")
        teacher.models["q_network"].to(run.device)

    q_network = QNetwork(num_actions).to(run.device)
    target_network = copy.deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    # gradient_step(*inputs): an optimiser step on qdagger_loss(q_network, *inputs); returns its metrics
    gradient_step = run.gradient_step(qdagger_loss, q_network, optimizer)
    teacher_replay, replay = (FrameReplay(size, args.num_envs) for size in (args.teacher_steps, args.buffer_size))
    now = SimpleNamespace(lives=np.zeros(args.num_envs, np.int64))  # after the last step of each game
    # returns of the student's games: so far, of those under way; of the last 10, at first 0
    now.unfinished, now.returns = np.zeros(args.num_envs), np.zeros(10)
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(q_network=q_network, target_network=target_network, optimizer=optimizer)
    parts |= dict(teacher_replay=teacher_replay, replay=replay, envs=envs, now=now)
    start = run.resume(**parts)

    obs = run.reset(envs)  # (num_envs, 4, 84, 84)
    now.unfinished[run.restarted] = 0  # episodes that a resume could not continue
    now.lives[run.restarted] = 0  # games that a resume had to begin again: no life is lost yet
    for memory in (teacher_replay, replay):
        if memory.inserted:  # resumed with --save-replay
            memory.begin(run.restarted, obs[run.restarted, -1])  # episodes that a resume could not continue

    # ---- teach: the teacher plays and fills its replay buffer
    for iteration in run.loop(start, teach_iterations, last=False):
        global_step = (iteration + 1) * batch_steps  # environment steps at the end of this iteration

        # ---- 1. act and 2. store
        epsilon = args.start_e + (args.end_e - args.start_e) * (iteration / teach_iterations)
        obs, now.lives, _, _ = play(envs, teacher, teacher_replay, obs, now.lives, epsilon, num_steps)

        # ---- 4. report
        run.log(global_step, {"charts/epsilon": epsilon})
        run.save(global_step)

    # ---- offline: the student learns from what the teacher has played; each gradient step counts as a step
    weight = torch.ones((), device=run.device)  # of the distillation, as long as the student has not played
    for iteration in run.loop(start, offline_iterations, last=False):
        global_step = (teach_iterations + iteration + 1) * batch_steps

        # ---- 3. learn: batch_steps gradient steps
        if teacher_replay.inserted:  # a run resumed without --save-replay has nothing here to learn from
            for _ in range(batch_steps):
                batch = teacher_replay.sample(args.batch_size, run.device)
                inputs = (target_network, teacher.models["q_network"], batch, args.gamma, args.temperature, weight)
                metrics = gradient_step(*inputs)
                run.learned(metrics)
        if global_step % args.target_network_frequency < batch_steps:  # a multiple of it lies in this iteration
            soft_update(target_network, q_network, args.tau)

        # ---- 4. report: an evaluation the first time at once, then at multiples of --eval-every
        run.log(global_step, {"charts/distill_coeff": weight})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    # ---- online: the student plays new games and learns as DQN from its own replay buffer
    for iteration in run.loop(start, online_iterations):
        online_step = (iteration + 1) * batch_steps  # environment steps of the student
        global_step = (teach_iterations + offline_iterations) * batch_steps + online_step
        if iteration == 0:
            obs, now.lives = envs.reset()[0], np.zeros(args.num_envs, np.int64)

        # ---- 1. act and 2. store
        progress = min(1.0, iteration / max(1.0, args.exploration_fraction * online_iterations))
        epsilon = args.start_e + (args.end_e - args.start_e) * progress
        obs, now.lives, reward, over = play(envs, q_network.act, replay, obs, now.lives, epsilon, num_steps)
        run.episodes(global_step, reward, over)
        now.unfinished, now.returns = count_returns(now.unfinished, now.returns, reward, over)

        # ---- 3. learn: a gradient step every train_frequency environment steps, after learning_starts
        weight = torch.tensor(max(0.0, 1 - now.returns.mean() / teacher.score), dtype=torch.float32, device=run.device)
        enough = replay.inserted >= args.learning_starts  # resuming without --save-replay empties the buffer
        for env_step in range(online_step - batch_steps + 1, online_step + 1):
            if enough and env_step > args.learning_starts and env_step % args.train_frequency == 0:
                batch = replay.sample(args.batch_size, run.device)
                inputs = (target_network, teacher.models["q_network"], batch, args.gamma, args.temperature, weight)
                metrics = gradient_step(*inputs)
                run.learned(metrics)
        if global_step % args.target_network_frequency < batch_steps:  # a multiple of it lies in this iteration
            soft_update(target_network, q_network, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/epsilon": epsilon, "charts/distill_coeff": weight})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)  # a last evaluation; `solo play` takes this policy
