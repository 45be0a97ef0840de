"""Checkpoint files: what goes in comes out, and nothing in them can be executed."""

import errno
import os
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import definitions
from safetensors import safe_open
from safetensors.numpy import load_file
from torch.optim import lr_scheduler as schedules

from solorl.checkpoints import checkpoint as state
from solorl.checkpoints import env_state as simulators
from solorl.envs.spaces import not_finite
from solorl.envs.surroundings import random_states, set_random_states
from solorl.envs.vector import VectorEnvs

SAME_STEP = gym.vector.AutoresetMode.SAME_STEP


def round_trip(tree, tmp_path):
    state.write_state(tmp_path / "x", tree)
    return state.read_state(tmp_path / "x")


def test_every_kind_of_value_comes_back_as_it_was(tmp_path):
    tree = {
        "plain": [None, True, 3, -0.1, "text", 2**200, float("inf")],
        "tuple": (1, (2.5, "x")),
        "int keys": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "dollar": {"$array": 1, "a": 2},
        "float64": np.array([[1.0, np.pi]]),
        "transposed": np.arange(6).reshape(2, 3).T,
        "scalar": np.float32(0.1),
        "zero-dimensional": np.array(7, np.uint8),
        "empty": np.zeros((0, 3), np.float32),
        "bfloat16": torch.tensor([1.0, 2.5], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
    }
    back = round_trip(tree, tmp_path)
    assert back["plain"] == tree["plain"] and back["tuple"] == tree["tuple"]
    assert back["int keys"][0]["step"].item() == 3.0 and back["int keys"][1] == {} and back["dollar"] == tree["dollar"]
    for name in ("float64", "transposed", "zero-dimensional", "empty"):
        assert back[name].dtype == tree[name].dtype and np.array_equal(back[name], tree[name])
        assert back[name].shape == tree[name].shape
    assert back["scalar"] == tree["scalar"].item()
    for name in ("bfloat16", "bool"):
        assert back[name].dtype == tree[name].dtype and torch.equal(back[name], tree[name])


@pytest.mark.parametrize("kind", "bool uint8 int32 uint64 float16 float32 float64".split())
def test_numbers_of_numpy_keep_their_type(kind, tmp_path):
    for value in np.array([0.1, 1, np.inf] if "float" in kind else [0, 1]).astype(kind):
        back = round_trip({"x": (value,), value: 1}, tmp_path / str(value))
        for number in (back["x"][0], *(key for key in back if key != "x")):
            assert type(number) is type(value) and number == value


def test_a_number_as_it_was_written_before_is_read():
    assert state.decode({"x": 3, "y": [0.5, {"$tuple": [True]}]}, {}) == {"x": 3, "y": [0.5, (True,)]}


class Counted(gym.Env):
    """Observations of which some are single numbers of NumPy."""

    observation_space = gym.spaces.Dict(
        n=gym.spaces.Box(0, 99, (), np.int32), x=gym.spaces.Box(0, 99, (), np.float32), i=gym.spaces.Discrete(9)
    )
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.obs(), {}

    def step(self, action):
        self.t += 1
        return self.obs(), 1.0, False, False, {}

    def obs(self):
        return {"n": np.int32(self.t), "x": np.float32(0.1 * self.t), "i": np.int64(self.t)}


def test_observations_of_single_numbers_replay_exactly(tmp_path):
    envs, again = (VectorEnvs([Counted]) for _ in range(2))
    for each in (envs, again):
        simulators.record(each)
        each.reset(seed=[0])
    envs.step(np.array([1]))
    assert simulators.restore(again, round_trip(simulators.capture(envs), tmp_path)) == []


def test_what_cannot_be_saved_is_named():
    with pytest.raises(TypeError, match=r"/a/1 of type set"):
        state.encode({"a": [1, {2}]}, {})
    with pytest.raises(TypeError, match="cannot hold a object; allowed are"):
        state.capture(object())


def test_random_states_come_back(tmp_path):
    states = round_trip(random_states(), tmp_path)
    import random

    drawn = random.random(), np.random.rand(), torch.rand(3).tolist()
    set_random_states(states)
    assert drawn == (random.random(), np.random.rand(), torch.rand(3).tolist())


def test_parts_are_restored_in_place(tmp_path):
    parts = {
        "module": torch.nn.Linear(2, 2),
        "array": np.arange(4.0),
        "tensor": torch.arange(3.0),
        "parameter": torch.nn.Parameter(torch.arange(2.0)),
    }
    saved = round_trip({name: state.capture(part) for name, part in parts.items()}, tmp_path)
    weight = parts["module"].weight.clone()
    parts["module"].weight.data.zero_()
    parts["array"][:] = 9
    parts["tensor"].zero_()
    parts["parameter"].data.zero_()
    for name, part in parts.items():
        assert state.restore(part, saved[name]) == []
    assert torch.equal(parts["module"].weight, weight) and parts["array"].tolist() == [0, 1, 2, 3]
    assert parts["tensor"].tolist() == [0, 1, 2] and parts["parameter"].tolist() == [0, 1]


@pytest.mark.parametrize("first", ["scheduler", "optimizer"])
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
        lambda optimizer: schedules.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
        lambda optimizer: schedules.CosineAnnealingLR(optimizer, 7),
        lambda optimizer: schedules.SequentialLR(
            optimizer, [schedules.ConstantLR(optimizer, 0.5, 2), schedules.StepLR(optimizer, 2)], [2]
        ),
    ],
)
def test_a_scheduler_goes_on_with_the_learning_rate_that_it_was_at(make, first, tmp_path):
    def made():
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return {"optimizer": optimizer, "scheduler": make(optimizer)}

    def rates(parts, count):
        found = []
        for _ in range(count):
            parts["optimizer"].step()
            parts["scheduler"].step()
            found.append(parts["optimizer"].param_groups[0]["lr"])
        return found

    parts, again = made(), made()
    rates(parts, 3)
    saved = round_trip({name: state.capture(part) for name, part in parts.items()}, tmp_path)
    for name in sorted(parts, key=lambda name: name != first):
        assert state.restore(again[name], saved[name]) == []
    assert again["optimizer"].param_groups[0]["lr"] == parts["optimizer"].param_groups[0]["lr"]
    assert rates(again, 5) == (found := rates(parts, 5)) and len({1.0, *found}) > 1


