"""The lease of a task: a file that says which worker does it now, renewed by a heartbeat.

A lease without a heartbeat is free; so is one whose process was of this machine and is gone. The clocks of machines
that share a study must agree within seconds. Two workers may still do one task between two heartbeats: the run folder
has a lock, one result is accepted, and who finds that the lease has gone to another one stops.
"""

import contextlib
import json
import platform
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from solorl.lab.studies.storage import Storage, read_object
from solorl.machine import is_alive, own_handle

SETTLE = 0.2  # seconds between writing a lease over an old one and looking whether another worker did so, too


@cache
def machine() -> str:
    """This machine, and on Linux its space of process ids: containers may have the same host name."""
    space = Path("/proc/self/ns/pid")
    return f"{platform.node()}:{space.stat().st_ino if space.exists() else 0}"


def holder(storage: Storage, task_id: str) -> dict[str, Any]:
    """Who has a lease, whether alive or not: machine, handle (process), beat (seconds since 1970); or nothing."""
    return read_object(storage, f"leases/{task_id}.json")


def is_fresh(found: dict[str, Any], seconds: float) -> bool:
    """Whether a holder is at work, as far as can be told. A heartbeat from the future does not count."""
    if not found or (found.get("machine") == machine() and not is_alive(str(found.get("handle")))):
        return False
    beat = found.get("beat")
    return isinstance(beat, int | float) and abs(time.time() - beat) < seconds


class Leases(threading.Thread):
    """The leases of this process, renewed by one thread. Calls `lost(id, why)` where another worker has one now
    (`taken`), or nobody shall do the task any more (`cancelled`)."""

    def __init__(self, storage: Storage, seconds: float, lost: Callable[[str, str], None]):
        super().__init__(daemon=True)
        self._storage, self._seconds, self._lost = storage, seconds, lost
        self._owner = {"machine": machine(), "handle": own_handle()}
        self._held, self._lock, self.over = set[str](), threading.RLock(), threading.Event()

    def take(self, task_id: str) -> dict[str, Any] | None:
        """Take a free lease: what a dead holder has left there, empty where it was released; None where it is not free.
        Of several that take over the same lease one succeeds in general."""
        before: dict[str, Any] = {}
        if task_id in self._held:
            return None
        if not self._storage.create(f"leases/{task_id}.json", self._data()):
            before = holder(self._storage, task_id)
            if is_fresh(before, self._seconds):
                return None
            self._storage.write(f"leases/{task_id}.json", self._data())
            time.sleep(SETTLE)
            if not self._is_mine(task_id):
                return None
        self._held.add(task_id)
        return before

    def release(self, task_id: str) -> None:
        """Leave a task to others, if it is still ours."""
        with self._lock, contextlib.suppress(OSError):
            self._held.discard(task_id)
            if self._is_mine(task_id):
                self._storage.delete(f"leases/{task_id}.json")

    def run(self) -> None:
        """Beat until `over` is set. What the storage refuses now is tried again later."""
        while not self.over.wait(self._seconds / 4):
            for task_id in [*self._held]:
                with self._lock, contextlib.suppress(OSError):
                    self._beat(task_id)

    def _beat(self, task_id: str) -> None:
        if task_id not in self._held:  # released meanwhile
            return
        if holder(self._storage, task_id) and not self._is_mine(task_id):
            self._held.discard(task_id)
            return self._lost(task_id, "taken")
        self._storage.write(f"leases/{task_id}.json", self._data())
        if self._storage.exists(f"cancelled/{task_id}.json"):
            self._lost(task_id, "cancelled")

    def _is_mine(self, task_id: str) -> bool:
        return self._owner.items() <= holder(self._storage, task_id).items()

    def _data(self) -> bytes:
        return json.dumps({**self._owner, "beat": time.time()}).encode()
