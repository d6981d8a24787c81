"""Every rounding and rank rule of a solve, in one table, each with its reason.

==============  ==========================================================================
`CONSTANT`      a deviation below this times the mean is rounding of the mean
`eigenvalue`    eigenvalues of the unit-diagonal covariance up to it are noise of its entries
`computed`      deviations of features of erased rows that are rounding of the rows before
`noise`         singular values of whitened spans up to it are noise of their sums
`row_rounding`  singular values of spans up to it are rounding of the rows to their dtype
`relative`      smaller singular values than this times the largest are rounding of the SVD
`residual`      bound of the rounding of a constraint
`AMPLIFICATION` an amplification above it leaves less than half the digits of float32 rows
`SENSITIVITY`   a larger effect of float32 rounding on x, in deviations, raises a warning
`MIN_SCALE`     by default, smaller deviations relative to their root mean square are noise
`NOISE_SHARE`   a smaller fraction of the squared whitened spans is rounding of x
`OWN`           least fraction of a variance outside the low-rank part of a metric
`LABELS`        eigenvalues of the unit-diagonal covariance of labels up to it, times their
                number, are rounding: combinations of labels that do not vary
==============  ==========================================================================

Ranks count what is above `max(noise, relative * largest)`; the report shows those ranks. Everything
is in units of deviations, so that no rule depends on the units of features or labels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import spans

EPS = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)

# Relative rounding of a mean of n terms, with a margin for any practical n; far below the deviation
# of a float32 feature that varies by one unit in the last place.
CONSTANT = spans.CONSTANT_ROUNDINGS * EPS

# Distances of rows grow by this factor: above it float32 rows keep less than half their digits.
AMPLIFICATION = 1e4

# A smaller sensitivity leaves three digits of the deviation of x in float32 rows.
SENSITIVITY = 1e-3

# Least ratio of deviations that units explain: units of 1e-12 and 1e12 give 1e-24, and unequal
# features two digits more.
MIN_SCALE = 1e-26

# Fraction of the squared whitened spans. Rows after a layer norm lie in a hyperplane up to
# rounding: covariance across it is of that size, and erasing it adds no distortion.
NOISE_SHARE = 1e-7

# Relative rounding of label correlations. x is not regressed on combinations of labels with
# smaller eigenvalues: their part of Cov(x) is estimated from the sample alone.
LABELS = 1e-10

# Least fraction of a variance outside the low-rank part: whitening divides by its root, and smaller
# fractions are rounding of the products.
OWN = 1e-10


def eigenvalue(d: int, roundoff: float) -> float:
    """Noise in the eigenvalues of a (d, d) covariance of unit diagonal.

    d eps bounds the rounding of float64 sums; sqrt(d) times the roundoff of the products is its
    size where errors are independent, as those of float32 products are. 4 is a margin.

    Parameters
    ----------
    d : int
    roundoff : float
        Unit roundoff of the products that the covariance was summed from.
    """
    return float(4.0 * max(d * EPS, d**0.5 * roundoff if roundoff > EPS else 0.0))


def computed(deviations: NDArray[np.float64], roundoff: float) -> NDArray[np.float64]:
    """(d,): deviations of features of erased rows that are rounding of the rows before erasing.

    Relative to the deviation of the feature before, the root of `eigenvalue`: below it a feature is
    noise of a covariance that has the original one's unit diagonal. Rows in float32 round by EPS32
    at least, and erasers that mix features in float32 round all of them by EPS32 times the largest:
    smaller ones hold that rounding, and what erasers in these units do not see. 4 is a margin.

    Parameters
    ----------
    deviations : (d,) float64
        Before erasing.
    roundoff : float
        As for `eigenvalue`.
    """
    own = max(eigenvalue(len(deviations), roundoff) ** 0.5, 4.0 * EPS32)
    mixed = 4.0 * EPS32 * float(np.mean(deviations**2)) ** 0.5
    return np.asarray(np.maximum(own * deviations, mixed))


def eigenvalue_of_columns(k: int, n_rows: int, cancelled: float) -> float:
    """Noise in the eigenvalues of the covariance of k columns, summed about a reference point.

    Sums of n products carry sqrt(n) roundings of the squares about the reference, which are
    `cancelled` times the variances.
    """
    return float(16.0 * EPS * k * n_rows**0.5 * cancelled)


def noise(d: int, smallest: float) -> float:
    """Rounding level of whitened cross-covariances, in units of correlation.

    A few roundings of sums of d terms of order one, amplified by at most the inverse of the
    factor, 1 / sqrt(smallest eigenvalue).
    """
    return float(16.0 * EPS * (d / smallest) ** 0.5)


def noise_unwhitened(variance: float) -> float:
    """Rounding level of cross-covariances that are not whitened; total deviation of x = 1."""
    return float(16.0 * EPS * variance**0.5)


def row_rounding(error: float, deviation: float, smallest: float, n_rows: int) -> float:
    """Rounding level of spans of rows that were rounded to their dtype, as erased rows are.

    An entry x is rounded by at most eps |x| / 2, and Cov(x, z) by the mean of n such errors:
    eps sqrt(E|x|^2 / n) / 2, divided by the root of the smallest eigenvalue where the span is
    whitened. 8 is a margin. Independent labels give sqrt(E|x - mean|^2 / n): the level is at most a
    hundredth of that, so that no association beyond chance counts as rounding.

    Parameters
    ----------
    error, deviation : float
        eps times the root of E|x|^2, and the root of E|x - mean|^2, in the units of the span before
        it is whitened.
    smallest : float
        Eigenvalue of the covariance in these units; 1 where nothing is whitened.
    n_rows : int
    """
    return float(min(4.0 * error / smallest**0.5, 0.01 * deviation) / n_rows**0.5)


def relative(d: int, rank_tol: float | str) -> float:
    """Relative cut of singular values: the rounding of a decomposition, or `rank_tol`."""
    least = float(16.0 * EPS * d**0.5)
    return least if isinstance(rank_tol, str) else max(float(rank_tol), least)


def residual(d: int, spread: float, size: float) -> float:
    """8 d eps q |P|^2: bound of the rounding of a constraint, relative to the cross-covariance.

    d covers the lengths of the sums, 8 the handful of steps; q = `spread` is the condition number
    of the whitened cross-covariances, and |P| = `size` the spectral norm in units of deviations.
    """
    return 8.0 * d * EPS * spread * max(1.0, size) ** 2
