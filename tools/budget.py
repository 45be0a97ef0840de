"""R3, the diff budget: how many lines a file may differ from the file, or the merge of the two, that its header names.

The table `algorithms/diff_budget.toml` is two plain tables, which review and git watch:

    [diff]              # most lines, added and removed, that a file may differ from its parent(s); multiples of 10
    "c51.py" = 80

    [long]              # why a file may have more lines of code than others (rule R1)
    "x.py" = "why"

`solo check --set-budget FILE` rounds the present diff up to 10 and writes it.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

from solorl.catalog.header import Script, find_named, parse_header, read_source
from solorl.errors import UsageError, refuse
from solorl.files import write
from solorl.scripts import BUDGETS, VALUE_COLUMN, as_typed, in_catalogue
from tools.source import count_changes, origin_of, parent_paths
from tools.square import square

STEP = 10  # budgets are multiples of it
MOSTLY = 2 / 3  # a file of which more than this is not in its parent names relatives instead
COMMENTS = {
    "diff": "Most lines, added and removed, that a file may differ from its parent(s): multiples of 10 (rule R3).\n"
    "# `solo check --set-budget FILE` writes them.",
    "long": "Files that may have more lines of code than others, and why (rule R1). Written by hand.",
}


def table_of(path: Path) -> Path:
    """The table that an algorithm file belongs to."""
    return path.resolve().parent.parent / BUDGETS


def read_table(table: Path) -> dict[str, dict[str, Any]]:
    """The tables `diff` and `long`, empty if there is no file. UsageError for one that cannot be read."""
    try:
        found = tomllib.loads(read_source(table)) if table.is_file() else {}
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{table} is not TOML: {error}") from None
    if unknown := set(found) - set(COMMENTS):
        raise UsageError(f"{table} has an entry {min(unknown)}; it may have [diff] and [long]")
    tables = {name: found.get(name, {}) for name in COMMENTS}
    for name, lines in tables["diff"].items():
        if type(lines) is not int or lines < 0 or lines % STEP:
            raise UsageError(f"{table}: the budget of {name} must be a multiple of {STEP}, but is {lines!r}")
    for name, why in tables["long"].items():
        refuse(not (isinstance(why, str) and why.strip()), f"{table}: [long] must say why {name} may be longer")
    return tables


def write_table(table: Path, tables: dict[str, dict[str, Any]]) -> None:
    """Write both tables, one line an entry, sorted by name."""
    parts = []
    for name, comment in COMMENTS.items():
        rows = [f'"{file}" = {json.dumps(value, ensure_ascii=False)}\n' for file, value in sorted(tables[name].items())]
        parts.append(f"# {comment}\n[{name}]\n{''.join(rows)}")
    write(table, "\n".join(parts).encode())


def may_be_long(path: Path) -> bool:
    """Whether the table says why this file, or what a user's own file comes from, may be longer than others."""
    origin = path if in_catalogue(path) else origin_of(parse_header(path))
    return origin is not None and origin.name in read_table(table_of(origin))["long"]


def counted(path: Path) -> list[str]:
    """The lines of a file that count in a diff: all except `Details`, which names another page in each file."""
    return [line for line in read_source(path).splitlines() if line[:VALUE_COLUMN].rstrip() != "Details"]


def measure(script: Script) -> tuple[int, str]:
    """Lines, added and removed, between a script and its parent or the merge of its two parents; and, for a merge,
    where they begin. UsageError where there is no such file."""
    for name in script.parents:
        refuse(not find_named(script, name), f"Differs names {name}, but there is no such file")
    first, *others = parent_paths(script)
    refuse(len(others) > 1, f"Differs names {len(others) + 1} parents, but may name two at most")
    if others:
        return square(script, first, others[0])
    return sum(count_changes(counted(first), counted(script.path))), ""


def parents_in_words(script: Script) -> str:
    """`a.py`, or `the merge of a.py and b.py`."""
    return script.parents[0] if len(script.parents) == 1 else f"the merge of {' and '.join(script.parents)}"


def fraction_added(script: Script, other: Path) -> float:
    """How much of a file another one does not have: lines added to it, divided by all lines of the file."""
    lines = counted(script.path)
    return count_changes(counted(other), lines)[0] / len(lines)


def bad_relatives(script: Script) -> str:
    """What is wrong with the relatives of a script, which has them in the place of a parent, or an empty string."""
    for name in script.relatives:
        path = find_named(script, name)
        if path is None:
            return f"Differs names {name}, but there is no such file"
        if in_catalogue(script.path) and fraction_added(script, path) <= MOSTLY:
            return f"has much of {name}, so that it is a parent and no relative: write `Differs   from {name}: ...`"
    return ""


def breach(script: Script) -> str:
    """What is wrong with the diff of a script that names a parent, or an empty string."""
    try:
        lines, where = measure(script)
    except UsageError as error:
        return str(error)
    if not in_catalogue(script.path):  # a budget is kept for what is shared
        return ""
    if len(script.parents) == 1 and fraction_added(script, parent_paths(script)[0]) > MOSTLY:
        name = script.parents[0]
        return f"has more than two thirds of its lines not from {name}; write `Differs   relatives {name}: ...`"
    budget = read_table(table_of(script.path))["diff"].get(script.path.name)
    if budget is not None and lines <= budget:
        return ""
    what = f"differs from {parents_in_words(script)} in {lines} lines" + (f" ({where})" if where else "")
    command = f"`solo check --set-budget {as_typed(script.path)}`"
    if budget is None:
        return f"{what} and has no budget; {command} sets it"
    return f"{what}, budget {budget}; make the diff smaller, or raise the budget with a reason: {command}"


def set_budget(script: Script) -> tuple[int, int]:
    """Make the present diff, rounded up to 10, the budget; return both. UsageError for a file without a parent."""
    name = script.path.name
    refuse(not in_catalogue(script.path), f"{name} is not in a folder of algorithms, so it needs no budget")
    refuse(not script.parents, f"{name} names no sibling that it differs from, so it has no budget")
    lines, table = measure(script)[0], table_of(script.path)
    tables = read_table(table)
    tables["diff"][name] = -(-lines // STEP) * STEP
    write_table(table, tables)
    return lines, tables["diff"][name]
