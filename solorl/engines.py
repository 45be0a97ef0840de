"""Where trainings run. An engine starts processes, tells when they end, and can take over those of an earlier command.

`solo bench` and `solo tune` know only the four methods of `Engine`; `LocalEngine` runs everything on this machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

UNKNOWN = 256  # exit code of a job whose end nobody saw; no process has it


@dataclass(frozen=True)
class Job:
    """One process to run."""

    argv: tuple[str, ...]
    output: Path  # standard output and standard error are appended to this file, whose folder exists
    cwd: Path = Path()
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment


class Engine(Protocol):
    """What `solo bench` asks of a machine, a cluster or a cloud. A handle is text that a later process can use."""

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
            cores = sorted(os.sched_getaffinity(_pid(handle)))
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
                os.killpg(_pid(handle), signal.SIGKILL)
            else:
                os.kill(_pid(handle), signal.SIGTERM)

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


def own_cores() -> list[int]:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def shares(cores: list[int], workers: int) -> list[list[int]]:
    """The cores of each worker: neighbours, as equal in number as possible; shared where there are too few."""
    if workers >= len(cores):
        return [[cores[i % len(cores)]] for i in range(workers)]
    return [cores[i * len(cores) // workers : (i + 1) * len(cores) // workers] for i in range(workers)]


def visible_gpus() -> list[str]:
    """The GPUs jobs may use: those of CUDA_VISIBLE_DEVICES where it is set, else all that the driver lists."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    if not (tool := shutil.which("nvidia-smi")):
        return []
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in listing.splitlines()))]


@contextlib.contextmanager
def pinned(cores: list[int]) -> Iterator[None]:
    """Processes started inside run on `cores` only; nothing happens where the system cannot pin."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---------------------------------------------------------------------- processes, by id and start time
def _pid(handle: str) -> int:
    return int(handle.partition(":")[0])


def own_handle() -> str:
    """The handle of this process."""
    return f"{os.getpid()}:{process_start(os.getpid()) or 0}"


def is_alive(handle: str) -> bool:
    """Whether the process of this handle still runs: the same id and the same start time, and no zombie."""
    pid, _, start = handle.partition(":")
    return pid.isdigit() and process_start(int(pid)) == start


def process_start(pid: int) -> str | None:
    """When a process was started, as text to compare with; None where there is no such process, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        state, _, start = _ps(pid, "state=,lstart=").partition(" ")
        return None if state[:1] in ("", "Z") else "-".join(start.split())
    return None if fields[0] in "ZX" else fields[19]


def command_line(pid: int) -> str:
    """The words of a process's command line; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return "" if Path("/proc/self/stat").exists() else _ps(pid, "command=")


def _ps(pid: int, columns: str) -> str:
    """What `ps` says about a process, on systems without /proc."""
    try:
        return subprocess.run(["ps", "-o", columns, "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
