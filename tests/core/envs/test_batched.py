"""Simulators in batches of tensors: the pendulum against Gymnasium's, environments in JAX against their own class,
memory that is shared, saved states, the class that the guide shows."""

import re
import sys
from types import ModuleType

import gymnasium as gym
import jax
import numpy as np
import pytest
import torch
from conftest import ROOT, own_registry, script

import solorl.games  # noqa: F401 registers the pendulum
from solorl.checkpoints import checkpoint, env_state
from solorl.envs import ids
from solorl.envs.batched import Pendulum
from solorl.envs.dlpack import JaxTensors
from solorl.envs.open import open_envs
from solorl.errors import UsageError

KINDS = pytest.mark.parametrize("make", [Pendulum, lambda num_envs: JaxTensors("Pendulum-v1", num_envs)])


def opened(num_envs=3):
    """Environments in JAX, whose episodes have 200 steps; some of them are near their end."""
    envs = JaxTensors("Pendulum-v1", num_envs)
    envs.reset(seed=[7, 8, 9][:num_envs])
    inner, steps = envs._state
    envs._state = (inner, steps + jax.numpy.array([0, 195, 198])[:num_envs])
    return envs


def test_the_pendulum_is_gymnasiums():
    """The same states and actions, over the ends of episodes."""
    envs = gym.make_vec("games/TensorPendulum-v0", 3, "vector_entry_point", device="cpu")
    obs, _ = envs.reset(seed=[1, 2, 3])
    own = [gym.make("Pendulum-v1") for _ in range(3)]
    assert envs.single_observation_space == own[0].observation_space
    assert envs.single_action_space == own[0].action_space
    envs._steps += torch.tensor([0.0, 150.0, 190.0])
    ends, generator = [], torch.Generator().manual_seed(0)
    for t in range(60):
        action = 3 * torch.randn(3, 1, generator=generator)
        before = envs._state.clone()
        obs, reward, terminated, truncated, infos = envs.step(action)
        for i, env in enumerate(own):
            if t == 0:
                env.reset(seed=0)
            env.unwrapped.state = before[i].numpy().astype(float)
            want, want_reward, *_ = env.step(action[i].numpy())
            np.testing.assert_allclose(infos["next_obs"][i], want, atol=1e-5)
            np.testing.assert_allclose(reward[i], want_reward, rtol=1e-4, atol=1e-5)
            assert truncated[i] or torch.equal(obs[i], infos["next_obs"][i])
            if truncated[i]:
                ends.append((t, i))
                assert not torch.equal(obs[i], infos["next_obs"][i]) and envs._steps[i] == 0
                assert obs[i, 2].abs() <= 1  # slow at the start
        assert not terminated.any() and torch.equal(obs, envs.obs)
    assert ends == [(9, 2), (49, 1)]


def test_the_pendulum_begins_at_any_angle():
    obs, _ = Pendulum(4000).reset(seed=3)
    angle = torch.atan2(obs[:, 1], obs[:, 0])
    counts = torch.histc(angle, 8, -np.pi, np.pi)
    assert counts.min() > 400 and -1 <= obs[:, 2].min() < -0.99 and 0.99 < obs[:, 2].max() <= 1


def test_steps_are_those_of_environments_in_jax():
    """Against their class stepped with NumPy's actions, over the ends of episodes."""
    envs, reference = opened(), open_envs("Pendulum-v1", 3)
    key, state, ends = envs._key, envs._state, 0
    advance = jax.jit(reference.step)
    for t in range(8):
        action = np.sin(np.arange(3) + t).astype(np.float32)[:, None]
        key, step_key = jax.random.split(key)
        state, expected = advance(step_key, state, action)
        obs, reward, terminated, truncated, infos = envs.step(torch.tensor(action))
        for got, wanted in zip((obs, reward, terminated, truncated, infos["next_obs"]), expected[:5], strict=True):
            assert torch.is_tensor(got) and got.shape == wanted.shape
            np.testing.assert_array_equal(got.numpy(), wanted)
        assert truncated.dtype == terminated.dtype == torch.bool and torch.equal(obs, envs.obs)
        ends += int(truncated.sum())
        assert not torch.equal(obs, infos["next_obs"]) or not truncated.any()
    assert ends == 2


