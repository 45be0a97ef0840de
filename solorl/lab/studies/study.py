"""A study in a storage: the plan, and what became of its tasks. Truth is in these files, not in any scheduler.

plans/000001-HASH.json    the tasks of a command (ids are hashes of what they do), resources, limit of attempts,
                          solorl's hash; an earlier version has one plan.json
scripts/SHA/NAME.py       the scripts
submissions/000001.json   the tasks of one submission, in order; then the engine and its handles
leases/ID.json            who does a task now: owner and the time of the last heartbeat
attempts/ID/1.json        what became of each attempt: running, finished, stopped, failed
results/ID.json           the accepted result, written once
cancelled/ID.json         nobody starts this task; who does it, stops
tasks/ID/                 run folders, and output-1.txt for each attempt
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from solorl import __version__
from solorl.errors import UsageError, did_you_mean
from solorl.files import remove_old
from solorl.lab.studies.plan_file import as_table, read_table
from solorl.lab.studies.storage import Storage, open_storage, read_object
from solorl.lab.studies.task import Script, Task
from solorl.scripts import PACKAGE
from solorl.terminal import plain

ATTEMPTS = 3  # a task may fail so often
LEASE = 60.0  # seconds without a heartbeat after which another worker may take a task
LEFT = (".plan.json.*", "*/.*.json.*", "attempts/*/.*.json.*")  # what a killed process was writing
OVER = ("finished", "stopped")  # attempts that do not count


@cache
def installed() -> dict[str, str]:
    """Version and hash of the installed package, without the algorithms: each script has a hash of its own."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("algorithms/"):
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return {"version": __version__, "sha256": digest.hexdigest()}


@dataclass
class Study:
    """The plan, and the files that tell what became of it. Methods raise OSError where the storage refuses."""

    storage: Storage
    name: str
    tasks: dict[str, Task]
    limit: int = ATTEMPTS
    lease: float = LEASE
    package: dict[str, str] = field(default_factory=installed)  # that the workers must have

    # ------------------------------------------------------------------ the plan
    def write(self) -> None:
        """Write the plan and the scripts, unless all of it is there. A plan is a file that no other command writes, and
        all plans count, so nothing of several at once is lost. UsageError where a plan here is damaged."""
        there = read_plan(self.storage)
        for pattern in LEFT if self.storage.folder else ():
            remove_old(self.storage.folder or Path(), pattern)
        for script in {task.script.sha256: task.script for task in self.tasks.values()}.values():
            if not self.storage.exists(script_name(script)):
                self.storage.put(script.path, script_name(script))
        data = json.dumps(self._as_table(), indent=1).encode()
        self.tasks = {**(there.tasks if there else {}), **self.tasks}
        if there is None or there._as_table() != self._as_table():
            number, digest = len(self.storage.list("plans")) + 1, hashlib.sha256(data).hexdigest()
            self.storage.create(f"plans/{number:06d}-{digest[:12]}.json", data)

    def _as_table(self) -> dict[str, Any]:
        return as_table(self.name, self.limit, self.lease, self.package, self.tasks.values())

    def find(self, name: str) -> Task:
        """A task by its id, or by the first letters of it; UsageError where none or several begin so."""
        found = [self.tasks[name]] if name in self.tasks else [t for t in self.tasks.values() if t.id.startswith(name)]
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"{name} could be any of {len(found)} tasks, such as {found[0].id}")
        raise UsageError(f"the study in {self.storage.where} has no task {name}{did_you_mean(name, self.tasks)}")

    # ------------------------------------------------------------------ submissions
    def open_submission(self, tasks: Sequence[Task], engine: str, options: dict[str, str]) -> str:
        """Note tasks that are submitted together; the name of the file. Its number is taken by nobody else."""
        about = {"tasks": [task.id for task in tasks], "engine": engine, "options": options, "handles": []}
        number = len(self.storage.list("submissions")) + 1
        while not self.storage.create(f"submissions/{number:06d}.json", json.dumps(about, indent=1).encode()):
            number += 1
        return f"submissions/{number:06d}.json"

    def note_handles(self, name: str, handles: Sequence[str]) -> None:
        """The engine's handles of a submission, in the order of its tasks."""
        about = read_object(self.storage, name) | {"handles": list(handles)}
        self.storage.write(name, json.dumps(about, indent=1).encode())

    def submission(self, name: str) -> dict[str, Any]:
        """A submission: tasks, engine, options, handles."""
        about = read_object(self.storage, name)
        lists = {
            key: [*map(str, about[key])] if isinstance(about.get(key), list) else [] for key in ("tasks", "handles")
        }
        return {**about, **lists, "options": about["options"] if isinstance(about.get("options"), dict) else {}}

    def submissions(self) -> list[dict[str, Any]]:
        """All submissions, oldest first."""
        return [self.submission(name) for name in self.storage.list("submissions")]

    # ------------------------------------------------------------------ attempts and results
    def begin(self, task_id: str, about: dict[str, Any]) -> int:
        """Note that an attempt begins; its number."""
        data = json.dumps({"state": "running", **about}).encode()
        number = max([0, *self._numbers(task_id)]) + 1
        while not self.storage.create(attempt_name(task_id, number), data):
            number += 1
        return number

    def note(self, task_id: str, number: int, changes: dict[str, Any]) -> None:
        """Change what is noted about an attempt."""
        name = attempt_name(task_id, number)
        self.storage.write(name, json.dumps(read_object(self.storage, name) | changes, indent=1).encode())

    def attempts(self, task_id: str) -> list[dict[str, Any]]:
        """All attempts of a task, oldest first. Their texts can be shown."""
        found = [read_object(self.storage, attempt_name(task_id, number)) for number in self._numbers(task_id)]
        for one in found:
            tail = one.get("tail")
            one |= {key: plain(str(one.get(key, ""))) for key in ("state", "reason", "work")}
            one["tail"] = [plain(str(line)) for line in tail] if isinstance(tail, list) else []
        return found

    def _numbers(self, task_id: str) -> list[int]:
        stems = [Path(name).stem for name in self.storage.list(f"attempts/{task_id}")]
        return sorted(map(int, filter(str.isdecimal, stems)))

    def works(self, task_id: str) -> list[str]:
        """The folders below which a task may have left runs: its own, and those of tasks that the same process did."""
        others = [one["work"] for one in self.attempts(task_id) if one["work"] in self.tasks]
        return [f"tasks/{work}" for work in dict.fromkeys([*others, task_id])]

    def done(self, kind: str = "results") -> set[str]:
        """The ids of all tasks with an accepted result; or of those that are `cancelled`, or have `leases`."""
        return {Path(name).stem for name in self.storage.list(kind)}

    def is_done(self, task_id: str) -> bool:
        """Whether a task has an accepted result."""
        return self.storage.exists(f"results/{task_id}.json")

    def result(self, task_id: str) -> dict[str, Any]:
        """The accepted result of a task; empty where there is none."""
        return read_object(self.storage, f"results/{task_id}.json")

    def accept(self, task_id: str, result: dict[str, Any]) -> bool:
        """Write the result of a task; False where another one was accepted before."""
        return self.storage.create(f"results/{task_id}.json", json.dumps({"id": task_id, **result}, indent=1).encode())

    def forget(self, task_id: str) -> None:
        """Take back the result of a task of which nothing is left."""
        self.storage.delete(f"results/{task_id}.json")

    def is_cancelled(self, task_id: str) -> bool:
        """Whether nobody should do this task."""
        return self.storage.exists(f"cancelled/{task_id}.json")


