"""Intervals and tests: over seeds, over test rows, and over several comparisons at once."""

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
Statistic = Callable[[Rows], float]  # of row numbers, with repetitions

MIN_SEEDS = 3  # fewer seeds give no test and no interval
EQUAL = 2.0**-40  # differences whose relative spread is below this are equal up to rounding
N_DRAWS = 2000


class Interval(NamedTuple):
    """A mean with its standard error and limits, NaN where n is too small for them."""

    mean: float
    error: float
    low: float
    high: float
    n: int


def t_interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % t interval of the mean of `values`, one per seed; NaN entries are left out.

    The standard error is sd / sqrt(J), ddof 1. The J resamplings of one data set share rows: the
    interval says how the figure varies with the split, not with a new data set. Below three values
    there is none: with one degree of freedom it is 12.7 standard errors wide on each side.
    """
    finite = np.array([v for v in values if not math.isnan(v)], dtype=np.float64)
    n = len(finite)
    mean = float(finite.mean()) if n else math.nan
    error = float(finite.std(ddof=1)) / n**0.5 if n > 1 else math.nan
    half = float(stdtrit(n - 1, 0.975)) * error if n >= MIN_SEEDS else math.nan
    return Interval(mean, error, mean - half, mean + half, n)


def wilson_interval(successes: float, n: float, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson, JASA 22, 1927).

    (p + q^2/2n -+ q sqrt(p(1-p)/n + q^2/4n^2)) / (1 + q^2/n), q the normal quantile; (0, 1) for
    n = 0.
    """
    if n == 0:
        return 0.0, 1.0
    q = NormalDist().inv_cdf((1 + level) / 2)
    p = successes / n
    centre = p + q * q / (2 * n)
    half = q * math.sqrt(p * (1 - p) / n + q * q / (4 * n * n))
    scale = 1 + q * q / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference between two methods.

    Attributes
    ----------
    method, reference : str
    difference : float
        Mean of method minus reference.
    error : float
        Standard error over seeds without correction; NaN for one seed.
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


class TResult(NamedTuple):
    """t, two-sided p value, and the limits of the interval of the mean difference."""

    t: float
    p: float
    low: float
    high: float


NO_TEST = TResult(math.nan, math.nan, math.nan, math.nan)


