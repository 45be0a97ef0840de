"""Objects in processes of their own, which Ray places on this machine or on a cluster."""

import logging
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

QUIET = 10.0  # seconds in which the end of one process is said once: all that was asked of it fails
STORE = 5 * 10**8  # bytes of Ray's object store on this machine


class Promise:
    """What an object in another process was asked for: the answer, or its failure, will come."""

    def __init__(self, ref: Any, name: str = ""):
        self.ref, self.name = ref, name


class Placed:
    """An object in another process. Its methods give promises; a promise among their inputs becomes its answer."""

    def __init__(self, actor: Any, name: str):
        self._actor, self._name = actor, name

    def __getattr__(self, method: str) -> Callable[..., Promise]:
        """The method of that name, to be called from here."""
        if method.startswith("_"):
            raise AttributeError(method)
        remote = getattr(self._actor, method).remote

        def ask(*inputs: Any) -> Promise:
            return Promise(remote(*(x.ref if isinstance(x, Promise) else x for x in inputs)), self._name)

        return ask


def _from_bytes(cls: type) -> type:
    """The same class, made of its pickled inputs: with other objects among them as they are, Ray might be unable to
    start it again."""

    class Made(cls):
        def __init__(self, inputs: bytes):
            super().__init__(*pickle.loads(inputs))

    Made.__name__ = Made.__qualname__ = cls.__name__
    return Made


class Processes:
    """Ray, once something is placed: in the cluster of RAY_ADDRESS, else on this machine. `say` gets the sentence where
    a process has ended."""

    def __init__(self, say: Callable[[str], None]):
        self.say, self.count = say, 0
        self.ray: Any = None
        self._said: dict[str, float] = {}

    def place(self, cls: type, inputs: Sequence[tuple[Any, ...]]) -> list[Placed]:
        """An object `cls(*each)` in a process of its own for each of `inputs`. Where a process ends, Ray starts a new
        object with the same inputs. Raises ModuleNotFoundError without Ray, ConnectionError without the cluster or
        where it has too few cores."""
        self.ray = ray = self.ray or self._connect()
        self.count += len(inputs)
        cores = 1 if os.environ.get("RAY_ADDRESS") else 0  # on this machine there may be more processes than cores
        if (there := int(ray.cluster_resources().get("CPU", 0))) < cores * self.count:
            raise ConnectionError(f"the Ray cluster has {there} cores, but this training needs {self.count}")
        remote = ray.remote(_from_bytes(cls)).options(num_cpus=cores, max_restarts=-1)
        actors = [remote.remote(ray.cloudpickle.dumps(each)) for each in inputs]
        return [Placed(actor, f"{cls.__name__} {i}") for i, actor in enumerate(actors)]

    def share(self, value: Any) -> Any:
        """A promise of `value` to hand to several objects, sent to each machine once; without Ray the value itself."""
        return Promise(self.ray.put(value)) if self.ray else value

    def first(self, promises: Sequence[Any]) -> tuple[int, Any]:
        """Waits for one of the promises, the first of those that are there; its index and answer (see `answers`)."""
        index = 0
        if self.ray:
            refs = [promise.ref for promise in promises]
            index = refs.index(self.ray.wait(refs, num_returns=1)[0][0])
        return index, self.answers([promises[index]])[0]

    def answers(self, promises: Iterable[Any]) -> list[Any]:
        """The answers of promises, None where the process has ended before; anything else is its own answer. An
        exception there is raised here."""
        return [self._answer(promise) if isinstance(promise, Promise) else promise for promise in promises]

    def close(self) -> None:
        """Ends the processes, and Ray where it is this process's own."""
        if self.ray:
            self.ray.shutdown()
            self.ray = None

    def _connect(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets other work on this machine starve them
        import ray

        address = os.environ.get("RAY_ADDRESS")
        alone = {"address": "local", "num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE}
        own: dict[str, Any] = {} if address else alone
        try:
            if address and (place := re.fullmatch(r"([^/]+):(\d+)", address)):  # Ray itself would try for minutes
                socket.create_connection((place[1], int(place[2])), 10).close()
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **own)
        except (OSError, ValueError, OverflowError, RuntimeError) as error:
            where = f"the Ray cluster at RAY_ADDRESS={address}" if address else "Ray"
            reason = " ".join(str(error).split())[:200]
            raise ConnectionError(f"{where} cannot be reached ({reason}); without RAY_ADDRESS one starts") from error
        return ray

    def _answer(self, promise: Promise) -> Any:
        lost = (self.ray.exceptions.ActorUnavailableError, self.ray.exceptions.ObjectLostError)
        try:
            return self.ray.get(promise.ref)
        except lost:
            if time.monotonic() - self._said.get(promise.name, -QUIET) >= QUIET:
                self._said[promise.name] = time.monotonic()
                self.say(f"{promise.name} has ended, and what it knew is lost; Ray starts another one in its place")
            return None
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None  # Ray's own text is the traceback of the other process
