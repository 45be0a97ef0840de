"""A study on its way to the end: submits what is missing, watches the files of the study, submits again what died, and
collects what has finished.

Several commands may watch one study, and none need to where the workers run elsewhere: they find all they need in the
storage, and Ctrl+C leaves them alone. The workers of the engine `local` are threads of this process: Ctrl+C tells them
to save and end.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from solorl import signals
from solorl.errors import UsageError
from solorl.lab.studies.collect import Collector
from solorl.lab.studies.engines import Cluster, Submission
from solorl.lab.studies.engines.workers import LocalCluster
from solorl.lab.studies.found import signal_name
from solorl.lab.studies.lease import Lease
from solorl.lab.studies.resources import Resources
from solorl.lab.studies.storage import FULL, refusal
from solorl.lab.studies.study import Study, used
from solorl.lab.studies.task import Task
from solorl.terminal import scores

LOOK = {"local": 0.2, "slurm": 10.0, "aws-batch": 10.0}  # seconds between two looks at the files, by engine
LOOK_ELSEWHERE = 3.0
TRIES = 3  # submissions of a task whose workers leave no trace
SCORE = "eval/episodic_return"


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
    # the same would come again: a refusal, and of the same seed the same NaN
    final = (last.get("refused") or reason.startswith("diverged")) and not last.get("forgiven")
    state = "cancelled" if task.id in cancelled else "failed" if final or count >= study.limit else "waiting"
    return Standing(state, len(attempts), count, reason, last.get("tail", ()))


def standings(study: Study, tasks: Iterable[Task]) -> dict[str, Standing]:
    """What the files say about each task."""
    finished, cancelled = study.done(), study.done("cancelled")
    begun = {name.split("/")[1] for kind in ("attempts", "leases") for name in study.storage.list(kind)}
    begun = {name.removesuffix(".json") for name in begun}
    return {task.id: standing(study, task, finished, cancelled, task.id in begun) for task in tasks}


class View(Protocol):
    """Where a fleet shows what happens."""

    def say(self, text: str) -> None:
        """Something happened."""

    def refresh(self, fleet: "Fleet") -> None:
        """Some time has passed."""


class Fleet:
    """Brings tasks of a study to their end on a cluster, and their tables into a folder."""

    def __init__(
        self, study: Study, tasks: Sequence[Task], cluster: Cluster, options: dict[str, str], view: View, folder: Path
    ):
        self.study, self.tasks, self.view = study, list(tasks), view
        self.collector = Collector(study, folder, view.say)
        self.skipped: set[str] = set()  # ids of tasks that had finished before
        self.finished: set[str] = set()  # and of those that have finished since then
        self.failed: dict[str, Standing] = {}  # task id -> why
        self.seconds: dict[str, list[float]] = {}  # kind of tasks -> what each of the finished ones took
        self.signal, self._forced = 0, False
        self.local = cluster if isinstance(cluster, LocalCluster) else None
        self._cluster, self._options = cluster, options
        self._handles: dict[str, list[str]] = {}  # task id -> of its workers
        self._known: set[str] = set()  # submissions whose handles stand there
        self._tries: dict[str, tuple[int, int]] = {}  # task id -> attempts seen, and submissions since then
        self._elsewhere: set[str] = set()  # tasks that another command of this machine does
        self._trouble = ""  # what did not answer last
        self._first = True
        if self.local:
            self.local.join(study, [task.resources for task in tasks], view.say)

    def run(self, detach: bool = False) -> int:
        """0: all finished, or with `detach` all submitted; 1: some failed; 128 + signal: interrupted. UsageError where
        the scheduler refuses, or the study cannot be read or written any more."""
        try:
            with signals.handled(self._hear, signals.listened()):
                while not self._turn(detach):
                    self._sleep()
        finally:
            if self.local:
                self.local.close()
        return 128 + self.signal if self.signal else int(bool(self.failed or self.late or self.collector.problems))

    def _turn(self, detach: bool) -> bool:
        """Look once, and submit what is missing; whether that was all."""
        busy = bool(self.local and self.local.running)
        if self.signal and self.local:
            self._end_local(self.local)
        try:
            missing = self._look(detach)
            if missing and not self.signal:
                self._submit(missing)
            self._trouble = ""
            is_over = detach or len(self.failed) + len(self.late) + self.count() == len(self.tasks)
        except OSError as error:
            if detach or isinstance(error, (PermissionError, FileNotFoundError)):
                raise UsageError(refusal(error, self._cluster.name)) from None
            if error.errno in FULL:
                where = error.filename or self.study.storage.where
                raise UsageError(f"{where}: the disk is full; make room and repeat the command") from None
            who, why = error.filename or self._cluster.name, error.strerror or error
            self._note_trouble(f"{who} does not answer, which is tried again: {why}")
            is_over = False
        self.view.refresh(self)
        return is_over or bool(self.signal and not busy)

    def count(self) -> int:
        """How many tasks have finished."""
        return len(self.skipped) + len(self.finished)

    @property
    def late(self) -> set[str]:
        """The ids of tasks that this process did not begin, because they could not end in time."""
        return self.local.late if self.local else set()

    def _note_trouble(self, text: str) -> None:
        """Say it once, not at each look."""
        if text != self._trouble:
            self.view.say(text)
        self._trouble = text

    def _hear(self, number: int, frame: Any) -> None:
        self._forced, self.signal = bool(self.signal), number

    def _end_local(self, local: LocalCluster) -> None:
        """After a signal the trainings of this process save and end; after another one they are killed."""
        if not local.ended and (count := len(local.running)):
            runs = "training saves and ends" if count == 1 else "trainings save and end"
            self.view.say(f"{signal_name(self.signal)}: {count} running {runs}; once more kills them")
        local.end(self._forced)

    def _sleep(self) -> None:
        end, heard = time.monotonic() + LOOK.get(self._cluster.name, LOOK_ELSEWHERE), (self.signal, self._forced)
        while time.monotonic() < end and heard == (self.signal, self._forced):
            if self.local and self.local.changed.wait(0.05):
                self.local.changed.clear()
                return
            time.sleep(0.0 if self.local else 0.05)

    # ------------------------------------------------------------------ looking
    def _look(self, detach: bool) -> list[Task]:
        """Take note of what has finished and failed; the tasks that nobody does or is going to do."""
        if not self.local:
            self._learn()
        done, known = self.study.done(), self.finished | self.skipped
        for task in self.tasks:
            if task.id in done and task.id not in known and not self._finish(task, detach):
                self.view.say(f"lost       {task}: its run folder and its table are gone, so it runs again")
                self.study.forget(task.id)
                done.discard(task.id)
        self._first = False
        left = [task for task in self.tasks if task.id not in done | self.failed.keys() | self.late]
        alive = self._alive(left)
        idle = [task for task in left if task.id not in alive]
        found = standings(self.study, idle) if idle else {}
        return [task for task in idle if self._is_missing(task, found[task.id])]

    def _finish(self, task: Task, detach: bool) -> bool:
        """Take note of a finished task; False where nothing is left of it, so that it runs again."""
        self.failed.pop(task.id, None)
        if self._first:
            if not detach and not self.collector.keep(task):
                return False
            self.skipped.add(task.id)
            return True
        self.finished.add(task.id)
        result = self.study.result(task.id)
        seconds, status = result.get("seconds"), result.get("status")
        score = status.get(SCORE) if isinstance(status, dict) else None
        took = f" in {seconds:.1f} s" if isinstance(seconds, int | float) else ""
        if took:
            self.seconds.setdefault(kind(task), []).append(float(seconds or 0))
        evaluation = f", evaluation {scores(score)[0]}" if isinstance(score, int | float) else ""
        self.view.say(f"finished   {task}{took}{evaluation}  ({self.summary()})")
        self.collector.keep(task, said=True)
        return True

    def summary(self) -> str:
        """How far this command is, in a few words."""
        parts = [f"{self.count()} of {len(self.tasks)} finished"]
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"{len(self.collector.problems)} not collected"] if self.collector.problems else []
        return ", ".join(parts)

    def _is_missing(self, task: Task, found: Standing) -> bool:
        """Whether to submit a task; notes where it has failed."""
        if found.state in ("failed", "cancelled"):
            self._fail(task, found)
        elif found.state == "running" and self.local and task.id not in self._elsewhere:
            self._elsewhere.add(task.id)
            self.view.say(f"elsewhere  {task}: another command takes care of it")
        elif found.state == "waiting":
            seen, tries = self._tries.get(task.id, (0, 0))
            tries = 0 if found.attempts != seen else tries
            self._tries[task.id] = (found.attempts, tries)
            if tries < max(self.study.limit, TRIES):
                return True
            self._fail(task, Standing("failed", reason=f"{tries} workers ended without a trace", tail=self._log(task)))
        return False

    def _fail(self, task: Task, found: Standing) -> None:
        reason = found.reason if found.state == "failed" else "it is cancelled"
        self.failed[task.id] = replace(found, reason=reason)
        self.view.say(f"failed     {task}: {reason}" + "".join(f"\n    | {line}" for line in found.tail))

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
        """Start workers, one submission for all with equal resources. Those of this process need no file."""
        by_resources = tasks if self.local else sorted(tasks, key=lambda task: str(task.resources))
        for resources, group in groupby(by_resources, key=lambda task: task.resources):
            equal, limit = list(group), self._cluster.array_limit
            for part in [equal[i : i + limit] for i in range(0, len(equal), limit)]:
                name = "" if self.local else self.study.open_submission(part, self._cluster.name, self._options)
                handles = submit(self.study, self._cluster, name, part, resources)
                self._known.add(name)
                for task, handle in zip(part, handles, strict=True):
                    self._handles.setdefault(task.id, []).append(handle)
                    seen, tries = self._tries[task.id]
                    self._tries[task.id] = (seen, tries + 1)
                if name:
                    self.study.note_handles(name, handles)
                    tasks_of = f"{len(part)} {'task' if len(part) == 1 else 'tasks'}"
                    self.view.say(f"submitted  {tasks_of} to {self._cluster.name}: {name}")


def submit(study: Study, cluster: Cluster, name: str, tasks: Sequence[Task], resources: Resources) -> list[str]:
    """Start workers for the tasks of an open submission, empty where it has no file, which equal `resources`; their
    handles. Where the cluster refuses (UsageError) or does not answer (OSError), the submission is taken back."""
    ids = tuple(task.id for task in tasks)
    try:
        return cluster.submit(Submission(study.storage.where, name, study.name, ids, resources))
    except (UsageError, OSError):
        if name:
            study.storage.delete(name)
        raise


def kind(task: Task) -> str:
    """What tasks that take about the same time have in common."""
    return f"{task.script.name} [{task.variant}] {task.env_id}"


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
