"""Where a training runs, and the seeds of its random numbers."""

import os
import random
import sys
from typing import Any

import numpy as np

from solorl.errors import UsageError
from solorl.run.arguments import RunArgs

TRAIN, EVALUATE, CONFIRM = range(3)  # streams of environment seeds


def env_seed(seed: int, stream: int, index: int, rank: int = 0) -> int:
    """A seed that no other run seed (< 2^31), stream (< 4), rank (< 2^10) or environment index (< 2^20) shares."""
    return ((seed * 4 + stream) * 2**10 + rank) * 2**20 + index


def ranks() -> tuple[int, int]:
    """Which of the processes that train one run this is, and how many there are: RANK and WORLD_SIZE of the
    environment, as torchrun sets them; 0 and 1 without them. UsageError for more than one, which is not possible yet:
    episodes, rows and the states of environments and generators of other ranks would have to come to rank 0.
    """
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise UsageError(f"RANK and WORLD_SIZE must be numbers, RANK the smaller one, not {rank!r} and {world_size!r}")
    if int(world_size) > 1:
        raise UsageError(f"WORLD_SIZE is {world_size}, but one process trains a run; start it without torchrun")
    return int(rank), int(world_size)


def seed_all(args: RunArgs) -> None:
    """Seed Python, NumPy and torch; give torch its threads."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(args.seed)
        torch.set_num_threads(args.threads)
        if args.torch_deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads such memory
            torch.backends.cudnn.benchmark = False


def choose_device(args: RunArgs) -> Any:
    """The torch device of `--device`; its name where the script does not use torch. UsageError if there is none."""
    torch, name = sys.modules.get("torch"), args.device
    if torch is None:
        return name
    if name == "auto":
        name = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name} is unknown; allowed are auto, cpu, cuda, cuda:N and mps") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"--device {name} is not supported; allowed are auto, cpu, cuda, cuda:N and mps")
    is_there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}.get(device.type)
    wanted = f"--device {name} was asked for, but"
    if is_there and not is_there():
        raise UsageError(f"{wanted} torch sees no {device.type.upper()} device; --device cpu runs everywhere")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"{wanted} there are {torch.cuda.device_count()} CUDA devices")
    return device


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
