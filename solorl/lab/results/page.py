"""The interactive page of `solo report`: one HTML file with its data, styles and script inside and no network use."""

import html
import json
from collections.abc import Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

from solorl.files import filled
from solorl.lab.results import comparison as cmp
from solorl.lab.results import curves as cv
from solorl.lab.results import text
from solorl.lab.results.result import rounded
from solorl.lab.results.statistics import Array

CHART = Path(__file__).with_name("chart")  # page.html; uPlot and the script that draws by it, which the site has, too
DIGITS = 5  # significant digits of the numbers in the charts


def page(comparison: cmp.Comparison, title: str, axis: str, problems: Sequence[str], command: str = "") -> str:
    """The page's text. `axis` is the one shown first, `problems` are sentences on what could not be read, `command`
    makes the page again."""
    notes = "".join(f"<li>{html.escape(note)}</li>\n" for note in [*text.notes_on(comparison), *problems])
    parts = {
        "TITLE": html.escape(title),
        "INTRO": "".join(f'<p class="verdict">{html.escape(line)}</p>\n' for line in text.verdicts(comparison)),
        "COMMAND": f"<p>Made by <code>{html.escape(command)}</code></p>" if command else "",
        "CAPTION": html.escape(f"{text.lines_caption(comparison)} {text.CURVE_CAPTION}"),
        "TABLES": _tables(comparison),
        "NOTES": f'<h2>Notes</h2>\n<ul class="quiet">\n{notes}</ul>\n' if notes else "",
        "DATA": as_json(_data(comparison, axis)),
    }
    return filled_in(parts)


def filled_in(parts: Mapping[str, str], script: str = "") -> str:
    """page.html with its parts, styles and scripts, and at their end one more `script`."""
    names = ("uplot.css", "page.css", "uplot.js", "chart.js")
    files = {name.upper().replace(".", "_"): (CHART / name).read_text(encoding="utf-8") for name in names}
    return filled(CHART / "page.html", {**parts, **files, "CHART_JS": files["CHART_JS"] + script})


# ---------------------------------------------------------------------- data of the charts
def as_json(data: Any) -> str:
    """Data of a chart as text in a page, where it cannot end the script that holds it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _data(comparison: cmp.Comparison, axis: str) -> dict[str, Any]:
    """A panel for each environment, one for all, and the performance profiles."""
    metrics, panels = cv.available(comparison), dict[str, dict[str, Any]]()
    for metric, each in product(metrics, cmp.AXES):
        found = cv.curves(comparison, metric, each), cv.total_curves(comparison, metric, each)
        for title, curves in cv.panels(comparison, *found):
            panels.setdefault(title, {})[f"{metric} {each}"] = lines(comparison, curves)
    if len(comparison.shared) > 1:
        panels["Fraction of runs above a score"] = {"score": lines(comparison, cv.profiles(comparison))}
    shown = [{"title": title, "lines": found} for title, found in panels.items()]
    axis = axis if any(f"{comparison.metric} {axis}" in found for found in panels.values()) else "steps"
    return {"methods": comparison.methods, "start": {"axis": axis, "metric": comparison.metric}, "panels": shown}


def lines(comparison: cmp.Comparison, curves: Mapping[str, cv.Curve], most: int | None = None) -> list[dict[str, Any]]:
    """The curves of a panel by their methods, each with those of its first `most` seeds."""
    return [line(comparison.methods.index(method), curve, most) for method, curve in curves.items()]


def line(method: int, curve: cv.Curve, most: int | None = None) -> dict[str, Any]:
    """The curve of a method by its number, with those of its first `most` seeds."""
    return {
        "m": method, "band": curve.kind, "x": _numbers(curve.x), "y": _numbers(curve.y),
        "lo": _numbers(curve.band[:, 0]), "hi": _numbers(curve.band[:, 1]),
        "seeds": {seed: _numbers(values) for seed, values in [*curve.seeds.items()][:most]},
    }  # fmt: skip


def _numbers(values: Array) -> list[float | None]:
    """Numbers for JSON, with DIGITS significant digits; None where there is none (NaN)."""
    return rounded(values.tolist(), DIGITS)


# ---------------------------------------------------------------------- tables
def _tables(comparison: cmp.Comparison) -> str:
    parts = []
    for title, caption, (head, rows) in text.tables(comparison):
        parts.append(f"<h2>{title}</h2>\n<p>{html.escape(caption)}</p>\n")
        parts.append(by_environment(head, rows) if title == "Results" else table(head, rows))
    return "".join(parts)


def by_environment(head: Sequence[str], rows: Sequence[Sequence[text.Cell]]) -> str:
    """The rows of one environment below a line with its name."""
    lines: list[str | Sequence[text.Cell]] = []
    for env, of_env in groupby(rows, key=lambda row: str(row[0])):
        lines += [env, *(row[1:] for row in of_env)]
    return table(head[1:], lines)


def _cell(cell: text.Cell) -> str:
    """A cell as HTML; a number stands above its interval."""
    if isinstance(cell, cmp.Estimate):
        value, _, interval = text.estimate(cell).partition(" ")
        return f"<b>{value}</b><small>{interval}</small>".replace("-", "\N{MINUS SIGN}")
    words = html.escape(text.words(cell))
    return f'<span class="names">{words}</span>' if isinstance(cell, list) and cell else words


def table(head: Sequence[str], rows: Sequence[str | Sequence[text.Cell]]) -> str:
    """A table that scrolls sideways on its own; a string instead of a row is a line across it."""
    lines = []
    for row in rows:
        if isinstance(row, str):
            lines.append(f'<tr class="group"><th colspan="{len(head)}" scope="rowgroup">{html.escape(row)}</th></tr>')
        else:
            cells = "".join(f"<td>{_cell(cell)}</td>" for cell in row)
            lines.append(f"<tr>{cells}</tr>")
    titles = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n'
