"""Gymnasium's robots in MJX: steps against Gymnasium's own, resets, ends, time limits, saved states, trainings.

Compiling MJX takes minutes. Where the physics does not matter, it is `easy`."""

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import comparable, drop_last_checkpoint

from solorl.checkpoints import checkpoint
from solorl.envs import ids
from solorl.envs import open as opening
from solorl.envs.open import open_envs
from solorl.errors import UsageError

if not importlib.util.find_spec("mujoco") or not importlib.util.find_spec("mujoco.mjx"):
    pytest.skip("MJX is an extra", allow_module_level=True)
import mujoco

from solorl.envs import mjx as robots

ROBOTS = list(robots.TASKS)
# Where the compiler does little: a part of the time that it takes else.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SMALL = "--env-id mjx/Hopper --num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 2 --total-timesteps 128 "
SMALL += "--eval-episodes 1 --log-every 32"


class Data(NamedTuple):
    """The parts of MJX's `Data` that are used."""

    qpos: Any
    qvel: Any
    qacc_warmstart: Any
    ctrl: Any
    xpos: Any
    cfrc_ext: Any


class Fields(Data):
    replace, _impl = Data._replace, property(lambda data: data)


def forget():
    robots._dynamics.cache_clear()
    opening.compiled.cache_clear()


@pytest.fixture
def easy(monkeypatch):
    """Physics of a few operations in the place of MJX: the rules are ours, whatever moves the bodies."""

    def step(model, data):
        qvel = (0.95 * data.qvel).at[-model.nu :].add(0.3 * data.ctrl)
        qpos = data.qpos.at[: model.nv].add(0.01 * qvel)
        forces = 2 * jnp.sin(jnp.arange(6.0 * model.nbody) + data.qpos[0]).reshape(-1, 6).at[0].set(0)
        xpos = data.xpos.at[1].set(data.qpos[:3])  # from before the move, as MuJoCo's
        return Fields(qpos, qvel, qvel - data.qvel, data.ctrl, xpos, forces)

    def make_data(model, impl):
        host = mujoco.MjData(model)
        return Fields(*(jnp.zeros(getattr(host, name).shape) for name in Data._fields))

    fake = SimpleNamespace(put_model=lambda model, impl: model, make_data=make_data, step=step)
    fake.rne_postconstraint = lambda model, data: data
    forget()
    monkeypatch.setattr(mujoco, "mjx", fake, raising=False)
    yield
    forget()


@pytest.mark.parametrize("name", ROBOTS)
def test_observations_rewards_and_ends_are_gymnasiums(name, easy):
    """Those that Gymnasium's methods give for the states to which the bodies moved; many of these are not healthy."""
    envs, own = open_envs(f"mjx/{name}", 200), gym.make(f"{name}-v5").unwrapped
    assert own.observation_space.shape == envs.single_observation_space.shape
    (body, _), _ = envs.reset(jax.random.PRNGKey(3))
    spread = lambda key, like, size: like + size * jax.random.normal(jax.random.PRNGKey(key), like.shape)  # noqa: E731
    size = jnp.geomspace(0.01, 1, 200)[:, None]
    body = body._replace(qpos=spread(1, body.qpos, size), qvel=spread(2, body.qvel, 80 * size))
    space = own.action_space
    action = 1.3 * jax.random.uniform(jax.random.PRNGKey(4), (200, *space.shape), minval=space.low, maxval=space.high)
    moved, reward, terminated = jax.jit(envs.dynamics.step)(body, action)
    obs = np.asarray(envs.dynamics.observe(moved))
    body, action, moved, reward, terminated = jax.device_get((body, action, moved, reward, terminated))
    forces = moved.forces.reshape(200, -1, 6) if name == "Ant" else moved.forces
    for i in range(200):
        own.data.qpos[:], own.data.qvel[:] = moved.qpos[i], moved.qvel[i]
        if name == "Ant":
            own.data.cfrc_ext[1:] = forces[i]
        np.testing.assert_allclose(obs[i], own._get_obs(), rtol=1e-6)
        velocity = (np.float64(moved.x[i]) - np.float64(body.x[i])) / own.dt
        want, _ = own._get_rew(velocity, np.clip(action[i], space.low, space.high))
        np.testing.assert_allclose(reward[i], want, rtol=1e-3, atol=1e-3)
        assert terminated[i] == (name != "HalfCheetah" and not own.is_healthy)
    assert 30 < terminated.sum() < 170 or name == "HalfCheetah"
    assert (np.abs(forces) == 1).any() == (name == "Ant")
    if name == "Ant":  # the place of the torso is one step late in the simulator
        assert (np.asarray(moved.x) != np.asarray(moved.qpos[:, 0])).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ROBOTS)
