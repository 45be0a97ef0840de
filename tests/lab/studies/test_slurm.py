"""The engine `slurm`: with stand-ins for Slurm's commands, and (slow) on a Slurm cluster of one node."""

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import environment, refused
from slurm_cluster import slurm_cluster
from study_tasks import FAKE, attempts, finished_once, open_study, planned, steps, until

from solorl.errors import UsageError
from solorl.lab.results import result as results
from solorl.lab.studies import fleet
from solorl.lab.studies.engines import open_engine, slurm
from solorl.lab.studies.engines.cluster import Submission
from solorl.lab.studies.resources import Resources

# Stand-ins: `sbatch` keeps the script and starts a process for each index; `squeue` lists those of them that run.
STAND_INS = {
    "sbatch": """
import os, re, subprocess, sys
from pathlib import Path
script = sys.stdin.read()
here = Path(os.environ["STAND_INS"])
(here / "script").write_text(script)
if words := os.environ.get("REFUSAL"):
    sys.exit(words)
output = re.search("--output=(.*)", script)[1].strip('"')
for index in range(int(re.search(r"--array=0-(\\d+)", script)[1]) + 1):
    own = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": str(index)}
    with open(output.replace("%A", "77").replace("%a", str(index)), "a") as file:
        process = subprocess.Popen(["bash", here / "script"], env={**os.environ, **own}, stdout=file, stderr=file,
                                   process_group=0)
    (here / f"77_{index}").write_text(str(process.pid))
print("77;here")
""",
    "squeue": """
import os, sys
from pathlib import Path
here = Path(os.environ["STAND_INS"])
if words := os.environ.get("SILENCE"):
    sys.exit(words)
for path in here.glob("77_*"):
    if Path("/proc", path.read_text(), "cmdline").exists() and Path("/proc", path.read_text(), "cmdline").read_text():
        print((here / "state").read_text() if "--format=%T" in sys.argv else path.name)
""",
    "scontrol": """
import os, sys
from pathlib import Path
print("MaxArraySize            = 11")
if sys.argv[1] == "requeue":
    leases = len(list(Path("study/leases").glob("*.json")))
    (Path(os.environ["STAND_INS"]) / "requeued").write_text(f"{sys.argv[2]}, {leases} at work")
""",
    "scancel": """
import os, signal, sys
from pathlib import Path
for each in sys.argv[1:]:
    os.killpg(int((Path(os.environ["STAND_INS"]) / each).read_text()), signal.SIGTERM)
""",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in; the steps of stand-ins for trainings are noted in `journal`."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment(FAKE_JOURNAL=str(tmp_path / "journal")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fleet.LOOK, "slurm", 0.1)
    shutil.copy(FAKE, tmp_path / "fake.py")
    return tmp_path


@pytest.fixture
def stand_ins(place, monkeypatch):
    """The folder of the stand-ins for Slurm's commands, which are on the PATH; their jobs end with the test."""
    folder = place / "stand ins"
    (folder / "bin").mkdir(parents=True)
    (folder / "state").write_text("RUNNING")
    for name, text in STAND_INS.items():
        (folder / "bin" / f"{name}.py").write_text(text)
        start = f"#!/bin/sh\nexec '{sys.executable}' '{folder}/bin/{name}.py' \"$@\"\n"  # paths may have spaces
        (folder / "bin" / name).write_text(start)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("STAND_INS", str(folder))
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    yield folder
    for path in folder.glob("77_*"):
        with contextlib.suppress(OSError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


def bench(*flags, seeds=2, options=(), lease=2, words=()):
    """The words of a bench of stand-in trainings on Slurm."""
    more = [word for option in options for word in ("--engine-option", option)]
    found = ["bench", "fake.py", "--env-ids", "CartPole-v1", "--num-seeds", seeds, "--engine", "slurm",
             "--storage", "a study", "--results", "results", "--variant", "", "--lease", lease, *more, *words, "--",
             *flags]  # fmt: skip
    return [str(word) for word in found]


def directives(script):
    """The #SBATCH lines of a script."""
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


# ---------------------------------------------------------------------- with stand-ins
def test_a_bench_is_one_array_of_workers(solo, place, stand_ins):
    options = ["partition=low,high", "account=lab", "qos=short", "nice=100", "max_running=5",
               "sbatch=--exclude=node7 --constraint=a100", "setup=export MODULE=cuda"]  # fmt: skip
    words = ["--cores", "1", "--memory", "2GB", "--time", "90min", "--gpus", "1"]
    code, out, _ = solo(*bench(options=options, words=words))
    assert code == 0 and "2 of 2 finished" in out and out.count("submitted") == 1
    assert steps(place) == {(seed, step): 1 for seed in (1, 2) for step in range(5)}
    script = (stand_ins / "script").read_text()
    assert directives(script) == [
        "requeue", "job-name=fake", "array=0-1%5", f'output="{place}/a study/slurm/%A_%a.txt"', "open-mode=append",
        "signal=B:USR1@120", "nodes=1", "ntasks=1", "cpus-per-task=1", "gres=gpu:1", "mem=1908M", "time=95",
        "partition=low,high", "account=lab", "qos=short", "nice=100", "exclude=node7 --constraint=a100",
    ]  # fmt: skip
    assert script.index("export MODULE=cuda") < script.index("solorl.cli work")
    study = open_study("a study")
    [about] = study.submissions()
    assert [handle.partition("@")[0] for handle in about["handles"]] == ["77_0", "77_1"]
    engine = open_engine("slurm", {})
    assert engine.array_limit == 11 and "finished" in engine.logs(about["handles"][0])
    assert engine.logs(f"78_0@{place}") == "" and engine.alive(about["handles"]) == set() == engine.alive([])


def test_the_least_script_asks_for_nothing_that_was_not_given(place):
    plain = slurm.Slurm({}, 10).script(Submission("/s 50%", "submissions/000001.json", "my suite", ("a",), Resources()))
    assert directives(plain) == [
        "requeue", "job-name=my_suite", "array=0-0", 'output="/s 50%%/slurm/%A_%a.txt"', "open-mode=append",
        "signal=B:USR1@120", "nodes=1", "ntasks=1", "cpus-per-task=1",
    ]  # fmt: skip
    at_url = Submission("s3://bucket/x", "submissions/000001.json", "x", ("a",), Resources(cores=4, gpus=2))
    script = slurm.Slurm({"python": "/opt/py", "logs": "out"}, 10).script(at_url)
    log = f"{place}/out/%A_%a.txt"
    log = f'"{log}"' if " " in log else log
    assert {f"output={log}", "cpus-per-task=4", "gres=gpu:2"} <= {*directives(script)}
    assert "/opt/py -P -m solorl.cli work s3://bucket/x submissions/000001.json &" in script


@pytest.mark.parametrize(
    ("state", "send", "requeued"),
    [
        ("RUNNING", lambda pid: os.kill(pid, signal.SIGUSR1), True),  # Slurm's warning: to the shell only
        ("COMPLETING", lambda pid: os.killpg(pid, signal.SIGTERM), False),  # cancelled: to all processes
    ],
    ids=["warned", "cancelled"],
)
def test_a_job_that_is_told_to_end_saves_and_goes_back_where_slurm_keeps_it(place, stand_ins, state, send, requeued):
    study, [task] = planned(place / "study", place, "--total-timesteps", 300, "--pause", 1.5)
    name = study.open_submission([task], "slurm", {})
    engine = open_engine("slurm", {})
    handles = engine.submit(Submission(study.storage.where, name, "x", (task.id,), Resources()))
    (stand_ins / "state").write_text(state)
    until(lambda: steps(place), 60)
    assert engine.alive([*handles, f"77_5@{place}", f"78_0@{place}"]) == set(handles)
    send(int((stand_ins / "77_0").read_text()))
    until(lambda: not engine.alive(handles), 60)
    assert attempts(study, task) == ["stopped"] and "stopped" in engine.logs(handles[0])
    assert (stand_ins / "requeued").exists() == requeued
    assert not requeued or (stand_ins / "requeued").read_text() == "77_0, 0 at work"
    [status] = (place / "study").glob("tasks/*/*/status.json")
    assert json.loads(status.read_text())["status"] == "stopped"  # not ended at once by a second signal


def test_cancel_ends_what_runs_and_passes_over_the_rest(place, stand_ins):
    study, [task] = planned(place / "study", place, "--total-timesteps", 300, "--pause", 0.1)
    name = study.open_submission([task], "slurm", {})
    engine = open_engine("slurm", {})
    handles = engine.submit(Submission(study.storage.where, name, "x", (task.id,), Resources()))
    (stand_ins / "state").write_text("COMPLETING")
    until(lambda: steps(place), 60)
    engine.cancel([*handles, f"77_1@{place}"])  # scancel's stand-in fails for a job that it does not know
    until(lambda: not engine.alive(handles), 60)
    assert attempts(study, task) == ["stopped"]


def test_what_slurm_refuses_is_one_sentence_and_no_submission(solo, place, stand_ins, monkeypatch):
    words = "sbatch: error: invalid partition specified: gpu\nsbatch: error: Batch job submission failed: Invalid name"
    monkeypatch.setenv("REFUSAL", words)
    code, out, err = solo(*bench(options=["partition=gpu"]))
    assert code == 2 and err.count("\n") == 1 and "submitted" not in out
    assert "Slurm refuses the tasks: sbatch: invalid partition specified: gpu; Batch job submission failed" in err
    assert open_study("a study").submissions() == [] and steps(place) == {}
    monkeypatch.delenv("REFUSAL")
    assert solo(*bench())[0] == 0  # the plan is untouched


def test_a_silent_slurm_is_an_error_of_the_system(place, stand_ins, monkeypatch):
    engine = open_engine("slurm", {})
    wanted = Submission(str(place / "s"), "submissions/000001.json", "x", ("a",), Resources())
    monkeypatch.setenv("REFUSAL", "sbatch: error: Batch job submission failed: Unable to contact slurm controller")
    with pytest.raises(OSError, match="Unable to contact"):
        engine.submit(wanted)
    monkeypatch.setenv("SILENCE", "slurm_load_jobs error: Socket timed out on send/recv operation")
    with pytest.raises(OSError, match="squeue: Socket timed out"):
        engine.alive([f"77_0@{place}"])
    monkeypatch.setenv("SILENCE", "slurm_load_jobs error: Invalid job id specified")
    assert engine.alive([f"77_0@{place}"]) == set()
    (stand_ins / "bin/squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm, "PATIENCE", 0.2)
    with pytest.raises(OSError, match="has not answered"):
        engine.alive([f"77_0@{place}"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["partitions=x"], "the engine slurm has no option partitions; did you mean partition"),
        (["max_running=0"], "the option max_running of slurm must be a whole number from 1, not 0"),
        (["nice=x"], "the option nice of slurm must be a whole number, not x"),
        (["sbatch=exclude=x"], "the option sbatch of slurm must be options of sbatch"),
        ([f"logs={__file__}/x"], "for Slurm's output cannot be made: Not a directory"),
    ],
)
def test_bad_options_are_one_sentence(solo, place, stand_ins, options, sentence):
    code, _, err = solo(*bench(options=options))
    assert code == 2 and err.count("\n") == 1 and sentence in err, err


def test_no_slurm_is_one_sentence(solo, place, monkeypatch):
    monkeypatch.setenv("PATH", str(place))
    refused(solo(*bench()), "this machine has no sbatch: the engine slurm needs a login node of a Slurm cluster")


# ---------------------------------------------------------------------- on a cluster
@pytest.fixture
def cluster(tmp_path_factory, place, monkeypatch, request):
    """A Slurm cluster; its commands are on the PATH."""
    if shutil.which("apt-get") is None:
        pytest.skip("Slurm comes from Debian's packages, and this machine has no apt-get")
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), **getattr(request, "param", {})) as own:
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        yield own


