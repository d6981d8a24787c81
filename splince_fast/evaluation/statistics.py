"""Intervals and tests over seeds or test rows, and adjustment for multiple comparisons."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import scipy.stats
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from splince_fast.exceptions import InputError

Float = NDArray[np.float64]
Rows = NDArray[np.intp]
Statistic = Callable[[Rows], float]  # value of a metric on row numbers, which may repeat

MIN_SEEDS = 3  # smallest number of seeds for a test or an interval
# Values count as equal if their standard error is at most this fraction of their mean.
EQUAL_RTOL = 2.0**-40
N_DRAWS = 2000  # number of bootstrap draws
# BCa evaluates the statistic once per row that is left out. Above this number of rows, the
# percentile interval takes its place: their limits differ by a term of order 1 / n.
MAX_JACKKNIFE = 1000


class Interval(NamedTuple):
    """Mean of n values, its standard error and interval limits; NaN where n is too small."""

    mean: float
    error: float
    low: float
    high: float
    n: int


def t_interval(values: Sequence[float]) -> Interval:
    """Mean of `values`, one per seed, with its 95 % t interval; NaN values are left out.

    As the splits of one data set share rows, the interval describes the variation over splits, not
    over data sets. Fewer than three values have no interval: of two, its half width would be 12.7
    standard errors.
    """
    finite = np.array([v for v in values if not math.isnan(v)], dtype=np.float64)
    n = len(finite)
    mean = float(finite.mean()) if n else math.nan
    error = float(finite.std(ddof=1)) / n**0.5 if n > 1 else math.nan
    half_width = float(stdtrit(n - 1, 0.975)) * error if n >= MIN_SEEDS else math.nan
    return Interval(mean, error, mean - half_width, mean + half_width, n)


def wilson_interval(successes: int, n: int, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, JASA 22, 1927); (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    test = scipy.stats.binomtest(int(successes), int(n))
    low, high = test.proportion_ci(confidence_level=level, method="wilson")
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference between two methods.

    The test, its statistic and its p values are NaN for fewer than three seeds.
    """

    method: str
    reference: str
    difference: float  # mean over seeds of the method's value minus that of the reference
    error: float  # standard error over seeds, not corrected for shared rows; NaN for one seed
    low: float  # limits of the 95 % interval of the test
    high: float
    t: float
    p: float  # two-sided
    p_holm: float  # adjusted for all differences of the table
    n: int  # seeds at which both have a value
    favours_method: int  # seeds at which the method has the larger value
    favours_reference: int
    how: str  # test: "corrected t", "bootstrap (BCa)", "bootstrap (percentile)" or "no test"

    @property
    def significant(self) -> bool:
        """Whether the adjusted p value is below .05."""
        return self.p_holm < 0.05


class TResult(NamedTuple):
    """t statistic, two-sided p value, and interval limits of the mean difference."""

    t: float
    p: float
    low: float
    high: float


NO_TEST = TResult(math.nan, math.nan, math.nan, math.nan)


def corrected_t(
    differences: Sequence[float], ratio: float, level: float = 0.95, *, min_variance: float = 0.0
) -> TResult:
    """Nadeau and Bengio's corrected resampled t test (Machine Learning 52, 2003).

    The statistic is t = mean / sqrt((1/J + n_test/n_train) var), with J - 1 degrees of freedom,
    where mean and var are those of the J differences. The correction n_test/n_train is needed
    because the J splits of one data set share rows.

    If there are few seeds or few test rows, differences may be nearly equal by chance, and var is
    then too small. A second test therefore uses the normal distribution with `min_variance` instead
    of var. The larger p and the wider interval of the two tests are returned.

    `differences` has one value per seed, and `ratio` is n_test / n_train. `min_variance` is a lower
    bound of the variance of one difference; 0 omits the second test. The result is `NO_TEST` if a
    difference is infinite, or if the differences are equal up to rounding error and not 0, and
    `min_variance` is 0.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n < 2:
        raise InputError(f"a test needs at least two differences, and there are {n}")
    if np.isinf(values).any():
        return NO_TEST
    mean = float(values.mean())
    error = math.sqrt((1 / n + ratio) * float(values.var(ddof=1)))
    bound = math.sqrt((1 / n + ratio) * min_variance)
    if max(error, bound) <= EQUAL_RTOL * abs(mean):
        return TResult(0.0, 1.0, mean, mean) if mean == 0.0 else NO_TEST
    p = 2 * float(stdtr(n - 1, -abs(mean) / error)) if error > 0.0 else 0.0
    half_width = float(stdtrit(n - 1, (1 + level) / 2)) * error
    if bound > 0.0:
        normal = NormalDist()
        p = max(p, 2 * normal.cdf(-abs(mean) / bound))
        half_width = max(half_width, normal.inv_cdf((1 + level) / 2) * bound)
    return TResult(mean / max(error, bound), p, mean - half_width, mean + half_width)


def seeds_for(deviation: float, ratio: float, half_width: float) -> int | None:
    """Number of seeds at which the 95 % interval of :func:`corrected_t` has a given half width.

    The result is the smallest J >= 3 with t_{J-1} sd sqrt(1/J + ratio) <= half_width, or None if J
    would exceed 1000: as the splits share rows, the standard error tends to sd sqrt(ratio), not
    to 0. sd (`deviation`) is the standard deviation over seeds, and `ratio` is n_test / n_train.
    """
    for n in range(MIN_SEEDS, 1001):
        quantile = float(stdtrit(n - 1, 0.975))
        if quantile * deviation * math.sqrt(1 / n + ratio) <= half_width:
            return n
    return None


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values by Holm's step-down method (Scandinavian Journal of Statistics 6, 1979).

    The i-th smallest of m p values, p_(i), becomes max_{j <= i} min(1, (m - j + 1) p_(j)). NaN
    values stay NaN and do not count in m.
    """
    adjusted = [math.nan] * len(p_values)
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[i] = largest
    return adjusted


