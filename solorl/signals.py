"""Ctrl+C, SIGTERM and SIGHUP: who hears them, and for how long."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)


def listened() -> list[int]:
    """The signals that interrupt a command of many runs; those the user has switched off (`nohup`) stay so."""
    return [each for each in (*ENDING, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]


def ending() -> list[int]:
    """The signals that end a training behind its next save; a SIGHUP that is switched off (`nohup`) stays so."""
    return list({*ENDING, *listened()})


@contextmanager
def handled(handler: Callable[[int, Any], None], numbers: Iterable[int] | None = None) -> Iterator[None]:
    """The signals (default: those of `ending`) go to `handler(number, frame)` inside the block, and where they went
    before behind it."""
    before = {number: signal.signal(number, handler) for number in (ending() if numbers is None else numbers)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
