"""Trainings with several loops in a row: what a checkpoint brings back, how they end, and what is refused."""

import json
import os
import shutil
import signal
import sys

import numpy as np
import pytest
from conftest import TESTS, comparable, rows
from conftest import run as execute
from safetensors.numpy import load_file
from test_ppo_jax import folders, same

import solorl
from solorl.checkpoints import checkpoint
from solorl.run.ending import Ending
from solorl.run.verbs import Run

SCRIPT, JAX = TESTS / "doubles" / "phases.py", TESTS / "doubles" / "phases_jax.py"
WHOLE = [*(("warm", i) for i in range(4)), *(("offline", i) for i in range(5)), *(("online", i) for i in range(6))]
STEPS = [4, 8, 12, 16, 18, 20, 22, 24, 26, 30, 34, 38, 42, 46, 50]  # after each of them
SAVING = "--save-every 2 --eval-every 16".split()


@pytest.fixture(autouse=True)
def all_checkpoints(monkeypatch):
    monkeypatch.setattr(checkpoint, "KEEP", 100)


def steps_of(run_dir):
    return [checkpoint.step_of(path) for path in checkpoint.steps_in(run_dir / "checkpoint")]


def back_to(step, run_dir):
    """Throw away what came after this step."""
    for path in (run_dir / "checkpoint").iterdir():
        if checkpoint.step_of(path) > step:
            shutil.rmtree(path)


def result(run_dir):
    """All rows, and what the last model and the last checkpoint hold."""
    newest = max((run_dir / "checkpoint").iterdir())
    files = [load_file(path) for path in (run_dir / "model_last.safetensors", newest / "tensors.safetensors")]
    return comparable(run_dir), [{name: array.tolist() for name, array in each.items()} for each in files]


def status(run_dir):
    return json.loads((run_dir / "status.json").read_text())["status"]


# ---------------------------------------------------------------------- resuming
def test_resumed_in_any_loop_equals_uninterrupted(train):
    """Inside of each loop and at each border: weights, optimiser, environments, random numbers, rows."""
    v = train(SCRIPT, *SAVING)
    run_dir, want = v["run"].dir, result(v["run"].dir)
    assert v["trace"] == WHOLE and steps_of(run_dir) == STEPS
    assert [row["global_step"] for row in rows(run_dir, "eval/episodic_return")] == [18, 34, 50]
    for step in (50, 38, 26, 22, 16, 8):
        back_to(step, run_dir)
        again = train(SCRIPT, "--resume", run_dir)
        assert again["trace"] == WHOLE[STEPS.index(step) + 1 :] and result(run_dir) == want, step


def test_a_finished_run_is_extended_in_its_last_loop(train):
    short, long = train(SCRIPT, "--online", 4), train(SCRIPT)
    again = train(SCRIPT, "--resume", short["run"].dir, "--resume-changed", "--online", 6)
    assert again["trace"] == WHOLE[-2:] and result(short["run"].dir)[1] == result(long["run"].dir)[1]


# ---------------------------------------------------------------------- ends
def test_only_the_end_of_the_last_loop_is_the_end(train):
    """One row, one evaluation and one checkpoint where none is due before."""
    run_dir = train(SCRIPT, "--eval-every", 0, "--save-every", 0, "--log-every", 1000)["run"].dir
    assert [row["global_step"] for row in rows(run_dir) if "charts/episodic_return" not in row] == [50, 50]
    assert steps_of(run_dir) == [50] and status(run_dir) == "finished"


def test_a_loop_without_iterations_is_passed_over(train):
    v = train(SCRIPT, "--offline", 0, *SAVING)
    want, run_dir = result(v["run"].dir), v["run"].dir
    assert v["trace"] == [each for each in WHOLE if each[0] != "offline"]
    back_to(16, run_dir)
    train(SCRIPT, "--resume", run_dir)
    assert result(run_dir) == want


