"""This machine: cores, GPUs, processes, memory."""

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from solorl.errors import quit_with

CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # what it may use
STEPS = {"total_timesteps", "learning_starts", "eval_every", "save_every"}  # arguments that are not sizes


@functools.cache
def dying_with_parent() -> tuple[str, ...]:
    """Words before those of a command: it gets SIGTERM, so that it saves and ends, when the process that starts it is
    killed. None where the system lacks that tool of Linux. (`preexec_fn` is slow, and unsafe where there are threads.)
    """
    words = (shutil.which("setpriv") or "", "--pdeathsig", "TERM", "--")
    with contextlib.suppress(OSError):
        return words if words[0] and subprocess.run([*words, "true"], capture_output=True).returncode == 0 else ()
    return ()


def command_of(*words: object, python: str = sys.executable) -> list[str]:
    """The command line of `solo WORDS` in a process of its own, which does not execute a folder `solorl` that lies in
    the current folder (-P)."""
    return [python, "-P", "-m", "solorl.cli", *map(str, words)]


def own_cores() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def shares(cores: list[int], workers: int) -> list[list[int]]:
    """The cores of each worker: neighbours, as equal in number as possible; shared where there are too few."""
    if workers >= len(cores):
        return [[cores[i % len(cores)]] for i in range(workers)]
    return [cores[i * len(cores) // workers : (i + 1) * len(cores) // workers] for i in range(workers)]


def visible_gpus() -> list[str]:
    """The GPUs jobs may use: those of CUDA_VISIBLE_DEVICES where it is set, else all that the driver lists."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = takewhile(lambda name: not name.startswith("-"), map(str.strip, chosen.split(",")))  # -1 ends the list
        return [*filter(None, names)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # there is no driver, or it does not answer
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
        return [str(i) for i in range(sum(line.startswith("GPU ") for line in listing.splitlines()))]
    return []


@contextlib.contextmanager
def pinned(cores: list[int]) -> Iterator[None]:
    """Processes that this thread starts inside run on `cores` only; nothing happens for none, and where the system
    cannot pin."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
        yield
    finally:
        os.sched_setaffinity(0, before)


def own_handle() -> str:
    """The handle of this process."""
    return f"{os.getpid()}:{process_start(os.getpid()) or 0}"


def is_alive(handle: str) -> bool:
    """Whether the process of this handle still runs: the same id and the same start time, and no zombie."""
    pid, _, start = handle.partition(":")
    return pid.isdecimal() and len(pid) < 20 and process_start(int(pid)) == start


def process_start(pid: int) -> str | None:
    """When a process was started, as text to compare with; None where there is no such process, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        code, said = subprocess.getstatusoutput(f"ps -o state=,lstart= -p {pid}")  # on other systems
        return None if code or said.strip()[:1] in ("", "Z") else "-".join(said.split()[1:])
    return None if fields[0] in "ZX" else fields[19]


def no_display() -> bool:
    """Whether this is a Linux machine on which no window can open."""
    return sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & {k for k, v in os.environ.items() if v}


def without_screen() -> None:
    """Let simulators draw where there is no display: SDL draws nowhere, MuJoCo by EGL where that library is. It reads
    this when it is imported, and cannot be imported where the library is asked for and missing."""
    if no_display():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else SDL complains on every start
        with contextlib.suppress(OSError):
            ctypes.CDLL("libEGL.so.1")
            os.environ.setdefault("MUJOCO_GL", "egl")


def cpu_model() -> str:
    """The name of the processor with its numbers: a virtual machine may show the same name for different ones."""
    with contextlib.suppress(OSError, KeyError):
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
        about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
        return f"{about['model name']}, family {about['cpu family']}, model {about['model']}"
    return platform.processor()


# ---------------------------------------------------------------------- memory
def memory() -> int:
    """Bytes of memory of this machine, or of the container that this process runs in."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, CONTAINER):
        with contextlib.suppress(OSError, ValueError):  # no such file; no limit ("max")
            found.append(int(path.read_text()))
    return min(found)


def check_memory(args: Any, rows: int, row: int, count: int) -> None:
    """One sentence and exit code 2 unless `count` of the rows, of `row` bytes each, fit into memory. The sentence names
    the argument that is as large as `rows`."""
    if row * count <= memory():
        return
    sizes = [field.name for field in dataclasses.fields(args) if field.name not in STEPS]
    name = next((f"--{name.replace('_', '-')}" for name in sizes if getattr(args, name) == rows), "an array of length")
    quit_with(
        f"{name} {rows} needs {rows * row / 2**30:,.1f} GiB of memory, but there are {memory() / 2**30:,.1f} GiB; "
        f"it must be less than {memory() // row}"
    )


def check_array(args: Any, shape: tuple[int, ...], itemsize: int) -> None:
    """`check_memory` for a whole array, whose rows are counted along the longest axis."""
    rows = max(1, *shape, 1)
    check_memory(args, rows, itemsize * math.prod(shape) // rows, rows)


def check_replay(args: Any, arrays: Iterable[Any]) -> None:
    """`check_memory` for a replay buffer, of which a training fills no more rows than it does steps."""
    arrays = list(arrays)
    capacity = len(arrays[0])
    row = sum(array.nbytes for array in arrays) // max(1, capacity)
    check_memory(args, capacity, row, min(capacity, getattr(args, "total_timesteps", capacity)))
