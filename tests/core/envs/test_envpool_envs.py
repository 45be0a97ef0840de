"""EnvPool inside compiled code: its steps, how its episodes end, the scripts on it, and runs that are resumed."""

import sys

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import comparable, rows

from solorl.envs.classic import DYNAMICS, JaxEnvs
from solorl.envs.envpool_jax import EnvPoolEnvs
from solorl.envs.open import open_envs

envpool = pytest.importorskip("envpool")
PPO = "--env-id LunarLander-v3 --num-envs 3 --num-steps 64 --total-timesteps 3072 --eval-episodes 1".split()


def play(env_id, actions, seed=0):
    """First observations (num_envs, ...) and all steps (num_steps, num_envs, ...) of the actions, compiled."""
    envs = EnvPoolEnvs(env_id, actions.shape[1])
    state, obs = jax.jit(envs.reset)(jax.random.PRNGKey(seed))
    scan = jax.jit(lambda state, actions: jax.lax.scan(lambda s, a: envs.step(None, s, a), state, actions))
    return np.asarray(obs), jax.tree.map(np.asarray, scan(state, actions)[1])


def by_hand(env_id, actions, seed):
    """The same with EnvPool's own interface, whose `reset` takes the numbers of environments."""
    pool = envpool.make_gymnasium(env_id, num_envs=actions.shape[1], seed=seed)
    first, steps = pool.reset()[0], []
    for action in actions:
        final_obs, reward, terminated, truncated, _ = pool.step(action)
        obs, done = final_obs.copy(), terminated | truncated
        if done.any():
            obs[done] = pool.reset(np.flatnonzero(done))[0]
        steps.append((obs, reward, terminated, truncated, final_obs))
    return first, [np.stack(column) for column in zip(*steps, strict=True)]


