"""A run can be killed at any moment and goes on exactly: real processes, really killed."""

import gc
import json
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
from conftest import comparable, drop_last_checkpoint, environment, rows, script
from safetensors.numpy import load_file

from solorl.checkpoints import checkpoint

# A short training with evaluations and checkpoints; 2 environments, so that episodes are cut at different moments.
FLAGS = {
    "CartPole-v1": "--total-timesteps 16384 --num-steps 64 --num-envs 2 --save-every 1000 --eval-every 4000",
    "Acrobot-v1": "--total-timesteps 12288 --num-steps 64 --num-envs 2 --save-every 1000 --eval-every 5000",
    "LunarLander-v3": "--total-timesteps 12288 --num-steps 64 --num-envs 2 --save-every 1000 --eval-every 5000",
}


def command(env_id, runs_dir, *flags):
    words = [sys.executable, script("ppo"), "--env-id", env_id, *FLAGS[env_id].split(), "--eval-episodes", "2"]
    return [*map(str, words), "--runs-dir", str(runs_dir), *flags]


def start(words):
    return subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(words):
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def wait_for_steps(run_dir, steps, process):
    """Wait until metrics.jsonl in the only folder below `run_dir` has passed `steps`; return that folder."""
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        for file in run_dir.glob("*/metrics.jsonl"):
            lines = file.read_text().splitlines()
            if len(lines) > 1 and json.loads(lines[-2])["global_step"] >= steps:
                return file.parent
        time.sleep(0.005)
    raise AssertionError(f"no {steps} steps before the end: {process.communicate()[0]}")


def assert_same_run(a, b):
    """Weights, optimiser and every metric but the clock's are bit-equal."""
    assert comparable(a) == comparable(b)
    for name in ("model.safetensors", "model_last.safetensors"):
        x, y = load_file(a / name), load_file(b / name)
        assert x.keys() == y.keys() and all(np.array_equal(x[key], y[key]) for key in x), name
    x, y = (load_file(sorted((run / "checkpoint").iterdir())[-1] / "tensors.safetensors") for run in (a, b))
    assert x.keys() == y.keys() and all(np.array_equal(x[key], y[key]) for key in x)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """One whole run per environment, made when first asked for."""
    made = {}

    def get(env_id):
        if env_id not in made:
            folder = tmp_path_factory.mktemp("whole")
            finish(command(env_id, folder))
            made[env_id] = next(folder.iterdir())
        return made[env_id]

    return get