def script_name(script: Script) -> str:
    """The file of a script: under its own name, which results bear."""
    return f"scripts/{script.sha256}/{script.path.name}"


def attempt_name(task_id: str, number: int) -> str:
    """The file of an attempt."""
    return f"attempts/{task_id}/{number}.json"


def used(attempts: Iterable[dict[str, Any]]) -> int:
    """How many attempts count. One that says `running`, but has no lease any more, was killed and counts; one that was
    stopped does not, nor one that `solo bench retry` has forgiven."""
    return sum(one.get("state") not in OVER and not one.get("forgiven") for one in attempts)


def read_plan(storage: Storage) -> Study | None:
    """The study in a storage: all its plans together, of which the last one says what is not a task's; None where there
    is none. UsageError where a plan is damaged."""
    study = None
    for name in [*(name for name in ["plan.json"] if storage.exists(name)), *storage.list("plans")]:
        try:
            title, limit, lease, package, tasks = read_table(json.loads(storage.read(name)))
        except RecursionError:
            raise UsageError(f"{storage.where}/{name} is damaged: it is nested too deeply") from None
        except ValueError as error:
            raise UsageError(f"{storage.where}/{name} is damaged: {plain(str(error))}") from None
        study = Study(storage, title, {**(study.tasks if study else {}), **tasks}, limit, lease, package)
    return study


def open_study(where: str) -> Study:
    """The study at a path or URL; UsageError where there is none."""
    where = where.removesuffix("plan.json").rstrip("/") or "/"
    storage = open_storage(where, make=False)
    try:
        study = read_plan(storage)
    except OSError as error:
        raise UsageError(f"the plan in {where} cannot be read: {error.strerror}") from None
    if study is None:
        raise UsageError(f"there is no study in {where}: it has no plan; `solo bench --storage` makes one")
    return study
