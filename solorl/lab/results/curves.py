"""The curves of a comparison: over runs of each environment and method, over environments, and of single trainings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from solorl.lab.results import statistics as st
from solorl.lab.results.comparison import ALL, AXES, ENOUGH, METRICS, Comparison, grouped
from solorl.lab.results.result import Result
from solorl.lab.results.run_folder import thinned

Line = tuple[st.Array, st.Array]  # positions and returns of a run
# What a critic learns -> the metrics that say it, of which a run has the first one that it logs.
CRITIC = {
    "loss": ("losses/qf_loss", "losses/td_loss", "losses/value_loss"),
    "value": ("losses/q_values", "losses/qf_values", "losses/qf1_values"),
}
MOST_CURVES = 4  # methods in one picture
WINDOW = 10  # bins over which a training curve is averaged, 5 % of a run


@dataclass(frozen=True)
class Curve:
    """The IQM over runs at common positions, with a band and the runs themselves."""

    x: st.Array  # (p,) environment steps, or seconds
    y: st.Array  # (p,)
    band: st.Array  # (p, 2)
    # what the band is: the bootstrap interval; the "range" of too few runs; of one run the standard "deviation" of
    # the episodes of an evaluation; "": there is none
    kind: str = "interval"
    seeds: dict[str, st.Array] = field(default_factory=dict)  # name of the run -> (p,)


def points(result: Result, metric: str, axis: str) -> tuple[st.Array, st.Array]:
    """A run's curve: positions (n,) and returns (n,). Training curves are means over the last WINDOW bins. Empty where
    there is none, as offline, where no episode is played in training, or by time of a table that has steps only."""
    columns = result.eval if metric == "eval" else result.train
    if not columns or not columns["global_step"] or (axis == "time" and not any(columns["wall_time"])):
        return np.empty(0), np.empty(0)
    x = np.asarray(columns[AXES[axis]], np.float64)
    if metric == "eval":
        return x, np.asarray(columns["mean"], np.float64)
    weight = np.asarray(columns["episodes"], np.float64)
    window = min(WINDOW, len(weight))
    total = np.convolve(np.asarray(columns["return"], np.float64) * weight, np.ones(window), "valid")
    return x[window - 1 :], total / np.convolve(weight, np.ones(window), "valid")


def curves(comparison: Comparison, metric: str, axis: str) -> dict[tuple[str, str], Curve]:
    """The learning curve of every environment and method; those without a common position are left out."""
    found = {key: curve_of(runs, metric, axis) for key, runs in comparison.groups.items()}
    return {key: curve for key, curve in found.items() if curve is not None}


def curve_of(runs: Sequence[Result], metric: str, axis: str) -> Curve | None:
    """The curve of runs of one method; None where they have no common position."""
    lines, end = in_time({str(run.seed): points(run, metric, axis) for run in runs}, axis)
    return over_runs(lines, end) if lines else None


def in_time(lines: Mapping[str, Line], axis: str) -> tuple[dict[str, Line], float | None]:
    """The lines of runs that have any; by time without those that begin late, and where half of them have ended."""
    begun = {seed: line for seed, line in lines.items() if len(line[0])}
    if axis != "time" or not begun:
        return begun, None
    latest = latest_start(begun.values())
    kept = {seed: line for seed, line in begun.items() if line[0][0] <= latest}
    return kept, most(x[-1] for x, _ in kept.values())


def over_runs(lines: Mapping[str, tuple[st.Array, st.Array]], end: float | None = None) -> Curve | None:
    """The curve of the lines of runs, at the positions that `common_grid` finds; None where these are none."""
    xs, ys = [x for x, _ in lines.values()], [y for _, y in lines.values()]
    grid = st.common_grid(xs, end=end)
    if not len(grid):
        return None
    values = st.on_grid(grid, xs, ys)
    return banded(grid, [values], dict(zip(lines, values, strict=True)))


def trainings(results: Sequence[Result]) -> dict[tuple[str, str], dict[str, Curve]]:
    """Environment and method -> what is to be seen of the trainings: "training" (returns), "length" (of these
    episodes), "evaluation", and "loss" and "value" of the critic, each over all seeds; of one run as they are."""
    found: dict[tuple[str, str], dict[str, Curve]] = {}
    for key, runs in grouped(results).items():
        drawn = {str(run.seed): _training(run) for run in runs}
        for kind in dict.fromkeys(kind for kinds in drawn.values() for kind in kinds):
            curves = {seed: kinds[kind] for seed, kinds in drawn.items() if kind in kinds}
            lines = {seed: (curve.x, curve.y) for seed, curve in curves.items()}
            if one := next(iter(curves.values())) if len(curves) == 1 else over_runs(lines):
                found.setdefault(key, {})[kind] = one
    return found


def _training(result: Result) -> dict[str, Curve]:
    """The curves of one run."""
    tables = {"training": (result.train, "return"), "length": (result.train, "length")}
    tables["evaluation"] = result.eval, "mean"
    for kind, names in CRITIC.items():
        for steps, values in [result.curves[name] for name in names if name in result.curves][:1]:
            rows = sorted(np.stack([steps, steps, values, values], axis=-1).tolist())
            tables[kind] = thinned(rows, result.global_step), "return"
    found = {}
    for kind, (columns, name) in tables.items():
        if columns.get(AXES["steps"]):
            x, y = (np.asarray(columns[each], np.float64) for each in (AXES["steps"], name))
            spread = np.asarray(columns["std"], np.float64) if kind == "evaluation" else np.zeros(len(x))
            band = np.stack([y - spread, y + spread], axis=-1)
            found[kind] = Curve(x, y, band, "deviation" if kind == "evaluation" else "")
    return found


def banded(x: st.Array, values: Sequence[st.Array], seeds: dict[str, st.Array]) -> Curve:
    """The curve of runs, (num_runs, p) of each environment, with the band that their number allows."""
    if all(len(runs) >= ENOUGH for runs in values):
        return Curve(x, *st.iqm_band(values), "interval", seeds)
    y, several = st.iqm([runs.T for runs in values]), len(values) == 1 and len(values[0]) > 1
    edges = [np.min(values[0], axis=0), np.max(values[0], axis=0)] if several else [y, y]
    return Curve(x, y, np.stack(edges, axis=-1), "range" if several else "", seeds)


def most(values: Iterable[float]) -> float:
    """What at least half of the values reach: of an even number the lower one of the two in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def latest_start(lines: Iterable[tuple[st.Array, st.Array]]) -> float:
    """The time after which a run that begins would hide too much of the curve of all.

    When most have begun, plus half of that time or a quarter of what they take from there to their end.
    """
    times = [x for x, _ in lines]
    begin, end = most(x[0] for x in times), most(x[-1] for x in times)
    return max(1.5 * begin, begin + (end - begin) / 4)


