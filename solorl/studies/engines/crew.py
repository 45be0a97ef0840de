"""What the engine `ray` runs on a cluster: processes on its nodes, and an actor that looks after them.

A crew is one detached actor without cores of its own, which any later process finds by its name. It owns a task of Ray
for each job; those wait for a node, run one after the other in Ray's worker processes, and are tried again where a node
or a worker is lost. A crew whose node is lost begins again elsewhere with all its jobs: what has finished in the
meantime says so at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from solorl.errors import reason
from solorl.machine import end_with_parent
from solorl.studies.engines.cluster import AGAIN
from solorl.studies.engines.local import UNKNOWN, Job

LOOK = 0.1  # seconds between two looks at a process; Ray's cancelling is heard in between
FORCE = 0.5  # seconds between the two interruptions that mean: end at once
LINGER = 600.0  # seconds that a crew stays without jobs and questions, for those who ask why a job has failed
TAIL = 4000  # bytes of a job's output that stay


class Again(Exception):
    """A process was killed, or has saved and is to be run again: what Ray retries."""


def run_job(job: Job, again: bool) -> tuple[int, str]:
    """Run a process on this node to its end: its exit code, and the end of what it printed. The first interruption
    tells it to save and end, the second one kills it. With `again` a killed or preempted process raises Again."""
    argv = [job.argv[0] or sys.executable, *job.argv[1:]]
    with open(job.output, "a+b") if job.output != Path() else tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            argv, cwd=job.cwd, env={**os.environ, **job.env}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_parent(),
        )  # fmt: skip
        told = 0
        while process.poll() is None:
            try:
                time.sleep(LOOK)
            except (KeyboardInterrupt, SystemExit):  # `ray.cancel`, and a node that shuts down
                told += 1
                with contextlib.suppress(ProcessLookupError):
                    if told == 1:
                        process.terminate()
                    else:
                        os.killpg(process.pid, signal.SIGKILL)
        code = process.returncode
        if again and not told and (code < 0 or code == AGAIN):
            raise Again(f"exit code {code}")
        output.seek(-min(TAIL, output.seek(0, os.SEEK_END)), os.SEEK_END)
        return code, output.read().decode(errors="replace")


class Crew:
    """The actor. `resources` and `retries` are of each job; a crew that does not `stay` ends when all went well."""

    def __init__(self, jobs: Sequence[Job], resources: dict[str, float], retries: int, stay: bool):
        import ray

        options = {**resources, "max_retries": retries, "retry_exceptions": [Again]}
        self._run = ray.remote(run_job).options(**options)
        self._stay, self._asked = stay, time.monotonic()
        self._pending: dict[Any, int] = {}  # Ray's reference -> number of the job
        self._ended: list[tuple[int | None, str]] = []  # exit code, None while it waits or runs; last lines
        self.add(jobs)
        threading.Thread(target=self._watch, daemon=True).start()

    def add(self, jobs: Iterable[Job]) -> list[int]:
        """Start jobs; their numbers."""
        first = len(self._ended)
        for number, job in enumerate(jobs, first):
            self._ended.append((None, ""))
            self._pending[self._run.remote(job, not self._stay)] = number
        self._asked = time.monotonic()
        return list(range(first, len(self._ended)))

    def codes(self) -> list[int | None]:
        """The exit code of each job; None while it waits or runs."""
        self._asked = time.monotonic()
        return [code for code, _ in self._ended]

    def tail(self, number: int) -> str:
        """The end of what a job has printed, when it has ended."""
        return self._ended[number][1] if number < len(self._ended) else ""

    def cancel(self, numbers: Sequence[int], force: bool) -> None:
        """Tell jobs to save and end, or end them at once; those that wait are forgotten."""
        import ray

        wanted = set(numbers)
        for pause in (0.0, FORCE) if force else (0.0,):
            time.sleep(pause)
            for ref, number in list(self._pending.items()):
                if number in wanted:
                    ray.cancel(ref)

    def _watch(self) -> None:
        """Note which jobs have ended, until nobody needs this crew any more."""
        import ray

        while not self._is_over():
            if not self._pending:
                time.sleep(LOOK)
                continue
            ray.wait([*self._pending], timeout=1.0)
            refs = [*self._pending]
            for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                number = self._pending[ref]
                self._ended[number] = _result(ref)
                del self._pending[ref]
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _is_over(self) -> bool:
        quiet = time.monotonic() - self._asked > LINGER
        well = not self._stay and all(code == 0 for code, _ in self._ended)
        return not self._pending and (well or quiet)


def _result(ref: Any) -> tuple[int, str]:
    """How a job ended: as it says, by `ray.cancel`, or with its node."""
    import ray

    try:
        found: tuple[int, str] = ray.get(ref)
    except ray.exceptions.TaskCancelledError:
        return -signal.SIGTERM, ""
    except Exception as error:  # of any kind: what Ray has retried as often as it may
        return (AGAIN if isinstance(error, Again) else UNKNOWN), reason(error)
    return found
