"""`solo bench`: plans, the engine, and that nothing finished is lost or counted twice, whatever is killed."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, environment, refused
from rich.console import Console
from solorl.lab.studies.engines.workers import LocalCluster
from solorl.lab.studies.fleet import Fleet

from solorl import machine
from solorl.cli.view import Lines, seconds_left, table
from solorl.errors import UsageError
from solorl.lab.results import result as results
from solorl.lab.results.comparison import compare
from solorl.lab.results.read import read_all
from solorl.lab.studies import plan, task
from solorl.lab.studies import until as end_by
from solorl.lab.studies.engines import Submission
from solorl.lab.studies.resources import Resources
from solorl.lab.studies.storage import Folder
from solorl.lab.studies.study import Study

FAKE = ROOT / "tests/doubles/fake_training.py"
FOREIGN = """
import os, sys
from pathlib import Path
assert sys.argv[1::2] == ["--env-id", "--seed"], sys.argv
assert Path.cwd() == Path(os.environ["SOLORL_RUN_DIR"])
print("hello from", sys.argv[4])
with open("made_here", "x") as file:
    file.write(sys.argv[4])
if sys.argv[4] == "2":
    raise SystemExit("seed 2 is not liked")
"""
MANY = """
import json, os, sys
from pathlib import Path
from solorl import RunArgs
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    num_seeds: int = 1
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("seeds", flags.get("--num-seeds"))
for seed in range(int(flags["--seed"]), int(flags["--seed"]) + int(flags.get("--num-seeds", 1))):
    folder = Path(flags.get("--resume") or Path(flags["--runs-dir"]) / f"seed{seed}")
    folder.mkdir(exist_ok=True)
    args = {"env_id": flags["--env-id"], "seed": seed}
    (folder / "config.json").write_text(json.dumps({"script": "many.py", "args": args}))
    (folder / "metrics.jsonl").write_text(json.dumps({"global_step": 1, "wall_time": 1.0}) + chr(10))
    (folder / "status.json").write_text(json.dumps({"status": "finished", "global_step": 1}))
