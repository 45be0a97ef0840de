"""What of the process the code of an environment may change: how it is read and set, for those who keep it in order."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def _torch() -> Any:
    return sys.modules.get("torch")


def random_states() -> dict[str, Any]:
    """The states of the global generators of Python, NumPy and torch (its CUDA devices included)."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    if torch := _torch():
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put every global generator into the state that `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "torch" in states and (torch := _torch()):
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["cuda"])


def seeded(seed: int) -> dict[str, Any]:
    """States as of `random_states` that a seed gives; the global generators stay as they are."""
    states: dict[str, Any] = {"python": random.Random(seed).getstate()}
    states["numpy"] = np.random.RandomState(seed % 2**32).get_state()
    return states | ({"torch": torch.Generator().manual_seed(seed).get_state()} if (torch := _torch()) else {})


def plain(states: dict[str, Any]) -> Any:
    """The same in Python's own types, which can be compared; without CUDA's."""
    return states["python"], [
        getattr(each, "tolist", lambda each=each: each)() for each in (*states["numpy"], states.get("torch", ()))
    ]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever runs inside leaves the global random states as they were."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109  Path.cwd takes three times as long
    except OSError:  # it has been removed
        return os.sep


def _set_dtype(dtype: Any) -> None:
    if torch := _torch():
        torch.set_default_dtype(dtype or torch.float32)


def _set_grad(enabled: bool) -> None:
    if torch := _torch():
        torch.set_grad_enabled(enabled)


def _handlers() -> list[Any]:
    return [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def _set_handlers(handlers: list[Any]) -> None:
    for number, handler in zip((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), handlers, strict=True):
        if signal.getsignal(number) != handler and handler is not None:
            signal.signal(number, handler)


def _set_argv(words: list[str]) -> None:
    sys.argv[:] = words


RANDOM = "the global random generators"
# What it is called -> how to read it, how to set it. Of the first three an environment may have some of its own.
STATES: dict[str, tuple[Any, Any]] = {
    RANDOM: (random_states, set_random_states),
    "the current folder": (_folder, os.chdir),
    "torch's default type": (lambda: torch.get_default_dtype() if (torch := _torch()) else None, _set_dtype),
    "torch's gradient mode": (lambda: torch.is_grad_enabled() if (torch := _torch()) else True, _set_grad),
    "NumPy's treatment of errors": (np.geterr, lambda how: np.seterr(**how)),
    "signal handlers": (_handlers, _set_handlers),
    "sys.argv": (lambda: list(sys.argv), _set_argv),
}
OWN = list(STATES)[:3]
PUT_BACK = list(STATES)[1:]  # by a look after each reset: random states are too large for that


def now(names: list[str]) -> dict[str, Any]:
    """These states of the process."""
    return {name: STATES[name][0]() for name in names}


def bring_back(states: dict[str, Any]) -> None:
    """Put the process into these states."""
    for name, state in states.items():
        STATES[name][1](state)


@contextmanager
def at_home() -> Iterator[None]:
    """Whatever code of others runs inside leaves the process as it was, and sees no arguments of the command line,
    which are not meant for it."""
    before = now(list(STATES))
    sys.argv[1:] = []
    try:
        yield
    finally:
        bring_back(before)
