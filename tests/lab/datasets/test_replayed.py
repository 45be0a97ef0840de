"""`solo dataset from`: all steps of a training, once each, from the replay buffer that it has kept."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, refused, run

from solorl.data.dataset import read, read_about
from solorl.envs.vector import VectorEnvs
from solorl.errors import UsageError
from solorl.lab.datasets import recording
from solorl.lab.datasets.recording import Recording

SHORT = "--eval-episodes 1 --eval-every 0 --save-replay --save-model".split()
DQN = ("dqn", "--env-id", "moody:Plain-v0", *SHORT, "--save-every", "100", "--learning-starts", "150")
NAMES = ("obs", "action", "reward", "terminated", "truncated", "next_obs", "episode")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(recording, "MOST_ROWS", 70)


def flat(steps):
    """(steps, num_envs, ...) as (num_envs * steps, ...)."""
    return np.concatenate(np.swapaxes(np.array(steps), 0, 1))


# ---------------------------------------------------------------------- what a training has seen
@pytest.mark.parametrize("num_envs", [1, 4])
def test_what_the_training_saw_and_did_is_in_the_data_set(num_envs, train, solo, tmp_path, monkeypatch):
    seen, step = [], VectorEnvs.step

    def noting(self, actions):
        before = getattr(self, "noted", None)
        obs, reward, terminated, truncated, infos = result = step(self, actions)
        next_obs = obs.copy()
        for i in np.flatnonzero(terminated | truncated):
            next_obs[i] = infos["final_obs"][i]
        if len(seen) < 400 // num_envs:
            seen.append([before, np.array(actions), reward, terminated, truncated, next_obs])
        self.noted = obs.copy()
        return result

    monkeypatch.setattr(VectorEnvs, "step", noting)
    folder = train(*DQN, "--num-envs", num_envs, "--total-timesteps", 400)["run"].dir
    code, out, err = solo("dataset", "from", folder, "--out", tmp_path / "data")
    assert code == 0 and out.startswith("400 transitions of dqn while it trained"), err
    data = read(tmp_path / "data")
    before, action, reward, terminated, truncated, next_obs = zip(*seen, strict=True)
    expected = {"action": action, "reward": np.float32(reward), "terminated": terminated, "next_obs": next_obs}
    for name, steps in expected.items():
        np.testing.assert_array_equal(getattr(data, name), flat(steps), err_msg=name)
    np.testing.assert_array_equal(data.obs.reshape(num_envs, -1, 3)[:, 1:], np.swapaxes(before[1:], 0, 1))
    cut = np.zeros(np.shape(truncated), bool)
    cut[-1] = ~(np.array(terminated) | truncated)[-1]
    np.testing.assert_array_equal(data.truncated, flat(np.array(truncated) & ~np.array(terminated) | cut))
    assert data.terminated.sum() > 10 and (data.truncated & ~data.terminated).sum() > 10  # moody: both ends
    assert data.cut.sum() == cut.sum()
    about = read_about(tmp_path / "data")
    assert max(piece["transitions"] for piece in about["pieces"]) <= 70 and about["num_envs"] == num_envs


def test_a_time_limit_is_told_from_the_end_of_the_task(train, solo):
    flags = "--num-envs 2 --total-timesteps 1000 --learning-starts 990 --batch-size 8".split()
    folder = train("sac_continuous_action", "--env-id", "Pendulum-v1", *flags, *SHORT)["run"].dir
    assert solo("dataset", "from", folder)[0] == 0
    data = read(folder / "dataset")
    assert not data.terminated.any()
    assert np.flatnonzero(data.truncated).tolist() == [199, 399, 499, 699, 899, 999]
    assert data.cut.tolist() == [False, False, True] * 2 and np.abs(data.action).max() <= 1


def test_a_killed_training_has_each_step_to_its_last_checkpoint(train, solo, tmp_path):
    words = [*DQN, "--num-envs", 2, "--total-timesteps", 3000, "--runs-dir", "runs", "--log-every", 100]
    command = [sys.executable, "-m", "solorl.cli", "train", *map(str, words)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests/doubles")}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    while not (found := list(tmp_path.glob("runs/*/checkpoint/step_*500"))) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = found[0].parent.parent
    assert not (folder / "model.safetensors").exists()
    assert solo("dataset", "from", folder, "--out", tmp_path / "killed")[0] == 0
    killed = read(tmp_path / "killed")
    train("dqn", "--resume", folder)
    assert solo("dataset", "from", folder, "--out", tmp_path / "whole")[0] == 0
    whole, steps = read(tmp_path / "whole"), len(killed) // 2
    assert len(whole) == 3000 and steps >= 250
    for name in ("obs", "action", "reward", "terminated", "next_obs"):
        mine = getattr(whole, name).reshape(2, 1500, -1)[:, :steps]
        np.testing.assert_array_equal(getattr(killed, name).reshape(2, steps, -1), mine, err_msg=name)


def test_an_environment_that_began_again_cuts_its_episode(train, solo, tmp_path):
    folder = train(*DQN, "--num-envs", 2, "--total-timesteps", 200)["run"].dir
    rows = recording.replayed(folder, {"num_envs": 2, "buffer_size": 10_000})
    rows["done"][:], rows["next_obs"][:-1] = 0, rows["obs"][1:]
    rows["obs"][50, 1] += 1  # as after a resume that could not bring this one back
    spaces = {"observation_space": gym.spaces.Box(-9, 9, rows["obs"].shape[2:], np.float32)}
    env = SimpleNamespace(**spaces, action_space=gym.spaces.Discrete(9))
    recording.record_replayed(rows, Recording(tmp_path / "data"), {"env_id": "x"}, env)
    assert np.flatnonzero(read(tmp_path / "data").truncated).tolist() == [99, 149, 199]


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize("most", [2**24 - 1, 2**24, 2**31 - 1])
def test_whole_numbers_that_a_buffer_has_rounded_are_refused(most, train, tmp_path):
    """The buffers of files hold vectors as float32, of which the largest int32 would become the smallest."""
    folder = train(*DQN, "--num-envs", 2, "--total-timesteps", 200)["run"].dir
    rows = recording.replayed(folder, {"num_envs": 2, "buffer_size": 10_000})
    rows["obs"], rows["next_obs"] = (np.full_like(rows[name], most) for name in ("obs", "next_obs"))
    bounds = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    space = gym.spaces.Box(*bounds, rows["obs"].shape[2:], np.int32)
    env = SimpleNamespace(observation_space=space, action_space=gym.spaces.Discrete(9))
    if most >= 2**24:
        with pytest.raises(UsageError, match="rounded in a replay buffer; solo record has them"):
            recording.record_replayed(rows, Recording(tmp_path / "data"), {"env_id": "x"}, env)
        assert not (tmp_path / "data").exists()
    else:
        recording.record_replayed(rows, Recording(tmp_path / "data"), {"env_id": "x"}, env)
        assert (read(tmp_path / "data").obs == most).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*DQN, "--buffer-size", 120), "holds 120 of 200 steps: it holds all with --save-replay from the start"),
        ((*DQN, "--buffer-size", 199), "holds 199 of 200 steps"),
        ((*DQN, "--no-save-replay"), "holds no replay buffer: files in torch that have one keep it with --save-replay"),
        (("sac_nstep", "--env-id", "Pendulum-v1", *SHORT, "--learning-starts", 190, "--batch-size", 8),
         "does not hold single steps of its environments"),
        (("ppo", "--env-id", "CartPole-v1", *SHORT, "--num-steps", 50), "holds no replay buffer"),
    ],
)  # fmt: skip
def test_what_is_not_all_of_a_training_is_refused(words, said, train, solo, tmp_path):
    folder = train(*words, "--num-envs", 2, "--total-timesteps", 200)["run"].dir
    refused(solo("dataset", "from", folder), said)
    assert not (folder / "dataset").exists()


def test_a_buffer_that_began_later_is_refused(train, solo):
    folder = train(*DQN, "--num-envs", 2, "--total-timesteps", 200, "--no-save-replay")["run"].dir
    train("dqn", "--resume", folder, "--save-replay", "--total-timesteps", 400, "--resume-changed")
    refused(solo("dataset", "from", folder), "holds 200 of 400 steps")


def test_damage_and_foreign_folders_are_said_in_one_sentence(train, solo, tmp_path):
    folder = train(*DQN, "--num-envs", 2, "--total-timesteps", 200)["run"].dir
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "000000.npz").write_bytes(b"mine")
    refused(solo("dataset", "from", folder, "--out", tmp_path / "mine"), "mine is not empty; name another folder")
    assert (tmp_path / "mine" / "000000.npz").read_bytes() == b"mine"
    segment = next(iter(sorted((folder / "replay/replay").glob("*"))))
    segment.write_bytes(segment.read_bytes()[:-1] + b"x")
    refused(solo("dataset", "from", folder), "does not fit: the replay segment", "damaged")
    for checkpoint in (folder / "checkpoint").iterdir():
        (checkpoint / "state.json").unlink()
    refused(solo("dataset", "from", folder), "has no whole checkpoint")
    refused(solo("dataset", "from", tmp_path / "none"), "there is no run folder")


# ---------------------------------------------------------------------- recording
def test_images_are_recorded_without_loss(tmp_path):
    rng = np.random.default_rng(0)
    space = gym.spaces.Box(0, 255, (3, 20, 20), np.uint8)
    images = rng.integers(0, 256, (151, 1, 3, 20, 20), np.uint8)
    record = Recording(tmp_path)
    record.open({}, (space, gym.spaces.Discrete(2)), images[0])
    for t in range(150):
        record.add([1], [0.0], [t % 40 == 39], [False], rng.integers(0, 256, (1, 3, 20, 20), np.uint8), images[t + 1])
    record.flush()
    data = read(tmp_path)
    np.testing.assert_array_equal(data.obs, images[:-1, 0])
    assert data.obs.dtype == np.uint8 and len(list(tmp_path.glob("*.npz"))) == 3 and data.terminated.sum() == 3


def test_run_folders_that_recorded_go_on_without(train, tmp_path):
    """As version 0.1 has left them: `record` in config.json writes nowhere, `pieces` of a checkpoint do not count."""
    folder = train(*DQN, "--num-envs", 2, "--total-timesteps", 200)["run"].dir
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/000000.npz").write_bytes(b"mine")
    config = json.loads((folder / "config.json").read_text())
    config["args"]["record"] = str(tmp_path / "photos")
    (folder / "config.json").write_text(json.dumps(config))
    train("dqn", "--resume", folder, "--total-timesteps", 300, "--resume-changed")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["000000.npz"]
    assert (tmp_path / "photos/000000.npz").read_bytes() == b"mine"


# ---------------------------------------------------------------------- the script of the standard data sets
def test_the_standard_data_sets_can_be_planned(tmp_path):
    done = run(sys.executable, ROOT / "benchmark/offline_data.py", "Hopper-v5", "--dry-run", cwd=tmp_path)
    verbs = [line.split()[1:3] for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [verb[0] for verb in verbs] == [
        *["train"] * 2,
        "dataset",
        *["record"] * 3,
        "dataset",
    ]
    assert verbs[2][1] == "from" and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_standard_data_sets_are_made(tmp_path):
    flags = "--learning-starts 300 --eval-episodes 1 --utd-ratio 0.1 --target-return -100"
    words = [ROOT / "benchmark/offline_data.py", "Hopper-v5", "--steps", 400, "--expert-steps", 600, "--flags", flags]
    done = run(sys.executable, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "data/Hopper-v5"
    sizes = {name: len(read(folder / name)) for name in ("random", "medium", "expert", "medium-replay")}
    assert sizes.pop("medium-replay") <= 600 and set(sizes.values()) == {400}
    assert "D4RL score" in done.stdout and "own score" in done.stdout and (folder / "returns.png").exists()
    again = run(sys.executable, *words, cwd=tmp_path)
    assert [line.split()[1] for line in again.stdout.splitlines() if line.startswith("solo ")] == ["dataset"]
