"""Mistakes of the user, said in one sentence with exit code 2 and no traceback."""

import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn

from solorl.terminal import paint


class UsageError(Exception):
    """What was wrong, what is allowed and the nearest valid name, in one sentence."""


def nearest(name: str, allowed: Iterable[str], n: int = 1) -> list[str]:
    """The `n` valid names most like `name` (at least 60 % alike, letter case ignored), best first; may be empty."""
    by_lower = {choice.lower(): choice for choice in allowed}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=n, cutoff=0.6)]


def did_you_mean(name: str, allowed: Iterable[str], n: int = 1) -> str:
    """`"; did you mean X?"` for the nearest names, or an empty string where nothing is near."""
    near = nearest(name, allowed, n)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def quit_with(error: UsageError | str) -> NoReturn:
    """Print the sentence on standard error and leave with exit code 2."""
    prefix = "" if str(error).startswith("solo") else f"{paint('error:', 'red', sys.stderr)} "
    print(f"{prefix}{error}", file=sys.stderr)
    raise SystemExit(2)
