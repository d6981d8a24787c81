"""Intervals and tests: over seeds, over test rows, and over several comparisons at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError

Float = NDArray[np.float64]

MIN_SEEDS = 3  # below it no test is made
N_DRAWS = 2000


class Interval(NamedTuple):
    """A mean with its standard error and limits; NaN where one value says nothing of them."""

    mean: float
    error: float
    low: float
    high: float
    n: int


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean and t interval of the mean; NaN entries are left out.

    The interval is over J resamplings of one data set: they share rows, so it says how the
    figure varies with the split, not with a new data set.

    Parameters
    ----------
    values : sequence of float
        One per seed.
    level : float
        Of the interval.

    Returns
    -------
    Interval
        With ``error = sd / sqrt(J)``, ddof 1.
    """
    from scipy.stats import t

    known = np.array([v for v in values if not math.isnan(v)], dtype=np.float64)
    n = len(known)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, math.nan, 0)
    mean = float(known.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, math.nan, 1)
    error = float(known.std(ddof=1)) / n**0.5
    half = float(t.ppf((1 + level) / 2, n - 1)) * error
    return Interval(mean, error, mean - half, mean + half, n)


def wilson_interval(successes: float, n: int, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, JASA 22, 1927).

    (p + q^2/2n -+ q sqrt(p(1-p)/n + q^2/4n^2)) / (1 + q^2/n), q the normal quantile.

    Parameters
    ----------
    successes : float
        Number of successes, at most n.
    n : int
        Number of trials.
    level : float
        Of the interval.

    Returns
    -------
    tuple of float
        Limits in [0, 1]; (0, 1) where n is 0.
    """
    if n == 0:
        return 0.0, 1.0
    q = _normal_quantile((1 + level) / 2)
    p = successes / n
    centre = p + q * q / (2 * n)
    half = q * math.sqrt(p * (1 - p) / n + q * q / (4 * n * n))
    scale = 1 + q * q / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _normal_quantile(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference between two methods.

    Attributes
    ----------
    method, reference : str
    difference : float
        Mean of method minus reference.
    error : float
        Standard error over seeds without correction; NaN where there is one.
    low, high : float
        95 % interval: of the corrected t test, or of the bootstrap.
    t, p, p_holm : float
        Corrected t, its two-sided p value, and that adjusted for all differences of the table;
        NaN below three seeds or without a test.
    n : int
        Seeds (pairs).
    favours_method, favours_reference : int
        Seeds in which each has the larger value.
    how : str
        "corrected t", "bootstrap (BCa)", "bootstrap (percentile)" or "no test".
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


def corrected_t(
    differences: Sequence[float], ratio: float, level: float = 0.95
) -> tuple[float, float, float, float]:
    """Nadeau and Bengio's corrected resampled t test (Machine Learning 52, 2003).

    t = mean / sqrt((1/J + n_test/n_train) var), J - 1 degrees of freedom: resamplings of one
    data set overlap, and the plain t test takes them for independent.

    Parameters
    ----------
    differences : sequence of float
        One per seed, at least two.
    ratio : float
        n_test / n_train.
    level : float
        Of the interval.

    Returns
    -------
    tuple of float
        t, two-sided p, and the limits of the interval of the mean difference.
    """
    from scipy.stats import t as student

    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n < 2:
        raise InputError(f"a test needs at least two differences, and there are {n}")
    mean = float(values.mean())
    error = math.sqrt((1 / n + ratio) * float(values.var(ddof=1)))
    if error == 0.0:
        if mean == 0.0:
            return 0.0, 1.0, mean, mean
        return math.copysign(math.inf, mean), 0.0, mean, mean
    statistic = mean / error
    p = 2 * float(student.sf(abs(statistic), n - 1))
    half = float(student.ppf((1 + level) / 2, n - 1)) * error
    return statistic, p, mean - half, mean + half


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (Scandinavian Journal of Statistics 6, 1979); NaN stay NaN.

    p_(i) -> max_{j <= i} min(1, (m - j + 1) p_(j)) over the m values in ascending order.

    Parameters
    ----------
    p_values : sequence of float
        Of one family of tests.

    Returns
    -------
    list of float
        In the given order.
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
    ours: dict[Any, float],
    theirs: dict[Any, float],
    ratio: float,
) -> Difference:
    """The difference of two methods over the seeds that both have.

    Parameters
    ----------
    method, reference : str
        Names.
    ours, theirs : dict of seed to float
        Their values.
    ratio : float
        n_test / n_train.

    Returns
    -------
    Difference
        With ``p_holm`` equal to ``p``: the caller adjusts the family.
    """
    seeds = [s for s in ours if s in theirs and not math.isnan(ours[s] + theirs[s])]
    values = [ours[s] - theirs[s] for s in seeds]
    plain = t_interval(values)
    wins = sum(v > 0 for v in values), sum(v < 0 for v in values)
    nan = math.nan
    if len(values) < MIN_SEEDS:
        return Difference(
            method, reference, plain.mean, plain.error, nan, nan, nan, nan, nan, len(values),
            *wins, "no test",
        )  # fmt: skip
    t, p, low, high = corrected_t(values, ratio)
    return Difference(
        method, reference, plain.mean, plain.error, low, high, t, p, p, len(values), *wins,
        "corrected t",
    )  # fmt: skip


def bootstrap_indices(
    n: int, clusters: NDArray[Any] | None, n_draws: int, seed: int
) -> list[NDArray[np.intp]]:
    """Draws of rows with replacement; whole clusters where they are given."""
    rng = np.random.default_rng(seed)
    if clusters is None:
        return [rng.integers(0, n, size=n) for _ in range(n_draws)]
    _, codes = np.unique(clusters, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    draws = (rng.integers(0, len(members), size=len(members)) for _ in range(n_draws))
    return [np.concatenate([members[i] for i in draw]) for draw in draws]


def bootstrap_interval(
    statistic: Callable[[NDArray[np.intp]], float],
    n: int,
    draws: Sequence[NDArray[np.intp]],
    *,
    clusters: NDArray[Any] | None = None,
    bca: bool,
    level: float = 0.95,
) -> tuple[float, float]:
    """Bootstrap interval of a statistic of row numbers: percentile, or BCa.

    BCa shifts the percentiles by the median bias z0 and the acceleration a of the jackknife
    (B. Efron, JASA 82, 1987)::

        alpha = Phi(z0 + (z0 + q) / (1 - a (z0 + q)))

    It needs a smooth statistic: a minimum over groups has none, so take the percentile interval
    there; for a worst group it is conservative.

    Parameters
    ----------
    statistic : callable
        Row numbers (with repetitions) -> float; NaN values are left out.
    n : int
        Number of rows.
    draws : sequence of arrays
        From :func:`bootstrap_indices`.
    clusters : (n,) array, optional
        The jackknife then leaves out whole clusters.
    bca : bool
        BCa or percentile.
    level : float
        Of the interval.

    Returns
    -------
    tuple of float
        The limits.
    """
    from scipy.stats import norm

    values = np.array([statistic(draw) for draw in draws])
    values = values[~np.isnan(values)]
    if len(values) < 2:
        return math.nan, math.nan
    tails = np.array([(1 - level) / 2, (1 + level) / 2])
    if bca:
        full = statistic(np.arange(n))
        share = (np.sum(values < full) + np.sum(values <= full)) / (2 * len(values))
        if 0 < share < 1:
            z0, a = float(norm.ppf(share)), _acceleration(statistic, n, clusters)
            shifted = z0 + norm.ppf(tails)
            tails = norm.cdf(z0 + shifted / (1 - a * shifted))
    low, high = np.quantile(values, tails)
    return float(low), float(high)


def _acceleration(
    statistic: Callable[[NDArray[np.intp]], float], n: int, clusters: NDArray[Any] | None
) -> float:
    """sum u^3 / (6 (sum u^2)^1.5) of the jackknife's deviations u, over at most 200 blocks."""
    if clusters is None:
        block = np.arange(n) * min(n, 200) // n
    else:
        _, codes = np.unique(clusters, return_inverse=True)
        size = int(codes.max()) + 1
        block = codes * min(size, 200) // size
    left_out = np.array([statistic(np.flatnonzero(block != b)) for b in range(block.max() + 1)])
    u = left_out.mean() - left_out
    scale = float(np.sum(u**2)) ** 1.5
    return float(np.sum(u**3)) / (6 * scale) if scale > 0 else 0.0
