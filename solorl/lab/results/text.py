"""The words, numbers and Markdown of `solo report`."""

import html
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from solorl.lab.results import comparison as cmp
from solorl.lab.results import curves as cv
from solorl.lab.results import statistics as st
from solorl.lab.results.reference_scores import reference
from solorl.lab.results.result import Result
from solorl.terminal import duration

# Arguments in which the runs of a method may differ without a note.
IGNORED = """seed num_seeds device cuda env_workers async_envs threads torch_threads save_every save_model save_replay
record capture_video plot track wandb_project_name upload_model hf_entity""".split()

Cell = str | cmp.Estimate | list[str]
Table = tuple[list[str], list[list[Cell]]]  # head and rows


# ---------------------------------------------------------------------- numbers
def number(value: float, like: float | None = None) -> str:
    """A score with as many decimals as its size (or that of `like`) deserves: 12,345, 490.0, 1.02.

    The last bits, in which machines differ, do not decide how it is rounded.
    """
    size = abs(value if like is None else like)
    decimals = 0 if size >= 1000 else 1 if size >= 10 else 2
    return format(float(f"{value:.10g}"), f"z,.{decimals}f")


def estimate(one: cmp.Estimate) -> str:
    """`490.0 [485.1, 495.2]` with an interval, `490.0 (480.0 to 500.0)` with a range, else `490.0`; with the same
    decimals in all numbers."""
    numbers = (one.value, *(one.interval or one.range or ()))
    value, *ends = (number(x, like=max(map(abs, numbers))) for x in numbers)
    if not ends:
        return value
    return f"{value} [{', '.join(ends)}]" if one.interval else f"{value} ({' to '.join(ends)})"


# ---------------------------------------------------------------------- sentences
def verdicts(comparison: cmp.Comparison) -> list[str]:
    """One sentence for each method against its opponent, and one for all of which nothing can be said."""
    one_each, together = list[cmp.Pair](), dict[str, cmp.Pair]()
    for pair in comparison.pairs:
        if pair.few and not pair.probability.interval:
            before = together.get(pair.y)
            together[pair.y] = replace(pair, x=f"{before.x}, {pair.x}") if before else pair
        else:
            one_each.append(pair)
    return [verdict(pair) for pair in [*one_each, *together.values()]]


def verdict(one: cmp.Pair) -> str:
    """What a pair of methods shows, in one plain sentence."""
    chance, interval = "", " or for an interval"
    if one.probability.interval:
        chance = "; P(improvement) = {:.2f} [{:.2f}, {:.2f}]".format(one.probability.value, *one.probability.interval)
        interval = ""
    if one.few:
        too_few = f"too few runs to decide on any environment{interval} (at least 4 each are needed, or 3 and 5)"
        return f"{one.x} against {one.y}: {too_few}{chance}."
    if one.envs == 1:
        word = "better than" if one.better else "worse than" if one.worse else "not distinguishable from"
        return f"{one.x} is {word} {one.y}{chance}."
    undecided = one.envs - len(one.better) - len(one.worse)
    return (
        f"{one.x} against {one.y}: better on {len(one.better)} of {one.envs} environments, worse on {len(one.worse)}, "
        f"undecided on {undecided}{chance}."
    )


def table_caption(comparison: cmp.Comparison) -> str:
    """What the numbers of the first table are."""
    several = any(run.together > 1 for runs in comparison.groups.values() for run in runs)
    return (
        f"The score of a run is its {cmp.METRICS[comparison.metric]}. Interquartile mean (IQM), mean and median over "
        f"runs{brackets(comparison)}; steps, time and speed are medians over runs, the time with evaluations and "
        "checkpoints, the speed without"
        + ("; of seeds trained at once, time and speed are those of all of them" if several else "")
        + "; the date is that of the oldest run"
        + ("; success rate and cost are means over runs of their last evaluation." if _declared(comparison) else ".")
    )


def brackets(comparison: cmp.Comparison) -> str:
    """What stands in brackets after the numbers of a table, to follow their names in a sentence."""
    sizes = [len(runs) for runs in comparison.groups.values()]
    single = " (a single run has none)" if 1 in sizes else ""
    interval = f", each with its 95 % bootstrap interval{single}" if max(sizes) >= cmp.ENOUGH else ""
    return interval + (f", {RANGE}, in round brackets" if ranges(comparison) else "")


def ranges(comparison: cmp.Comparison) -> bool:
    """Whether the range of runs stands anywhere in the place of an interval."""
    return any(1 < len(runs) < cmp.ENOUGH for runs in comparison.groups.values())


