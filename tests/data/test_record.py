"""`--record`: all transitions of a training are in the data set, once each, and the training is what it is without."""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, comparable, drop_last_checkpoint, rows, run
from recorded import recorded

import solorl.envs.games  # noqa: F401  registers them
from solorl.data import recording
from solorl.data.dataset import read, read_about
from solorl.data.recording import Recording
from solorl.envs.vector import VectorEnvs
from solorl.envs.workers import InWorkers

FLAGS = "--num-envs 2 --total-timesteps 400 --eval-episodes 1 --save-every 100 --save-replay --learning-starts".split()
DQN = ("dqn", "--env-id", "moody:Plain-v0", *FLAGS, "150")
JAX = ("dqn_jax", "--env-id", "CartPole-v1", *FLAGS, "150")
NAMES = ("obs", "action", "reward", "terminated", "truncated", "next_obs", "episode")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(recording, "MOST_ROWS", 70)


def same(one, other):
    assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in NAMES)


def flat(steps):
    """(steps, num_envs, ...) as (num_envs * steps, ...)."""
    return np.concatenate(np.swapaxes(np.array(steps), 0, 1))


# ---------------------------------------------------------------------- what is recorded
@pytest.mark.parametrize(("kind", "workers"), [(VectorEnvs, 0), (InWorkers, 2)])
def test_what_the_script_saw_and_did_is_recorded(kind, workers, train, tmp_path, monkeypatch):
    monkeypatch.setattr("solorl.envs.workers._start_method", lambda: "fork")
    seen, step, begun = [], kind.step, []

    def noting(self, actions):
        obs, reward, terminated, truncated, infos = result = step(self, actions)
        next_obs = obs.copy()
        for i in np.flatnonzero(terminated | truncated):
            next_obs[i] = infos["final_obs"][i]
        seen.append([np.array(actions), reward, terminated, truncated, next_obs, obs.copy()])
        return result

    watch = Recording.watch

    def noting_first(self, envs):
        begun.append(self._arrays["obs"][0].copy())
        watch(self, envs)

    monkeypatch.setattr(kind, "step", noting)
    monkeypatch.setattr(Recording, "watch", noting_first)
    train(*DQN, "--env-workers", workers, "--record", tmp_path / "data")
    data = read(tmp_path / "data")
    seen = [each for each in seen if len(each[1]) == 2][:200]
    action, reward, terminated, truncated, next_obs, after = zip(*seen, strict=True)
    expected = (action, np.float32(reward), terminated, next_obs, [begun[0], *after[:-1]])
    for name, steps in zip(("action", "reward", "terminated", "next_obs", "obs"), expected, strict=True):
        np.testing.assert_array_equal(getattr(data, name), flat(steps), err_msg=name)
    cut = np.zeros((200, 2), bool)
    cut[-1] = ~(np.array(terminated) | truncated)[-1]
    np.testing.assert_array_equal(data.truncated, flat(truncated | cut))
    assert data.terminated.sum() > 10 and (data.truncated & ~data.terminated).sum() > 10
    assert np.array_equal(np.flatnonzero(np.diff(data.episode)), np.flatnonzero(data.terminated | data.truncated)[:-1])
    assert max(piece["transitions"] for piece in read_about(tmp_path / "data")["pieces"]) == 70


@pytest.mark.parametrize("words", [DQN, pytest.param(JAX, marks=pytest.mark.slow)])
def test_the_training_is_as_without(words, train, tmp_path):
    runs = [train(*words, *flags) for flags in ((), ("--record", tmp_path / "data"))]
    folders = [folder_of(variables) for variables in runs]
    assert comparable(folders[0]) == comparable(folders[1])
    if words is DQN:
        nets = [each["q_network"].state_dict() for each in runs]
        assert all(torch.equal(nets[0][name], nets[1][name]) for name in nets[0])
    else:
        assert all(np.array_equal(x, y) for x, y in zip(*(weights(each) for each in runs), strict=True))


def folder_of(variables):
    return getattr(variables["run"], "runs", [variables["run"]])[0].dir


def weights(variables):
    return [np.asarray(x) for layer in variables["training"].params for x in layer.values()]


@pytest.mark.slow
def test_a_file_in_jax_records_its_replay_buffer(train, tmp_path):
    flags = "--batch-size 8 --utd-ratio 0.05 --buffer-size 300".split()
    words = ("sac_continuous_action_jax", "--env-id", "Pendulum-v1", *FLAGS, "150", "--total-timesteps", "1200")
    v = train(*words, *flags, "--record", tmp_path / "data")
    data, replay = read(tmp_path / "data"), v["training"].replay
    assert len(data) == 1200 and np.abs(data.action).max() <= 1
    newest = np.concatenate([np.arange(450, 600), np.arange(1050, 1200)])  # of both environments
    for name in ("obs", "action", "reward", "next_obs"):
        mine = flat(np.asarray(getattr(replay, name)).reshape(150, 2, -1)).squeeze()
        np.testing.assert_array_equal(getattr(data, name)[newest].squeeze(), mine, err_msg=name)
    assert not data.terminated.any() and np.array_equal(np.flatnonzero(data.truncated), np.arange(199, 1200, 200))
    returns = sorted(row["charts/episodic_return"] for row in rows(folder_of(v), "charts/episodic_return"))
    np.testing.assert_allclose(sorted(data.returns()), returns, rtol=1e-5)


