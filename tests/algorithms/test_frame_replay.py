"""FrameReplay, which stores each image once, against a buffer that stores whole stacks, on random histories."""

import re

import numpy as np
import pytest
import torch
from conftest import definitions

from solorl.checkpoints.replay import ReplayLog

DQN = definitions("dqn_atari")
CPU = torch.device("cpu")


def images(numbers):
    """Images (n, 84, 84) that show their numbers in two corners."""
    image = np.zeros((len(numbers), 84, 84), np.uint8)
    image[:, 0, 0], image[:, -1, -1] = np.asarray(numbers) % 256, np.asarray(numbers) // 256
    return image


def numbers_on(image):
    """The numbers of images (..., 84, 84)."""
    image = np.asarray(image)
    return image[..., 0, 0].astype(int) + 256 * image[..., -1, -1].astype(int)


class NaiveReplay:
    """Every transition with its two whole stacks, of which an image is the number of its insertion. A transition can be
    drawn as long as all its images are among the last `capacity` ones."""

    def __init__(self, capacity, num_envs):
        self.capacity, self.inserted = capacity, 0
        self.stack = [None] * num_envs
        self.game = [-1] * num_envs
        self.transitions = {}  # number of the last image -> (obs, action, reward, done, next_obs)
        self.games = []  # of each the numbers of its transitions, and whether it is over

    def begin(self, games):
        """New games in these environments; returns the numbers of their first images."""
        for i in games:
            if self.game[i] >= 0:
                self.games[self.game[i]][1] = True
            self.stack[i], self.game[i] = (self.inserted,) * 4, len(self.games)
            self.games.append([[], False])
            self.inserted += 1
        return np.arange(self.inserted - len(games), self.inserted)

    def add(self, action, reward, done):
        """A step in every environment; returns the numbers of its images."""
        for i, game in enumerate(self.game):
            obs, self.stack[i] = self.stack[i], (*self.stack[i][1:], self.inserted)
            self.transitions[self.inserted] = (obs, action[i], reward[i], done[i], self.stack[i])
            self.games[game][0].append(self.inserted)
            self.inserted += 1
        return np.arange(self.inserted - len(self.game), self.inserted)

    def kept(self):
        """The transitions that can be drawn."""
        oldest = self.inserted - self.capacity
        return {number: one for number, one in self.transitions.items() if min(one[0]) >= oldest}


