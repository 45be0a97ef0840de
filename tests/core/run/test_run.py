"""The run library: its files say what happened, and it changes nothing of what is learned."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, comparable, documented_keys, drop_last_checkpoint, environment, refused, rows, run, script
from safetensors import safe_open
from safetensors.numpy import load_file

from solorl import Run, RunArgs, __version__, trust
from solorl.checkpoints import checkpoint as state
from solorl.compute import device
from solorl.compute.speed import GradientStep
from solorl.envs.surroundings import random_states, undisturbed
from solorl.envs.vector import VectorEnvs
from solorl.errors import UsageError
from solorl.lab.results import figures
from solorl.run import evaluation, trackers
from solorl.run import folder as run_folder
from solorl.run.ending import how_to_go_on
from solorl.run.folder import own_state
from solorl.run.meter import Meter

TINY = "--num-envs 2 --num-steps 32 --total-timesteps 640 --eval-episodes 2 --log-every 64".split()


def weights(variables):
    return {name: tensor.clone() for name, tensor in variables["agent"].state_dict().items()}


def assert_equal_weights(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------- nothing of it moves the training
@pytest.mark.parametrize(
    "flags",
    [
        "--eval-every 64 --save-every 64",
        pytest.param("--eval-every 64 --capture-video", marks=pytest.mark.slow),
        "--eval-every 0 --save-every 0 --no-save-model",
        "--track --eval-every 200",
        "--eval-every 64 --eval-more --plot",
    ],
)
def test_plumbing_is_inert(train, flags, monkeypatch):
    monkeypatch.setattr("solorl.run.ending.solo", lambda *words: (True, ""))  # drawing takes a second
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    plain = train("ppo", *TINY, "--eval-every", "0", "--save-every", "0")
    other = train("ppo", *TINY, *flags.split())
    assert_equal_weights(weights(plain), weights(other))
    kept = [[row for row in comparable(v["run"].dir) if "eval/episodic_return" not in row] for v in (plain, other)]
    assert kept[0] == kept[1]


def test_evaluation_leaves_the_random_states_alone():
    before = random_states()
    with undisturbed():
        np.random.rand(), torch.rand(1)
    assert state.encode(before, {}) == state.encode(random_states(), {})
    x, y = {}, {}
    state.encode(before, x), state.encode(random_states(), y)
    assert all(np.array_equal(x[key], y[key]) for key in x)


def test_environment_seeds_are_disjoint():
    """Over run seeds, streams and indices no two seeds are the same, and all fit into 63 bits."""
    seeds = [
        device.env_seed(seed, stream, index)
        for seed in (0, 1, 2, 3, 2**31 - 1)
        for stream in range(3)
        for index in (0, 1, 2, 2**19, 2**30 - 1)
    ]
    assert len(set(seeds)) == len(seeds) and max(seeds) < 2**63


def test_the_environments_get_these_seeds(train):
    v = train("ppo", *TINY, "--total-timesteps", "64")
    seeds = [device.env_seed(1, device.TRAIN, n) for n in range(2)]
    firsts = [gym.make("CartPole-v1").reset(seed=seed)[0] for seed in seeds]
    np.testing.assert_array_equal(v["obs"][0], np.array(firsts, np.float32))


# ---------------------------------------------------------------------- episodes
def test_episode_statistics_against_a_plain_count(train):
    """Returns, lengths and the step of every episode's end, recounted from the rollout of a real run."""
    v = train("ppo", "--num-envs", "3", "--num-steps", "300", "--total-timesteps", "900", "--num-minibatches", "1")
    expected, total, length = [], np.zeros(3), np.zeros(3, int)
    for t in range(300):
        for n in range(3):
            total[n], length[n] = total[n] + v["reward"][t, n], length[n] + 1
            if v["done"][t, n]:
                expected.append(((t + 1) * 3, total[n], length[n]))
                total[n], length[n] = 0, 0
    got = [
        (row["global_step"], row["charts/episodic_return"], row["charts/episodic_length"])
        for row in rows(v["run"].dir, "charts/episodic_return")
    ]
    assert got == expected and len(got) > 20


