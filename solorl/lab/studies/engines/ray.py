"""The engine `ray`: `solo work` as tasks of Ray, which runs them one after the other in its worker processes.

Ray ends the tasks of a process that ends. So a submission has a crew: a detached actor without cores of its own, which
owns its tasks and is found by its name. Ray tries a task again whose worker was killed or has saved, and begins a crew
again whose node is lost: what has finished says so at once. A handle is a crew and an index: `solo-7f3a.../12`.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from solorl.errors import UsageError, reason
from solorl.lab.studies.engines.cluster import AGAIN, Submission, check_options
from solorl.lab.studies.resources import Resources, count
from solorl.machine import end_with_parent

NAMESPACE = "solorl"  # of the names of crews
BEGIN, ANSWER, CONNECT = 600.0, 60.0, 5.0  # seconds for a crew to begin and to answer, for the port to open
RESTARTS, RETRIES = 10, 20  # of a crew; of a task
FORCE = 0.5  # seconds between the two interruptions that mean: end at once
LINGER = 600.0  # seconds that a crew stays when all has ended, for those who ask for logs
TAIL = 4000  # bytes of a worker's output that stay
HOW = "start one with `ray start --head`, or name one: --engine-option address=HOST:6379 (logs, cancel: --address)"


class Again(Exception):
    """A worker was killed, or has saved and is to be run again: what Ray retries."""


def work(words: Sequence[str]) -> str:
    """Run a worker on this node to its end: the end of what it printed. The first interruption (`ray.cancel`, a node
    that shuts down) tells it to save and end, the second one kills it. Raises Again where Ray is to run it again."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=end_with_parent(),
        )  # fmt: skip
        told = 0
        while process.poll() is None:
            try:
                time.sleep(0.1)
            except (KeyboardInterrupt, SystemExit):
                told += 1
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL) if told > 1 else process.terminate()
        if not told and (process.returncode < 0 or process.returncode == AGAIN):
            raise Again(f"exit code {process.returncode}")
        output.seek(-min(TAIL, output.seek(0, os.SEEK_END)), os.SEEK_END)
        return output.read().decode(errors="replace")


class Crew:
    """The actor: the words of each worker by its handle, the resources of each, and how often Ray tries one again."""

    def __init__(self, commands: Mapping[str, Sequence[str]], resources: Mapping[str, float], retries: int):
        run = ray.remote(work).options(**resources, max_retries=retries, retry_exceptions=[Again])
        self._refs = {handle: run.remote(words) for handle, words in commands.items()}
        threading.Thread(target=self._end, daemon=True).start()

    def alive(self) -> list[str]:
        """Those that wait or run."""
        over = set(ray.wait([*self._refs.values()], num_returns=len(self._refs), timeout=0)[0])
        return [handle for handle, ref in self._refs.items() if ref not in over]

    def cancel(self, handles: Sequence[str], force: bool) -> None:
        """Tell workers to save and end, or end them at once; those that wait are forgotten."""
        for pause in (0.0, FORCE)[: 1 + force]:
            time.sleep(pause)
            for handle in {*handles}.intersection(self.alive()):
                ray.cancel(self._refs[handle])

    def tail(self, handle: str) -> str:
        """The end of what a worker has printed, when it has ended."""
        try:
            return "" if handle in self.alive() else str(ray.get(self._refs[handle]))
        except Exception as error:  # of any kind: what Ray has tried as often as it may, or cancelled
            return reason(error)

    def _end(self) -> None:
        ray.wait([*self._refs.values()], num_returns=len(self._refs))
        time.sleep(LINGER)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class RayCluster:
    """Workers on the Ray cluster to which this process is connected."""

    name = "ray"
    array_limit = 10_000

    def __init__(self, retries: int, grows: bool):
        self.retries, self.grows = retries, grows

    def submit(self, submission: Submission) -> list[str]:
        """See `Cluster.submit`. UsageError also for resources that no node has."""
        name = f"solo-{secrets.token_hex(8)}"
        commands = {f"{name}/{i}": submission.command(i)[1:] for i in range(len(submission.tasks))}
        resources = wanted(submission.resources, self.grows)
        actor: Any = ray.remote(Crew).options(
            num_cpus=0, name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=RESTARTS
        )
        crew = actor.remote(commands, resources, self.retries)
        try:
            ray.get(crew.alive.remote(), timeout=BEGIN)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError) as error:
            ray.kill(crew)
            raise OSError(0, f"no crew has begun: {reason(error)}") from None
        except ray.exceptions.RayError as error:
            ray.kill(crew)
            why = f"is the same solorl on its nodes? {reason(error):.300}"
            raise UsageError(f"the Ray cluster cannot start workers; {why}") from None
        return [*commands]

    def alive(self, handles: Sequence[str]) -> set[str]:
        """See `Cluster.alive`."""
        return {handle for crew in crews(handles) for handle in ask(crew, "alive") or ()}.intersection(handles)

    def cancel(self, handles: Sequence[str], force: bool = False) -> None:
        """See `Cluster.cancel`."""
        for crew in crews(handles):
            ask(crew, "cancel", handles, force)

    def logs(self, handle: str) -> str:
        """See `Cluster.logs`: the last lines of a worker that has ended, ten minutes long."""
        return ask(*crews([handle]), "tail", handle) or ""