@pytest.mark.parametrize("by", ["signal", "stop", "target"])
def test_what_ends_a_loop_ends_those_after_it(by, train):
    """In each loop, also in its last iteration; resumed, the run equals one that was not interrupted."""
    flags = ["--save-every", 2, "--eval-every", 0]
    want = result(train(SCRIPT, *flags)["run"].dir)
    for step in (8, 16, 20, 26, 34):
        v = train(SCRIPT, *flags, "--end-at", step, "--by", by)
        run_dir = v["run"].dir
        assert v["trace"] == WHOLE[: STEPS.index(step) + 1] and steps_of(run_dir)[-1] == step
        assert status(run_dir) == ("finished" if by == "target" else "stopped")
        assert (run_dir / "model_last.safetensors").exists() == (by != "signal")
        train(SCRIPT, "--resume", run_dir, "--resume-changed", "--end-at", 0)
        if by == "target":  # its evaluation is a row more
            assert result(run_dir)[1] == want[1]
        else:
            assert result(run_dir) == want


def test_a_loop_after_one_that_the_script_has_left_hears_signals(train):
    v = train(SCRIPT, "--save-every", 2, "--eval-every", 0, "--breaks", "--end-at", 20)
    assert v["trace"] == [*WHOLE[:2], *WHOLE[4:6]] and status(v["run"].dir) == "stopped"
    assert steps_of(v["run"].dir)[-1] == 20


def test_the_end_hears_signals_where_the_script_has_left_the_last_loop(train, tmp_path, monkeypatch):
    """By a `break`, here at once: the evaluation of `close` is not interrupted."""
    heard, evaluate = [], Ending.evaluate

    def interrupted(self, *inputs):
        os.kill(os.getpid(), signal.SIGTERM)
        heard.append(self.signal)
        evaluate(self, *inputs)

    monkeypatch.setattr(Ending, "evaluate", interrupted)
    before = {number: signal.signal(number, lambda *_: heard.append(0)) for number in (signal.SIGINT, signal.SIGTERM)}
    last = "    for iteration in run.loop(start, args.online):  # a step is an environment step\n"
    text = SCRIPT.read_text()
    assert last in text
    (tmp_path / "mine.py").write_text(text.replace(last, f"{last}        break\n"))
    v = train(tmp_path / "mine.py", "--save-every", 0, "--eval-every", 0)
    assert heard == [signal.SIGTERM] and status(v["run"].dir) == "finished" and v["trace"] == WHOLE[:9]
    for number in before:
        signal.signal(number, before[number])


def test_a_played_run_has_no_iterations(train):
    run_dir = train(SCRIPT)["run"].dir
    before = comparable(run_dir)
    policy, obs = solorl.load(run_dir, trust_script=True), np.random.default_rng(0).normal(size=(9, 4))
    assert policy(obs.astype(np.float32)).shape == (9,) and comparable(run_dir) == before


@pytest.mark.slow
def test_a_standalone_copy_learns_the_same_in_all_loops(train, solo, tmp_path):
    want = load_file(train(SCRIPT)["run"].dir / "model_last.safetensors")
    copy, weights = tmp_path / "alone.py", tmp_path / "weights.npz"
    assert solo("copy", SCRIPT, copy, "--standalone")[0] == 0
    done = execute(sys.executable, copy, "--save-to", weights)
    assert done.returncode == 0, done.stderr
    found = np.load(weights)
    assert set(found) == set(want) and all(np.array_equal(found[name], want[name]) for name in want)


# ---------------------------------------------------------------------- what is refused
def test_a_step_that_falls_is_refused(train):
    train(SCRIPT, "--falls", code=2)
    assert train.out.splitlines()[-1].endswith(
        "global_step fell from 26 to 4: it must count on, also in a later loop and after --resume-changed"
    )


def test_a_loop_after_the_last_one_is_refused(train):
    train(SCRIPT, "--twice", code=2)
    assert train.out.endswith("error: a loop came after the last one: those before it say last=False\n")


def test_a_script_with_too_few_loops_is_refused(train, tmp_path):
    run_dir = train(SCRIPT, *SAVING)["run"].dir
    one = tmp_path / "phases.py"
    one.write_text(SCRIPT.read_text().replace("args.warm, last=False", "args.warm"))
    train(one, "--resume", run_dir, code=2)
    assert "with another number of loops" in train.out and steps_of(run_dir)[-1] == 50


# ---------------------------------------------------------------------- JAX
JAX_SAVING = "--num-seeds 2 --save-every 2 --eval-every 16".split()


