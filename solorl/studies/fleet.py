"""A study on a cluster: submits what is missing, watches the files of the study, submits again what died.

Several commands may watch one study, and none need to: workers find all they need in the storage. Ctrl+C leaves the
cluster's jobs alone.
"""

import errno
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from solorl import signals
from solorl.errors import UsageError
from solorl.studies.bench import collected
from solorl.studies.engines import Cluster, Submission
from solorl.studies.found import run_dirs
from solorl.studies.lease import Lease
from solorl.studies.storage import refusal
from solorl.studies.study import Study, used
from solorl.studies.task import Task

LOOK = {"local": 0.2, "slurm": 10.0, "aws-batch": 10.0}  # seconds between two looks at the files, by engine
LOOK_ELSEWHERE = 3.0
FULL = (errno.ENOSPC, errno.EDQUOT)
UNREAD = ("checkpoint", "replay", "videos", "crash")  # folders of a run that no table needs


@dataclass
class Standing:
    """What the files say about a task."""

    state: str  # finished | running | cancelled | failed | waiting
    attempts: int = 0
    used: int = 0  # attempts that count
    reason: str = ""  # of the last attempt
    tail: Sequence[str] = ()  # its last lines


def standing(study: Study, task: Task, finished: set[str], cancelled: set[str], begun: bool) -> Standing:
    """What the files say about a task, where `finished`, `cancelled` and whether it has `begun` are known."""
    if task.id in finished:
        return Standing("finished")
    if not begun:  # nothing to read, which would take seconds for a hundred tasks in S3
        return Standing("cancelled" if task.id in cancelled else "waiting")
    attempts, lease = study.attempts(task.id), Lease(study, task.id)
    last = attempts[-1] if attempts else {}
    died = last.get("state") == "running"
    reason = "its worker was killed" if died else last.get("reason", "")
    if lease.is_fresh(lease.holder()):
        return Standing("running", len(attempts), used(attempts) - died)
    reason, count = lease.oddity or reason, used(attempts)
    hopeless = count >= study.limit or (last.get("refused") and not last.get("forgiven"))
    state = "cancelled" if task.id in cancelled else "failed" if hopeless else "waiting"
    return Standing(state, len(attempts), count, reason, last.get("tail", ()))


def standings(study: Study, tasks: Iterable[Task]) -> dict[str, Standing]:
    """What the files say about each task."""
    finished, cancelled = study.done(), study.done("cancelled")
    begun = {name.split("/")[1] for kind in ("attempts", "leases") for name in study.storage.list(kind)}
    begun = {name.removesuffix(".json") for name in begun}
    return {task.id: standing(study, task, finished, cancelled, task.id in begun) for task in tasks}


def collect(study: Study, task: Task, folder: Path) -> bool:
    """Write the table of a finished task into `folder`; False where its run left nothing to make one of.

    Raises ValueError where the run cannot be read, OSError where the table cannot be written.
    """
    name = study.result(task.id).get("run_dir")
    if (
        not isinstance(name, str)
        or not name.startswith(f"tasks/{task.id}/")
        or not name.isprintable()
        or ".." in name.split("/")
    ):
        return False
    with tempfile.TemporaryDirectory(prefix="solorl-") as temporary:
        place = study.storage.folder or Path(temporary)
        if study.storage.folder is None:
            for each in study.storage.list(name):
                if not set(UNREAD) & set(each.removeprefix(f"{name}/").split("/")):
                    study.storage.get(each, place / each)
        if (place / name).resolve() not in [path.resolve() for path in run_dirs(place / "tasks" / task.id, task)]:
            return False
        collected(task, place / name, folder)
    return True


