"""Statistics against rliable's numbers, SciPy and brute force."""

from itertools import combinations, product

import numpy as np
import pytest

from solorl.lab.results import statistics as st
from solorl.lab.results.reference_scores import reference

# 10 runs on 5 environments, with ties. The numbers of rliable below were made in an environment of its own:
#   pip install rliable==1.2.0 "pandas<3" arch==7.2.0
#   metrics.aggregate_iqm(X), .aggregate_mean, .aggregate_median, .aggregate_optimality_gap,
#   library.get_interval_estimates(..., reps=20000, random_state=np.random.RandomState(0)),
#   metrics.probability_of_improvement(X, Y), library.create_performance_profile({"x": X}, TAUS, reps=20000)
RUN, ENV = np.mgrid[:10, :5]
X = np.round(0.8 + 0.5 * np.sin(3 * RUN + 7 * ENV) + 0.1 * ENV, 1)
Y = np.round(0.6 + 0.5 * np.cos(5 * RUN + 2 * ENV) + 0.1 * ENV, 1)
TAUS = np.linspace(0, 1.6, 9)
STATISTICS = (st.iqm, st.mean, st.median, st.optimality_gap)
RLIABLE = {
    "x": ([0.9692307692307693, 1.012, 1.03, 0.1579999999999998],
          [[0.8384615384615386, 0.912, 0.88, 0.108], [1.123076923076923, 1.114, 1.17, 0.21]]),
    "y": ([0.8000000000000002, 0.8020000000000002, 0.8, 0.28],
          [[0.6615384615384615, 0.702, 0.65, 0.204], [0.9346153846153847, 0.902, 0.95, 0.358]]),
}  # fmt: skip
RLIABLE_IMPROVEMENT = (0.667, [0.552, 0.772])
RLIABLE_PROFILE = [1.0, 1.0, 0.96, 0.8, 0.58, 0.42, 0.3, 0.22, 0.04]
RLIABLE_BAND = [[1.0, 1.0, 0.9, 0.7, 0.44, 0.28, 0.18, 0.12, 0.0], [1.0, 1.0, 1.0, 0.9, 0.72, 0.56, 0.42, 0.32, 0.1]]


def by_env(array):
    """One array per environment, as our functions take it."""
    return list(array.T.astype(float))


def random_scores(seed, *sizes):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n).round(1) for n in sizes]


# ---------------------------------------------------------------------- rliable
@pytest.mark.parametrize(("name", "array"), [("x", X), ("y", Y)])
def test_estimates_equal_rliable(name, array):
    ours = [float(statistic(by_env(array))) for statistic in STATISTICS]
    assert ours == pytest.approx(RLIABLE[name][0], abs=1e-12)


@pytest.mark.parametrize(("name", "array"), [("x", X), ("y", Y)])
def test_intervals_equal_rliable_within_monte_carlo_error(name, array):
    ours = np.array([st.interval(statistic, by_env(array), reps=20_000) for statistic in STATISTICS])
    np.testing.assert_allclose(ours.T, RLIABLE[name][1], atol=0.011)  # the scores' own grid is 0.1


def test_probability_of_improvement_equals_rliable():
    x, y = by_env(X), by_env(Y)
    assert float(st.probability_of_improvement(x, y)) == pytest.approx(RLIABLE_IMPROVEMENT[0], abs=1e-12)
    assert st.paired_interval(st.probability_of_improvement, x, y, reps=20_000) == pytest.approx(
        RLIABLE_IMPROVEMENT[1], abs=0.006
    )


def test_performance_profile_equals_rliable():
    assert st.profile(by_env(X), TAUS) == pytest.approx(RLIABLE_PROFILE, abs=1e-12)
    np.testing.assert_allclose(st.profile_band(by_env(X), TAUS, reps=20_000).T, RLIABLE_BAND, atol=0.021)


# ---------------------------------------------------------------------- estimates by hand and by SciPy
def test_iqm_by_hand():
    assert st.iqm([np.array([100.0, 3.0, 1.0, 2.0])]) == 2.5  # the lowest and the highest of four are cut
    assert st.iqm([np.array([1.0, 2.0, 9.0])]) == 4.0  # of three nothing is
    assert st.iqm([np.array([7.0])]) == 7.0