@pytest.mark.parametrize(
    ("env_id", "kills"),
    [
        pytest.param("CartPole-v1", 1, marks=pytest.mark.slow),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in ("CartPole-v1", "LunarLander-v3", "Acrobot-v1")),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(env_id, kills, tmp_path, uninterrupted):
    """kill -9 at random moments, up to three sessions long; each kill loses at most one interval of --save-every."""
    whole, rng = uninterrupted(env_id), random.Random(time.time_ns())
    process = start(command(env_id, tmp_path))
    run_dir = wait_for_steps(tmp_path, rng.randrange(1500, 4000), process)
    for kill in range(kills):
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.wait()
        reached = max((row["global_step"] for row in rows_of_whole_lines(run_dir)), default=0)
        words = [sys.executable, str(script("ppo")), "--resume", str(run_dir)]
        if kill + 1 == kills:
            out = finish(words)
            assert "resumed at step" in out
            resumed_at = int(out.split("resumed at step ")[1].split()[0].replace(",", ""))
            assert reached - resumed_at <= 1000 + 128
            break
        process = start(words)
        wait_for_steps(tmp_path, min(reached + rng.randrange(1200, 2500), 11000), process)
    assert_same_run(whole, run_dir)


def rows_of_whole_lines(run_dir):
    """The rows of a file that a kill may have torn in its last line."""
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("sig", "code"), [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_signals_save_and_say_how_to_go_on(sig, code, tmp_path, uninterrupted):
    process = start(command("CartPole-v1", tmp_path))
    run_dir = wait_for_steps(tmp_path, 3000, process)
    process.send_signal(sig)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == code and "Traceback" not in out
    assert f"--resume {run_dir}" in out and json.loads((run_dir / "status.json").read_text())["status"] == "stopped"
    saved = int(sorted((run_dir / "checkpoint").iterdir())[-1].name.removeprefix("step_"))
    assert saved == json.loads((run_dir / "status.json").read_text())["global_step"]  # nothing is lost
    assert 0 <= saved - rows(run_dir)[-1]["global_step"] < 500
    finish([sys.executable, str(script("ppo")), "--resume", str(run_dir)])
    assert_same_run(uninterrupted("CartPole-v1"), run_dir)


@pytest.mark.parametrize(
    "damage",
    [
        "bit flipped",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("truncated", "missing file", "manifest garbled")),
    ],
)
@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(damage, tmp_path, uninterrupted):
    """The one before is used, the run says so, and the result is the same."""
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted("CartPole-v1"), run_dir)
    before, newest = sorted((run_dir / "checkpoint").iterdir())
    tensors = newest / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    if damage == "truncated":
        tensors.write_bytes(data[: len(data) // 2])
    elif damage == "bit flipped":
        data[len(data) // 2] ^= 1
        tensors.write_bytes(data)
    elif damage == "missing file":
        (newest / "state.json").unlink()
    else:
        (newest / "manifest.json").write_text('{"format": 1, "sha256": {')
    out = finish([sys.executable, str(script("ppo")), "--resume", str(run_dir)])
    assert newest.name in out and "continuing from the checkpoint before it" in out
    assert f"resumed at step {int(before.name.removeprefix('step_')):,}" in out
    assert_same_run(uninterrupted("CartPole-v1"), run_dir)


@pytest.mark.slow
def test_a_finished_run_resumed_stays_as_it_is(tmp_path, uninterrupted):
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted("CartPole-v1"), run_dir)
    finish([sys.executable, str(script("ppo")), "--resume", str(run_dir)])
    assert_same_run(uninterrupted("CartPole-v1"), run_dir)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path, uninterrupted):
    process = start(command("CartPole-v1", tmp_path, "--save-every", "0"))
    run_dir = wait_for_steps(tmp_path, 5000, process)
    process.kill()
    process.wait()
    model = (run_dir / "model.safetensors").read_bytes()  # of the evaluation after 4,000 steps
    out = finish([sys.executable, str(script("ppo")), "--resume", str(run_dir)])
    assert f"no checkpoint in {run_dir} yet: starting from the beginning" in out
    assert_same_run(uninterrupted("CartPole-v1"), run_dir)
    assert (run_dir / "model_before.safetensors").read_bytes() == model


def test_simulators_that_cannot_be_replayed_restart_their_episodes_and_say_so(train, tmp_path):
    flags = "--env-id probes:Fickle-v0 --total-timesteps 128 --num-envs 2 --num-steps 32 --eval-episodes 1".split()
    v = train("ppo", *flags, "--save-every", "64")
    drop_last_checkpoint(v["run"].dir)
    v = train("ppo", "--resume", v["run"].dir)
    assert "did not replay exactly" in train.out and "[0, 1] restart" in train.out and v["start"] == 1
    assert v["run"].meter.lengths.tolist() == [32, 32]  # steps since the resume only


def test_a_restored_checkpoint_is_not_kept_in_memory(train, monkeypatch):
    """It may be gigabytes: a replay buffer that is part of a JAX training."""
    flags = ["--total-timesteps", 64, "--num-steps", 16, "--num-envs", 2, "--eval-episodes", 1]
    run_dir = train("ppo", *flags)["run"].dir
    load, read = checkpoint.load_checkpoint, []

    def noted(*where):
        tree, notes = load(*where)
        read.extend(weakref.ref(tensor) for tensor in tree["parts"]["agent"].values())
        return tree, notes

    monkeypatch.setattr(checkpoint, "load_checkpoint", noted)
    again = train("ppo", "--resume", run_dir)["run"]
    assert again.step == 64 and again.checkpoints.resumed["step"] == 64
    gc.collect()
    assert read and all(tensor() is None for tensor in read)