def runner(*words):
    """A command of solo in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "solorl.cli", *words], env={**os.environ, "OMP_NUM_THREADS": "1"},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip


def finished(process, seconds=600):
    """What a command has printed, when it has ended well."""
    out, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, out[-3000:]
    return out


def tables(place):
    """Seed -> result of every file in the results folder."""
    return {result.seed: result for result in map(results.read, (place / "results").iterdir())}


@contextlib.contextmanager
def killing(leases, share):
    """Kill so great a share of the workers with SIGKILL, each at a random moment of its work; yields the tasks hit."""
    draw, killed, moments, over = random.Random(1), set(), {}, threading.Event()

    def look():
        while not over.wait(0.02):
            for path in leases.glob("*.json"):
                if path.stem not in moments:
                    later = time.monotonic() + draw.uniform(0, 0.4)
                    moments[path.stem] = later if draw.random() < share else math.inf
                elif time.monotonic() > moments[path.stem]:
                    moments[path.stem] = math.inf
                    with contextlib.suppress(OSError, ValueError):
                        os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
                        killed.add(path.stem)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_five_hundred_tasks_with_killed_workers_have_one_result_each(cluster, place):
    seeds = int(os.environ.get("SOLORL_TEST_TASKS", "500"))
    with killing(place / "a study/leases", 0.1) as killed:
        out = finished(runner(*bench("--pause", 0.05, seeds=seeds)), 3000)
    study = open_study("a study")
    assert study.done() == set(study.tasks) and len(study.storage.list("results")) == seeds
    assert set(tables(place)) == set(range(1, seeds + 1))
    found = [one["state"] for task in study.tasks for one in study.attempts(task)]
    print(f"{len(killed)} killed, {found.count('running')} of them in an attempt, {len(found)} attempts")
    print("".join(line for line in out.splitlines(keepends=True) if line.startswith("submitted")))
    assert finished_once(study) and len(killed) >= found.count("running") >= seeds / 25
    assert all(len(one.eval["global_step"]) == 5 for one in tables(place).values())


@pytest.mark.slow
def test_real_trainings(cluster, place):
    words = bench("--total-timesteps", 2000, "--learning-starts", 500, "--eval-episodes", 2, seeds=3, lease=60)
    words[1] = "dqn"
    out = finished(runner(*words))
    assert "3 of 3 finished" in out
    found = tables(place)
    assert set(found) == {1, 2, 3} and all(one.eval["global_step"][-1] == 2000 for one in found.values())
    study = open_study("a study")
    assert all((place / "a study" / study.result(task)["run_dir"] / "model_last.safetensors").exists()
               for task in study.tasks)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [{"user_signal": True}, {"user_signal": False, "grace": 1}], indirect=True,
                         ids=["warned", "not warned"])  # fmt: skip
def test_preempted_it_saves_and_goes_on(cluster, place):
    """A job of the partition `high` takes the node: the trainings of `low` save, go back into the queue and go on.
    Slurm sends SIGUSR1 at the beginning of the grace time (warned), or SIGTERM at its end."""
    flags = ["--pause", "0.5", "--total-timesteps", "100"]  # Slurm looks for the end of grace times every 30 seconds
    process = runner(*bench(*flags, options=["partition=low"], words=["--detach"]))
    out = finished(process)
    assert "solo bench status" in out
    until(lambda: {seed for seed, step in steps(place) if step > 3} == {1, 2}, 120)
    subprocess.run(
        ["sbatch", "--partition=high", "--cpus-per-task=2", "--output=/dev/null", "--wrap=sleep 2"], check=True
    )
    study = open_study("a study")
    until(lambda: study.done() == set(study.tasks) and not study.storage.list("leases"), 400)  # nobody watches it
    assert steps(place) == {(seed, step): 1 for seed in (1, 2) for step in range(100)}  # nothing twice
    states = [[one["state"] for one in study.attempts(task)] for task in study.tasks]
    assert states == [["stopped", "finished"]] * 2 and len(study.submissions()) == 1


@pytest.mark.slow
def test_verbs_of_another_process_and_two_runners(cluster, place, solo):
    flags = ["--pause", "0.1", "--total-timesteps", "40"]
    one, two = runner(*bench(*flags, seeds=6)), runner(*bench(*flags, seeds=6))
    until(lambda: len(steps(place)) > 5, 120)
    code, out, _ = solo("bench", "status", "a study")
    assert code == 0 and "running" in out and "6 tasks" in out
    study = open_study("a study")
    last = [*study.tasks][-1]
    assert "has printed nothing yet" in solo("bench", "logs", "a study", last)[1]
    assert solo("bench", "cancel", "a study", last)[0] == 0
    for process in (one, two):
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 1 and "5 of 6 finished, 1 failed" in out, out
    assert steps(place) == {(seed, step): 1 for seed in range(1, 6) for step in range(40)}
    assert "CartPole" in solo("bench", "logs", "a study", next(iter(study.tasks)))[1]
    assert "5 finished" in solo("bench", "status", "a study")[1]


@pytest.mark.slow
def test_a_cancelled_task_saves_and_does_not_come_back(cluster, place, solo):
    process = runner(*bench("--pause", "0.1", "--total-timesteps", "400", seeds=1, words=["--detach"]))
    finished(process)
    until(lambda: len(steps(place)) > 2, 120)
    assert solo("bench", "cancel", "a study")[0] == 0
    study = open_study("a study")
    [task] = study.tasks.values()
    [handle] = study.submissions()[0]["handles"]
    engine = open_engine("slurm", {})
    until(lambda: not engine.alive([handle]), 200)
    assert attempts(study, task) == ["stopped"] and not study.done()
    shown = subprocess.run(["scontrol", "show", "job", handle.partition("@")[0]], capture_output=True, text=True).stdout
    assert re.search("JobState=CANCELLED", shown) and "Restarts=0" in shown


@pytest.mark.slow
def test_slurms_own_refusals(cluster, place, solo):
    for options, words, sentence in [
        (["partition=gpu"], [], "invalid partition specified: gpu"),
        ([], ["--memory", "900TB"], "Memory specification can not be satisfied"),
        ([], ["--gpus", "1"], "Invalid generic resource"),
        (["partition=high"], ["--time", "20d"], "time limit"),
        (["sbatch=--cpus-per-task=900"], [], "More processors requested than permitted"),
    ]:
        code, _, err = solo(*bench(options=options, words=words))
        assert code == 2 and err.count("\n") == 1 and "Slurm refuses the tasks: sbatch: " in err and sentence in err, (
            err
        )
        assert open_study("a study").submissions() == []
    with pytest.raises(UsageError, match="Slurm does not answer"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", "/dev/null")
        open_engine("slurm", {})
