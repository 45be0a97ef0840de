"""Statistics for few runs on several environments: estimates, bootstrap intervals, comparisons, common axes.

After Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice",
https://arxiv.org/abs/2108.13264 ("the paper" below), and equal to its package `rliable` on rectangular data.

Scores are a sequence with one array per environment, (..., num_runs), the number of runs free to differ; statistics are
taken over the last axis and keep the others. Every interval comes from the percentile bootstrap with a fixed seed, so
that the same scores always give the same interval.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scores = Sequence[Array]
Statistic = Callable[[Scores], Array]

REPS = 5_000  # bootstrap samples
LEVEL = 0.95  # of the intervals
BLOCK = 4_000_000  # numbers that a bootstrap over curves holds at once
EXACT = 400  # pairs of runs up to which the rank-sum test counts all ways


# ---------------------------------------------------------------------- estimates: scores -> (...)
def pooled(scores: Scores) -> Array:
    """The runs of all environments side by side: (..., total number of runs)."""
    return np.concatenate([np.asarray(runs, np.float64) for runs in scores], axis=-1)


def iqm(scores: Scores) -> Array:
    """Interquartile mean: the mean of the middle half of all runs (section 4.2 of the paper).

    Of n runs floor(n / 4) are cut off at each end, as in SciPy's `trim_mean`; fewer than 4 runs give the mean.
    """
    runs = np.sort(pooled(scores), axis=-1)
    cut = runs.shape[-1] // 4
    return runs[..., cut : runs.shape[-1] - cut].mean(axis=-1)


def mean(scores: Scores) -> Array:
    """The mean over environments of the mean over runs."""
    return np.mean([np.mean(runs, axis=-1) for runs in scores], axis=0)


def median(scores: Scores) -> Array:
    """The median over environments of the mean over runs, as benchmark suites report it."""
    return np.median([np.mean(runs, axis=-1) for runs in scores], axis=0)


def median_run(scores: Scores) -> Array:
    """The median over all runs; for a single environment."""
    return np.median(pooled(scores), axis=-1)


def optimality_gap(scores: Scores, target: float = 1.0) -> Array:
    """How far runs stay below `target` on average; what lies above it does not count (section 4.3 of the paper)."""
    return target - np.minimum(pooled(scores), target).mean(axis=-1)


def profile(scores: Scores, thresholds: Array) -> Array:
    """Performance profile (section 4.1 of the paper): fraction of runs above each threshold, (..., num_thresholds)."""
    return (pooled(scores)[..., None] > thresholds).mean(axis=-2)


# ---------------------------------------------------------------------- stratified bootstrap
def resample(scores: Scores, reps: int = REPS, seed: int | Sequence[int] = 0) -> list[Array]:
    """`reps` bootstrap samples, (..., reps, num_runs) per environment.

    Runs are drawn with replacement within each environment (stratum), so every sample has as many runs of each.
    """
    rng = np.random.default_rng(seed)
    return [runs[..., rng.integers(runs.shape[-1], size=(reps, runs.shape[-1]))] for runs in map(np.asarray, scores)]


def percentiles(samples: Array) -> Array:
    """The interval that holds the middle LEVEL of the samples (..., reps): (..., 2)."""
    tail = 50 * (1 - LEVEL)
    return np.moveaxis(np.percentile(samples, [tail, 100 - tail], axis=-1), 0, -1)


def interval(statistic: Statistic, scores: Scores, reps: int = REPS) -> Array:
    """The bootstrap interval of a statistic: (..., 2)."""
    return percentiles(statistic(resample(scores, reps)))


def profile_band(scores: Scores, thresholds: Array, reps: int = 1_000) -> Array:
    """The pointwise bootstrap intervals of a performance profile: (num_thresholds, 2)."""
    return percentiles(np.moveaxis(profile(resample(scores, reps), thresholds), 0, -1))


def paired_interval(statistic: Callable[[Scores, Scores], Array], x: Scores, y: Scores, reps: int = REPS) -> Array:
    """The bootstrap interval of a statistic of x and y, both resampled on their own: (..., 2)."""
    return percentiles(statistic(resample(x, reps, seed=[0, 0]), resample(y, reps, seed=[0, 1])))


# ---------------------------------------------------------------------- comparing x with y
def probability_of_improvement(x: Scores, y: Scores) -> Array:
    """P(X > Y) for runs drawn at random, ties counted 1/2, averaged over environments (section 4.3 of the paper)."""
    return np.mean([_share_above(np.asarray(a), np.asarray(b)) for a, b in zip(x, y, strict=True)], axis=0)


def _share_above(x: Array, y: Array) -> Array:
    """The fraction of pairs (a, b) with a > b, ties counted 1/2: of (..., n) and (..., m) over the last axes."""
    a, b = x[..., :, None], y[..., None, :]
    return (a > b).mean(axis=(-2, -1)) + 0.5 * (a == b).mean(axis=(-2, -1))


def mann_whitney(x: Array, y: Array) -> float:
    """Two-sided p-value of Mann and Whitney's rank-sum test of runs (n,) against runs (m,), exact also with ties.

    Of all ways to deal the n + m ranks (ties share their mean rank) the fraction whose rank sum for x is at
    least as far from its expectation as the one seen. With 3 runs on both sides it cannot be below 0.1, with 4 not
    below 0.029. Of more than EXACT pairs the normal approximation, corrected for continuity and ties.
    """
    n, m = len(x), len(y)
    _, which, counts = np.unique(np.concatenate([x, y]), return_inverse=True, return_counts=True)
    ranks = (2 * counts.cumsum() - counts + 1)[which]  # doubled
    expected = n * (n + m + 1)
    distance = abs(ranks[:n].sum() - expected)
    if n * m > EXACT:
        variance = n * m / 3 * (n + m + 1 - (counts**3.0 - counts).sum() / (n + m) / (n + m - 1))
        return math.erfc(max(0, distance - 1) / math.sqrt(2 * max(variance, 1)))  # it is 0 where all are equal
    ways = np.zeros((n + 1, ranks.sum() + 1))  # ways[k, s]: subsets of k runs with doubled rank sum s
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    return float(ways[n, np.abs(np.arange(ways.shape[1]) - expected) >= distance].sum() / ways[n].sum())


def seeds_needed(x: Array, y: Array) -> int | None:
    """Runs of each method with which a two-sided test at 5 % finds a difference like that between runs x and y in 80 %
    of studies: 2 (z_0.975 + z_0.8)^2 s^2 / d^2, d the difference of the means, s^2 the pooled variance; at least 2.
    None where the means are equal.
    """
    z, d = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8), float(x.mean() - y.mean())
    pooled = (x.var() * len(x) + y.var() * len(y)) / (len(x) + len(y) - 2)
    return max(2, math.ceil(2 * z**2 * pooled / d**2)) if d else None


# ---------------------------------------------------------------------- common scales and axes
def normalise(scores: Array, low: float, high: float) -> Array:
    """Scores on the scale on which `low` is 0 and `high` is 1."""
    return (np.asarray(scores, np.float64) - low) / (high - low if high != low else 1.0)


def common_grid(axes: Sequence[Array], points: int = 101, end: float | None = None) -> Array:
    """Positions at which all curves have values, up to `points` of them: (p,).

    `axes` are the curves' own positions, each (n,) and ascending. Where they agree and are few these are taken, else
    equidistant ones from the last beginning to the first end. Empty where the curves do not overlap. With `end` the
    positions go up to it; a curve that ends before keeps its last value, as `on_grid` has it.
    """
    first = np.asarray(axes[0], np.float64)
    if len(first) <= points and all(np.array_equal(first, axis) for axis in axes):
        return first
    begin, end = max(axis[0] for axis in axes), min(axis[-1] for axis in axes) if end is None else end
    return np.linspace(begin, end, points) if begin < end else np.empty(0)


def on_grid(grid: Array, axes: Sequence[Array], values: Sequence[Array]) -> Array:
    """Every curve at the grid's positions, linearly interpolated, level beyond its ends: (num_curves, p)."""
    return np.array([np.interp(grid, axis, value) for axis, value in zip(axes, values, strict=True)])


def iqm_band(curves: Sequence[Array], reps: int = 1_000) -> tuple[Array, Array]:
    """The IQM at each position and its bootstrap interval: (p,) and (p, 2).

    `curves` has one array (num_runs, p) per environment. Whole curves are resampled: all positions of one bootstrap
    sample come from the same runs.
    """
    by_position = [np.ascontiguousarray(runs.T) for runs in curves]  # (p, num_runs)
    step = max(1, BLOCK // (reps * sum(runs.shape[1] for runs in by_position)))
    blocks = [[runs[i : i + step] for runs in by_position] for i in range(0, len(by_position[0]), step)]
    edges = [interval(iqm, block, reps) for block in blocks]
    return iqm(by_position), np.concatenate(edges) if edges else np.empty((0, 2))
