"""The engine `ray` of a `Pool`: jobs on the nodes of a Ray cluster, which share the file system."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

from solorl.errors import UsageError
from solorl.studies.engines.crew import room, start_crew
from solorl.studies.engines.local import UNKNOWN, Job
from solorl.studies.engines.ray import ask, open, wanted
from solorl.studies.resources import Resources

ASK = 0.2  # seconds between two questions to a crew


class RayPool:
    """See `Engine`. All jobs of one process are those of one crew."""

    def __init__(self, slots: int, resources: Resources, grows: bool):
        self.slots, self._resources, self._grows = slots, resources, grows
        self._crew = ""
        self._codes: dict[str, tuple[float, list[int | None]]] = {}  # crew -> its codes, and when it said them

    def submit(self, job: Job) -> str:
        """See `Engine.submit`."""
        job = replace(job, output=job.output.absolute(), cwd=job.cwd.absolute())
        added = ask(self._crew, "add", job) if self._crew else None
        if added is None:  # there is no crew yet, or its node was lost
            self._crew = start_crew(self._resources, self._grows)
            added = ask(self._crew, "add", job)
        self._codes.pop(self._crew, None)
        return f"{self._crew}/{added}"

    def adopt(self, handle: str) -> bool:
        """See `Engine.adopt`."""
        return handle.startswith("solo-") and self.poll(handle) is None

    def poll(self, handle: str) -> int | None:
        """See `Engine.poll`. Where the crew does not answer, the job runs, as far as is known."""
        name, _, number = handle.rpartition("/")
        asked, codes = self._codes.get(name, (0.0, []))
        if time.monotonic() - asked > ASK:
            try:
                codes = ask(name, "codes") or []
            except OSError:
                return None
            self._codes[name] = time.monotonic(), codes
        return codes[int(number)] if int(number) < len(codes) else UNKNOWN

    def cancel(self, handle: str, force: bool = False) -> None:
        """See `Engine.cancel`. Where the crew does not answer, the pool kills the job later."""
        name, _, number = handle.rpartition("/")
        with contextlib.suppress(OSError):
            ask(name, "cancel", int(number), force)


def open_pool(options: Mapping[str, str], resources: Resources, workers: int | None) -> RayPool:
    """The engine for a pool of at most `workers` jobs at once, None: as many as the nodes can run. UsageError as `open`
    of `ray.py`, and for resources that no node has."""
    grows = open(options).grows
    if grows and workers is None:
        raise UsageError(
            "with the option grows=yes give --workers: how many runs at once, on nodes that are still to come"
        )
    wanted(resources, grows)
    return RayPool(workers or room(resources), resources, grows)
