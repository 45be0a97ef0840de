"""EnvPool's environments one by one, with Gymnasium's ids: against EnvPool itself, masks, vectors, resuming."""

import sys

import gymnasium as gym
import numpy as np
import pytest
from conftest import comparable, drop_last_checkpoint

from solorl.envs.ids import check_env_id
from solorl.errors import UsageError

envpool = pytest.importorskip("envpool")
import solorl.envs.envpool_env  # noqa: E402, F401 registers the ids
from solorl.envs.envpool import EnvPoolVectorEnv, flat, flat_space  # noqa: E402

SMALL = "--num-envs 2 --num-steps 32 --num-minibatches 2 --eval-episodes 2 --eval-every 0".split()


def test_every_id_of_envpool_is_known():
    """A slash is a dot: an id of Gymnasium has one namespace."""
    found = {env_id for env_id in gym.registry if env_id.startswith("envpool/")}
    assert found == {f"envpool/{env_id.replace('/', '.')}" for env_id in envpool.list_all_envs()}
    check_env_id("envpool/Jumanji.Snake-v1")
    with pytest.raises(UsageError, match=r"there is no environment envpool/Snak-v1; did you mean envpool/Snake-v1"):
        check_env_id("envpool/Snak-v1")


def test_without_envpool_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    monkeypatch.delitem(sys.modules, "solorl.envs.envpool_env")
    with pytest.raises(UsageError, match=r"envpool/Snake-v1 needs .*: pip install 'solorl\[envpool\]'"):
        check_env_id("envpool/Snake-v1")


def test_a_dict_becomes_a_vector_of_all_but_the_mask():
    """In the order of the space; a number of a `Discrete` space as a fraction."""
    inner = gym.spaces.Dict(steps=gym.spaces.Discrete(4), action_mask=gym.spaces.MultiBinary(3))
    space = gym.spaces.Dict(board=gym.spaces.Box(-9, 9, (2, 2), np.int32), inner=inner)
    obs = {
        "inner": {"action_mask": np.ones((2, 3)), "steps": np.array([1, 3])},
        "board": np.arange(8, dtype=np.int32).reshape(2, 2, 2),
    }
    got = flat(space, obs)
    np.testing.assert_array_equal(got, [[0, 1, 2, 3, 0.25], [4, 5, 6, 7, 0.75]])
    assert (
        got.dtype == np.float32 and flat_space(space).shape == (5,) and all(flat_space(space).contains(x) for x in got)
    )
    image = gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)
    assert flat_space(image) is image


def test_games_are_those_of_envpool():
    """Boards, rewards, masks and ends, also of the games after the first; what is allowed at the end is nothing."""
    env, rng = gym.make("envpool/Game2048-v1"), np.random.default_rng(0)
    for seed in range(3):
        obs, info = env.reset(seed=seed)
        inner = int(np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).integers(2**31))
        number = int(np.random.SeedSequence(inner).generate_state(1)[0]) >> 1
        pool = envpool.make_gymnasium("Game2048-v1", num_envs=1, seed=number, env_seed=[number])
        expected, over = pool.reset()[0], False
        while not over:
            np.testing.assert_array_equal(obs.reshape(4, 4), expected["board"][0])
            np.testing.assert_array_equal(info["action_mask"], expected["action_mask"][0].astype(bool))
            action = rng.choice(np.flatnonzero(info["action_mask"]))
            obs, reward, terminated, truncated, info = env.step(action)
            expected, wanted, over, _, _ = pool.step(np.array([action]))
            assert (reward, terminated, truncated) == (wanted[0], over[0], False)
            assert env.observation_space.contains(obs)
        np.testing.assert_array_equal(obs.reshape(4, 4), expected["board"][0])
        assert not info["action_mask"].any()


def test_side_by_side_the_masks_are_those_of_the_current_observations():
    """Also in the vector environment of EnvPool, where a game ends and the next one begins in the same step."""
    envs, rng, ends = EnvPoolVectorEnv("Game2048-v1", 3), np.random.default_rng(0), 0
    envs.reset(seed=[1, 2, 3])
    for _ in range(150):
        action = np.array([rng.choice(np.flatnonzero(mask)) for mask in envs.action_mask])
        obs, _, terminated, _, infos = envs.step(action)
        assert obs.shape == (3, 16) and envs.action_mask.shape == (3, 4) and envs.action_mask.any(1).all()
        for i in np.flatnonzero(terminated):
            assert not infos["final_info"]["action_mask"][i].any() and infos["final_obs"][i].shape == (16,)
            assert (obs[i] > 0).sum() == 1 and (infos["final_obs"][i] > 0).all()  # a new board, a full one
            ends += 1
    assert ends >= 2


@pytest.mark.parametrize("env_id", ["envpool/Game2048-v1", "envpool/Snake-v1"])
def test_the_masked_file_plays_what_is_allowed(env_id, train):
    v = train("ppo_masked", *SMALL, "--env-id", env_id, "--total-timesteps", 256)
    assert v["mask"].shape == (32, 2, 4) and not v["mask"].all()
    assert np.take_along_axis(v["mask"], v["action"][..., None], 2).all()
    assert v["run"].evaluator.score is not None


def test_resumed_equals_uninterrupted(train):
    """In the middle of a game: EnvPool cannot tell its state, but plays it again from its seed."""
    flags = [*SMALL, "--env-id", "envpool/Game2048-v1", "--total-timesteps", 512, "--save-every", 256]
    whole = train("ppo_masked", *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    again = train("ppo_masked", "--resume", run_dir)
    assert again["run"].checkpoints.resumed["step"] == 256 and comparable(run_dir) == expected
    assert list(again["run"].restarted) == [] and np.array_equal(again["obs"], whole["obs"])
