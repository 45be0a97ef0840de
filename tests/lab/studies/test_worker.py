"""`solo work`: one task, killed, stopped, resumed elsewhere, refused; always at most one result, and nothing lost."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from conftest import ROOT, environment, refused
from study_tasks import attempts, planned, rows, steps, until, work, worker

from solorl import signals
from solorl.cli.work import chosen
from solorl.files import sha256
from solorl.lab.studies import child
from solorl.lab.studies import worker as module
from solorl.lab.studies.lease import Lease, machine
from solorl.lab.studies.resources import Resources
from solorl.lab.studies.storage import Folder
from solorl.lab.studies.study import installed
from solorl.machine import own_handle

LONG = ("--total-timesteps", 40, "--pause", 0.04)


@pytest.fixture(params=["folder", pytest.param("objects", marks=pytest.mark.slow)])
def where(request, tmp_path):
    """A study's place: a folder, or a store of objects with a scratch folder for each worker."""
    place = tmp_path / "study"
    return str(place) if request.param == "folder" else f"file://{place}"


def trained(tmp_path, count=1):
    """Whether so many steps have been run."""
    return lambda: sum(steps(tmp_path).values()) >= count


def uploaded(study, task, step=2):
    """Whether a checkpoint of that step or a later one is in the storage, whole."""

    def there():
        names = study.storage.list(f"tasks/{task.id}")
        found = [name for name in names if name.endswith("manifest.json") and "step_" in name]
        return any(int(name.split("step_")[1].split("/")[0]) >= step for name in found)

    return there


# ---------------------------------------------------------------------- to the end
def test_a_task_is_done_once(tmp_path, where):
    study, [task] = planned(where, tmp_path)
    code, out = work(where, task.id, folder=tmp_path)
    assert code == 0 and "finished" in out
    assert steps(tmp_path) == {(1, step): 1 for step in range(5)} and rows(study, task, tmp_path) == [1, 2, 3, 4, 5]
    assert study.result(task.id)["status"]["status"] == "finished" and study.result(task.id)["attempt"] == 1
    assert attempts(study, task) == ["finished"] and not study.storage.list("leases")
    assert f"tasks/{task.id}/output-1.txt" in study.storage.list(f"tasks/{task.id}")
    before = study.storage.read(f"results/{task.id}.json")
    code, out = work(where, task.id, folder=tmp_path)
    assert code == 0 and "has finished before" in out and sum(steps(tmp_path).values()) == 5
    assert study.storage.read(f"results/{task.id}.json") == before and attempts(study, task) == ["finished"]


def test_index_of_the_scheduler(tmp_path):
    study, tasks = planned(tmp_path / "study", tmp_path, seeds=3)
    name = study.open_submission(tasks, "local", {})
    for index, key in enumerate(("SLURM_ARRAY_TASK_ID", "AWS_BATCH_JOB_ARRAY_INDEX", "JOB_COMPLETION_INDEX")):
        assert chosen(study, name, None, {key: str(index)}) == tasks[index]
    assert chosen(study, name, 1, {"SLURM_ARRAY_TASK_ID": "0"}) == tasks[1]


def test_a_script_of_another_kind(tmp_path, where):
    """It has no run folder of ours; what it leaves in its working folder comes up."""
    study, [task] = planned(where, tmp_path)
    (tmp_path / "fake.py").write_text(
        "import os, pathlib\npathlib.Path('made').write_text(os.environ['SOLORL_RUN_DIR'])"
    )
    script = replace(task.script, sha256=sha256(tmp_path / "fake.py"), ours=False)
    task = replace(task, script=script)
    study.tasks = {task.id: task}
    study.write()
    assert work(where, task.id)[0] == 0
    assert study.storage.read(f"tasks/{task.id}/attempt-1/made").decode().endswith(f"{task.id}/attempt-1")
    assert attempts(study, task) == ["finished"] and study.result(task.id)["run_dir"] == ""


