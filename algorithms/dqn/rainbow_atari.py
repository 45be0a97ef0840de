# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl[atari]>=0.1", "ale-py>=0.11", "gymnasium>=1.2,<1.5", "numpy>=1.26,<3", "torch>=2.5"]
# ///
"""Rainbow on Atari: DQN with six improvements; discrete actions, images.

Paper     Hessel et al. 2018, https://arxiv.org/abs/1710.02298; papers of its parts: "Schaul": Schaul et al. 2016,
          https://arxiv.org/abs/1511.05952, and "Fortunato": Fortunato et al. 2018, https://arxiv.org/abs/1706.10295;
          "Eq. 7" of the target: Bellemare, Dabney, Munos 2017, https://arxiv.org/abs/1707.06887
Run       solo train rainbow_atari --env-id ALE/Pong-v5
Spaces    image -> discrete
Differs   from c51_atari.py: the online network chooses the target's next action (double); streams for the value and the
          advantages (dueling); returns of n_step steps; transitions drawn by priority, their losses weighted; noise in
          the weights of all linear layers in place of random actions
Not for   vector observations: c51.py; continuous actions: ddpg_continuous_action.py
Details   docs/algorithms/rainbow_atari.md
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
    total_timesteps: int = 10_000_000  # environment steps of 4 frames, summed over environments
    num_envs: int = 1  # environments stepped in parallel
    buffer_size: int = 1_000_000  # images in the replay buffer, of 7 kB each
    batch_size: int = 32  # transitions per gradient step
    learning_starts: int = 80_000  # environment steps before the first gradient step (the paper: 20k); 0: learn at once
    train_frequency: int = 4  # environment steps per gradient step
    learning_rate: float = 6.25e-5  # learning rate of Adam
    gamma: float = 0.99  # discount factor, from 0 to 1
    target_network_frequency: int = 8000  # environment steps between target network updates
    tau: float = 1.0  # soft-update coefficient of the target network (1: hard copy), from 0 to 1
    n_step: int = 3  # steps of a return before it bootstraps
    prioritized_replay_alpha: float = 0.5  # exponent of the error in a priority (0: drawn uniformly), from 0 to 1
    prioritized_replay_beta: float = 0.4  # exponent of the importance weights at the start, rising to 1; from 0 to 1
    n_atoms: int = 51  # number of atoms of the return distribution
    v_min: float = -10.0  # smallest atom; may be negative
    v_max: float = 10.0  # largest atom; may be negative
    eval_episodes: int = 10  # games of one evaluation, on environments and seeds of their own


class Batch(NamedTuple):
    """Transitions of up to n_step steps."""

    obs: torch.Tensor  # (batch_size, 4, 84, 84), bytes
    action: torch.Tensor  # (batch_size,)
    reward: torch.Tensor  # (batch_size,), the discounted sum of the steps
    done: torch.Tensor  # (batch_size,), of the last step: game over or life lost; 0 at a time limit
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


class PrioritizedReplay(FrameReplay):
    """A FrameReplay whose transitions have up to `n_step` steps and are drawn by priority (Schaul, Alg. 1).

    A transition has the index of the row to which its first step led, and that leaf of the tree. Its priority is the
    p^alpha of Schaul's Eq. 1: the probability of being drawn, up to a common factor. It is 0 as long as steps of the
    transition are to come, and again once one of its images is overwritten.
    """

    def __init__(self, capacity, num_envs, n_step):
        super().__init__(capacity, num_envs)
        self.n_step, self.tree = n_step, SumTree(capacity)
        # how many rows after each one the next image of its game lies, as `back` before it; 0: there is none (yet)
        self.ahead = np.zeros(capacity, np.int32)
        # what a checkpoint holds next to `age`; largest: priority so far
        vars(self.state).update(ahead=self.ahead, sum=self.tree.sum, least=self.tree.least, largest=1.0)

    def begin(self, env_index, image):
        """As in FrameReplay. The games before these are over, so their last transitions are complete: at a time limit,
        too."""
        self._complete(self.inserted - self.state.age[env_index], True)
        self._make_room(len(env_index))
        super().begin(env_index, image)

    def add(self, image, action, reward, done):
        """As in FrameReplay."""
        self._make_room(len(image))
        super().add(image, action, reward, done)
        number = self.inserted - len(image) + np.arange(len(image))  # of the rows just added
        back = self.arrays["back"][number % self.capacity]
        self.ahead[(number - back) % self.capacity] = back
        self._complete(number, done)

    def _make_room(self, count):
        """The next `count` rows will overwrite the oldest ones: priority 0 for these, and for the 4 rows after each in
        its game, whose stacks have its image."""
        first = self.inserted - self.capacity
        lost = [np.arange(max(0, first), max(0, first + count))]  # numbers of rows
        for _ in range(4):
            lost.append(lost[-1] + self.ahead[lost[-1] % self.capacity])
        self.tree.set(np.concatenate(lost) % self.capacity, 0)
        self.ahead[(self.inserted + np.arange(count)) % self.capacity] = 0

    def _complete(self, newest, ends):
        """Give the transitions that are complete now the largest priority so far (Schaul, Alg. 1). `newest` (n,): the
        numbers of the newest rows of n games. In a game where `ends` is true transitions of 1 to n_step steps are
        complete, in others only the one of n_step steps, whose first row is n_step - 1 steps before the newest."""
        ends = np.broadcast_to(ends, len(newest)).astype(bool)
        number, complete = newest, []  # number: the first row of the transitions of `steps` steps up to the newest row
        for steps in range(1, self.n_step + 1):
            complete.append(number if steps == self.n_step else number[ends])
            number = number - self.arrays["back"][number % self.capacity]
        number = np.concatenate(complete)
        # priority 0: not complete before; at a lost life some were already, and keep their priorities
        new = self.history(number)[1] & (self.tree.sum[self.tree.size + number % self.capacity] == 0)
        self.tree.set(number[new] % self.capacity, self.state.largest)

    def sample(self, batch_size, gamma, beta, device):
        """A Batch drawn by priority, in place of FrameReplay's uniform draw; the discounts (batch_size,) of the values
        of its next_obs; its importance weights (batch_size,), (N P(i))^-beta divided by the largest of all transitions
        in the buffer (Schaul, 3.4); and the indices (batch_size,) of its transitions."""
        index = last_index = self.tree.draw(batch_size)  # of the first and of the last step
        reward, discount = self.arrays["reward"][index], np.full(batch_size, gamma, np.float32)
        for _ in range(self.n_step - 1):
            goes_on = (self.ahead[last_index] > 0) & (self.arrays["done"][last_index] == 0)
            last_index = np.where(goes_on, last_index + self.ahead[last_index], last_index) % self.capacity
            reward += np.where(goes_on, discount * self.arrays["reward"][last_index], 0)
            discount = np.where(goes_on, gamma * discount, discount)
        # the indices of images, by indices in place of numbers: both are equal modulo the capacity
        (obs_images, _), (next_images, _) = self.history(index), self.history(last_index)
        stacks = np.hstack([obs_images[:, :4], next_images[:, 1:]])
        image = torch.from_numpy(self.arrays["image"][stacks]).to(device)  # (batch_size, 8, 84, 84)
        # the largest weight is that of the smallest priority
        weight = (self.tree.sum[self.tree.size + index] / self.tree.least[1]) ** -beta
        action, done = self.arrays["action"][index], self.arrays["done"][last_index]
        columns = (action, reward, done, discount, weight.astype(np.float32))
        action, reward, done, discount, weight = (torch.from_numpy(column).to(device) for column in columns)
        return Batch(image[:, :4], action, reward, done, image[:, 4:]), discount, weight, index

    def update(self, index, priority):
        """Give the transitions of these indices (batch_size,) their priorities (batch_size,)."""
        self.tree.set(index, priority)
        self.state.largest = max(self.state.largest, priority.max())


class Scaled(nn.Module):
    """Bytes to numbers from 0 to 1, on the device: bytes are copied there faster. Channels last: fast convolutions."""

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last).to(torch.float32) / 255


def nature_cnn():
    """The convolutional network of Mnih et al. 2015, (batch, 4, 84, 84) bytes -> (batch, 512)."""
    convolutions = [nn.Conv2d(4, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
    layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
    return nn.Sequential(Scaled(), *layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU())


class NoisyLinear(nn.Module):
    """A linear layer with factorised Gaussian noise in its weights and biases (Fortunato, 3 (b) and 3.2)."""

    def __init__(self, fan_in, fan_out):
        super().__init__()
        # the means as torch draws them, uniformly within 1 / sqrt(fan_in), which is the paper's way, too; sigma scales
        # the noise of each weight and bias: a layer of the same shape, so that forward applies both in the same way
        self.mean, self.sigma = nn.Linear(fan_in, fan_out), nn.Linear(fan_in, fan_out)
        for p in self.sigma.parameters():
            nn.init.constant_(p, 0.5 * fan_in**-0.5)

    def noise(self, n):  # -> (n, fan_in), (n, fan_out): fresh noise for n rows, the signed roots of normal numbers
        normal = (torch.randn(n, size, device=self.mean.weight.device) for size in self.mean.weight.T.shape)
        return [x.sign() * x.abs().sqrt() for x in normal]

    def forward(self, x, noise):  # (batch, fan_in), noise of 1 row or of `batch` rows or None -> (batch, fan_out)
        # a weight's noise is the product of its input's and its output's
        return self.mean(x) if noise is None else self.mean(x) + noise[1] * self.sigma(noise[0] * x)


class QNetwork(nn.Module):
    """The distributions of the returns of all actions, from streams for the value and for the advantages."""

    def __init__(self, num_actions, atoms):
        super().__init__()
        self.torso = nature_cnn()[:-2]  # without its linear layer: each stream has a noisy one
        self.value = nn.ModuleList([NoisyLinear(64 * 7 * 7, 512), NoisyLinear(512, len(atoms))])
        self.advantage = nn.ModuleList([NoisyLinear(64 * 7 * 7, 512), NoisyLinear(512, num_actions * len(atoms))])
        self.n_atoms = len(atoms)
        self.register_buffer("atoms", atoms)

    def noise(self, n):
        """Fresh noise of all layers, for n rows or, with n = 1, the same for all rows of a batch."""
        return [layer.noise(n) for layer in (*self.value, *self.advantage)]

    def logits(self, obs, noise=None):  # (batch, 4, 84, 84) -> (batch, num_actions, n_atoms)
        v1, v2, a1, a2 = noise or [None] * 4
        x = self.torso(obs)
        value = self.value[1](self.value[0](x, v1).relu(), v2).unflatten(1, (1, self.n_atoms))
        advantage = self.advantage[1](self.advantage[0](x, a1).relu(), a2).unflatten(1, (-1, self.n_atoms))
        return value + advantage - advantage.mean(1, keepdim=True)

    def forward(self, obs, noise=None):  # (batch, 4, 84, 84) -> (batch, num_actions): the means
        return self.logits(obs, noise).softmax(2) @ self.atoms

    @torch.no_grad()
    def act(self, obs, noise=None):  # NumPy (batch, 4, 84, 84) -> NumPy (batch,): the greedy actions
        return self(torch.as_tensor(obs, device=self.atoms.device), noise).argmax(1).cpu().numpy()


def project(p, value, atoms):
    """Eq. 7, the projection of probabilities `p` of values, both (batch, n_atoms), on the atoms (n_atoms,): each value,
    clipped to their range, gives its probability to the two atoms next to it, more to the closer one."""
    last = len(atoms) - 1
    b = ((value - atoms[0]) / (atoms[last] - atoms[0]) * last).clamp(0, last)  # position among the atoms
    lower = b.nan_to_num().long()  # an index also for NaN, which stays NaN in the target
    to_upper = p * (b - lower)  # nothing where the value is an atom: the lower one gets all
    target = torch.zeros(len(p), last + 2, device=p.device)  # with a column after the last atom, which gets nothing
    target.scatter_add_(1, lower, p - to_upper).scatter_add_(1, lower + 1, to_upper)
    return target[:, :-1]


def rainbow_loss(q_network, target_network, batch, discount, weight, noise):
    """The cross entropy with the target of double Q-learning, times the importance weights; the metrics; and the
    divergences (batch_size,) from the target, of which the priorities are made. `noise` is that of the three passes:
    the values, the choice of the next action, the target network (Fortunato, 3.1)."""
    atoms, row = q_network.atoms, torch.arange(len(batch.action), device=batch.action.device)
    with torch.no_grad():
        next_action = q_network(batch.next_obs, noise[1]).argmax(1)  # chosen by one network, judged by the other
        next_p = target_network.logits(batch.next_obs, noise[2])[row, next_action].softmax(1)  # (batch_size, n_atoms)
        target = project(next_p, batch.reward[:, None] + (discount * (1 - batch.done))[:, None] * atoms, atoms)
    logprob = q_network.logits(batch.obs, noise[0])[row, batch.action].log_softmax(1)
    assert logprob.shape == target.shape == (len(weight), len(atoms)) and weight.shape == discount.shape
    cross_entropy = -(target * logprob).sum(1)
    loss = (weight * cross_entropy).mean()
    divergence = cross_entropy + torch.xlogy(target, target).sum(1)  # Kullback-Leibler
    return loss, {"losses/td_loss": loss, "losses/q_values": (logprob.exp() @ atoms).mean()}, divergence


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
    num_iterations = run.iterations(batch_steps)  # whole ones in total_timesteps
    run.require(args.n_atoms > 1 and args.v_min < args.v_max, "--n-atoms must be 2 or more, --v-min less than --v-max")
    sentence = f"--target-network-frequency must be at least {batch_steps}, the steps of one iteration"
    run.require(args.target_network_frequency >= batch_steps, sentence)
    # a transition has n_step + 4 images, and the next write takes the place of one more; times 2, because a step that
    # ends a game adds two rows, the second for the first image of the next game
    min_rows = 2 * (args.n_step + 5) * args.num_envs
    run.require(args.buffer_size >= min_rows, f"--buffer-size must be at least {min_rows} with --n-step {args.n_step}")
    num_actions = int(envs.single_action_space.n)

    atoms = torch.linspace(args.v_min, args.v_max, args.n_atoms)
    q_network = QNetwork(num_actions, atoms).to(run.device)
    target_network = copy.deepcopy(q_network)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, eps=1.5e-4)
    # gradient_step(*inputs): an optimiser step on the loss of (q_network, *inputs); returns metrics and extra
    gradient_step = run.gradient_step(rainbow_loss, q_network, optimizer)
    replay = PrioritizedReplay(args.buffer_size, args.num_envs, args.n_step)
    now = SimpleNamespace(lives=np.zeros(args.num_envs, np.int64))  # after the last step of each game
    # what a checkpoint holds; the replay only with --save-replay
    parts = dict(q_network=q_network, target_network=target_network, optimizer=optimizer, replay=replay)
    parts |= dict(envs=envs, now=now)
    start = run.resume(**parts)

    # ---- storage of one iteration
    shape = (num_steps, args.num_envs)
    action, reward, over = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, bool)

    obs = run.reset(envs)  # (num_envs, 4, 84, 84)
    now.lives[run.restarted] = 0  # games that a resume had to begin again: no life is lost yet
    known = replay.inserted > 0  # resumed with --save-replay: the buffer has the images of games that continue
    begins = run.restarted if known else np.arange(args.num_envs)  # episodes that a resume could not continue
    replay.begin(begins, obs[begins, 0])
    if start and not known:  # resumed without --save-replay: the later 3 images of games that are under way
        for image in obs[:, 1:].swapaxes(0, 1):
            replay.add(image, -1, 0, 0)  # -1: the action is unknown, this row cannot be sampled
    for iteration in run.loop(start, num_iterations):
        global_step = (iteration + 1) * batch_steps  # at the end of this iteration

        # ---- 1. act: greedily, with fresh noise at each step, of its own for each environment
        for step in range(num_steps):
            action[step] = q_network.act(obs, q_network.noise(args.num_envs))
            obs, reward[step], terminated, truncated, infos = envs.step(action[step])
            over[step] = terminated | truncated

            # ---- 2. store: done at a lost life, though the game continues; not done at a time limit, though it is over
            # where a game is over, obs and lives are the next game's, next_obs and next_lives its own
            done = terminated | (infos["next_lives"] < now.lives)
            now.lives = infos["lives"]
            replay.add(infos["next_obs"][:, -1], action[step], np.sign(reward[step]), done)  # what the step led to
            replay.begin(np.flatnonzero(over[step]), obs[over[step], 0])
        run.episodes(global_step, reward, over)

        # ---- 3. learn: a gradient step every train_frequency environment steps, after learning_starts
        # among min_rows rows at least one transition is complete; a resume without --save-replay empties the buffer
        enough = replay.inserted >= max(args.learning_starts, min_rows)
        beta = 1 - (1 - args.prioritized_replay_beta) * (1 - (iteration + 1) / num_iterations)  # rises to 1
        for env_step in range(global_step - batch_steps + 1, global_step + 1):
            if enough and env_step > args.learning_starts and env_step % args.train_frequency == 0:
                batch, discount, weight, index = replay.sample(args.batch_size, args.gamma, beta, run.device)
                noises = [q_network.noise(1) for _ in range(3)]
                metrics, divergence = gradient_step(target_network, batch, discount, weight, noises)
                # a small number more, so that every transition can be drawn again (Schaul, 3.3); clamp: rounding
                divergence = divergence.double().clamp(min=0).cpu().numpy() + 1e-6
                replay.update(index, divergence**args.prioritized_replay_alpha)
                run.learned(metrics)
        if global_step % args.target_network_frequency < batch_steps:  # a multiple of it lies in this iteration
            soft_update(target_network, q_network, args.tau)

        # ---- 4. report, when due: a row has the means of the metrics of all gradient steps since the last row
        run.log(global_step, {"charts/beta": beta})
        run.evaluate(global_step, q_network.act, make_env)
        run.save(global_step)

    envs.close()
    run.close(q_network.act, make_env)  # a last evaluation; `solo play` takes this policy