def total_curves(comparison: Comparison, metric: str, axis: str) -> dict[str, Curve]:
    """Sample efficiency: the IQM of normalised scores over all shared environments, per method.

    On the positions that all runs of a method have; by time, as for single environments, until half of the runs have
    ended, on the environment on which they take longest.
    """
    if len(comparison.shared) < 2:
        return {}
    found, groups = {}, comparison.groups
    for method in comparison.methods:
        lines = [{str(run.seed): points(run, metric, axis) for run in groups[env, method]} for env in comparison.shared]
        if not all(len(x) for of_env in lines for x, _ in of_env.values()):
            continue
        kept, ends = zip(*(in_time(of_env, axis) for of_env in lines), strict=True)
        by_env = [list(zip(*of_env.values(), strict=True)) for of_env in kept]  # positions, values
        grid = st.common_grid([x for xs, _ in by_env for x in xs], end=max(ends) if axis == "time" else None)
        if len(grid):
            scaled = zip(comparison.shared, by_env, strict=True)
            values = [st.normalise(st.on_grid(grid, *each), *comparison.scale[env]) for env, each in scaled]
            found[method] = banded(grid, values, {})
    return found


def panels(
    comparison: Comparison, curves: Mapping[tuple[str, str], Curve], totals: Mapping[str, Curve]
) -> list[tuple[str, dict[str, Curve]]]:
    """Title and curves, by method, of a panel for each environment that has any, and of one for all environments."""
    found = [(env, {m: curves[env, m] for m in comparison.methods if (env, m) in curves}) for env in comparison.envs]
    return [panel for panel in [*found, (f"{ALL}, normalised", dict(totals))] if panel[1]]


def profiles(comparison: Comparison) -> dict[str, Curve]:
    """The performance profile of every method over the shared environments, of which there must be one: x are
    thresholds of normalised scores."""
    envs = comparison.shared
    by_method = {m: [comparison.scores(env, m, normalised=True) for env in envs] for m in comparison.methods}
    everything = st.pooled([st.pooled(scores) for scores in by_method.values()])
    low, high = min(0.0, everything.min()), max(1.0, everything.max())
    margin = 0.02 * (high - low)  # below all runs the share is 1, above them 0
    thresholds = np.linspace(low - margin, high + margin, 101)
    found = {}
    for method, scores in by_method.items():
        y, several = st.profile(scores, thresholds), all(len(runs) >= ENOUGH for runs in scores)
        band = st.profile_band(scores, thresholds) if several else np.stack([y, y], axis=-1)
        found[method] = Curve(thresholds, y, band, "interval" if several else "")
    return found


def available(comparison: Comparison) -> list[str]:
    """The metrics of which every environment has a curve, that of the tables first."""
    return [
        metric
        for metric in sorted(METRICS, key=lambda name: name != comparison.metric)
        if all(any(len(points(run, metric, "steps")[0]) for run in runs) for runs in comparison.groups.values())
    ]


# ---------------------------------------------------------------------- in pictures
def numbered(path: Path, number: int) -> Path:
    """The file of picture `number`, counted from 0: X.png, X_2.png, X_3.png."""
    return path.with_name(f"{path.stem}_{number + 1}{path.suffix}") if number else path


def pictures(comparison: Comparison, curves: Mapping[tuple[str, str], Curve]) -> list[dict[tuple[str, str], Curve]]:
    """The curves of each picture: of the methods that `split` puts together, on the environments of those new in it."""
    found, seen = [], set[str]()
    for methods in split(comparison):
        envs = {env for env, method in curves if method in methods and method not in seen}
        found.append({(env, name): curve for (env, name), curve in curves.items() if env in envs and name in methods})
        seen.update(methods)
    return found


def split(comparison: Comparison) -> list[list[str]]:
    """The methods in groups of at most MOST_CURVES, each next to its opponent, which may be in several groups."""
    if len(comparison.methods) <= MOST_CURVES:
        return [comparison.methods]
    groups: list[list[str]] = [[]]
    for method in comparison.methods:
        envs = {env for env, name in comparison.groups if name == method}
        others = [comparison.opponents[method], *comparison.methods]
        rival = next(name for name in others if any((env, name) in comparison.groups for env in envs))
        wanted = list(dict.fromkeys([*groups[-1], rival, method]))
        if len(wanted) <= MOST_CURVES:
            groups[-1] = wanted
        else:
            groups.append(list(dict.fromkeys([rival, method])))
    return [[method for method in comparison.methods if method in group] for group in groups]
