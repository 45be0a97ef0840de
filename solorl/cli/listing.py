"""`solo list`: the algorithms, one line each."""

import json
import shutil
import sys
from collections.abc import Sequence

from solorl.catalog import Script, scripts
from solorl.cli import Parser
from solorl.errors import UsageError, did_you_mean

COLUMNS = ("name", "family", "spaces", "framework", "paper", "title")


def as_row(script: Script) -> tuple[str, ...]:
    """The cells of one line; of the paper only authors and year (`--json` has all of it)."""
    paper = script.paper.split(", http")[0]
    return script.name, script.family, script.spaces, script.framework, paper, script.title


def as_dict(script: Script) -> dict[str, object]:
    """All that is known of a script, for `--json`."""
    known = {name: getattr(script, name) for name in (*COLUMNS, "run", "parent", "not_for", "lines")}
    return known | {"path": str(script.path)}


def table(rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Rows as aligned columns; each line cut to `width` if one is given."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if width is None:
        return "\n".join(lines)
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines)


def main(argv: Sequence[str]) -> int:
    """Print the algorithms; UsageError for an unknown family."""
    parser = Parser("list", "Show the algorithms: name, family, spaces, framework, paper and title.")
    parser.add_argument("--family", metavar="F", help="only this family")
    parser.add_argument("--json", action="store_true", help="all that the headers say, for programs")
    args = parser.parse(argv)
    found = scripts()
    families = sorted({script.family for script in found})
    if args.family and args.family not in families:
        hint = did_you_mean(args.family, families) or f"; there are {', '.join(families)}"
        raise UsageError(f"there is no family {args.family}{hint}")
    found = [script for script in found if args.family in (None, script.family)]
    if args.json:
        print(json.dumps([as_dict(script) for script in found], indent=2))
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(table([COLUMNS, *map(as_row, found)], width))
    return 0
