"""MinAtar by gymnax: steps against the game's own, ends of episodes, evaluation's environment, a training."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import comparable, rows

from solorl.envs.open import open_envs

gymnax = pytest.importorskip("gymnax")
SMALL = "--env-id Breakout-MinAtar --num-envs 4 --num-steps 32 --eval-episodes 2 --save-every 512".split()


@pytest.mark.slow
def test_steps_are_those_of_the_game_and_ended_episodes_begin_anew():
    envs = open_envs("Breakout-MinAtar", 6)
    game, params = gymnax.make("Breakout-MinAtar")
    state, obs = envs.reset(jax.random.PRNGKey(0))
    step, step_env = jax.jit(envs.step), jax.jit(jax.vmap(game.step_env, (0, 0, 0, None)))
    rng, ends = np.random.default_rng(0), 0
    assert obs.shape == (6, *envs.single_observation_space.shape) == (6, 400)
    for key in jax.random.split(jax.random.PRNGKey(1), 60):
        action = jnp.asarray(rng.integers(3, size=6))
        keys = jax.vmap(jax.random.split)(jax.random.split(key, 6))[:, 0]  # the other one of each is for a new game
        want_obs, want_state, want_reward, want_done, _ = step_env(keys, state, action, params)
        state, got = step(key, state, action)
        np.testing.assert_array_equal(got.final_obs, want_obs.reshape(6, -1))
        np.testing.assert_array_equal(got.reward, want_reward)
        np.testing.assert_array_equal(got.terminated, want_done)
        for i in range(6):
            if got.terminated[i]:
                assert state.time[i] == 0 and got.obs[i].reshape(10, 10, 4)[1:4, :, 3].all()  # all bricks are back
                assert not np.array_equal(got.obs[i], got.final_obs[i])
                ends += 1
            else:
                assert state.time[i] == want_state.time[i] > 0
                np.testing.assert_array_equal(got.obs[i], got.final_obs[i])
    assert ends >= 10


def test_a_time_limit_is_truncated():
    envs = open_envs("Freeway-MinAtar", 2)
    state, _ = envs.reset(jax.random.PRNGKey(0))
    late = state.replace(time=jnp.array([2_498, 2_499]))
    state, step = envs.step(jax.random.PRNGKey(1), late, jnp.zeros(2, int))
    assert step.truncated.tolist() == [False, True] and not step.terminated.any() and state.time.tolist() == [2_499, 0]


def test_the_environment_of_evaluation_plays_the_same_game():
    """The same keys, the same actions: the same observations, rewards and ends as in training."""
    envs, env = open_envs("Breakout-MinAtar", 1), gym.make("Breakout-MinAtar")  # in this order: the first registers
    obs, _ = env.reset(seed=3)
    state = env.unwrapped._state
    for t in range(200):
        state, want = envs.step(jax.random.split(env.unwrapped._key)[1], state, jnp.array([t % 3]))
        obs, reward, terminated, truncated, _ = env.step(t % 3)
        assert env.observation_space.contains(obs)
        np.testing.assert_array_equal(obs, want.final_obs[0])
        assert (reward, terminated, truncated) == (want.reward[0], want.terminated[0], want.truncated[0])
        if terminated:
            break
    assert terminated and t > 3
    again = [env.reset(seed=seed)[0] for seed in (5, 5, 6, 7, 8, 9)]
    np.testing.assert_array_equal(again[0], again[1])
    assert any(not np.array_equal(again[0], other) for other in again[2:])


@pytest.mark.slow
def test_a_training_counts_its_episodes_and_goes_on_exactly(train, tmp_path):
    whole = train("ppo_jax", *SMALL, "--total-timesteps", 2048)["run"].runs[0].dir
    lengths = [row["charts/episodic_length"] for row in rows(whole, "charts/episodic_length")]
    assert len(lengths) > 50 and min(lengths) >= 4 and sum(lengths) <= 2048
    cut = ["--total-timesteps", 2048, "--eval-every", 512, "--target-return", 0]
    cut = train("ppo_jax", *SMALL, *cut, runs_dir=tmp_path / "cut")["run"].runs[0].dir
    assert rows(cut)[-1]["global_step"] < 2048
    train("ppo_jax", "--resume", cut, "--target-return", "None", "--eval-every", 0)
    episodes = [[row for row in comparable(run) if "charts/episodic_return" in row] for run in (whole, cut)]
    assert episodes[0] == episodes[1]


def test_a_wrong_game_is_one_sentence(train):
    train("ppo_jax", "--env-id", "Brekout-MinAtar", code=2)
    assert "did you mean Breakout-MinAtar" in train.out
