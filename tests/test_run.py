"""The run library: its files say what happened, and it changes nothing of what is learned."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, comparable, environment, rows, run, script
from safetensors import safe_open
from safetensors.numpy import load_file

from solorl import Run, evaluation, state, trackers
from solorl import run as run_module

TINY = "--num-envs 2 --num-steps 32 --total-timesteps 640 --eval-episodes 2".split()


def weights(variables):
    return {name: tensor.clone() for name, tensor in variables["agent"].state_dict().items()}


def assert_equal_weights(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------- nothing of it moves the training
@pytest.mark.parametrize(
    "flags",
    [
        "--eval-every 64 --save-every 64",
        "--eval-every 64 --capture-video",
        "--eval-every 0 --save-every 0 --no-save-model",
        "--track --eval-every 200",
    ],
)
def test_plumbing_is_inert(train, flags, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    plain = train("ppo", *TINY, "--eval-every", "0", "--save-every", "0")
    other = train("ppo", *TINY, *flags.split())
    assert_equal_weights(weights(plain), weights(other))
    kept = [[row for row in comparable(v["run"].dir) if "eval/episodic_return" not in row] for v in (plain, other)]
    assert kept[0] == kept[1]


def test_evaluation_leaves_the_random_states_alone():
    before = state.random_states()
    with evaluation.undisturbed():
        np.random.rand(), torch.rand(1)
    assert state.encode(before, {}) == state.encode(state.random_states(), {})
    x, y = {}, {}
    state.encode(before, x), state.encode(state.random_states(), y)
    assert all(np.array_equal(x[key], y[key]) for key in x)


def test_environment_seeds_are_disjoint():
    """Over run seeds, streams, ranks and indices no two seeds are the same, and all fit into 63 bits."""
    v = train("ppo", *TINY, "--target-return", "501", "--eval-every", "64")
    assert v["run"]._step == 640


def test_a_file_named_stop_ends_the_run_cleanly(tmp_path):
    words = [sys.executable, script("ppo"), "--num-steps", "32", "--eval-episodes", "1", "--runs-dir", tmp_path]
    process = subprocess.Popen([*map(str, words)], env=environment(), stdout=subprocess.PIPE, text=True)
    while not (found := list(tmp_path.glob("*/metrics.jsonl"))):
        time.sleep(0.02)
        assert process.poll() is None
    (found[0].parent / "stop").touch()
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "asks to end here" in out and "evaluation" in out
    assert json.loads((found[0].parent / "status.json").read_text())["status"] == "finished"
    assert not (found[0].parent / "stop").exists()


def test_nan_ends_the_run_and_names_the_first_bad_quantity(train, tmp_path):
    train("ppo", "--env-id", "probes:Broken-v0", *TINY, code=3)
    assert "losses/value_loss is nan in iteration 1 (step 128)" in train.out
    folder = next((tmp_path / "runs").iterdir())
    assert json.loads((folder / "status.json").read_text())["status"] == "diverged: losses/value_loss is nan"
    crash = state.read_state(folder / "crash")
    assert "agent" in crash["parts"] and crash["step"] == 128


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


def test_a_script_that_crashes_is_marked_failed(tmp_path):
    copy = tmp_path / "ppo.py"
    copy.write_text(
        script("ppo").read_text().replace("# ---- 2. credit", "raise RuntimeError('boom')\n        # ---- 2.")
    )
    done = run(sys.executable, copy, *TINY, "--runs-dir", tmp_path / "runs")
    assert done.returncode == 1 and "boom" in done.stderr
    assert json.loads(next(tmp_path.glob("runs/*/status.json")).read_text())["status"] == "failed"


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


# ---------------------------------------------------------------------- the terminal
def test_the_progress_line_renews_itself_in_a_terminal(tmp_path):
    """In a pseudo-terminal: one line with return, evaluation, steps per second and time left."""
    import pty

    master, slave = pty.openpty()
    words = [sys.executable, script("ppo"), *TINY, "--total-timesteps", "6400", "--runs-dir", tmp_path]
    process = subprocess.Popen([*map(str, words)], env=environment(COLUMNS="100"), stdout=slave, stderr=slave)
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