def test_episodes_counted_step_by_step_or_all_at_once_agree(tmp_path):
    rng = np.random.default_rng(0)
    reward, done = rng.normal(size=(50, 4)), rng.random((50, 4)) < 0.1

    def found(meter):
        return [{k: v for k, v in row.items() if k != "wall_time"} for row in meter.rows]

    one, all_at_once = Meter(), Meter()
    for t in range(50):
        one.episodes((t + 1) * 4, reward[t], done[t])
    all_at_once.episodes(100, reward[:25], done[:25])
    all_at_once.episodes(200, reward[25:], done[25:])
    assert len(found(one)) == done.sum()
    for x, y in zip(found(one), found(all_at_once), strict=True):
        assert x["global_step"] == y["global_step"] and x["charts/episodic_length"] == y["charts/episodic_length"]
        assert x["charts/episodic_return"] == pytest.approx(y["charts/episodic_return"])


# ---------------------------------------------------------------------- files
def test_a_run_names_the_commit_of_the_library(monkeypatch):
    """A script of one's own has a repository of its own, or none."""
    head = run("git", "-C", ROOT, "rev-parse", "HEAD").stdout[:12]
    assert own_state.__wrapped__().removesuffix(".changed") == f"+g{head}"
    monkeypatch.setattr(run_folder, "in_checkout", lambda: False)
    assert own_state.__wrapped__() == ""


@pytest.mark.disk
def test_the_run_folder_tells_the_whole_story(train):
    v = train("ppo", *TINY, "--eval-every", "300", "--capture-video", "--exp-name", "mine")
    folder = v["run"].dir
    env_id, name, seed, stamp = folder.name.split("__")
    assert (env_id, name, seed) == ("CartPole-v1", "mine", "1") and time.strptime(stamp, "%Y%m%d-%H%M%S")
    config = json.loads((folder / "config.json").read_text())
    assert config["script"] == "ppo.py" and config["args"]["num_steps"] == 32 and config["args"]["exp_name"] == "mine"
    assert config["versions"]["torch"] == torch.__version__ and config["machine"]["cores"] == os.cpu_count()
    assert len(config["git"]["commit"]) == 40
    assert config["versions"]["solorl"] == f"{__version__}{own_state()}"
    assert (folder / "ppo.py").read_bytes() == script("ppo").read_bytes()
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"
    steps = [row["global_step"] for row in rows(folder, "losses/value_loss")]
    assert steps == list(range(64, 641, 64))
    evaluations = [row["global_step"] for row in rows(folder, "eval/episodic_return")]
    assert evaluations == [320, 640]  # 640 is the end: evaluated once
    assert sorted(p.name for p in (folder / "videos").iterdir()) == ["step_320.mp4", "step_640.mp4"]
    import imageio.v2 as imageio

    frames = [np.asarray(frame) for frame in imageio.get_reader(folder / "videos" / "step_640.mp4")]
    assert frames[0].shape == (400, 600, 3) and len(frames) > 5 and frames[0].std() > 1
    picture = np.asarray(imageio.imread(folder / "learning_curve.png"))
    assert picture.shape[0] > 300 and picture.std() > 1
    for line in ("trained", "evaluation", "curve", "video", "model", f"solo play {folder}"):
        assert line in train.out


def test_every_row_has_step_and_time_and_all_keys_of_the_page(train):
    v = train("ppo", *TINY)
    every = rows(v["run"].dir)
    assert all({"global_step", "wall_time"} <= row.keys() for row in every)
    assert [row["wall_time"] for row in every] == sorted(row["wall_time"] for row in every)
    keys = {key for row in every for key in row} - {"global_step", "wall_time"}
    assert keys == documented_keys("ppo")


def test_rows_say_where_the_time_went(train, monkeypatch):
    """Seconds of the environments, of gradient steps and of all else, which add up to those since the row before."""
    step, slow = VectorEnvs.step, GradientStep.__call__
    monkeypatch.setattr(VectorEnvs, "step", lambda *inputs: (time.sleep(0.002), step(*inputs))[1])
    monkeypatch.setattr(GradientStep, "__call__", lambda *inputs: (time.sleep(0.01), slow(*inputs))[1])
    v = train("ppo", *TINY)
    lines = (v["run"].dir / "metrics.jsonl").read_text().splitlines()
    every = [row for row in map(json.loads, lines) if "charts/SPS" in row]
    assert len(every) > 2
    args = v["args"]
    for before, row in pairwise(every):
        spent = {name: row[f"time/{name}"] for name in ("environment", "update", "other")}
        assert spent["environment"] >= 0.002 * args.num_steps and spent["other"] >= 0
        assert spent["update"] >= 0.01 * args.update_epochs * args.num_minibatches
        assert sum(spent.values()) <= row["wall_time"] - before["wall_time"] + 0.01