def corrected_t(
    differences: Sequence[float], ratio: float, level: float = 0.95, *, min_variance: float = 0.0
) -> TResult:
    """Nadeau and Bengio's corrected resampled t test (Machine Learning 52, 2003).

    t = mean / sqrt((1/J + n_test/n_train) var), J - 1 degrees of freedom: resamplings of one
    data set overlap, and the plain t test takes them for independent. Few seeds and few test
    rows may give equal differences by chance: with a positive lower bound of var, the normal test
    with that variance has to reject, too; p is the larger of both, and the interval the wider one.

    `differences` are one per seed, `ratio` is n_test / n_train, `min_variance` the lower bound of
    the variance of one difference. `NO_TEST` for infinite differences and, without a
    `min_variance`, for those that are equal to rounding, of mean other than 0.

    Raises
    ------
    InputError
        Fewer than two differences.
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
    if max(error, bound) <= EQUAL * abs(mean):
        return TResult(0.0, 1.0, mean, mean) if mean == 0.0 else NO_TEST
    p = 2 * float(stdtr(n - 1, -abs(mean) / error)) if error > 0.0 else 0.0
    half = float(stdtrit(n - 1, (1 + level) / 2)) * error
    if bound > 0.0:
        normal = NormalDist()
        p = max(p, 2 * normal.cdf(-abs(mean) / bound))
        half = max(half, normal.inv_cdf((1 + level) / 2) * bound)
    return TResult(mean / max(error, bound), p, mean - half, mean + half)


def seeds_for(deviation: float, ratio: float, half: float) -> int | None:
    """Number of seeds at which the 95 % interval of :func:`corrected_t` is mean +- `half`, or less.

    The least J with t_{J-1} sd sqrt(1/J + n_test/n_train) <= half, sd = `deviation` over seeds;
    None above 1000. As the splits share rows, the standard error tends to sd sqrt(n_test/n_train),
    not to 0.
    """
    for n in range(MIN_SEEDS, 1001):
        quantile = float(stdtrit(n - 1, 0.975))
        if quantile * deviation * math.sqrt(1 / n + ratio) <= half:
            return n
    return None


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (Scandinavian Journal of Statistics 6, 1979); NaN stay NaN.

    p_(i) -> max_{j <= i} min(1, (m - j + 1) p_(j)) over the m values in ascending order.
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
    ours: Mapping[int, float],
    theirs: Mapping[int, float],
    ratio: float,
    resolution: int | None = None,
) -> Difference:
    """The difference of two methods over the seeds that both have.

    Two methods whose fractions of correct decisions on the same m test rows differ by D disagree
    on |D| m of them or more, each of which contributes +-1 / m. Over draws of the rows the
    variance of D is then at least |D| (1 - |D|) / m, and is not taken for smaller: few seeds may
    give equal differences by chance.

    `ours` and `theirs` are values by seed, `ratio` is n_test / n_train. `resolution` is m, for
    values that are fractions of test rows: those of the smallest cell for a figure that a cell
    decides. ``p_holm`` is ``p``: the caller adjusts the family.
    """
    seeds = [s for s in ours if s in theirs and not math.isnan(ours[s] + theirs[s])]
    values = [ours[s] - theirs[s] for s in seeds]
    plain = t_interval(values)
    test = NO_TEST
    if len(values) >= MIN_SEEDS:
        size = min(1.0, abs(plain.mean))
        min_variance = 0.0 if resolution is None else size * (1 - size) / resolution
        test = corrected_t(values, ratio, min_variance=min_variance)
    how = "no test" if math.isnan(test.p) else "corrected t"
    return Difference(
        method, reference, plain.mean, plain.error, test.low, test.high, test.t, test.p, test.p,
        len(values), sum(v > 0 for v in values), sum(v < 0 for v in values), how,
    )  # fmt: skip


def cell_interval(rates: Sequence[float], n: float, ratio: float) -> tuple[float, float]:
    """95 % interval in [0, 1] of the accuracy in a cell over J resamplings that share rows.

    The corrected resampled t interval of :func:`corrected_t`, or Wilson's with n / (1/J + ratio)
    rows, whichever is wider: Wilson's, for instance, at equal figures of all resamplings. Pooled
    rows would count a test row once per seed. Below three seeds Wilson's interval for n rows.

    `rates` are accuracies in the cell, one per seed; `n` is its test rows per seed, `ratio`
    n_test / n_train.
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
    """Row numbers of draws with replacement, of n rows or of whole clusters with codes (n,)."""
    rng = np.random.default_rng(random_state)
    if clusters is None:
        return [rng.integers(0, n, size=n) for _ in range(n_draws)]
    _, codes = np.unique(clusters, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    draws = (rng.integers(0, len(members), size=len(members)) for _ in range(n_draws))
    return [np.concatenate([members[i] for i in draw]) for draw in draws]


class BootstrapResult(NamedTuple):
    """Limits of a bootstrap interval, and the two-sided p value of 0."""

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
    """95 % bootstrap interval of a statistic of n rows, percentile or BCa, and its p value of 0.

    BCa shifts the percentiles by the median bias z0 and the acceleration a of the jackknife
    (B. Efron, JASA 82, 1987)::

        alpha = Phi(z0 + (z0 + q) / (1 - a (z0 + q)))

    It needs a smooth statistic. For a minimum over groups take the percentile interval, which is
    conservative there. p is the smallest alpha at which the interval of level 1 - alpha leaves 0
    out, so that p and interval agree at every level; at least 1 / (B + 1) for B draws.

    `values` (B,) are the statistic of the draws of :func:`bootstrap_indices`; NaN are left out.
    With `clusters`, codes (n,), the jackknife leaves out whole clusters. One cluster, or one row,
    has no interval: NaN.
    """
    values = np.sort(values[~np.isnan(values)])
    units = n if clusters is None else len(np.unique(clusters))
    if len(values) < 2 or units < 2:  # every draw of one unit is the same
        return BootstrapResult(math.nan, math.nan, math.nan)
    z0 = a = 0.0
    if bca:
        full = statistic(np.arange(n))
        fraction = (np.sum(values < full) + np.sum(values <= full)) / (2 * len(values))
        if 0 < fraction < 1:
            z0, a = float(ndtri(fraction)), _acceleration(statistic, n, clusters)

    def limits(alpha: float) -> tuple[float, float]:
        tails = np.array([alpha / 2, 1 - alpha / 2])
        if z0 or a:
            shifted = z0 + ndtri(tails)
            tails = ndtr(z0 + shifted / (1 - a * shifted))
        low, high = np.quantile(values, tails)
        return float(low), float(high)

    def holds_zero(alpha: float) -> bool:
        low, high = limits(alpha)
        return low <= 0.0 <= high

    # Bisection: 0 is inside the interval of alpha = inside, and outside that of alpha = outside.
    inside, outside = 1 / (len(values) + 1), 1.0
    if not holds_zero(inside):
        outside = inside
    elif not holds_zero(outside):
        for _ in range(40):
            middle = (inside + outside) / 2
            if holds_zero(middle):
                inside = middle
            else:
                outside = middle
    return BootstrapResult(*limits(1 - 0.95), outside)


def _acceleration(statistic: Statistic, n: int, clusters: Rows | None) -> float:
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