def lines_caption(comparison: cmp.Comparison) -> str:
    """What lines and bands of a picture are."""
    few = f"; {RANGE}" if ranges(comparison) else ""
    return f"Lines are interquartile means over runs, bands their 95 % bootstrap intervals{few}."


def total_caption(comparison: cmp.Comparison) -> str:
    """What the numbers of the second table are."""
    scaled = any(scale != (0, 1) for scale in comparison.scale.values())
    own = cmp.listed([env for env in comparison.shared if reference(env) is None])
    zero_one = "0 is random play and 1 is solved" + f", on {own} the worst and the best run compared" * bool(own)
    scale = f"Scores are normalised: {zero_one}. " if scaled else "Scores are not normalised. "
    few = any(len(comparison.groups[env, m]) < cmp.ENOUGH for env in comparison.shared for m in comparison.methods)
    return (
        f"{scale}Over {len(comparison.shared)} environments, intervals from the bootstrap stratified by environment"
        f"{f', none with fewer than {cmp.ENOUGH} runs on one' if few else ''}. "
        "The median is that of the environments' means; the optimality gap (less is better) is the mean distance to 1."
    )


RANGE = f"of fewer than {cmp.ENOUGH} runs the range, smallest to largest"
CURVE_CAPTION = (
    "A curve begins where its last run has a first evaluation and ends where its shortest run ends; by time, "
    "where half of its runs have ended: those that ended before keep their score, and a run whose first evaluation is "
    "far later than that of most is left out. Training curves are means over the last 5 % of a run."
)
PAIR_CAPTION = (
    "Better or worse on an environment: the two-sided rank-sum test gives p < 0.05 (not corrected for the number "
    "of environments). P(improvement): the chance that a run of the one method beats a run of the other, averaged over "
    "environments, ties counted half; none where there are too few runs for its interval."
)
SOURCE = "Statistics after Agarwal et al. 2021, https://arxiv.org/abs/2108.13264."


