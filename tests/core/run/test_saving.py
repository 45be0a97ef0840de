"""What a run leaves in its folder: nothing good is lost, and where something is missing in the end, it says so."""

import errno
import json
import os
import shutil
import subprocess
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from conftest import environment, rows, script
from safetensors.numpy import load_file

from solorl import Run, terminal
from solorl.checkpoints import checkpoint as state
from solorl.envs.guest import hosted, wrong
from solorl.envs.vector import VectorEnvs
from solorl.files import write_atomically
from solorl.run import saving, trackers

TINY = "--num-envs 2 --num-steps 32 --total-timesteps 640 --eval-episodes 2 --eval-every 320 --save-every 320".split()
DQN = "--learning-starts 100 --batch-size 16 --total-timesteps 600 --eval-episodes 1".split()
SMALL = "--num-seeds 2 --num-envs 2 --num-steps 32 --eval-episodes 1 --eval-every 0".split()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def status(folder):
    return json.loads((folder / "status.json").read_text())["status"]


def only_folder(tmp_path):
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def changed(tmp_path, name, line, before):
    """A copy of an algorithm file with statements before the line that begins with `line`."""
    source = script(name).read_text()
    assert source.count(line) == 1
    (tmp_path / f"{name}.py").write_text(source.replace(line, before + line))
    return tmp_path / f"{name}.py"


# ---------------------------------------------------------------------- a checkpoint that is gone
def test_a_run_that_has_lost_its_checkpoint_is_refused_and_left_as_it_is(train):
    run_dir = train("ppo", *TINY)["run"].dir
    record = json.loads((run_dir / "status.json").read_text())

    def killed(folder, **changes):
        """As a SIGKILL leaves it: it says that it runs, and has no last model."""
        (folder / "status.json").write_text(json.dumps(record | {"status": "running"} | changes))
        (folder / "model_last.safetensors").unlink()

    cases = {
        "its status is finished, its newest step 640": lambda folder: None,
        "its status is running, its newest step 320": lambda folder: killed(folder, checkpoint=320),
        "its status is finished, its newest step None": lambda folder: killed(
            folder, checkpoint=None, status="finished"
        ),
    }
    for i, (words, prepare) in enumerate(cases.items()):
        folder = run_dir.with_name(f"copy{i}")
        shutil.copytree(run_dir, folder)
        shutil.rmtree(folder / "checkpoint")
        prepare(folder)
        before = contents(folder)
        train("ppo", "--resume", folder, code=2)
        assert train.out.startswith(f"error: {folder} has lost its checkpoint ({words}) and is left as it is; ")
        assert train.out.count("\n") == 1
        assert contents(folder) == before and not (folder / "checkpoint").exists()


# ---------------------------------------------------------------------- what cannot be written
@pytest.mark.parametrize("what", ["removed", "moved"])
def test_a_run_folder_that_goes_away_ends_with_a_sentence_and_exit_code_4(what, train, tmp_path, monkeypatch):
    save = Run.save

    def go_away(self, global_step, **parts):
        if global_step == 384 and what == "removed":
            shutil.rmtree(self.dir)
        elif global_step == 384:
            self.dir.rename(tmp_path / "elsewhere")
        save(self, global_step, **parts)

    monkeypatch.setattr(Run, "save", go_away)
    train("ppo", *TINY, "--save-every", "64", "--capture-video", code=4)
    said = train.out.splitlines()
    folder = said[0].removeprefix("run folder ")
    assert said[-1] == (
        "error: the training has come to step 640, but the final files could not be written: "
        f"{folder} has been moved or removed"
    )
    assert list((tmp_path / "runs").iterdir()) == []  # no part of it was made again
    summary = [line.split(None, 1) for line in said if line.startswith(("curve ", "model ", "play it "))]
    assert summary == [["curve", "none"], ["model", "none"]]
    if what == "moved":  # what was saved before is as it was
        assert [path.name for path in state.steps_in(tmp_path / "elsewhere" / "checkpoint")][-1].endswith("320")


def test_models_that_cannot_be_written_end_with_exit_code_4(train, tmp_path, monkeypatch):
    write = write_atomically

    def no_models(path, data):
        if path.name.startswith("model"):
            raise OSError(errno.EACCES, "Permission denied")
        write(path, data)

    monkeypatch.setattr(saving, "write_atomically", no_models)
    train("ppo", *TINY, code=4)
    folder = only_folder(tmp_path)
    assert train.out.splitlines()[-1] == (
        f"error: the training has come to step 640, but the final files could not be written to {folder}: "
        "model.safetensors (Permission denied), model_last.safetensors (Permission denied)"
    )
    assert "play it" not in train.out and f"{folder}/model" not in train.out
    assert f"curve       {folder / 'learning_curve.png'}" in train.out and status(folder) == "finished"


