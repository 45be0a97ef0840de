"""Where trainings run. An engine starts processes, tells when they end, and can take over those of an earlier command.

A `Pool` knows only the four methods of `Engine`; `LocalEngine` runs everything on this machine.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from solorl.machine import is_alive, own_cores, pid_of, pinned, process_start, shares, visible_gpus

UNKNOWN = 256  # exit code of a job whose end nobody saw; no process has it


@dataclass(frozen=True)
class Job:
    """One process to run."""

    argv: tuple[str, ...]
    output: Path  # standard output and standard error are appended to this file, whose folder exists
    cwd: Path = Path()
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment


class Engine(Protocol):
    """What a `Pool` needs of a machine, a cluster or a cloud. A handle is text that a later process can use."""

    slots: int  # jobs that may run at once

    def submit(self, job: Job) -> str:
        """Start a job and return its handle; OSError where it cannot be started."""

    def adopt(self, handle: str) -> bool:
        """Take over a job that an earlier process submitted; False where it does not run any more."""

    def poll(self, handle: str) -> int | None:
        """None while the job runs; then, once, its exit code: negative for a signal, UNKNOWN where nobody saw it."""

    def cancel(self, handle: str, force: bool = False) -> None:
        """Ask the job to save and end (SIGTERM), or end it and its children at once; does not wait."""


class LocalEngine:
    """Processes on this machine: each slot has cores and a GPU of its own, as far as there are enough of them."""

    def __init__(self, workers: int, cores: list[int] | None = None, gpus: list[str] | None = None):
        self.slots = workers
        self._cores = shares(own_cores() if cores is None else cores, workers)
        self._gpus = visible_gpus() if gpus is None else gpus
        self._jobs: dict[str, tuple[subprocess.Popen[bytes] | None, int]] = {}  # handle -> (process if ours, slot)

    def submit(self, job: Job) -> str:
        """Start a process in a session of its own, so that Ctrl+C reaches it only through `cancel`."""
        slot = self._free_slot()
        env = {**os.environ, **self._environment(slot), **job.env}
        with open(job.output, "ab") as output, pinned(self._cores[slot]):
            process = subprocess.Popen(
                job.argv, cwd=job.cwd, env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        handle = f"{process.pid}:{process_start(process.pid) or 0}"
        self._jobs[handle] = (process, slot)
        return handle

    def adopt(self, handle: str) -> bool:
        """Take over a process by its id and start time; its slot is the one whose cores it is pinned to."""
        if not is_alive(handle):
            return False
        slot = self._free_slot()
        with contextlib.suppress(OSError, AttributeError):
            cores = sorted(os.sched_getaffinity(pid_of(handle)))
            slot = self._cores.index(cores) if cores in self._cores else slot
        self._jobs[handle] = (None, slot)
        return True

    def poll(self, handle: str) -> int | None:
        """See `Engine.poll`; a process that was adopted ends with UNKNOWN."""
        process, _ = self._jobs.get(handle, (None, 0))
        code = process.poll() if process else None if is_alive(handle) else UNKNOWN
        if code is not None:
            self._jobs.pop(handle, None)
        return code

    def cancel(self, handle: str, force: bool = False) -> None:
        """SIGTERM to the process, or SIGKILL to its whole session."""
        process, _ = self._jobs.get(handle, (None, 0))
        if process.poll() is not None if process else not is_alive(handle):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if force:
                os.killpg(pid_of(handle), signal.SIGKILL)
            else:
                os.kill(pid_of(handle), signal.SIGTERM)

    def _free_slot(self) -> int:
        """The slot with the fewest jobs."""
        used = [slot for _, slot in self._jobs.values()]
        return min(range(self.slots), key=used.count)

    def _environment(self, slot: int) -> dict[str, str]:
        """Threads as many as the slot has cores, unless the user's environment says otherwise, and one GPU."""
        threads = str(len(self._cores[slot]))
        env = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name not in os.environ}
        if self._gpus:
            env["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        return env


# ---------------------------------------------------------------------- processes, by id and start time
