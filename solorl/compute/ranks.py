"""Ranks, the processes that train one run together: what they exchange, and that none continues without the others.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment say who they are and where rank 0 is, as torchrun and
`solo train ... --nproc N` set them. All ranks must call the same methods in the same order, each of which waits for the
others. Where a rank ends before the run has, no exchange succeeds any more, so the others end, too.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from solorl.errors import UsageError, quit_with, reason

START = 60  # seconds that all ranks have to come
LONGEST = timedelta(days=7)  # for which a rank waits for another one, which may evaluate


def from_environment() -> tuple[int, int]:
    """Which rank this process is, and how many there are; 0 and 1 where nothing is said. UsageError."""
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise UsageError(f"RANK and WORLD_SIZE must be numbers, RANK the smaller one, not {rank!r} and {world_size!r}")
    return int(rank), int(world_size)


class Ranks:
    """All ranks, seen from one of them; alone, before `open`, it hands back what it is given."""

    def __init__(self, rank: int = 0, world_size: int = 1):
        self.rank, self.world_size = rank, world_size
        self._group: Any = None

    def open(self, device: Any) -> None:
        """Meet the others. UsageError where that fails."""
        import torch.distributed as dist

        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"--device {device.type} is not for several ranks; allowed are cpu and cuda")
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"  # nccl: never tried
        start = timedelta(seconds=START)
        try:
            dist.init_process_group(backend, rank=self.rank, world_size=self.world_size, timeout=start)
            self._group = dist.new_group(backend=backend, timeout=LONGEST)
        except (RuntimeError, ValueError, OSError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            found = f"the {self.world_size} ranks have not met at {where} within {START} s"
            raise UsageError(f"{found} ({reason(error).partition('. ')[0]:.200})") from None

    # ------------------------------------------------------------------ what they exchange
    def everyone(self, value: Any) -> list[Any]:
        """The `value` of each rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        self._exchange("all_gather_object", values, value)
        return values

    def gather(self, tensors: Sequence[Any], dim: int) -> list[Any]:
        """The tensors of all ranks, of equal shapes, put together along `dim` in the order of ranks."""
        if self.world_size == 1:
            return list(tensors)
        import torch

        found = []
        for tensor in tensors:
            parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
            self._exchange("all_gather", parts, tensor.contiguous())
            found.append(torch.cat(parts, dim))
        return found

    def average(self, tensors: Sequence[Any]) -> list[Any]:
        """The means of tensors over the ranks, by one exchange; equal in all ranks to the last bit."""
        import torch

        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self._exchange("all_reduce", flat)
        parts = (flat / self.world_size).split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def copy_from_first(self, module: Any) -> None:
        """Give a module the parameters and buffers that it has in rank 0."""
        for tensor in module.state_dict().values():
            self._exchange("broadcast", tensor, src=0)

    def _exchange(self, name: str, *inputs: Any, **named: Any) -> None:
        """A function of torch.distributed. Where it fails, as where another rank ends: one sentence and exit code 1."""
        import torch.distributed as dist

        try:
            getattr(dist, name)(*inputs, group=self._group, **named)
        except RuntimeError as error:
            what = f"the {self.world_size} ranks have lost each other, as where one ends ({reason(error):.100})"
            quit_with(f"{what}; --resume continues from the last checkpoint", code=1)

    # ------------------------------------------------------------------ how they end
    def close(self) -> None:
        """The run is over: nothing is exchanged any more, and each rank may end when it likes."""
        if self._group:
            import torch.distributed as dist

            self.everyone(None)
            dist.destroy_process_group()

    def wait_for_the_end(self) -> None:
        """Wait until rank 0 has ended."""
        import torch.distributed as dist

        with suppress(RuntimeError):
            dist.barrier(self._group)
