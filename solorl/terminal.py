"""Colours, and the line of progress, in a terminal; plain text everywhere else.

Text is coloured where it goes to a terminal. NO_COLOR (any value) switches that off, FORCE_COLOR on, also for a pipe;
a terminal that says TERM=dumb gets plain lines.
"""

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
WIPE = "\r\033[K"  # back to the start of the line, which is then empty
MIN_BAR, MAX_BAR = 6, 30  # characters
EVERY = 10.0  # seconds between lines of progress where no line can be renewed


def has_colors(file: Any) -> bool:
    """Whether what is written to `file` may be coloured."""
    return not os.environ.get("NO_COLOR") and (os.environ.get("FORCE_COLOR", "0") not in ("", "0") or renews(file))


def renews(file: Any) -> bool:
    """Whether a line written to `file` can be written again: a terminal that understands control sequences."""
    return bool(file and file.isatty()) and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, file: Any = None) -> str:
    """`text` in one of STYLES where `file` (default: standard output) has colours, else as it is."""
    return f"\033[{STYLES[style]}m{text}\033[0m" if has_colors(file or sys.stdout) else text


def plain(text: str) -> str:
    """A text for terminals and pages: characters that control them, or that cannot be written, as \\x1b. Whatever
    others have written goes through here; `quit_with`, `warn` and `aligned` do it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] | None = None) -> list[str]:
    """Rows, of which the first is the head, as lines of aligned columns. Those numbered in `right` stand at the right;
    without it those that have a number or a dash in any row."""
    rows = [list(map(plain, row)) for row in rows]
    columns = [[cell[:1] for cell in column] for column in zip(*rows[1:], strict=True)]
    if right is None:
        right = [i for i, column in enumerate(columns) if any(sign.isdigit() or sign == "-" for sign in column)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    cells = [[side(cell, w) for side, cell, w in zip(sides, row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def scores(*values: float) -> list[str]:
    """The numbers of one line as texts, with as many decimals as they deserve: 490.0 and 0.0, 5.0, 0.85."""
    texts = [f"{value:.2f}" for value in values]
    fine = max(map(abs, values), default=0.0) < 10 and not all(text.endswith("0") for text in texts)
    return texts if fine else [f"{value:.1f}" for value in values]


def live_line(share: float, facts: Sequence[str], columns: int, file: Any) -> str:
    """The first of `facts`, a bar that fills the room that is left, and the others: as many as fit into a line."""
    percent = f"{100 * share:3.0f} %"
    for count in range(len(facts), 0, -1):
        room = columns - 1 - len("  ".join([*facts[:count], percent])) - 1
        if room >= MIN_BAR:
            width = min(room, MAX_BAR)
            full = round(share * width)
            drawn = paint("━" * full, "green", file) + paint("─" * (width - full), "dim", file)
            return "  ".join([facts[0], f"{drawn} {percent}", *facts[1:count]])
    return f"{facts[0]}  {percent}"[: columns - 1]


class Progress:
    """The progress of a training: in a terminal one line that renews itself, elsewhere a new one every 10 seconds."""

    def __init__(self) -> None:
        self._printed = -math.inf

    def is_due(self) -> bool:
        """Whether it is time for the next line; true at most once for each."""
        now = time.perf_counter()
        due = now - self._printed >= (0.1 if renews(sys.stdout) else EVERY)
        self._printed = now if due else self._printed
        return due

    def show(
        self, step: int, total: int, episode: float | None, evaluation: float | None, sps: float, seeds: int = 1
    ) -> None:
        """Write the line: steps of each seed so far and in all, mean return of the last episodes and of the last
        evaluation (None: none yet), steps per second of all seeds."""
        left = f"{duration(max(0, total - step) / max(1.0, sps / seeds))} left"
        recent, score = ("-" if value is None else scores(value)[0] for value in (episode, evaluation))
        rate = f"{sps:,.0f} steps/s"
        together = f", {seeds} seeds together" if seeds > 1 else ""
        share = min(1.0, step / max(1, total))
        if renews(sys.stdout):
            width = len(f"{total:,}")
            facts = [f"step {step:>{width},}", f"return {recent:>6}", f"evaluation {score:>6}", left, rate + together]
            say(live_line(share, facts, shutil.get_terminal_size().columns, sys.stdout), sys.stdout, end="")
            return
        head = f"step {step:>10,} {100 * share:3.0f} %  return {recent:>8}  evaluation {score:>8}"
        say(f"{head}  {rate:>17}{together}  {left}", sys.stdout)


def say(text: str, file: Any, end: str = "\n") -> None:
    """Print at once, in place of a line of progress that stands in the terminal; where that fails (`| head`, a closed
    terminal, a full disk), the training continues without."""
    try:
        print(f"{WIPE * renews(file)}{text}", end=end, file=file, flush=True)
    except UnicodeEncodeError:
        say(text.encode("ascii", "replace").decode(), file, end)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
    except RuntimeError:  # a signal has come in the middle of another print
        with contextlib.suppress(OSError):
            os.write(file.fileno(), (text + end).encode(errors="replace"))


def warn(sentence: str) -> None:
    """One line on standard error, in place of the progress line, which comes again."""
    say(f"{paint('warning:', 'yellow', sys.stderr)} {plain(sentence)}", sys.stderr)
