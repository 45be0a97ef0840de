"""Workers: nothing finished is lost or counted twice, whatever is killed, stopped, cancelled or started twice."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import environment, refused
from study_tasks import (
    FAKE,
    MANY,
    children,
    command,
    kill_some,
    once,
    planned,
    process,
    steps,
    tables,
    until,
)  # fmt: skip

from solorl.lab.results.read import read_all
from solorl.lab.studies.lease import Leases, holder, is_fresh, machine
from solorl.lab.studies.resources import Resources
from solorl.lab.studies.storage import Folder
from solorl.lab.studies.study import open_study
from solorl.lab.studies.worker import AGAIN, Pool
from solorl.machine import own_cores, own_handle, shares

LONG = ("--total-timesteps", 40, "--pause", 0.05)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in, with a copy of the stand-in; its steps are noted in `journal`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    shutil.copy(FAKE, tmp_path / "fake.py")
    return tmp_path


def work(study, tasks=None, **more):
    """One worker to its end, in this process; what it said."""
    said = []
    pool = Pool(study, tasks or [*study.tasks.values()], 1, said.append, stay=False, **more)
    pool.run()
    return pool, said


# ---------------------------------------------------------------------- to the end
def test_every_task_is_done_once_and_repeating_the_command_does_nothing(solo, place):
    code, out, _ = solo(*command())
    assert (
        code == 0 and "4 of 4 finished in" in out and steps(place) == once(4, 5) and set(tables(place)) == {1, 2, 3, 4}
    )
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*.json*")}
    code, out, _ = solo(*command())
    assert code == 0 and "4 of 4 finished (4 of them before)" in out and "started" not in out
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*.json*")} == before
    assert not list((place / "work/leases").iterdir())
    assert solo("work", "work")[0] == 0 and steps(place) == once(4, 5)


def test_failures_are_limited_shown_and_forgotten_by_the_next_command(solo, place):
    words = command("--fail-at", 2, seeds=1, words=["--attempts", 2])
    code, out, _ = solo(*words)
    assert code == 1 and out.count("exit code 1") == 3 and "    | RuntimeError: the simulator has crashed" in out
    assert "again after step 2; to begin again, delete work/tasks/fake" in out and steps(place) == once(1, 2)
    code, out, _ = solo("bench", "status", "work")
    assert code == 1 and "failed     fake" in out and "    | some line" in out
    shutil.rmtree(next((place / "work/tasks").glob("*/*/config.json")).parent)
    assert solo(*words)[0] == 1 and steps(place)[1, 0] == 2


def test_what_has_diverged_is_begun_again_only_with_retry(solo, place):
    words = command("--diverge-at", 3, seeds=1, words=["--attempts", 9])
    assert [solo(*words)[1].count("started") for _ in range(2)] == [1, 0]
    code, out, _ = solo(*words[:1], "--retry", *words[1:])
    assert code == 1 and out.count("started") == 1 and "diverged: losses/value_loss is nan" in out
    assert steps(place)[1, 0] == 2
    runs, (problem,) = read_all([place / "results"])  # whoever reads the tables hears of it
    assert not runs and "fake__1.json.gz is left out: the run is not finished (diverged: losses/value_loss" in problem


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_training_continues_as_often_as_it_may(solo, place, by):
    words = command("--fail-after", 2, "--fail-by", int(by), "--total-timesteps", 9, seeds=1)
    code, out, _ = solo(*words)
    assert code == 0 and out.count("resumed    ") == 4 and steps(place) == once(1, 9)


def test_seeds_of_one_process_are_shared_out_and_a_half_done_one_continues_alone(solo, place):
    (place / "many.py").write_text(MANY + "    print('seed', seed)")
    one = ["bench", "many.py", "--env-ids", "CartPole-v1", "--results", "results", "--storage", "work"]
    out = solo(*one, "--num-seeds", 1, "--start-seed", 2, "--dry-run")[1]
    (half := place / out.split("--runs-dir ")[1].split()[0] / "seed2").mkdir(parents=True)
    (half / "config.json").write_text(json.dumps({"script": "many.py", "args": {"seed": 2}}))
    out = solo(*one, "--num-seeds", 5, "--dry-run")[1]
    assert out.count("--resume") == 1 and "--seed 3 --num-seeds 3" in out
    code, out, _ = solo(*one, "--num-seeds", 5, "--workers", 2)
    assert (
        code == 0 and set(tables(place)) == {1, 2, 3, 4, 5} and out.count("resumed    many CartPole-v1 seed 2\n") == 1
    )
    assert "many CartPole-v1 seed 3 to" in out or "many CartPole-v1 seed 4 to" in out
    assert "(5 of them before)" in solo(*one, "--num-seeds", 5)[1]
    for seed in range(1, 6):  # each is told what its process has printed
        code, out, _ = solo("bench", "logs", "work", f"many__CartPole-v1__{seed}__")
        assert code == 0 and f"seed {seed}" in out.splitlines()


FOREIGN = """
import os, sys
from pathlib import Path
assert sys.argv[1::2] == ["--env-id", "--seed"], sys.argv
assert Path.cwd() == Path(os.environ["SOLORL_RUN_DIR"])
with open("made_here", "x") as file:
    file.write(sys.argv[4])
