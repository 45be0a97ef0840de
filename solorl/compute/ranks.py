"""Ranks, the processes that train one run together: what they exchange, and that none continues without the others.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment say who they are and where rank 0 is, as torchrun and
`solo train ... --nproc N` set them. All ranks must call the same methods in the same order, each of which waits for the
others. A rank that was killed cannot be waited for: a thread of each rank watches a connection between it and rank 0,
which the system closes where a process ends, whatever the reason.
"""

import atexit
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from solorl.errors import UsageError, reason

START = 60  # seconds that all ranks have to come
LONGEST = timedelta(days=7)  # for which a rank waits for another one, which may evaluate
DONE = 255  # said by a rank that has come to its end; any other number is the exit code with which all must end


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
        self._links: dict[socket.socket, int] = {}  # to rank 0, or from it to all others

    def open(self, device: Any, lost: Callable[[int, int | None], None]) -> None:
        """Meet the others. UsageError where that fails. `lost(rank, code)` is called, in another thread, where a rank
        has ended before the run has; `code`: its exit code if it could say it."""
        import torch.distributed as dist

        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"--device {device.type} is not for several ranks; allowed are cpu and cuda")
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"  # nccl: never tried
        start = timedelta(seconds=START)
        try:
            dist.init_process_group(backend, rank=self.rank, world_size=self.world_size, timeout=start)
            self._group = dist.new_group(backend=backend, timeout=LONGEST)
            self._connect()
        except (RuntimeError, ValueError, OSError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            found = f"the {self.world_size} ranks have not met at {where} within {START} s"
            raise UsageError(f"{found} ({reason(error).partition('. ')[0]:.200})") from None
        atexit.register(self.leave, 1)
        threading.Thread(target=self._watch, args=(lost,), daemon=True).start()

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
        """A function of torch.distributed. Where it fails, another rank has ended, and the thread that watches it will
        end this process."""
        import torch.distributed as dist

        try:
            getattr(dist, name)(*inputs, group=self._group, **named)
        except RuntimeError:
            time.sleep(5)
            raise

    # ------------------------------------------------------------------ how they end
    def close(self) -> None:
        """The run is over: nothing is exchanged any more, and each rank may end when it likes."""
        if self._links:
            import torch.distributed as dist

            self.everyone(None)
            self.leave(DONE)
            dist.destroy_process_group()

    def leave(self, code: int) -> None:
        """Tell the others that this rank ends with an exit code, and they with it; only the first call counts."""
        links, self._links = self._links, {}
        for link in links:
            with suppress(OSError):
                link.send(bytes([code]))

    def wait_for_the_end(self) -> NoReturn:
        """Wait until rank 0 ends all ranks."""
        while True:
            time.sleep(1)

    def _connect(self) -> None:
        """A connection between rank 0 and each of the others."""
        host, server = os.environ["MASTER_ADDR"], None
        if self.rank == 0:
            server = socket.create_server((host, 0), backlog=self.world_size)
            server.settimeout(START)
        port = self.everyone(server.getsockname()[1] if server else 0)[0]
        if server is None:
            link = socket.create_connection((host, port), START)
            link.sendall(self.rank.to_bytes(4, "big"))
            self._links[link] = 0
        else:
            with server:
                for _ in range(1, self.world_size):
                    link = server.accept()[0]
                    self._links[link] = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")
        for link in self._links:
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone closes nothing
            for name, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, name):
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)

    def _watch(self, lost: Callable[[int, int | None], None]) -> None:
        watched = dict(self._links)
        while watched:
            for link in select.select(list(watched), [], [])[0]:
                try:
                    said = link.recv(1)
                except OSError:
                    said = b""
                rank = watched.pop(link)
                if said != bytes([DONE]) and self._links:  # else this rank has left before, and is ending
                    lost(rank, said[0] if said else None)
