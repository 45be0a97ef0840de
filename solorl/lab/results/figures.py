"""The figures of a report as PNG, SVG and PDF: learning curves by steps and by time, and performance profiles; and
pictures of trainings.

Colours are those of Okabe and Ito, which people with a colour vision deficiency tell apart, too; from the eighth method
on they repeat with dashed lines.
"""

from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from solorl.files import write
from solorl.lab.results import comparison as cmp
from solorl.lab.results import curves as cv

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676")
DASHES = ("-", "--", ":", "-.")
AXIS_LABELS = {"steps": "steps", "time": "time of training"}
BANDS = f"\nbands: range of the runs where there are fewer than {cmp.ENOUGH}, else 95 % interval"
PANEL = (3.9, 2.9)  # inches
SINGLE = (6.0, 3.6)  # one alone
TRAINING = (6.8, 6.4)  # of a training
NAME = (0.075, 0.7)  # inches that a name takes in the legend: each character, and the line before it
COLUMNS = 3  # panels side by side
# What a picture of a training shows -> its words in the legend, its number in COLOURS if there is one method, its look.
SHOWN: dict[str, tuple[str, int, dict[str, Any]]] = {
    "length": ("episode length", 6, {}),
    "training": ("training episodes", 1, {"linestyle": ":", "linewidth": 1.2}),
    "evaluation": ("greedy evaluation", 0, {}),
    "loss": ("critic loss", 4, {}),
    "value": ("mean Q", 2, {}),
}
PANELS = (  # the lines and their axis, the area and its axis on the right
    (("training", "evaluation"), "episodic return", "length", "episode length (agent steps)"),
    (("value",), "mean Q", "loss", "critic loss"),
)


def write_figures(comparison: cmp.Comparison, folder: Path) -> list[Path]:
    """Write all figures of a report into `folder`; returns the PNGs. UsageError where one cannot be written."""
    written = []
    groups = cv.split(comparison)
    for axis in cmp.AXES:
        curves = cv.curves(comparison, comparison.metric, axis)
        totals = cv.total_curves(comparison, comparison.metric, axis)
        for i, part in enumerate(cv.pictures(comparison, curves)):
            if part:
                all_of = {method: totals[method] for method in groups[i] if method in totals}
                path = cv.numbered(folder / f"curves_{axis}", i)
                written.append(save(draw_curves(comparison, part, all_of, axis), path))
    if len(comparison.shared) > 1:
        profiles = cv.profiles(comparison)
        for i, methods in enumerate(groups):
            figure = draw_profiles(comparison, {method: profiles[method] for method in methods})
            written.append(save(figure, cv.numbered(folder / "profiles", i)))
    return written