def test_the_physics_is_mujocos(name):
    """Each step of three bodies from our resets next to Gymnasium's from the same states, random actions, some beyond
    the bounds. Over several steps contacts multiply what single precision lacks, on each machine in another way.
    MJX turns the pyramid of friction of a steep capsule on the floor, as Ant's feet are, another way than MuJoCo."""
    forget()
    envs = open_envs(f"mjx/{name}", 3)
    rng, forces, terminated, equal = np.random.default_rng(5), 0, np.zeros(3, bool), []
    state, obs = envs.reset(jax.random.PRNGKey(3))
    own = [gym.make(f"{name}-v5") for _ in range(3)]
    for i, env in enumerate(own):
        env.reset(seed=0)
        mujoco.mj_resetData(env.unwrapped.model, env.unwrapped.data)
        env.unwrapped.set_state(np.asarray(state[0].qpos[i], float), np.asarray(state[0].qvel[i], float))
        np.testing.assert_allclose(env.unwrapped._get_obs(), obs[i], atol=1e-6)
    space, step = own[0].action_space, jax.jit(envs.step, compiler_options=QUICKLY)
    for t in range(20):
        action = (1.3 * rng.uniform(space.low, space.high, (3, *space.shape))).astype(np.float32)
        body = jax.device_get(state[0])
        state, got = step(jax.random.PRNGKey(t), state, action)
        for i, env in enumerate(own):
            data = env.unwrapped.data
            data.qpos[:], data.qvel[:], data.qacc_warmstart[:] = body.qpos[i], body.qvel[i], body.warmstart[i]
            data.xpos[1, 0] = body.x[i]  # from where Ant counts
            obs, reward, terminated[i], *_ = env.step(action[i].clip(space.low, space.high))
            ours, theirs = np.append(got.final_obs[i], got.reward[i]), np.append(obs, reward)
            equal.append(np.allclose(ours, theirs, rtol=1e-3, atol=1e-3))
            assert equal[-1] or name == "Ant", np.abs(ours - theirs).max()
            forces += np.abs(obs[27:]).sum()
        np.testing.assert_array_equal(got.terminated, terminated)
        if terminated.any():
            break
    assert t >= 9 and (forces > 5) == (name == "Ant") and np.mean(equal) > 0.5, np.mean(equal)


@pytest.mark.parametrize("name", ROBOTS)
def test_resets_are_drawn_as_gymnasiums(name, easy):
    """Same bounds or, of normal numbers, the same spread; each body has its own."""
    envs = open_envs(f"mjx/{name}", 400)
    (body, steps), obs = envs.reset(jax.random.PRNGKey(2))
    own = gym.make(f"{name}-v5").unwrapped
    drawn = [(own.reset(seed=seed), own.data.qpos.copy(), own.data.qvel.copy())[1:] for seed in range(400)]
    for ours, theirs, begin in ((body.qpos, 0, own.init_qpos), (body.qvel, 1, own.init_qvel)):
        ours, theirs = np.asarray(ours) - begin, np.stack([each[theirs] for each in drawn]) - begin
        assert len(np.unique(ours[:, 0])) > 390
        np.testing.assert_allclose(ours.std(), theirs.std(), rtol=0.05)
        np.testing.assert_allclose(np.abs(ours).max(), np.abs(theirs).max(), rtol=0.2)
        assert abs(ours.mean()) < 0.1 * theirs.std()
    assert not steps.any() and not np.asarray(obs)[:, 27:].any()
    again = envs.reset(jax.random.PRNGKey(2))[1]
    np.testing.assert_array_equal(obs, again)


def test_an_ended_episode_begins_again_and_its_final_observation_is_the_true_one(easy):
    """One body falls, one reaches the time limit, one does both, one goes on."""
    envs = open_envs("mjx/Hopper", 4)
    (body, _), _ = envs.reset(jax.random.PRNGKey(0))
    low = body.qpos.at[jnp.array([0, 2]), 1].set(0.6)  # the height, healthy above 0.7
    begun = (body._replace(qpos=low), jnp.array([5, 999, 999, 998]))
    action = jnp.zeros((4, 3))
    (after, steps), step = jax.jit(envs.step)(jax.random.PRNGKey(1), begun, action)
    assert step.terminated.tolist() == [True, False, True, False]
    assert step.truncated.tolist() == [False, True, False, False]
    assert steps.tolist() == [0, 0, 0, 999]
    moved, reward, _ = jax.jit(envs.dynamics.step)(begun[0], action)
    np.testing.assert_array_equal(step.final_obs, envs.dynamics.observe(moved))
    np.testing.assert_array_equal(step.reward, reward)
    np.testing.assert_array_equal(step.obs, envs.dynamics.observe(after))
    assert (np.asarray(step.obs[:3, 0]) > 1.2).all() and (
        np.asarray(after.x[:3]) == np.asarray(after.qpos[:3, 0])
    ).all()
    np.testing.assert_array_equal(step.obs[3], step.final_obs[3])
    assert len(np.unique(step.obs[:3, 1])) == 3  # each begins in a state of its own
    assert reward[0] < 0.5 < reward[3]  # only who is healthy gets the reward for it


