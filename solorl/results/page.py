"""The interactive page of `solo report`: one HTML file with its data, styles and script inside and no network use."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from solorl.results import comparison as cmp
from solorl.results import text

TEMPLATE = Path(__file__).with_name("page.html")
DIGITS = 5  # significant digits of the numbers in the charts


def page(comparison: cmp.Comparison, title: str, axis: str, problems: Sequence[str], command: str = "") -> str:
    """The page's text. `axis` is the one shown first, `problems` are sentences on what could not be read, `command`
    makes the page again."""
    parts = {
        "TITLE": html.escape(title),
        "INTRO": "".join(f'<p class="verdict">{html.escape(line)}</p>\n' for line in text.verdicts(comparison)),
        "COMMAND": f"<p>Made by <code>{html.escape(command)}</code></p>" if command else "",
        "CAPTION": html.escape(f"{text.lines_caption(comparison)} {text.CURVE_CAPTION}"),
        "TABLES": _tables(comparison),
        "NOTES": _notes([*comparison.notes, *problems]),
        "DATA": json.dumps(_data(comparison, axis), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    head, *pieces = TEMPLATE.read_text(encoding="utf-8").split("{{")
    return head + "".join(_filled(piece, parts) for piece in pieces)


def _filled(piece: str, parts: Mapping[str, str]) -> str:
    """The text after a "{{", its placeholder replaced."""
    name, _, rest = piece.partition("}}")
    return parts[name] + rest


# ---------------------------------------------------------------------- data of the charts
def _data(comparison: cmp.Comparison, axis: str) -> dict[str, Any]:
    metrics = cmp.available(comparison)
    return {
        "methods": comparison.methods,
        "start": {"axis": axis, "metric": metrics[0]},
        "curves": {m: {a: _panels(comparison, m, a) for a in cmp.AXES} for m in metrics},
        "profiles": _profile(comparison),
    }


def _panels(comparison: cmp.Comparison, metric: str, axis: str) -> list[dict[str, Any]]:
    """One panel per environment and one for all."""
    curves = cmp.curves(comparison, metric, axis)
    panels = []
    for env in comparison.envs:
        of_env = {method: curves[env, method] for method in comparison.methods if (env, method) in curves}
        panels.append({"title": env, "lines": _lines(comparison, of_env)})
    if totals := cmp.total_curves(comparison, metric, axis):
        panels.append({"title": f"{cmp.ALL}, normalised", "lines": _lines(comparison, totals)})
    return [panel for panel in panels if panel["lines"]]


def _profile(comparison: cmp.Comparison) -> list[dict[str, Any]]:
    if len(comparison.shared) < 2:
        return []
    return [{"title": "Fraction of runs above a score", "lines": _lines(comparison, cmp.profiles(comparison))}]


def _lines(comparison: cmp.Comparison, curves: Mapping[str, cmp.Curve]) -> list[dict[str, Any]]:
    return [
        {
            "m": comparison.methods.index(method),
            "x": _numbers(curve.x),
            "y": _numbers(curve.y),
            "lo": _numbers(curve.band[:, 0]),
            "hi": _numbers(curve.band[:, 1]),
            "band": curve.kind,
            "runs": {seed: _numbers(values) for seed, values in curve.seeds.items()},
        }
        for method, curve in curves.items()
    ]


def _numbers(values: Iterable[float]) -> list[float]:
    short = (float(f"{value:.{DIGITS}g}") for value in values)
    return [int(value) if value.is_integer() else value for value in short]


# ---------------------------------------------------------------------- tables
def _tables(comparison: cmp.Comparison) -> str:
    parts = [f"<h2>Results</h2>\n<p>{html.escape(text.table_caption(comparison))}</p>\n", _env_table(comparison)]
    if totals := cmp.total_rows(comparison):
        rows = [[row.method, *map(_cell, (row.iqm, row.median, row.mean, row.gap)), str(row.runs)] for row in totals]
        parts += [
            f"<h2>All environments</h2>\n<p>{html.escape(text.total_caption(comparison))}</p>\n",
            _table(["Method", "IQM", "Median", "Mean", "Optimality gap", "Runs"], rows),
        ]
    if pairs := cmp.pairs(comparison):
        rows = [
            [f"{pair.x} against {pair.y}", _cell(pair.probability), *map(_names, (pair.better, pair.worse))]
            for pair in pairs
        ]
        parts += [
            f"<h2>Comparisons</h2>\n<p>{html.escape(text.PAIR_CAPTION)}</p>\n",
            _table(["Comparison", "P(improvement)", "Better on", "Worse on"], rows),
        ]
    return "".join(parts)


def _names(names: Sequence[str]) -> str:
    """Names in a cell, as HTML."""
    return f'<span class="names">{html.escape(", ".join(names))}</span>' if names else "-"


def _env_table(comparison: cmp.Comparison) -> str:
    """All rows, those of one environment below a line with its name."""
    rows: list[str | list[str]] = []
    for env in comparison.envs:
        rows.append(env)
        rows += [
            [
                row.method,
                *map(_cell, (row.iqm, row.mean, row.median)),
                str(row.seeds),
                f"{row.steps:,.0f}",
                text.training_time(row),
                "-" if row.sps is None else f"{row.sps:,.0f}",
            ]
            for row in cmp.env_rows(comparison, env)
        ]
    return _table(["Method", "IQM", "Mean", "Median", "Seeds", "Steps", "Time", "Steps/s"], rows)


def _cell(estimate: cmp.Estimate) -> str:
    """A number above its interval, as HTML."""
    value, _, interval = text.estimate(estimate).partition(" ")
    return f"<b>{value}</b><small>{interval}</small>".replace("-", "\N{MINUS SIGN}")


def _table(head: Sequence[str], rows: Sequence[str | Sequence[str]]) -> str:
    """A table that scrolls sideways on its own; a string instead of a row is a line across it."""
    lines = []
    for row in rows:
        if isinstance(row, str):
            lines.append(f'<tr class="group"><th colspan="{len(head)}" scope="rowgroup">{html.escape(row)}</th></tr>')
        else:
            cells = [f"<td>{html.escape(row[0])}</td>", *(f"<td>{cell}</td>" for cell in row[1:])]
            lines.append(f"<tr>{''.join(cells)}</tr>")
    titles = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n'


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{html.escape(note)}</li>\n" for note in notes)
    return f'<h2>Notes</h2>\n<ul class="quiet">\n{items}</ul>\n'