def test_tensorboard_holds_what_the_metrics_file_holds(train):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    v = train("ppo", *TINY)
    events = EventAccumulator(str(v["run"].dir), size_guidance={"scalars": 0}).Reload()
    for key in ("losses/value_loss", "charts/SPS", "eval/episodic_return"):
        expected = [(row["global_step"], np.float32(row[key])) for row in rows(v["run"].dir, key)]
        assert [(event.step, np.float32(event.value)) for event in events.Scalars(key)] == expected


def test_wandb_offline_gets_every_row(train, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    v = train("ppo", *TINY, "--track", "--wandb-project-name", "here")
    file = next(v["run"].dir.glob("wandb/offline-run-*/run-*.wandb"))
    data = file.read_bytes()
    assert data.startswith(b":W&B") and data.count(b"losses/value_loss") >= 10 and b"here" in data
    trust.refuse_links(v["run"].dir)  # what it has left there hinders neither `solo play` nor --resume


def test_each_of_several_seeds_has_a_run_of_wandb_of_its_own(train, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train("ppo_jax", "--num-seeds", 2, "--total-timesteps", 1024, "--eval-every", 512, "--eval-episodes", 1, "--track")
    files = sorted(tmp_path.glob("runs/*/wandb/offline-run-*/run-*.wandb"))
    counts = [file.read_bytes().count(b"eval/episodic_return_std") for file in files]
    assert len(files) == 2 and counts[0] == counts[1] > 0


def test_tracking_without_wandb_is_refused_before_anything_is_written(train, solo, tmp_path, monkeypatch):
    """Playing a run that was tracked needs no tracker."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    sentence = "error: --track needs an extra: pip install 'solorl[wandb]'; --no-track trains without\n"
    train("ppo", *TINY, "--track", code=2)
    assert train.out == sentence and not (tmp_path / "runs").exists()
    run_dir = train("ppo", *TINY)["run"].dir
    train("ppo", "--resume", run_dir, "--track", code=2)
    assert train.out == sentence
    code, out, err = solo("play", run_dir, "--episodes", "1")
    assert code == 0 and "over 1 greedy episodes" in out, err


def test_tracking_without_a_login_is_refused_before_anything_is_written(train, tmp_path, monkeypatch):
    """A login is a key in the environment or in the netrc file; without a network none is needed."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    train("ppo", *TINY, "--track", code=2)
    assert train.out.startswith("error: --track needs a login of Weights & Biases: `wandb login` or WANDB_API_KEY;")
    assert train.out.count("\n") == 1 and not (tmp_path / "runs").exists()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    trackers.check_wandb(RunArgs(track=True))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(UsageError, match="needs a login"):
        trackers.check_wandb(RunArgs(track=True))
    for name, value in (("WANDB_API_KEY", "secret"), ("WANDB_MODE", "offline")):
        with monkeypatch.context() as given:
            given.setenv(name, value)
            trackers.check_wandb(RunArgs(track=True))


def test_a_folder_named_wandb_is_no_tracker(tmp_path, monkeypatch, capsys):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(SystemExit) as end:
        Run(RunArgs(track=True))
    refused((end.value.code, *capsys.readouterr()), "--track needs an extra")


def test_a_tracker_that_fails_gives_one_warning(train, monkeypatch, capsys):
    calls = []

    def fail(self, step, metrics):
        calls.append(step)
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(trackers.TensorBoard, "write", fail)
    train("ppo", *TINY)
    assert train.out.count("TensorBoard is off, the training continues: RuntimeError: disk on fire") == 1
    assert len(calls) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_tensorboard_never_waits_for_a_full_disk(tmp_path, capsys):
    """Nor does it leave a thread, an open file, or more than one sentence."""
    threads = threading.active_count()
    tracker = trackers.Safe("TensorBoard", lambda: trackers.TensorBoard(tmp_path, None))
    tracker.write(1, {"a": 1.0})
    [file] = tmp_path.glob("events.out.tfevents.*")
    file.unlink()
    file.symlink_to("/dev/full")
    for step in range(2, 100):
        tracker.write(step, {"a": 1.0})
    tracker.close()
    assert threading.active_count() == threads
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "TensorBoard is off, the training continues: OSError: [Errno 28]" in err


def test_rows_wait_for_a_full_disk(tmp_path, monkeypatch, capsys):
    file = trackers.MetricsFile(tmp_path / "metrics.jsonl")
    file.write([{"a": 1}])
    real = open

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.open", full)
    file.write([{"a": 2}])
    file.write([{"a": 3}])
    with pytest.raises(OSError, match="No space"):
        file.sync()
    monkeypatch.setattr("builtins.open", real)
    file.write([{"a": 4}])
    assert [row["a"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("cannot be written (No space left on device)") == 1


def test_a_save_that_fails_keeps_the_training_and_the_last_checkpoint(train, tmp_path, monkeypatch):
    real, calls = state.write_state, []

    def sometimes(folder, tree):
        calls.append(folder)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(folder, tree)

    monkeypatch.setattr(state, "write_state", sometimes)
    train("ppo", *TINY, "--save-every", "64", code=4)
    assert "could not be written (No space left on device); the one before it is kept" in train.out
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert train.out.splitlines()[-1].endswith(
        f"could not be written to {run_dir}: checkpoint (No space left on device)"
    )
    kept = [path.name for path in state.steps_in(run_dir / "checkpoint")]
    assert kept == ["step_000000000064", "step_000000000128"]


# ---------------------------------------------------------------------- models and play
def test_best_and_last_model_and_play(train):
    """`model.safetensors` is the model of the best evaluation; `solo play` scores exactly what its metadata says when
    it plays the evaluation's episodes."""
    v = train("ppo", *TINY, "--total-timesteps", "3200", "--eval-every", "640", "--learning-rate", "0.01")
    folder = v["run"].dir
    evaluations = rows(folder, "eval/episodic_return")
    best = max(evaluations, key=lambda row: row["eval/episodic_return"])
    with safe_open(folder / "model.safetensors", "np") as file:
        about = file.metadata()
    assert int(about["step"]) == best["global_step"]
    assert float(about["eval/episodic_return"]) == best["eval/episodic_return"]
    last = load_file(folder / "model_last.safetensors")
    for name, tensor in v["agent"].state_dict().items():
        assert np.array_equal(last[f"agent.{name}"], tensor.numpy())
    shown = run(sys.executable, "-m", "solorl.cli", "play", folder, "--episodes", "3", "--video")
    assert shown.returncode == 0 and "over 3 greedy episodes" in shown.stdout, shown.stderr
    assert (folder / "videos" / "play.mp4").stat().st_size > 1000


# ---------------------------------------------------------------------- how a run ends
def test_target_return_is_confirmed_on_fresh_seeds(train):
    v = train("ppo", *TINY, "--target-return", "9", "--eval-every", "64")
    assert v["run"].step == 64 and "target 9 reached; on fresh seeds" in train.out and "done" in train.out
    v = train("ppo", *TINY, "--target-return", "501", "--eval-every", "64")
    assert v["run"].step == 640


def test_a_target_missed_on_fresh_seeds_does_not_end_the_run(train, monkeypatch):
    real = evaluation.Evaluator.play

    def worse(self, stream, *rest, **named):
        returns, lengths = real(self, stream, *rest, **named)
        return returns * (stream != device.CONFIRM), lengths

    monkeypatch.setattr(evaluation.Evaluator, "play", worse)
    v = train("ppo", *TINY, "--target-return", "9", "--eval-every", "64")
    assert v["run"].step == 640 and train.out.count("on fresh seeds 0.0: continuing") >= 1


def test_a_run_that_has_reached_its_target_ends_where_it_is_resumed(train):
    """Be it killed before it could write its last model, or finished; with another target it trains further."""
    run_dir = train("ppo", *TINY, "--target-return", "9", "--eval-every", "64")["run"].dir
    last, before = run_dir / "model_last.safetensors", rows(run_dir)
    data = last.read_bytes()
    last.unlink()
    v = train("ppo", "--resume", run_dir)
    assert v["run"].step == 64 and "resumed at step 64" in train.out and "trained" in train.out
    assert last.read_bytes() == data and rows(run_dir) == before and v["run"].folder.status == "finished"
    assert train("ppo", "--resume", run_dir, "--target-return", "501")["run"].step == 640


def test_a_target_of_the_environment(train):
    """`auto` is CartPole's threshold; the run folder has the number, which is that of a resumed run, too."""
    run_dir = train("ppo", *TINY, "--target-return", "auto")["run"].dir
    assert json.loads((run_dir / "config.json").read_text())["args"]["target_return"] == 475.0
    assert train("ppo", "--resume", run_dir)["args"].target_return == 475.0


def test_evaluations_with_more_episodes_are_resumed_exactly(train):
    """The last checkpoint thrown away, the run continues from the one before: best score and episodes."""
    flags = "--eval-every 64 --eval-more --save-every 256 --learning-rate 0.01".split()
    run_dir = train("ppo", *TINY, *flags)["run"].dir
    expected, model = comparable(run_dir), load_file(run_dir / "model.safetensors")
    assert {row["eval/episodes"] for row in rows(run_dir, "eval/episodic_return")} == {2, 4}
    assert re.search(r"evaluation \S+ ± \S+ over 4 episodes", train.out)
    drop_last_checkpoint(run_dir)
    train("ppo", "--resume", run_dir)
    assert comparable(run_dir) == expected
    again = load_file(run_dir / "model.safetensors")
    assert all(np.array_equal(model[name], again[name]) for name in model)


# ---------------------------------------------------------------------- the picture while it runs
def test_plot_draws_the_picture_again_with_every_evaluation(train, solo, monkeypatch):
    """Each time with all evaluations so far; the folder is that of a run which has not ended."""
    drawn = []

    def draw(*words):
        with monkeypatch.context() as patch:
            patch.setattr(figures, "save", lambda figure, path, kinds: drawn.append((figure, path, kinds)))
            assert solo(*words)[0] == 0
        return True, ""

    monkeypatch.setattr("solorl.run.ending.solo", draw)
    run_dir = train("ppo", *TINY, "--plot", "--eval-every", "256")["run"].dir
    assert [(path, kinds) for _, path, kinds in drawn] == [(run_dir / "curve.png", ("png",))] * 3
    evaluations = [line for figure, *_ in drawn for line in figure.axes[0].lines[-1:]]
    assert [line.get_xdata().tolist() for line in evaluations] == [[256], [256, 512], [256, 512, 640]]
    wanted = [row["eval/episodic_return"] for row in rows(run_dir, "eval/episodic_return")]
    assert evaluations[-1].get_ydata().tolist() == wanted
    train("ppo", *TINY)
    assert len(drawn) == 3  # off by default


def test_plot_leaves_a_picture_and_a_failure_one_warning(train, monkeypatch):
    run_dir = train("ppo", *TINY, "--plot", "--eval-every", "0")["run"].dir
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG") and "warning" not in train.out
    monkeypatch.setattr("solorl.run.hub.command_of", lambda *words: ["/bin/false"])
    run_dir = train("ppo", *TINY, "--plot", "--eval-every", "0")["run"].dir
    assert "warning: no curve.png: exit code 1" in train.out and not (run_dir / "curve.png").exists()


def test_a_file_named_stop_ends_the_run_cleanly(tmp_path):
    words = [sys.executable, script("ppo"), "--num-steps", "32", "--eval-episodes", "1", "--runs-dir", tmp_path]
    process = subprocess.Popen([*map(str, words)], env=environment(), stdout=subprocess.PIPE, text=True)
    while not (found := list(tmp_path.glob("*/metrics.jsonl"))):
        time.sleep(0.02)
        assert process.poll() is None
    (found[0].parent / "stop").touch()
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "asks to end here" in out and "evaluation" in out
    assert json.loads((found[0].parent / "status.json").read_text())["status"] == "stopped"
    assert not (found[0].parent / "stop").exists()


def test_nan_ends_the_run_and_names_the_first_bad_quantity(train, tmp_path):
    train("ppo", "--env-id", "probes:Broken-v0", *TINY, code=3)
    assert "losses/explained_variance is nan in iteration 1 (step 128)" in train.out
    folder = next((tmp_path / "runs").iterdir())
    assert json.loads((folder / "status.json").read_text())["status"] == "diverged: losses/explained_variance is nan"
    crash = state.read_state(folder / "crash")
    assert "agent" in crash["parts"] and crash["step"] == 128


def test_the_way_to_go_on_is_as_short_as_it_can_be(tmp_path, monkeypatch):
    """An algorithm by its name, any other file by its path from here; ready to paste."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("solorl.run.ending._solo", lambda: "solo")  # the tests may run where it needs quotes
    (tmp_path / "my files").mkdir()
    shutil.copy(script("ppo"), tmp_path / "my files" / "ppo.py")
    for path, folder, end in (
        (script("ppo"), "runs/a", "solo train ppo --resume runs/a"),
        (script("ppo"), tmp_path / "runs" / "a b", "solo train ppo --resume 'runs/a b'"),
        (tmp_path / "my files" / "ppo.py", "/elsewhere/a", "solo train 'my files/ppo.py' --resume /elsewhere/a"),
        ("my files/ppo.py", "runs/a", "solo train 'my files/ppo.py' --resume runs/a"),
    ):
        hint = how_to_go_on(Path(path), Path(folder))
        assert hint.startswith("continue with: ") and hint.endswith(end)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path):
    words = [sys.executable, script("ppo"), "--num-steps", "4096", "--update-epochs", "200", "--runs-dir", tmp_path]
    process = subprocess.Popen([*map(str, words)], env=environment(), stdout=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("*/status.json")):
        time.sleep(0.02)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None  # it wants to finish its long iteration
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert json.loads(next(tmp_path.glob("*/status.json")).read_text())["status"] == "failed"


@pytest.mark.slow
def test_below_a_worker_a_second_signal_is_the_first_one_again(tmp_path):
    """A scheduler signals all processes of a job, and the worker passes the signal on."""
    words = [sys.executable, script("ppo"), "--num-steps", "256", "--save-every", "256", "--runs-dir", tmp_path]
    env = environment(SOLORL_WORKER="1")
    process = subprocess.Popen([*map(str, words)], env=env, stdout=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("*/checkpoint/step_*/manifest.json")):
        time.sleep(0.02)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(next(tmp_path.glob("*/status.json")).read_text())["status"] == "stopped"


def test_a_script_that_crashes_is_marked_failed(tmp_path):
    copy = tmp_path / "ppo.py"
    boom = "raise RuntimeError('boom')\n        # ---- 2."
    copy.write_text(script("ppo").read_text().replace("# ---- 2. credit", boom))
    done = run(sys.executable, copy, *TINY, "--runs-dir", tmp_path / "runs")
    assert done.returncode == 1 and "boom" in done.stderr
    assert json.loads(next(tmp_path.glob("runs/*/status.json")).read_text())["status"] == "failed"


@pytest.mark.slow
def test_variables_stay_in_the_shell_after_ctrl_c(tmp_path):
    """`python -i` keeps the script's variables when Ctrl+C ends the run."""
    words = [sys.executable, "-i", script("ppo"), "--num-steps", "32", "--runs-dir", tmp_path]
    process = subprocess.Popen(
        [*map(str, words)], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while not list(tmp_path.glob("*/metrics.jsonl")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out = process.communicate("print('weights', agent.actor[0].weight.shape)\n", timeout=60)[0]
    assert "weights torch.Size([64, 4])" in out


@pytest.mark.slow
# ---------------------------------------------------------------------- the terminal
def test_the_progress_line_renews_itself_in_a_terminal(tmp_path):
    """In a pseudo-terminal: one line with a bar, return, evaluation, steps per second and time left, in colours."""
    import pty

    master, slave = pty.openpty()
    words = [sys.executable, script("ppo"), *TINY, "--total-timesteps", "6400", "--runs-dir", tmp_path]
    process = subprocess.Popen(
        [*map(str, words)], env=environment(COLUMNS="100", TERM="xterm"), stdout=slave, stderr=slave
    )
    os.close(slave)
    data = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:
            break
        if not chunk:
            break
        data += chunk
    process.wait(timeout=60)
    text = data.decode()
    lines = [part for part in text.split("\r\033[K") if part.startswith("step ") and "steps/s" in part]
    assert len(lines) > 3 and all("\n" not in line.rstrip() for line in lines)
    assert "return" in lines[-1] and "evaluation" in lines[-1] and "left" in lines[-1]
    assert "\033[32m━" in lines[-1] and lines[0].count("━") < lines[-1].count("━")
    assert "\033[36mstep" in text and "\033[1mtrained" in text and "device cpu, 1 thread" in text
