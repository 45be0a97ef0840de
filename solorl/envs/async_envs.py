"""Environments in processes of their own, one each: Gymnasium's `AsyncVectorEnv` with shared memory.

envs = AsyncEnvs([make_env] * 8)  # used like VectorEnvs([make_env] * 8), with its results
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection, parent_process, util
from typing import Any

import gymnasium as gym
import numpy as np

from solorl import signals
from solorl.envs import guest
from solorl.envs.surroundings import seeded, set_random_states
from solorl.envs.vector import Masked, masks_in, stacked_masks, with_next_obs
from solorl.errors import UsageError, quit_with, reason, told

LEFT = 5.0  # seconds in which a process that is no longer needed closes its environment


class AsyncEnvs(gym.vector.AsyncVectorEnv):
    """See `VectorEnvs`. A process that ends, or an exception in it, ends the program with one sentence and exit code 1.

    Processes start by a fork, which needs no second import of the script and takes any function. The threads of JAX and
    a GPU in use do not outlive a fork, nor does much of other systems than Linux: there they are new ones.
    """

    def __init__(self, make_envs: Sequence[Callable[[], gym.Env]]):
        torch = sys.modules.get("torch")
        in_use = "jax" in sys.modules or (torch is not None and torch.cuda.is_initialized())
        context = "forkserver" if in_use or sys.platform != "linux" else "fork"
        known = gym.registry, guest.SAID  # what a new process lacks
        begin = [partial(_begin, os.getpid(), index, make_env, *known) for index, make_env in enumerate(make_envs)]
        self.action_mask: Any = None
        try:
            with self._ending():
                super().__init__(begin, context=context, daemon=False, autoreset_mode="SameStep")
        except BaseException as error:
            self.close_extras()
            if isinstance(error.__cause__, gym.error.CustomSpaceError):
                quit_with(f"--async-envs cannot share observations between processes: {error.__cause__}")
            raise
        util.Finalize(self, _end, self._workers(), exitpriority=1)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.vector.VectorEnv.reset`."""
        with self._ending():
            obs, infos = super().reset(seed=seed, options=options)
        self.action_mask = masks_in(infos)
        return obs, infos

    def step(self, actions: Any) -> Any:
        """See `VectorEnvs.step`."""
        with self._ending():
            obs, reward, terminated, truncated, infos = super().step(actions)
        self.action_mask = masks_in(infos)
        return obs, reward, terminated, truncated, with_next_obs(obs, infos)

    def each(self, function: Callable[..., Any], *inputs: Sequence[Any]) -> list[Any]:
        """What `function(env, ...)` returns for each environment, in its process; each of `inputs` has an entry for
        each environment."""
        with self._ending():
            self.set_attr("inputs", [*zip(*inputs, strict=True)] or [()] * self.num_envs)
            found = self.call("apply", function)
            self.action_mask = stacked_masks(self.call("mask"))
        return [*found]

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """See `gymnasium.vector.AsyncVectorEnv.call`."""
        with self._ending():
            return super().call(name, *args, **kwargs)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the processes."""
        _end(*self._workers())

    def _workers(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return vars(self).get("parent_pipes", ()), vars(self).get("processes", ())

    def _raise_if_errors(self, successes: Any) -> None:
        if not all(successes):
            failed = [self.error_queue.get() for success in successes if not success]
            raise UsageError(str(min(failed, key=lambda each: each[0])[2]))  # (index, class, exception, trace)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except (UsageError, EOFError, OSError) as error:
            said, processes = str(error), self._workers()[1]
            if not isinstance(error, UsageError) and processes:
                sentinels = [each.sentinel for each in processes]
                index = sentinels.index((connection.wait(sentinels, LEFT) or sentinels)[0])
                processes[index].join(LEFT)
                said = f"the process of environment {index} has ended with exit code {processes[index].exitcode}"
            quit_with(f"--async-envs: {said}; --resume continues from the last checkpoint", 1)


def _end(pipes: Sequence[Any], processes: Sequence[Any]) -> None:
    for pipe in pipes:
        with suppress(OSError):
            pipe.send(("close", None))
    until = time.monotonic() + LEFT
    for process in processes:
        process.join(max(0, until - time.monotonic()))
        process.kill()


# ---------------------------------------------------------------------- in the process of an environment
def _begin(trains: int, index: int, make_env: Callable[[], gym.Env], registry: Mapping[str, Any], said: Any) -> gym.Env:
    """The environment; in the process that trains, which looks at its spaces, nothing else. Signals are for that
    process, which ends this one when it has saved."""
    if os.getpid() == trains:
        return make_env()
    for number in (*signals.ENDING, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gym.registry.update(registry)
    guest.SAID |= said
    set_random_states(seeded(int(np.random.get_state()[1][0]) + index))  # type: ignore[index]
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # others do not outlive a fork, and the cores are taken
    try:
        env = make_env()
    except Exception as error:  # which no process hears
        quit_with(f"--async-envs: environment {index} failed: {reason(error)}", 1)
    return Away(env if isinstance(env, Masked) else Masked(env), f"environment {index} failed")


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])  # type: ignore[union-attr]
    os._exit(1)


class Away(gym.Wrapper):
    """An environment in a process of its own. Its exceptions are UsageErrors, which every process can read."""

    inputs: tuple[Any, ...] = ()

    def __init__(self, env: gym.Env, failed: str):
        super().__init__(env)
        self._failed = failed

    def reset(self, **named: Any) -> Any:
        """See `gymnasium.Env.reset`."""
        with told(self._failed):
            return self.env.reset(**named)

    def step(self, action: Any) -> Any:
        """See `gymnasium.Env.step`."""
        with told(self._failed):
            return self.env.step(action)

    def apply(self, function: Callable[..., Any]) -> Any:
        """See `AsyncEnvs.each`."""
        with told(self._failed):
            return function(self.env, *self.inputs)

    def wrap(self, kind: type[gym.Wrapper]) -> None:
        """Put a wrapper around the environment, unless it has one of this kind."""
        self.env = self.env if isinstance(self.env, kind) else kind(self.env)

    def close(self) -> None:
        """See `gymnasium.Env.close`."""
        with suppress(Exception):
            self.env.close()
