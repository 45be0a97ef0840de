"""Studies: storage, resources, the plan on the disk, and fleets that submit what is missing until all is done once."""

import contextlib
import json
import math
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from conftest import environment, refused
from study_tasks import FAKE, Said, attempts, open_study, planned, steps, until

from solorl.errors import UsageError
from solorl.lab.results import result as results
from solorl.lab.studies import fleet
from solorl.lab.studies.engines.workers import LocalCluster
from solorl.lab.studies.mirror import Mirror
from solorl.lab.studies.plan import load_suite
from solorl.lab.studies.resources import Resources, read_resources
from solorl.lab.studies.storage import open_storage, read_object
from solorl.lab.studies.study import used
from solorl.machine import process_start


@pytest.fixture(params=["folder", "file", "memory"])
def storage(request, tmp_path):
    """A folder, local files as objects, and objects in memory."""
    where = {"folder": str(tmp_path / "s"), "file": f"file://{tmp_path}/s", "memory": f"memory://{tmp_path.name}/s"}
    return open_storage(where[request.param])


# ---------------------------------------------------------------------- storage
def test_a_storage_keeps_files(storage, tmp_path):
    assert storage.list("") == [] and not storage.exists("a/b.json") and read_object(storage, "a/b.json") == {}
    with pytest.raises(FileNotFoundError):
        storage.read("a/b.json")
    storage.write("a/b.json", b'{"x": 1}')
    storage.write("a/c/d", b"old")
    storage.write("a/c/d", b"new")
    assert storage.read("a/c/d") == b"new" and read_object(storage, "a/b.json") == {"x": 1}
    assert storage.list("a") == storage.list("") == ["a/b.json", "a/c/d"] and storage.list("a/c") == ["a/c/d"]
    assert storage.exists("a/b.json") and not storage.exists("a") and storage.list("nothing") == []
    assert not storage.create("a/b.json", b"other") and read_object(storage, "a/b.json") == {"x": 1}
    assert storage.create("a/e", b"first") and storage.read("a/e") == b"first"
    storage.delete("a/e")
    storage.delete("a/e")
    assert not storage.exists("a/e")
    (tmp_path / "here").write_bytes(b"content")
    storage.put(tmp_path / "here", "up/here")
    storage.get("up/here", tmp_path / "down/here")
    assert (tmp_path / "down/here").read_bytes() == b"content" == storage.read("up/here")
    with pytest.raises(FileNotFoundError):
        storage.get("nothing", tmp_path / "x")


