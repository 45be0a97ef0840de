"""What the pool of `solo tune` runs on a Ray cluster: an actor that looks after processes on its nodes.

Only `ray_pool.py` uses this, and it goes with it.
"""

import contextlib
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

import ray

from solorl.errors import UsageError, reason
from solorl.studies.engines.local import UNKNOWN, Job
from solorl.studies.engines.ray import BEGIN, FORCE, LINGER, NAMESPACE, run, wanted
from solorl.studies.resources import Resources


def run_job(job: Job) -> int:
    """Run a job on this node to its end; its exit code."""
    with open(job.output if job.output != Path() else os.devnull, "ab") as output:
        return run(job.argv, output, cwd=job.cwd, env={**os.environ, **job.env})[0]


class PoolCrew:
    """The actor: the jobs of one pool, with the resources of each. It ends when nobody has asked for ten minutes."""

    def __init__(self, resources: dict[str, float]):
        self._run = ray.remote(run_job).options(**resources, max_retries=0)
        self._refs: list[Any] = []
        self._asked = time.monotonic()
        threading.Thread(target=self._end, daemon=True).start()

    def add(self, job: Job) -> int:
        """Start a job; its number."""
        self._refs.append(self._run.remote(job))
        return len(self._refs) - 1

    def codes(self) -> list[int | None]:
        """The exit code of each job; None while it waits or runs."""
        self._asked = time.monotonic()
        over = set(ray.wait(self._refs, num_returns=len(self._refs), timeout=0)[0]) if self._refs else set()
        return [_code(ref) if ref in over else None for ref in self._refs]

    def cancel(self, number: int, force: bool) -> None:
        """Tell a job to save and end, or end it at once."""
        for pause in (0.0, FORCE)[: 1 + force]:
            time.sleep(pause)
            ray.cancel(self._refs[number])

    def _end(self) -> None:
        pending: list[Any] = []
        while pending or time.monotonic() - self._asked < LINGER:
            time.sleep(1.0)
            pending = ray.wait(self._refs, num_returns=len(self._refs), timeout=0)[1] if self._refs else []
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _code(ref: Any) -> int:
    try:
        return int(ray.get(ref))
    except Exception:  # of any kind: cancelled before it began, or lost with its node
        return UNKNOWN


def start_crew(resources: Resources, grows: bool) -> str:
    """Start a crew; its name. UsageError where no node has the resources or can run a crew."""
    name, each = f"solo-{secrets.token_hex(8)}", wanted(resources, grows)
    actor: Any = ray.remote(PoolCrew).options(num_cpus=0, name=name, namespace=NAMESPACE, lifetime="detached")
    crew = actor.remote(each)
    try:
        ray.get(crew.codes.remote(), timeout=BEGIN)
    except ray.exceptions.RayError as error:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(crew)
        raise UsageError(f"the Ray cluster cannot start workers: {reason(error):.300}") from None
    return name


def room(resources: Resources) -> int:
    """How many jobs with these resources the nodes can run at once."""
    sizes = {"CPU": resources.cores, "GPU": resources.gpus, "memory": resources.memory * 1_000_000}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(int(min(node.get(name, 0) // size for name, size in sizes.items() if size)) for node in nodes)