class Fleet:
    """Brings tasks of a study to their end on a cluster."""

    def __init__(
        self, study: Study, tasks: Sequence[Task], cluster: Cluster, options: dict[str, str], say: Callable[[str], None]
    ):
        self.study, self.tasks, self.say = study, list(tasks), say
        self.finished: set[str] = set()
        self.failed: dict[str, Standing] = {}  # task id -> why
        self.signal = 0
        self._cluster, self._options = cluster, options
        self._handles: dict[str, list[str]] = {}  # task id -> of its workers
        self._known: set[str] = set()  # submissions whose handles stand there
        self._tries: dict[str, tuple[int, int]] = {}  # task id -> attempts seen, and submissions since then
        self._trouble = ""  # what did not answer last

    def run(self, detach: bool = False) -> int:
        """0: all finished, or with `detach` all submitted; 1: some failed; 128 + signal: interrupted. UsageError where
        the scheduler refuses, or the study cannot be read or written any more."""
        with signals.handled(self._hear, signals.listened()):
            while not self.signal:
                try:
                    self._round()
                    if detach or all(task.id in self.finished or task.id in self.failed for task in self.tasks):
                        break
                except OSError as error:
                    if detach or isinstance(error, (PermissionError, FileNotFoundError)):
                        raise UsageError(refusal(error, self._cluster.name)) from None
                    if error.errno in FULL:
                        where = error.filename or self.study.storage.where
                        raise UsageError(f"{where}: the disk is full; make room and repeat the command") from None
                    who, why = error.filename or self._cluster.name, error.strerror or error
                    self._note_trouble(f"{who} does not answer, which is tried again: {why}")
                self._sleep()
        return 128 + self.signal if self.signal else int(bool(self.failed))

    def _round(self) -> None:
        """Look, and submit what is missing. Raises OSError where the storage or the scheduler does not answer."""
        if missing := self._look():
            self._submit(missing)
        self._trouble = ""

    def _note_trouble(self, text: str) -> None:
        """Say it once, not at each look."""
        if text != self._trouble:
            self.say(text)
        self._trouble = text

    def _hear(self, number: int, frame: Any) -> None:
        self.signal = number

    def _sleep(self) -> None:
        end = time.monotonic() + LOOK.get(self._cluster.name, LOOK_ELSEWHERE)
        while time.monotonic() < end and not self.signal:
            time.sleep(0.05)

    # ------------------------------------------------------------------ looking
    def _look(self) -> list[Task]:
        """Take note of what has finished and failed; the tasks that nobody does or is going to do."""
        self._learn()
        done = self.study.done()
        for task in self.tasks:
            if task.id in done and task.id not in self.finished:
                self.finished.add(task.id)
                self.failed.pop(task.id, None)
                count = sum(other.id in self.finished for other in self.tasks)
                self.say(f"finished   {task}  ({count} of {len(self.tasks)} finished)")
        left = [task for task in self.tasks if task.id not in done and task.id not in self.failed]
        alive = self._alive(left)
        idle = [task for task in left if task.id not in alive]
        found = standings(self.study, idle) if idle else {}
        return [task for task in idle if self._is_missing(task, found[task.id])]

    def _is_missing(self, task: Task, found: Standing) -> bool:
        """Whether to submit a task; notes where it has failed."""
        if found.state in ("failed", "cancelled"):
            self._fail(task, found)
        elif found.state == "waiting":
            seen, tries = self._tries.get(task.id, (0, 0))
            tries = 0 if found.attempts != seen else tries
            self._tries[task.id] = (found.attempts, tries)
            if tries < self.study.limit:
                return True
            self._fail(task, Standing("failed", reason=f"{tries} workers ended without a trace", tail=self._log(task)))
        return False

    def _fail(self, task: Task, found: Standing) -> None:
        self.failed[task.id] = found
        reason = found.reason if found.state == "failed" else "it is cancelled"
        self.say(f"failed     {task}: {reason}" + "".join(f"\n    | {line}" for line in found.tail))

    def _log(self, task: Task) -> list[str]:
        """The last lines of a task's last worker, by the scheduler."""
        handles = self._handles.get(task.id)
        try:
            return self._cluster.logs(handles[-1]).splitlines()[-12:] if handles else []
        except OSError:
            return []

    def _alive(self, tasks: Sequence[Task]) -> set[str]:
        """The ids of those tasks that the scheduler has. Raises OSError where it does not answer."""
        alive = self._cluster.alive([handle for task in tasks for handle in self._handles.get(task.id, ())])
        return {task.id for task in tasks if alive.intersection(self._handles.get(task.id, ()))}

    def _learn(self) -> None:
        """The handles of submissions that are new, those of other commands, too."""
        for name in self.study.storage.list("submissions"):
            about = {} if name in self._known else self.study.submission(name)
            self._known |= {name} if about.get("handles") else set()
            if about.get("engine") == self._cluster.name:
                for task_id, handle in zip(about.get("tasks", []), about.get("handles", []), strict=False):
                    self._handles.setdefault(task_id, []).append(handle)

    # ------------------------------------------------------------------ submitting
    def _submit(self, tasks: Sequence[Task]) -> None:
        """Start workers, one submission for all with equal resources."""
        by_resources = sorted(tasks, key=lambda task: str(task.resources))
        for resources, group in groupby(by_resources, key=lambda task: task.resources):
            equal, limit = list(group), self._cluster.array_limit
            for part in [equal[i : i + limit] for i in range(0, len(equal), limit)]:
                name = self.study.open_submission(part, self._cluster.name, self._options)
                ids = tuple(task.id for task in part)
                submission = Submission(self.study.storage.where, name, self.study.name, ids, resources)
                try:
                    handles = self._cluster.submit(submission)
                except (UsageError, OSError):
                    self.study.storage.delete(name)
                    raise
                self._known.add(name)
                for task_id, handle in zip(ids, handles, strict=True):
                    self._handles.setdefault(task_id, []).append(handle)
                    seen, tries = self._tries[task_id]
                    self._tries[task_id] = (seen, tries + 1)
                self.study.note_handles(name, handles)
                tasks_of = f"{len(part)} {'task' if len(part) == 1 else 'tasks'}"
                self.say(f"submitted  {tasks_of} to {self._cluster.name}: {name}")


def cancel(study: Study, tasks: Sequence[Task], open_cluster: Callable[[dict[str, Any]], Cluster]) -> None:
    """Nobody does these tasks any more: workers that do see it at their next heartbeat, and engines are told.

    UsageError where an engine cannot be reached; the tasks are cancelled nevertheless.
    """
    wanted = {task.id for task in tasks} - study.done()
    for task_id in wanted:
        study.storage.write(f"cancelled/{task_id}.json", b"{}")
    for about in study.submissions():
        pairs = zip(about.get("tasks", []), about.get("handles", []), strict=False)
        if handles := [handle for task_id, handle in pairs if task_id in wanted]:
            open_cluster(about).cancel(handles)


def retry(study: Study, tasks: Sequence[Task]) -> int:
    """Forgive the attempts of tasks that have no result, and allow those that were cancelled; how many tasks."""
    left = [task for task in tasks if task.id not in study.done()]
    for task in left:
        study.storage.delete(f"cancelled/{task.id}.json")
        for number, attempt in enumerate(study.attempts(task.id), 1):
            if used([attempt]):
                study.note(task.id, number, {"forgiven": True})
    return len(left)
