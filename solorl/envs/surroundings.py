"""What of the process the code of an environment may change: how it is read and set, for those who keep it in order."""

import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from solorl import signals


def random_states() -> dict[str, Any]:
    """The states of the global generators of Python, NumPy and torch (its CUDA devices included)."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    if torch := sys.modules.get("torch"):
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put every global generator into the state that `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "torch" in states and (torch := sys.modules.get("torch")):
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["cuda"])


def seeded(seed: int) -> dict[str, Any]:
    """Such states by a seed; the global generators stay as they are."""
    short = int(np.random.SeedSequence(seed).generate_state(1)[0])  # NumPy and torch read the last 32 bits only
    states: dict[str, Any] = {"python": random.Random(seed).getstate()}
    states["numpy"] = np.random.RandomState(short).get_state()
    if torch := sys.modules.get("torch"):
        states["torch"] = torch.Generator().manual_seed(short).get_state()
    return states


def plain(states: Mapping[str, Any]) -> Any:
    """Such states in Python's own types, which can be compared; without CUDA's."""
    arrays = [np.asarray(each).tolist() for each in states["numpy"]]
    return states["python"], arrays, states["torch"].tolist() if "torch" in states else None


def _folder() -> str:
    """The current folder; empty where it is gone. (`Path.cwd` takes three times as long.)"""
    with suppress(FileNotFoundError):
        return os.getcwd()  # noqa: PTH109
    return ""


def _set_folder(path: str) -> None:
    with suppress(FileNotFoundError):  # it is gone
        os.chdir(path)


def _dtype() -> str:
    torch = sys.modules.get("torch")
    return str(torch.get_default_dtype()) if torch else "torch.float32"  # as it will be


def _set_dtype(name: str) -> None:
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(getattr(torch, name.removeprefix("torch.")))


def _listen(handlers: Mapping[int, Any]) -> None:
    signals.restore({each: to for each, to in handlers.items() if signal.getsignal(each) != to})


def _set_argv(words: list[str]) -> None:
    sys.argv[:] = words


# What it is called -> how to read it, how to set it. Of the first three an environment may have some of its own.
RANDOM = "the global random generators"
STATES: dict[str, tuple[Any, Any]] = {
    RANDOM: (random_states, set_random_states),
    "the current folder": (_folder, _set_folder),
    "torch's default type": (_dtype, _set_dtype),
    "signal handlers": (lambda: {each: signal.getsignal(each) for each in signals.ENDING}, _listen),
    "sys.argv": (lambda: [*sys.argv], _set_argv),
}
OWN, LIGHT = [*STATES][:3], [*STATES][1:]  # random states are too large to be looked at in each reset


def now(names: Iterable[str]) -> dict[str, Any]:
    """These states of the process."""
    return {name: STATES[name][0]() for name in names}


def bring_back(states: Mapping[str, Any]) -> None:
    """Put the process into these states."""
    for name, state in states.items():
        STATES[name][1](state)


@contextmanager
def undisturbed(names: Iterable[str] = (RANDOM,)) -> Iterator[None]:
    """Whatever runs inside leaves these states of the process, by default the random ones, as they were."""
    before = now(names)
    try:
        yield
    finally:
        bring_back(before)


@contextmanager
def at_home() -> Iterator[None]:
    """Whatever code of others runs inside leaves the process as it was, and sees no flags of the command line."""
    with undisturbed(STATES):
        del sys.argv[1:]
        yield
