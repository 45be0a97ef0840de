"""Simulators in batches of tensors: Brax's bodies against their own class, memory that is shared, saved states."""

import importlib.util

import gymnasium as gym
import jax
import numpy as np
import pytest
import torch
from conftest import own_registry, script

from solorl.checkpoints import checkpoint, env_state
from solorl.envs import ids
from solorl.errors import UsageError

if importlib.util.find_spec("brax") is None:
    pytest.skip("Brax is an extra", allow_module_level=True)
from solorl.envs.brax import BraxEnvs


def opened(num_envs=3):
    """The body without physics, whose episodes have 1,000 steps; some of them are near their end."""
    envs = gym.make_vec("brax/fast", num_envs, "vector_entry_point", device="cpu")
    envs.reset(seed=[7, 8, 9][:num_envs])
    inner, steps = envs._state
    envs._state = (inner, steps + jax.numpy.array([0, 995, 998])[:num_envs])
    return envs


def test_steps_are_those_of_brax():
    """Against its class stepped with NumPy's actions, over the ends of episodes."""
    envs, reference = opened(), BraxEnvs("brax/fast", 3)
    key, state, ends = envs._key, envs._state, 0
    advance = jax.jit(reference.step)
    for t in range(8):
        action = np.sin(np.arange(3) + t).astype(np.float32)[:, None]
        key, step_key = jax.random.split(key)
        state, expected = advance(step_key, state, action)
        obs, reward, terminated, truncated, infos = envs.step(torch.tensor(action))
        for got, wanted in zip((obs, reward, terminated, truncated, infos["final_obs"]), expected[:5], strict=True):
            assert torch.is_tensor(got) and got.shape == wanted.shape
            np.testing.assert_array_equal(got.numpy(), wanted)
        assert truncated.dtype == terminated.dtype == torch.bool and torch.equal(obs, envs.obs)
        ends += int(truncated.sum())
        assert not torch.equal(obs, infos["final_obs"]) or not truncated.any()
    assert ends == 2


def test_seeds_decide_all_that_is_random():
    envs = opened()
    first = gym.make_vec("brax/fast", 3, "vector_entry_point", device="cpu")
    first.reset(seed=[7, 8, 9])
    envs.reset(seed=[7, 8, 9])
    np.testing.assert_array_equal(first._key, envs._key)
    envs.reset(seed=[7, 8, 10])
    assert (np.asarray(first._key) != np.asarray(envs._key)).any()


def test_memory_is_handed_over_and_not_copied(monkeypatch):
    """JAX reads the actions where torch has them, torch the results where JAX has them."""
    envs, given, taken = opened(), [], []
    read, advance = jax.dlpack.from_dlpack, envs._advance
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda x: given.append(read(x)) or given[-1])
    envs._advance = lambda *inputs: taken.append(advance(*inputs)) or taken[-1]
    action = torch.zeros(64, 1)[:3]  # at an address that JAX takes as it is
    obs, reward, *_ = envs.step(action)
    assert given[0].unsafe_buffer_pointer() == action.data_ptr()
    step = taken[0][2]
    assert obs.data_ptr() == step.obs.unsafe_buffer_pointer()
    assert reward.data_ptr() == step.reward.unsafe_buffer_pointer()


def test_a_saved_state_continues_exactly():
    envs = opened()
    envs.step(torch.ones(3, 1))
    arrays = {}
    tree = checkpoint.decode(checkpoint.encode(checkpoint.capture(envs), arrays), arrays)
    play = lambda envs: [envs.step(torch.full((3, 1), 0.1 * t)) for t in range(6)]  # noqa: E731
    expected, other = play(envs), gym.make_vec("brax/fast", 3, "vector_entry_point", device="cpu")
    before = other.reset(seed=0)[0]
    assert checkpoint.restore(other, tree) == [] and list(env_state.restarted(other)) == []
    assert torch.equal(env_state.observations(other), tree["obs"]) and not torch.equal(before, tree["obs"])
    for one, two in zip(play(other), expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one[:4], two[:4], strict=True))
    np.testing.assert_array_equal(other._key, envs._key)
    fewer = gym.make_vec("brax/fast", 2, "vector_entry_point", device="cpu")
    with pytest.raises(ValueError, match="it is not of 2 environments of this kind"):
        checkpoint.restore(fewer, tree)


def test_which_ids_step_batches_of_tensors(monkeypatch):
    """Brax's and those of one's own; not those of Gymnasium that have a vector environment."""
    own_registry(monkeypatch)
    gym.register("Mine-v0", vector_entry_point="simulators:Aim")
    assert gym.spec("CartPole-v1").vector_entry_point is not None
    found = {env_id: ids.is_batched(env_id) for env_id in ("brax/ant", "Mine-v0", "CartPole-v1", "HalfCheetah-v5")}
    assert found == {"brax/ant": True, "Mine-v0": True, "CartPole-v1": False, "HalfCheetah-v5": False}
    path = script("ppo_continuous_action_batched")
    ids.check_env_id_of(path, "brax/ant", "batched")
    with pytest.raises(UsageError, match=r"^HalfCheetah-v5 does not step .* tensors; use ppo_continuous_action\.py$"):
        ids.check_env_id_of(path, "HalfCheetah-v5", "batched")
