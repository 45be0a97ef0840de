"""Games of Procgen through EnvPoolVectorEnv, against EnvPool itself: levels, time limits, last images, Qt."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, environment

from solorl.envs.envpool import EnvPoolVectorEnv
from solorl.envs.load_envpool import import_envpool

pytest.importorskip("envpool")
pytest.importorskip("PyQt5")
envpool = import_envpool()
NOTHING = 4  # the action that does nothing


def raw(env_id, seed, **options):
    """EnvPool's own game with the seed of ours, without a limit of EnvPool's."""
    seed = int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1
    return envpool.make_gymnasium(env_id, num_envs=1, env_seed=[seed], max_episode_steps=10_000, **options)


def test_qt_is_loaded_before_envpool():
    """In a fresh process; another import than by `import_envpool` would leave EnvPool without Qt for good."""
    program = "from solorl.envs.ids import is_procgen; print(is_procgen('CoinrunEasy-v0'), is_procgen('Pong-v5'))"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True False\n", "")
    others = [path for path in (ROOT / "solorl").rglob("*.py") if "import envpool\n" in path.read_text()]
    assert not others


def test_without_pyqt5_only_envpool_is_imported():
    program = (
        "import sys; sys.modules['PyQt5'] = None; from solorl.envs.load_envpool import import_envpool;"
        "print('Pong-v5' in import_envpool().list_all_envs())"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize(("env_id", "limit"), [("MazeEasy-v0", 500), ("CoinrunHard-v0", 1000)])
def test_the_games_own_limit_is_a_time_limit(env_id, limit):
    """EnvPool tells the end of the task after `limit` steps in which nothing has happened. Ours is one step shorter and
    told as a time limit, with the last image of the level that was played."""
    envs, pool = EnvPoolVectorEnv(env_id, 1, num_threads=1), raw(env_id, 7)
    obs, _ = envs.reset(seed=[7])
    want, info = pool.reset()
    level = info["level_seed"][0]
    np.testing.assert_array_equal(obs, want)
    for _ in range(limit - 1):
        obs, reward, terminated, truncated, infos = envs.step([NOTHING])
        want, want_reward, over, _, info = pool.step(np.array([NOTHING]))
        assert not terminated[0] and not over[0] and reward == want_reward and info["level_seed"][0] == level
    assert truncated[0] and envs.max_steps == limit - 1
    np.testing.assert_array_equal(infos["final_obs"][0], want[0])
    assert not np.array_equal(obs, want)
    last, _, over, cut, info = pool.step(np.array([NOTHING]))
    assert over[0] and not cut[0] and info["level_seed"][0] == level and np.array_equal(last, want)
    envs.close()


def test_a_longer_limit_than_the_games_own_is_not_taken():
    assert EnvPoolVectorEnv("BigfishEasy-v0", 1, max_steps=10_000).max_steps == 5_999
    assert EnvPoolVectorEnv("BigfishEasy-v0", 1, max_steps=300).max_steps == 300


def test_levels_are_those_asked_for(monkeypatch):
    """Of many games; all of them are played at some time."""
    envs = EnvPoolVectorEnv("StarpilotEasy-v0", 64, num_threads=1, num_levels=5, start_level=30)
    envs.reset(seed=1)
    levels = set()
    for _ in range(5):
        levels |= set(envs.pool.reset()[1]["level_seed"].tolist())
    assert levels == set(range(30, 35))


def test_seeds_decide_the_levels():
    firsts = []
    for seed in (1, 1, 2):
        envs = EnvPoolVectorEnv("CoinrunEasy-v0", 4, num_threads=1, num_levels=200)
        firsts.append(envs.reset(seed=seed)[0])
    np.testing.assert_array_equal(firsts[0], firsts[1])
    assert not np.array_equal(firsts[0], firsts[2])