"""


ONE = ["bench", "many.py", "--env-ids", "CartPole-v1", "--results", "results", "--runs-dir", "work"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in, with a copy of the fake training; its steps are noted in `journal`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    shutil.copy(FAKE, tmp_path / "fake.py")
    return tmp_path


def command(*flags, seeds=4, workers=2):
    """A bench of the fake training."""
    return ["bench", "fake.py", "--env-ids", "CartPole-v1", "--num-seeds", str(seeds), "--workers", str(workers),
            "--results", "results", "--runs-dir", "work", "--variant", "", "--", *map(str, flags)]  # fmt: skip


@contextlib.contextmanager
def runner(place, *flags, **kwargs):
    """The same in a process of its own; killed at the end if it still runs."""
    words = [sys.executable, "-m", "solorl.cli", *command(*flags, **kwargs)]
    env = environment(FAKE_JOURNAL=str(place / "journal"), PYTHONUNBUFFERED="1")
    process = subprocess.Popen(words, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until(condition, seconds=20):
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def steps(place):
    """(seed, step) -> how often it was run."""
    path = place / "journal"
    words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return Counter((int(seed), int(step)) for _, seed, _, step in words)


def once(seeds, total):
    """What `steps` says when every step of every seed was run once."""
    return Counter({(seed, step): 1 for seed in range(1, seeds + 1) for step in range(total)})


def tables(place):
    """Seed -> result of every file in the results folder, each of which must be whole."""
    found = {}
    for path in (place / "results").iterdir():
        result = results.read(path)
        assert result.seed not in found and result.status == "finished"
        found[result.seed] = result
    return found


def states(place):
    """How many tasks are in which state, by their last attempts."""
    folders = [sorted(folder.iterdir()) for folder in (place / "work/attempts").iterdir()]
    return Counter(json.loads(paths[-1].read_text())["state"] for paths in folders)


def children(place):
    """Process ids of trainings that run, by their status files."""
    found = [json.loads(path.read_text()) for path in (place / "work/tasks").glob("*/*/status.json")]
    pids = [status["pid"] for status in found if status["status"] == "running"]
    return [pid for pid in pids if machine.process_start(pid)]


@pytest.mark.slow
# ---------------------------------------------------------------------- load and faults
def test_two_hundred_runs_complete(solo, place):
    code, out, _ = solo(*command("--total-timesteps", 2, "--pause", 0.01, seeds=200))
    assert code == 0 and "200 of 200 finished in" in out
    assert set(tables(place)) == set(range(1, 201)) and steps(place) == once(200, 2)
    assert not list((place / "work/leases").iterdir())
    before = {path: path.stat().st_mtime_ns for path in (place / "results").iterdir()}
    code, out, _ = solo(*command("--total-timesteps", 2, "--pause", 0.01, seeds=200))
    assert code == 0 and "200 of 200 finished (200 of them before)" in out
    assert {path: path.stat().st_mtime_ns for path in (place / "results").iterdir()} == before
    assert steps(place) == once(200, 2)


def test_trainings_of_a_killed_runner_save_and_the_same_command_goes_on(solo, place):
    flags = ("--total-timesteps", 60, "--pause", 0.02)
    assert solo(*command(*flags, seeds=2))[0] == 0
    with runner(place, *flags, seeds=5) as first:
        until(lambda: len(children(place)) == 2 and sum(steps(place).values()) > 2 * 60 + 10)
        first.send_signal(signal.SIGKILL)
        first.wait()
    code, out, _ = solo(*command(*flags, seeds=5))
    assert code == 0 and out.count("resumed    ") == 2 and "5 of 5 finished (2 of them before)" in out
    assert steps(place) == once(5, 60)  # nothing ran twice, nothing was left out
    assert set(tables(place)) == set(range(1, 6))
    assert all(len(result.eval["global_step"]) == 60 for result in tables(place).values())


def test_killed_runner_and_trainings_go_on_from_the_checkpoints(solo, place):
    flags = ("--total-timesteps", 40, "--pause", 0.02)
    with runner(place, *flags, seeds=4) as first:
        until(lambda: len(children(place)) == 2 and sum(steps(place).values()) > 20)
        first.send_signal(signal.SIGKILL)
        first.wait()
        for pid in children(place):
            os.kill(pid, signal.SIGKILL)
    code, out, _ = solo(*command(*flags, seeds=4))
    assert code == 0 and out.count("resumed    ") == 2
    assert set(steps(place)) == set(once(4, 40)) and sum(steps(place).values()) <= 4 * 40 + 2
    assert all(len(result.eval["global_step"]) == 40 for result in tables(place).values())
    assert len(list((place / "work/tasks").glob("*/*/config.json"))) == 4  # each in the folder it began in


def test_killed_training_is_a_failure_that_the_same_command_repeats(place):
    flags = ("--total-timesteps", 30, "--pause", 0.02)
    with runner(place, *flags) as first:
        until(lambda: len(children(place)) == 2 and sum(steps(place).values()) > 10)
        os.kill(children(place)[0], signal.SIGKILL)
        out = first.communicate()[0]
    assert first.returncode == 1 and states(place) == {"finished": 3, "failed": 1} and len(tables(place)) == 3
    assert "failed     fake CartPole-v1 seed" in out and "killed by SIGKILL" in out and "3 of 4 finished" in out
    with runner(place, *flags) as second:
        out = second.communicate()[0]
    assert second.returncode == 0 and "4 of 4 finished (3 of them before)" in out and "resumed" in out
    assert len(tables(place)) == 4 and sum(steps(place).values()) <= 4 * 30 + 1


def test_two_runners_at_once_share_the_work(place):
    flags = ("--total-timesteps", 8, "--pause", 0.02)
    with runner(place, *flags, seeds=16) as one, runner(place, *flags, seeds=16) as two:
        outs = [one.communicate()[0], two.communicate()[0]]
    assert (one.returncode, two.returncode) == (0, 0), outs
    assert steps(place) == once(16, 8) and set(tables(place)) == set(range(1, 17))
    assert all("16 of 16 finished" in out for out in outs)
    assert sum(out.count("started    ") for out in outs) == 16 and all("started    " in out for out in outs)


@pytest.mark.slow
def test_runner_takes_over_from_a_killed_one_that_works_beside_it(place):
    flags = ("--total-timesteps", 60, "--pause", 0.15)  # long enough for a second runner to start on a busy machine
    with runner(place, *flags, seeds=2, workers=2) as one:
        until(lambda: len(children(place)) == 2)
        with runner(place, *flags, seeds=2, workers=2) as two:
            assert "2 runs" in two.stdout.readline() and "elsewhere" in two.stdout.readline()
            one.send_signal(signal.SIGKILL)
            out = two.communicate()[0]
    assert two.returncode == 0 and out.count("resumed    ") == 2, out
    assert steps(place) == once(2, 60) and len(tables(place)) == 2


def test_full_results_disk_loses_nothing(solo, place, monkeypatch):
    write, written = results.write_atomically, []

    def full(path, data):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path)
        write(path, data)

    monkeypatch.setattr(results, "write_atomically", full)
    code, out, _ = solo(*command())
    assert code == 1 and states(place) == {"finished": 4} and len(tables(place)) == 2
    assert out.count("is finished, but its table is not in results: No space left on device") == 2
    assert "2 finished but not collected; the same command collects them" in out
    monkeypatch.setattr(results, "write_atomically", write)
    code, out, _ = solo(*command())
    assert code == 0 and len(tables(place)) == 4 and steps(place) == once(4, 5) and "started" not in out


def test_damaged_or_missing_tables_are_made_again(solo, place):
    solo(*command())
    files = sorted((place / "results").iterdir())
    whole = [path.read_bytes() for path in files]
    files[0].write_bytes(whole[0][:50])
    files[1].write_bytes(b"")
    files[2].unlink()
    files[3].write_bytes(whole[2])  # whole, but of another run
    code, out, _ = solo(*command())
    assert code == 0 and out.count("again      ") == 4 and "started" not in out
    assert [path.read_bytes() for path in files] == whole and steps(place) == once(4, 5)
    shutil.rmtree(place / "results")
    assert solo(*command())[0] == 0 and [path.read_bytes() for path in files] == whole


def test_lost_records_are_read_from_the_run_folders(solo, place):
    solo(*command())
    before = {path: path.read_bytes() for path in (place / "results").iterdir()}
    for i, path in enumerate(sorted((place / "work/results").iterdir())):
        [lambda: path.write_text("{"), lambda: path.write_text("[]"), path.unlink, path.unlink][i]()
    for folder in ("attempts", "collected"):
        shutil.rmtree(place / "work" / folder)
    code, out, _ = solo(*command())
    assert code == 0 and "started" not in out and steps(place) == once(4, 5)
    assert {path: path.read_bytes() for path in (place / "results").iterdir()} == before
    for path in (place / "work/tasks").iterdir():
        shutil.rmtree(path)
    code, out, _ = solo(*command())
    assert code == 0 and "started" not in out and len(tables(place)) == 4  # the tables are there
    shutil.rmtree(place / "results")
    code, out, _ = solo(*command())
    assert code == 0 and out.count("lost       ") == 4 and len(tables(place)) == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_runner_lets_its_trainings_save(solo, place, number, code):
    flags = ("--total-timesteps", 30, "--pause", 0.02)
    with runner(place, *flags) as first:
        until(lambda: {seed for seed, _ in steps(place)} == {1, 2} and sum(steps(place).values()) > 10)
        first.send_signal(number)
        out = first.communicate()[0]
    assert first.returncode == code and "2 running trainings save and end" in out and out.count("stopped    ") == 2
    assert states(place) == {"stopped": 2} and not children(place) and not list((place / "work/leases").iterdir())
    code, out, _ = solo(*command(*flags))
    assert code == 0 and out.count("resumed    ") == 2 and out.count("started    ") == 2
    assert steps(place) == once(4, 30) and len(list((place / "work/tasks").glob("*/*/config.json"))) == 4


def test_second_interrupt_kills(place):
    (place / "fake.py").write_text(FAKE.read_text().replace("ending.append(1)", "None"))
    with runner(place, "--total-timesteps", 2000, "--pause", 0.02) as first:
        until(lambda: len(children(place)) == 2)
        first.send_signal(signal.SIGINT)
        assert any("once more kills them" in line for line in first.stdout)
        first.send_signal(signal.SIGINT)
        first.wait(timeout=20)
    assert first.returncode == 130 and not children(place) and sum(steps(place).values()) < 2000


# ---------------------------------------------------------------------- failures
def test_failed_run_shows_its_last_lines_and_the_others_go_on(solo, place):
    suite = place / "suite.toml"
    suite.write_text("""
        name = "mixed"
        [[job]]
        script = "fake.py"
        env_ids = ["CartPole-v1", "Acrobot-v1"]
        num_seeds = 2
        env_flags = {Acrobot-v1 = {fail-at = 3}}
    """)
    code, out, _ = solo("bench", suite, "--workers", 2)
    assert code == 1 and "2 of 4 finished in" in out and out.count("exit code 1\n    | some line\n") == 2
    assert (
        "    | RuntimeError: the simulator has crashed" in out and "2 failed; the same command tries them again" in out
    )
    assert len(list((place / "benchmark/results/mixed").iterdir())) == 2
    text = suite.read_text().replace("fail-at = 3", "fail-at = 4")
    suite.write_text(text)  # other flags are other tasks; the finished ones stay finished
    code, out, _ = solo("bench", suite, "--workers", 2)
    assert code == 1 and "2 of 4 finished (2 of them before)" in out


@pytest.mark.parametrize("by", [0, signal.SIGKILL, signal.SIGSEGV])
def test_run_that_fails_again_and_again_goes_on_as_long_as_its_checkpoint_moves(solo, place, by):
    words = command("--fail-after", 2, "--fail-by", int(by), "--total-timesteps", 11, seeds=1)
    codes, outs = zip(*[solo(*words)[:2] for _ in range(6)], strict=True)
    assert codes == (1, 1, 1, 1, 1, 0)
    assert "started" in outs[0] and all("resumed" in out and "started" not in out for out in outs[1:])
    assert steps(place) == once(1, 11) and len(list((place / "work/tasks").glob("*/*/config.json"))) == 1


def test_run_that_always_fails_at_the_same_step_keeps_its_checkpoint_and_says_so(solo, place):
    words = command("--fail-at", 3, seeds=1)
    outs = [solo(*words)[1] for _ in range(4)]
    folder = next((place / "work/tasks").glob("*/*/config.json")).parent
    assert ["resumed" in out and "started" not in out for out in outs] == [False, True, True, True]
    sentence = f"again after step 3; where it never gets further, delete {folder.relative_to(place)}"
    assert [out.count(sentence) for out in outs] == [0, 2, 2, 2] and steps(place) == once(1, 3)
    shutil.rmtree(folder)
    assert "started" in solo(*words)[1] and max(steps(place).values()) == 2


def test_run_without_a_whole_checkpoint_begins_again_and_says_so(solo, place):
    words = command("--fail-at", 3, seeds=1)
    solo(*words)
    checkpoint = next((place / "work/tasks").glob("*/*/checkpoint/step_*"))
    (checkpoint / "state.json").write_text("damaged")
    assert "resumed" in solo(*words)[1] and steps(place) == once(1, 3)  # the script is the first to judge
    out, folder = solo(*words)[1], checkpoint.parent.parent.relative_to(place)
    assert f"from the beginning: resuming failed and no checkpoint in {folder} is whole; the folder is kept" in out
    assert folder.is_dir() and max(steps(place).values()) == 2
    assert "resumed" in solo(*words)[1] and max(steps(place).values()) == 2  # the new run has a checkpoint


def test_diverged_run_begins_again_and_says_so(solo, place):
    code, out, _ = solo(*command("--diverge-at", 3, seeds=1))
    assert code == 1 and "diverged: losses/value_loss is nan" in out
    out = solo(*command("--diverge-at", 3, seeds=1))[1]
    assert "started" in out and "from the beginning: it has diverged: losses/value_loss is nan; work/tasks/fake" in out


def test_script_that_changes_while_others_run_is_run_as_it_was_planned(solo, place):
    """The study keeps a copy of it."""
    text = FAKE.read_text().replace("def main():", "def main():\n    Path('fake.py').write_text('other')")
    (place / "fake.py").write_text(text)
    code, out, _ = solo(*command(seeds=3, workers=1))
    assert code == 0 and "3 of 3 finished" in out and steps(place) == once(3, 5)
    shutil.copy(FAKE, place / "fake.py")
    assert solo(*command(seeds=3))[0] == 0 and max(steps(place).values()) == 2  # the new script is a new task


@pytest.mark.parametrize("name", ["leases", "results"])
def test_full_disk_below_the_runs_is_one_sentence_and_loses_nothing(solo, place, monkeypatch, name):
    create = Folder.create

    def full(storage, file, data):
        if file.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)
        return create(storage, file, data)

    monkeypatch.setattr(Folder, "create", full)
    code, _, err = solo(*command(seeds=2))
    assert code == 2 and f"{name}/fake" in err and "the disk is full; make room and repeat the command" in err
    monkeypatch.setattr(Folder, "create", create)
    assert solo(*command(seeds=2))[0] == 0 and steps(place) == once(2, 5) and set(tables(place)) == {1, 2}


# ---------------------------------------------------------------------- other scripts
def test_foreign_script_runs_in_a_folder_of_its_own(solo, place):
    (place / "foreign.py").write_text(FOREIGN)
    words = ["bench", "foreign.py", "--env-ids", "Any/Thing", "--num-seeds", 2, "--workers", 2]
    code, out, _ = solo(*words)
    assert code == 1 and "1 of 2 finished" in out and "    | seed 2 is not liked" in out and "no table" in out
    made = sorted((place / "runs/bench/foreign").glob("tasks/*/attempt-*/made_here"))
    assert [path.read_text() for path in made] == ["1", "2"]
    code, out, _ = solo(*words)
    assert code == 1 and "(1 of them before)" in out and out.count("foreign Any/Thing seed 1") == 1
    made = sorted((place / "runs/bench/foreign").glob("tasks/*/attempt-*/made_here"))
    assert [path.parent.name for path in made] == ["attempt-1", "attempt-1", "attempt-2"]
    outputs = [path.read_text() for path in (place / "runs/bench/foreign").glob("tasks/*__2__*/output-*.txt")]
    assert len(outputs) == 2 and all("hello from 2" in output for output in outputs)


@pytest.mark.slow
def test_tensorboard_files_of_a_foreign_script_are_collected(solo, place):
    pytest.importorskip("solorl.lab.results.tensorboard")
    (place / "board.py").write_text("""