@KINDS
def test_seeds_decide_all_that_is_random(make):
    first, second = make(3), make(3)
    obs = first.reset(seed=[7, 8, 9])[0].clone()
    assert torch.equal(obs, second.reset(seed=[7, 8, 9])[0])
    assert not torch.equal(obs, first.reset()[0])
    assert not torch.equal(obs, second.reset(seed=[7, 8, 10])[0])


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


@KINDS
def test_a_saved_state_continues_exactly(make):
    envs = make(3)
    envs.reset(seed=1)
    for _ in range(197):  # all episodes end soon, and begin again
        envs.step(torch.ones(3, 1))
    arrays = {}
    tree = checkpoint.decode(checkpoint.encode(checkpoint.capture(envs), arrays), arrays)
    play = lambda envs: [envs.step(torch.full((3, 1), 0.1 * t)) for t in range(6)]  # noqa: E731
    expected, other = play(envs), make(3)
    before = other.reset(seed=0)[0]
    assert checkpoint.restore(other, tree) == [] and list(env_state.restarted(other)) == []
    assert torch.equal(env_state.observations(other), tree["obs"]) and not torch.equal(before, tree["obs"])
    for one, two in zip(play(other), expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one[:4], two[:4], strict=True))
    assert expected[2][3].all() and torch.equal(other.reset()[0], envs.reset()[0])
    with pytest.raises(ValueError, match="it is not of 2 environments of this kind"):
        checkpoint.restore(make(2), tree)


def test_which_ids_step_batches_of_tensors(monkeypatch):
    """Ours and those of one's own; not those of Gymnasium that have a vector environment."""
    own_registry(monkeypatch)
    gym.register("Mine-v0", vector_entry_point="simulators:Aim")
    assert gym.spec("CartPole-v1").vector_entry_point is not None
    found = {env_id: ids.is_batched(env_id) for env_id in ("Mine-v0", "CartPole-v1", "HalfCheetah-v5")}
    assert found == {"Mine-v0": True, "CartPole-v1": False, "HalfCheetah-v5": False}
    path = script("ppo_continuous_action_batched")
    for env_id in ("games/TensorPendulum-v0", "mjx/Ant"):
        ids.check_env_id_of(path, env_id, "batched")
    with pytest.raises(
        UsageError, match=r"^HalfCheetah-v5 does not step .* tensors; use ppo_continuous_action\.py for other"
    ):
        ids.check_env_id_of(path, "HalfCheetah-v5", "batched")


class Simulator:
    """Points that move by the action; over beyond 1. What the guide's class imports."""

    obs_dim = action_dim = 2

    def __init__(self, num_envs, device):
        self.place = torch.ones(num_envs, 2, device=device)

    def state(self):
        return self.place.clone()

    def reset_where(self, mask):
        self.place[mask] = 0.1

    def step(self, action):
        self.place += 0.5 * action
        return -self.place.norm(dim=1), self.place.abs().amax(1) > 1


def test_the_class_of_the_guide_trains(train, monkeypatch, tmp_path):
    """As it stands there, with a simulator of points in the place of a robot's."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/batched_simulator.md").read_text(), re.DOTALL)
    code = text[text.index("class MyRobot") : text.index("gym.register")].strip().splitlines()
    assert len([line for line in code if line.strip()]) <= 30
    own_registry(monkeypatch)
    robots = ModuleType("my_robots")
    robots.Simulator = Simulator
    monkeypatch.setitem(sys.modules, "my_robots", robots)
    (tmp_path / "my_module.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    flags = "--env-id my_module:MyRobot-v0 --num-envs 6 --num-steps 8 --total-timesteps 96 --eval-episodes 1".split()
    v = train("ppo_continuous_action_batched", *flags)
    assert v["done"].any() and not v["done"].all() and v["obs"].isfinite().all()
    sys.modules.pop("my_module", None)
