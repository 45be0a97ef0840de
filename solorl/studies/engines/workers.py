"""The engine `local` of a study in a storage: workers as processes of this machine, a limited number at once."""

import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from solorl.errors import UsageError
from solorl.files import remove_old
from solorl.machine import is_alive, own_cores, own_handle, visible_gpus
from solorl.studies.engines.cluster import Submission, check_options
from solorl.studies.engines.local import Job, LocalEngine
from solorl.studies.resources import MOST, count


class LocalCluster:
    """Workers wait in this process and run in processes of their own, which outlive it. Those that wait when it ends
    are submitted again by the same command."""

    name = "local"
    array_limit = 100_000

    def __init__(self, workers: int = 0):
        self._workers = workers  # 0: as many as fit on the cores
        self._engine: LocalEngine | None = None
        self._waiting: deque[tuple[str, Submission, int]] = deque()
        self._running: dict[str, str] = {}  # our handle -> that of the process
        remove_old(Path(tempfile.gettempdir()), "solorl-workers-*")
        self._output = tempfile.TemporaryDirectory(prefix="solorl-workers-")

    def submit(self, submission: Submission) -> list[str]:
        """See `Cluster.submit`. UsageError for more cores than there are."""
        if submission.resources.cores > len(own_cores()):
            wanted, there = submission.resources.cores, len(own_cores())
            raise UsageError(f"a task wants {wanted} cores, but this machine has {there}; give --cores {there}")
        gpus, each = visible_gpus(), submission.resources.gpus
        if each > len(gpus):
            raise UsageError(f"a task wants {each} GPUs, but this machine has {len(gpus)}; give --gpus {len(gpus)}")
        if self._engine is None:
            groups = [",".join(gpus[i : i + each]) for i in range(0, len(gpus) - each + 1, each)] if each else []
            fit = min(len(own_cores()) // submission.resources.cores, len(groups) if each else MOST)
            self._engine = LocalEngine(self._workers or fit, gpus=groups or [""])
        handles = [f"{own_handle()}/{submission.name}/{index}" for index in range(len(submission.tasks))]
        self._waiting.extend((handle, submission, index) for index, handle in enumerate(handles))
        self._fill()
        return handles

    def alive(self, handles: Sequence[str]) -> set[str]:
        """See `Cluster.alive`. What another process has submitted is alive as long as that process is."""
        for handle, process in list(self._running.items()):
            if self._engine and self._engine.poll(process) is not None:
                del self._running[handle]
        self._fill()
        mine, own = {*self._running, *(handle for handle, _, _ in self._waiting)}, own_handle()
        owners = {handle.partition("/")[0] for handle in handles}
        others = {owner for owner in owners if owner != own and is_alive(owner)}
        return {handle for handle in handles if handle in mine or handle.partition("/")[0] in others}

    def cancel(self, handles: Sequence[str], force: bool = False) -> None:
        """See `Cluster.cancel`; of those that this process has started."""
        self._waiting = deque(each for each in self._waiting if each[0] not in handles)
        for handle in handles:
            if self._engine and handle in self._running:
                self._engine.cancel(self._running[handle], force)

    def logs(self, handle: str) -> str:
        """See `Cluster.logs`."""
        path = self._log(handle)
        return path.read_text(errors="replace") if path.exists() else ""

    def _log(self, handle: str) -> Path:
        return Path(self._output.name) / handle.rpartition("submissions/")[2].replace("/", "-")

    def _fill(self) -> None:
        while self._engine and self._waiting and len(self._running) < self._engine.slots:
            handle, submission, index = self._waiting.popleft()
            job = Job(tuple(submission.command(index)), self._log(handle))
            self._running[handle] = self._engine.submit(job)


def open(options: Mapping[str, str]) -> LocalCluster:
    """The engine; its option `workers` says how many tasks run at once. UsageError for other options."""
    check_options(options, ("workers",), "local")
    return LocalCluster(count(options["workers"], 1, "the option workers of the engine local") if options else 0)