def test_threads_and_gpus_are_those_of_the_resources_unless_the_scheduler_says():
    study_task = type("Task", (), {"resources": Resources(cores=3, gpus=2)})
    found = child.environment(study_task, {"PATH": "/bin"})
    assert found == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "0,1",
                     "PYTHONUNBUFFERED": "1", "PATH": "/bin", "SOLORL_WORKER": str(os.getpid())}  # fmt: skip
    given = {"OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "5"}
    assert given.items() <= child.environment(study_task, given).items()


# ---------------------------------------------------------------------- killed and stopped
def test_a_killed_worker_is_followed_by_another_one(tmp_path, where):
    study, [task] = planned(where, tmp_path, *LONG)
    with worker(where, task.id, folder=tmp_path) as first:
        until(uploaded(study, task))
        first.kill()
        first.wait()
    done = max(step for _, step in steps(tmp_path))
    code, out = work(where, task.id, folder=tmp_path)
    assert code == 0, out
    assert attempts(study, task) == ["running", "finished"] and rows(study, task, tmp_path) == [*range(1, 41)]
    twice = [step for (_, step), count in steps(tmp_path).items() if count > 1]
    assert 0 not in twice and len(twice) <= 20 and done < 39  # it went on from a checkpoint
    assert len(study.storage.list("results")) == 1


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGUSR1, signal.SIGINT))],
)
def test_preempted_it_saves_and_another_machine_goes_on(tmp_path, where, number):
    study, [task] = planned(where, tmp_path, *LONG)
    with worker(where, task.id, folder=tmp_path) as first:
        until(trained(tmp_path, 3))
        first.send_signal(number)
        out, _ = first.communicate()
        assert first.returncode == 75 and "stopped" in out
    done = sum(steps(tmp_path).values())
    assert done < 40 and attempts(study, task) == ["stopped"] and not study.storage.list("leases")
    (tmp_path / "elsewhere").mkdir()
    code, out = work(where, task.id, folder=tmp_path, TMPDIR=str(tmp_path / "elsewhere"))
    assert code == 0 and "--resume" in out and rows(study, task, tmp_path) == [*range(1, 41)]
    assert steps(tmp_path) == {(1, step): 1 for step in range(40)}  # nothing was lost, nothing done twice
    assert not list((tmp_path / "elsewhere").glob("solorl-*"))


def test_a_warning_before_the_signal_is_no_second_signal(tmp_path):
    study, [task] = planned(tmp_path / "study", tmp_path, "--total-timesteps", 60, "--pause", 0.2)
    with worker(tmp_path / "study", task.id, folder=tmp_path) as first:
        until(trained(tmp_path))
        first.send_signal(signal.SIGUSR1)
        first.send_signal(signal.SIGTERM)
        first.communicate()
        assert first.returncode == 75
    assert attempts(study, task) == ["stopped"]


def test_a_second_signal_ends_at_once(tmp_path):
    study, [task] = planned(tmp_path / "study", tmp_path, "--total-timesteps", 5, "--pause", 30)
    with worker(tmp_path / "study", task.id) as first:
        until(lambda: list((tmp_path / "study").glob("tasks/*/*/status.json")))
        first.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert first.poll() is None  # the step goes on
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=10)
        assert first.returncode == 128 + signal.SIGTERM
    assert attempts(study, task) == ["stopped"]


def test_time_limit(tmp_path):
    study, [task] = planned(tmp_path / "study", tmp_path, "--total-timesteps", 2000, "--pause", 0.05,
                            resources=Resources(time=1))  # fmt: skip
    code, out = work(tmp_path / "study", task.id, folder=tmp_path)
    assert code == 1 and "time limit of 1 seconds" in out and attempts(study, task) == ["failed"]
    [status] = (tmp_path / "study").glob("tasks/*/*/status.json")
    assert json.loads(status.read_text())["status"] == "stopped"  # it has saved


def test_attempts_are_limited(tmp_path, where):
    study, [task] = planned(where, tmp_path, "--fail-at", 2, limit=2)
    for _ in range(2):
        code, out = work(where, task.id, folder=tmp_path)
        assert code == 1 and "the simulator has crashed" in out
    code, out = work(where, task.id, folder=tmp_path)
    assert code == 1 and "has failed 2 times, as often as it may" in out
    assert attempts(study, task) == ["failed", "failed"]
    assert study.attempts(task.id)[1]["tail"][-1] == "RuntimeError: the simulator has crashed"
    assert steps(tmp_path) == {(1, 0): 1, (1, 1): 1}  # the second attempt went on after the first one's steps


