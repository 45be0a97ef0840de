"""What a report says: results grouped by environment and method, and their tables, verdicts and curves.

A method is a script with one of its variants. The score of a run is one number: with the metric "eval" the mean return
of its last greedy evaluation, with "train" the mean return of its last 100 training episodes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from solorl.errors import UsageError, hint, refuse
from solorl.lab.results import lineage
from solorl.lab.results import statistics as st
from solorl.lab.results.reference_scores import reference
from solorl.lab.results.result import Result

METRICS = {"eval": "greedy evaluation at the end of training", "train": "mean of the last 100 training episodes"}
AXES = {"steps": "global_step", "time": "wall_time"}
ALL = "all environments"  # the name of the aggregate among the curves
ALPHA = 0.05  # a difference on one environment counts below this p-value
ENOUGH = 4  # runs from which on a bootstrap interval is shown; of fewer it is little more than their range


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
class Pair:
    """Method x against method y on the environments that both have."""

    x: str
    y: str
    probability: Estimate  # P(X > Y)
    envs: int
    better: list[str]  # environments on which x is better, the p-value of the rank-sum test below ALPHA
    worse: list[str]
    few: bool  # too few runs for any such verdict


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

    @cached_property
    def pairs(self) -> list[Pair]:
        """Every method except the baseline against its opponent."""
        found = (pair(self, method, self.opponents[method]) for method in self.methods[1:])
        return [one for one in found if one is not None]

    def scores(self, env_id: str, method: str, normalised: bool = False) -> st.Array:
        """The runs' scores: (num_runs,)."""
        raw = np.array([score(result, self.metric) for result in self.groups[env_id, method]], np.float64)
        return st.normalise(raw, *self.scale[env_id]) if normalised else raw


def score(result: Result, metric: str) -> float | None:
    """The score of a run, None if it has none of this metric."""
    return result.last_100_episodes if metric == "train" else [None, *result.eval.get("mean", ())][-1]


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
                raise UsageError(f"no result is of {kind} {name}{hint(name, list(dict.fromkeys(known)), 'there is')}")
    kept = [result for result in results if not env_ids or result.env_id in env_ids]
    if methods:
        kept = [result for name in dict.fromkeys(methods) for result in kept if result.name == name]
    refuse(not kept, f"{listed(methods)} has no result on {listed(env_ids)}")
    return kept


def compare(
    results: Sequence[Result],
    metric: str = "auto",
    baseline: str | None = None,
    normalise: bool = True,
    as_given: bool = False,
) -> Comparison:
    """Group results for a report.

    `metric` "auto" is "eval" where every run that has a score has evaluations, else "train". `normalise` False leaves
    scores as they are, for environments that share a scale. Without a `baseline` each method is compared with what it
    derives from, where headers tell (`as_given` does not ask them), else with the first. Raises UsageError where no run
    has the metric or no method is `baseline`.
    """
    notes: list[str] = []
    if metric == "auto":
        metric = "train" if None in [score(r, "eval") for r in results if score(r, "train") is not None] else "eval"
        if metric == "train":
            notes.append("Not every run has greedy evaluations, so training episodes are compared.")
    kept = [result for result in results if score(result, metric) is not None]
    refuse(not kept, f"none of the {len(results)} results has {'evaluations' if metric == 'eval' else 'episodes'}")
    if left_out := [result.source for result in results if score(result, metric) is None]:
        notes.append(f"Left out, because they have no {metric} scores: {listed(left_out)}.")
    groups = grouped(kept)
    envs, methods = list(dict.fromkeys(env for env, _ in groups)), list(dict.fromkeys(name for _, name in groups))
    if baseline is not None and baseline not in methods:
        raise UsageError(f"there is no method {baseline}{hint(baseline, methods, 'there is')}")
    runs = {name: [run for run in kept if run.name == name] for name in methods}
    first = baseline or (methods[0] if as_given else lineage.origin(runs))
    methods = [first, *(method for method in methods if method != first)]
    opponents = lineage.opponents(runs, first, not (baseline or as_given))
    comparison = Comparison(groups, envs, methods, first, opponents, metric, {}, notes)
    comparison.scale = {env: _scale(comparison, env) if normalise else (0.0, 1.0) for env in envs}
    if normalise and (unknown := [env for env in envs if reference(env) is None]):
        notes.append(f"No reference scores for {listed(unknown)}: there 0 and 1 are the worst and best run compared.")
    return comparison


def grouped(results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """Environment and method -> runs."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.env_id, result.name), []).append(result)
    return groups


def _scale(comparison: Comparison, env_id: str) -> tuple[float, float]:
    """The reference scores of an environment, or the lowest and highest score among the runs."""
    runs = [comparison.scores(env_id, method) for env, method in comparison.groups if env == env_id]
    return reference(env_id) or (float(np.min(np.concatenate(runs))), float(np.max(np.concatenate(runs))))


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names in a sentence, the first few of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---------------------------------------------------------------------- tables
def estimate(statistic: st.Statistic, scores: st.Scores) -> Estimate:
    """A statistic of scores with its interval; of too few runs of one environment with their range."""
    value = float(statistic(scores))
    if all(len(runs) >= ENOUGH for runs in scores):
        low, high = st.interval(statistic, scores)
        return Estimate(value, (float(low), float(high)))
    several = len(scores) == 1 and len(scores[0]) > 1
    return Estimate(value, None, (float(np.min(scores[0])), float(np.max(scores[0]))) if several else None)


def env_rows(comparison: Comparison) -> list[EnvRow]:
    """A row for each environment and method that has runs."""
    pairs = [pair for pair in product(comparison.envs, comparison.methods) if pair in comparison.groups]
    return [_env_row(*pair, comparison.scores(*pair), comparison.groups[pair]) for pair in pairs]


def _env_row(env_id: str, method: str, scores: st.Array, runs: Sequence[Result]) -> EnvRow:
    speeds = [run.sps * run.together for run in runs if run.sps is not None]
    iqm, mean, median = (estimate(statistic, [scores]) for statistic in (st.iqm, st.mean, st.median_run))
    return EnvRow(
        env_id, method, len(runs), iqm, mean, median,
        steps=float(np.median([run.global_step for run in runs])),
        seconds=float(np.median([run.wall_time for run in runs])),
        sps=float(np.median(speeds)) if speeds else None,
        together=max(run.together for run in runs),
        date=min((run.started[:10] for run in runs if run.started), default=""),
    )  # fmt: skip


def pair(comparison: Comparison, x: str, y: str) -> Pair | None:
    """Method x against method y; None where they share no environment."""
    envs = [env for env in comparison.envs if {(env, x), (env, y)} <= comparison.groups.keys()]
    if not envs:
        return None
    of_x, of_y = ([comparison.scores(env, name) for env in envs] for name in (x, y))
    several = enough(list(zip(map(len, of_x), map(len, of_y), strict=True)))
    interval = tuple(st.paired_interval(st.probability_of_improvement, of_x, of_y).tolist()) if several else None
    probability = Estimate(float(st.probability_of_improvement(of_x, of_y)), interval)
    decided = {env: direction(a, b) for env, a, b in zip(envs, of_x, of_y, strict=True)}
    few = all(2 / math.comb(len(a) + len(b), len(a)) >= ALPHA for a, b in zip(of_x, of_y, strict=True))
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
    return min(map(min, runs)) >= 3 and 2 / math.prod(math.comb(n + m, n) for n, m in runs) < ALPHA
