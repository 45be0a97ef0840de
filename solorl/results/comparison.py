"""What a report says: results grouped by environment and method, and their tables, verdicts and curves.

A method is a script with one of its variants. The score of a run is one number: with the metric "eval" the mean return
of its last greedy evaluation, with "train" the mean return of its last 100 training episodes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from solorl.errors import UsageError, did_you_mean
from solorl.results import lineage
from solorl.results import statistics as st
from solorl.results.reference_scores import reference
from solorl.results.result import Result

METRICS = {"eval": "greedy evaluation at the end of training", "train": "mean of the last 100 training episodes"}
AXES = {"steps": "global_step", "time": "wall_time"}
ALL = "all environments"  # the name of the aggregate among the curves
MOST_CURVES = 4  # methods in one picture
WINDOW = 10  # bins over which a training curve is averaged, 5 % of a run
ALPHA = 0.05  # a difference on one environment counts below this p-value
ENOUGH = 4  # runs from which on a bootstrap interval is shown; of fewer it is little more than their range
IGNORED = (
    "seed", "num_seeds", "device", "cuda", "env_workers", "threads", "torch_threads", "save_every", "save_model",
    "save_replay", "capture_video", "plot", "track", "wandb_project_name", "upload_model", "hf_entity",
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % bootstrap interval; of too few runs with their range, of a single run with neither."""

    value: float
    interval: tuple[float, float] | None
    range: tuple[float, float] | None = None  # the scores of the worst and of the best run


@dataclass(frozen=True)
class EnvRow:
    """One method on one environment."""

    env_id: str
    method: str
    seeds: int
    iqm: Estimate
    mean: Estimate
    median: Estimate
    steps: float  # median over runs of the environment steps trained
    seconds: float  # median over runs of the seconds of training
    sps: float | None  # median over runs of environment steps per second, of all that were trained at once
    together: int  # largest number of runs trained at once
    date: str  # day on which the oldest of the runs began, as 2026-11-24; "" if none tells


@dataclass(frozen=True)
class TotalRow:
    """One method over all environments, on normalised scores."""

    method: str
    runs: int
    iqm: Estimate
    median: Estimate
    mean: Estimate
    gap: Estimate


@dataclass(frozen=True)
class Pair:
    """Method x against method y on the environments that both have."""

    x: str
    y: str
    probability: Estimate  # P(X > Y)
    envs: int
    better: list[str]  # environments on which x is better, the p-value of the rank-sum test below ALPHA
    worse: list[str]
    few: bool  # too few runs for any such verdict


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


@dataclass
class Comparison:
    """Results of one report. Environments and methods keep the order in which they were found."""

    groups: dict[tuple[str, str], list[Result]]  # (environment, method) -> runs
    envs: list[str]
    methods: list[str]
    baseline: str
    opponents: dict[str, str]  # method -> what it is compared with
    metric: str
    scale: dict[str, tuple[float, float]]  # environment -> the scores that count as 0 and 1
    notes: list[str]

    @property
    def shared(self) -> list[str]:
        """The environments on which every method has runs; aggregates are over these."""
        return [env for env in self.envs if all((env, method) in self.groups for method in self.methods)]

    def scores(self, env_id: str, method: str, normalised: bool = False) -> st.Array:
        """The runs' scores: (num_runs,)."""
        raw = np.array([score(result, self.metric) for result in self.groups[env_id, method]], np.float64)
        return st.normalise(raw, *self.scale[env_id]) if normalised else raw


def score(result: Result, metric: str) -> float | None:
    """The score of a run, None if it has none of this metric."""
    if metric == "train":
        return result.last_100_episodes
    return result.eval["mean"][-1] if result.eval.get("mean") else None


# ---------------------------------------------------------------------- grouping
def only(results: Sequence[Result], env_ids: Sequence[str] = (), methods: Sequence[str] = ()) -> list[Result]:
    """The results on these environments by these methods, where any are named, in the order of the methods.

    Raises UsageError for a name that no result has, and where nothing is left.
    """
    for kind, names, known in (
        ("environment", env_ids, [result.env_id for result in results]),
        ("method", methods, [result.name for result in results]),
    ):
        for name in names:
            if name not in known:
                raise UsageError(f"no result is of {kind} {name}{_hint(name, list(dict.fromkeys(known)))}")
    kept = [result for result in results if not env_ids or result.env_id in env_ids]
    if methods:
        kept = [result for name in dict.fromkeys(methods) for result in kept if result.name == name]
    if not kept:
        raise UsageError(f"{_listed(methods)} has no result on {_listed(env_ids)}")
    return kept


