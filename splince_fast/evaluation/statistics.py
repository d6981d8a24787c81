"""Intervals and tests: over seeds, over test rows, and over several comparisons at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError

Float = NDArray[np.float64]

MIN_SEEDS = 3  # below it no test is made and no interval given
EQUAL = 2.0**-40  # relative: differences that vary by less are equal to rounding
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
    figure varies with the split, not with a new data set. Below three values there is none: with
    one degree of freedom it is 12.7 standard errors wide on each side.

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
    if n < MIN_SEEDS:
        return Interval(mean, error, math.nan, math.nan, n)
    half = float(t.ppf((1 + level) / 2, n - 1)) * error
    return Interval(mean, error, mean - half, mean + half, n)


def wilson_interval(successes: float, n: float, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, JASA 22, 1927).

    (p + q^2/2n -+ q sqrt(p(1-p)/n + q^2/4n^2)) / (1 + q^2/n), q the normal quantile.

    Parameters
    ----------
    successes : float
        Number of successes, at most n.
    n : float
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
    differences: Sequence[float], ratio: float, level: float = 0.95, *, least: float = 0.0
) -> tuple[float, float, float, float]:
    """Nadeau and Bengio's corrected resampled t test (Machine Learning 52, 2003).

    t = mean / sqrt((1/J + n_test/n_train) var), J - 1 degrees of freedom: resamplings of one
    data set overlap, and the plain t test takes them for independent. Few seeds and few test
    rows may give equal differences by chance: with `least`, a known lower bound of var, the
    normal test with that variance has to reject, too; p is the larger of both, and the interval
    the wider one.

    Parameters
    ----------
    differences : sequence of float
        One per seed, at least two.
    ratio : float
        n_test / n_train.
    level : float
        Of the interval.
    least : float
        Lower bound of the variance of one difference.

    Returns
    -------
    tuple of float
        t, two-sided p, and the limits of the interval of the mean difference. NaN where the
        differences are equal to rounding, their mean is not 0, and `least` is 0: without a
        variance there is no test.

    Raises
    ------
    InputError
        Fewer than two differences.
    """
    from scipy.stats import t as student

    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n < 2:
        raise InputError(f"a test needs at least two differences, and there are {n}")
    mean = float(values.mean())
    error = math.sqrt((1 / n + ratio) * float(values.var(ddof=1)))
    bound = math.sqrt((1 / n + ratio) * least)
    if max(error, bound) <= EQUAL * abs(mean):
        return (0.0, 1.0, mean, mean) if mean == 0.0 else (math.nan,) * 4
    p = 2 * float(student.sf(abs(mean) / error, n - 1)) if error > 0.0 else 0.0
    half = float(student.ppf((1 + level) / 2, n - 1)) * error
    if bound > 0.0:
        normal = NormalDist()
        p = max(p, 2 * normal.cdf(-abs(mean) / bound))
        half = max(half, normal.inv_cdf((1 + level) / 2) * bound)
    return mean / max(error, bound), p, mean - half, mean + half


def seeds_for(deviation: float, ratio: float, half: float, level: float = 0.95) -> int | None:
    """Seeds after which the interval of :func:`corrected_t` is at most `half` wide on each side.

    The least J with t_{J-1} sd sqrt(1/J + n_test/n_train) <= half. As the splits share rows, the
    standard error tends to sd sqrt(n_test/n_train), not to 0.

    Parameters
    ----------
    deviation : float
        sd of the difference over seeds.
    ratio : float
        n_test / n_train.
    half : float
        Half of the width, above 0.
    level : float
        Of the interval.

    Returns
    -------
    int or None
        At most 1000; None where no such number is enough.
    """
    from scipy.stats import t as student

    for n in range(MIN_SEEDS, 1001):
        quantile = float(student.ppf((1 + level) / 2, n - 1))
        if quantile * deviation * math.sqrt(1 / n + ratio) <= half:
            return n
    return None


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
    resolution: int | None = None,
) -> Difference:
    """The difference of two methods over the seeds that both have.

    Two methods whose fractions of correct decisions on the same m test rows differ by D disagree
    on |D| m of them or more, each of which contributes +-1 / m. Over draws of the rows the
    variance of D is then at least |D| (1 - |D|) / m, and is not taken for smaller: few seeds may
    give equal differences by chance.

    Parameters
    ----------
    method, reference : str
        Names.
    ours, theirs : dict of seed to float
        Their values.
    ratio : float
        n_test / n_train.
    resolution : int, optional
        m where the values are fractions of test rows: those of the smallest cell for a figure
        that a cell decides. Without it differences that are equal to rounding are not tested.

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
    size = min(1.0, abs(plain.mean))
    least = 0.0 if resolution is None else size * (1 - size) / resolution
    t, p, low, high = corrected_t(values, ratio, least=least)
    how = "no test" if math.isnan(p) else "corrected t"
    return Difference(
        method, reference, plain.mean, plain.error, low, high, t, p, p, len(values), *wins, how
    )


