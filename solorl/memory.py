"""The memory of this machine, and whether a replay buffer fits into it."""

import dataclasses
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from solorl.errors import quit_with

CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # what it may use
STEPS = {"total_timesteps", "learning_starts", "eval_every", "save_every"}  # arguments that are not sizes


def limit() -> int:
    """Bytes of memory of this machine, or of the container that this process runs in."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, CONTAINER):
        with suppress(OSError, ValueError):  # no such file; no limit ("max")
            found.append(int(path.read_text()))
    return min(found)


def check(args: Any, rows: int, row: int, count: int) -> None:
    """One sentence and exit code 2 unless `count` of the rows, of `row` bytes each, fit into memory. The sentence names
    the argument that is as large as `rows`."""
    if row * count <= limit():
        return
    sizes = [field.name for field in dataclasses.fields(args) if field.name not in STEPS]
    name = next((f"--{name.replace('_', '-')}" for name in sizes if getattr(args, name) == rows), "an array of length")
    quit_with(
        f"{name} {rows} needs {rows * row / 2**30:,.1f} GiB of memory, but there are {limit() / 2**30:,.1f} GiB; "
        f"it must be less than {limit() // row}"
    )


def check_array(args: Any, shape: tuple[int, ...], itemsize: int) -> None:
    """`check` for a whole array, whose rows are counted along the longest axis."""
    rows = max(1, *shape, 1)
    check(args, rows, itemsize * math.prod(shape) // rows, rows)


def check_replay(args: Any, arrays: Iterable[Any]) -> None:
    """`check` for a replay buffer, of which a training fills no more rows than it does steps."""
    arrays = list(arrays)
    capacity = len(arrays[0])
    row = sum(array.nbytes for array in arrays) // max(1, capacity)
    check(args, capacity, row, min(capacity, getattr(args, "total_timesteps", capacity)))
