"""Playing policies: those with memory are handed what they remember, and told where an episode begins."""

import gymnasium as gym
import numpy as np

from solorl.run.evaluation import film, play_episodes


class Recall(gym.Env):
    """Shows a number in [0, 1] with the first observation only; the reward of every step is 1 where the action repeats
    it. Episodes last `length` steps."""

    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.steps = np.float32(self.np_random.random()), 0
        return np.array([self.number, 1.0], np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), float(action[0] == self.number), self.steps == self.length, False, {}

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


def remember(obs, state, first):
    """Repeats what the first observation of the episode showed; refuses to be asked out of order."""
    assert (state is None) == bool(first.all()) and len(first) == len(obs)
    state = np.where(first[:, None], obs[:, :1], 0.0 if state is None else state)
    return state, state


def forget(obs):
    return obs[:, :1]


def test_a_policy_with_memory_gets_its_state_back():
    envs = [Recall(length) for length in (1, 3, 5)]  # episodes of different lengths side by side
    returns, lengths = play_episodes(envs, remember, [1, 2, 3])
    assert returns.tolist() == lengths.tolist() == [1, 3, 5]
    assert play_episodes(envs, forget, [1, 2, 3])[0].tolist() == [1, 1, 1]


def test_each_evaluation_begins_without_memory():
    for _ in range(2):  # a state kept from the first would be refused by `remember`
        assert play_episodes([Recall()], remember, [7])[0].tolist() == [4]


def test_a_film_keeps_the_memory_too(tmp_path):
    assert film(Recall(), remember, 5, tmp_path / "film.mp4") == 4
    assert (tmp_path / "film.mp4").stat().st_size > 0