def test_rows_that_could_not_be_written_are_named_with_their_reason(train, tmp_path, monkeypatch):
    """Neither is the run called finished: who reads its rows would take them for all."""

    def fail(*args, **kwargs):
        raise OSError(errno.EACCES, "Permission denied")

    file = trackers.MetricsFile(tmp_path / "metrics.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", fail)
        with pytest.raises(OSError, match="Permission denied"):
            file.sync()
    save = Run.save

    def lock(self, global_step, **parts):
        if global_step == 640:
            (self.dir / "metrics.jsonl").unlink()
            (self.dir / "metrics.jsonl").mkdir()  # which nobody can write, not even root
        save(self, global_step, **parts)

    monkeypatch.setattr(Run, "save", lock)
    train("ppo", *TINY, code=4)
    end = train.out.splitlines()[-1]
    assert "metrics.jsonl (Is a directory)" in end and "No space" not in train.out
    assert status(only_folder(tmp_path)) == "failed"


def test_a_metrics_file_that_is_removed_begins_with_whole_rows(tmp_path):
    file = trackers.MetricsFile(tmp_path / "metrics.jsonl")
    file.write([{"a": 1.0}, {"a": 2.0}])
    (tmp_path / "metrics.jsonl").unlink()
    file.write([{"a": 3.0}])
    assert rows(tmp_path) == [{"a": 3.0}]


# ---------------------------------------------------------------------- numbers that are none
@pytest.mark.parametrize("flags", ["--save-every 100", "--eval-every 100 --save-every 0"])
@pytest.mark.parametrize("env_id", ["probes:NanOnce-v0", "probes:NanOnceLong-v0"])
def test_a_nan_return_ends_the_run_wherever_it_is_noticed(env_id, flags, train, tmp_path):
    """Also before the first row of metrics, and while the episode goes on."""
    train("dqn", "--env-id", env_id, *DQN, "--learning-starts", "1000", *flags.split(), code=3)
    folder = only_folder(tmp_path)
    assert "charts/episodic_return is nan" in train.out
    assert status(folder) == "diverged: charts/episodic_return is nan"
    assert "NaN" not in (folder / "metrics.jsonl").read_text() and rows(folder)
    tree, _ = state.load_checkpoint(folder / "checkpoint")
    assert tree is None or np.isfinite(tree["run"]["returns"]).all()


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("NanSight", "in environment 0 the observation after 30 steps is nan"),  # the last of an episode
        ("NanSightLong", "in environment 0 the observation after 200 steps is inf"),  # it has not ended
        ("NanOnceLong", "in environment 0 the reward is nan in step 50 of an episode"),
    ],
)
def test_what_the_environment_gave_is_named_as_the_cause(kind, cause, train, tmp_path):
    flags = "--learning-starts 280 --num-envs 2 --total-timesteps 400 --log-every 400".split()
    train("dqn", "--env-id", f"probes:{kind}-v0", *flags, "--eval-episodes", "1", code=3)
    assert f"): {cause}; a snapshot is in" in train.out and "Traceback" not in train.out
    assert status(only_folder(tmp_path)).startswith("diverged: ")


def test_a_nan_that_is_learned_from_ends_the_run_with_a_sentence(train, tmp_path):
    """Also where values are positions among atoms, before the first row and the first checkpoint."""
    flags = "--learning-starts 320 --batch-size 128 --num-envs 2 --total-timesteps 400 --log-every 400".split()
    train("c51", "--env-id", "probes:NanOnceLong-v0", *flags, "--eval-episodes", "1", code=3)
    assert ": in environment 0 the reward is nan in step 50 of an episode; a snapshot is in" in train.out
    folder = only_folder(tmp_path)
    assert status(folder).startswith("diverged: ") and "Traceback" not in train.out
    train("c51", "--resume", folder, code=2)
    assert "has lost its checkpoint (its status is diverged: " in train.out


def test_the_environment_that_gave_it_is_named():
    sound, spoilt = (partial(gym.make, f"probes:{name}-v0") for name in ("OneStep", "NanSight"))
    envs = VectorEnvs([hosted(lambda env_id, make=make: make(), "Mine-v0") for make in (sound, spoilt)])
    envs.reset(seed=1)
    for _ in range(99):
        envs.step(np.zeros(2, int))
    assert wrong(envs) == ""
    envs.step(np.zeros(2, int))
    assert wrong(envs) == "in environment 1 the observation after 10 steps is nan"


