"""What `docs/results.py` makes of results: tables for the pages."""

import os
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote

from solorl.cli import report
from solorl.lab.results import comparison as cmp
from solorl.lab.results import text
from solorl.lab.results.read import read_all

ROOT = Path(__file__).resolve().parent.parent
read = cache(read_all)  # several tables are of the same folders


def table(page: str, words: str) -> str:
    """The verdicts and the table of environments that `solo report` makes of its command line `words`, run in the root
    of the repository, with links from `page` to the data."""
    args = report.parser().parse(shlex.split(words))
    results, problems = read(tuple(ROOT / path for path in args.paths))
    for problem in problems:
        print(f"{page}: {problem}")
    chosen = cmp.only(results, args.env_ids, args.methods)
    comparison = cmp.compare(chosen, "auto", args.baseline, as_given=bool(args.methods))
    return block(comparison, [Path(os.path.relpath(path, Path(page).parent)).as_posix() for path in args.paths])


def block(comparison: cmp.Comparison, evidence: Sequence[str]) -> str:
    """The verdicts, the table of environments, and links to the `evidence`."""
    lines = "".join(f"**{text.markdown(sentence)}**\n\n" for sentence in text.verdicts(comparison))
    rows = f"{text.table(*text.env_table(comparison), left=2)}\n{text.table_caption(comparison)}"
    if all(len(runs) == 1 for runs in comparison.groups.values()):  # chance alone would order them
        lines, rows = "", f"No row yet: one seed each of {cmp.listed(comparison.methods)}."
    links = ", ".join(f"[{path}]({quote(path)})" for path in evidence)
    return f"\n{lines}{rows} Every run: {links}.\n"
