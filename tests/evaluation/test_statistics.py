"""Tests and intervals (`statistics.py`) against SciPy, published formulas and simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from splince_fast.evaluation import statistics as st
from splince_fast.exceptions import InputError


def test_without_overlap_the_corrected_test_is_the_paired_t_test() -> None:
    values = np.random.default_rng(0).normal(0.3, 1, 12)
    t, p, low, high = st.corrected_t(values, ratio=0.0)
    known = scipy.stats.ttest_1samp(values, 0)
    assert (t, p) == pytest.approx((known.statistic, known.pvalue))
    assert (low, high) == pytest.approx(tuple(known.confidence_interval()))


def test_the_corrected_test_reproduces_a_published_p_value() -> None:
    # SPLINCE minus LEACE of table A: differences of mean .056, error .011 give t = 4.00, p = .057.
    shape = np.array([-1.0, 0.0, 1.0])
    values = 0.056 + shape * 0.011 * math.sqrt(3)
    t, p, _, _ = st.corrected_t(values, 1000 / 4000)
    assert t == pytest.approx(0.056 / (0.011 * math.sqrt(3) * math.sqrt(1 / 3 + 0.25)))
    assert p == pytest.approx(0.057, abs=0.006)


def test_equal_differences_have_no_test() -> None:
    assert st.corrected_t([0.0, 0.0, 0.0], 0.2)[:2] == (0.0, 1.0)
    # the deviation of three equal floats is rounding: 1.4e-17 would make t = 1e16
    assert all(math.isnan(value) for value in st.corrected_t([0.1, 0.1, 0.1], 0.2))
    with pytest.raises(InputError, match="two"):
        st.corrected_t([0.1], 0.2)


def test_infinite_differences_have_no_test() -> None:
    for values in ([np.inf, np.inf, np.inf], [0.1, np.inf, 0.2], [0.1, -np.inf, np.inf]):
        assert all(map(math.isnan, st.corrected_t(values, 0.3)))


def test_holm_is_the_step_down_rule() -> None:
    assert st.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert st.holm([0.5, math.nan])[0] == 0.5
    assert math.isnan(st.holm([0.5, math.nan])[1])
    assert st.holm([0.6, 0.9]) == [1.0, 1.0]


def test_fewer_than_three_seeds_are_not_tested() -> None:
    found = st.paired_difference("a", "b", {0: 1.0, 1: 1.0}, {0: 0.0, 1: 0.1}, 0.2)
    assert found.how == "no test"
    assert math.isnan(found.p)
    assert not found.significant
    tested = st.paired_difference("a", "b", {i: 1.0 + i / 99 for i in range(3)}, {0: 0.0, 1: 0.0,
                                  2: 0.0}, 0.2)  # fmt: skip
    assert tested.significant  # control
    assert tested.favours_method == 3


def test_a_t_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(600):
        found = st.t_interval(rng.normal(size=5).tolist())
        hits += found.low <= 0 <= found.high
    assert abs(hits / 600 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 600)


def drawn(statistic: Any, draws: Any) -> Any:
    """The statistic of every draw."""
    return np.array([statistic(rows) for rows in draws])


@pytest.mark.parametrize("bca", [True, False])
def test_a_bootstrap_interval_is_scipy_s(bca: bool) -> None:
    """Of a skew sample: the bias and the acceleration of BCa shift the limits by a fifth."""
    x = np.random.default_rng(0).exponential(size=30) ** 2

    def mean(rows: Any) -> float:
        return float(x[rows].mean())

    values = drawn(mean, st.bootstrap_indices(30, None, 5000, 0))
    found = st.bootstrap_test(mean, 30, values, bca=bca)[:2]
    known = scipy.stats.bootstrap(
        (x,), np.mean, n_resamples=5000, method="BCa" if bca else "percentile", rng=1
    ).confidence_interval
    assert found == pytest.approx(tuple(known), rel=0.07)


def test_clusters_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(30), 10)
    x = rng.normal(size=30)[clusters]

    def mean(rows: Any) -> float:
        return float(x[rows].mean())

    widths = []
    for of in (None, clusters):
        values = drawn(mean, st.bootstrap_indices(300, of, 500, 0))
        found = st.bootstrap_test(mean, 300, values, clusters=of, bca=True)
        widths.append(found.high - found.low)
    assert widths[1] > 2 * widths[0]


def test_the_variance_of_a_difference_is_at_least_that_of_its_test_rows() -> None:
    equal, zero = dict.fromkeys(range(3), 0.75), dict.fromkeys(range(3), 0.7)
    found = st.paired_difference("a", "b", equal, zero, 0.25, 20)
    error = math.sqrt((1 / 3 + 0.25) * 0.05 * 0.95 / 20)
    assert found.t == pytest.approx(0.05 / error)
    assert found.p == pytest.approx(2 * scipy.stats.norm.sf(0.05 / error))
    assert (found.low, found.high) == pytest.approx(
        (0.05 - 1.959964 * error, 0.05 + 1.959964 * error)
    )
    assert not found.significant
    unknown = st.paired_difference("a", "b", equal, zero, 0.25)
    assert unknown.how == "no test"
    assert math.isnan(unknown.p)
    assert not unknown.significant
    alike = st.paired_difference("a", "b", zero, zero, 0.25)
    assert (alike.p, alike.how) == (1.0, "corrected t")
    # where the seeds vary more than the rows resolve, nothing changes
    ours = {0: 0.9, 1: 0.7, 2: 0.6}
    plain, bounded = (st.paired_difference("a", "b", ours, zero, 0.25, m) for m in (None, 20))
    assert plain == bounded


def test_equal_erasers_on_few_rows_differ_significantly_at_most_at_5_percent() -> None:
    """300 comparisons of 7 erasers that decide 20 test rows alike but for chance, with 3 seeds."""
    rng = np.random.default_rng(0)
    hits = {"bounded": 0, "plain": 0}
    for _ in range(300):
        right = rng.random((3, 20)) < 0.8  # rows on which they agree
        differs = rng.random((7, 3, 20)) < 0.1
        figures = (right[None] ^ differs).mean(axis=2)
        for kind, rows in (("bounded", 20), ("plain", None)):
            p = [st.paired_difference("a", "b", dict(enumerate(figures[k])),
                                      dict(enumerate(figures[0])), 0.36, rows).p
                 for k in range(1, 7)]  # fmt: skip
            if kind == "plain":  # a variance of 0 was taken for certainty
                equal = [np.ptp(figures[k] - figures[0]) < 1e-12 for k in range(1, 7)]
                moved = [abs((figures[k] - figures[0]).mean()) > 1e-12 for k in range(1, 7)]
                p = [0.0 if e and m else q for e, m, q in zip(equal, moved, p, strict=True)]
            hits[kind] += min((q for q in st.holm(p) if not math.isnan(q)), default=1.0) < 0.05
    most = 0.05 + 2 * math.sqrt(0.05 * 0.95 / 300)
    assert hits["bounded"] / 300 <= most
    assert hits["plain"] / 300 > most  # control


def test_two_values_have_no_interval() -> None:
    found = st.t_interval([0.4, 0.8])
    assert (found.mean, found.error) == pytest.approx((0.6, 0.2))
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    three = st.t_interval([0.4, 0.8, 0.6])  # control
    assert three.high == pytest.approx(0.6 + scipy.stats.t.ppf(0.975, 2) * 0.2 / math.sqrt(3))


# -- the bootstrap: exact values ------------------------------------------------------------------


SKEWED = np.array([0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])


def mean_of(rows: np.ndarray) -> float:
    return float(SKEWED[rows].mean())


def test_bca_is_efron_s_formula_with_ties_and_signs() -> None:
    """Values written out: z0 counts ties as one half, a is positive where the tail is above."""
    values = np.repeat(np.arange(10.0, 22.0), 50)  # 600 draws, the statistic 15.875 among them
    values[values == 16.0] = mean_of(np.arange(8))  # 50 ties
    low, high, _ = st.bootstrap_test(mean_of, 8, values, bca=True)
    share = (6 * 50 + 25) / 600
    left_out = (SKEWED.sum() - SKEWED) / 7
    u = left_out.mean() - left_out
    a = np.sum(u**3) / (6 * np.sum(u**2) ** 1.5)
    assert a > 0.08
    z0 = scipy.stats.norm.ppf(share)
    q = z0 + scipy.stats.norm.ppf([0.025, 0.975])
    expected = np.quantile(values, scipy.stats.norm.cdf(z0 + q / (1 - a * q)))
    assert (low, high) == pytest.approx(tuple(expected))
    percentile = st.bootstrap_test(mean_of, 8, values, bca=False)[:2]
    assert percentile == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    known = scipy.stats.bootstrap(
        (SKEWED,), np.mean, n_resamples=20000, method="BCa", rng=0
    ).confidence_interval
    values = drawn(mean_of, st.bootstrap_indices(8, None, 20000, 0))
    # the standard error of a tail quantile of 20,000 draws is about .15 and .5 here
    found = st.bootstrap_test(mean_of, 8, values, bca=True)
    assert found.low == pytest.approx(known[0], abs=0.6)
    assert found.high == pytest.approx(known[1], abs=2.0)
    mirrored = st.bootstrap_test(lambda rows: -mean_of(rows), 8, -values, bca=True)
    assert mirrored[:2] == pytest.approx((-found.high, -found.low))


def test_draws_are_of_rows_with_replacement_and_of_whole_clusters() -> None:
    rng = np.random.default_rng(3)
    rows = st.bootstrap_indices(5, None, 4, 3)
    assert [draw.tolist() for draw in rows] == [rng.integers(0, 5, size=5).tolist()
                                                for _ in range(4)]  # fmt: skip
    assert any(len(np.unique(draw)) < 5 for draw in rows)
    clusters = np.array([7, 7, 2, 9, 2])
    members = {2: [2, 4], 7: [0, 1], 9: [3]}
    rng = np.random.default_rng(3)
    for draw in st.bootstrap_indices(5, clusters, 4, 3):
        expected = [row for k in rng.integers(0, 3, size=3) for row in members[[2, 7, 9][k]]]
        assert draw.tolist() == expected


@pytest.mark.parametrize("bca", [True, False])
def test_p_and_interval_of_the_bootstrap_agree(bca: bool) -> None:
    """p < .05 and 0 outside the interval are one statement: 60 samples about the boundary."""
    sides = set()
    for i in range(60):
        rng = np.random.default_rng(i)
        x = rng.exponential(size=40) - 0.72  # about two standard errors above 0

        def mean(rows: Any, x: Any = x) -> float:
            return float(x[rows].mean())

        values = drawn(mean, st.bootstrap_indices(40, None, 300, i))
        low, high, p = st.bootstrap_test(mean, 40, values, bca=bca)
        assert (p < 0.05) == (low > 0 or high < 0)
        sides.add(p < 0.05)
    assert sides == {True, False}
    assert st.bootstrap_test(lambda rows: 0.0, 40, np.zeros(300), bca=bca) == (0.0, 0.0, 1.0)
    found = st.bootstrap_test(lambda rows: 1.0, 40, np.ones(300), bca=bca)
    assert found == (1.0, 1.0, pytest.approx(1 / 301))


def test_p_of_a_percentile_bootstrap_is_twice_the_smaller_tail() -> None:
    values = np.arange(-30.0, 970.0) + 0.5  # 30 of 1,000 draws below 0
    _, _, p = st.bootstrap_test(mean_of, 8, values, bca=False)
    assert p == pytest.approx(2 * 29.5 / 999, abs=1e-9)  # quantiles interpolate n - 1 steps
    _, _, other = st.bootstrap_test(mean_of, 8, -values, bca=False)
    assert other == pytest.approx(p, abs=1e-9)


def test_the_interval_of_a_cell_does_not_count_shared_rows_twice() -> None:
    rates = [0.80, 0.84, 0.76, 0.82, 0.78]
    low, high = st.cell_interval(rates, 400, 1 / 3)
    _, _, least, most = st.corrected_t(rates, 1 / 3)
    effective = 400 / (1 / 5 + 1 / 3)
    below, above = st.wilson_interval(0.8 * effective, effective)
    assert (low, high) == pytest.approx((min(least, below), max(most, above)))
    pooled = st.wilson_interval(0.8 * 2000, 2000)
    assert high - low > 2 * (pooled[1] - pooled[0])
    same = st.cell_interval([1.0] * 5, 400, 1 / 3)
    assert same == pytest.approx(st.wilson_interval(effective, effective))
    assert st.cell_interval([0.75], 40, 1 / 3) == st.wilson_interval(30, 40)
    assert st.cell_interval([0.7, 0.8], 40, 1 / 3) == pytest.approx(st.wilson_interval(30, 40))
