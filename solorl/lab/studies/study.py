"""A study in a storage: the plan, and what became of its tasks. Truth is in these files, not in any scheduler.

plans/000001-HASH.json    the tasks of a command (ids are hashes of what they do), resources, how often one may fail,
                          solorl's hash
scripts/SHA/NAME.py       the scripts
leases/ID.json            which worker does a task now, with the time of its last heartbeat
failures/ID.json          the failures of a task, and the deaths of its workers
results/ID.json           the accepted result, written once
cancelled/ID.json         nobody starts this task; who does it, stops
tasks/ID/                 run folders, and output.txt
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from solorl import __version__
from solorl.errors import UsageError, denied, did_you_mean, refuse, told
from solorl.lab.studies.lease import holder, is_fresh
from solorl.lab.studies.resources import Resources
from solorl.lab.studies.storage import Storage, open_storage, read_object
from solorl.lab.studies.task import Script, Task
from solorl.scripts import PACKAGE
from solorl.terminal import plain

ATTEMPTS = 3  # a task may fail so often
DEATHS = 5  # its training or its worker may be killed so often
LEASE = 60.0  # seconds without a heartbeat after which another worker may take a task


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
class State:
    """What the files say about a task."""

    name: str  # waiting | running | finished | failed | cancelled
    failures: list[dict[str, Any]] = field(default_factory=list)  # oldest first
    holder: dict[str, Any] = field(default_factory=dict)  # of the lease, where it runs

    def last(self, key: str) -> Any:
        """What is noted about its last failure; empty where there is none."""
        return self.failures[-1].get(key, "") if self.failures else ""

    @property
    def reason(self) -> str:
        """Why it has failed last, in words that can be shown."""
        return plain(str(self.last("reason")))


@dataclass
class Study:
    """The plan, and the files that tell what became of it. Methods raise OSError where the storage refuses."""

    storage: Storage
    name: str
    tasks: dict[str, Task]
    attempts: int = ATTEMPTS
    lease: float = LEASE
    package: dict[str, str] = field(default_factory=installed)  # that the workers must have

    # ------------------------------------------------------------------ the plan
    def write(self) -> None:
        """Write the plan and the scripts, unless all of it is there. A plan is a file that no other command writes, and
        all plans count, so nothing of several at once is lost. UsageError where a plan here is damaged."""
        there = read_plans(self.storage)
        for name, script in {script_name(task.script): task.script for task in self.tasks.values()}.items():
            if not self.storage.exists(name):
                self.storage.write(name, script.path.read_bytes())
        data = json.dumps(self._table(), indent=1).encode()
        self.tasks = {**(there.tasks if there else {}), **self.tasks}
        if there is None or there._table() != self._table():
            number, digest = len(self.storage.list("plans")) + 1, hashlib.sha256(data).hexdigest()
            self.storage.create(f"plans/{number:06d}-{digest[:12]}.json", data)

    def _table(self) -> dict[str, Any]:
        by_name = {script_name(task.script): task.script for task in self.tasks.values()}
        scripts = {name: {**asdict(each), "path": str(each.path.resolve())} for name, each in by_name.items()}
        lines = [{**asdict(task), "id": task.id, "script": script_name(task.script)} for task in self.tasks.values()]
        about = {"format": 1, "name": self.name, "attempts": self.attempts, "lease": self.lease, "solorl": self.package}
        return dict(json.loads(json.dumps({**about, "scripts": scripts, "tasks": lines})))

    def find(self, name: str) -> Task:
        """A task by its id, or by the first letters of it; UsageError where none or several begin so."""
        found = [task for task in self.tasks.values() if task.id.startswith(name)]
        why = f": {len(found)} begin so" if found else did_you_mean(name, self.tasks)
        refuse(len(found) != 1 and name not in self.tasks, f"the study in {self.storage.where} has no task {name}{why}")
        return self.tasks.get(name, found[0])

    def check_package(self) -> None:
        """UsageError unless the package here is the one that made the plan."""
        ours, theirs = (f"{each['version']} ({each['sha256'][:8]})" for each in (installed(), self.package))
        how = "install the same one, in an image by building it again, or write the plan again with `solo bench`"
        refuse(ours != theirs, f"solorl {ours} of this machine is not the {theirs} of the plan; {how} of this one")

    # ------------------------------------------------------------------ what became of the tasks
    def ids(self, kind: str = "results") -> set[str]:
        """The ids of all tasks with an accepted result, or with a file of another kind."""
        return {Path(name).stem for name in self.storage.list(kind)}

    def states(self, tasks: Iterable[Task]) -> dict[str, State]:
        """What the files say about each task."""
        there = {kind: self.ids(kind) for kind in ("results", "cancelled", "failures", "leases")}
        return {task.id: self._state(task.id, {kind for kind in there if task.id in there[kind]}) for task in tasks}

    def _state(self, task_id: str, kinds: set[str]) -> State:
        if "results" in kinds:
            return State("finished")
        failures = self.failures(task_id) if "failures" in kinds else []
        if "leases" in kinds and is_fresh(found := holder(self.storage, task_id), self.lease):
            return State("running", failures, found)
        deaths = sum(bool(one.get("died")) for one in failures)
        over = len(failures) - deaths >= self.attempts or deaths >= DEATHS
        over |= any(one.get("final") for one in failures)  # the same would come again
        return State("cancelled" if "cancelled" in kinds else "failed" if over else "waiting", failures)

    def failures(self, task_id: str) -> list[dict[str, Any]]:
        """The failures of a task, oldest first."""
        return list(read_object(self.storage, f"failures/{task_id}.json").get("failures", []))

    def add_failure(self, task_id: str, **about: Any) -> None:
        """Note that a task has failed; who has its lease does so."""
        data = json.dumps({"failures": [*self.failures(task_id), about]}, indent=1).encode()
        self.storage.write(f"failures/{task_id}.json", data)

    def result(self, task_id: str) -> dict[str, Any]:
        """The accepted result of a task; empty where there is none."""
        return read_object(self.storage, f"results/{task_id}.json")

    def accept(self, task_id: str, **result: Any) -> bool:
        """Write the result of a task; False where another one was accepted before."""
        return self.storage.create(f"results/{task_id}.json", json.dumps({"id": task_id, **result}, indent=1).encode())

    def cancel(self, tasks: Iterable[Task]) -> int:
        """Nobody does these tasks any more, except those that have finished; how many."""
        for task_id in (found := {task.id for task in tasks} - self.ids()):
            self.storage.write(f"cancelled/{task_id}.json", b"{}")
        return len(found)

    def retry(self, tasks: Iterable[Task], final: bool = True) -> int:
        """Forget the failures of tasks, and allow those that were cancelled; how many. Without `final` only failures:
        not what was cancelled, nor what has diverged, which comes again."""
        states, names = self.states(tasks).items(), ("failed", "cancelled") if final else ("failed",)
        found = [name for name, one in states if one.name in names and (final or not one.reason.startswith("diverged"))]
        for task_id in found:
            for kind in ("failures", "cancelled"):
                self.storage.delete(f"{kind}/{task_id}.json")
        return len(found)


def script_name(script: Script) -> str:
    """The file of a script: under its own name, which results bear."""
    return f"scripts/{script.sha256}/{script.path.name}"


def read_plans(storage: Storage) -> Study | None:
    """The study in a storage: all its plans together, of which the last one says what is not a task's; None where there
    is none. UsageError where a plan is damaged."""
    study = None
    for name in storage.list("plans"):
        data = storage.read(name)
        with told(f"{storage.where}/{name} is damaged", lambda error: plain(str(error))[:100]):
            table = json.loads(data)
            scripts = {key: Script(**{**one, "path": Path(one["path"]), "args": tuple(one["args"])})
                       for key, one in table["scripts"].items()}  # fmt: skip
            tasks = dict(study.tasks) if study else {}
            for line in table["tasks"]:
                flags = {flag: tuple(values) for flag, values in line["flags"].items()}
                more = {"flags": flags, "resources": Resources(**line["resources"]), "script": scripts[line["script"]]}
                task = Task(**{key: value for key, value in {**line, **more}.items() if key != "id"})
                if task.id != line["id"]:
                    raise ValueError(f"the task {line['id']} is not what its id says")
                tasks[task.id] = task
            study = Study(storage, table["name"], tasks, table["attempts"], table["lease"], table["solorl"])
    return study


def open_study(where: str) -> Study:
    """The study at a path or URL; UsageError where there is none."""
    storage = open_storage(where.rstrip("/") or "/", make=False)
    with denied(f"the plan in {where} cannot be read"):
        study = read_plans(storage)
    if study is None:
        raise UsageError(f"there is no study in {where}: it has no plan; `solo bench --storage` makes one")
    return study