def _hint(name: str, known: Sequence[str]) -> str:
    return did_you_mean(name, known) or f"; there is {_listed(known)}"


def compare(
    results: Sequence[Result],
    metric: str = "auto",
    baseline: str | None = None,
    normalise: bool = True,
    as_given: bool = False,
) -> Comparison:
    """Group results for a report.

    `metric` "auto" is "eval" where every run has evaluations, else "train". `normalise` False leaves scores as they
    are, for environments that share a scale. Without a `baseline` each method is compared with what it derives from,
    where headers tell (`as_given` does not ask them), else with the first. Raises UsageError where no run has the
    metric or no method is `baseline`.
    """
    notes: list[str] = []
    if metric == "auto":
        metric = "eval" if all(score(result, "eval") is not None for result in results) else "train"
        if metric == "train":
            notes.append("Not every run has greedy evaluations, so training episodes are compared.")
    kept = [result for result in results if score(result, metric) is not None]
    if not kept:
        raise UsageError(f"none of the {len(results)} results has {'evaluations' if metric == 'eval' else 'episodes'}")
    if len(kept) < len(results):
        left_out = [result.source for result in results if score(result, metric) is None]
        notes.append(f"Left out, because they have no {metric} scores: {_listed(left_out)}.")
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in kept:
        groups.setdefault((result.env_id, result.name), []).append(result)
    envs, methods = list(dict.fromkeys(env for env, _ in groups)), list(dict.fromkeys(name for _, name in groups))
    if baseline is not None and baseline not in methods:
        raise UsageError(f"there is no method {baseline}{_hint(baseline, methods)}")
    runs = {name: [run for run in kept if run.name == name] for name in methods}
    first = baseline or (methods[0] if as_given else lineage.origin(runs))
    methods = [first, *(method for method in methods if method != first)]
    opponents = lineage.opponents(runs, first, not (baseline or as_given))
    comparison = Comparison(groups, envs, methods, first, opponents, metric, {}, notes)
    comparison.scale = {env: _scale(comparison, env) if normalise else (0.0, 1.0) for env in envs}
    comparison.notes += _scale_notes(envs, normalise) + _group_notes(comparison)
    return comparison


def _scale(comparison: Comparison, env_id: str) -> tuple[float, float]:
    """The reference scores of an environment, or the lowest and highest score among the runs."""
    runs = [comparison.scores(env_id, method) for env, method in comparison.groups if env == env_id]
    return reference(env_id) or (float(np.min(np.concatenate(runs))), float(np.max(np.concatenate(runs))))


def _scale_notes(envs: Sequence[str], normalise: bool) -> list[str]:
    unknown = [env for env in envs if reference(env) is None]
    if not normalise or not unknown:
        return []
    return [f"No reference scores are known for {_listed(unknown)}: there 0 and 1 are the worst and best run compared."]


def _group_notes(comparison: Comparison) -> list[str]:
    """Sentences on runs that are compared although they are not alike."""
    notes = []
    for method in comparison.methods:
        runs = [run for (_, name), group in comparison.groups.items() if name == method for run in group]
        versions = {run.script_sha256 for run in runs if run.script_sha256}
        if len(versions) > 1:
            notes.append(f"The runs of {method} come from {len(versions)} versions of its script.")
        missing = [env for env in comparison.envs if (env, method) not in comparison.groups]
        if missing:
            notes.append(f"{method} has no runs on {_listed(missing)}; aggregates leave these environments out.")
    for (env_id, method), group in comparison.groups.items():
        names = sorted({name for run in group for name in run.args} - set(IGNORED))
        mixed = [name for name in names if len({repr(run.args.get(name)) for run in group if run.args}) > 1]
        if mixed:
            notes.append(f"The runs of {method} on {env_id} differ in {_listed(mixed)}.")
    late = [run.source for runs in comparison.groups.values() for run in _late(comparison, runs)]
    if late:
        notes.append(f"Not in the curves by time, because their first score came far later: {_listed(late)}.")
    for env_id in comparison.envs:
        runs_of = [group for (env, _), group in comparison.groups.items() if env == env_id]
        steps = [float(np.median([run.global_step for run in group])) for group in runs_of]
        if min(steps) < 0.95 * max(steps):
            notes.append(f"On {env_id} the methods trained for {min(steps):,.0f} to {max(steps):,.0f} steps.")
    runs = [run for group in comparison.groups.values() for run in group if run.machine]
    machines = {(str(run.machine.get("cpu")), str(run.machine.get("device"))) for run in runs}
    if len(machines) > 1:
        notes.append(f"The runs come from {len(machines)} kinds of machines, so their times do not compare.")
    return notes