def style(number: int) -> dict[str, Any]:
    """Colour and dash pattern of method `number`."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def draw_curves(
    comparison: cmp.Comparison, curves: Mapping[tuple[str, str], cv.Curve], totals: Mapping[str, cv.Curve], axis: str
) -> Figure:
    """One panel per environment and, where there are `totals`, one for all: IQM over runs, the band its interval."""
    panels = cv.panels(comparison, curves, totals)
    figure, axes = grid(len(panels))
    for place, (env, lines) in zip(axes, panels, strict=True):
        unit, name = time_unit(max(curve.x[-1] for curve in lines.values())) if axis == "time" else (1, "")
        for method, curve in lines.items():
            _draw(place, curve, style(comparison.methods.index(method)), unit)
        place.set_title(env, fontsize=10, parse_math=False)
        numbers_below(place, None if axis == "steps" else f"{{x:g}} {name}")
    bands = BANDS if any(curve.kind == "range" for _, lines in panels for curve in lines.values()) else ""
    figure.supxlabel(AXIS_LABELS[axis] + bands, fontsize=10)
    figure.supylabel("return of the greedy policy" if comparison.metric == "eval" else "training return", fontsize=10)
    _legend(figure, comparison.methods, {name for _, lines in panels for name in lines})
    return figure


def draw_profiles(comparison: cmp.Comparison, profiles: Mapping[str, cv.Curve]) -> Figure:
    """The fraction of runs above each normalised score, with pointwise intervals."""
    figure, (place, *_) = grid(1)
    for method, curve in profiles.items():
        _draw(place, curve, style(comparison.methods.index(method)))
    place.set(xlabel="normalised score s", ylabel="fraction of runs with a score above s", ylim=(-0.02, 1.02))
    _legend(figure, comparison.methods, profiles)
    return figure


def write_histogram(returns: Mapping[str, Any], path: Path) -> None:
    """Draw how often the returns of data sets occur into `path`, a PNG or SVG. UsageError."""
    figure = Figure(figsize=SINGLE, dpi=130, layout="constrained")
    axes = figure.subplots()
    bins = np.histogram_bin_edges(np.concatenate(list(returns.values())), 40).tolist()
    for i, (name, values) in enumerate(returns.items()):
        axes.hist(values, bins, label=name, alpha=0.6, color=COLOURS[i % len(COLOURS)])
    axes.set(xlabel="return of an episode", ylabel="episodes")
    for text in axes.legend().get_texts():
        text.set_parse_math(False)
    save(figure, path, (path.suffix[1:],))


def write_trainings(trainings: Mapping[tuple[str, str], Mapping[str, cv.Curve]], path: Path) -> None:
    """Draw what `trainings` of curves.py found into `path`, a PNG or SVG: for each environment two panels, returns with
    the length of episodes, and what the critic learns. A colour is a method, or, where there is only one, what is
    shown. UsageError where `path` cannot be written."""
    envs, methods = (list(dict.fromkeys(names)) for names in zip(*trainings, strict=True))
    width = TRAINING[0] * len(envs)  # a PNG has 65,535 pixels at most
    figure = Figure(figsize=(width, TRAINING[1]), dpi=min(130, 60_000 / width), layout="constrained")
    for env, places in zip(envs, figure.subplots(2, len(envs), squeeze=False, sharex="col").T, strict=True):
        curves = {method: trainings[env, method] for method in methods if (env, method) in trainings}
        for place, panel in zip(places, PANELS, strict=True):
            _panel(place, curves, methods, *panel)
        legend = places[0].get_legend()
        legend.set_title(env if len(methods) > 1 else f"{env}: {methods[0]}")
        legend.get_title().set_parse_math(False)
    kinds = {curve.kind for curves in trainings.values() for curve in curves.values()}
    figure.supxlabel(AXIS_LABELS["steps"] + (BANDS if kinds & {"range", "interval"} else ""), fontsize=10)
    if len(methods) > 1:
        _legend(figure, methods, methods)
    save(figure, path, (path.suffix[1:],))


def _panel(
    place: Any, curves: Mapping[str, Mapping[str, cv.Curve]], methods: Sequence[str], lines: Sequence[str],
    left: str, area: str, right: str,
) -> None:  # fmt: skip
    """The lines of each method on the left axis, an area on the right one, and a legend above."""
    filled: dict[str, Any] = {"alpha": 0.2 if len(methods) == 1 else 0.1, "linewidth": 0}
    second = place.twinx()
    handles: dict[str, Any] = {}
    for kind in (area, *lines):
        words, number, look = SHOWN[kind]
        for method in (name for name in curves if kind in curves[name]):
            curve = curves[method][kind]
            own = style(methods.index(method) if len(methods) > 1 else number) | look
            colour = own["color"] if len(methods) == 1 else COLOURS[-1]
            if kind == area:
                second.fill_between(curve.x, 0, curve.y, color=own["color"], **filled)
                handles[words] = matplotlib.patches.Patch(color=colour, **filled)
            else:
                _draw(place, curve, own)
                name = words + (" ± standard deviation" if curve.kind == "deviation" else "")
                handles[name] = matplotlib.lines.Line2D([], [], **{**own, "color": colour})
    for axes, name in ((place, left), (second, right)):
        _plain(axes)
        axes.set_ylabel(name, fontsize=10)
        axes.yaxis.set_visible(axes.has_data())
    second.grid(visible=False)
    second.set_ylim(bottom=0)
    place.set_zorder(second.get_zorder() + 1)  # the lines are above the area
    place.patch.set_visible(False)
    numbers_below(place)
    place.legend(
        list(handles.values()), list(handles), loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False,
        fontsize=9, title_fontsize=10, alignment="left",
    )  # fmt: skip


def grid(panels: int) -> tuple[Figure, Sequence[Any]]:
    """A figure of `panels` panels, at most COLUMNS side by side."""
    width, height = SINGLE if panels == 1 else PANEL
    columns = 2 if panels == 4 else min(panels, COLUMNS)
    rows = -(-panels // columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.5), dpi=130, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for place in axes[panels:]:
        place.remove()
    for place in axes[:panels]:
        _plain(place)
    return figure, list(axes[:panels])


def _plain(place: Any) -> None:
    """The frame of a panel."""
    place.spines[["top", "right"]].set_visible(False)
    place.grid(alpha=0.25, linewidth=0.6)
    place.tick_params(labelsize=9)


def numbers_below(place: Any, form: str | None = None) -> None:
    """The numbers below a panel, from 0 on; without a form as 250k and 1.5M."""
    place.xaxis.set_major_formatter(form or matplotlib.ticker.EngFormatter(sep=""))
    place.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    place.set_xlim(left=0)


def _draw(place: Any, curve: cv.Curve, look: Mapping[str, Any], unit: float = 1) -> None:
    """A curve and its band, positions divided by `unit`."""
    x = curve.x / unit
    place.fill_between(x, curve.band[:, 0], curve.band[:, 1], color=look["color"], alpha=0.18, linewidth=0)
    place.plot(x, curve.y, **{"linewidth": 1.6, "marker": "o" if len(curve.x) == 1 else "", **look})


def _legend(figure: Figure, methods: Sequence[str], shown: Collection[str]) -> None:
    numbers = [number for number, method in enumerate(methods) if method in shown]
    lines = [matplotlib.lines.Line2D([], [], linewidth=2, **style(number)) for number in numbers]
    methods = [methods[number] for number in numbers]
    width = NAME[0] * max(map(len, methods)) + NAME[1]
    columns = min(len(methods), 5, max(1, int(figure.get_figwidth() / width)))
    legend = figure.legend(lines, methods, loc="outside upper center", ncols=columns, frameon=False, fontsize=10)
    for name in legend.get_texts():
        name.set_parse_math(False)  # a name with $ is not a formula


def time_unit(seconds: float) -> tuple[int, str]:
    """The unit for times up to `seconds`: its length in seconds and its sign."""
    return (1, "s") if seconds < 180 else (60, "min") if seconds < 3 * 3600 else (3600, "h")


def save(figure: Figure, path: Path, kinds: Sequence[str] = ("png", "svg", "pdf")) -> Path:
    """Write `path`.png, .svg and .pdf; the same figure gives the same bytes."""
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "solorl", "pdf.fonttype": 42}):  # TrueType, which publishers ask for
        FigureCanvasAgg(figure)
        for kind in kinds:
            data = BytesIO()
            figure.savefig(data, format=kind, metadata=metadata[kind])
            write(path.with_suffix(f".{kind}"), data.getvalue())
            figure.set_layout_engine("none")  # the places found for the one fit the other, too
    return path.with_suffix(".png")