# ---------------------------------------------------------------------- Markdown
def markdown(text: str) -> str:
    """A text as Markdown shows it: a name can be neither HTML nor a link."""
    return html.escape(text, quote=False).replace("](", "]\\(")


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are aligned left, the others right."""
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    escaped = [[markdown(words(cell)).replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, rule, *escaped])


def summary(comparison: cmp.Comparison) -> list[list[str]]:
    """The rows, the head first, of the short table that the command prints."""
    rows, totals = env_table(comparison)[1], total_table(comparison)[1]
    short = [[*row[:5], row[6], *row[10:]] for row in rows]
    short += [[cmp.ALL, *row[:3], row[4], *["-"] * (len(short[0]) - 5)] for row in totals]
    intervals = any(isinstance(row[3], cmp.Estimate) and row[3].interval for row in rows)
    means = " ".join(["[95 %]"] * intervals + ["(range)"] * ranges(comparison))
    head = ["environment", "method", "runs", f"IQM {means}".strip(), f"mean {means}".strip(), "steps"]
    head += map(str.lower, env_table(comparison)[0][10:])
    return [head, *(list(map(words, row)) for row in short)]


def _declared(comparison: cmp.Comparison) -> dict[str, None]:
    """The names of what any run declares."""
    return dict.fromkeys(name for runs in comparison.groups.values() for run in runs for name in run.declared)


def env_table(comparison: cmp.Comparison) -> Table:
    """A row for each environment and method, at its end the mean over runs of what their environments declare."""
    named = _declared(comparison)

    def declared(row: cmp.EnvRow, name: str) -> str:
        found = [run.declared[name] for run in comparison.groups[row.env_id, row.method] if name in run.declared]
        return number(float(np.mean(found))) if found else "-"

    rows: list[list[Cell]] = [
        [row.env_id, row.method, str(row.seeds), row.iqm, row.mean, row.median, f"{row.steps:,.0f}",
         duration(row.seconds) + f" ({row.together} at once)" * (row.together > 1) if row.seconds else "-",
         "-" if row.sps is None else f"{row.sps:,.0f}", row.date or "-",
         *(declared(row, name) for name in named)]
        for row in cmp.env_rows(comparison)
    ]  # fmt: skip
    head = ["Environment", "Method", "Seeds", "IQM", "Mean", "Median", "Steps", "Time", "Steps/s", "Date"]
    return head + [name.replace("_", " ").capitalize() for name in named], rows


def total_table(comparison: cmp.Comparison) -> Table:
    """A row for each method, over the environments that all have; none where these are fewer than two."""
    rows: list[list[Cell]] = []
    methods = comparison.methods if len(comparison.shared) > 1 else []
    for method in methods:
        scores = [comparison.scores(env, method, normalised=True) for env in comparison.shared]
        means = [cmp.estimate(f, scores) for f in (st.iqm, st.median, st.mean, st.optimality_gap)]
        rows.append([method, str(sum(map(len, scores))), *means])
    return ["Method", "Runs", "IQM", "Median", "Mean", "Optimality gap"], rows


def pair_table(comparison: cmp.Comparison) -> Table:
    """A row for each method against its opponent."""
    rows: list[list[Cell]] = []
    for one in comparison.pairs:
        chance = one.probability if one.probability.interval else "-"
        rows.append([f"{one.x} against {one.y}", chance, one.better, one.worse])
    return ["Comparison", "P(improvement)", "Better on", "Worse on"], rows


def tables(comparison: cmp.Comparison) -> list[tuple[str, str, Table]]:
    """Title, caption and content of the tables of a report that have rows."""
    found = [
        ("Results", table_caption(comparison), env_table(comparison)),
        ("All environments", total_caption(comparison), total_table(comparison)),
        ("Comparisons", PAIR_CAPTION, pair_table(comparison)),
    ]
    return [(title, caption, content) for title, caption, content in found if content[1]]


def words(cell: Cell) -> str:
    """A cell as text."""
    if isinstance(cell, cmp.Estimate):
        return estimate(cell)
    return cell if isinstance(cell, str) else ", ".join(cell) or "-"


def report(
    comparison: cmp.Comparison, title: str, pictures: Sequence[str], problems: Sequence[str], command: str = ""
) -> str:
    """The whole report.md; `pictures` are names of files next to it, `command` makes them again."""
    parts = [f"# {markdown(title)}\n"]
    parts += [f"**{markdown(sentence)}**\n" for sentence in verdicts(comparison)]
    for name, caption, content in tables(comparison):
        parts += [f"## {name}\n", f"{caption}\n", table(*content, left=2 if name == "Results" else 1)]
    if pictures:
        parts += ["## Curves\n", f"{lines_caption(comparison)} {CURVE_CAPTION} In report.html they are interactive.\n"]
        parts += [f"![{Path(name).stem.replace('_', ', by ', 1).replace('_', ' ')}]({name})\n" for name in pictures]
    if notes := [*notes_on(comparison), *problems]:
        parts += ["## Notes\n", "".join(f"- {markdown(note)}\n" for note in notes)]
    again = f"\nTables and pictures, also as LaTeX and PDF, are made by `{markdown(command)}`." if command else ""
    return "\n".join([*parts, f"{SOURCE}{again}\n"])


# ---------------------------------------------------------------------- notes
def notes_on(comparison: cmp.Comparison) -> list[str]:
    """What must be known of a comparison: its own notes, and sentences on runs that are not alike."""
    notes = list(comparison.notes)
    for method in comparison.methods:
        runs = [run for (_, name), group in comparison.groups.items() if name == method for run in group]
        if len(versions := {run.script_sha256 for run in runs if run.script_sha256}) > 1:
            notes.append(f"The runs of {method} come from {len(versions)} versions of its script.")
        if missing := [env for env in comparison.envs if (env, method) not in comparison.groups]:
            notes.append(f"{method} has no runs on {cmp.listed(missing)}; aggregates leave these environments out.")
    for (env_id, method), group in comparison.groups.items():
        names = sorted({name for run in group for name in run.args} - set(IGNORED))
        if mixed := [name for name in names if len({repr(run.args.get(name)) for run in group if run.args}) > 1]:
            notes.append(f"The runs of {method} on {env_id} differ in {cmp.listed(mixed)}.")
    if late := [run.source for runs in comparison.groups.values() for run in _late(comparison, runs)]:
        notes.append(f"Not in the curves by time, because their first score came far later: {cmp.listed(late)}.")
    for env_id in comparison.envs:
        runs_of = [group for (env, _), group in comparison.groups.items() if env == env_id]
        steps = [float(np.median([run.global_step for run in group])) for group in runs_of]
        if min(steps) < 0.95 * max(steps):
            notes.append(f"On {env_id} the methods trained for {min(steps):,.0f} to {max(steps):,.0f} steps.")
    runs = [run for group in comparison.groups.values() for run in group if run.machine]
    if len(machines := {(str(run.machine.get("cpu")), str(run.machine.get("device"))) for run in runs}) > 1:
        notes.append(f"The runs come from {len(machines)} kinds of machines, so their times do not compare.")
    return notes


def _late(comparison: cmp.Comparison, runs: Sequence[Result]) -> list[Result]:
    """The runs of a group that the curves by time leave out."""
    lines = [(run, cv.points(run, comparison.metric, "time")) for run in runs]
    begun = [line for _, line in lines if len(line[0])]
    return [run for run, (x, _) in lines if len(x) and x[0] > cv.latest_start(begun)]
