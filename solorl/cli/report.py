"""`solo report`: tables, curves, comparisons and verdicts from finished runs, and what a paper needs of them."""

import shlex
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Sequence
from pathlib import Path

from solorl.cli import Parser
from solorl.errors import denied, refuse
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
    return p


def main(argv: Sequence[str]) -> int:
    """Report on runs; UsageError where nothing can be read or the flags do not fit together."""
    args = parser().parse(argv)
    refuse(not args.paths, "solo report needs run folders or results, as in `solo report runs/`")
    from solorl.lab.results import comparison as cmp  # here, because it loads NumPy
    from solorl.lab.results.read import read_all

    results, problems = read_all(args.paths)
    refuse(not results, f"nothing to report: {'; '.join(problems[:3])}")
    results = cmp.only(results, args.env_ids, args.methods)
    comparison = cmp.compare(results, args.metric or "auto", args.baseline, args.normalise, bool(args.methods))
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
