"""What `docs/results.py` makes of results: tables and pictures of curves for the pages."""

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote

import matplotlib
from PIL import Image

from solorl.cli import report
from solorl.lab.results import comparison as cmp
from solorl.lab.results import curves as cv
from solorl.lab.results import figures, text
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
        lines, rows = "", f"No table yet, there is only one run of each: {cmp.listed(comparison.methods)}."
    links = ", ".join(f"[{path}]({quote(path)})" for path in evidence)
    return f"\n{lines}{rows} Every run: {links}.\n"


def draw(comparison: cmp.Comparison, curves: Mapping[tuple[str, str], cv.Curve], path: Path, pdf: bool = False) -> None:
    """Draw learning curves by steps into the PNG `path`, which carries what it was drawn from, for `shows`; and into a
    PDF next to it."""
    assert curves, f"{path}: there is no curve to draw, the runs have no common steps"
    figure = figures.draw_curves(comparison, curves, {}, "steps")
    figure.savefig(path, metadata={"Software": None, "Source": fingerprint(curves)})
    figure.set_layout_engine("none")  # the places found for the PNG are those of the PDF, too
    if pdf:
        with matplotlib.rc_context({"pdf.fonttype": 42}):
            figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})


def shows(path: Path, curves: Mapping[tuple[str, str], cv.Curve]) -> bool:
    """Whether `draw` drew the picture `path` from the same curves; False where it cannot be read."""
    try:
        with Image.open(path) as picture:
            return getattr(picture, "text", {}).get("Source") == fingerprint(curves)
    except OSError:
        return False


def fingerprint(curves: Mapping[tuple[str, str], cv.Curve]) -> str:
    """A hash of names, lines, bands and ranges; the last bits, in which machines differ, do not count."""
    digest = hashlib.sha256()
    for (env, method), curve in curves.items():
        points = (f"{value:.8g}" for array in (curve.x, curve.y, curve.band) for value in array.flatten())
        kind = "range " if curve.kind == "range" else ""
        digest.update(f"{env} {method} {kind}{' '.join(points)}\n".encode())
    return digest.hexdigest()
