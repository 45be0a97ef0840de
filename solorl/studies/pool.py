"""Jobs on an engine: start them, look which have ended, end those that should, and hear Ctrl+C.

`solo bench` and `solo tune` each have a pool. What a job is for, its files and its verdict are theirs:

    pool = Pool[Task](engine, interrupted)
    with pool.listening():  # to Ctrl+C, SIGTERM and SIGHUP
        while pool.running or todo and not pool.signal:
            for ended in pool.ended():  # waits TICK seconds first
                ...
            while todo and pool.free and not pool.signal:
                pool.start(job, todo.pop())
    return pool.exit_code
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from solorl import signals
from solorl.studies.engines import Engine, Job
from solorl.studies.engines.cluster import GRACE

TICK = 0.02  # seconds between two looks at the jobs

Work = TypeVar("Work")  # what a job is for


@dataclass(frozen=True)
class Ended(Generic[Work]):
    """A job that has ended."""

    work: Work
    code: int  # its exit code, as `Engine.poll` has it
    cancelled: bool  # it was told to end
    adopted: bool  # an earlier command had started it


class Pool(Generic[Work]):
    """At most `workers` jobs at once, as many as the engine has slots; each with what it is for.

    The first signal tells every job to save and end, and calls `interrupted` once. The second signal, or GRACE seconds
    after a job was told, kills.
    """

    def __init__(self, engine: Engine, interrupted: Callable[[], None]):
        self.engine, self.workers = engine, engine.slots
        self.running: dict[str, Work] = {}  # by handle
        self.signal = 0  # the last one that was heard
        self._interrupted, self._said, self._forced = interrupted, False, False
        self._told: dict[str, float] = {}  # handle -> when it was told to end
        self._adopted: set[str] = set()

    # ------------------------------------------------------------------ signals
    @contextmanager
    def listening(self) -> Iterator[None]:
        """Ctrl+C, SIGTERM and SIGHUP interrupt this pool inside the block."""
        with signals.handled(self._hear, signals.listened()):
            yield

    def _hear(self, number: int, frame: Any) -> None:
        self._forced, self.signal = bool(self.signal), number

    @property
    def exit_code(self) -> int:
        """128 + the signal that interrupted; 0 where none did."""
        return 128 + self.signal if self.signal else 0

    # ------------------------------------------------------------------ jobs
    @property
    def free(self) -> int:
        """How many more jobs may run."""
        return self.workers - len(self.running)

    def start(self, job: Job, work: Work) -> str:
        """Start a job and return its handle. Raises RuntimeError where no slot is free, OSError where it cannot be
        started."""
        if self.free < 1:
            raise RuntimeError(f"all {self.workers} slots are taken")
        handle = self.engine.submit(job)
        self.running[handle] = work
        return handle

    def adopt(self, handles: Iterable[str], work: Work) -> str:
        """Take over the first of these jobs of an earlier command that still runs: its handle; else an empty text."""
        handle = next(filter(self.engine.adopt, handles), "")
        if handle:
            self.running[handle] = work
            self._adopted.add(handle)
        return handle

    def cancel(self, handle: str, force: bool = False) -> None:
        """Tell a job to save and end, once, or kill it; does not wait."""
        if force or handle not in self._told:
            self._told.setdefault(handle, time.monotonic())
            self.engine.cancel(handle, force=force)

    def ended(self) -> Iterator[Ended[Work]]:
        """Wait TICK seconds and yield each job that has ended since the last call; then end what should."""
        time.sleep(TICK)
        for handle, work in list(self.running.items()):
            code = self.engine.poll(handle)
            if code is not None:
                del self.running[handle]
                yield Ended(work, code, handle in self._told, handle in self._adopted)
        if self.signal:
            for handle in self.running:
                self.cancel(handle)
            if not self._said:
                self._said = True
                self._interrupted()
        for handle, told in self._told.items():
            if handle in self.running and (self._forced or time.monotonic() - told > GRACE):
                self.cancel(handle, force=True)