import sys
from tensorboardX import SummaryWriter
writer = SummaryWriter("runs/some__name")
for step in range(0, 1000, 100):
    writer.add_scalar("charts/episodic_return", step / 10, step)
writer.close()
""")
    code, out, _ = solo("bench", "board.py", "--env-ids", "CartPole-v1", "--results", "results", "--", "--lr", 3)
    assert code == 0, out
    [result] = tables(place).values()
    assert (result.env_id, result.script, result.seed, result.args) == ("CartPole-v1", "board", 1, {"lr": "3"})
    assert result.train["return"][-1] == 90 and result.variant == "lr=3"


def other_python(path):
    """A Python of another environment: the scripts see MARK."""
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\nMARK=other exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)


MARKED = "import os\nfrom pathlib import Path\nPath('mark').write_text(os.environ.get('MARK', 'own'))\n"


def test_scripts_run_with_the_python_that_is_named(solo, place):
    (place / "marked.py").write_text(MARKED)
    other_python(place / "venv/bin/python")
    words = ["bench", "marked.py", "--env-ids", "Only/There-v0", "--workers", 1]
    assert solo(*words, "--python", "venv/bin/python", "--num-seeds", 1)[0] == 0
    assert solo(*words, "--num-seeds", 2)[0] == 0  # the first is finished, whatever ran it
    marks = {path.parent.parent.name.split("__")[2]: path.read_text() for path in place.glob("runs/**/mark")}
    assert marks == {"1": "other", "2": "own"}


def test_jobs_of_a_suite_run_with_the_python_that_they_name(solo, place):
    other_python(place / "suites/venv/bin/python")
    (place / "suites/marked.py").write_text(MARKED)
    (place / "suites/s.toml").write_text("""
        [[job]]
        script = "marked.py"
        env_ids = ["A", "A"]
        seeds = [1, 1]
        [[job]]
        script = "marked.py"
        python = "venv/bin/python"
        env_ids = "B"
        num_seeds = 1
    """)
    assert solo("bench", "suites/s.toml", "--workers", 1)[0] == 0
    marks = {path.parent.parent.name.split("__")[1]: path.read_text() for path in place.glob("runs/**/mark")}
    assert marks == {"A": "own", "B": "other"}
    [task, _] = plan.load_suite(place / "suites/s.toml", {}, python="/bin/sh").tasks
    assert task.argv()[0] == "/bin/sh"  # the command line has the last word
    text = (place / "suites/s.toml").read_text().replace('"B"', '"A"')
    (place / "suites/s.toml").write_text('python = "/bin/sh"\n' + text.replace('python = "venv/bin/python"', ""))
    assert [task.python for task in plan.load_suite(place / "suites/s.toml", {}).tasks] == ["/bin/sh"]
    (place / "suites/s.toml").write_text(text)
    with pytest.raises(UsageError, match="stands there twice, with different Pythons"):
        plan.load_suite(place / "suites/s.toml", {})


def test_a_script_of_ours_with_another_python_may_have_environments_that_this_one_has_not(place):
    script = plan.load_script("fake.py")
    assert script.ours and plan.make_tasks([script], ["Only/There-v0"], [1], {"": {}}, python="/bin/sh")
    with pytest.raises(UsageError, match="there is no environment"):
        plan.make_tasks([script], ["Only/There-v0"], [1], {"": {}})


def test_script_that_logs_nothing_is_said_with_the_folder_that_is_empty(solo, place):
    (place / "marked.py").write_text(MARKED)
    words = ["bench", "marked.py", "--env-ids", "A", "--workers", 1]
    for out in (solo(*words)[1], solo(*words)[1]):
        assert "1 finished without a table; no run folder and no TensorBoard files were in:\n  marked A seed 1: " in out
        folder = Path(out.split("marked A seed 1: ")[-1].strip())
        assert (folder / "attempt-1/mark").is_file()
        assert "compare them" not in out and "results in" not in out
    shutil.copy(FAKE, place / "fake.py")
    (place / "s.toml").write_text(SUITE + SUITE.replace('name = "s"', "").replace("fake.py", "marked.py"))
    out = solo("bench", "s.toml")[1]
    assert "2 finished without a table" in out and "compare them: solo report benchmark/results/s" in out
    assert len(list((place / "benchmark/results/s").iterdir())) == 2


@pytest.mark.slow
def test_tensorboard_files_without_returns_are_said_with_their_folder(solo, place):
    pytest.importorskip("tensorboard")
    (place / "board.py").write_text("""
