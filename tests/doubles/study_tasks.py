"""Studies of stand-in trainings, for the tests of workers and engines: no task imports torch."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from conftest import environment

from solorl.lab.studies import plan
from solorl.lab.studies.storage import open_storage
from solorl.lab.studies.study import Study, open_study

FAKE = Path(__file__).parent / "fake_training.py"


def planned(where, folder, *flags, seeds=1, lease=2.0, limit=3, resources=None):
    """A study in `where` of a copy of the stand-in in `folder`; its tasks by seed."""
    shutil.copy(FAKE, folder / "fake.py")
    script = plan.load_script(str(folder / "fake.py"))
    wanted = {} if resources is None else {"resources": resources}
    words = plan.parse_flags([str(word) for word in flags])
    tasks = plan.make_tasks([script], ["CartPole-v1"], range(1, seeds + 1), {"": words}, **wanted)
    study = Study(open_storage(str(where)), "stand-ins", {task.id: task for task in tasks}, limit, lease)
    study.write()
    return study, tasks


@contextlib.contextmanager
def worker(where, *words, folder=None, **extra):
    """`solo work WHERE WORDS` in a process of its own, killed at the end if it still runs."""
    command = [sys.executable, "-m", "solorl.cli", "work", str(where), *map(str, words)]
    more = {} if folder is None else {"FAKE_JOURNAL": str(folder / "journal")}
    process = subprocess.Popen(command, env=environment(**more, **extra), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def work(where, *words, folder=None, **extra):
    """The same to its end: exit code and what it printed."""
    with worker(where, *words, folder=folder, **extra) as process:
        out, _ = process.communicate(timeout=60)
        return process.returncode, out


class Said(list):
    """What a fleet says."""

    def say(self, text):
        """Something happened."""
        self.append(text)

    def refresh(self, fleet):
        """Some time has passed."""


def until(condition, seconds=30):
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def steps(folder):
    """(seed, step) -> how often it was run, by the journal in a folder."""
    path = folder / "journal"
    words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return Counter((int(seed), int(step)) for _, seed, _, step in words)


def attempts(study, task):
    """The states of a task's attempts. A worker notes the end of its own right after the result: that is waited for."""
    with contextlib.suppress(AssertionError):  # the last one may have been killed
        until(lambda: task.id not in study.done() or study.attempts(task.id)[-1]["state"] != "running", 2)
    return [one["state"] for one in study.attempts(task.id)]


def finished_once(study):
    """Whether each task has one finished attempt. A worker killed between its result and the note of it leaves none,
    and its attempt is the last one, for nobody does the task again: that is rare, in 1 % of the tasks at most."""
    found = [[one["state"] for one in study.attempts(task)] for task in study.tasks]
    others = [one for one in found if one.count("finished") != 1]
    killed = all("finished" not in one and one[-1] == "running" for one in others)
    return killed and len(others) <= max(1, len(found) // 100)


def rows(study, task, folder):
    """The steps in the metrics of the accepted result, each row of which must be whole."""
    name = study.result(task.id)["run_dir"]
    study.storage.get(f"{name}/metrics.jsonl", folder / "metrics")
    return [json.loads(line)["global_step"] for line in (folder / "metrics").read_text().splitlines()]


__all__ = ["Said", "attempts", "open_study", "planned", "rows", "steps", "until", "work", "worker"]