# ---------------------------------------------------------------------- two at once
def test_of_two_workers_one_leaves(tmp_path, where):
    study, [task] = planned(where, tmp_path, *LONG, lease=2)
    with worker(where, task.id, folder=tmp_path) as first:
        until(trained(tmp_path))
        code, out = work(where, task.id, folder=tmp_path)
        assert code == 0 and ("another worker does it" in out or "has finished before" in out)
        first.communicate()
        assert first.returncode == 0
    assert attempts(study, task) == ["finished"] and steps(tmp_path) == {(1, step): 1 for step in range(40)}


def test_a_lease_without_a_heartbeat_is_taken_over(tmp_path):
    study, [task] = planned(tmp_path / "study", tmp_path, lease=1.0)
    dead = {"machine": "gone:1", "handle": "1:1", "beat": time.time()}
    study.storage.write(f"leases/{task.id}.json", json.dumps(dead).encode())
    began = time.time()
    code, out = work(tmp_path / "study", task.id, folder=tmp_path)
    assert code == 0 and "waiting for process 1, which has it" in out and study.result(task.id)["ended"] - began >= 0.9
    assert attempts(study, task) == ["finished"]


def test_a_lease_of_a_dead_process_of_this_machine_is_taken_at_once(tmp_path):
    study, [task] = planned(tmp_path / "study", tmp_path, lease=3600)
    lease = Lease(study, task.id)
    about = {"machine": machine(), "handle": "999999999:1", "beat": time.time()}
    study.storage.write(f"leases/{task.id}.json", json.dumps(about).encode())
    assert not lease.is_fresh(lease.holder()) and lease.take() and lease.is_mine()
    mine = lease.holder()
    assert lease.is_fresh(mine)
    for other in ({"machine": "elsewhere:1"}, {"handle": f"{os.getppid()}:0"}):
        study.storage.write(f"leases/{task.id}.json", json.dumps({**mine, **other}).encode())
        assert lease.is_fresh(lease.holder()) == ("machine" in other) and not lease.is_mine()


def test_a_worker_whose_task_was_taken_over_stops_and_leaves_the_lease(tmp_path, where):
    study, [task] = planned(where, tmp_path, *LONG, lease=1.0)
    with worker(where, task.id, folder=tmp_path) as first:
        until(trained(tmp_path))
        taker = {"machine": "elsewhere:1", "handle": own_handle(), "beat": time.time()}
        study.storage.write(f"leases/{task.id}.json", json.dumps(taker).encode())
        first.communicate()
        assert first.returncode == 0
    assert attempts(study, task) == ["stopped"] and not study.storage.list("results")
    assert Lease(study, task.id).holder()["machine"] == "elsewhere:1" and sum(steps(tmp_path).values()) < 40


def test_a_cancelled_task_saves_and_is_not_begun_again(tmp_path, where):
    study, [task] = planned(where, tmp_path, *LONG, lease=1.0)
    with worker(where, task.id, folder=tmp_path) as first:
        until(trained(tmp_path))
        study.storage.write(f"cancelled/{task.id}.json", b"{}")
        first.communicate()
        assert first.returncode == 0 and attempts(study, task) == ["stopped"]
    code, out = work(where, task.id, folder=tmp_path)
    assert code == 0 and "is cancelled" in out and attempts(study, task) == ["stopped"]