def test_what_learns_in_a_namespace_is_filled_in_place(tmp_path):
    """Its optimiser goes on training it."""

    def made(value):
        learns = torch.full((2,), value, requires_grad=True)
        nested = {"a": (torch.nn.Parameter(torch.full((2,), value)), [torch.full((1,), value)]), "b": value}
        return SimpleNamespace(learns=learns, nested=nested, ended=np.bool_(value), best=np.float32(value), later=[])

    was, now = made(1.0), made(0.0)
    was.nested["new"], was.later = np.ones(2), [np.ones(1)]
    optimizer = torch.optim.SGD([now.learns, now.nested["a"][0]], lr=1.0)
    assert state.restore(now, round_trip(state.capture(was), tmp_path)) == []
    assert now.nested["a"][1][0].tolist() == [1] and now.nested["b"] == 1.0 and now.nested["new"].tolist() == [1, 1]
    assert now.later[0].tolist() == [1] and type(now.ended) is np.bool_ and type(now.best) is np.float32
    assert now.ended and now.best == 1
    (now.learns.sum() + now.nested["a"][0].sum()).backward()
    optimizer.step()
    assert now.learns.tolist() == [0, 0] == now.nested["a"][0].tolist()
    with pytest.raises(ValueError, match=r"its shape is \(2,\), not \(3,\)"):
        state.restore(SimpleNamespace(x=(torch.zeros(3),)), {"x": (torch.zeros(2),)})


def test_tensors_of_a_namespace_return_to_their_device():
    there = torch.zeros(2, device="meta")
    now = SimpleNamespace(state=(there, {"x": [there]}))
    state.restore(now, {"state": (torch.ones(2), {"x": [torch.ones(2)]})})
    assert now.state[0].device.type == now.state[1]["x"][0].device.type == "meta"


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path):
    """Only JSON and safetensors: a checkpoint whose tensors are replaced by a pickle is refused, not executed."""
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    state.write_state(tmp_path / "x", {"a": np.ones(3)})
    (tmp_path / "x" / "tensors.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(state.CheckpointError, match="checksum"):
        state.read_state(tmp_path / "x")
    assert not (tmp_path / "executed").exists()


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    state.save_checkpoint(tmp_path, 1, {"a": np.ones(3)})
    calls = []

    def full(path):
        calls.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state, "sync_file", full)
    with pytest.raises(OSError, match="No space left"):
        state.save_checkpoint(tmp_path, 2, {"a": np.zeros(3)})
    assert calls and [path.name for path in tmp_path.iterdir()] == ["step_000000000001"]
    assert state.load_checkpoint(tmp_path)[0]["a"].tolist() == [1, 1, 1]


