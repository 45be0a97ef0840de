"""The JAX environments against Gymnasium's, step for step, and how their episodes end."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solorl.envs.classic import DYNAMICS, JaxEnvs

SPREAD = {"CartPole-v1": [1.5, 1, 0.15, 1], "Acrobot-v1": [2, 2, 4, 6], "Pendulum-v1": [4, 5]}


def random_state(env_id, rng):
    """A state from all over the state space, in Gymnasium's form."""
    if env_id == "MountainCar-v0":
        return rng.uniform(-1.2, 0.6), rng.uniform(-0.07, 0.07)
    return rng.normal(size=len(SPREAD[env_id])) * SPREAD[env_id]


@pytest.mark.parametrize("env_id", DYNAMICS)
def test_dynamics_are_gymnasiums(env_id):
    env, rng = gym.make(env_id).unwrapped, np.random.default_rng(0)
    states, actions, wanted = [], [], []
    while len(states) < 600:
        env.reset(seed=len(states))
        env.state = random_state(env_id, rng)
        for _ in range(8):
            states.append(np.array(env.state, np.float64))
            actions.append(
                rng.uniform(-3, 3, 1).astype(np.float32)
                if env_id == "Pendulum-v1"
                else rng.integers(env.action_space.n)
            )
            wanted.append(env.step(actions[-1])[:3])
            if wanted[-1][2]:
                break
    dynamics = DYNAMICS[env_id]
    state, reward, terminated = jax.jit(dynamics.step)(
        jnp.asarray(np.array(states), jnp.float32), jnp.asarray(np.array(actions))
    )
    obs, rewards, ends = (np.array(column) for column in zip(*wanted, strict=True))
    np.testing.assert_allclose(dynamics.observe(state), obs, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(reward, rewards, rtol=1e-4, atol=1e-4)
    assert (np.asarray(terminated) == ends).mean() > 0.995  # single precision may decide otherwise right at the edge
    assert ends.any() == (env_id != "Pendulum-v1")


@pytest.mark.parametrize("env_id", DYNAMICS)
def test_first_states_are_gymnasiums(env_id):
    """Observations of 2,000 resets lie in the same ranges with the same means and deviations."""
    envs, env = JaxEnvs(env_id, 2_000), gym.make(env_id)
    got = np.asarray(envs.reset(jax.random.PRNGKey(0))[1])
    want = np.array([env.reset(seed=i)[0] for i in range(2_000)])
    spread = want.std(0) + 1e-9
    assert (np.abs(got.mean(0) - want.mean(0)) < 0.12 * spread + 1e-6).all()
    np.testing.assert_allclose(got.std(0), want.std(0), rtol=0.08, atol=1e-6)
    assert (np.abs(got.min(0) - want.min(0)) < 0.1 * spread + 1e-6).all()
    assert (np.abs(got.max(0) - want.max(0)) < 0.1 * spread + 1e-6).all()


def test_dynamics_of_a_module_of_ones_own():
    """Its id is `module:Name`, the time limit that of its registration."""
    envs = JaxEnvs("probes:ShortCartPole-v0", 2, DYNAMICS["CartPole-v1"])
    assert envs.max_steps == gym.make("probes:ShortCartPole-v0").spec.max_episode_steps < 500


def play(env_id, num_envs, num_steps, action):
    """All steps of a constant action, (num_steps, num_envs, ...) each, and where an episode that ends with a step would
    start again."""
    envs = JaxEnvs(env_id, num_envs)
    state, _ = envs.reset(jax.random.PRNGKey(1))
    keys = jax.random.split(jax.random.PRNGKey(2), num_steps)
    actions = jnp.full((num_envs, *envs.single_action_space.shape), action)
    steps = jax.lax.scan(lambda state, key: envs.step(key, state, actions), state, keys)[1]
    fresh = jax.vmap(lambda key: envs.reset(key)[1])(keys)
    return jax.tree.map(np.asarray, steps), np.asarray(fresh)


def test_an_episode_that_ends_starts_anew_in_the_same_step():
    step, fresh = play("CartPole-v1", 5, 100, 1)
    done = step.terminated | step.truncated
    assert done.sum() > 20 and not step.truncated.any()
    np.testing.assert_array_equal(step.obs[done], fresh[done])  # the new episode's first observation
    np.testing.assert_array_equal(step.obs[~done], step.final_obs[~done])
    fallen = np.abs(step.final_obs[..., 2]) > 12 * 2 * np.pi / 360
    np.testing.assert_array_equal(fallen | (np.abs(step.final_obs[..., 0]) > 2.4), done)
    assert (step.reward == 1).all()
    assert len(np.unique(step.obs[done], axis=0)) == done.sum()  # no two episodes start alike


def test_a_time_limit_truncates_and_counts_from_the_start_of_each_episode():
    step, _ = play("Pendulum-v1", 3, 450, 0.0)
    ends = np.zeros(450, bool)
    ends[[199, 399]] = True
    np.testing.assert_array_equal(step.truncated, np.repeat(ends[:, None], 3, 1))
    assert not step.terminated.any()


def test_an_end_at_the_time_limit_is_an_end():
    """Terminated and truncated exclude each other, also where both would be due."""
    envs = JaxEnvs("CartPole-v1", 1)
    late = (jnp.array([[2.39, 5.0, 0.0, 0.0]]), jnp.array([499]))
    _, step = envs.step(jax.random.PRNGKey(0), late, jnp.array([1]))
    assert step.terminated.all() and not step.truncated.any()
