"""Intervals and tests over seeds or test rows, and adjustment for multiple comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
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


class Interval(NamedTuple):
    """Mean of n values, its standard error and interval limits; NaN where n is too small."""

    mean: float
    error: float
    low: float
    high: float
    n: int


def t_interval(values: Sequence[float]) -> Interval:
    """Mean of `values`, one per seed, with its 95 % t interval; NaN values are left out."""
    # Of two values the half width would be 12.7 standard errors, so it is NaN.
    finite = np.array([v for v in values if not math.isnan(v)], dtype=np.float64)
    n = len(finite)
    mean = float(finite.mean()) if n else math.nan
    error = float(finite.std(ddof=1)) / n**0.5 if n > 1 else math.nan
    half_width = float(stdtrit(n - 1, 0.975)) * error if n >= MIN_SEEDS else math.nan
    return Interval(mean, error, mean - half_width, mean + half_width, n)


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference between two methods; a test needs three seeds (NaN for fewer)."""

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
    how: str  # test: "corrected t", "bootstrap" or "no test"

    @property
    def significant(self) -> bool:
        """Whether the adjusted p value is below .05."""
        return self.p_holm < 0.05


# t statistic, two-sided p value, and interval limits of the mean difference.
TResult = tuple[float, float, float, float]
NO_TEST = (math.nan,) * 4


def corrected_t(
    differences: Sequence[float], ratio: float, *, min_variance: float = 0.0
) -> TResult:
    """Nadeau and Bengio's corrected resampled t test (Machine Learning 52, 2003).

    t = mean / sqrt((1/J + ratio) var), of J differences, with J - 1 degrees of freedom, and `ratio`
    n_test/n_train. As few differences may be nearly equal by chance, a second test takes
    `min_variance` and the normal distribution; the larger p and the wider interval are returned.
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
        return (0.0, 1.0, mean, mean) if mean == 0.0 else NO_TEST
    p = 2 * float(stdtr(n - 1, -abs(mean) / error)) if error > 0.0 else 0.0
    half_width = float(stdtrit(n - 1, 0.975)) * error
    if bound > 0.0:
        normal = NormalDist()
        p = max(p, 2 * normal.cdf(-abs(mean) / bound))
        half_width = max(half_width, normal.inv_cdf(0.975) * bound)
    return mean / max(error, bound), p, mean - half_width, mean + half_width


def seeds_for(deviation: float, ratio: float, half_width: float) -> int | None:
    """Number of seeds at which the 95 % interval of :func:`corrected_t` has a given half width."""
    # None above 1000: the standard error tends to deviation * sqrt(ratio), not to 0.
    for n in range(MIN_SEEDS, 1001):
        quantile = float(stdtrit(n - 1, 0.975))
        if quantile * deviation * math.sqrt(1 / n + ratio) <= half_width:
            return n
    return None


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values by Holm's method (Scandinavian Journal of Statistics 6, 1979); NaN stays."""
    adjusted = [math.nan] * len(p_values)
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[i] = largest
    return adjusted


def paired_difference(
    method: str, reference: str, values: Mapping[int, float],
    reference_values: Mapping[int, float], ratio: float, resolution: int | None = None,
) -> Difference:  # fmt: skip
    """Difference of two methods over the seeds at which both have a value, with a test."""
    # If accuracies on m = `resolution` rows differ by D, the methods differ on at least |D| m rows,
    # each of which contributes +-1 / m: the variance of D is at least |D| (1 - |D|) / m.
    pairs = [values[s] - reference_values[s] for s in values if s in reference_values]
    differences = [difference for difference in pairs if not math.isnan(difference)]
    plain = t_interval(differences)
    t, p, low, high = NO_TEST
    if len(differences) >= MIN_SEEDS:
        size = min(1.0, abs(plain.mean))
        min_variance = 0.0 if resolution is None else size * (1 - size) / resolution
        t, p, low, high = corrected_t(differences, ratio, min_variance=min_variance)
    how = "no test" if math.isnan(p) else "corrected t"
    n = len(differences)
    return Difference(method, reference, plain.mean, plain.error, low, high, t, p, p, n, how)


def bootstrap_values(statistic: Statistic, n: int, clusters: Rows | None = None) -> Float:
    """Values of a statistic on draws of all rows, or of whole clusters; () for one unit."""
    # The draws depend on n and the clusters alone: values of two statistics are paired.
    members: list[Rows] | None = None
    if clusters is not None:
        _, codes = np.unique(clusters, return_inverse=True)
        counts = np.bincount(codes)
        n, members = len(counts), np.split(np.argsort(codes, kind="stable"), np.cumsum(counts)[:-1])
    rng = np.random.default_rng(0)
    draws = (rng.integers(0, n, size=n) for _ in range(N_DRAWS if n > 1 else 0))
    if members is not None:
        draws = (np.concatenate([members[i] for i in draw]) for draw in draws)
    return np.array([statistic(rows) for rows in draws])


def bootstrap_interval(values: Float) -> tuple[float, float, float]:
    """Limits of the 95 % percentile interval of bootstrap values, and p of the hypothesis of 0."""
    values = values[~np.isnan(values)]
    if not len(values):
        return math.nan, math.nan, math.nan
    rarer = min(int(np.sum(values <= 0)), int(np.sum(values >= 0)))
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high), min(1.0, 2 * (1 + rarer) / (1 + len(values)))
