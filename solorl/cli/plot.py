"""`solo plot`: one picture of trainings, also while they run."""

from collections.abc import Sequence
from pathlib import Path

from solorl.cli import Parser
from solorl.cli.report import PATHS_HELP
from solorl.errors import refuse
from solorl.files import shown


def main(argv: Sequence[str]) -> int:
    """Draw trainings; UsageError where there is nothing to draw."""
    p = Parser("plot", "Draw trainings: returns and the length of episodes above, what the critic learns below.")
    p.add_argument("paths", metavar="PATH", nargs="+", type=Path, help=PATHS_HELP.partition(";")[0])
    p.add_argument("--out", metavar="FILE", type=Path, default=Path("curve.png"), help="PNG or SVG (curve.png)")
    args = p.parse(argv)
    refuse(args.out.suffix not in (".png", ".svg"), f"solo plot: --out must end in .png or .svg, not {args.out}")
    from solorl.lab.results import curves as cv  # here, because it loads NumPy
    from solorl.lab.results import figures
    from solorl.lab.results.read import read_all

    results, problems = read_all(args.paths, unfinished=True)
    trainings = cv.trainings(results)
    refuse(not trainings, f"nothing to draw: {'; '.join(problems[:3]) or 'no episode has ended yet'}")
    for problem in problems:
        print(f"note: {problem}")
    figures.write_trainings(trainings, args.out)
    print(f"picture {shown(args.out)}")
    return 0