from pathlib import Path
from tensorboardX import SummaryWriter
Path("runs/mine").mkdir(parents=True)
Path("runs/mine/config.json").write_text("{}")
writer = SummaryWriter("runs/mine")
writer.add_scalar("losses/value", 1.0, 1)
writer.close()
""")
    code, out, _ = solo("bench", "board.py", "--env-ids", "CartPole-v1", "--workers", 1)
    folder = next(place.glob("runs/bench/board/tasks/*/attempt-1/runs/mine"))
    assert code == 1 and out.count(f"{folder} holds none of the tags charts/episodic_return") == 2
    assert "compare them" not in out


def test_stopped_training_without_a_run_folder_is_said_to_start_again(place):
    (place / "fake.py").write_text("import time\ntime.sleep(60)\nfrom solorl import RunArgs")
    with runner(place, seeds=1) as first:
        until(lambda: list((place / "work/tasks").glob("*/output-1.txt")))
        first.send_signal(signal.SIGINT)
        out = first.communicate()[0]
    assert first.returncode == 130 and "stopped    fake CartPole-v1 seed 1: the same command starts it again" in out


@pytest.mark.slow
def test_stable_baselines_is_treated_like_ours(solo, place):
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("tyro")  # which the peer's file reads its command line with
    peer = ROOT / "benchmark/peers/sb3_ppo.py"
    flags = ("--total-timesteps", 1300, "--eval-every", 512, "--eval-episodes", 2)
    code, out, _ = solo(
        "bench", peer, "--env-ids", "CartPole-v1", "--results", "results", "--variant", "", "--", *flags
    )
    assert code == 0, out
    [result] = tables(place).values()
    assert (result.script, result.global_step, result.eval["global_step"]) == ("sb3_ppo", 1024, [512, 1024])
    assert len(result.train["return"]) > 5 and result.versions["stable-baselines3"]


def test_one_process_trains_many_seeds(solo, place):
    (place / "many.py").write_text(MANY)
    words = [*ONE, "--workers", 1]
    code, out, _ = solo(*words, "--num-seeds", 3)
    assert code == 0 and "started    many CartPole-v1 seed 1 to 3" in out and set(tables(place)) == {1, 2, 3}
    code, out, _ = solo(*words, "--num-seeds", 5)
    assert code == 0 and "seed 4 to 5" in out and set(tables(place)) == {1, 2, 3, 4, 5}
    assert "5 of 5 finished (3 of them before)" in out
    code, out, _ = solo(*words, "--num-seeds", 8, "--dry-run")
    assert "--seed 6 --num-seeds 3" in out and out.count("many.py") == 1


def test_the_seeds_are_shared_out_to_all_workers(solo, place):
    (place / "many.py").write_text(MANY)
    code, out, _ = solo(*ONE, "--workers", 2, "--num-seeds", 5)
    assert code == 0 and set(tables(place)) == {1, 2, 3, 4, 5}
    started = [line.split("seed ")[1] for line in out.splitlines() if line.startswith("started")]
    assert sorted(started) == ["1 to 3", "4 to 5"]


def test_a_half_done_seed_goes_on_and_does_not_start_again_beside_others(solo, place):
    (place / "many.py").write_text(MANY)
    code, out, _ = solo(*ONE, "--workers", 1, "--num-seeds", 1, "--start-seed", 2, "--dry-run")
    work = place / out.split("--runs-dir ")[1].split()[0]
    (half := work / "seed2").mkdir(parents=True)
    args = {"env_id": "CartPole-v1", "seed": 2}
    (half / "config.json").write_text(json.dumps({"script": "many.py", "args": args}))
    (half / "metrics.jsonl").write_text("")
    (half / "status.json").write_text(json.dumps({"status": "running"}))
    out = solo(*ONE, "--num-seeds", 3, "--dry-run")[1]
    assert out.count("many.py") == 3 and out.count("--resume") == 1 and "--num-seeds" not in out
    code, out, _ = solo(*ONE, "--workers", 1, "--num-seeds", 3)
    assert code == 0, out
    lines = [line for line in out.splitlines() if line.startswith(("started", "resumed"))]
    assert [line.split("v1 ")[1] for line in lines] == ["seed 1", "seed 2", "seed 3"]
    assert lines[1].startswith("resumed")


def test_a_file_system_without_links_will_do(solo, place, monkeypatch):
    def link(*names):
        raise OSError(errno.EPERM, "Operation not permitted")

    (place / "many.py").write_text(MANY)
    monkeypatch.setattr(os, "link", link)
    code, out, _ = solo(*ONE, "--num-seeds", 2)
    assert code == 0 and set(tables(place)) == {1, 2}, out


# ---------------------------------------------------------------------- the engine
def fleet(place, cluster, seeds=7, flags=()):
    """A fleet of the stand-in on this machine."""
    words = {"v": plan.parse_flags([str(word) for word in flags])}
    tasks = plan.make_tasks([plan.load_script("fake.py")], ["CartPole-v1"], range(1, seeds + 1), words)
    study = Study(Folder(place / "work"), "x", {task.id: task for task in tasks}, 1)
    study.write()
    return Fleet(study, tasks, cluster, {}, Lines(), place / "results")


class Counting(LocalCluster):
    """Notes how many run at once, and in which order they begin."""

    def __init__(self, *args):
        super().__init__(*args)
        self.most, self.order = 0, []

    def _next(self, slot):
        worker = super()._next(slot)
        self.most = max(self.most, len(self.running))
        self.order += [task.seed for task in worker.tasks] if worker else []
        return worker


def test_never_more_than_the_slots_run_and_they_begin_in_order(place):
    cluster = Counting(3)
    assert fleet(place, cluster).run() == 0
    assert cluster.most == 3 and cluster.order == [*range(1, 8)] and set(tables(place)) == set(range(1, 8))


def test_slots_have_cores_and_gpus_of_their_own(place, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    (place / "fake.py").write_text(
        "import os, sys, time\nprint(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], "
        "os.environ['CUDA_VISIBLE_DEVICES'])\ntime.sleep(0.3)"
    )
    cores = machine.own_cores()
    assert fleet(place, LocalCluster(3, cores, ["4", "7"]), seeds=3).run() == 0
    outputs = sorted(path.read_text().strip() for path in (place / "work/tasks").glob("*/output-1.txt"))
    shares = machine.shares(cores, 3)
    assert outputs == sorted(f"{shares[i]} {len(shares[i])} {gpu}" for i, gpu in enumerate(["4", "7", "4"]))
    assert sorted(os.sched_getaffinity(0)) == cores


def test_cores_are_shared_equally():
    assert machine.shares([0, 1, 2, 3], 2) == [[0, 1], [2, 3]]
    assert machine.shares([0, 1, 2], 2) == [[0], [1, 2]]
    assert machine.shares([4, 6], 3) == [[4], [6], [4]]


def test_gpus_are_those_that_may_be_seen(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert machine.visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.visible_gpus() == []


# ---------------------------------------------------------------------- what people see
def test_dry_run_prints_commands_that_work_and_writes_nothing(solo, place):
    words = command("--total-timesteps", 3, seeds=2)
    code, out, _ = solo(*words[:-3], "--dry-run", *words[-3:])
    assert code == 0 and len(out.splitlines()) == 2 and sorted(place.iterdir()) == [place / "fake.py"]
    assert subprocess.run(["bash", "-c", out.splitlines()[0]]).returncode == 0
    assert len(list((place / "work/tasks").glob("*/*/config.json"))) == 1
    code, out, err = solo(*words[:-3], "--dry-run", *words[-3:])
    assert len(out.splitlines()) == 1 and "1 of 2 are finished" in err  # the pasted one counts
    (place / "foreign.py").write_text(FOREIGN)
    out = solo("bench", "foreign.py", "--env-ids", "A", "--dry-run")[1]
    assert subprocess.run(["bash", "-c", out]).returncode == 0
    assert next(place.glob("runs/bench/foreign/tasks/*/attempt-1/made_here")).read_text() == "1"


def test_table_shows_what_runs_and_the_time_left(place):
    one = fleet(place, LocalCluster(3), seeds=5, flags=["--total-timesteps", 200, "--pause", 30])
    ids = tuple(task.id for task in one.tasks)
    one.local.submit(Submission(one.study.storage.where, "", "x", ids, Resources()))
    until(lambda: len(children(place)) == 3)
    try:
        worker = one.local.running[0]
        folder = worker.find(worker.tasks[0]).run_dir
        (folder / "metrics.jsonl").write_text('{"global_step": 50, "eval/episodic_return": 12.34}\n{"cut')
        for worker in one.local.running.values():
            worker.began = time.time() - 10
        console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(table(one))
        text = console.export_text()
        for word in ("fake [v] CartPole-v1", "25 %", "12.3", "10 s", "0 of 5 finished, 3 running, 2 waiting"):
            assert word in text
        known = [("x", 10.0, 0.25), ("x", 10.0, None), ("x", 10.0, None)]
        assert seconds_left(one, known) == pytest.approx((30 + 2 * 30 + 2 * 40) / 3, rel=0.02)
    finally:
        one.local.end()
        one.local.end(force=True)
        one.local.close()


def test_task_is_the_same_only_for_the_same_script_environment_seed_and_flags(place):
    script = plan.load_script("fake.py")
    base = plan.Task(script, "CartPole-v1", 1, {"--a": ("1",), "--b": ()})
    assert base.id == plan.Task(plan.load_script("./fake.py"), "CartPole-v1", 1, {"--b": (), "--a": ("1",)}).id
    (place / "fake.py").write_text(FAKE.read_text() + "\n")
    others = [
        plan.Task(plan.load_script("fake.py"), "CartPole-v1", 1, base.flags),
        plan.Task(script, "ALE/Pong-v5", 1, base.flags),
        plan.Task(script, "CartPole-v1", 2, base.flags),
        plan.Task(script, "CartPole-v1", 1, {"--a": ("2",), "--b": ()}),
    ]
    assert len({task.id for task in [base, *others]}) == 5 and all("/" not in task.id for task in others)


def test_flags_replace_each_other():
    flags = plan.merge(plan.parse_flags(["--a", "1", "--no-c", "--d=-3"]), plan.table_flags({"a": 2.5, "c": True}, ""))
    assert task.words(flags) == ("--a", "2.5", "--d", "-3", "--c")
    assert task.words(plan.table_flags({"sizes": [64, 64], "x": False}, "")) == ("--sizes", "64", "64", "--no-x")


def test_a_suite_in_order_finishes_a_job_before_the_next(place):
    """Else all jobs train their first seed before any second one."""
    job = '[[job]]\nscript = "fake.py"\nenv_ids = "{}"\nseeds = "1-2"\n'
    jobs = job.format("Pendulum-v1") + job.format("Acrobot-v1")
    for head, wanted in (("", "P1 A1 P2 A2"), ("in_order = true\n", "P1 P2 A1 A2")):
        (place / "s.toml").write_text(head + jobs)
        tasks = plan.load_suite(place / "s.toml", {}).tasks
        assert " ".join(f"{task.env_id[0]}{task.seed}" for task in tasks) == wanted
    (place / "s.toml").write_text("in_order = 1\n" + jobs)
    with pytest.raises(UsageError, match="in_order must be true or false, not 1"):
        plan.load_suite(place / "s.toml", {})


def test_suites_of_the_project_are_valid():
    found = {path.stem: plan.load_suite(path, {}) for path in (ROOT / "benchmark/suites").glob("*.toml")}
    assert len(found["classic"].tasks) == 90 and len(found["smoke"].tasks) == 10
    says = {name: (ROOT / f"benchmark/suites/{name}.toml").read_text().partition("\n")[0] for name in found}
    counts = {name: int(count[1]) for name, line in says.items() if (count := re.search(r"(\d+) runs", line))}
    assert counts == {name: len(found[name].tasks) for name in counts} and {"jax", "actor_critic", "minatar"} <= set(
        counts
    )
    lander = [task for task in found["classic"].tasks if task.env_id == "LunarLander-v3"]
    assert {task.flags["--total-timesteps"] for task in lander} == {("1000000",)} and len(lander) == 30
    fewer = plan.load_suite(ROOT / "benchmark/suites/classic.toml", {"--total-timesteps": ("5",)}, ["Acrobot-v1"], 3)
    assert len(fewer.tasks) == 6 and {task.flags["--total-timesteps"] for task in fewer.tasks} == {("5",)}


SUITE = """
name = "s"
[[job]]
script = "fake.py"
env_ids = "CartPole-v1"
seeds = "1-2"
"""


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "s"', 'nam = "s"', "has the unknown key nam; did you mean name?"),
        ("env_ids", "env_id", "unknown key env_id; did you mean env_ids?"),
        ("[[job]]", "[[jobs]]", "unknown key jobs; did you mean job?"),
        ('"1-2"', '"one"', "seeds in a [[job]]"),
        ('"1-2"', "[]", "seeds in a [[job]]"),
        ('"1-2"', '"1-2"\nnum_seeds = 2', "must have either seeds, or num_seeds"),
        ('seeds = "1-2"', "num_seeds = 0", "at least 1 seed"),
        ('"1-2"', '"1-2"\nflags = 3', "must be a table such as"),
        ('"1-2"', '"1-2"\nflags = {seed = 3}', "--seed cannot be a flag for the scripts; use seeds"),
        ('"1-2"', '"1-2"\nflags = ["lr"]', "lr is not a flag"),
        ('"1-2"', '"1-2"\nvariants = {a = {x = 1}, b = {x = 1}}', "have the same flags: a, b"),
        ('"1-2"', '"1-2"\nenv_flags = {CartPole-v0 = {x = 1}}', "not in env_ids; did you mean CartPole-v1?"),
        ('"CartPole-v1"', '"CartPoll-v1"', "there is no environment CartPoll-v1; did you mean CartPole-v1"),
        ('"fake.py"', '"fak.py"', "there is no file fak.py"),
        ('"fake.py"', '"pp0"', "there is no algorithm pp0; did you mean ppo"),
        ('script = "fake.py"', "", "must have script or scripts"),
        (
            'script = "fake.py"',
            'script = "ppo"\nflags = {learning-rat = 1}',
            "no flag --learning-rat; did you mean --lear",
        ),
        ('name = "s"', 'name = "../s"', "name must be letters"),
        ('name = "s"', 'name = ".."', "name must be the name of a folder, not '..'"),
        ('name = "s"', 'name = "."', "name must be the name of a folder, not '.'"),
        ('name = "s"', 'name = "/s"', "name must be letters"),
        ('name = "s"', 'name = "s\\u001b[31m"', r"control characters and their like, unlike 's\x1b[31m'"),
        ('name = "s"', f'name = "{"s" * 300}"', "name must be the name of a folder"),
        ('seeds = "1-2"', "num_seeds = 1000000000", "100,000 seeds at most, all smaller than 2**31, not 1000000000"),
        ('seeds = "1-2"', "num_seeds = 1e9", "both whole, not 1000000000.0"),
        ('seeds = "1-2"', "num_seeds = nan", "both whole, not nan"),
        ('seeds = "1-2"', f"num_seeds = 1{'0' * 40}", "100,000 seeds at most"),
        ('seeds = "1-2"', f"num_seeds = 1{'0' * 5000}", "is not valid TOML"),
        ('seeds = "1-2"', "num_seeds = 1\nstart_seed = 2147483648", "smaller than 2**31"),
        ('"1-2"', '"1-1000000000"', "100,000 seeds at most"),
        ('"1-2"', f'"1-{"9" * 5000}"', "at most 1,000 characters"),
        ('"1-2"', '"2-1"', "seeds in a [[job]]"),
        ('"1-2"', "[2147483648]", "smaller than 2**31"),
        ('"1-2"', '"1-60000"\nvariants = {a = {x = 1}, b = {x = 2}}', "120,000 runs are too many for one command"),
        ('"1-2"', f"{'[' * 3000}{']' * 3000}", "nested too deeply"),
        ('"1-2"', '"1-2"\nflags = {x = nan}', "x must be a finite number, not nan"),
        ('"1-2"', '"1-2"\nflags = {x = [[1]]}', "x must be a number, a text, true, false or a list, not [[1]]"),
        ('"1-2"', '"1-2"\nflags = {"" = 1}', "'' is not a flag"),
        ('"1-2"', '"1-2"\nflags = {"x y" = 1}', "'x y' is not a flag"),
        ('"1-2"', '"1-2"\nflags = {x = "\\u0000"}', "control characters"),
        ('"1-2"', f'"1-2"\nvariants = {{{"v" * 300} = {{x = 1}}}}', "too long for the name of a result file"),
        ('"1-2"', '"1-2"\nvariants = {"a/b" = {x = 1}, "a_b" = {x = 2}}', "would have the same result file"),
        ('"fake.py"', f'"{"x" * 300}.py"', "File name too long"),
        ('"1-2"', '"1-2"\npython = 3', "python in a [[job]] of s.toml must be the path of a Python, not 3"),
        (
            '"1-2"',
            '"1-2"\npython = "no/python"',
            "there is no Python interpreter 'no/python'; name one such as venv/bin/python",
        ),
        ('"1-2"', '"1-2"\npython = "fake.py"', "fake.py is not a Python interpreter"),
        ('name = "s"', "name = ", "is not valid TOML"),
    ],
)
def test_bad_suite_is_one_sentence(solo, place, old, new, sentence):
    (place / "s.toml").write_text(SUITE.replace(old, new))
    refused(solo("bench", "s.toml"), sentence)
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fake.py"], "needs --env-ids"),
        (["fake.py", "--env-ids", "CartPole-v1", "--num-seed", "3"], "no flag --num-seed; did you mean --num-seeds"),
        (["fake.py", "--env-ids", "CartPole-v1", "--num-seeds", "0"], "at least 1 seed"),
        (["fake.py", "--env-ids", "CartPole-v1", "--workers", "0"], "--workers must be at least 1"),
        (["fake.py", "--env-ids", "CartPole-v1", "--results", "fake.py"], "fake.py is a file"),
        (["fake.py", "--env-ids", "CartPole-v1", "--workers", "1000000000"], "at most 1,000, not 1,000,000,000"),
        (["fake.py", "--env-ids", "CartPole-v1", "--num-seeds", "1000000000"], "100,000 seeds at most"),
        (["fake.py", "--env-ids", "CartPole-v1", "--variant", "a\x1b[31m"], "control characters"),
        (["fake.py", "--env-ids", "CartPole-v1", "--variant", "v" * 300], "too long for the name of a result file"),
        (["...py", "--env-ids", "CartPole-v1"], "must be the name of a folder, not '..'"),
        (
            ["fake.py", "--env-ids", "CartPole-v1", "--python", "venv"],
            "folder, not a Python interpreter; did you mean venv/bin/python?",
        ),
        (["fake.py", "--env-ids", "CartPole-v1", "--python", "fake.py"], "fake.py is not a Python interpreter"),
        (["t.toml", "--python", "venv/python"], "there is no Python interpreter 'venv/python'"),
        (["ppo", "--env-ids", "CartPole-v1", "--", "--gama", "1"], "ppo.py has no flag --gama; did you mean --gamma?"),
        (["s.toml"], "there is no file s.toml; did you mean t.toml?"),
        (["t.toml", "--variant", "x"], "--variant is for scripts"),
        (["t.toml", "--env-ids", "Acrobot-v1"], "has no environment Acrobot-v1"),
        (["t.toml", "fake.py"], "takes one suite or scripts"),
        (["fake.py", "sub/fake.py", "--env-ids", "CartPole-v1"], "two scripts are called fake.py"),
    ],
)
def test_bad_command_line_is_one_sentence(solo, place, words, sentence):
    (place / "t.toml").write_text(SUITE)
    (place / "s.tom").write_text("no suite, by its name")
    (place / "venv/bin").mkdir(parents=True)
    (place / "venv/bin/python").symlink_to(sys.executable)
    shutil.copy(FAKE, place / "...py")
    (place / "sub").mkdir()
    (place / "sub/fake.py").write_text(FAKE.read_text() + "\n")
    refused(solo("bench", *words), sentence)
    assert not (place / "runs").exists()


SWEEP = ["bench", "ppo", "--env-ids", "CartPole-v1", "--dry-run"]


def test_a_sweep_has_a_variant_for_each_value(solo, place):
    code, out, err = solo(
        *SWEEP, "--sweep", "clip-coef=0.1,0.2", "--sweep", "anneal-lr=true,false", "--", "--gamma", "1"
    )
    assert code == 0, err
    found = [line.partition("--runs-dir")[0].split("--seed 1 ")[1].strip() for line in out.splitlines()]
    assert found == [f"--gamma 1 --clip-coef {c} --{no}anneal-lr" for c in ("0.1", "0.2") for no in ("", "no-")]
    names = [Path(line.split()[-1]).name.split("__")[1] for line in out.splitlines()]
    assert names[0] == "anneal-lr_clip-coef=0.1_gamma=1" and len(set(names)) == 4
    named = solo(*SWEEP, "--sweep", "clip-coef=0.1,0.2", "--variant", "mine")[1].splitlines()
    assert [Path(line.split()[-1]).name.split("__")[1] for line in named] == [
        "mine_clip-coef=0.1",
        "mine_clip-coef=0.2",
    ]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [(["clip-coef"], "--sweep is a flag with different values, as kl-coef=0,0.1,1, not clip-coef"),
     (["clip-coef=1,,2"], "not clip-coef=1,,2"), (["clip-coef=1,1"], "not clip-coef=1,1"),
     (["clip-coff=1,2"], "no flag --clip-coff; did you mean --clip-coef?"),
     (["gamma=0.9", "gamma=0.99,1"], "--sweep names a flag twice"), (["seed=1,2"], "--seed cannot be a flag")],
)  # fmt: skip
def test_a_sweep_that_cannot_be(solo, place, given, sentence):
    refused(solo(*SWEEP, *(word for text in given for word in ("--sweep", text))), sentence)


def test_a_suite_sweeps_by_its_variants(solo, place):
    (place / "s.toml").write_text(SUITE)
    refused(solo("bench", "s.toml", "--sweep", "x=1,2"), "--sweep is for scripts; s.toml says it itself")


def test_the_first_variant_of_a_suite_is_the_baseline_of_its_report(solo, place):
    """Whatever the order of the names and of the runs."""
    variants = "variants = {b = {total-timesteps = 3}, a = {total-timesteps = 2}, c = {total-timesteps = 4}}"
    (place / "s.toml").write_text(SUITE + variants)
    code, out, err = solo("bench", "s.toml", "--results", "results", "--workers", "2")
    assert code == 0, out + err
    found, _ = read_all([place / "results"])
    assert {run.variant for run in found if run.first} == {"b"} and len(found) == 6
    found = [replace(run, last_100_episodes=float(run.seed)) for run in found]  # the stand-in has no score
    compared = compare(found, metric="train")
    assert compared.baseline == "fake b" and set(compared.opponents.values()) == {"fake b"}
    assert compare(found, metric="train", baseline="fake c").baseline == "fake c"


def test_variants_that_a_flag_of_the_command_line_makes_the_same_are_refused(solo, place):
    (place / "s.toml").write_text(SUITE + "variants = {a = {x = 1}, b = {x = 2}}")
    refused(solo("bench", "s.toml", "--", "--x", "3"), "have the same flags: a, b")


def test_same_name_for_different_flags_is_refused(place):
    (place / "s.toml").write_text(SUITE + SUITE.replace('name = "s"', "") + "flags = {x = 1}")
    with pytest.raises(UsageError, match="stands there twice, with different flags"):
        plan.load_suite(place / "s.toml", {})


# ---------------------------------------------------------------------- a time of day
def finished(place, name, seconds, steps, seed=9, env_id="CartPole-v1"):
    """A result of the fake training in a folder next to that of the bench."""
    made = results.Result(env_id, "fake", seed, args={"total_timesteps": steps}, global_step=steps, wall_time=seconds)
    results.write(made, place / f"tables/{name}")


def test_what_a_run_takes_is_told_by_the_runs_of_its_script_on_its_environment(place):
    script = plan.load_script("fake.py")
    made = task.Task(script, "CartPole-v1", 1, {"--total-timesteps": ("40",)})
    study, own = Study(Folder(place / "work"), "s", {made.id: made}), place / "tables/own"
    assert end_by.expected(study, made, own) == 0  # nothing is known
    finished(place, "other", 100.0, 10)
    finished(place, "own", 900.0, 10, env_id="Acrobot-v1")
    assert end_by.expected(study, made, own) == 400  # 10 seconds a step
    folder = place / f"work/tasks/{made.id}/run"
    (folder / "checkpoint/step_000000000030").mkdir(parents=True)
    (folder / "config.json").write_text('{"args": {"seed": 1}}')
    assert end_by.expected(study, made, own) == 100  # of which it has done three quarters
    usual = task.Task(script, "CartPole-v1", 2)
    assert end_by.expected(study, usual, own) == 100  # as long as the others, which had no flag


def test_a_run_that_cannot_end_in_time_does_not_begin(place, solo):
    words = command(seeds=2, workers=1)
    words = ["bench", "--until", "00:00", *words[1:]]
    words[words.index("results")] = "tables/own"
    finished(place, "other", 8 * 86_400, 5)  # a run takes eight days
    code, out, _ = solo(*words)
    assert code == 1 and "2 not begun, because they could not end in time; the same command continues" in out
    assert not steps(place)
    finished(place, "other", 0.1, 5)
    code, out, _ = solo(*words)
    assert code == 0 and "2 of 2 finished" in out
    assert steps(place) == once(2, 5)


def test_the_time_of_day_is_the_next_one_and_for_this_machine_only(place, solo):
    then = end_by.read_time("06:30")
    assert 0 < then - time.time() <= 86_400
    assert time.localtime(then)[3:6] == (6, 30, 0)
    words = command()
    bad, other = ["--until", "25:00"], ["--until", "06:30", "--engine", "ray", "--storage", "x"]
    sentence = "--until must be a time of day, such as 06:30, not 25:00"
    refused(solo(words[0], *bad, *words[1:]), sentence)
    words = [word for word in words if word not in ("--runs-dir", "work", "--workers", "2")]
    refused(solo(words[0], *other, *words[1:]), "--until is for the engine local")
