"""Playing policies: those with memory are handed what they remember, and told where an episode begins. The picture."""

import json
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from solorl.run.evaluation import Evaluator, play_episodes
from solorl.run.meter import Diverged
from solorl.run.pictures import draw_learning_curve, film, film_to


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


SIZES = [((210, 160), (630, 480)), ((200, 300), (200, 300)), ((203, 301), (204, 302))]


@pytest.mark.parametrize(("size", "wanted"), SIZES)
def test_small_films_are_enlarged_three_times(tmp_path, size, wanted, capfd, caplog):
    """Height and width of Atari's images, and of others; odd ones become even, and nothing is said."""
    env = Recall()
    env.render = lambda: np.zeros((*size, 3), np.uint8)
    film(env, remember, 5, tmp_path / "film.mp4")
    assert iio.imread(tmp_path / "film.mp4", index=0).shape == (*wanted, 3)
    assert not "".join(capfd.readouterr()) and not caplog.records


class Silent(Recall):
    """Its `render` gives no picture."""

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return None


class Undrawn(Silent):
    """It has no `render`."""

    render = gym.Env.render


@pytest.mark.parametrize("kind", [Silent, Undrawn, Recall])  # the last takes no `render_mode`
def test_an_environment_that_draws_nothing_is_said_to(kind, tmp_path, capsys):
    with mock.patch.dict(gym.registry):
        gym.register("Undrawn-v0", kind, max_episode_steps=3, disable_env_checker=True)
        assert film_to(tmp_path, "a.mp4", 1, lambda obs: np.zeros((len(obs), 1)), gym.make, "Undrawn-v0") is None
    said = capsys.readouterr().err.splitlines()[-1]
    assert "no video" in said and "draws no pictures" in said


# ---------------------------------------------------------------------- the picture
@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """`drawn(*rows)` draws the learning curve of these rows; returns its axes."""
    kept = []

    class Canvas(FigureCanvasAgg):
        def __init__(self, figure):
            super().__init__(figure)
            kept.append(figure)

    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg", Canvas)

    def draw(*rows, episodes=20):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        draw_learning_curve(path, tmp_path / "curve.png", "title", episodes)
        return kept[-1].axes[0]

    return draw


def evaluation_row(step, mean, std):
    return {"global_step": step, "eval/episodic_return": mean, "eval/episodic_return_std": std}


def test_the_band_lies_within_the_returns_of_the_episodes(drawn):
    """CartPole's returns are at most 500; a mean and its standard deviation can be 580."""
    games = [[9.0, 200.0, 500.0, 500.0], [500.0, 500.0, 500.0, 100.0], [9.0, 9.0, 9.0, 500.0], [500.0] * 4]
    rows = (evaluation_row(10 * i, np.mean(game), np.std(game)) for i, game in enumerate(games, 1))
    axes = drawn(*rows, episodes=4)
    band = axes.collections[0].get_paths()[0].vertices
    for i, game in enumerate(games, 1):
        heights, error = band[band[:, 0] == 10 * i, 1], np.std(game, ddof=1) / 2  # the standard error of 4 episodes
        assert np.isclose([heights.min(), heights.max()], [np.mean(game) - error, np.mean(game) + error]).all()
        assert min(game) <= heights.min() + 1e-9 and heights.max() <= max(game) + 1e-9
    assert axes.get_legend().get_texts()[0].get_text() == "greedy evaluation, standard error"
    band = drawn(evaluation_row(10, 490.0, 0.0), evaluation_row(20, 490.0, 0.0), episodes=1).collections[0].get_paths()
    assert (band[0].vertices[:, 1] == 490.0).all()


@pytest.mark.parametrize("step", [0, 300, 30_208, 5_000_000])
def test_one_evaluation_has_a_readable_axis(drawn, step):
    """From 0 to a little more than its step, rather than a few steps around it."""
    axes = drawn(evaluation_row(step, 468.0, 60.0))
    low, high = axes.get_xlim()
    assert low == 0 and step < high <= max(2, 1.1 * step)
    labels = [text.get_text() for text in axes.get_xticklabels()]
    assert len(set(labels)) == len(labels) and max(map(len, labels)) <= 6


def test_the_band_knows_the_episodes_of_its_row(drawn):
    """With `--eval-more` some evaluations have twice as many."""
    axes = drawn(evaluation_row(10, 50.0, 6.0) | {"eval/episodes": 10}, evaluation_row(20, 50.0, 6.0), episodes=5)
    points = axes.collections[0].get_paths()[0].vertices
    assert [points[points[:, 0] == step, 1].max() for step in (10, 20)] == [52.0, 53.0]


def test_episodes_that_another_process_has_played_are_an_evaluation():
    """By their returns and lengths; nothing is played here."""
    evaluator = Evaluator(SimpleNamespace(eval_more=False, target_return=None, eval_episodes=2))
    row = evaluator.evaluate(7, None, None, played=(np.array([1.0, 3.0]), np.array([4, 8])))
    assert row == {"eval/episodic_return": 2.0, "eval/episodic_return_std": 1.0, "eval/episodic_length": 6.0}
    assert evaluator.last == (7, 2.0, 1.0) and evaluator.improved and evaluator.best == 2.0
    with pytest.raises(Diverged):
        evaluator.evaluate(8, None, None, played=(np.array([1.0, np.nan]), np.array([4, 8])))