def cell_interval(rates: Sequence[float], n: float, ratio: float) -> tuple[float, float]:
    """95 % interval of the accuracy in a cell over J resamplings that share rows.

    The corrected resampled t interval of :func:`corrected_t`, or Wilson's with n / (1/J + ratio)
    rows where that is wider, as where all resamplings give the same figure. Pooled rows would
    count a test row once per seed.

    Parameters
    ----------
    rates : sequence of float
        Accuracy in the cell, one per seed.
    n : float
        Test rows of the cell per seed.
    ratio : float
        n_test / n_train.

    Returns
    -------
    tuple of float
        Limits in [0, 1]; below three seeds those of Wilson's interval for n rows.
    """
    mean = math.fsum(rates) / len(rates)
    if len(rates) < MIN_SEEDS:
        return wilson_interval(mean * n, n)
    effective = min(len(rates) * n, n / (1 / len(rates) + ratio))
    low, high = wilson_interval(mean * effective, effective)
    _, _, least, most = corrected_t(rates, ratio)
    if not math.isnan(least):
        low, high = min(low, max(0.0, least)), max(high, min(1.0, most))
    return low, high


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
    values: Float | None = None,
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
    values : array, optional
        The statistic of the draws, where it is known already.

    Returns
    -------
    tuple of float
        The limits.
    """
    low, high, _ = bootstrap_test(
        statistic, n, draws, clusters=clusters, bca=bca, level=level, values=values
    )
    return low, high


def bootstrap_test(
    statistic: Callable[[NDArray[np.intp]], float],
    n: int,
    draws: Sequence[NDArray[np.intp]],
    *,
    clusters: NDArray[Any] | None = None,
    bca: bool,
    level: float = 0.95,
    values: Float | None = None,
) -> tuple[float, float, float]:
    """The interval of :func:`bootstrap_interval` and the p value of 0 that belongs to it.

    p is the smallest alpha at which the interval of level 1 - alpha leaves 0 out, so that p and
    interval agree at every level; at least 1 / (B + 1) for B draws.

    Parameters
    ----------
    statistic, n, draws, clusters, bca, level, values
        As for :func:`bootstrap_interval`.

    Returns
    -------
    tuple of float
        The limits, and the two-sided p value.
    """
    from scipy.special import ndtr, ndtri

    if values is None:
        values = np.array([statistic(draw) for draw in draws])
    values = np.sort(values[~np.isnan(values)])
    if len(values) < 2:
        return math.nan, math.nan, math.nan
    z0 = a = 0.0
    if bca:
        full = statistic(np.arange(n))
        share = (np.sum(values < full) + np.sum(values <= full)) / (2 * len(values))
        if 0 < share < 1:
            z0, a = float(ndtri(share)), _acceleration(statistic, n, clusters)

    def limits(alpha: float) -> tuple[float, float]:
        tails = np.array([alpha / 2, 1 - alpha / 2])
        if z0 or a:
            shifted = z0 + ndtri(tails)
            tails = ndtr(z0 + shifted / (1 - a * shifted))
        low, high = np.quantile(values, tails)
        return float(low), float(high)

    # 0 is inside at alpha = inside, and outside at alpha = outside.
    inside, outside = 1 / (len(values) + 1), 1.0
    if not _holds_zero(limits(inside)):
        p = inside
    elif _holds_zero(limits(outside)):
        p = outside
    else:
        for _ in range(40):
            middle = (inside + outside) / 2
            if _holds_zero(limits(middle)):
                inside = middle
            else:
                outside = middle
        p = outside
    return *limits(1 - level), p


def _holds_zero(limits: tuple[float, float]) -> bool:
    return limits[0] <= 0.0 <= limits[1]


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