if sys.argv[4] == "2":
    raise SystemExit("seed 2 is not liked")
"""


def test_a_foreign_script_runs_in_a_folder_of_its_own(solo, place):
    (place / "foreign.py").write_text(FOREIGN)
    words = ["bench", "foreign.py", "--env-ids", "Any/Thing", "--num-seeds", 2, "--workers", 1]
    code, out, _ = solo(*words)
    assert code == 1 and "1 of 2 finished" in out and "    | seed 2 is not liked" in out
    assert (
        "1 finished without a table; no run folder and no TensorBoard files were in:\n  foreign Any/Thing seed 1: "
        in out
    )
    assert solo(*words)[0] == 1
    made = sorted(path.parent.name for path in place.glob("runs/bench/foreign/tasks/*/attempt-*/made_here"))
    assert made == ["attempt-1", "attempt-1", "attempt-2"]


def test_workers_have_cores_and_gpus_of_their_own(place, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    study, tasks = planned(place / "work", place, seeds=3)
    cores = own_cores()
    monkeypatch.setattr("solorl.lab.studies.worker.visible_gpus", lambda: ["4", "7"])
    pool = Pool(study, tasks, 3, print)
    found = []
    for worker in pool.workers:
        worker.tasks = [tasks[0]]
        found.append([worker._environment(Path())[name] for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")])
    assert found == [[str(len(part)), gpu] for part, gpu in zip(shares(cores, 3), ["4", "7", "4"], strict=True)]
    alone = Pool(study, tasks, 1, print, stay=False).workers[0]
    alone.tasks = [replace(tasks[0], resources=Resources(cores=3, gpus=2))]
    own = alone._environment(Path())
    assert (own["OMP_NUM_THREADS"], own["CUDA_VISIBLE_DEVICES"]) == ("3", "0,1") and own["SOLORL_WORKER"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert alone._environment(Path())["CUDA_VISIBLE_DEVICES"] == "5"


def test_a_training_that_reaches_its_time_limit_is_told_to_end_and_has_failed(place):
    study, [task] = planned(place / "work", place, "--pause", 0.05, "--total-timesteps", 20000, attempts=1,
                            resources=Resources(time=2))  # fmt: skip
    work(study)
    assert "time limit of 2 seconds" in study.failures(task.id)[0]["reason"] and not children(place)


# ---------------------------------------------------------------------- killed, stopped, cancelled
def test_trainings_of_a_killed_command_save_and_the_same_command_continues(solo, place):
    flags = ("--total-timesteps", 60, "--pause", 0.05)
    with process(place, *command(*flags, seeds=3)) as first:
        until(lambda: len(children(place)) == 2 and sum(steps(place).values()) > 10)
        first.send_signal(signal.SIGKILL)
        first.wait()
    code, out, _ = solo(*command(*flags, seeds=3))
    assert code == 0 and out.count("resumed    ") == 2 and steps(place) == once(3, 60)  # nothing twice
    assert all(len(result.eval["global_step"]) == 60 for result in tables(place).values())


@pytest.mark.parametrize(("verb", "code"), [("bench", 128 + signal.SIGTERM), ("work", AGAIN)])
def test_the_first_signal_saves(solo, place, verb, code):
    planned(place / "work", place, *LONG, seeds=1)
    words = command(*LONG, seeds=1) if verb == "bench" else ["work", "work"]
    with process(place, *words) as first:
        until(lambda: sum(steps(place).values()) > 2)
        first.send_signal(signal.SIGUSR1)  # a scheduler's warning, which comes before its signal
        first.send_signal(signal.SIGTERM)
        out = first.communicate()[0]
    assert first.returncode in (code, 128 + signal.SIGUSR1) and "stopped    " in out and not children(place)
    assert not list((place / "work/leases").iterdir())
    assert solo("work", "work")[0] == 0 and steps(place) == once(1, 40)


def test_the_second_signal_kills(place):
    (place / "fake.py").write_text(FAKE.read_text().replace("ending.append(1)", "None"))
    with process(place, *command("--total-timesteps", 20000, "--pause", 0.02, seeds=1)) as first:
        until(lambda: children(place))
        first.send_signal(signal.SIGINT)
        assert any("once more kills them" in line for line in first.stdout)
        first.send_signal(signal.SIGINT)
        first.wait(timeout=60)
    assert first.returncode == 130 and not children(place)


@pytest.mark.parametrize("signalled", [False, True], ids=["alone", "after a signal"])
@pytest.mark.parametrize("failing", ["turn", "worker"])
def test_trainings_save_where_the_command_itself_fails(solo, place, monkeypatch, failing, signalled):
    """Also after a first signal: that is no second one, which would kill them."""
    study, tasks = planned(place / "work", place, *LONG, seeds=1)
    pool = Pool(study, tasks, 2, print)

    def fail(*worker):
        until(lambda: sum(steps(place).values()) > 2)
        if signalled:
            pool.hear(signal.SIGTERM, None)
        raise BrokenPipeError

    serve = pool.serve
    monkeypatch.setattr(pool, "serve", lambda worker: serve(worker) if worker is pool.workers[0] else fail())
    if failing == "turn":
        pool.workers = pool.workers[:1]
    with pytest.raises(BrokenPipeError):
        pool.run(*[fail] * (failing == "turn"))
    (status,) = place.glob("work/tasks/**/status.json")
    assert json.loads(status.read_text())["status"] == "stopped" and not children(place)  # what is killed is "running"
    assert sum(steps(place).values()) < 40
    assert solo("work", "work")[0] == 0 and steps(place) == once(1, 40)  # nothing twice


def test_a_training_that_somebody_else_ends_is_begun_again_by_the_next_command(solo, place):
    """It has saved, at a signal of its own or a file named `stop`; a command that went on with it would undo that."""
    with process(place, *command(*LONG, seeds=1)) as first:
        until(lambda: sum(steps(place).values()) > 2)
        os.kill(children(place)[0], signal.SIGTERM)
        out = first.communicate()[0]
    assert first.returncode == 1 and "failed     fake CartPole-v1 seed 1: it was told to end" in out
    assert out.count("resumed") == 0 and sum(steps(place).values()) < 40
    code, out, _ = solo(*command(*LONG, seeds=1))
    assert code == 0 and out.count("resumed    ") == 1 and steps(place) == once(1, 40)


def test_cancelled_is_a_file_that_workers_look_for(solo, place):
    study, tasks = planned(place / "work", place, "--total-timesteps", 4000, "--pause", 0.02, seeds=2, lease=1.0)
    with process(place, "work", "work") as one:
        until(lambda: children(place))
        assert solo("bench", "cancel", "work")[0] == 0
        one.wait()
    found = json.loads(solo("bench", "status", "work", "--json")[1])
    assert found["counts"] == {"cancelled": 2} and not children(place) and set(found["tasks"]) == set(study.tasks)
    assert (
        solo("bench", "retry", "work")[1].startswith("2 tasks") and study.states(tasks)[tasks[0].id].name == "waiting"
    )
    assert solo("bench", "logs", "work", tasks[1].id)[1] == f"{tasks[1].id} has printed nothing yet\n"


# ---------------------------------------------------------------------- leases
def test_a_lease_is_fresh_while_its_process_gives_signs_of_life(place):
    study, [task] = planned(place / "work", place, lease=3600)
    name = f"leases/{task.id}.json"
    mine = {"machine": machine(), "handle": own_handle(), "beat": time.time()}
    for about, fresh in (({}, True), ({"handle": "999999999:1"}, False), ({"machine": "other:1"}, True),
                         ({"beat": time.time() - 4000}, False), ({"beat": time.time() + 4000}, False),
                         ({"machine": "other:1", "handle": "999999999:1"}, True), ({"beat": "x"}, False)):  # fmt: skip
        study.storage.write(name, json.dumps(mine | about).encode())
        assert is_fresh(holder(study.storage, task.id), 3600) == fresh, about
        assert (Leases(study.storage, 3600, print).take(task.id) is None) == fresh


def test_a_task_of_a_dead_worker_waits_for_its_lease_and_the_death_is_noted(place):
    study, [task] = planned(place / "work", place, lease=1.0)
    dead = {"machine": "gone:1", "handle": "1:1", "beat": time.time()}
    study.storage.write(f"leases/{task.id}.json", json.dumps(dead).encode())
    work(study)
    assert study.states([task])[task.id].name == "finished" and study.result(task.id)["ended"] - dead["beat"] > 0.9
    assert [one["reason"] for one in study.failures(task.id)] == ["its worker was killed"]


def test_a_worker_leaves_what_a_living_one_does(place):
    study, [task] = planned(place / "work", place, lease=1.0)
    leases = Leases(study.storage, 1.0, print)
    leases._owner["machine"] = "other:1"
    leases.take(task.id)
    leases.start()
    work(study)
    leases.over.set()
    assert not steps(place)


def test_a_worker_whose_task_was_taken_over_stops_and_leaves_the_lease(place):
    study, [task] = planned(place / "work", place, "--total-timesteps", 4000, "--pause", 0.02, lease=1.0)
    with process(place, "work", "work") as one:
        until(lambda: children(place))
        taker = {"machine": "other:1", "handle": own_handle(), "beat": time.time() + 0.9}
        study.storage.write(f"leases/{task.id}.json", json.dumps(taker).encode())
        until(lambda: not children(place))
        assert holder(study.storage, task.id)["machine"] == "other:1" and not study.ids()
        study.accept(task.id)
        one.wait()


def test_of_several_results_and_of_several_leases_one_counts(place):
    study, [task] = planned(place / "work", place)
    won = []
    threads = [threading.Thread(target=lambda i=i: study.accept(task.id, by=i) and won.append(i)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [study.result(task.id)["by"]] == won


# ---------------------------------------------------------------------- what the disk loses and refuses
def test_damaged_missing_and_mistaken_tables_are_made_again(solo, place):
    solo(*command())
    files = sorted((place / "results").iterdir())
    whole = [path.read_bytes() for path in files]
    files[0].write_bytes(whole[0][:50])
    files[1].unlink()
    files[3].write_bytes(whole[2])  # whole, but of another run
    code, out, _ = solo(*command())
    assert code == 0 and out.count("again      ") == 3 and "started" not in out
    assert [path.read_bytes() for path in files] == whole
    shutil.rmtree(place / "work/tasks")
    assert "started" not in solo(*command())[1]  # the tables are there
    files[0].unlink()
    code, out, _ = solo(*command())
    assert code == 0 and out.count("lost       ") == 1 and len(tables(place)) == 4 and max(steps(place).values()) == 2


@pytest.mark.parametrize("name", ["leases", "results"])
def test_a_full_disk_is_one_sentence_and_loses_nothing(solo, place, monkeypatch, name):
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


def test_a_file_system_without_links_will_do(solo, place, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(OSError(errno.EPERM, "not permitted")))
    assert solo(*command(seeds=1))[0] == 0 and set(tables(place)) == {1}


def test_the_package_and_the_script_must_be_those_of_the_plan(solo, place):
    study, [task] = planned(place / "work", place, attempts=1)
    (place / "fake.py").write_text("something else")  # the copy in the study is run
    study.package = {"version": "0.0.9", "sha256": "0" * 64}
    study.write()
    refused(solo("work", "work"), "is not the 0.0.9 (00000000) of the plan", "install the same one")
    for path in (place / "work/plans").glob("000002*"):
        path.unlink()
    assert solo("work", "work")[0] == 0 and steps(place) == once(1, 5)
    study.storage.delete(f"results/{task.id}.json")
    shutil.rmtree(place / "work/tasks")
    study.storage.write(study.storage.list("scripts")[0], b"changed")
    assert solo("work", "work")[0] == 1
    assert "is missing or damaged" in study.failures(task.id)[0]["reason"]


def test_it_starts_without_the_libraries(place):
    code = "import sys, solorl.cli.work; print({'numpy', 'torch', 'gymnasium', 'fsspec'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=place)
    assert done.stdout == "set()\n", done.stderr


# ---------------------------------------------------------------------- proofs
@pytest.mark.slow
def test_forty_tasks_under_ten_kills_have_one_result_each(place):
    words = command("--total-timesteps", 20, "--pause", 0.05, seeds=40, words=["--attempts", 9])
    out, code, killed = kill_some(place, lambda: process(place, *words), 10, 2.0)
    study = open_study("work")
    print(killed, len([*steps(place).elements()]), "steps of", 40 * 20)
    assert code == 0 and sum(killed.values()) == 10, out
    assert study.ids() == set(study.tasks) and len(tables(place)) == 40
    assert all(one.eval["global_step"] == [*range(1, 21)] for one in tables(place).values())
    assert set(steps(place)) == set(once(40, 20)) and sum(steps(place).values()) <= 40 * 20 + 2 * 10


@pytest.mark.slow
def test_two_commands_with_different_plans_lose_nothing_in_twenty_starts(place):
    for trial in range(20):
        words = [*command("--total-timesteps", 2, seeds=3), "--pause", f"0.0{trial}"]
        words[words.index("work")] = f"work{trial}"
        other = [*words[:-1], f"0.1{trial}"]
        with process(place, *words) as one, process(place, *other) as two:
            outs = [one.communicate()[0], two.communicate()[0]]
        assert (one.returncode, two.returncode) == (0, 0), outs
        study = open_study(f"work{trial}")
        assert len(study.tasks) == 6 and study.ids() == set(study.tasks)
        assert len(study.storage.list("plans")) == 2 and not study.storage.list("failures")


@pytest.mark.slow
def test_two_commands_share_the_work_and_one_takes_over_from_the_other(place):
    flags = ("--total-timesteps", 40, "--pause", 0.1)
    with process(place, *command(*flags)) as one, process(place, *command(*flags)) as two:
        until(lambda: len(children(place)) == 4)
        one.send_signal(signal.SIGKILL)
        out = two.communicate()[0]
    assert two.returncode == 0 and "4 of 4 finished" in out and steps(place) == once(4, 40)
