"""Checkpoint files: what goes in comes out, and nothing in them can be executed."""

import errno
import os

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import definitions
from safetensors import safe_open
from safetensors.numpy import load_file

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
        "rng": np.random.default_rng(1),
        "torch rng": torch.Generator().manual_seed(3),
    }
    saved = round_trip({name: state.capture(part) for name, part in parts.items()}, tmp_path)
    weight = parts["module"].weight.clone()
    expected = (parts["rng"].random(), torch.rand(1, generator=parts["torch rng"]))
    parts["module"].weight.data.zero_()
    parts["array"][:] = 9
    parts["tensor"].zero_()
    for name, part in parts.items():
        assert state.restore(part, saved[name]) == []
    assert torch.equal(parts["module"].weight, weight) and parts["array"].tolist() == [0, 1, 2, 3]
    assert parts["tensor"].tolist() == [0, 1, 2]
    assert expected == (parts["rng"].random(), torch.rand(1, generator=parts["torch rng"]))


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
    state.save_arrays(arrays, tmp_path / "a")
    back = load_file(tmp_path / "a")
    assert back.keys() == arrays.keys() and all(np.array_equal(back[key], arrays[key]) for key in arrays)
    assert all(back[key].shape == arrays[key].shape for key in arrays)
    about = {"b": "é", "a": "1"}
    (tmp_path / "b").write_bytes(b"".join(state.safetensors_pieces(arrays, about)))
    with safe_open(tmp_path / "b", "np") as file:
        assert file.metadata() == about
    with pytest.raises(OSError, match="x holds numbers of type complex128"):
        state.save_arrays({"x": np.zeros(3, complex)}, tmp_path / "c")


def test_numbers_that_are_none_are_found_by_name():
    good = {
        "a": torch.ones(3),
        "b": [np.ones(2), (np.array([1, 2]), None, -np.inf, "nan")],
        "half": torch.ones(2).half(),
    }
    assert not_finite(good, "part") is None
    for bad in (torch.tensor([1.0, -np.inf]), torch.tensor(-np.inf).bfloat16(), np.array(-np.inf, np.float16)):
        assert not_finite(good | {"c": [{0: bad}]}, "part") == ("part.c.0.0", -np.inf)


def test_two_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        state.save_checkpoint(tmp_path, step, {"step": step})
    assert [path.name for path in state.checkpoints(tmp_path)] == ["step_000000000003", "step_000000000010"]
    assert state.load_checkpoint(tmp_path) == ({"step": 10}, [])


def test_several_runs_have_a_newest_common_checkpoint(tmp_path):
    """That is whole in all of them; one is kept although there are two newer ones, newer ones can be deleted."""
    one, other = folders = tmp_path / "one", tmp_path / "other"
    assert state.newest_common(folders) == (None, [])
    for step in (1, 2, 3):
        state.save_checkpoint(one, step, {"step": step}, keep=1)
        state.save_checkpoint(other, step, {"step": step})
    assert [list(map(state.step_of, state.checkpoints(folder))) for folder in folders] == [[1, 2, 3], [2, 3]]
    assert state.newest_common(folders) == (3, [])
    (other / "step_000000000003/state.json").write_text("{}")
    step, notes = state.newest_common(folders)
    assert step == 2 and len(notes) == 1 and "step_000000000003 is damaged" in notes[0] and str(other) in notes[0]
    assert state.load_checkpoint(one, until=2) == ({"step": 2}, []) and state.load_checkpoint(one, 0) == (None, [])
    state.delete_newer(one, 2)
    assert list(map(state.step_of, state.checkpoints(one))) == [1, 2]
    (tmp_path / "one/step_of_somebody").mkdir()
    assert len(state.checkpoints(one)) == 2


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
def test_a_sticky_action_is_that_of_the_game_that_was_saved(seed):
    """The bytes of the emulator lack the action of its last frame. Without it these games go on otherwise, seed 0's
    apart. Saving must leave the game that goes on as it is."""
    make_env = definitions("dqn_atari")["make_env"]
    saved, other, unsaved = (simulators.Recorder(make_env("ALE/Breakout-v5")) for _ in range(3))

    def play(env, seed, steps):
        rng = np.random.default_rng(seed)
        return [env.step(int(rng.integers(4))) for _ in range(steps)]

    begun = int(np.random.default_rng(seed).integers(5, 60))
    for env in (saved, unsaved):
        env.reset(seed=seed)
        play(env, seed, begun)
    other.reset(seed=seed + 100)
    simulators._restore_emulator(other.env, simulators._emulator_state(saved.env))
    games = [play(env, seed + 7, 40) for env in (unsaved, saved, other)]
    for steps in zip(*games, strict=True):
        assert all(np.array_equal(steps[0][0], step[0]) and steps[0][1:3] == step[1:3] for step in steps)


class OddSteps(gym.Wrapper):
    """Allows action 1 in odd steps only."""

    def reset(self, **words):
        self.steps = 0
        return self.env.reset(**words)[0], {"action_mask": [1, 0]}

    def step(self, action):
        self.steps += 1
        return *self.env.step(action)[:4], {"action_mask": [1, self.steps % 2]}


def test_an_emulator_goes_on_in_vector_environments_with_masks():
    """A wrapper without a state does not count, so an older checkpoint fits; a mask comes back."""
    make_env = definitions("dqn_atari")["make_env"]
    action = np.random.default_rng(1).integers(4, size=(40, 1))
    before = gym.vector.SyncVectorEnv([lambda: make_env("ALE/Breakout-v5")], autoreset_mode=SAME_STEP)
    masked, again = (VectorEnvs([lambda: OddSteps(make_env("ALE/Breakout-v5"))]) for _ in range(2))
    after = VectorEnvs([lambda: make_env("ALE/Breakout-v5")])
    for envs in (before, after, masked, again):
        simulators.record(envs)
        envs.reset(seed=[3])
    for envs in (before, masked):
        for each in action[:15]:
            envs.step(each)
    tree = simulators.capture(before)
    tree["envs"][0]["wrappers"].insert(1, {})  # as it was saved
    assert simulators.restore(after, tree) == simulators.restore(again, simulators.capture(masked)) == []
    for each in action[15:]:
        np.testing.assert_array_equal(again.action_mask, masked.action_mask)
        results = [envs.step(each)[:4] for envs in (before, after, masked, again)]
        for one in results[1:]:
            assert all(np.array_equal(x, y) for x, y in zip(results[0], one, strict=True))
    assert after.action_mask is None
