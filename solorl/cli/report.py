"""`solo report`: tables, curves, comparisons and verdicts from finished runs, and what a paper needs of them."""

import os
import re
import shlex
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Sequence
from pathlib import Path

from solorl.cli import Parser
from solorl.errors import UsageError, denied
from solorl.files import shown, write
from solorl.terminal import aligned

PATHS_HELP = """result files, run folders, TensorBoard folders of CleanRL or Stable-Baselines3, and folders of these;
scores as rliable takes them, in a file .npz; a table of environment, method, seed, step, return, in a file .csv"""


def parser() -> Parser:
    """The command line of `solo report`."""
    about = "Compare finished runs: tables, curves and verdicts, as Markdown, HTML, LaTeX, PNG, SVG and PDF."
    p = Parser("report", about)
    add, compared = p.add_argument, "(default: of each the file that its header names, else the first)"
    add("paths", metavar="PATH", nargs="*", type=Path, help=PATHS_HELP)
    add("--out", metavar="DIR", type=Path, help="where to write (default: report)")
    add("--metric", choices=["eval", "train"], help="greedy evaluations (default) or training episodes")
    add("--x", choices=["steps", "time"], default="steps", help="axis shown first (default: steps)")
    add("--baseline", metavar="NAME", help=f"method that all except twins in JAX are compared with {compared}")
    add("--env-ids", metavar="ID", nargs="+", default=[], help="only these environments")
    add("--methods", metavar="NAME", nargs="+", default=[], help="only these methods, in this order")
    scores = "aggregate normalised scores (default), or scores as they are"
    add("--normalise", action=BooleanOptionalAction, default=True, help=scores)
    add("--title", metavar="T", default="Results", help="title of the report")
    add("--markdown", metavar="FILE", type=Path, help="only put the table between two markers in this file")
    add("--marker", metavar="NAME", help="the markers are the lines <!-- NAME --> and <!-- /NAME -->")
    add("--check", action="store_true", help="write nothing; exit code 1 if the text in FILE is stale")
    return p


def check_flags(args: Namespace) -> None:
    """Refuse combinations of flags that mean nothing."""
    for wrong, why in (
        (bool(args.markdown) != bool(args.marker), "--markdown FILE and --marker NAME go together"),
        (args.check and not args.markdown, "--check needs --markdown FILE and --marker NAME"),
    ):
        if wrong:
            raise UsageError(f"solo report: {why}")
    if not args.paths:
        raise UsageError("solo report needs run folders or results, as in `solo report runs/`")


def main(argv: Sequence[str]) -> int:
    """Report on runs; UsageError where nothing can be read or the flags do not fit together."""
    args = parser().parse(argv)
    check_flags(args)
    from solorl.lab.results import comparison as cmp  # here, because it loads NumPy
    from solorl.lab.results import text
    from solorl.lab.results.read import read_all

    results, problems = read_all(args.paths)
    if not results:
        raise UsageError(f"nothing to report: {'; '.join(problems[:3])}")
    results = cmp.only(results, args.env_ids, args.methods)
    comparison = cmp.compare(results, args.metric or "auto", args.baseline, args.normalise, bool(args.methods))
    if args.markdown:
        for problem in problems:
            print(f"note: {problem}")
        evidence = [Path(os.path.relpath(path, args.markdown.parent)).as_posix() for path in args.paths]
        return embed(args.markdown, args.marker, text.block(comparison, evidence), args.check)
    out = args.out or Path("report")
    write_report(comparison, out, args, problems, shlex.join(["solo", "report", *argv]))
    print_summary(comparison, problems, out)
    return 0


def write_report(comparison, out: Path, args: Namespace, problems: Sequence[str], command: str) -> None:
    """Write report.md, report.html, the figures and what a paper needs into `out`; UsageError where that fails."""
    from solorl.lab.results import figures, paper, text
    from solorl.lab.results import page as report_page

    with denied(f"{out} cannot be written"):
        out.mkdir(parents=True, exist_ok=True)
        pictures = [path.name for path in figures.write_figures(comparison, out)]
        problems = [*problems, *paper.write_all(comparison, out)]
    pictures.sort(key=lambda name: not name.startswith(f"curves_{args.x}"))
    write(out / "report.md", text.report(comparison, args.title, pictures, problems, command).encode())
    write(out / "report.html", report_page.page(comparison, args.title, args.x, problems, command).encode())


def print_summary(comparison, problems: Sequence[str], out: Path) -> None:
    """The table, the verdicts, what was left out, and where the report is."""
    from solorl.lab.results import text

    print("\n".join(aligned(text.summary(comparison))))
    for sentence in text.verdicts(comparison):
        print(f"\n{sentence}")
    for note in [*text.notes_on(comparison), *problems]:
        print(f"note: {note}")
    print(f"\nreport {(out / 'report.html').resolve().as_uri()} and {shown(out / 'report.md')}")


def embed(path: Path, marker: str, block: str, check: bool) -> int:
    """Put `block` between `<!-- marker -->` and `<!-- /marker -->` in a file, or only check that it is there.

    Returns 1 where `check` finds another text. Raises UsageError where the file or its markers are missing.
    """
    try:
        before = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
    if len(pattern.findall(before)) != 1 or before.count(begin) != 1:
        raise UsageError(f"{path} must have the line {begin} once and {end} below it")
    after = pattern.sub(lambda match: f"{match[1]}\n{block}\n{match[2]}", before)
    if check:
        print(f"{path}: {marker} is {'up to date' if after == before else 'stale'}")
        return int(after != before)
    if after != before:
        write(path, after.encode())
    print(f"{path}: {marker} {'updated' if after != before else 'was up to date'}")
    return 0
