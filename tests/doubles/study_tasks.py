"""Studies of stand-in trainings, for the tests of workers and engines: no task imports torch."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from conftest import environment

from solorl import machine
from solorl.lab.results import result as results
from solorl.lab.studies import plan
from solorl.lab.studies.storage import open_storage
from solorl.lab.studies.study import Study

FAKE = Path(__file__).parent / "fake_training.py"
# A script of ours that trains several seeds in one process.
MANY = """
import json, sys
from pathlib import Path
from solorl import RunArgs
class Args(RunArgs):
    num_seeds: int = 1
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for seed in range(int(flags["--seed"]), int(flags["--seed"]) + int(flags.get("--num-seeds", 1))):
    folder = Path(flags.get("--resume") or Path(flags["--runs-dir"]) / f"seed{seed}")
    folder.mkdir(exist_ok=True)
    args = {"env_id": flags["--env-id"], "seed": seed}
    (folder / "config.json").write_text(json.dumps({"script": "many.py", "script_sha256": "", "args": args}))
    (folder / "metrics.jsonl").write_text(json.dumps({"global_step": 1, "wall_time": 1.0}) + chr(10))
    (folder / "status.json").write_text(json.dumps({"status": "finished", "global_step": 1}))
"""


def planned(where, folder, *flags, seeds=1, lease=2.0, attempts=3, **more):
    """A study in `where` of a copy of the stand-in in `folder`, and its tasks."""
    shutil.copy(FAKE, folder / "fake.py")
    words = plan.parse_flags([str(word) for word in flags])
    script = plan.load_script(str(folder / "fake.py"))
    tasks = plan.make_tasks([script], ["CartPole-v1"], range(1, seeds + 1), {"": words}, **more)
    study = Study(open_storage(str(where)), "stand-ins", {task.id: task for task in tasks}, attempts, lease)
    study.write()
    return study, tasks


def command(*flags, seeds=4, workers=2, words=()):
    """A bench of the stand-in."""
    return ["bench", "fake.py", "--env-ids", "CartPole-v1", "--num-seeds", str(seeds), "--workers", str(workers),
            "--results", "results", "--storage", "work", "--variant", "", *map(str, words), "--",
            *map(str, flags)]  # fmt: skip


@contextlib.contextmanager
def process(place, *words, **extra):
    """`solo WORDS` in a process of its own and a folder, killed at the end if it still runs."""
    argv = [sys.executable, "-m", "solorl.cli", *map(str, words)]
    env = environment(FAKE_JOURNAL=str(place / "journal"), PYTHONUNBUFFERED="1", **extra)
    one = subprocess.Popen(argv, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield one
    finally:
        one.kill()
        one.wait()
        one.stdout.close()


def until(condition, seconds=120):
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def steps(place):
    """(seed, step) -> how often it was run, by the journal in a folder."""
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


def children(place, work="work"):
    """Process ids of trainings that run, by their status files."""
    found = [json.loads(path.read_text()) for path in (place / work).glob("tasks/*/*/status.json")]
    pids = [status["pid"] for status in found if status["status"] == "running"]
    return [pid for pid in pids if machine.process_start(pid)]


def kill_some(place, begin, kills, seconds, seed=1, work="work"):
    """Run commands one after the other, each `begin()`, until one ends by itself; meanwhile kill the command or one of
    its trainings by SIGKILL so often. What the last one printed, its exit code, and how many of each were killed."""
    draw, killed = random.Random(seed), Counter()
    while True:
        with begin() as one:
            while one.poll() is None and sum(killed.values()) < kills:
                time.sleep(draw.uniform(0.3, 1.0) * seconds)
                found = children(place, work)
                if found and draw.random() < 0.5:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(draw.choice(found), signal.SIGKILL)
                        killed["training"] += 1
                elif found and one.poll() is None:
                    one.kill()
                    killed["worker"] += 1
            out, _ = one.communicate()
            if one.returncode != -signal.SIGKILL:
                return out, one.returncode, killed