@pytest.mark.parametrize("flags", ["--save-every 50", "--eval-every 50 --save-every 0"])
def test_weights_that_are_nan_replace_nothing(flags, train, tmp_path):
    """The losses are looked at every 500 steps only."""
    poison = "        if global_step == 300:\n            q_network.net[0].weight.data[0, 0] = float('nan')\n"
    copy = changed(tmp_path, "dqn", "        run.evaluate(", poison)
    train(copy, *DQN, *flags.split(), code=3)
    folder = only_folder(tmp_path)
    assert "q_network.net.0.weight is nan in iteration 29 (step 300); a snapshot is in" in train.out
    assert np.isnan(load_file(folder / "crash" / "tensors.safetensors")["/parts/q_network/net.0.weight"]).sum() == 1
    saved = list(folder.glob("checkpoint/*/tensors.safetensors")) + list(folder.glob("model*.safetensors"))
    assert len(saved) == (2 if "--save-every 50" in flags else 1)
    for file in saved:
        assert all(np.isfinite(array).all() for array in load_file(file).values() if array.dtype.kind == "f")
    if "--save-every 50" in flags:  # and the run can go on
        train(script("dqn"), "--resume", folder)
        assert "resumed at step 250" in train.out and status(folder) == "finished"


@pytest.mark.slow
def test_a_seed_with_nan_weights_ends_alone(train, tmp_path):
    poison = (
        "        if global_step == 256:\n"
        "            params = jax.tree.map(lambda x: x * jnp.nan, training[0].params)\n"
        "            training = [training[0]._replace(params=params), *training[1:]]\n"
    )
    copy = changed(tmp_path, "ppo_jax", "        run.save(", poison)
    train(copy, *SMALL, "--total-timesteps", 512, "--save-every", 128, code=3)
    diverged, other = sorted((tmp_path / "runs").iterdir(), key=lambda path: path.name.split("__")[2])
    assert status(diverged).startswith("diverged: params.") and status(other) == "finished"
    assert [path.name[-3:] for path in state.steps_in(diverged / "checkpoint")] == ["128"]
    assert [path.name[-3:] for path in state.steps_in(other / "checkpoint")] == ["384", "512"]


# ---------------------------------------------------------------------- signals
RUNNER = """
import os, runpy, signal, sys
from solorl.run import ending, verbs
path, where, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = path

def interrupted(function, place):
    def call(*args, **kwargs):
        for _ in range(where.split(",").count(place)):
            os.kill(os.getpid(), signal.SIGINT)
        return function(*args, **kwargs)
    return call

verbs.Run.log = interrupted(verbs.Run.log, "log")
ending.draw_learning_curve = interrupted(ending.draw_learning_curve, "draw")
try:
    runpy.run_path(path, run_name="__main__")
finally:
    interrupted(lambda: None, "exit")()
"""


@pytest.mark.parametrize(
    ("name", "where", "code", "state_of_run", "words"),
    [
        ("ppo", "draw", 0, "finished", "SIGINT: all is saved, evaluating and drawing; once more ends at once"),
        ("ppo", "log,log", 130, "failed", "SIGINT: the run ends at once, before its first checkpoint"),
        pytest.param(
            *("ppo", "log,draw", 130, "stopped", "SIGINT: the run ends at once, saved up to step 64"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("ppo", "draw,exit", 130, "finished", "SIGINT: the run ends at once, saved up to step 640"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("ppo_jax", "log,log", 130, "failed", "SIGINT: the run ends at once, before its first checkpoint"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_signal_shows_a_traceback(name, where, code, state_of_run, words, tmp_path):
    """Ctrl+C in the first `log`, while the learning curve is drawn, and after that."""
    flags = [*TINY, *(["--num-seeds", "2"] if "jax" in name else []), "--runs-dir", str(tmp_path / "runs")]
    command = [sys.executable, "-c", RUNNER, str(script(name)), where, *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert done.stdout.count(words) == 1, done.stdout
    folders = list((tmp_path / "runs").iterdir())
    assert [status(folder) for folder in folders] == [state_of_run] * (2 if "jax" in name else 1)
    if where == "log,draw":  # the way to go on was said before
        assert "SIGINT: saved at step 64; continue with: " in done.stdout


def test_a_word_in_the_middle_of_another_print_is_no_error(tmp_path):
    """Python refuses a print that a signal starts inside another one."""
    with open(tmp_path / "out", "w") as file:

        class Busy:
            fileno, isatty = file.fileno, file.isatty

            def write(self, text):
                raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

        terminal.say("a word", Busy())
    assert (tmp_path / "out").read_text() == "a word\n"


# ---------------------------------------------------------------------- files
def test_what_killed_processes_left_is_removed_on_resume(train):
    run_dir = train("ppo", *TINY)["run"].dir
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    leftovers = [run_dir / f".{name}.{dead.pid}" for name in ("model.safetensors", "status.json", "a.b")]
    others = [run_dir / f".model.safetensors.{os.getppid()}", run_dir / ".model.safetensors", run_dir / "notes.1"]
    for path in leftovers + others:
        path.write_text("half")
    train("ppo", "--resume", run_dir)
    assert not any(path.exists() for path in leftovers) and all(path.exists() for path in others)


def test_equal_models_are_equal_files(train):
    run = train("ppo", *TINY)["run"]
    found = set()
    for _ in range(8):
        run.checkpoints.save_model("model_last.safetensors", {"step": "640"})
        found.add((run.dir / "model_last.safetensors").read_bytes())
    assert len(found) == 1