@pytest.mark.parametrize(
    ("env_id", "num_steps", "dtype"),
    [("LunarLander-v3", 400, np.int32), ("HalfCheetah-v5", 1_050, np.float64), ("MountainCar-v0", 450, np.int32)],
)
def test_steps_are_those_of_envpool(env_id, num_steps, dtype):
    """Three environments, several ends of episodes; single precision in, EnvPool's own out."""
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (num_steps, 3, 6)).astype(np.float32)
    actions = actions if env_id == "HalfCheetah-v5" else rng.integers(3, size=(num_steps, 3))
    first, steps = play(env_id, jnp.asarray(actions), seed=5)
    want_first, want = by_hand(env_id, actions.astype(dtype), int(jax.random.PRNGKey(5)[1]) >> 1)
    np.testing.assert_allclose(first, want_first, rtol=1e-6)
    assert steps.lives is None
    for got, expected in zip(steps[:5], want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    ends = steps.terminated if env_id == "LunarLander-v3" else steps.truncated
    assert ends.sum() >= 3 and ends.sum() == (steps.terminated | steps.truncated).sum()


def test_every_step_is_a_transition():
    """Each leads from the observation before it to `final_obs` by CartPole's equations, also after the ends."""
    actions = jnp.asarray(np.random.default_rng(0).integers(2, size=(300, 4)))
    first, step = play("CartPole-v1", actions)
    before = np.concatenate([first[None], step.obs[:-1]]).reshape(-1, 4)
    after, reward, terminated = DYNAMICS["CartPole-v1"].step(jnp.asarray(before), actions.reshape(-1))
    assert step.terminated.sum() > 30
    np.testing.assert_allclose(step.final_obs.reshape(-1, 4), after, atol=1e-5)
    np.testing.assert_array_equal(step.terminated.reshape(-1), terminated)
    np.testing.assert_array_equal(step.reward.reshape(-1), reward)
    assert (np.abs(step.obs[step.terminated]) <= 0.05).all()  # where episodes start
    np.testing.assert_array_equal(step.obs[~step.terminated], step.final_obs[~step.terminated])


def test_an_end_of_the_task_on_the_last_step_allowed_is_one(monkeypatch):
    """Always to the right CartPole falls within eleven steps; with the limit there it still falls."""
    actions = jnp.ones((30, 4), int)
    falls = int(np.flatnonzero(play("CartPole-v1", actions)[1].terminated[:, 0])[0]) + 1
    for limit, ends in ((falls, "terminated"), (falls - 1, "truncated")):
        monkeypatch.setattr(gym.spec("CartPole-v1"), "max_episode_steps", limit)
        step = play("CartPole-v1", actions)[1]
        assert [bool(getattr(step, name)[limit - 1, 0]) for name in ("terminated", "truncated")] == [
            ends == "terminated",
            ends == "truncated",
        ]
        assert not (step.terminated & step.truncated).any()
        assert not (step.terminated | step.truncated)[: limit - 1, 0].any()
        assert (np.abs(step.obs[limit - 1, 0]) <= 0.05).all()  # where episodes start


def test_actions_are_clipped():
    big, edge = jnp.full((20, 2, 6), 3.0), jnp.full((20, 2, 6), 1.0)
    np.testing.assert_array_equal(play("HalfCheetah-v5", big)[1].reward, play("HalfCheetah-v5", edge)[1].reward)


def test_the_key_decides_how_episodes_start():
    a, again, b = (play("LunarLander-v3", jnp.zeros((2, 2), int), seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, again)
    assert not np.isclose(a, b).all(1).any() and not np.isclose(a[0], a[1]).all()


def test_environments_in_jax_come_first():
    assert isinstance(open_envs("CartPole-v1", 1), JaxEnvs)
    assert isinstance(open_envs("LunarLander-v3", 1), EnvPoolEnvs)


@pytest.mark.slow
def test_seeds_are_trained_alike_alone_and_together(train, tmp_path):
    train("ppo_jax", *PPO, "--num-seeds", 2)
    train("ppo_jax", *PPO, "--seed", 2, runs_dir=tmp_path / "alone")
    together = sorted((tmp_path / "runs").iterdir(), key=lambda folder: folder.name.split("__")[2])
    (alone,) = (tmp_path / "alone").iterdir()
    assert comparable(together[1]) == comparable(alone) != comparable(together[0])
    lengths = [row["charts/episodic_length"] for row in rows(alone, "charts/episodic_length")]
    assert len(lengths) > 15 and 50 < np.mean(lengths) < 200  # of random landings


@pytest.mark.slow
def test_the_replay_buffer_holds_what_happened(train):
    flags = "--env-id LunarLanderContinuous-v3 --total-timesteps 700 --learning-starts 300 --batch-size 16".split()
    run = train("sac_continuous_action_jax", *flags, "--eval-episodes", 1)["run"]
    replay = jax.tree.map(np.asarray, run.trainings.of(0).replay)
    obs, next_obs, done = replay.obs, replay.next_obs, replay.done.astype(bool)
    assert done.sum() >= 3
    np.testing.assert_array_equal(obs[1:][~done[:-1]], next_obs[:-1][~done[:-1]])
    assert (np.abs(obs[1:][done[:-1], 0]) < 0.02).all() and (obs[1:][done[:-1], 1] > 1.3).all()  # starts: up, amid
    lengths = [row["charts/episodic_length"] for row in rows(run.runs[0].dir, "charts/episodic_length")]
    np.testing.assert_array_equal(np.cumsum(lengths), np.flatnonzero(done) + 1)


@pytest.mark.slow
def test_a_resumed_run_starts_its_episodes_again(train):
    """And says so: no transition leads from the old episode into the new one, no return counts both."""
    flags = "--env-id LunarLanderContinuous-v3 --total-timesteps 900 --learning-starts 1000 --save-every 500".split()
    more = ["--eval-episodes", 1, "--save-replay"]
    folder = (
        train("sac_continuous_action_jax", *flags, *more, "--target-return", -1e9, "--eval-every", 500)["run"]
        .runs[0]
        .dir
    )
    assert rows(folder)[-1]["global_step"] == 500
    run = train("sac_continuous_action_jax", "--resume", folder, "--target-return", "None")["run"]
    assert "LunarLanderContinuous-v3 cannot be saved, so their running episodes start again" in train.out
    replay = jax.tree.map(np.asarray, run.trainings.of(0).replay)
    obs = replay.obs
    assert (obs[:, 1] != 0).all() and len(obs) == 900
    assert abs(obs[500, 0]) < 0.02 and obs[500, 1] > 1.3 and not np.array_equal(obs[500], obs[0])
    ends = np.flatnonzero(replay.done) + 1
    last = [row for row in rows(folder, "charts/episodic_length") if row["global_step"] > 500]
    assert [row["global_step"] for row in last] == list(ends[ends > 500])
    assert last[0]["charts/episodic_length"] == last[0]["global_step"] - 500


def test_wrong_environments_are_one_sentence(train, monkeypatch):
    train("ppo_jax", "--env-id", "LunarLander-v2", code=2)
    train("ppo_jax", "--env-id", "probes:Forever-v0", code=2)
    assert train.out.count("\n") == 1 and "probes:Forever-v0 is not written in JAX" in train.out
    monkeypatch.setitem(sys.modules, "envpool", None)
    train("ppo_jax", "--env-id", "LunarLander-v3", code=2)
    assert "pip install 'solorl[envpool]'" in train.out
