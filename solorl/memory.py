"""One sentence and exit code 2, rather than a traceback, where a training needs more memory than there is."""

import dataclasses
import functools
import math
import os
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from solorl.errors import UsageError, quit_with, reason

CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # what it may use
OF_NUMPY = ("array is too big", "Maximum allowed dimension")
SIGNS = (*OF_NUMPY, "can't allocate memory", "out of memory", "RESOURCE_EXHAUSTED")
STEPS = {"total_timesteps", "learning_starts", "eval_every", "save_every"}  # arguments that are not sizes
_HOOK = sys.excepthook


def limit() -> int:
    """Bytes of memory of this machine, or of the container that this process runs in."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, CONTAINER):
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file; no limit ("max")
            continue
    return min(found)


def check(args: Any, shape: tuple[int, ...], row: int, count: int | None = None) -> None:
    """One sentence and exit code 2 unless `count` rows (default: all) of an array fit into memory.

    `shape` is that of the array and `row` the bytes of one of its rows, which are counted along the longest axis. The
    sentence names the argument that is as large.
    """
    rows = max(shape, default=0)
    if row * (rows if count is None else count) <= limit():
        return
    sizes = [field.name for field in dataclasses.fields(args) if field.name not in STEPS]
    name = next((f"--{name.replace('_', '-')}" for name in sizes if getattr(args, name) == rows), "an array of length")
    quit_with(
        f"{name} {rows} needs {rows * row / 2**30:,.1f} GiB of memory, but there are {limit() / 2**30:,.1f} GiB; "
        f"it must be less than {limit() // row}"
    )


def check_array(args: Any, shape: tuple[int, ...], itemsize: int) -> None:
    """`check` for a whole array."""
    check(args, shape, itemsize * math.prod(shape) // max(1, *shape, 1))


def check_replay(args: Any, arrays: Iterable[Any]) -> None:
    """`check` for a replay buffer, of which a training fills no more rows than it does steps."""
    arrays = list(arrays)
    capacity = len(arrays[0])
    row = sum(array.nbytes for array in arrays) // max(1, capacity)
    check(args, (capacity,), row, min(capacity, getattr(args, "total_timesteps", capacity)))


def explain(args: Any) -> None:
    """From now on say in one sentence, with exit code 2, that an array does not fit into memory, and what a UsageError
    says that nobody has caught, as that of a teacher that cannot be loaded. Keeps neither `args`
    nor, by their class, the script and its training: every thread that begins remembers this hook."""
    sys.excepthook = functools.partial(_explained, weakref.ref(args))


def _explained(known: weakref.ref[Any], kind: Any, error: Any, trace: Any) -> None:
    if isinstance(error, UsageError):
        quit_with(error)
    args = known()
    explained = isinstance(error, MemoryError) or any(sign in str(error) for sign in SIGNS)
    if args is None or not explained:
        _HOOK(kind, error, trace)
        return
    if isinstance(shape := getattr(error, "shape", None), tuple):  # NumPy's
        check_array(args, shape, error.dtype.itemsize)
    sizes = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.name not in STEPS}
    largest = max((name for name, size in sizes.items() if isinstance(size, int)), key=lambda name: sizes[name])
    quit_with(
        f"this training needs more than the {limit() / 2**30:,.1f} GiB of memory that there are ({reason(error)}); "
        f"its largest size is --{largest.replace('_', '-')} {sizes[largest]}"
    )
