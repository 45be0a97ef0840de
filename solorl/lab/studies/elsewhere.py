"""The runs of a search on a cluster: what `Tuner` asks of workers, done by an engine and the files of the study."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from solorl.lab.studies.engines import Cluster, Submission
from solorl.lab.studies.fleet import LOOK, LOOK_ELSEWHERE, TRIES, submit
from solorl.lab.studies.study import Study


class Elsewhere:
    """`slots` runs at once on a cluster, each submitted alone. A handle is the id of a task, as in `LocalCluster`."""

    def __init__(self, cluster: Cluster, slots: int, options: dict[str, str], say: Callable[[str], None]):
        self.slots, self.ended, self.changed = slots, False, threading.Event()
        self._cluster, self._options, self._say = cluster, options, say
        self._silent = False
        self._told = set[tuple[str, bool]]()  # handles and whether they were to end at once
        self._handles: dict[str, str] = {}  # task id -> that of its last worker
        self._tries: dict[str, tuple[int, int]] = {}  # task id -> attempts seen, and submissions since then
        self._alive, self._looked = set[str](), 0.0

    def join(self, study: Study, *ignored: Any) -> None:
        """Work for this study."""
        self._study = study

    def submit(self, submission: Submission) -> list[str]:
        """Write the task into the study, where its worker finds it, and start that."""
        [task_id] = submission.tasks
        self._study.write()
        seen, tries = self._tries.get(task_id, (0, 0))
        now = len(self._study.attempts(task_id))
        self._tries[task_id] = (now, tries + 1 if now == seen else 1)
        tasks = [self._study.tasks[task_id]]
        name = self._study.open_submission(tasks, self._cluster.name, self._options)
        [self._handles[task_id]] = handles = submit(self._study, self._cluster, name, tasks, submission.resources)
        self._study.note_handles(name, handles)
        self._alive.add(task_id)
        return [task_id]

    def alive(self, handles: Sequence[str]) -> set[str]:
        """Those of the tasks that the scheduler has, as it said a few seconds ago."""
        if handles and time.monotonic() - self._looked > LOOK.get(self._cluster.name, LOOK_ELSEWHERE):
            try:
                found = self._cluster.alive([self._handles[task_id] for task_id in handles])
                self._alive, self._silent = {each for each in handles if self._handles[each] in found}, False
            except OSError as error:
                if not self._silent:  # say it once
                    self._say(f"{self._cluster.name} does not answer, which is tried again: {error.strerror or error}")
                self._silent = True
            self._looked = time.monotonic()
        return self._alive & set(handles)

    def cancel(self, handles: Sequence[str], force: bool = False) -> None:
        """See `Cluster.cancel`. A worker is told once: another word would end it at once."""
        told = {(self._handles[task_id], force) for task_id in handles} - self._told
        if told:
            self._told |= told
            self._cluster.cancel([handle for handle, _ in sorted(told)], force)

    def logs(self, handle: str) -> str:
        """Why a task cannot be done: its workers have left no trace, several times."""
        seen, tries = self._tries[handle]
        if tries < TRIES or len(self._study.attempts(handle)) > seen:
            return ""
        last = self._cluster.logs(self._handles[handle]).splitlines()[-1:]
        return ": ".join([f"{tries} workers ended without a trace", *last])

    def end(self, force: bool = False) -> None:
        """What runs saves and ends, or ends at once. Nothing begins any more."""
        self.ended = True
        self.cancel([*self._alive], force)

    def close(self) -> None:
        """The same, as far as the scheduler answers."""
        with contextlib.suppress(OSError):
            self.end()