def crews(handles: Sequence[str]) -> set[str]:
    """The names of their crews."""
    return {handle.partition("/")[0] for handle in handles}


def ask(name: str, method: str, *words: Any) -> Any:
    """What a crew answers; None where there is none of that name. OSError where it does not answer."""
    try:
        crew = ray.get_actor(name, namespace=NAMESPACE)
        return ray.get(getattr(crew, method).remote(*words), timeout=ANSWER)
    except (ValueError, ray.exceptions.ActorDiedError):
        return None
    except ray.exceptions.RayError as error:
        raise OSError(0, reason(error)) from None


def wanted(resources: Resources, grows: bool) -> dict[str, float]:
    """Resources as options of Ray. UsageError where no node has them, unless the cluster `grows`."""
    asked = {"CPU": resources.cores, "GPU": resources.gpus, "memory": resources.memory * 1_000_000}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not grows and not any(all(node.get(name, 0) >= size for name, size in asked.items()) for node in nodes):
        most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in asked}
        there = f"{most['CPU']:g} cores, {most['GPU']:g} GPUs, {most['memory'] / 1e6:,.0f} MB"
        needed = f"{resources.cores} cores, {resources.gpus} GPUs and {resources.memory:,} MB"
        more = "where the cluster adds such nodes by itself, give --engine-option grows=yes"
        raise UsageError(f"no node of the Ray cluster has {needed}; they have at most {there}; {more}")
    memory = {"memory": asked["memory"]} if resources.memory else {}
    return {"num_cpus": resources.cores, "num_gpus": resources.gpus, **memory}


def connect(address: str) -> None:
    """Join a Ray cluster as its user. UsageError, in one sentence, where there is none."""
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto" and not (colon and host and port.isdecimal()):
        raise UsageError(f"the address of a Ray cluster must be HOST:PORT, ray://HOST:PORT or auto, not {address}")
    try:
        if address != "auto":
            socket.create_connection((host, int(port)), CONNECT).close()  # Ray itself would wait for a minute
        ray.shutdown()  # of an earlier connection: it may be to another cluster
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        what = "there is no Ray cluster" if isinstance(error, OSError) else "nothing can run on the Ray cluster"
        why = (getattr(error, "strerror", None) or reason(error)).partition(". ")[0][:200].rstrip(".")
        raise UsageError(f"{what} {where} ({why}); {HOW}") from None


def open(options: Mapping[str, str]) -> RayCluster:
    """The engine; `address`: of the cluster, `retries`: how often Ray runs a worker again that was killed or preempted,
    `grows`: yes where the cluster adds nodes by itself. UsageError for other options, and as `connect`."""
    check_options(options, ("address", "retries", "grows"), "ray")
    grows = options.get("grows", "no")
    if grows not in ("yes", "no"):
        raise UsageError(f"the option grows of the engine ray must be yes or no, not {grows}")
    retries = count(options.get("retries", RETRIES), 0, "the option retries of the engine ray")
    connect(options.get("address", ""))
    return RayCluster(retries, grows == "yes")