@pytest.mark.parametrize("n", range(1, 14))
def test_iqm_is_scipys_trimmed_mean(n):
    scipy = pytest.importorskip("scipy.stats")
    (x,) = random_scores(n, n)
    assert st.iqm([x]) == pytest.approx(scipy.trim_mean(x, 0.25), abs=1e-12)


def test_estimates_of_environments_with_different_numbers_of_runs():
    scores = [np.array([0.0, 1.0]), np.array([2.0, 4.0, 6.0]), np.array([1.0])]
    assert st.mean(scores) == pytest.approx((0.5 + 4 + 1) / 3)
    assert st.median(scores) == 1.0
    assert st.median_run(scores) == 1.5
    assert st.optimality_gap(scores) == pytest.approx(1 / 6)  # only the run with 0 lacks anything
    assert st.pooled(scores).tolist() == [0, 1, 2, 4, 6, 1]


def test_statistics_keep_leading_axes():
    batch = [np.random.default_rng(0).normal(size=(4, 3, 10)), np.random.default_rng(1).normal(size=(4, 3, 7))]
    for statistic in (*STATISTICS, st.median_run):
        whole = statistic(batch)
        assert whole.shape == (4, 3)
        assert whole[2, 1] == pytest.approx(float(statistic([part[2, 1] for part in batch])))


# ---------------------------------------------------------------------- bootstrap
def test_resampling_stays_within_the_environment():
    samples = st.resample([np.array([1.0, 2.0]), np.array([10.0, 20.0, 30.0])], reps=500)
    assert [part.shape for part in samples] == [(500, 2), (500, 3)]
    assert set(samples[0].ravel()) == {1.0, 2.0}
    assert set(samples[1].ravel()) == {10.0, 20.0, 30.0}


def test_interval_equals_that_of_all_possible_samples():
    x = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    means = np.array([np.mean(sample) for sample in product(x, repeat=5)])  # all 3,125
    exact = np.percentile(means, [2.5, 97.5])
    assert st.interval(st.mean, [x], reps=20_000) == pytest.approx(exact, abs=0.21)  # the means' own grid is 0.2


def test_interval_agrees_with_scipys_bootstrap():
    scipy = pytest.importorskip("scipy.stats")
    (x,) = random_scores(3, 20)
    theirs = scipy.bootstrap((x,), np.mean, n_resamples=20_000, method="percentile", rng=0).confidence_interval
    assert st.interval(st.mean, [x], reps=20_000) == pytest.approx([theirs.low, theirs.high], abs=0.02)


def test_same_scores_same_interval():
    scores = random_scores(4, 10, 10)
    assert np.array_equal(st.interval(st.iqm, scores), st.interval(st.iqm, scores))


def test_interval_of_one_run_is_a_point():
    assert st.interval(st.iqm, [np.array([3.0])]).tolist() == [3.0, 3.0]


def test_interval_covers_the_truth():
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(400):
        low, high = st.interval(st.mean, [rng.normal(size=20)], reps=400)
        hits += low <= 0 <= high
    assert 0.89 <= hits / 400 <= 0.97  # the percentile bootstrap of 20 runs covers a little less than 95 %


def test_difference_interval_is_that_of_independent_samples():
    x, y = np.arange(10.0), np.arange(10.0) + 3
    difference = lambda x, y: st.mean(x) - st.mean(y)  # noqa: E731
    low, high = st.paired_interval(difference, [x], [y], reps=20_000)
    spread = 1.96 * np.sqrt(2 * np.var(x) / 10)  # both samples vary
    assert [low, high] == pytest.approx([-3 - spread, -3 + spread], abs=0.1)
    assert st.paired_interval(difference, [x], [x], reps=500)[0] < 0  # the two are not resampled alike