def paired_difference(
    method: str,
    reference: str,
    values: Mapping[int, float],
    reference_values: Mapping[int, float],
    ratio: float,
    resolution: int | None = None,
) -> Difference:
    """Difference of two methods over the seeds at which both have a value, with a test.

    `values` and `reference_values` map seeds to values, and `ratio` is n_test / n_train.
    `resolution` is m for values that are fractions of m test rows (for a worst group, the rows of
    the smallest cell), and None for other values. ``p_holm`` is set to ``p``; the caller adjusts
    ``p_holm``.

    `resolution` gives the lower bound `min_variance` of :func:`corrected_t`: if the accuracies of
    two methods on m test rows differ by D, the methods differ on at least |D| m rows, each of which
    contributes +-1 / m to D. Over random draws of the rows, the variance of D is therefore at least
    |D| (1 - |D|) / m.
    """
    seeds = [
        s for s in values
        if s in reference_values and not math.isnan(values[s] + reference_values[s])
    ]  # fmt: skip
    differences = [values[s] - reference_values[s] for s in seeds]
    plain = t_interval(differences)
    test = NO_TEST
    if len(differences) >= MIN_SEEDS:
        size = min(1.0, abs(plain.mean))
        min_variance = 0.0 if resolution is None else size * (1 - size) / resolution
        test = corrected_t(differences, ratio, min_variance=min_variance)
    how = "no test" if math.isnan(test.p) else "corrected t"
    return Difference(
        method, reference, plain.mean, plain.error, test.low, test.high, test.t, test.p, test.p,
        len(seeds), sum(v > 0 for v in differences), sum(v < 0 for v in differences), how,
    )  # fmt: skip


def cell_interval(rates: Sequence[float], n: float, ratio: float) -> tuple[float, float]:
    """95 % interval in [0, 1] of the accuracy in a cell, over J splits that share rows.

    `rates` holds the J accuracies in the cell, one per seed; `n` is the number of test rows of the
    cell per seed; `ratio` is n_test / n_train.

    The result is the union of two intervals: that of :func:`corrected_t`, and Wilson's interval for
    min(J n, n / (1/J + ratio)) rows. Wilson's interval for J n rows would be too narrow, because a
    row may be a test row at several seeds. For fewer than three seeds, the result is Wilson's
    interval for n rows.
    """
    mean = math.fsum(rates) / len(rates)
    if len(rates) < MIN_SEEDS:
        return wilson_interval(round(mean * n), round(n))
    effective = round(min(len(rates) * n, n / (1 / len(rates) + ratio)))
    low, high = wilson_interval(round(mean * effective), effective)
    test = corrected_t(rates, ratio)
    if not math.isnan(test.low):
        low, high = min(low, max(0.0, test.low)), max(high, min(1.0, test.high))
    return low, high


class BootstrapResult(NamedTuple):
    """Bootstrap interval of a statistic, and two-sided p value of the hypothesis that it is 0."""

    low: float
    high: float
    p: float
    how: str  # "bootstrap (BCa)", "bootstrap (percentile)" or "no test"


def over_clusters(statistic: Statistic, clusters: Rows | None) -> Statistic:
    """Return the statistic as a function of cluster numbers; the clusters have codes (n,)."""
    if clusters is None:
        return statistic
    _, codes = np.unique(clusters, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    return lambda drawn: statistic(np.concatenate([members[i] for i in drawn]))


def bootstrap_values(statistic: Statistic, n: int) -> Float:
    """Values of a statistic on `N_DRAWS` draws of n of n units; the draws depend on n alone."""
    rng = np.random.default_rng(0)
    return np.array([statistic(rng.integers(0, n, size=n)) for _ in range(N_DRAWS)])


def bootstrap_test(statistic: Statistic, n: int, values: Float, *, smooth: bool) -> BootstrapResult:
    """Return a statistic's 95 % bootstrap interval, and its p value for the hypothesis of 0.

    `statistic` is a function of the numbers of n units (rows or clusters), and `values` holds its
    values on the draws of :func:`bootstrap_values`; NaN values are left out. The interval is BCa
    (B. Efron, JASA 82, 1987). It is the percentile interval unless the statistic is `smooth`, which
    a minimum over groups is not, and for more than `MAX_JACKKNIFE` units. The p value is twice the
    fraction of the draws on the rarer side of 0. All results are NaN for one unit.
    """
    values = values[~np.isnan(values)]
    if len(values) < 2 or n < 2:
        return BootstrapResult(math.nan, math.nan, math.nan, "no test")
    rarer = min(int(np.sum(values <= 0)), int(np.sum(values >= 0)))
    p = min(1.0, 2 * (1 + rarer) / (1 + len(values)))
    low, high = np.quantile(values, [0.025, 0.975])
    how, known = "bootstrap (percentile)", SimpleNamespace(bootstrap_distribution=values)
    if smooth and n <= MAX_JACKKNIFE and low < high:
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            warnings.simplefilter("ignore", scipy.stats.DegenerateDataWarning)
            limits = scipy.stats.bootstrap(
                (np.arange(n),), statistic, n_resamples=0, vectorized=False, method="BCa",
                bootstrap_result=cast(Any, known),
            ).confidence_interval  # fmt: skip
        # NaN where the statistic has no value without one of the units
        if not np.isnan(limits).any():
            (low, high), how = limits, "bootstrap (BCa)"
    return BootstrapResult(float(low), float(high), p, how)
