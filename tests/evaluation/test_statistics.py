"""Tests and intervals against SciPy, published formulas and simulation."""

from __future__ import annotations

import math

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


def test_overlap_shrinks_t_by_the_published_factor() -> None:
    values = np.random.default_rng(0).normal(0.3, 1, 5)
    plain, corrected = st.corrected_t(values, 0.0)[0], st.corrected_t(values, 0.25)[0]
    assert corrected == pytest.approx(plain * math.sqrt(0.2 / 0.45))


def test_the_figures_of_the_data_s_description() -> None:
    # SPLINCE minus LEACE of table A: differences of mean .056, error .011 give t = 4.00, p = .057.
    shape = np.array([-1.0, 0.0, 1.0])
    values = 0.056 + shape * 0.011 * math.sqrt(3)
    t, p, _, _ = st.corrected_t(values, 1000 / 4000)
    assert t == pytest.approx(0.056 / (0.011 * math.sqrt(3) * math.sqrt(1 / 3 + 0.25)))
    assert p == pytest.approx(0.057, abs=0.006)


def test_equal_differences_have_no_variance() -> None:
    assert st.corrected_t([0.0, 0.0, 0.0], 0.2)[:2] == (0.0, 1.0)
    assert st.corrected_t([0.1, 0.1, 0.1], 0.2)[1] < 1e-12
    with pytest.raises(InputError, match="two"):
        st.corrected_t([0.1], 0.2)


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


@pytest.mark.parametrize("bca", [True, False])
def test_a_bootstrap_interval_is_scipy_s(bca: bool) -> None:
    x = np.random.default_rng(0).exponential(size=80)
    draws = st.bootstrap_indices(80, None, 2000, 0)
    found = st.bootstrap_interval(lambda rows: float(x[rows].mean()), 80, draws, bca=bca)
    known = scipy.stats.bootstrap(
        (x,), np.mean, n_resamples=4000, method="BCa" if bca else "percentile", rng=1
    ).confidence_interval
    assert found == pytest.approx(tuple(known), abs=0.03)


def test_clusters_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(30), 10)
    x = rng.normal(size=30)[clusters]
    widths = []
    for of in (None, clusters):
        draws = st.bootstrap_indices(300, of, 500, 0)
        low, high = st.bootstrap_interval(
            lambda rows: float(x[rows].mean()), 300, draws, clusters=of, bca=True
        )
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]