def test_a_state_that_is_not_finite_ends_the_episode(easy):
    envs = open_envs("mjx/HalfCheetah", 2)
    (body, _), _ = envs.reset(jax.random.PRNGKey(0))
    moved = body._replace(qvel=body.qvel.at[0].set(jnp.nan))
    terminated = jax.jit(envs.dynamics.step)(moved, jnp.zeros((2, 6)))[2]
    assert terminated.tolist() == [True, False]


def test_a_state_in_tensors_is_saved_and_continues_exactly(easy):
    """With its forces, which only Ant has, and those that only it has not."""
    for env_id, actions in (("mjx/Ant", 8), ("mjx/Hopper", 3)):
        make = lambda env_id=env_id: gym.make_vec(env_id, 2, "vector_entry_point", device="cpu")  # noqa: E731
        envs, arrays = make(), {}
        envs.reset(seed=[1, 2])
        envs.step(torch.ones(2, actions))
        tree = checkpoint.decode(checkpoint.encode(checkpoint.capture(envs), arrays), arrays)
        expected, other = [envs.step(torch.full((2, actions), 0.3)) for _ in range(4)], make()
        assert checkpoint.restore(other, tree) == []
        for one in expected:
            two = other.step(torch.full((2, actions), 0.3))
            assert all(torch.equal(x, y) for x, y in zip(one[:4], two[:4], strict=True))
            assert torch.equal(one[4]["next_obs"], two[4]["next_obs"]) and one[0].dtype == torch.float32


def test_evaluation_plays_the_task_of_training(easy):
    ids.check_env_id("mjx/Walker2d")
    envs, env = open_envs("mjx/Walker2d", 1), gym.make("mjx/Walker2d")
    obs, _ = env.reset(seed=3)
    state = env.unwrapped._state
    for t in range(5):
        assert env.observation_space.contains(obs)
        action = np.full(6, 0.1 * t, np.float32)
        state, want = jax.jit(envs.step)(jax.random.split(env.unwrapped._key)[1], state, action[None])
        obs, reward, terminated, truncated, _ = env.step(action)
        np.testing.assert_allclose(obs, want.final_obs[0], atol=1e-5)
        assert reward == pytest.approx(want.reward[0].item(), abs=1e-4) and not (terminated or truncated)


def resumes_exactly(train, tmp_path, name, *flags):
    flags = [*SMALL.split(), *flags]
    flags += ["--save-every", 64]
    whole = train(name, *flags, runs_dir=tmp_path / "whole")["run"]
    cut = train(name, *flags, runs_dir=tmp_path / "cut")["run"]
    whole, cut = (getattr(run, "runs", [run])[0].dir for run in (whole, cut))
    drop_last_checkpoint(cut)
    train(name, "--resume", cut)
    assert comparable(cut) == comparable(whole) and len(comparable(cut)) >= 3


@pytest.mark.parametrize("name", ["ppo_continuous_action_jax", "ppo_continuous_action_batched"])
def test_a_training_goes_on_exactly(name, train, tmp_path, easy):
    resumes_exactly(train, tmp_path, name)


@pytest.mark.slow
def test_a_training_with_mjx_goes_on_exactly(train, tmp_path):
    forget()
    resumes_exactly(train, tmp_path, "ppo_continuous_action_jax", "--env-id", "mjx/HalfCheetah")


def test_what_is_missing_is_one_sentence(monkeypatch):
    with pytest.raises(UsageError, match=r"^there is no environment mjx/Hoper; did you mean mjx/Hopper"):
        ids.check_env_id("mjx/Hoper")
    for gone in ("mujoco.mjx", "mujoco"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, gone, None)
            if gone == "mujoco":
                patch.delitem(sys.modules, "mujoco.mjx", raising=False)
            with pytest.raises(UsageError, match=r"^mjx/Ant needs an extra: pip install 'solorl\[mjx\]'$"):
                ids.check_env_id("mjx/Ant")
