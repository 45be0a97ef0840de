"""Ctrl+C, SIGTERM and SIGHUP: who hears them, and for how long."""

import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)


def listened() -> list[int]:
    """The signals that interrupt a command of many runs; those the user has switched off (`nohup`) stay so."""
    return [each for each in (*ENDING, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]


def ending() -> list[int]:
    """The signals that end a training after its next save; a SIGHUP that is switched off (`nohup`) stays so."""
    return list({*ENDING, *listened()})


def below_a_worker() -> bool:
    """Whether a worker of a study looks after this training. Schedulers send a signal to all processes of a job, and
    the worker passes it on, so a second one means no more than the first. A worker ends a training by SIGKILL."""
    return "SOLORL_WORKER" in os.environ


def in_a_shell() -> bool:
    """Whether somebody keeps typing in this process when the script has ended (`python -i`, IPython)."""
    return bool(sys.flags.inspect) or hasattr(sys, "ps1")


def listen(handler: Callable[[int, Any], None], numbers: Iterable[int]) -> dict[int, Any]:
    """Send the signals to `handler(number, frame)`; returns where they went before."""
    return {number: signal.signal(number, handler) for number in numbers}


def restore(before: dict[int, Any]) -> None:
    """Send the signals where they went before a `listen`."""
    for number, handler in before.items():
        signal.signal(number, handler)