# ---------------------------------------------------------------------- comparing
def test_probability_of_improvement_by_hand():
    x, y = np.array([1.0, 2.0]), np.array([1.0, 0.0])
    assert st.probability_of_improvement([x], [y]) == 0.875  # (0.5 + 1 + 1 + 1) / 4
    assert st.probability_of_improvement([np.ones(3)], [np.ones(5)]) == 0.5
    one, zero = [np.array([1.0])], [np.array([0.0])]
    assert st.probability_of_improvement(one + zero, zero + one) == 0.5  # the mean of 1 and 0


def test_probability_of_improvement_is_the_u_statistic():
    scipy = pytest.importorskip("scipy.stats")
    x, y = random_scores(6, 9, 7)
    u = scipy.mannwhitneyu(x, y).statistic
    assert st.probability_of_improvement([x], [y]) == pytest.approx(u / 63, abs=1e-12)


def brute_force_p(x, y):
    """The two-sided p-value from all ways to choose which runs are x's, by counting pairs."""
    everyone = np.concatenate([x, y])
    u = lambda a, b: sum((i > j) + 0.5 * (i == j) for i in a for j in b)  # noqa: E731
    middle = len(x) * len(y) / 2
    seen = abs(u(x, y) - middle)
    far = []
    for chosen in combinations(range(len(everyone)), len(x)):
        rest = [i for i in range(len(everyone)) if i not in chosen]
        far.append(abs(u(everyone[list(chosen)], everyone[rest]) - middle) >= seen - 1e-9)
    return np.mean(far)


@pytest.mark.parametrize(("n", "m"), [(3, 3), (4, 5), (6, 4), (1, 5)])
def test_rank_sum_test_equals_brute_force_with_ties(n, m):
    x, y = random_scores([7, n, m], n, m)
    x, y = np.round(x), np.round(y + 0.7)  # many ties
    assert st.mann_whitney(x, y) == pytest.approx(brute_force_p(x, y), abs=1e-12)


def test_rank_sum_test_equals_scipys_exact_test_without_ties():
    scipy = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(8)
    for n, m in ((5, 5), (10, 10), (10, 6)):
        x, y = rng.normal(size=n), rng.normal(size=m) + 0.8
        assert st.mann_whitney(x, y) == pytest.approx(scipy.mannwhitneyu(x, y, method="exact").pvalue, abs=1e-12)


def test_rank_sum_test_of_equal_runs_and_of_few():
    assert st.mann_whitney(np.full(10, 500.0), np.full(10, 500.0)) == 1.0
    assert st.mann_whitney(np.arange(3.0), np.arange(3.0) + 9) == pytest.approx(0.1)
    assert st.mann_whitney(np.arange(4.0), np.arange(4.0) + 9) == pytest.approx(2 / 70)


def test_rank_sum_test_of_many_runs_is_the_normal_approximation(monkeypatch):
    rng = np.random.default_rng(9)
    for n, m in ((20, 20), (18, 22)):  # near the exact one, with ties and without
        for shift, digits in product((0.0, 0.3, 0.7, 1.5), (9, 0)):
            x, y = np.round(rng.normal(size=n), digits), np.round(rng.normal(size=m) + shift, digits)
            exact = st.mann_whitney(x, y)
            with monkeypatch.context() as patch:
                patch.setattr(st, "EXACT", 0)
                assert st.mann_whitney(x, y) == pytest.approx(exact, abs=0.01)
    # 127 is the critical U of 20 against 20 runs, two-sided 5 %, in tables of the test
    for u, decides in ((127, True), (128, False)):
        x = np.r_[1:14, 21 + u - 127, 35:41].astype(float)
        y = np.setdiff1d(np.arange(1.0, 41), x)
        assert (x[:, None] > y).sum() == u and (st.mann_whitney(x, y) <= 0.05) == decides
    assert st.mann_whitney(np.full(30, 5.0), np.full(30, 5.0)) == 1.0
    x = rng.normal(size=20_000)
    assert st.mann_whitney(x, x + 0.1) < 1e-9 < 0.1 < st.mann_whitney(x, rng.normal(size=20_000))


