"""R3, the diff budget: how many lines a file may differ from the sibling it names in its header.

The table `algorithms/diff_budget.toml` holds one line for each file that is not a root:

    "ppo_continuous_action.py" = { lines = 74, differs = "1a2b3c4d", seal = "5e6f7a8b" }

`lines` is the budget: added and removed lines together. `differs` is a hash of the text after `Differs` in the header
at the time the budget was set: a larger diff needs a header that says what is new. `seal` is a hash of both, so that a
number raised by hand is noticed. `solo check --set-budget FILE` writes the line, and refuses to raise a number while
the header still says the same. A file that needs more than the usual number of lines says why: `demanding = "..."`.
"""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solorl.catalog.header import Script, parse_header, read_source
from solorl.errors import UsageError
from solorl.scripts import BUDGETS, as_typed, in_catalogue, script_paths

TABLE = BUDGETS
COMMENT = """\
# Rule R3: how many lines each file may differ from the sibling named in its header, and which files are demanding.
# Written by `solo check --set-budget FILE`; CONTRIBUTING.md explains it. `demanding = "why"` may be added by hand.
"""


def digest(text: str) -> str:
    """The first 8 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def opcodes(a: Sequence[str], b: Sequence[str]) -> Sequence[tuple[str, int, int, int, int]]:
    """difflib's line diff of two texts."""
    return difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()


def count_changes(a: Sequence[str], b: Sequence[str]) -> tuple[int, int]:
    """Lines added to and removed from `a` to get `b`."""
    changed = [code for code in opcodes(a, b) if code[0] != "equal"]
    return sum(j2 - j1 for *_, j1, j2 in changed), sum(i2 - i1 for _, i1, i2, _, _ in changed)


def table_of(path: Path) -> Path:
    """The table that an algorithm file belongs to."""
    return path.resolve().parent.parent / TABLE


def read_table(table: Path) -> dict[str, dict[str, Any]]:
    """File name -> entry; empty if there is no table. UsageError if it cannot be read."""
    if not table.is_file():
        return {}
    try:
        return tomllib.loads(read_source(table))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{table} is not TOML: {error}") from None


def entry_of(path: Path) -> dict[str, Any]:
    """The table's entry of an algorithm file; empty if it has none."""
    return read_table(table_of(path)).get(path.name, {})


def is_demanding(path: Path) -> bool:
    """Whether the table says why this file, or what a user's own file comes from, may be longer than others."""
    origin = path if in_catalogue(path) else origin_of(parse_header(path))
    return bool(origin and entry_of(origin).get("demanding"))


def parent_path(script: Script) -> Path | None:
    """The file a script differs from: in its own folder, or else in another family; the parent of a user's own file is
    in the catalogue of this installation, or else next to it."""
    folder = script.path.resolve().parent
    known = {path.name: path for path in script_paths().values()}
    if script.parent in known and not in_catalogue(script.path):
        return known[script.parent]
    found = [folder / str(script.parent), *sorted(folder.parent.glob(f"*/{script.parent}"))]
    return next((path for path in found if path.is_file()), None)


def origin_of(script: Script, seen: frozenset[Path] = frozenset()) -> Path | None:
    """The file of the catalogue that a user's own file comes from: the one its line Run names where it is a copy, else
    its nearest ancestor there; None without one."""
    words, paths = script.run.split(), script_paths()
    if words[:2] == ["solo", "train"] and words[2:] and words[2].removesuffix(".py") in paths:
        return paths[words[2].removesuffix(".py")]
    parent = parent_path(script) if script.parent else None
    if parent is None or parent in seen or parent in paths.values():
        return parent if parent not in seen else None
    return origin_of(parse_header(parent), seen | {parent})


def measure(script: Script) -> int | None:
    """Added and removed lines between a script and its parent; None if there is no such parent."""
    parent = parent_path(script)
    if parent is None:
        return None
    return sum(count_changes(read_source(parent).splitlines(), read_source(script.path).splitlines()))


def seal(lines: int, differs: str) -> str:
    """Binds a budget to the header it was set for."""
    return digest(f"{lines} {differs}")


def breach(script: Script) -> str:
    """What is wrong with the diff of a script that names a parent, or an empty string."""
    lines, entry = measure(script), entry_of(script.path)
    command = f"`solo check --set-budget {as_typed(script.path)}`"
    if lines is None:
        return f"Differs names {script.parent}, but there is no such file"
    if not in_catalogue(script.path):  # a budget is kept for what is shared
        return ""
    if "lines" not in entry:
        return f"differs from {script.parent} in {lines} lines and has no budget; {command} sets it"
    if entry.get("seal") != seal(entry["lines"], entry.get("differs", "")):
        return f"its line in {TABLE} was changed by hand; restore it, then change the line Differs and run {command}"
    if entry["differs"] != digest(script.fields["Differs"]):
        return f"its line Differs has changed since the budget was set; {command} sets it again"
    if lines > entry["lines"]:
        more = f"differs from {script.parent} in {lines} lines, budget {entry['lines']}"
        return f"{more}; make the diff smaller, or say in this line what is new and run {command}"
    return ""


def set_budget(script: Script) -> int:
    """Make the present diff the budget and return it; UsageError for a root and for a rise that the header hides."""
    if not in_catalogue(script.path):
        raise UsageError(f"{script.path.name} is not in a folder of algorithms, so it needs no budget")
    lines, table = measure(script), table_of(script.path)
    if script.parent is None or lines is None:
        raise UsageError(f"{script.path.name} names no sibling that it differs from, so it has no budget")
    entries = read_table(table)
    entry, differs = entries.get(script.path.name, {}), digest(script.fields["Differs"])
    if "lines" in entry:
        if entry.get("seal") != seal(entry["lines"], entry.get("differs", "")):
            raise UsageError(f"the line of {script.path.name} in {table} was changed by hand; restore it first")
        if entry["differs"] == differs and lines > entry["lines"]:
            what = f"{script.path.name} differs from {script.parent} in {lines} lines, budget {entry['lines']}"
            raise UsageError(f"{what}; say in its line Differs what is new, then set the budget")
    entries[script.path.name] = entry | {"lines": lines, "differs": differs, "seal": seal(lines, differs)}
    write_table(table, entries)
    return lines


def write_table(table: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Write the table, one line an entry, sorted by name."""
    from solorl.files import write

    rows = []
    for name, entry in sorted(entries.items()):
        values = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entry.items())
        rows.append(f'"{name}" = {{ {values} }}\n')
    write(table, (COMMENT + "".join(rows)).encode())
