"""Intervals and tests over seeds or test rows, and adjustment for multiple comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from splince_fast.exceptions import InputError

Float = NDArray[np.float64]
Rows = NDArray[np.intp]
Statistic = Callable[[Rows], float]  # value of a metric on row numbers, which may repeat

MIN_SEEDS = 3  # smallest number of seeds for a test or an interval
# Values count as equal if their standard error is at most this fraction of their mean.
EQUAL_RTOL = 2.0**-40
N_DRAWS = 2000  # number of bootstrap draws


class Interval(NamedTuple):
    """Mean of n values, its standard error and interval limits; NaN where n is too small."""

    mean: float
    error: float
    low: float
    high: float
    n: int


def t_interval(values: Sequence[float]) -> Interval:
    """Mean of `values`, one per seed, with its 95 % t interval; NaN values are left out.

    The standard error is sd / sqrt(J) for J values, with ddof 1. As the J splits of one data set
    share rows, the interval describes the variation over splits, not over data sets. Fewer than
    three values have no interval: for two values, its half width would be 12.7 standard errors.
    """
    finite = np.array([v for v in values if not math.isnan(v)], dtype=np.float64)
    n = len(finite)
    mean = float(finite.mean()) if n else math.nan
    error = float(finite.std(ddof=1)) / n**0.5 if n > 1 else math.nan
    half_width = float(stdtrit(n - 1, 0.975)) * error if n >= MIN_SEEDS else math.nan
    return Interval(mean, error, mean - half_width, mean + half_width, n)


def wilson_interval(successes: float, n: float, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of the proportion p = successes / n (E. B. Wilson, JASA 22, 1927).

    The limits are (p + q^2/(2n) -+ q sqrt(p(1-p)/n + q^2/(4n^2))) / (1 + q^2/n), where q is the
    normal quantile of (1 + level) / 2. They are (0, 1) for n = 0.
    """
    if n == 0:
        return 0.0, 1.0
    q = NormalDist().inv_cdf((1 + level) / 2)
    p = successes / n
    centre = p + q * q / (2 * n)
    half_width = q * math.sqrt(p * (1 - p) / n + q * q / (4 * n * n))
    scale = 1 + q * q / n
    return max(0.0, (centre - half_width) / scale), min(1.0, (centre + half_width) / scale)


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference between two methods.

    Attributes
    ----------
    method, reference : str
        Names of the two methods, such as erasers.
    difference : float
        Mean over seeds of the value of the method minus the value of the reference.
    error : float
        Standard error over seeds, not corrected for shared rows; NaN for one seed.
    low, high : float
        Limits of the 95 % interval of the test that `how` names.
    t, p, p_holm : float
        Corrected t statistic, two-sided p value, and p value adjusted for all differences of the
        table. NaN if there is no test, such as for fewer than three seeds.
    n : int
        Number of seeds at which both methods have a value.
    favours_method, favours_reference : int
        Number of seeds at which the method has the larger value, and number of seeds at which the
        reference has it.
    how : str
        Name of the test: "corrected t", "bootstrap (BCa)", "bootstrap (percentile)" or "no test".
    """

    method: str
    reference: str
    difference: float
    error: float
    low: float
    high: float
    t: float
    p: float
    p_holm: float
    n: int
    favours_method: int
    favours_reference: int
    how: str

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

    Raises
    ------
    InputError
        There are fewer than two differences.
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
    would exceed 1000. t_{J-1} is the .975 quantile of the t distribution, sd (`deviation`) is the
    standard deviation over seeds, and `ratio` is n_test / n_train. As the splits share rows, the
    standard error tends to sd sqrt(ratio), not to 0.
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
        return wilson_interval(mean * n, n)
    effective = min(len(rates) * n, n / (1 / len(rates) + ratio))
    low, high = wilson_interval(mean * effective, effective)
    test = corrected_t(rates, ratio)
    if not math.isnan(test.low):
        low, high = min(low, max(0.0, test.low)), max(high, min(1.0, test.high))
    return low, high


def bootstrap_indices(n: int, clusters: Rows | None, n_draws: int, random_state: int) -> list[Rows]:
    """Return the row numbers of each bootstrap draw.

    A draw consists of n of the n rows, with replacement. If `clusters` holds codes (n,), whole
    clusters are drawn instead of rows.
    """
    rng = np.random.default_rng(random_state)
    if clusters is None:
        return [rng.integers(0, n, size=n) for _ in range(n_draws)]
    _, codes = np.unique(clusters, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    cluster_rows = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    draws = (rng.integers(0, len(cluster_rows), size=len(cluster_rows)) for _ in range(n_draws))
    return [np.concatenate([cluster_rows[i] for i in draw]) for draw in draws]


class BootstrapResult(NamedTuple):
    """Bootstrap interval of a statistic, and two-sided p value of the hypothesis that it is 0."""

    low: float
    high: float
    p: float


def bootstrap_test(
    statistic: Statistic,
    n: int,
    values: Float,
    *,
    clusters: Rows | None = None,
    bca: bool,
) -> BootstrapResult:
    """Return a statistic's 95 % bootstrap interval, and its p value for the hypothesis of 0.

    `statistic` is a function of row numbers, and `values`, (B,), holds its values on the B draws of
    :func:`bootstrap_indices`; NaN values are left out. With `clusters`, codes (n,), the jackknife
    leaves out whole clusters. All results are NaN for one row or one cluster.

    The limits of the percentile interval of level 1 - alpha are the quantiles of `values` at
    alpha / 2 and 1 - alpha / 2. With `bca`, these two numbers, Phi(q), are replaced by ::

        Phi(z0 + (z0 + q) / (1 - a (z0 + q)))

    where Phi is the normal distribution function, z0 the median bias, and a the acceleration of the
    jackknife (B. Efron, JASA 82, 1987). BCa needs a smooth statistic; for a minimum over groups,
    use the percentile interval, which is conservative.

    The p value is the smallest alpha at which the interval of level 1 - alpha excludes 0, and at
    least 1 / (B + 1). Therefore p value and interval agree at every level.
    """
    values = np.sort(values[~np.isnan(values)])
    n_units = n if clusters is None else len(np.unique(clusters))
    if len(values) < 2 or n_units < 2:  # one unit: all draws are equal
        return BootstrapResult(math.nan, math.nan, math.nan)
    z0 = a = 0.0
    if bca:
        estimate = statistic(np.arange(n))
        fraction = (np.sum(values < estimate) + np.sum(values <= estimate)) / (2 * len(values))
        if 0 < fraction < 1:
            z0, a = float(ndtri(fraction)), _acceleration(statistic, n, clusters)

    def limits(alpha: float) -> tuple[float, float]:
        tails = np.array([alpha / 2, 1 - alpha / 2])
        if z0 or a:
            shifted = z0 + ndtri(tails)
            tails = ndtr(z0 + shifted / (1 - a * shifted))
        low, high = np.quantile(values, tails)
        return float(low), float(high)

    def contains_zero(alpha: float) -> bool:
        low, high = limits(alpha)
        return low <= 0.0 <= high

    # Bisection for the p value: the interval of level 1 - alpha contains 0 at alpha = `inside`,
    # but not at alpha = `outside`.
    inside, outside = 1 / (len(values) + 1), 1.0
    if not contains_zero(inside):
        outside = inside
    elif not contains_zero(outside):
        for _ in range(40):
            middle = (inside + outside) / 2
            if contains_zero(middle):
                inside = middle
            else:
                outside = middle
    return BootstrapResult(*limits(1 - 0.95), outside)


def _acceleration(statistic: Statistic, n: int, clusters: Rows | None) -> float:
    """Return the acceleration a = sum_b u_b^3 / (6 (sum_b u_b^2)^1.5) of BCa.

    The rows (or clusters) are divided into at most 200 jackknife blocks b. With s_b the statistic
    without block b, u_b is the mean of all s minus s_b.
    """
    if clusters is None:
        block = np.arange(n) * min(n, 200) // n
    else:
        _, codes = np.unique(clusters, return_inverse=True)
        size = int(codes.max()) + 1
        block = codes * min(size, 200) // size
    jackknife = np.array([statistic(np.flatnonzero(block != b)) for b in range(block.max() + 1)])
    u = jackknife.mean() - jackknife
    scale = float(np.sum(u**2)) ** 1.5
    return float(np.sum(u**3)) / (6 * scale) if scale > 0 else 0.0