def test_rank_sum_test_of_many_runs_equals_scipys():
    scipy = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(10)
    for n, m, digits in ((21, 20, 9), (30, 40, 0), (200, 5, 1)):
        x, y = np.round(rng.normal(size=n), digits), np.round(rng.normal(size=m) + 0.4, digits)
        want = scipy.mannwhitneyu(x, y, method="asymptotic").pvalue
        assert st.mann_whitney(x, y) == pytest.approx(want, abs=1e-12)


def test_seeds_needed_give_a_power_of_80_percent():
    """Studies with as many seeds as it says find the difference in 80 % of cases, by a test that knows s."""
    rng = np.random.default_rng(0)
    x, y = np.array([10.0, 14.0, 9.0]), np.array([12.0, 15.0, 11.0, 16.0])
    pooled = (((x - x.mean()) ** 2).sum() + ((y - y.mean()) ** 2).sum()) / 5
    needed = st.seeds_needed(x, y)
    assert needed == 16  # 2 * 2.8016 ** 2 * 6.2 / 2.5 ** 2 = 15.57, rounded up
    for count, found in ((needed, 0.8), (needed // 2, 0.5)):
        studies = rng.normal(0, pooled**0.5, (20_000, 2, count)).mean(-1)
        gap = np.abs(studies[:, 0] - studies[:, 1] + x.mean() - y.mean()) / np.sqrt(2 * pooled / count)
        assert (gap > 1.96).mean() == pytest.approx(found, abs=0.03)


def test_seeds_needed_at_the_edges():
    assert st.seeds_needed(np.array([1.0, 3.0]), np.array([3.0, 1.0])) is None
    assert st.seeds_needed(np.array([1.0, 1.0]), np.array([2.0, 2.0])) == 2


# ---------------------------------------------------------------------- common scales and axes
def test_normalise():
    assert st.normalise(np.array([22.6, 475.0, 248.8]), 22.6, 475.0) == pytest.approx([0, 1, 0.5])
    assert st.normalise(np.array([5.0, 6.0]), 5.0, 5.0).tolist() == [0, 1]


def test_common_grid_keeps_common_positions_and_else_the_overlap():
    same = np.array([1.0, 2.0, 5.0])
    assert st.common_grid([same, same.copy()]).tolist() == [1, 2, 5]
    assert st.common_grid([same, np.array([2.0, 4.0])], points=3).tolist() == [2, 3, 4]
    apart = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    assert st.common_grid(apart).size == 0
    held = st.common_grid(apart, points=3, end=4.0)
    assert held.tolist() == [3, 3.5, 4]
    assert st.on_grid(held, apart, [np.array([5.0, 7.0]), np.array([0.0, 1.0])]).tolist() == [[7, 7, 7], [0, 0.5, 1]]
    long = np.arange(1000.0)
    assert len(st.common_grid([long, long])) == 101


def test_on_grid_interpolates_linearly():
    values = st.on_grid(np.array([1.0, 1.5, 3.0]), [np.array([1.0, 2.0, 4.0])], [np.array([0.0, 10.0, 30.0])])
    assert values.tolist() == [[0.0, 5.0, 20.0]]


def test_band_is_the_interval_at_each_position(monkeypatch):
    curves = [np.random.default_rng(9).normal(size=(10, 7)), np.random.default_rng(10).normal(size=(6, 7))]
    value, band = st.iqm_band(curves, reps=300)
    for i in range(7):
        at = [runs[:, i] for runs in curves]
        assert value[i] == pytest.approx(float(st.iqm(at)))
        assert band[i] == pytest.approx(st.interval(st.iqm, at, reps=300))
    monkeypatch.setattr(st, "BLOCK", 1)  # one position at a time gives the same
    np.testing.assert_allclose(st.iqm_band(curves, reps=300)[1], band, atol=1e-12)


def test_reference_scores_by_name():
    assert reference("CartPole-v1") == (22.6, 475.0)
    assert reference("CartPole-v0") == (22.6, 195.0)
    assert reference("HalfCheetah-v4") == reference("HalfCheetah-v5")
    assert reference("ALE/Pong-v5") == reference("PongNoFrameskip-v4") == reference("Pong-v5") == (-20.7, 14.6)
    assert reference("MinAtar/Breakout-v1") is None
    assert reference("Unknown-v0") is None