def test_every_type_of_number_is_read_back_by_the_library(tmp_path):
    kinds = "? u1 i1 u2 i2 f2 u4 i4 f4 u8 i8 f8 c8 >f4".split()
    arrays = {f"ä {kind}": np.arange(6).reshape(2, 3).astype(kind).T for kind in kinds}
    arrays |= {"empty": np.zeros((0, 3), np.float32), "scalar": np.array(1.5)}
    (tmp_path / "a").write_bytes(state.safetensors(arrays))
    back = load_file(tmp_path / "a")
    assert back.keys() == arrays.keys() and all(np.array_equal(back[key], arrays[key]) for key in arrays)
    assert all(back[key].shape == arrays[key].shape for key in arrays)
    about = {"b": "é", "a": "1"}
    assert state.safetensors(arrays, about) == state.safetensors(arrays, dict(reversed(about.items())))
    (tmp_path / "b").write_bytes(state.safetensors(arrays, about))
    with safe_open(tmp_path / "b", "np") as file:
        assert file.metadata() == about and np.array_equal(file.get_tensor("scalar"), arrays["scalar"])


def test_numbers_that_are_none_are_found_by_name():
    good = {
        "a": torch.ones(3),
        "b": [np.ones(2), (np.array([1, 2]), None, -np.inf, "nan")],
        "half": torch.ones(2).half(),
    }
    assert not_finite(good, "part") is None
    for bad in (torch.tensor([1.0, -np.inf]), torch.tensor(-np.inf).bfloat16(), np.array(-np.inf, np.float16)):
        assert not_finite(good | {"c": [{0: bad}]}, "part") == ("part.c.0.0", -np.inf)
    assert not_finite({"a": np.zeros(1, [("x", "f4")]), "b": np.array(["x"])}) is None


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
def test_numbers_of_jax_that_are_none_are_found(kind):
    jnp = pytest.importorskip("jax.numpy")
    good = jnp.ones(3, kind)
    assert not_finite({"x": good}, "part") is None
    for bad in (good.at[1].set(jnp.nan), np.asarray(good.at[1].set(jnp.nan))):
        name, value = not_finite({"x": bad}, "part")
        assert name == "part.x" and np.isnan(value)


def test_two_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        state.save_checkpoint(tmp_path, step, {"step": step})
    assert [path.name for path in state.steps_in(tmp_path)] == ["step_000000000003", "step_000000000010"]
    assert state.load_checkpoint(tmp_path) == ({"step": 10}, [])