def _listed(names: Sequence[str], most: int = 6) -> str:
    """Names in a sentence, the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# ---------------------------------------------------------------------- tables
def estimate(statistic: st.Statistic, scores: st.Scores) -> Estimate:
    """A statistic of scores with its interval; of too few runs of one environment with their range."""
    value = float(statistic(scores))
    if all(len(runs) >= ENOUGH for runs in scores):
        low, high = st.interval(statistic, scores)
        return Estimate(value, (float(low), float(high)))
    several = len(scores) == 1 and len(scores[0]) > 1
    return Estimate(value, None, (float(np.min(scores[0])), float(np.max(scores[0]))) if several else None)


def env_rows(comparison: Comparison, env_id: str | None = None) -> list[EnvRow]:
    """A row for each environment (or only `env_id`) and method that has runs."""
    return [
        _env_row(env, method, comparison.scores(env, method), comparison.groups[env, method])
        for env in (comparison.envs if env_id is None else [env_id])
        for method in comparison.methods
        if (env, method) in comparison.groups
    ]


def _env_row(env_id: str, method: str, scores: st.Array, runs: Sequence[Result]) -> EnvRow:
    speeds = [run.sps * run.together for run in runs if run.sps is not None]
    return EnvRow(
        env_id,
        method,
        seeds=len(runs),
        iqm=estimate(st.iqm, [scores]),
        mean=estimate(st.mean, [scores]),
        median=estimate(st.median_run, [scores]),
        steps=float(np.median([run.global_step for run in runs])),
        seconds=float(np.median([run.wall_time for run in runs])),
        sps=float(np.median(speeds)) if speeds else None,
        together=max(run.together for run in runs),
        date=min((run.started[:10] for run in runs if run.started), default=""),
    )


def total_rows(comparison: Comparison) -> list[TotalRow]:
    """A row for each method, over the environments that all have; empty where these are fewer than two."""
    if len(comparison.shared) < 2:
        return []
    rows = []
    for method in comparison.methods:
        scores = [comparison.scores(env, method, normalised=True) for env in comparison.shared]
        iqm, median, mean, gap = (estimate(f, scores) for f in (st.iqm, st.median, st.mean, st.optimality_gap))
        rows.append(TotalRow(method, sum(map(len, scores)), iqm, median, mean, gap))
    return rows


def pairs(comparison: Comparison) -> list[Pair]:
    """Every method except the baseline against its opponent."""
    found = [pair(comparison, method, comparison.opponents[method]) for method in comparison.methods[1:]]
    return [one for one in found if one is not None]


def pair(comparison: Comparison, x: str, y: str) -> Pair | None:
    """Method x against method y; None where they share no environment."""
    envs = [env for env in comparison.envs if {(env, x), (env, y)} <= comparison.groups.keys()]
    if not envs:
        return None
    of_x, of_y = ([comparison.scores(env, name) for env in envs] for name in (x, y))
    several = enough(list(zip(map(len, of_x), map(len, of_y), strict=True)))
    interval = tuple(st.improvement_interval(of_x, of_y).tolist()) if several else None
    probability = Estimate(float(st.probability_of_improvement(of_x, of_y)), interval)
    decided = {env: direction(a, b) for env, a, b in zip(envs, of_x, of_y, strict=True)}
    few = all(least_p(len(a), len(b)) >= ALPHA for a, b in zip(of_x, of_y, strict=True))
    better, worse = ([env for env, sign in decided.items() if sign == wanted] for wanted in (1, -1))
    return Pair(x, y, probability, len(envs), better, worse, few)


def direction(x: st.Array, y: st.Array) -> int:
    """1 where runs x are better than runs y, -1 where worse, 0 where the rank-sum test does not tell (p >= ALPHA)."""
    if st.mann_whitney(x, y) >= ALPHA:
        return 0
    return 1 if st.probability_of_improvement([x], [y]) > 0.5 else -1


def enough(runs: Sequence[tuple[int, int]]) -> bool:
    """Whether P(X > Y) of n against m runs on each environment gets an interval.

    From 3 runs each on, and where chance alone makes it 0 or 1 in less than ALPHA of cases: the bootstrap would say
    [0, 0] or [1, 1] even of two runs.
    """
    by_chance = 2 / math.prod(math.comb(n + m, n) for n, m in runs)
    return min(map(min, runs)) >= 3 and by_chance < ALPHA


def least_p(n: int, m: int) -> float:
    """The smallest p-value that n against m runs can give."""
    return st.mann_whitney(np.arange(n, dtype=float), np.arange(n, n + m, dtype=float))


# ---------------------------------------------------------------------- curves
def points(result: Result, metric: str, axis: str) -> tuple[st.Array, st.Array]:
    """A run's curve: positions (n,) and returns (n,). Training curves are means over the last WINDOW bins."""
    columns = result.eval if metric == "eval" else result.train
    if not columns:
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
    found = {}
    for (env, method), runs in comparison.groups.items():
        lines = {str(run.seed): points(run, metric, axis) for run in runs}
        lines = {seed: line for seed, line in lines.items() if len(line[0])}
        if not lines:
            continue
        end = None
        if axis == "time":
            latest = latest_start(lines.values())
            lines = {seed: line for seed, line in lines.items() if line[0][0] <= latest}
            end = most(x[-1] for x, _ in lines.values())
        if (curve := over_runs(lines, end)) is not None:
            found[env, method] = curve
    return found


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
    groups: dict[tuple[str, str], dict[str, dict[str, Curve]]] = {}
    for result in results:
        for kind, curve in _training(result).items():
            groups.setdefault((result.env_id, result.name), {}).setdefault(kind, {})[str(result.seed)] = curve
    found: dict[tuple[str, str], dict[str, Curve]] = {}
    for key, kinds in groups.items():
        for kind, of_seeds in kinds.items():
            lines = {seed: (curve.x, curve.y) for seed, curve in of_seeds.items()}
            one = next(iter(of_seeds.values())) if len(of_seeds) == 1 else over_runs(lines)
            if one is not None:
                found.setdefault(key, {})[kind] = one
    return found


