"""The lease of a task: who does it now. A lease without heartbeat may be taken over; the clocks of the machines that
share a study must agree within a few seconds.

Two workers may still do one task for the time between two heartbeats. That is harmless: only one result is accepted,
and who finds that the lease has gone to another one stops.
"""

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from solorl.lab.studies.storage import read_object
from solorl.lab.studies.study import Study
from solorl.machine import is_alive, own_handle
from solorl.terminal import plain

SETTLE = 0.2  # seconds between writing a lease over an old one and looking whether another worker did so, too
TICK = 0.2  # seconds between two looks at the clock


def machine() -> str:
    """This machine, and on Linux its space of process ids: containers may have the same host name."""
    space = Path("/proc/self/ns/pid")
    return f"{platform.node()}:{space.stat().st_ino if space.exists() else 0}"


class Lease:
    """The lease of one task, as this process sees it."""

    def __init__(self, study: Study, task_id: str):
        self._study, self.task_id, self._name = study, task_id, f"leases/{task_id}.json"
        self.owner = {"machine": machine(), "handle": own_handle()}
        self.oddity = ""  # why a lease that `is_fresh` has seen does not count, where that is strange

    def holder(self) -> dict[str, Any]:
        """Who has it, whether alive or not; empty where nobody has."""
        found = read_object(self._study.storage, self._name)
        beat = found.get("beat")
        texts = {key: plain(str(found.get(key))) for key in ("machine", "handle")}
        return {**texts, "beat": beat if isinstance(beat, int | float) else 0.0} if found else {}

    def is_fresh(self, holder: dict[str, Any]) -> bool:
        """Whether its holder does the task, as far as can be told. A heartbeat from the future is none."""
        if not holder or (holder["machine"] == self.owner["machine"] and not is_alive(holder["handle"])):
            return False
        age = time.time() - holder["beat"]
        if age < -self._study.lease:
            self.oddity = "its lease is from the future (a clock is ahead, or the file is damaged) and does not count"
        return abs(age) < self._study.lease

    def take(self) -> bool:
        """Take it, unless somebody has it. Of several that take over the same lease one succeeds in general."""
        if self._study.storage.create(self._name, self._data()):
            return True
        if self.is_fresh(self.holder()):
            return False
        self.beat()
        time.sleep(SETTLE)
        return self.is_mine()

    def wait(self, stopped: Callable[[], bool]) -> bool:
        """Take it, or wait until its holder gives a sign of life (False), ends, or has given none for too long."""
        first = self.holder()
        while not self.take():
            now = self.holder()
            if stopped() or (now.get("handle") == first.get("handle") and now.get("beat") != first.get("beat")):
                return False
            first = first if now.get("handle") == first.get("handle") else now
            time.sleep(min(1.0, self._study.lease / 8))
        return True

    def beat(self) -> None:
        """A sign of life."""
        self._study.storage.write(self._name, self._data())

    def is_mine(self) -> bool:
        """Whether this process has it."""
        holder = self.holder()
        return {key: holder.get(key) for key in self.owner} == self.owner

    def release(self) -> None:
        """Leave the task to others, if it is still ours."""
        with contextlib.suppress(OSError):
            if self.is_mine():
                self._study.storage.delete(self._name)

    def _data(self) -> bytes:
        return json.dumps({**self.owner, "pid": os.getpid(), "beat": time.time()}).encode()


class Heart(threading.Thread):
    """Renews the leases of tasks that are done together. Calls `ended(why)` once: another worker has taken one over
    (`taken`), nobody shall do one any more (`cancelled`), or `limit` seconds are over (`time`; 0: no limit)."""

    def __init__(self, study: Study, leases: Sequence[Lease], limit: float, ended: Callable[[str], None]):
        super().__init__(daemon=True)
        self._study, self._leases, self._limit, self._ended = study, leases, limit, ended
        self._over, self._why = threading.Event(), ""
        self._began = self._last = time.monotonic()

    def run(self) -> None:
        """Beat until `stop`; without this thread somebody calls `turn` often."""
        while not self._over.wait(TICK):
            self.turn()

    def turn(self) -> None:
        """Look at the clock, and beat where it is time to."""
        now = time.monotonic()
        if not self._why and self._limit and now - self._began > self._limit:
            self._why = "time"
            self._ended("time")
        if now - self._last > self._study.lease / 4:
            self._last = now
            for lease in self._leases if self._why != "taken" else ():  # also while it saves
                if (found := self._look(lease)) and found != self._why:
                    self._why = found
                    self._ended(found)

    def _look(self, lease: Lease) -> str:
        """Beat once, unless the task is another's or nobody's. What the storage refuses now is tried again later."""
        with contextlib.suppress(OSError):
            if lease.holder() and not lease.is_mine():
                return "taken"
            lease.beat()
            if self._study.is_cancelled(lease.task_id):
                return "cancelled"
        return ""

    def stop(self) -> None:
        """Beat no more."""
        self._over.set()
        if self.is_alive():
            self.join()
