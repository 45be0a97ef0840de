"""`solo tune` on a cluster: here one whose workers are processes of this machine that nobody looks after."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections import Counter

import pytest
from conftest import environment, refused
from study_tasks import FAKE, until

optuna = pytest.importorskip("optuna")

from solorl.cli.tune import SHARED  # noqa: E402
from solorl.errors import UsageError  # noqa: E402
from solorl.lab.studies import elsewhere, tune  # noqa: E402
from solorl.lab.studies.elsewhere import Elsewhere  # noqa: E402
from solorl.lab.studies.journal import open_study  # noqa: E402
from solorl.lab.studies.plan import load_script, parse_flags  # noqa: E402
from solorl.lab.studies.space import Choice  # noqa: E402
from solorl.lab.studies.storage import Folder  # noqa: E402
from solorl.lab.studies.study import ATTEMPTS, Study  # noqa: E402


class Processes:
    """A cluster: a handle is a process id."""

    name = "processes"
    array_limit = 1

    def __init__(self, place, program=None):
        self.place, self.program = place, program
        self.jobs, self.most, self.told = {}, 0, []
        self.silent = 0  # questions that it is not going to answer

    def submit(self, submission):
        words = [self.program] if self.program else submission.command(0)
        env = environment(FAKE_JOURNAL=str(self.place / "journal"))
        job = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
        self.jobs[str(job.pid)] = job
        self.most = max(self.most, sum(job.poll() is None for job in self.jobs.values()))
        return [str(job.pid)]

    def alive(self, handles):
        if self.silent:
            self.silent -= 1
            raise OSError(0, "no route")
        return {handle for handle in handles if self.jobs[handle].poll() is None}

    def cancel(self, handles, force=False):
        self.told += handles
        for handle in self.alive(handles):
            self.jobs[handle].send_signal(signal.SIGKILL if force else signal.SIGTERM)

    def logs(self, handle):
        return "first line\nlast line"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to be in, with a copy of the fake training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(elsewhere.LOOK, "processes", 0.0)
    shutil.copy(FAKE, tmp_path / "fake.py")
    return tmp_path


def search(place, cluster, trials=3, slots=2, flags=("--total-timesteps", "3")):
    """The tuner, the study of Optuna and what was said."""
    script = load_script("fake.py")
    asked = tune.Search(script, ("A",), {}, (1, 2), {"width": Choice((16, 32, 48))}, parse_flags(flags))
    found = open_study(place / "tune" / "fake.log", script.name, asked.about(), "none", 0, 1)
    runs, said = Study(Folder(place / "runs"), "fake", {}, ATTEMPTS, 2.0), []
    workers = Elsewhere(cluster, slots, {}, said.append)
    return tune.Tuner(asked, found, runs, workers, trials, said.append), found, said


def steps(place):
    """(seed, step) -> how often, over all trials."""
    path = place / "journal"
    return Counter(path.read_text().splitlines() if path.exists() else [])


def states(found):
    return Counter(trial.state.name for trial in found.trials if not trial.user_attrs.get("interrupted"))


def test_runs_are_submitted_one_by_one_and_scored(place):
    cluster = Processes(place)
    tuner, found, _ = search(place, cluster)
    assert tuner.run() == 0 and states(found) == {"COMPLETE": 3} and 1 <= cluster.most <= 2
    assert [trial.user_attrs["A"] for trial in found.trials] == [[100.01, 100.02]] * 3
    different = {trial.params["width"] for trial in found.trials}  # equal trials share their runs
    assert len(cluster.jobs) == len(tuner.runs.submissions()) == 2 * len(different)
    assert cluster.told == []


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_is_submitted_again_and_goes_on(place):
    cluster = Processes(place)
    tuner, found, _ = search(place, cluster, trials=1, slots=1, flags=("--total-timesteps", "40", "--pause", "0.02"))

    def kill():
        until(lambda: sum(steps(place).values()) > 20, 60)
        os.killpg(int(next(iter(cluster.jobs))), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert tuner.run() == 0 and states(found) == {"COMPLETE": 1}
    thread.join()
    assert len(cluster.jobs) == 3  # of two runs, one of them twice
    assert sum(steps(place).values()) == 2 * 40 and len({*steps(place).values()}) == 1  # no step is lost or done twice


def test_workers_that_leave_no_trace_fail_the_trial(place):
    cluster = Processes(place, shutil.which("false"))
    tuner, found, said = search(place, cluster, trials=1)
    assert tuner.run() == 1 and states(found) == {"FAIL": 1} and len(cluster.jobs) == 3
    assert any("fake A seed 1: 3 workers ended without a trace: last line" in line for line in said)


def test_what_the_cluster_refuses_is_no_submission(place, monkeypatch):
    cluster = Processes(place)

    def refuse(submission):
        raise UsageError("no such partition")

    monkeypatch.setattr(cluster, "submit", refuse)
    tuner, _, _ = search(place, cluster, trials=1)
    with pytest.raises(UsageError, match="no such partition"):
        tuner.run()
    assert tuner.runs.submissions() == []


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_asked_again(place):
    cluster = Processes(place)
    cluster.silent = 3
    tuner, found, said = search(place, cluster, trials=1)
    assert tuner.run() == 0 and states(found) == {"COMPLETE": 1} and cluster.silent == 0
    assert [line for line in said if "no route" in line] == [
        "processes does not answer, which is tried again: no route"
    ]


def test_an_interruption_is_passed_on_once_and_the_parameters_wait(place):
    cluster = Processes(place)
    tuner, found, said = search(
        place, cluster, trials=1, slots=1, flags=("--total-timesteps", "500", "--pause", "0.02")
    )

    def interrupt():
        until(lambda: sum(steps(place).values()) > 3, 60)
        tuner._hear(signal.SIGTERM, None)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert tuner.run() == 128 + signal.SIGTERM
    thread.join()
    assert len(cluster.told) == 1 and cluster.alive(list(cluster.jobs)) == set()
    assert states(found) == {"WAITING": 1} and any("runs save and end" in line for line in said)
    [attempt] = tuner.runs.attempts(next(iter(tuner.runs.tasks)))
    assert attempt["state"] == "stopped"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engine", "aws-batch"], f"--engine aws-batch cannot be asked for runs; allowed are {', '.join(SHARED)}"),
        (["--engine", "rayy"], "no engine rayy; did you mean ray?"),
        (["--cores", "2"], "--cores is for a cluster"),
        (["--engine-option", "address=x:1"], "--engine-option is for a cluster"),
        (["--engine", "slurm", "--engine-option", "partition"], "solo tune: --engine-option must be KEY=VALUE"),
    ],
)
def test_engines_that_cannot_be_are_one_sentence(solo, place, words, sentence):
    (place / "space.toml").write_text("width = [16, 32]")
    refused(solo("tune", "fake.py", "--env-ids", "CartPole-v1", "--space", "space.toml", *words), sentence)
    with contextlib.suppress(FileNotFoundError):
        assert list((place / "tune").iterdir()) == []