# ---------------------------------------------------------------------- pieces
@pytest.mark.parametrize("words", [DQN, pytest.param(JAX, marks=pytest.mark.slow)])
def test_a_resumed_run_has_each_transition_once(words, train, tmp_path):
    train(*words, "--record", tmp_path / "whole")
    folder = folder_of(train(*words, "--record", tmp_path / "data"))
    drop_last_checkpoint(folder)
    count = len(list((tmp_path / "data").glob("*.npz")))
    (tmp_path / "data" / f"{count:06}.npz").touch()  # a piece that was not named yet when the run was killed
    train(words[0], "--resume", folder)
    same(read(tmp_path / "data"), read(tmp_path / "whole"))
    assert {path.name for path in (tmp_path / "data").glob("*.npz")} == {
        piece["file"] for piece in read_about(tmp_path / "data")["pieces"]
    }


def test_a_reset_in_the_middle_of_an_episode_cuts_it(tmp_path):
    envs = VectorEnvs([lambda: gym.make("CartPole-v1")] * 2)
    whole = Recording(tmp_path)
    first = envs.reset(seed=1)[0]
    whole.open({}, (envs.single_observation_space, envs.single_action_space), first)
    whole.watch(envs)
    last = [envs.step(np.array([0, 1]))[0] for _ in range(3)][-1].copy()
    again = envs.reset(seed=2)[0].copy()
    envs.step(np.array([0, 1]))
    whole.flush()
    data = read(tmp_path)
    assert data.truncated.tolist() == [False, False, True, True] * 2
    assert data.episode.tolist() == [
        0,
        0,
        0,
        1,
        2,
        2,
        2,
        3,
    ]
    np.testing.assert_array_equal(data.next_obs[[2, 6]], last)
    np.testing.assert_array_equal(data.obs[[3, 7]], again)


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


def test_what_cannot_be_written_ends_the_recording_and_not_the_training(train, tmp_path, monkeypatch):
    def full(self, piece):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("solorl.data.dataset.Writer.add", full)
    v = train(*DQN, "--record", tmp_path / "data", code=4)
    assert v == {} and train.out.count("a piece of the data set could not be written (No space left on device)") == 1


# ---------------------------------------------------------------------- refusals
def test_a_folder_that_has_a_data_set_is_refused(train, tmp_path):
    train(*DQN, "--record", tmp_path / "data")
    before = {path: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    train(*DQN, "--record", tmp_path / "data", runs_dir=tmp_path / "others", code=2)
    said = f"error: {tmp_path / 'data'} has a data set already; name another folder, or delete it\n"
    assert train.out == said and not (tmp_path / "others").exists()
    assert {path: path.read_bytes() for path in (tmp_path / "data").iterdir()} == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dqn_jax", "--num-seeds", "2"], "--record takes one seed, not --num-seeds 2"),
        pytest.param(["ppo_jax"], "--record: ppo_jax.py steps its environments in another way", marks=pytest.mark.slow),
        pytest.param(["apex_dqn", "--num-actors", "1"], "apex_dqn.py steps its environments in another way",
                     marks=pytest.mark.slow),
        pytest.param(["ippo", "--env-id", "team/simple_spread_v3"], "ippo.py steps its environments in another way",
                     marks=pytest.mark.slow),
        (["ppo_dict", "--env-id", "games/TwoSenses-v0"], "cannot be recorded; allowed are Box, and Discrete from 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused(words, said, train, tmp_path):
    train(*words, "--record", tmp_path / "data", code=2)
    assert said in train.out and train.out.count("\n") == 1, train.out
    assert not (tmp_path / "runs").exists() and not Path(tmp_path / "data").exists()


def test_a_file_that_plays_nothing_records_nothing(train, tmp_path):
    train("bc", "--env-id", "CartPole-v1", "--dataset", recorded("CartPole-v1"), "--record", tmp_path / "data", code=2)
    assert train.out == "error: --record: bc.py steps no environment\n" and not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------- the script of the standard data sets
def test_the_standard_data_sets_can_be_planned(tmp_path):
    done = run(sys.executable, ROOT / "benchmark/offline_data.py", "Hopper-v5", "--dry-run", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and [line.split()[1] for line in lines] == ["train"] * 2 + ["record"] * 3 + ["dataset"]
    assert "--record data/Hopper-v5/medium-replay" in lines[1] and list(tmp_path.iterdir()) == []


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