@pytest.mark.slow
def test_seeds_resumed_in_any_loop_equal_uninterrupted(train, tmp_path):
    """Two seeds in JAX, inside of each loop and at each border. The chunks end where a loop ends."""
    v = train(JAX, *JAX_SAVING)
    runs = folders(tmp_path)
    assert v["trace"] == WHOLE and [steps_of(run) for run in runs] == [STEPS] * 2
    want = [result(run) for run in runs]
    assert want[0] != want[1]
    for step in (26, 20, 8):
        for run in runs:
            back_to(step, run)
        again = train(JAX, "--resume", runs[0], "--num-seeds", 2)
        assert again["trace"] == WHOLE[STEPS.index(step) + 1 :] and [result(run) for run in runs] == want, step
    assert train.out.count("compiled in") == 3  # and not those of loops that were over
    train(JAX, "--resume", runs[0], "--num-seeds", 2)
    assert "compiled in" not in train.out


def test_chunks_end_where_an_evaluation_is_due_or_a_loop_ends(train):
    """Every 20 environment steps of all loops together, and after chunks of 3 x 4, 2 x 2 and 4 x 4 steps."""
    v = train(JAX, "--save-every", 0, "--eval-every", 20)
    steps = [row["global_step"] for row in rows(v["run"].runs[0].dir, "charts/SPS")]
    assert steps == [12, 16, 20, 24, 26, 34, 42, 50]
    assert [row["global_step"] for row in rows(v["run"].runs[0].dir, "eval/episodic_return")] == [20, 42, 50]
    assert steps_of(v["run"].runs[0].dir) == [50]


@pytest.mark.parametrize("by", ["signal", "stop", "target"])
def test_what_ends_a_loop_of_seeds_ends_those_after_it(by, train, tmp_path):
    for step in (8, 26) if by != "target" else (20, 26):
        where = tmp_path / f"at_{step}"
        flags = [*JAX_SAVING, "--eval-every", 2, "--runs-dir", where / "runs"]
        v = train(JAX, *flags, "--end-at", step, "--by", by)
        assert v["trace"] == WHOLE[: STEPS.index(step) + 1]
        for run in folders(where):
            assert steps_of(run)[-1] == step and status(run) == ("finished" if by == "target" else "stopped")
            assert (run / "model_last.safetensors").exists() == (by != "signal")


@pytest.mark.slow
@pytest.mark.parametrize("step", [12, 16])
def test_after_a_signal_between_the_saves_of_two_seeds_both_do_one_more_iteration(step, train, tmp_path, monkeypatch):
    """The first one has saved what it had to, the second one ends. In the last iteration of a loop the one more is the
    first of the next loop. They go on exactly."""
    train(JAX, *JAX_SAVING, "--runs-dir", tmp_path / "whole" / "runs")
    save = Run.save

    def signalled(run, global_step, **parts):
        save(run, global_step, **parts)
        if run.args.seed == 1 and global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", signalled)
        v = train(JAX, *JAX_SAVING, "--runs-dir", tmp_path / "ended" / "runs")
    runs = folders(tmp_path / "ended")
    done = STEPS.index(step) + 2
    assert v["trace"] == WHOLE[:done]
    assert [(steps_of(run)[-1], status(run)) for run in runs] == [(STEPS[done - 1], "stopped")] * 2
    train(JAX, "--resume", runs[0], "--num-seeds", 2)
    for whole, resumed in zip(folders(tmp_path / "whole"), runs, strict=True):
        same(whole, resumed)
        assert result(whole) == result(resumed)


def test_a_seed_that_reached_the_target_in_one_loop_stays_ended_in_the_next(train, tmp_path, monkeypatch):
    """Seed 1 reaches it offline; seed 2 goes on through both loops, and its results are those it has alone."""
    reach = Run.evaluate

    def evaluate(run, global_step, *others):
        run.args.target_return = 1.0 if run.args.seed == 1 and global_step == 20 else None
        reach(run, global_step, *others)

    monkeypatch.setattr(Run, "evaluate", evaluate)
    flags = ["--save-every", 2, "--eval-every", 2]
    assert train(JAX, *flags, "--num-seeds", 2)["trace"] == WHOLE
    first, second = folders(tmp_path)
    assert [steps_of(run)[-1] for run in (first, second)] == [20, 50] and status(first) == status(second) == "finished"
    train(JAX, *flags, "--seed", 2, "--runs-dir", tmp_path / "alone" / "runs")
    assert result(second) == result(folders(tmp_path / "alone")[0])
