"""The engine `ray`: workers as tasks of Ray, which tries one again that was killed or has saved.

Ray ends the tasks of a process that ends. So they belong to a detached actor without cores of its own, which ends with
them; if its node is lost, Ray begins it again on another one, and its workers find what is left to do.
"""

import contextlib
import logging
import os
import secrets
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from solorl.errors import UsageError, reason
from solorl.lab.studies.engines import Job
from solorl.lab.studies.worker import AGAIN
from solorl.machine import command_of, dying_with_parent

OPTIONS = ("address",)
RETRIES = 100  # of a worker, which ends by itself when no task is left; of the actor


class Again(Exception):
    """A worker was killed, or has saved and is to be run again: what Ray retries."""


def work(words: Sequence[str]) -> None:
    """Run a worker on this node to its end, told to save where Ray ends this process. Raises Again."""
    process = subprocess.Popen([*dying_with_parent(), *command_of(*words)], stdin=subprocess.DEVNULL)
    try:
        if (code := process.wait()) < 0 or code == AGAIN:
            raise Again(f"exit code {code}")
    except (KeyboardInterrupt, SystemExit):
        process.terminate()
        process.wait()


class Crew:
    """The actor, which owns the workers."""

    def __init__(self, words: Sequence[str], workers: int, options: Mapping[str, Any]):
        run = ray.remote(work).options(**options, max_retries=RETRIES, retry_exceptions=[Again])
        self._refs = [run.remote(words) for _ in range(workers)]
        threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        ray.wait(self._refs, num_returns=len(self._refs))
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def count(self) -> int:
        """How many workers there are."""
        return len(self._refs)


def start(job: Job, options: Mapping[str, str], dry: bool) -> str:
    """See `solorl.lab.studies.engines`; `address` is that of the cluster, else RAY_ADDRESS, else of this machine."""
    wanted = {"num_cpus": job.resources.cores, "num_gpus": job.resources.gpus}
    wanted |= {"memory": job.resources.memory * 1_000_000} if job.resources.memory else {}
    if dry:
        return f"{job.workers} tasks of Ray with {wanted}: solo {' '.join(job.words)}"
    address = options.get("address") or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address, namespace="solorl", log_to_driver=False, logging_level=logging.ERROR)
        name = f"solo-{secrets.token_hex(4)}"
        actor: Any = ray.remote(Crew).options(num_cpus=0, name=name, lifetime="detached", max_restarts=RETRIES)
        count = ray.get(actor.remote(job.words, job.workers, wanted).count.remote(), timeout=600)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        how = "start one with `ray start --head`, or name one: --engine-option address=HOST:6379"
        raise UsageError(f"no workers begin on a Ray cluster at {address}: {reason(error)[:200]}; {how}") from None
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
    return f"{count} tasks of Ray, owned by the actor {name}"