def _training(result: Result) -> dict[str, Curve]:
    """The curves of one run."""
    tables = {"training": (result.train, "return"), "length": (result.train, "length")}
    tables |= {"evaluation": (result.eval, "mean"), **{kind: (of, "mean") for kind, of in result.critic.items()}}
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


def _late(comparison: Comparison, runs: Sequence[Result]) -> list[Result]:
    """The runs of a group that the curves by time leave out."""
    lines = [(run, points(run, comparison.metric, "time")) for run in runs]
    begun = [line for _, line in lines if len(line[0])]
    return [run for run, (x, _) in lines if len(x) and x[0] > latest_start(begun)]


def total_curves(comparison: Comparison, metric: str, axis: str) -> dict[str, Curve]:
    """Sample efficiency: the IQM of normalised scores over all shared environments, per method.

    On the positions that all runs of a method have; by time, as for single environments, until half of the runs have
    ended, on the environment on which they take longest.
    """
    if len(comparison.shared) < 2:
        return {}
    found, groups = {}, comparison.groups
    for method in comparison.methods:
        lines = {env: [points(run, metric, axis) for run in groups[env, method]] for env in comparison.shared}
        if not all(len(x) for of_env in lines.values() for x, _ in of_env):
            continue
        end = None
        if axis == "time":
            lines = {env: [line for line in of if line[0][0] <= latest_start(of)] for env, of in lines.items()}
            end = max(most(x[-1] for x, _ in of_env) for of_env in lines.values())
        grid = st.common_grid([x for of_env in lines.values() for x, _ in of_env], end=end)
        if len(grid):
            values = [_normalised(comparison, env, lines[env], grid) for env in comparison.shared]
            found[method] = banded(grid, values, {})
    return found


def _normalised(
    comparison: Comparison, env_id: str, lines: Sequence[tuple[st.Array, st.Array]], grid: st.Array
) -> st.Array:
    """The curves of one environment on a grid, on the scale from 0 to 1: (num_runs, p)."""
    values = st.on_grid(grid, [x for x, _ in lines], [y for _, y in lines])
    return st.normalise(values, *comparison.scale[env_id])


def profiles(comparison: Comparison) -> dict[str, Curve]:
    """The performance profile of every method over the shared environments: x are thresholds of normalised scores."""
    envs = comparison.shared
    if not envs:
        return {}
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


def available(comparison: Comparison) -> list[str]:
    """The metrics of which every environment has a curve, that of the tables first."""
    return [
        metric
        for metric in sorted(METRICS, key=lambda name: name != comparison.metric)
        if all(any(len(points(run, metric, "steps")[0]) for run in runs) for runs in comparison.groups.values())
    ]