def test_an_older_checkpoint_can_be_asked_for_and_newer_ones_deleted(tmp_path):
    for step in (2, 3):
        state.save_checkpoint(tmp_path, step, {"step": step})
    assert state.load_checkpoint(tmp_path, until=2) == ({"step": 2}, [])
    assert state.load_checkpoint(tmp_path, until=0) == (None, [])
    state.delete_newer(tmp_path, 2)
    assert list(map(state.step_of, state.steps_in(tmp_path))) == [2]
    (tmp_path / "step_of_somebody").mkdir()
    assert len(state.steps_in(tmp_path)) == 1


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    (tmp_path / ".writing-123").mkdir()
    state.save_checkpoint(tmp_path, 1, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000000001"]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "LunarLander-v3"])
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_environments_go_on_where_they_were(env_id, mode, tmp_path):
    """Step, capture in the middle of episodes, restore into new environments: every later step is bit-equal."""

    def make():
        envs = gym.make_vec(env_id, 3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
        simulators.record(envs)
        return envs

    envs = make()
    envs.action_space.seed(5)
    envs.reset(seed=[1, 2, 3])
    for _ in range(333):
        envs.step(envs.action_space.sample())
    saved = round_trip(simulators.capture(envs), tmp_path)
    obs = simulators.observations(envs)
    again = make()
    again.reset(seed=[7, 8, 9])
    assert simulators.restore(again, saved) == []
    assert np.array_equal(simulators.observations(again), obs)
    for _ in range(300):
        steps = (each.step(each.action_space.sample())[:4] for each in (envs, again))
        assert all(np.array_equal(x, y) for x, y in zip(*steps, strict=True))


@pytest.mark.parametrize("seed", [2, 6, 15, 21, 0])
def test_a_game_with_sticky_actions_goes_on_where_it_was(seed):
    """In its first game, which a seed began, and in the one after it, where the emulator's own generator counts. Saving
    leaves the game that continues as it was."""
    make_env = definitions("dqn_atari")["make_env"]

    def made():
        envs = VectorEnvs([lambda: make_env("ALE/Breakout-v5")])
        simulators.record(envs)
        return envs

    def play(envs, seed, steps):
        rng = np.random.default_rng(seed)
        return [envs.step(rng.integers(4, size=1))[:4] for _ in range(steps)]

    saved, unsaved = made(), made()
    for envs in (saved, unsaved):
        envs.reset(seed=[seed])
        play(envs, seed, int(np.random.default_rng(seed).integers(5, 60)))
    for _ in range(2):
        other = made()
        assert simulators.restore(other, simulators.capture(saved)) == []
        games = [play(envs, seed + 7, 40) for envs in (unsaved, saved, other)]
        for steps in zip(*games, strict=True):
            assert all(np.array_equal(x, y) for step in steps[1:] for x, y in zip(steps[0], step, strict=True))
        for envs in (saved, unsaved):
            envs.reset()
            play(envs, seed, 30)


class OddSteps(gym.Wrapper):
    """Allows action 1 in odd steps only."""

    def reset(self, **words):
        self.steps = 0
        return self.env.reset(**words)[0], {"action_mask": [1, 0]}

    def step(self, action):
        self.steps += 1
        return *self.env.step(action)[:4], {"action_mask": [1, self.steps % 2]}


def test_an_emulator_goes_on_with_masks():
    make_env = definitions("dqn_atari")["make_env"]
    action = np.random.default_rng(1).integers(4, size=(40, 1))
    masked, again = (VectorEnvs([lambda: OddSteps(make_env("ALE/Breakout-v5"))]) for _ in range(2))
    for envs in (masked, again):
        simulators.record(envs)
        envs.reset(seed=[3])
    for each in action[:15]:
        masked.step(each)
    assert simulators.restore(again, simulators.capture(masked)) == []
    for each in action[15:]:
        np.testing.assert_array_equal(again.action_mask, masked.action_mask)
        results = [envs.step(each)[:4] for envs in (masked, again)]
        assert all(np.array_equal(x, y) for x, y in zip(*results, strict=True))


class Drifts(gym.Wrapper):
    """Goes another way in every other episode: it ends after three steps, or its fourth step raises an exception."""

    episodes = 0

    def __init__(self, env, way):
        super().__init__(env)
        self.way = way

    def reset(self, **words):
        self.episodes += 1
        self.steps = 0
        return self.env.reset(**words)

    def step(self, action):
        self.steps += 1
        obs, reward, terminated, *rest = self.env.step(action)
        drifts = self.episodes % 2 == 0
        if drifts and self.way == "raises" and self.steps == 4:
            raise RuntimeError("the simulator is lost")
        return obs, reward, terminated or (drifts and self.way == "ends" and self.steps == 3), *rest


@pytest.mark.parametrize("way", ["ends", "raises"])
def test_an_episode_whose_replay_goes_another_way_starts_again(way):
    whole, cut = (VectorEnvs([lambda: Drifts(gym.make("CartPole-v1"), way)] * 2) for _ in range(2))
    for envs in (whole, cut):
        simulators.record(envs)
        envs.reset(seed=[1, 2])
    for _ in range(5):
        whole.step([0, 1])
    [note] = simulators.restore(cut, simulators.capture(whole))
    assert "environments [0, 1] restart" in note and simulators.restarted(cut) == [0, 1]
    now = np.array([env.unwrapped.state for env in cut.envs], np.float32)
    assert np.array_equal(simulators.observations(cut), now)
    assert all(env.actions == [] for env in cut.envs)
    cut.step([0, 1])