def test_of_many_that_create_a_file_one_succeeds(storage):
    won = []
    threads = [threading.Thread(target=lambda i=i: won.append((i, storage.create("f", b"%d" % i)))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [i for i, succeeded in won if succeeded]
    assert storage.read("f") == b"%d" % winner


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file, but should be the folder of a study"):
        open_storage(str(tmp_path / "file"))
    with pytest.raises(UsageError, match="cannot be made: Not a directory"):
        open_storage(str(tmp_path / "file/below"))
    with pytest.raises(UsageError, match="there is no folder"):
        open_storage(str(tmp_path / "absent"), make=False)


def test_a_mirror_brings_the_newest_whole_checkpoint_elsewhere(storage, tmp_path):
    def checkpoint(folder, step, whole=True):
        (folder / f"run/checkpoint/step_{step}").mkdir(parents=True)
        (folder / f"run/checkpoint/step_{step}/state.json").write_text(str(step))
        if whole:
            (folder / f"run/checkpoint/step_{step}/manifest.json").write_text("{}")

    one, two = tmp_path / "one", tmp_path / "two"
    checkpoint(one, 1)
    (one / "run/config.json").write_text("{}")
    first = Mirror(storage, one, "tasks/x")
    first.upload()
    checkpoint(one, 2)
    checkpoint(one, 3, whole=False)
    shutil.rmtree(one / "run/checkpoint/step_1")
    put, order = storage.put, []
    storage.put = lambda path, name: (order.append(name), put(path, name))
    first.upload()
    assert (
        order[-1] == "tasks/x/run/checkpoint/step_2/manifest.json" and len(order) == 3
    )  # nothing twice, manifest last
    second = Mirror(storage, two, "tasks/x")
    second.download()
    assert sorted(path.relative_to(two).as_posix() for path in two.rglob("*.json")) == [
        "run/checkpoint/step_2/manifest.json", "run/checkpoint/step_2/state.json", "run/config.json",
    ]  # fmt: skip
    checkpoint(two, 4)
    shutil.rmtree(two / "run/checkpoint/step_2")
    second.upload()  # what did not come up whole goes, too
    assert {name.split("/")[4] for name in storage.list("tasks") if "step_" in name} == {"step_4"}


def test_a_checkpoint_that_is_deleted_while_it_goes_up_comes_up_whole(storage, tmp_path):
    """A training may save faster than its checkpoints go up: then, too, there is always a whole one."""

    def checkpoint(step):
        (work / f"run/checkpoint/step_{step}").mkdir(parents=True)
        for name in ("a", "b", "manifest.json"):
            (work / f"run/checkpoint/step_{step}/{name}").write_text(str(step))

    def found():
        return sorted(name for name in storage.list("x") if "step_" in name)

    work, put = tmp_path / "work", storage.put
    checkpoint(1)
    (work / "run/config.json").write_text("{}")
    mirror = Mirror(storage, work, "x")

    def deleting(path, name):
        put(path, name)
        if name.endswith("step_1/a"):
            shutil.rmtree(work / "run/checkpoint/step_1")
            checkpoint(2)

    storage.put = deleting
    mirror.upload()
    assert [name.rpartition("/step_1/")[2] for name in found()] == ["a", "b", "manifest.json"]
    mirror.upload()
    assert {name.split("/")[3] for name in found()} == {"step_2"} and len(found()) == 3
    shutil.rmtree(work / "run/checkpoint/step_2")  # the training is between two saves
    mirror.upload()
    assert len(found()) == 3
    for name in found():
        storage.delete(name) if name.endswith("manifest.json") else None
    Mirror(storage, tmp_path / "other", "x").download()
    assert not (tmp_path / "other").exists()  # nothing to go on from: it begins again


# ---------------------------------------------------------------------- resources
def test_resources_are_read_with_units():
    found = read_resources({"cores": 2, "memory": "1.5 GB", "time": "90min"}, "x")
    assert found == Resources(2, 0, 1500, 5400)
    assert read_resources({"gpus": "1", "time": "1 d"}, "x") == Resources(1, 1, 0, 86400)
    for table, sentence in [
        ({"core": 1}, "unknown key core; did you mean cores"),
        ({"cores": 0}, "must be a whole number from 1 to 1,024, not 0"),
        ({"gpus": -1}, "from 0"),
        ({"cores": 1.5}, "whole number"),
        ({"memory": 4}, r"a number with a unit \(MB, GB, TB\), such as 4 GB, not 4"),
        ({"memory": "4 parsecs"}, "unit"),
        ({"time": "0 h"}, r"\(s, min, h, d\)"),
        ({"time": "inf h"}, "unit"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            read_resources(table, "x")


def test_suites_have_resources_and_options_of_engines(tmp_path):
    shutil.copy(FAKE, tmp_path / "fake.py")
    text = """
resources = {cores = 2, time = "1 h"}
[engine.slurm]
partition = "gpu"
nice = 5
[[job]]
script = "fake.py"
env_ids = ["CartPole-v1"]
num_seeds = 1
[[job]]
script = "fake.py"
env_ids = ["Acrobot-v1"]
num_seeds = 1
resources = {cores = 4}
"""
    (tmp_path / "s.toml").write_text(text)
    plan = load_suite(tmp_path / "s.toml", {})
    assert [task.resources for task in plan.tasks] == [Resources(2, time=3600), Resources(4, time=3600)]
    assert plan.engines == {"slurm": {"partition": "gpu", "nice": "5"}}
    plan = load_suite(tmp_path / "s.toml", {}, given={"cores": "1", "memory": "2GB"})
    assert {task.resources for task in plan.tasks} == {Resources(1, 0, 2000, 3600)}
    for old, new, sentence in [
        ("cores = 4", "cpus = 4", "resources of a .* has the unknown key cpus"),
        ("{cores = 4}", "4", "must be a table"),
        ("[engine.slurm]\npartition", "[engine]\npartition", r"\[engine.partition\] .* must be a table"),
    ]:
        (tmp_path / "s.toml").write_text(text.replace(old, new))
        with pytest.raises(UsageError, match=sentence):
            load_suite(tmp_path / "s.toml", {})


# ---------------------------------------------------------------------- the plan
def test_plans_of_several_commands_are_put_together(tmp_path):
    study, [first] = planned(tmp_path / "study", tmp_path)
    _, tasks = planned(tmp_path / "study", tmp_path, seeds=3, resources=Resources(cores=2), limit=5)
    found = open_study(str(tmp_path / "study"))
    assert list(found.tasks) == [task.id for task in tasks] and first.id in found.tasks and found.limit == 5
    assert [task.resources.cores for task in found.tasks.values()] == [2, 2, 2]
    assert found.tasks[first.id].argv()[1:] == first.argv()[1:] and len(found.storage.list("scripts")) == 1
    assert open_study(str(tmp_path / "study/plan.json")).tasks == found.tasks
    names = [study.open_submission(tasks, "x", {}) for _ in range(3)]
    assert names == [f"submissions/{i:06d}.json" for i in (1, 2, 3)]


def test_attempts_that_count():
    states = ["running", "failed", "finished", "stopped", "stopped"]
    assert used({"state": state} for state in states) == 2 and used([{"state": "failed", "forgiven": True}]) == 0


# ---------------------------------------------------------------------- fleets
def command(place, *flags, seeds=4, workers=2, storage="study", lease=1):
    """A bench of the stand-in on workers of this machine."""
    if not (place / "fake.py").exists():
        shutil.copy(FAKE, place / "fake.py")
    words = ["bench", "fake.py", "--env-ids", "CartPole-v1", "--num-seeds", seeds, "--storage", storage, "--results",
             "results", "--variant", "", "--workers", workers, "--lease", lease, "--", *flags]  # fmt: skip
    return [str(word) for word in words]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in; the steps of stand-ins are noted in `journal`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    return tmp_path


def runner(place, *flags, **kwargs):
    """The same in a process of its own."""
    words = [sys.executable, "-m", "solorl.cli", *command(place, *flags, **kwargs)]
    env = environment(FAKE_JOURNAL=str(place / "journal"))
    return subprocess.Popen(words, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def tables(place):
    """Seed -> result of every file in the results folder."""
    return {result.seed: result for result in map(results.read, (place / "results").iterdir())}


@pytest.mark.parametrize("storage", ["study", pytest.param("file://{}/study", marks=pytest.mark.slow)])
def test_a_fleet_finishes_and_repeats_nothing(solo, place, storage):
    words = command(place, storage=storage.format(place))
    code, out, _ = solo(*words)
    assert code == 0 and "4 of 4 finished" in out and "results in results" in out
    assert steps(place) == {(seed, step): 1 for seed in range(1, 5) for step in range(5)}
    assert set(tables(place)) == {1, 2, 3, 4} and all(
        len(one.eval["global_step"]) == 5 for one in tables(place).values()
    )
    before = {path: path.read_bytes() for path in (place / "results").iterdir()}
    code, out, _ = solo(*words)
    assert code == 0 and "submitted" not in out and sum(steps(place).values()) == 20
    assert {path: path.read_bytes() for path in (place / "results").iterdir()} == before
    code, out, _ = solo("bench", "status", storage.format(place))
    assert (code, out) == (0, "fake: 4 tasks: 4 finished\n")
    assert solo("bench", "collect", storage.format(place), "--results", "again")[0] == 0
    assert {path.name: path.read_bytes() for path in (place / "again").iterdir()} == {
        path.name: content for path, content in before.items()
    }


def test_what_fails_is_tried_again_and_then_shown(solo, place):
    words = command(place, "--fail-at", 3, seeds=1)
    words[words.index("--lease")] = "--attempts"  # 1 of them
    code, out, _ = solo(*words)
    assert code == 1 and "0 of 1 finished" in out and "1 failed" in out
    assert "    | RuntimeError: the simulator has crashed" in out
    study = open_study("study")
    [task] = study.tasks.values()
    assert attempts(study, task) == ["failed"]
    code, out, _ = solo("bench", "status", "study")
    assert code == 1 and "after 1 of 1 attempts: exit code 1" in out and "    | RuntimeError" in out
    assert "the simulator has crashed" in solo("bench", "logs", "study", task.id[:8])[1]
    assert "1 tasks may run again" in solo("bench", "retry", "study")[1]
    assert solo("bench", "status", "study")[0] == 0 and solo(*words)[0] == 1
    assert attempts(study, task) == ["failed", "failed"]


def test_what_has_diverged_is_not_tried_again(solo, place):
    """The same seed meets the same NaN: nothing begins again before `solo bench retry`."""
    words = command(place, "--diverge-at", 3, seeds=1)
    words[words.index("--lease")] = "--attempts"
    words[words.index("--attempts") + 1] = "5"
    for _ in range(2):
        code, out, _ = solo(*words)
        assert code == 1 and "diverged: losses/value_loss is nan" in out
    study = open_study("study")
    [task] = study.tasks.values()
    assert attempts(study, task) == ["failed"]
    solo("bench", "retry", "study")
    assert solo(*words)[0] == 1 and attempts(study, task) == ["failed", "failed"]


@pytest.mark.slow
def test_cancelled_tasks_stop_until_they_are_retried(solo, place):
    words = command(place, "--pause", 0.1, "--total-timesteps", 20, seeds=2, workers=1)
    with runner(place, "--pause", 0.1, "--total-timesteps", 20, seeds=2, workers=1) as process:
        until(lambda: steps(place))
        assert solo("bench", "cancel", "study")[0] == 0
        out, _ = process.communicate(timeout=30)
    assert (
        process.returncode == 1
        and out.count("failed     ") == 2
        and "it is cancelled" in out
        and sum(steps(place).values()) < 25
    )
    assert "2 tasks: 2 cancelled" in solo("bench", "status", "study")[1]
    solo("bench", "retry", "study")
    assert solo(*words)[0] == 0 and set(tables(place)) == {1, 2}


@pytest.mark.slow
def test_two_runners_on_one_plan(place):
    flags = ("--pause", 0.02, "--total-timesteps", 10)
    with runner(place, *flags, seeds=10) as one, runner(place, *flags, seeds=10) as two:
        for process in (one, two):
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0 and "10 of 10 finished" in out
    assert steps(place) == {(seed, step): 1 for seed in range(1, 11) for step in range(10)}


@pytest.mark.slow
def test_many_tasks_with_killed_trainings_and_commands_have_one_result_each(place):
    """Every tenth training, in the mean, is killed with SIGKILL at a random moment, and now and then the command."""
    seeds, draw, killed = int(os.environ.get("SOLORL_TEST_TASKS", "200")), random.Random(1), Counter()
    delays: dict[int, float] = {}  # process -> the moment to kill it; infinite for most
    while True:
        with runner(place, "--pause", 0.05, seeds=seeds, workers=4) as process:
            reader = threading.Thread(target=process.stdout.read)
            reader.start()
            end = time.monotonic() + draw.uniform(3, 10) if killed["command"] < 5 else math.inf
            while process.poll() is None:
                time.sleep(0.01)
                if time.monotonic() > end:
                    process.kill()
                    killed["command"] += 1
                for path in (place / "study/tasks").glob("*/*/status.json"):
                    with contextlib.suppress(OSError, ValueError):
                        status = json.loads(path.read_text())
                        pid = status["pid"] if status["status"] == "running" else 0
                        chosen = pid and pid not in delays and draw.random() < 0.1
                        delays.setdefault(pid, time.monotonic() + draw.uniform(0, 0.4) if chosen else math.inf)
                        if time.monotonic() > delays[pid] and process_start(pid):
                            delays[pid] = math.inf
                            os.kill(pid, signal.SIGKILL)
                            killed["training"] += 1
            reader.join()
        if process.returncode >= 0:
            break
    assert process.returncode == 0
    study = open_study(str(place / "study"))
    assert study.done() == set(study.tasks) and len(study.storage.list("results")) == seeds
    assert set(tables(place)) == set(range(1, seeds + 1)) and killed["training"] >= seeds / 40
    assert all(one.eval["global_step"] == [1, 2, 3, 4, 5] for one in tables(place).values())


class Forgetful:
    """An engine whose workers never start."""

    name, array_limit = "forgetful", 10

    def submit(self, submission):
        return [f"{submission.name}/{i}" for i in range(len(submission.tasks))]

    def alive(self, handles):
        return set()

    def logs(self, handle):
        return "no such partition"


def test_workers_that_leave_no_trace_are_not_started_for_ever(place, monkeypatch):
    study, [task] = planned(place / "study", place, limit=3)
    said = Said()
    monkeypatch.setattr(fleet, "LOOK_ELSEWHERE", 0.02)
    runner = fleet.Fleet(study, [task], Forgetful(), {}, said, place / "tables")
    assert runner.run() == 1 and runner.failed[task.id].reason == "3 workers ended without a trace"
    assert "no such partition" in said[-1] and len(study.submissions()) == 3


class Refusing(LocalCluster):
    """An engine that refuses."""

    def submit(self, submission):
        raise UsageError("the partition gpu does not exist")


class Deaf(LocalCluster):
    """An engine that does not answer the first submissions."""

    calls = 0

    def submit(self, submission):
        self.calls += 1
        if self.calls <= 4:
            raise OSError("Unable to contact the controller")
        return super().submit(submission)


def test_a_scheduler_that_takes_no_tasks_now_is_asked_again(place, monkeypatch):
    monkeypatch.setitem(fleet.LOOK, "local", 0.02)
    study, [task] = planned(place / "study", place, limit=3)
    said, deaf = Said(), Deaf()
    assert fleet.Fleet(study, [task], deaf, {}, said, place / "tables").run() == 0
    assert deaf.calls == 5  # more than its tries
    assert sum("Unable to contact" in line for line in said) == 1  # said once, not at each look
    assert attempts(study, task) == ["finished"]


def test_what_the_scheduler_refuses_leaves_no_submission(place):
    study, [task] = planned(place / "study", place)
    with pytest.raises(UsageError, match="partition"):
        fleet.Fleet(study, [task], Refusing(), {}, Said(), place / "tables").run()
    assert study.submissions() == [] and attempts(study, task) == []


class Silent(LocalCluster):
    """An engine that does not answer at first."""

    looks = 0

    def alive(self, handles):
        self.looks += 1
        if self.looks == 2:
            raise OSError(111, "Connection refused")
        return super().alive(handles)


def test_a_scheduler_that_does_not_answer_is_asked_again(place):
    study, [task] = planned(place / "study", place)
    said = Said()
    assert fleet.Fleet(study, [task], Silent(), {}, said, place / "tables").run() == 0
    assert any("Connection refused" in line for line in said) and attempts(study, task) == ["finished"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engine", "slrm"], "there is no engine slrm; did you mean slurm"),
        (["--cores", "1000"], "a task wants 1000 cores, but this machine has"),
        (["--detach"], "--detach is for clusters"),
        (["--attempts", "0"], "--attempts must be from 1 to 100, not 0"),
        (["--storage", "s", "--detach"], "--detach is for clusters"),
        (["--storage", "s", "--cores", "1000"], "a task wants 1000 cores, but this machine has"),
        (["--storage", "s", "--gpus", "900"], "a task wants 900 GPUs, but this machine has"),
        (["--storage", "s", "--memory", "4"], "must be a number with a unit"),
        (["--storage", "s", "--attempts", "0"], "--attempts must be from 1 to 100, not 0"),
        (["--storage", "s", "--lease", "0.1"], "--lease must be from 1 to 86,400 seconds, not 0.1"),
        (
            ["--storage", "s", "--engine-option", "worker=3"],
            "the engine local has no option worker; did you mean workers",
        ),
        (["--storage", "s", "--engine-option", "workers"], "--engine-option must be KEY=VALUE"),
        (["--storage", "s", "--engine-option", "workers=0"], "must be a whole number from 1"),
        (["--storage", "nope://s"], "nope://s cannot be opened"),
        (["--storage", "fake.py"], "fake.py is a file"),
        (["--storage", "s", "--dry-run"], "--dry-run is for runs without --storage"),
    ],
)
def test_bad_flags_are_one_sentence(solo, place, words, sentence):
    flags = command(place)[: command(place).index("--storage")]
    code, _, err = solo(*flags, *words)
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err and sentence in err, err
    assert not (place / "s/submissions").exists() or not list((place / "s/submissions").iterdir())


@pytest.fixture
def listener():
    """A server of somebody else: its port, and a function that tells how many have come. It hangs up."""
    came = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    one, who = server.accept()
                    came.put(who)
                    one.close()

        def visitors():
            """Connections since the last call. They are accepted in order, so that ours is the last of them."""
            with socket.create_connection(server.getsockname()) as ours:
                return sum(1 for _ in iter(lambda: came.get(timeout=60), ours.getsockname()))

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], visitors
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def elsewhere(place, listener, monkeypatch):
    """`elsewhere(engine)`: a study of somebody else that was submitted to an engine at that server; its address."""
    for name in ("RAY_ADDRESS", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_BATCH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setattr("ray.init", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("it hangs up")))
    given = {"ray": {}, "aws-batch": {"queue": "q", "definition": "d", "region": "eu-central-1"}}

    def submitted(engine):
        key, address = {"ray": ("address", "127.0.0.1:{}"), "aws-batch": ("endpoint_url", "http://127.0.0.1:{}")}[
            engine
        ]
        address = address.format(listener[0])
        study, [task] = planned(place / "study", place)
        name = study.open_submission([task], engine, {**given[engine], key: address})
        study.note_handles(name, [{"ray": "solo-x/0", "aws-batch": "job"}[engine]])
        return address, task

    return submitted


@pytest.mark.parametrize("engine", ["ray", "aws-batch"])
@pytest.mark.parametrize("verb", ["logs", "cancel"])
def test_no_connection_is_made_where_only_the_study_says(verb, engine, elsewhere, listener, solo, monkeypatch):
    address, task = elsewhere(engine)
    refused(solo("bench", verb, "study", task.id), repr(address), f"if you trust that machine, add --address {address}")
    monkeypatch.setenv({"ray": "RAY_ADDRESS", "aws-batch": "AWS_ENDPOINT_URL"}[engine], "http://127.0.0.1:9")
    refused(solo("bench", verb, "study", task.id), repr(address), f"add --address {address}")
    assert listener[1]() == 0


@pytest.mark.parametrize("engine", ["ray", "aws-batch"])
def test_a_connection_is_made_where_the_user_says(engine, elsewhere, listener, solo, monkeypatch):
    """By the flag or a variable. What is not there is one sentence."""
    address, task = elsewhere(engine)
    refused(solo("bench", "logs", "study", task.id, "--address", address), "")
    assert listener[1]() > 0
    monkeypatch.setenv({"ray": "RAY_ADDRESS", "aws-batch": "AWS_ENDPOINT_URL"}[engine], address)
    refused(solo("bench", "logs", "study", task.id), "")
    assert listener[1]() > 0
    dead = "127.0.0.1:9" if engine == "ray" else "http://127.0.0.1:9"
    said = {"ray": f"there is no Ray cluster at {dead}", "aws-batch": f'Could not connect to the endpoint URL: "{dead}'}
    refused(solo("bench", "logs", "study", task.id, "--address", dead), said[engine])


def test_verbs_refuse_what_is_not_there(solo, place):
    refused(solo("bench", "status", "nowhere"), "there is no folder nowhere")
    refused(solo("bench", "logs", "nowhere"), "the following arguments are required: TASK")
    planned(place / "study", place, seeds=2)
    refused(solo("bench", "logs", "study", "fak"), "fak could be any of 2 tasks")
    refused(solo("bench", "cancel", "study", "x"), "has no task x")
    refused(solo("bench", "status.py"), "status.py")  # a script
