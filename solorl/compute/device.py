"""Where a training runs, and the seeds of its random numbers."""

import ctypes
import os
import random
import sys
from contextlib import suppress
from typing import Any

import numpy as np

from solorl.args.arguments import RunArgs
from solorl.errors import UsageError

TRAIN, EVALUATE, CONFIRM, RECORD = range(4)  # streams of environment seeds
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def env_seed(seed: int, stream: int, index: int) -> int:
    """A seed that no other run seed (< 2^31), stream (< 4) or environment index (< 2^30, of all ranks) shares."""
    return (seed * 4 + stream) * 2**30 + index


def seed_all(args: RunArgs) -> None:
    """Seed Python, NumPy and torch; give torch its threads."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(args.seed)
        torch.set_num_threads(args.threads)
        keep_freed_memory()
        torch.backends.cudnn.allow_tf32 = False  # else convolutions on a GPU keep 10 of 23 bits
        if args.torch_deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads such memory
            torch.backends.cudnn.benchmark = False


def keep_freed_memory() -> None:
    """Have glibc keep blocks of up to 32 MB that were freed, rather than hand them back to the system. A gradient step
    on images frees its activations and asks for as much again: each time the system would have to clear the pages.

    The settings of a user, MALLOC_TRIM_THRESHOLD_ and the like, stay. Other systems and C libraries: nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the largest that glibc takes
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def choose_device(args: RunArgs, index: int | None = None) -> Any:
    """The torch device of `--device`; its name where the script does not use torch. UsageError if there is none.
    `index`: the CUDA device to take if `--device` names none."""
    torch, name = sys.modules.get("torch"), args.device
    if torch is None:
        return name
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with suppress(RuntimeError):  # of a name that torch does not know
        device = torch.device(f"cuda:{index}" if name == "cuda" and index is not None else name)
        if (device.index or 0) < there.get(device.type, 0):
            return device
    seen = f"torch sees {there['cuda']} CUDA and {there['mps']} MPS devices"
    known = "allowed are auto, cpu, cuda, cuda:N and mps"
    raise UsageError(f"--device {name} was asked for, but {seen}; --device cpu runs everywhere ({known})")


def device_name(device: Any) -> str:
    """What a device calls itself."""
    if getattr(device, "type", "") == "cuda":
        return sys.modules["torch"].cuda.get_device_name(device)
    return str(device)


def device_words(device: Any, threads: int) -> str:
    """Where the training runs, said at its start."""
    kind = getattr(device, "type", None) or getattr(device, "platform", "cpu")
    if kind == "cpu":
        return f"device cpu, {threads} thread{'s'[: threads != 1]}"
    name = getattr(device, "device_kind", None) or device_name(device)
    return f"device {kind}, {name}" if name != kind else f"device {kind}"
