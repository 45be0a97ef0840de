"""The engine `ray`: workers as tasks on the nodes of a Ray cluster, of which a crew takes care (`crew.py`).

A handle is the name of a crew and the number of a job in it: `solo-7f3a.../12`.
"""

import logging
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from solorl.errors import UsageError, missing_extra, reason
from solorl.studies.engines.cluster import Submission, check_options
from solorl.studies.engines.crew import Crew
from solorl.studies.engines.local import Job
from solorl.studies.resources import Resources, count

NAMESPACE = "solorl"  # of the names of crews
ANSWER = 60.0  # seconds that a crew has to answer
BEGIN = 600.0  # seconds that a crew has to begin: a busy cluster starts processes slowly
CONNECT = 5.0  # seconds that the cluster's port has to open
RESTARTS = 10  # of a crew whose node is lost
RETRIES = 20
OPTIONS = ("address", "retries", "grows")
HOW = "start one with `ray start --head`, or name one: --engine-option address=HOST:6379 (logs, cancel: --address)"
_connected = ""  # the address to which this process is connected


class RayCluster:
    """Workers on a Ray cluster."""

    name = "ray"
    array_limit = 10_000

    def __init__(self, retries: int = RETRIES, grows: bool = False):
        self._retries, self._grows = retries, grows

    def submit(self, submission: Submission) -> list[str]:
        """See `Cluster.submit`. UsageError also for resources that no node has."""
        if not self._grows:
            fitting(submission.resources)
        indices = range(len(submission.tasks))
        jobs = [Job(tuple(submission.command(index, python="")), Path()) for index in indices]
        name = start_crew(jobs, submission.resources, self._retries)
        return [f"{name}/{index}" for index in indices]

    def alive(self, handles: Sequence[str]) -> set[str]:
        """See `Cluster.alive`."""
        alive = set()
        for name, numbers in by_crew(handles).items():
            codes = ask(name, "codes") or []
            alive |= {f"{name}/{number}" for number in numbers if number < len(codes) and codes[number] is None}
        return alive

    def cancel(self, handles: Sequence[str], force: bool = False) -> None:
        """See `Cluster.cancel`."""
        for name, numbers in by_crew(handles).items():
            ask(name, "cancel", numbers, force)

    def logs(self, handle: str) -> str:
        """See `Cluster.logs`: the last lines of a worker that has ended, some minutes long."""
        name, _, number = handle.rpartition("/")
        return str(ask(name, "tail", int(number)) or "")


# ---------------------------------------------------------------------- crews
def start_crew(jobs: Sequence[Job], resources: Resources, retries: int, stay: bool = False) -> str:
    """Start a crew with these jobs; its name. UsageError where the nodes cannot run one, OSError where none begins
    in time."""
    import ray

    name, restarts = f"solo-{secrets.token_hex(8)}", 0 if stay else RESTARTS
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": restarts}
    crew: Any = ray.remote(Crew).options(num_cpus=0, **options).remote(jobs, wanted(resources), retries, stay)
    try:
        ray.get(crew.codes.remote(), timeout=BEGIN)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError) as error:
        ray.kill(crew)
        raise OSError(0, f"no crew has begun: {reason(error)}") from None
    except ray.exceptions.RayError as error:
        ray.kill(crew)
        why = f"{reason(error):.300}"
        raise UsageError(f"the Ray cluster cannot start workers; is the same solorl on its nodes? {why}") from None
    return name


def ask(name: str, method: str, *words: Any) -> Any:
    """What a crew answers; None where there is none of that name. OSError where it does not answer."""
    import ray

    try:
        crew = ray.get_actor(name, namespace=NAMESPACE)
        return ray.get(getattr(crew, method).remote(*words), timeout=ANSWER)
    except (ValueError, ray.exceptions.ActorDiedError):
        return None
    except ray.exceptions.RayError as error:
        raise OSError(0, reason(error)) from None


def by_crew(handles: Sequence[str]) -> dict[str, list[int]]:
    """The numbers of the jobs of each crew."""
    found = defaultdict(list)
    for name, _, number in (handle.rpartition("/") for handle in handles):
        found[name].append(int(number))
    return found


# ---------------------------------------------------------------------- nodes
def wanted(resources: Resources) -> dict[str, float]:
    """Resources as options of Ray."""
    memory = {"memory": resources.memory * 1_000_000} if resources.memory else {}
    return {"num_cpus": resources.cores, "num_gpus": resources.gpus, **memory}


def fitting(resources: Resources) -> int:
    """How many jobs with these resources the nodes can run at once. UsageError where no node can run one."""
    import ray

    each = {name: size for name, size in zip(("CPU", "GPU", "memory"), _sizes(resources), strict=True) if size}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = sum(int(min(node.get(name, 0) // size for name, size in each.items())) for node in nodes)
    if not fit:
        most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in ("CPU", "GPU", "memory")}
        there = f"{most['CPU']:g} cores, {most['GPU']:g} GPUs, {most['memory'] / 1e6:,.0f} MB"
        asked = f"{resources.cores} cores, {resources.gpus} GPUs and {resources.memory:,} MB"
        more = "where the cluster adds such nodes by itself, give --engine-option grows=yes"
        raise UsageError(f"no node of the Ray cluster has {asked}; they have at most {there}; {more}")
    return fit


def _sizes(resources: Resources) -> tuple[int, int, int]:
    return resources.cores, resources.gpus, resources.memory * 1_000_000


def connect(address: str) -> None:
    """Join a Ray cluster as its user; nothing where this process has done so before. UsageError, in one sentence, where
    Ray is not installed, or there is no such cluster."""
    global _connected
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UsageError(missing_extra("the engine ray", error) or reason(error)) from None
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if ray.is_initialized():
        if address == _connected:
            return
        ray.shutdown()
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if address != "auto":
            if not (colon and host and port.isdecimal()):
                raise UsageError(
                    f"the address of a Ray cluster must be HOST:PORT, ray://HOST:PORT or auto, not {address}"
                )
            socket.create_connection((host, int(port)), CONNECT).close()  # Ray itself would wait for a minute
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        what = "there is no Ray cluster" if isinstance(error, OSError) else "nothing can run on the Ray cluster"
        raise UsageError(f"{what} {where} ({why(error)}); {HOW}") from None
    _connected = address


def why(error: Exception) -> str:
    """What an exception says, in few words."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
    return text.partition(". ")[0][:200].rstrip(".")


# ---------------------------------------------------------------------- opening
def open(options: Mapping[str, str]) -> RayCluster:
    """The engine; `address`: of the cluster, `retries`: how often Ray runs a worker again that was killed or preempted,
    `grows`: yes where the cluster adds nodes by itself. UsageError for other options, and as `connect`."""
    retries, grows = read(options)
    connect(options.get("address", ""))
    return RayCluster(retries, grows)


def read(options: Mapping[str, str]) -> tuple[int, bool]:
    """The options `retries` and `grows`."""
    check_options(options, OPTIONS, "ray")
    grows = options.get("grows", "no")
    if grows not in ("yes", "no"):
        raise UsageError(f"the option grows of the engine ray must be yes or no, not {grows}")
    return count(options.get("retries", RETRIES), 0, "the option retries of the engine ray"), grows == "yes"
