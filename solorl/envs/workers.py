"""Environments in processes of their own: workers, each with an equal part of a training's environments side by side.

envs = in_workers(VectorEnvs, [make_env] * 8, workers=2)  # used like VectorEnvs([make_env] * 8), with its results
"""

import contextlib
import copy
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import connection, util
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import utils

from solorl import signals
from solorl.envs.guest import looks
from solorl.errors import UsageError, quit_with

LEFT = 5.0  # seconds in which a worker that is no longer needed closes its environments
RESUME = "--resume continues from the last checkpoint"


class InWorkers(gym.vector.SyncVectorEnv):
    """The half of `in_workers` that is in this process. Observations come through shared memory, actions and all else
    through pipes, infos one by one, so that they are put together in the order and with the types of one process.

    `envs` has one more environment, which is never stepped: it tells the spaces. `rows` are the environments of each
    worker. A worker that ends, or an exception in it, ends the program with one sentence and exit code 1.
    """

    def __init__(self, kind: type, make_envs: Sequence[Callable[[], gym.Env]], workers: int):
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        self._end = util.Finalize(self, _end, (self._pipes, self._processes), exitpriority=1)
        super().__init__(make_envs[:1])  # of the kind
        self.env_fns, self.num_envs = make_envs, len(make_envs)
        self.observation_space = utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = utils.batch_space(self.single_action_space, self.num_envs)
        size = self.num_envs // workers
        self.rows = [slice(first, first + size) for first in range(0, self.num_envs, size)]
        context = multiprocessing.get_context(_start_method())
        try:
            self._shared = utils.create_shared_memory(self.single_observation_space, self.num_envs, context)  # type: ignore[arg-type]
        except (TypeError, gym.error.CustomSpaceError):
            quit_with(f"--env-workers cannot share observations of the space {self.single_observation_space}")
        for rows in self.rows:
            pipe, theirs = context.Pipe()
            util.register_after_fork(pipe, type(pipe).close)  # or a worker would not see that this process has ended
            what = utils.CloudpickleWrapper((make_envs[rows], gym.registry))  # type: ignore[arg-type]
            process = context.Process(target=_work, args=(kind, what, rows.start, self._shared, theirs))  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        self._or_end(self._answers)

    @property
    def obs(self) -> Any:
        """The current observations (num_envs, *obs_shape), in arrays that no step changes."""
        return copy.deepcopy(utils.read_from_shared_memory(self.single_observation_space, self._shared, self.num_envs))

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.vector.VectorEnv.reset`; without `reset_mask`."""
        seeds = [None] * self.num_envs if seed is None else seed
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seeds
        self._or_end(self.ask, _reset, [seeds[rows] for rows in self.rows], [options] * len(self.rows))
        return self.obs, self._infos()

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """See `gymnasium.vector.VectorEnv.step`."""
        told = self._or_end(self.ask, _step, [_part(actions, rows) for rows in self.rows])
        reward, terminated, truncated = map(np.concatenate, zip(*told, strict=True))
        return self.obs, reward, terminated, truncated, self._infos()

    def ask(self, function: Callable[..., Any], *inputs: Sequence[Any]) -> list[Any]:
        """What `function(envs, ...)` returns in each worker, where `envs` are its environments; each of `inputs` has an
        entry for each worker. RuntimeError where one raises an exception."""
        for pipe, *own in zip(self._pipes, *inputs, strict=True):
            with contextlib.suppress(OSError):  # it has ended: `_answers` says so
                pipe.send((function, own))
        return self._answers()

    def present(self) -> list[Any]:
        """See `VectorEnvs.present`."""
        return self._present

    def looks(self) -> list[str]:
        """See `guest.looks`."""
        return [what for own in self.ask(looks) for what in own]

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """See `gymnasium.vector.SyncVectorEnv.call`."""
        call = partial(gym.vector.SyncVectorEnv.call, **kwargs)
        return tuple(each for own in self.ask(call, *([one] * len(self.rows) for one in (name, *args))) for each in own)

    def set_attr(self, name: str, values: Any) -> None:
        """See `gymnasium.vector.SyncVectorEnv.set_attr`."""
        values = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        self.ask(gym.vector.SyncVectorEnv.set_attr, [name] * len(self.rows), [values[rows] for rows in self.rows])

    def render(self) -> tuple[Any, ...]:
        """See `gymnasium.vector.SyncVectorEnv.render`."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers."""
        self._end()
        super().close_extras(**kwargs)

    def _answers(self) -> list[Any]:
        answers, failed = [], ""
        self._noted: list[tuple[int, bytes]] = []
        self._present: list[Any] = []
        for i, pipe in enumerate(self._pipes):
            who = f"worker {i + 1} of {len(self.rows)} (--env-workers)"
            try:
                answer, problem, noted, present = pipe.recv()
            except (EOFError, OSError):
                self._processes[i].join(LEFT)
                quit_with(f"{who} has ended with exit code {self._processes[i].exitcode}; {RESUME}", 1)
            failed = failed or (problem and f"{who} failed with {problem}")
            answers.append(answer)
            self._noted += noted
            self._present += present
        if failed:
            raise RuntimeError(failed)
        return answers

    def _or_end(self, ask: Callable[..., list[Any]], *inputs: Any) -> list[Any]:
        try:
            return ask(*inputs)
        except RuntimeError as error:
            quit_with(f"{error}; --env-workers 0 shows where, {RESUME}", 1)

    def _infos(self) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for index, info in self._noted:
            infos = self._add_info(infos, pickle.loads(info), index)
        return infos


def in_workers(kind: type, make_envs: Sequence[Callable[[], gym.Env]], workers: int) -> Any:
    """`kind(make_envs)`, `VectorEnvs` or `PettingZooEnvs`, whose environments are in as many processes, which must
    divide their number. One sentence and exit code 2 where their observations cannot be shared."""
    return type(f"{kind.__name__}InWorkers", (InWorkers, kind), {})(kind, make_envs, workers)


def _start_method() -> str:
    """How workers start: by a fork, which needs no second import of the script and takes any function. The threads of
    JAX and a GPU in use do not outlive a fork, nor does much of other systems than Linux."""
    torch = sys.modules.get("torch")
    in_use = "jax" in sys.modules or (torch is not None and torch.cuda.is_initialized())
    return "forkserver" if in_use or sys.platform != "linux" else "fork"


def _part(actions: Any, rows: slice) -> Any:
    """The actions of some environments."""
    if isinstance(actions, Mapping):
        return {name: _part(each, rows) for name, each in actions.items()}
    return tuple(_part(each, rows) for each in actions) if isinstance(actions, tuple) else np.asarray(actions)[rows]


def _end(pipes: Sequence[connection.Connection], processes: Sequence[Any]) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(LEFT)
        process.kill()


# ---------------------------------------------------------------------- in a worker
def _work(kind: Any, what: Any, first: int, shared: Any, pipe: connection.Connection) -> None:
    """Make the environments, the first of which has the index `first`, and do what the pipe asks for until it is
    closed. Signals are for the training, which ends this process when it has saved."""
    for number in (*signals.ENDING, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    make_envs, registry = what.fn
    gym.registry.update(registry)  # what a new process lacks
    random.seed(random.random() + first)  # or what draws from these would draw the same in all workers
    np.random.seed(np.random.randint(2**31) + first)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # others do not outlive a fork, and the cores are taken
    noted: list[tuple[int, bytes]] = []

    def note(infos: dict[str, Any], info: dict[str, Any], index: int) -> dict[str, Any]:
        if info:
            noted.append((first + index, pickle.dumps(info)))  # at once: an environment may change its arrays
        return infos

    def do(function: Callable[..., Any], *inputs: Any) -> Any:
        answer = function(envs, *inputs)
        for i, obs in enumerate(envs._env_obs):
            if obs is not None:
                utils.write_to_shared_memory(envs.single_observation_space, first + i, obs, shared)
        return answer

    def begin() -> Any:
        envs = kind(make_envs)
        envs._add_info = note
        return envs

    envs, failed = _tried(begin)
    answer = None
    with contextlib.suppress(EOFError, OSError):  # the pipe is closed
        while True:
            pipe.send((answer, failed, noted, envs.present() if envs else []))
            noted.clear()
            function, inputs = pipe.recv()
            answer, failed = _tried(do, function, *inputs)
    with contextlib.suppress(Exception):
        envs.close()


def _tried(function: Callable[..., Any], *inputs: Any) -> tuple[Any, str]:
    """What it returns, or None and the exception that it raises, in words."""
    try:
        return function(*inputs), ""
    except UsageError as error:
        return None, str(error)
    except Exception as error:
        return None, " ".join(f"{type(error).__name__}: {error}".split())


def _end_with_parent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]
    os._exit(1)


def _reset(envs: Any, seed: Any, options: Any) -> None:
    envs.reset(seed=seed, options=options)


def _step(envs: Any, actions: Any) -> Any:
    return envs.step(actions)[1:4]