def test_only_one_result_is_accepted(tmp_path, where):
    study, [task] = planned(where, tmp_path)
    accepted = []
    threads = [
        threading.Thread(target=lambda i=i: accepted.append((i, study.accept(task.id, {"by": i})))) for i in range(8)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    [winner] = [i for i, won in accepted if won]
    assert study.result(task.id)["by"] == winner


# ---------------------------------------------------------------------- what the storage and the machine refuse
def test_a_full_disk_is_told_in_the_trainings_words_and_loses_nothing(tmp_path):
    """No file may grow over 20 kB: a training with longer rows ends there, what it had saved stays."""
    study, [task] = planned(tmp_path / "study", tmp_path, "--total-timesteps", 200, "--pause", 0.0)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    command = [sys.executable, "-m", "solorl.cli", "work", tmp_path / "study", task.id]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 1 and "File too large" in done.stdout and attempts(study, task) == ["failed"]
    assert "File too large" in study.attempts(task.id)[0]["tail"][-1]
    [saved] = (tmp_path / "study").glob("tasks/*/*/checkpoint/step_*")
    assert int(saved.name[5:]) > 50
    code, _ = work(tmp_path / "study", task.id, folder=tmp_path)
    assert code == 0 and rows(study, task, tmp_path) == [*range(1, 201)]
    assert min(step for _, step in steps(tmp_path)) >= int(saved.name[5:])


def test_where_nothing_can_be_noted_it_is_noted_elsewhere(tmp_path, monkeypatch, capsys):
    study, [task] = planned(tmp_path / "study", tmp_path, "--total-timesteps", 3)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    write = Folder.write

    def full(self, name, data):
        if name.startswith("attempts/"):
            raise OSError(errno.ENOSPC, "No space left on device", name)
        write(self, name, data)

    monkeypatch.setattr(Folder, "write", full)
    said = []
    assert module.Worker(study, [task], said.append).run() == 0
    [elsewhere] = (tmp_path / "tmp").glob("solorl-*.json")
    assert json.loads(elsewhere.read_text())["state"] == "finished"
    assert any("No space left on device" in line and str(elsewhere) in line for line in said)
    assert study.done() == {task.id}


def test_a_disk_without_room_for_the_lease_is_one_sentence(tmp_path):
    study, [task] = planned(tmp_path / "study", tmp_path)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # noqa: E731
    command = [sys.executable, "-m", "solorl.cli", "work", tmp_path / "study", task.id]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "File too large" in done.stderr
    assert sorted(study.storage.list("")) == [*study.storage.list("plans"), *study.storage.list("scripts")]
    assert work(tmp_path / "study", task.id)[0] == 0


def test_the_package_and_the_script_must_be_those_of_the_plan(tmp_path, solo, where):
    study, [task] = planned(where, tmp_path)
    study.package = {"version": "0.0.9", "sha256": "0" * 64}
    study.write()
    refused(solo("work", where, task.id), "is not the 0.0.9 (00000000) of the plan", "install the same one")
    assert attempts(study, task) == ["failed"] and "0.0.9" in study.attempts(task.id)[0]["reason"]
    study.package = installed()
    study.write()
    (tmp_path / "fake.py").write_text("something else")  # the copy in the study is run
    assert solo("work", where, task.id)[0] == 0
    [name] = study.storage.list("scripts")
    study.storage.write(name, b"changed")
    study.storage.delete(f"results/{task.id}.json")
    shutil.rmtree(tmp_path / "study/tasks")
    refused(solo("work", where, task.id), name, "missing or damaged")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere", "x"], "there is no folder nowhere"),
        (["empty", "x"], "there is no study in"),
        (["study", "nothing"], "has no task nothing"),
        (["study", "submissions/000009.json", "--index", "0"], "has no submission submissions/000009.json"),
        (["study", "submissions/000001.json", "--index", "2"], "has 2 tasks; --index must be from 0 to 1, not 2"),
        (["study", "submissions/000001.json"], "must be from 0 to 1, not nothing"),
        (["study", "fake", "--index", "1"], "--index is for submissions/NNNNNN.json"),
        (["damaged", "x"], "plan.json is damaged"),
        (["forged", "x"], "is not what its id says"),
        (["nope://x", "x"], "nope://x cannot be opened"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, solo, words, sentence):
    monkeypatch.chdir(tmp_path)
    study, tasks = planned(tmp_path / "study", tmp_path, seeds=2)
    study.open_submission(tasks, "local", {})
    for name in ("empty", "damaged", "forged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged/plan.json").write_text('{"format": 1}')
    text = study.storage.read(study.storage.list("plans")[0]).decode()
    (tmp_path / "forged/plan.json").write_text(text.replace('"seed": 2', '"seed": 3'))
    refused(solo("work", *words), sentence)


def test_it_starts_without_the_libraries(tmp_path):
    code = (
        "import sys, solorl.cli.work; print([m for m in ('numpy', 'torch', 'gymnasium', 'fsspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.stdout == "[]\n"


def test_signals_are_given_back(tmp_path, solo):
    _, [task] = planned(tmp_path / "study", tmp_path)
    before = [signal.getsignal(number) for number in signals.ENDING]
    assert solo("work", tmp_path / "study", task.id)[0] == 0
    assert [signal.getsignal(number) for number in signals.ENDING] == before
