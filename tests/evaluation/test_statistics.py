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


def test_equal_and_infinite_differences_have_no_test() -> None:
    assert st.corrected_t([0.0, 0.0, 0.0], 0.2)[:2] == (0.0, 1.0)
    # the deviation of three equal floats is rounding: 1.4e-17 would make t = 1e16
    for values in ([0.1, 0.1, 0.1], [np.inf] * 3, [0.1, np.inf, 0.2], [0.1, -np.inf, np.inf]):
        assert all(map(math.isnan, st.corrected_t(values, 0.2)))
    with pytest.raises(InputError, match="two"):
        st.corrected_t([0.1], 0.2)


def test_holm_is_the_step_down_rule() -> None:
    assert st.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert st.holm([0.5, math.nan])[0] == 0.5
    assert math.isnan(st.holm([0.5, math.nan])[1])
    assert st.holm([0.6, 0.9]) == [1.0, 1.0]


def test_a_bootstrap_interval_is_scipy_s() -> None:
    x = np.random.default_rng(0).exponential(size=30) ** 2

    def mean(rows: Any) -> float:
        return float(x[rows].mean())

    low, high, _ = st.bootstrap_interval(st.bootstrap_values(mean, 30))
    known = scipy.stats.bootstrap(
        (x,), np.mean, n_resamples=5000, method="percentile", random_state=np.random.default_rng(1)
    ).confidence_interval
    # The standard error of a tail quantile of 2,000 draws is about 2 % of it.
    assert (low, high) == pytest.approx(tuple(known), rel=0.1)
    sides = set()  # p < .05 and 0 outside the interval, on 60 samples about the boundary
    for i in range(60):
        x = np.random.default_rng(i).exponential(size=40) - 0.72  # two standard errors above 0
        low, high, p = st.bootstrap_interval(st.bootstrap_values(mean, 40))
        assert (p < 0.05) == (low > 0 or high < 0)
        sides.add(p < 0.05)
    assert sides == {True, False}


def test_the_variance_of_a_difference_is_at_least_that_of_its_test_rows() -> None:
    equal, zero = dict.fromkeys(range(3), 0.75), dict.fromkeys(range(3), 0.7)
    found = st.paired_difference("a", "b", equal, zero, 0.25, 20)
    error = math.sqrt((1 / 3 + 0.25) * 0.05 * 0.95 / 20)
    limits = 0.05 - 1.959964 * error, 0.05 + 1.959964 * error
    assert (found.t, found.low, found.high) == pytest.approx((0.05 / error, *limits))
    assert found.p == pytest.approx(2 * scipy.stats.norm.sf(0.05 / error))
    two = [{seed: values[seed] for seed in range(2)} for values in (equal, zero)]
    for untested in (
        st.paired_difference("a", "b", equal, zero, 0.25),  # on an unknown number of rows
        st.paired_difference("a", "b", *two, 0.25, 20),
    ):
        assert (untested.how, untested.significant) == ("no test", False)
        assert math.isnan(untested.p)
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


def test_clusters_are_drawn_whole() -> None:
    clusters = np.array([7, 7, 2, 9, 2])
    drawn: list[list[int]] = []
    st.bootstrap_values(lambda rows: drawn.append(rows.tolist()) or 0.0, 5, clusters)
    assert len(drawn) == st.N_DRAWS
    for rows in drawn:
        counts = np.bincount(rows, minlength=5)
        assert (counts[0], counts[2]) == (counts[1], counts[4])
        assert counts[0] + counts[2] + counts[3] == 3
    alone = st.bootstrap_interval(st.bootstrap_values(lambda rows: 0.0, 5, np.zeros(5)))
    assert all(map(math.isnan, alone))


def test_p_of_the_bootstrap_is_twice_the_rarer_side() -> None:
    values = np.arange(-30.0, 970.0) + 0.5  # 30 of 1,000 draws below 0
    for draws in (values, -values, np.append(values, np.nan)):
        assert st.bootstrap_interval(draws)[2] == 2 * 31 / 1001
    for value, p in ((0.0, 1.0), (1.0, 2 / 301)):  # draws without variation
        assert st.bootstrap_interval(np.full(300, value)) == (value, value, pytest.approx(p))
