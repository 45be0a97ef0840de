"""A study in a storage: the plan, and what became of its tasks. Truth is in these files, not in any scheduler.

plan.json                 the tasks (ids are hashes of what they do), resources, limit of attempts, solorl's hash
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
from solorl.scripts import PACKAGE
from solorl.studies.resources import Resources
from solorl.studies.storage import Storage, open_storage, read_object
from solorl.studies.task import Script, Task

ATTEMPTS = 3  # a task may fail so often
LEASE = 60.0  # seconds without a heartbeat after which another worker may take a task
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
        """Write plan.json and the scripts. Tasks that another command has planned here stay."""
        there = read_plan(self.storage) or self
        scripts = {task.script.sha256: task.script for task in self.tasks.values()}
        for script in scripts.values():
            if not self.storage.exists(script_name(script)):
                self.storage.put(script.path, script_name(script))
        self.tasks = {**there.tasks, **self.tasks}
        self.storage.write("plan.json", json.dumps(self._as_table(), indent=1).encode())

    def _as_table(self) -> dict[str, Any]:
        scripts = {task.script.sha256: task.script for task in self.tasks.values()}
        about = {
            sha: {"path": str(script.path.resolve()), "ours": script.ours, "args": script.args}
            for sha, script in scripts.items()
        }
        tasks = [
            {"id": task.id, "script": task.script.sha256, "env_id": task.env_id, "seed": task.seed, "flags": task.flags,
             "variant": task.variant, "python": task.python, "resources": task.resources.as_table()}
            for task in self.tasks.values()
        ]  # fmt: skip
        return {"format": 1, "name": self.name, "attempts": self.limit, "lease": self.lease, "solorl": self.package,
                "scripts": about, "tasks": tasks}  # fmt: skip

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
        return read_object(self.storage, name)

    def submissions(self) -> list[dict[str, Any]]:
        """All submissions, oldest first."""
        return [self.submission(name) for name in self.storage.list("submissions")]

    # ------------------------------------------------------------------ attempts and results
    def begin(self, task_id: str, about: dict[str, Any]) -> int:
        """Note that an attempt begins; its number."""
        data = json.dumps({"state": "running", **about}).encode()
        number = len(self.storage.list(f"attempts/{task_id}")) + 1
        while not self.storage.create(attempt_name(task_id, number), data):
            number += 1
        return number

    def note(self, task_id: str, number: int, changes: dict[str, Any]) -> None:
        """Change what is noted about an attempt."""
        name = attempt_name(task_id, number)
        self.storage.write(name, json.dumps(read_object(self.storage, name) | changes, indent=1).encode())

    def attempts(self, task_id: str) -> list[dict[str, Any]]:
        """All attempts of a task, oldest first."""
        names = self.storage.list(f"attempts/{task_id}")
        numbers = sorted(int(Path(name).stem) for name in names if Path(name).stem.isdecimal())
        return [read_object(self.storage, attempt_name(task_id, number)) for number in numbers]

    def done(self, kind: str = "results") -> set[str]:
        """The ids of all tasks with an accepted result; or of those that are `cancelled`, or have `leases`."""
        return {Path(name).stem for name in self.storage.list(kind)}

    def result(self, task_id: str) -> dict[str, Any]:
        """The accepted result of a task; empty where there is none."""
        return read_object(self.storage, f"results/{task_id}.json")

    def accept(self, task_id: str, result: dict[str, Any]) -> bool:
        """Write the result of a task; False where another one was accepted before."""
        return self.storage.create(f"results/{task_id}.json", json.dumps({"id": task_id, **result}, indent=1).encode())

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
    """The study in a storage; None where there is none. UsageError where its plan is damaged."""
    table = read_object(storage, "plan.json")
    if not table:
        return None
    try:
        scripts = {
            sha: Script(Path(about["path"]), sha, bool(about["ours"]), tuple(about["args"]))
            for sha, about in table["scripts"].items()
        }
        tasks = [_task(each, scripts) for each in table["tasks"]]
        for each, task in zip(table["tasks"], tasks, strict=True):
            if each["id"] != task.id:
                raise ValueError(f"the task {each['id']} is not what its id says")
        package = {key: str(table["solorl"][key]) for key in ("version", "sha256")}
        by_id = {task.id: task for task in tasks}
        return Study(storage, str(table["name"]), by_id, int(table["attempts"]), float(table["lease"]), package)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{storage.where}/plan.json is damaged: {type(error).__name__} {error}") from None


def _task(about: dict[str, Any], scripts: dict[str, Script]) -> Task:
    flags = {name: tuple(values) for name, values in about["flags"].items()}
    script, resources = scripts[about["script"]], Resources(**about["resources"])
    return Task(script, about["env_id"], about["seed"], flags, about["variant"], about["python"], resources)


def open_study(where: str) -> Study:
    """The study at a path or URL; UsageError where there is none."""
    where = where.removesuffix("plan.json").rstrip("/") or "/"
    storage = open_storage(where, make=False)
    try:
        study = read_plan(storage)
    except OSError as error:
        raise UsageError(f"{where}/plan.json cannot be read: {error.strerror}") from None
    if study is None:
        raise UsageError(f"there is no study in {where}: it has no plan.json; `solo bench --storage` makes one")
    return study