def histories(seed, make, capacities=(20, 120)):
    """A random history: yields the real and the naive buffer after each step. Games end by termination or a time limit,
    lives are lost on the way, several games may end in one step, and the buffer is filled several times over."""
    rng = np.random.default_rng(seed)
    num_envs = int(rng.integers(1, 5))
    capacity = int(rng.integers(capacities[0] * num_envs, capacities[1]))
    replay, naive = make(capacity, num_envs), NaiveReplay(capacity, num_envs)
    p_over, p_life = rng.choice([0.02, 0.1, 0.4, 1.0]), rng.choice([0.0, 0.2, 0.6])
    replay.begin(np.arange(num_envs), images(naive.begin(range(num_envs))))
    yield replay, naive
    for _ in range(int(rng.integers(1, 3 * capacity // num_envs))):
        action, reward = rng.integers(18, size=num_envs), rng.integers(-1, 2, num_envs).astype(np.float32)
        over = rng.random(num_envs) < p_over
        terminated = over & (rng.random(num_envs) < 0.5)
        done = terminated | (rng.random(num_envs) < p_life)
        replay.add(images(naive.add(action, reward, done)), action, reward, done)
        replay.begin(np.flatnonzero(over), images(naive.begin(np.flatnonzero(over))))
        yield replay, naive


def assert_same(replay, naive):
    """All rows: which of them can be drawn, and the images of those that can."""
    assert replay.inserted == naive.inserted
    kept, row = naive.kept(), np.arange(max(0, naive.inserted - naive.capacity), naive.inserted)
    index, whole = replay.history(row)
    assert set(row[whole]) == set(kept)
    expected = np.array([(*kept[number][0], number) for number in row[whole]]).reshape(-1, 5)
    np.testing.assert_array_equal(numbers_on(replay.arrays["image"][index[whole]]), expected)
    if kept:
        obs, action, reward, done, next_obs = replay.sample(8, CPU)
        for k, number in enumerate(numbers_on(next_obs[:, -1])):
            expected = kept[number]
            assert tuple(numbers_on(obs[k])) == expected[0] and tuple(numbers_on(next_obs[k])) == expected[4]
            assert (action[k], reward[k], done[k]) == expected[1:4]


def picture(buffer):
    """The rows of the picture in a buffer's docstring: index, number, game, which image of it, and other columns."""
    found = []
    for line in re.findall(r"^ +\d +\d +game \w, \d\w\w .*$", buffer.__doc__, re.M):
        index, number, game, k, rest = re.match(r" +(\d) +(\d) +game (\w), (\d)\w\w (.*)", line).groups()
        columns = re.split("  +[a-z]", rest)[0].split()  # before the remark
        found.append((int(index), int(number), game, int(k), *map(float, columns)))
    return found


def test_the_picture_in_the_docstring_shows_what_it_holds():
    """Game A ends with its sixth image, game B has three so far, and the buffer has room for six."""
    replay = DQN["FrameReplay"](6, 1)
    replay.begin(np.array([0]), images([0]))
    for number, action in enumerate([4, 4, 2, 2, 1, None, 3, 0], 1):
        if action is None:
            replay.begin(np.array([0]), images([number]))
        else:
            replay.add(images([number]), action, 0, number == 5)
    arrays, shown = replay.arrays, picture(DQN["FrameReplay"])
    held = [numbers_on(arrays["image"]), *(arrays[name] for name in ("action", "done", "back"))]
    assert [(number, *more) for _, number, _, _, *more in shown] == [*zip(*map(np.ndarray.tolist, held), strict=True)]
    assert [(game, k) for _, _, game, k, *_ in shown] == [*zip("BBBAAA", (1, 2, 3, 4, 5, 6), strict=True)]
    assert [index for index, *_ in shown] == [number % 6 for _, number, *_ in shown] and replay.inserted == 9
    index, whole = replay.history(np.array([8, 5]))
    assert numbers_on(arrays["image"][index[0]]).tolist() == [6, 6, 6, 7, 8] and whole.tolist() == [True, False]
    assert replay.state.age == 1


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_it_holds_what_a_buffer_of_whole_stacks_holds(count):
    ends, drawn = 0, 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 1])
        for replay, naive in histories(seed, DQN["FrameReplay"]):
            if rng.random() < 0.03:
                assert_same(replay, naive)
        assert_same(replay, naive)
        ends += naive.inserted > naive.capacity
        drawn += len(naive.kept()) > 0
    assert ends > count / 4 and drawn > count / 2  # many have overwritten rows, most can be drawn from


def test_it_draws_all_that_can_be_drawn_alike():
    np.random.seed(0)
    *_, (replay, naive) = histories(10, DQN["FrameReplay"])
    kept = naive.kept()
    assert replay.inserted > replay.capacity and 20 < len(kept) < replay.capacity
    drawn = [numbers_on(replay.sample(64, CPU).next_obs[:, -1]) for _ in range(10 * len(kept))]
    numbers, counts = np.unique(np.concatenate(drawn), return_counts=True)
    assert set(numbers) == set(kept)
    assert np.abs(counts - 640).max() < 4.5 * np.sqrt(640)


def test_a_million_images_fit_into_7_gigabytes():
    """Of 10^9 bytes; the arrays are never touched, so this takes no memory."""
    replay = DQN["FrameReplay"](1_000_000, 8)
    size = sum(array.nbytes for array in (*replay.arrays.values(), replay.state.age))
    assert 7.056e9 < size < 7.2e9


def test_a_batch_is_bytes_and_numbers():
    np.random.seed(0)
    *_, (replay, _) = histories(10, DQN["FrameReplay"])
    batch = replay.sample(3, CPU)
    assert [tuple(x.shape) for x in batch] == [(3, 4, 84, 84), (3,), (3,), (3,), (3, 4, 84, 84)]
    assert [x.dtype for x in batch] == [torch.uint8, torch.int64, torch.float32, torch.float32, torch.uint8]


def test_in_a_larger_buffer_no_image_is_taken_from_before_the_first_row(tmp_path):
    """As `--resume-changed --buffer-size` does it: rows are counted from the oldest one that is left."""
    for seed in range(20):
        *_, (small, naive) = histories(seed, DQN["FrameReplay"], (10, 60))
        large, log = DQN["FrameReplay"](400, len(naive.stack)), ReplayLog(tmp_path / f"log{seed}")
        log.load(large, log.append(small))
        gone, (index, whole) = small.inserted - large.inserted, large.history(np.arange(large.inserted))
        assert set(np.flatnonzero(whole) + gone) == set(naive.kept())
        for row in np.flatnonzero(whole):
            obs = naive.transitions[row + gone][0]
            assert tuple(numbers_on(large.arrays["image"][index[row, :4]])) == obs
