"""What names and texts may be that come from a command line, a suite or a plan."""

from collections.abc import Collection, Iterable
from reprlib import repr as shown  # cuts what is long
from typing import Any

from solorl.errors import UsageError, hint

LONGEST = 1000  # characters of a text


def check_name(name: str, what: str) -> None:
    """UsageError where a folder cannot have this name."""
    if not name.strip(".") or "/" in name or "\0" in name or len(name.encode()) > 255:
        raise UsageError(f"{what} must be the name of a folder, not {shown(name)}")


def check_texts(value: Any, where: str) -> None:
    """UsageError for a text in a tree of lists and tables that cannot be printed or has more than 1,000 characters."""
    if isinstance(value, str) and not value.isprintable():
        raise UsageError(f"{where}: a text must not have control characters and their like, unlike {shown(value)}")
    if isinstance(value, str) and len(value) > LONGEST:
        raise UsageError(f"{where}: a text must have at most {LONGEST:,} characters, unlike {shown(value)}")
    if isinstance(value, dict):
        value = [*value, *value.values()]
    for part in value if isinstance(value, list) else []:
        check_texts(part, where)


def refuse_unknown(table: Iterable[str], known: Collection[str], where: str) -> None:
    """UsageError for a key that is not known."""
    if wrong := [key for key in table if key not in known]:
        name = wrong[0] if len(wrong[0]) < 40 else shown(wrong[0])
        raise UsageError(f"{where} has the unknown key {name}{hint(wrong[0], known, 'it may have')}")
