"""The engine `local`: workers as threads of this process, a limited number at once. Each slot has cores and a GPU of
its own, as far as there are enough of them. A training ends, after saving, when this process ends."""

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from solorl.errors import UsageError, reason
from solorl.lab.studies.engines.cluster import Submission, check_options
from solorl.lab.studies.resources import MOST, Resources, count
from solorl.lab.studies.storage import FULL
from solorl.lab.studies.study import Study
from solorl.lab.studies.task import Task
from solorl.lab.studies.worker import Worker
from solorl.machine import own_cores, shares, visible_gpus


class LocalCluster:
    """A handle is the id of a task. Only the tasks of this process are alive here: leases keep others apart."""

    name = "local"
    array_limit = 10**9

    def __init__(self, workers: int = 0, cores: list[int] | None = None, gpus: list[str] | None = None):
        self.slots = workers  # 0: as many as fit on the cores
        self.running: dict[int, Worker] = {}  # by slot
        self.waiting: deque[Task] = deque()
        self.may_begin: Callable[[Task], bool] = lambda task: True  # asked when a slot is free for a task
        self.late: set[str] = set()  # ids of tasks that may not begin any more
        self._cores = own_cores() if cores is None else cores
        self._gpus = visible_gpus() if gpus is None else gpus
        self._lock, self.ended = threading.RLock(), False
        self.changed = threading.Event()  # a worker has ended
        self._trouble: dict[str, str] = {}  # task id -> why its last worker could not begin
        self._error: OSError | None = None
        self._threads: list[threading.Thread] = []

    def join(self, study: Study, wanted: Iterable[Resources], say: Callable[[str], None]) -> None:
        """Work for this study, for tasks with these resources. UsageError where there are fewer of something."""
        self._study, self._say = study, say
        most = {name: max((getattr(one, name) for one in wanted), default=0) for name in ("cores", "gpus")}
        for name, have in (("cores", len(self._cores)), ("gpus", len(self._gpus))):
            if most[name] > have:
                words = name.replace("gpus", "GPUs")
                raise UsageError(
                    f"a task wants {most[name]} {words}, but this machine has {have}; give --{name} {have}"
                )
        each = max(1, most["gpus"])
        self._groups = [",".join(self._gpus[i : i + each]) for i in range(0, len(self._gpus) - each + 1, each)]
        fit = min(len(self._cores) // max(1, most["cores"]), len(self._groups) if most["gpus"] else MOST)
        self.slots = self.slots or fit
        self._shares = shares(self._cores, self.slots)

    # ------------------------------------------------------------------ as an engine
    def submit(self, submission: Submission) -> list[str]:
        """See `Cluster.submit`."""
        with self._lock:
            self.waiting.extend(self._study.tasks[task_id] for task_id in submission.tasks)
            for slot in [slot for slot in range(self.slots) if slot not in self.running]:
                if worker := self._next(slot):
                    self._threads = [thread for thread in self._threads if thread.is_alive()]
                    self._threads.append(threading.Thread(target=self._serve, args=(slot, worker), daemon=True))
                    self._threads[-1].start()
        return list(submission.tasks)

    def alive(self, handles: Sequence[str]) -> set[str]:
        """See `Cluster.alive`. Raises what the storage has refused a worker."""
        with self._lock:
            error, self._error = self._error, None
            if error:
                raise error
            return {task.id for task in [*self.waiting, *self.tasks()]} & set(handles)

    def cancel(self, handles: Sequence[str], force: bool = False) -> None:
        """See `Cluster.cancel`."""
        with self._lock:
            self.waiting = deque(task for task in self.waiting if task.id not in handles)
            for worker in self.running.values():
                if any(task.id in handles for task in worker.tasks):
                    worker.kill() if force else worker.end("signal")

    def logs(self, handle: str) -> str:
        """See `Cluster.logs`: why a worker could not begin."""
        return self._trouble.get(handle, "")

    # ------------------------------------------------------------------ threads
    def tasks(self) -> list[Task]:
        """The tasks that run."""
        with self._lock:
            return [task for worker in self.running.values() for task in worker.tasks]

    def end(self, force: bool = False) -> None:
        """Nothing begins any more, and what runs saves and ends, or ends at once."""
        with self._lock:
            self.ended = True
            self.cancel([task.id for task in [*self.waiting, *self.tasks()]], force)

    def close(self) -> None:
        """The same, and wait for it."""
        self.end()
        for thread in self._threads:
            thread.join()

    def _serve(self, slot: int, worker: Worker | None) -> None:
        """Do one task after the other in a slot."""
        while worker:
            first = worker.tasks[0]
            try:
                worker.run()
            except Exception as error:  # of any kind: the slot must be free again
                self._trouble[first.id] = reason(error)
                if isinstance(error, OSError) and (error.errno in FULL or not worker.found):  # else the attempt says it
                    self._error = error
            with self._lock:
                del self.running[slot]
                worker = self._next(slot)
                if worker is None:  # else whoever waits has time until the next training has begun
                    self.changed.set()

    def _next(self, slot: int) -> Worker | None:
        """The worker that a free slot gets: the next task, and those with the seeds after it that the same process can
        train, such that every free slot gets some."""
        while self.waiting and not self.ended:
            task = self.waiting.popleft()
            if self.may_begin(task):
                break
            self.late.add(task.id)
        else:
            return None
        others = following(task, self.waiting) if self._study.storage.folder else []
        share = math.ceil((len(others) + 1) / (self.slots - len(self.running)))
        for other in others[: share - 1]:
            self.waiting.remove(other)
        worker = Worker(
            self._study, [task, *others[: share - 1]], self._say, self._environment(slot), self._shares[slot]
        )
        self.running[slot] = worker
        return worker

    def _environment(self, slot: int) -> dict[str, str]:
        """Threads as many as the slot has cores, unless the user's environment says otherwise, and its GPUs."""
        threads = str(len(self._shares[slot]))
        gpus = {"CUDA_VISIBLE_DEVICES": self._groups[slot % len(self._groups)]} if self._groups else {}
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **os.environ, **gpus}


def following(task: Task, others: Iterable[Task]) -> list[Task]:
    """Those of `others` with the seeds after this one, for a script that trains several seeds in one process."""
    if not task.script.many_seeds:
        return []

    def kind(one: Task) -> Any:
        return one.script, one.env_id, one.variant, one.flags, one.python, one.resources

    seeds = {other.seed: other for other in others if kind(other) == kind(task)}
    found: list[Task] = []
    while other := seeds.get(task.seed + len(found) + 1):
        found.append(other)
    return found


def open(options: Mapping[str, str]) -> LocalCluster:
    """The engine; its option `workers` says how many tasks run at once. UsageError for other options."""
    check_options(options, ("workers",), "local")
    return LocalCluster(count(options["workers"], 1, "the option workers of the engine local") if options else 0)
