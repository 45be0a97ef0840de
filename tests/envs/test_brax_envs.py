"""Brax: steps, ends of episodes, evaluation's environment, a training. None compiles physics."""

import importlib.util

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import comparable, rows

from solorl.envs.open import open_envs

if importlib.util.find_spec("brax") is None:
    pytest.skip("Brax is an extra", allow_module_level=True)
from solorl.envs import brax as brax_envs

SMALL = "--env-id brax/fast --num-envs 4 --num-steps 64 --eval-episodes 2 --save-every 1024".split()


@pytest.fixture
def drop(monkeypatch):
    """A body that starts at a random height and sinks by 1 and the action; over below the ground."""
    from brax.envs.base import Env, State

    class Drop(Env):
        observation_size, action_size, backend = 2, 1, "generalized"

        def reset(self, rng):
            height = jax.random.uniform(rng, minval=3.0, maxval=9.0)
            return State(None, jnp.array([height, 0.0]), jnp.float32(0), jnp.float32(0))

        def step(self, state, action):
            obs = state.obs - jnp.array([1 + action[0], -1.0])
            return state.replace(obs=obs, reward=obs[0], done=(obs[0] < 0).astype(jnp.float32))

    monkeypatch.setattr(brax_envs, "_make", lambda env_id: Drop())


def test_an_episode_that_ends_begins_anew_in_a_state_of_its_own(drop):
    envs = open_envs("brax/drop", 5)
    state, obs = envs.reset(jax.random.PRNGKey(0))
    assert len(np.unique(obs[:, 0])) == 5  # each body has its own random numbers
    starts, step = [], jax.jit(envs.step)
    action = jnp.array([[0.0], [0.5], [1.0], [7.0], [-7.0]])  # the last two are clipped
    for key in jax.random.split(jax.random.PRNGKey(1), 40):
        state, got = step(key, state, action)
        height = obs[:, 0] - 1 - np.array([0.0, 0.5, 1.0, 1.0, -1.0])
        np.testing.assert_allclose(got.final_obs, np.stack([height, obs[:, 1] + 1], 1), atol=1e-5)
        np.testing.assert_allclose(got.reward, height, atol=1e-5)
        np.testing.assert_array_equal(got.terminated, height < 0)
        assert not got.truncated.any()
        for i in range(5):
            if got.terminated[i]:
                starts.append(float(got.obs[i, 0]))
                assert 3 <= starts[-1] < 9 and got.obs[i, 1] == 0 and state[1][i] == 0
            else:
                np.testing.assert_array_equal(got.obs[i], got.final_obs[i])
        obs = got.obs
    assert len(starts) > 15 and len(set(starts)) == len(starts)
    assert obs[4, 1] == 40 == state[1][4]  # never ended


def test_a_time_limit_is_truncated_and_an_end_at_the_limit_terminated(drop):
    envs = open_envs("brax/drop", 3)
    (inner, _), _ = envs.reset(jax.random.PRNGKey(0))
    inner = inner.replace(obs=jnp.array([[5.0, 0.0], [5.0, 0.0], [0.5, 0.0]]))
    state, step = envs.step(jax.random.PRNGKey(1), (inner, jnp.array([998, 999, 999])), jnp.zeros((3, 1)))
    assert step.truncated.tolist() == [False, True, False] and step.terminated.tolist() == [False, False, True]
    assert state[1].tolist() == [999, 0, 0]
    np.testing.assert_allclose(step.final_obs[:, 0], [4.0, 4.0, -0.5])


def test_the_environment_of_evaluation_is_the_body_of_training():
    """`fast` moves by its own equations: speed grows by 0.02 with every positive action."""
    from solorl.envs.ids import check_env_id

    check_env_id("brax/fast")
    env = gym.make("brax/fast")
    obs, _ = env.reset(seed=1)
    position = speed = 0.0
    for t in range(1_000):
        assert env.observation_space.contains(obs) and env.action_space.shape == (1,)
        np.testing.assert_allclose(obs, [position, speed], rtol=1e-4, atol=1e-5)
        action = np.array([1.0 if t % 3 else -1.0], np.float32)
        speed += 0.02 * (t % 3 > 0)
        position += 0.02 * speed
        obs, reward, terminated, truncated, _ = env.step(action)
        assert isinstance(reward, float) and (terminated, truncated) == (False, t == 999)
    np.testing.assert_allclose(obs, [position, speed], rtol=1e-4)  # where the step led, not the next episode


@pytest.mark.slow
def test_a_training_goes_on_exactly(train, tmp_path):
    whole = train("ppo_continuous_action_jax", *SMALL, "--total-timesteps", 8192)["run"].runs[0].dir
    assert {row["charts/episodic_length"] for row in rows(whole, "charts/episodic_length")} == {1_000}
    cut = ["--total-timesteps", 8192, "--eval-every", 2048, "--target-return", -1_000]
    cut = train("ppo_continuous_action_jax", *SMALL, *cut, runs_dir=tmp_path / "cut")["run"].runs[0].dir
    assert rows(cut)[-1]["global_step"] < 8192
    train("ppo_continuous_action_jax", "--resume", cut, "--target-return", "None", "--eval-every", 0)
    losses = [[row for row in comparable(run) if "losses/value_loss" in row][-1] for run in (whole, cut)]
    assert losses[0]["losses/value_loss"] == losses[1]["losses/value_loss"]


def test_a_wrong_body_is_one_sentence(train):
    train("ppo_continuous_action_jax", "--env-id", "brax/aant", code=2)
    assert "did you mean brax/ant" in train.out
    train("ppo_continuous_action_jax", "--env-id", "brax/swimmer-spring", code=2)  # an engine that this body has not
    assert "there is no environment brax/swimmer-spring" in train.out
