"""Tolerances of a solve: all rules for rounding errors and ranks.

A span is a cross-covariance Cov(x, v) of x with a variable v, one row per column of v. S is the
covariance that is factored.

====================== ===================================================================
`CONSTANT`             relative to |mean|: a feature with a smaller standard deviation is constant
`eigenvalue`           eigenvalues of S scaled to unit diagonal: smaller ones are rounding error
`computed`             standard deviations after erasure: smaller ones are rounding error
`noise`                singular values of whitened spans: smaller ones are rounding error of sums
`noise_unwhitened`     the same for spans that are not whitened
`row_rounding`         singular values of spans: smaller ones are rounding error of the rows
`relative`             relative to the largest singular value: smaller ones are rounding error
`residual`             bound of the rounding error of a constraint
`AMPLIFICATION`        a larger amplification raises a warning
`SENSITIVITY`          a larger effect of float32 rounding on x raises a warning
`MIN_SCALE`            relative to the root mean square standard deviation: features with a smaller
                       one are not whitened by default
`NOISE_SHARE`          fraction of the squared norm of whitened spans: less is rounding error
`OWN`                  minimum fraction of a variance outside the low-rank part of an approximation
`LABELS`               per label column: smaller eigenvalues of the correlation matrix of the
                       columns are rounding error
====================== ===================================================================

A rank is the number of singular values above `max(noise, relative * largest)`; the report shows
the ranks. All thresholds apply to features and labels scaled to unit standard deviation, so that
none depends on the units.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import spans

EPS = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)

# Features with a standard deviation below this fraction of |mean| count as constant. The fraction
# exceeds the relative rounding error of a mean for any practical number of rows, and is far smaller
# than the standard deviation of a float32 feature that varies by one unit in the last place.
CONSTANT = spans.CONSTANT_ROUNDINGS * EPS

# An amplification above this value raises a warning: the distances between rows grow by this
# factor, so that float32 rows lose more than half of the digits.
AMPLIFICATION = 1e4

# A sensitivity above this value raises a warning: rounding x to float32 then changes the erased
# rows by more than this fraction of the standard deviation of x.
SENSITIVITY = 1e-3

# Features with a standard deviation below this fraction of the root mean square standard deviation
# are not whitened by default. Units of 1e-12 and 1e12 explain a ratio of 1e-24, and unequal
# features two more digits.
MIN_SCALE = 1e-26

# A fraction of the squared norm of the whitened spans below this value counts as rounding error.
# Rows after a layer norm lie in a hyperplane up to rounding: their covariance with the labels
# normal to the hyperplane is smaller than this value, and erasing it adds no distortion.
NOISE_SHARE = 1e-7

# Times the number of label columns: eigenvalues of the correlation matrix of the columns below the
# product are rounding error. x is not regressed on the corresponding combinations of columns, whose
# contribution to Cov(x) is estimated from the sampled rows.
LABELS = 1e-10

# Minimum fraction of a variance that a low-rank approximation of Cov(x) leaves to its diagonal
# part. Whitening divides by the root of the fraction; smaller fractions are rounding error of the
# products.
OWN = 1e-10


def eigenvalue(d: int, roundoff: float) -> float:
    """Rounding error of the eigenvalues of a (d, d) covariance with unit diagonal.

    d eps bounds the error of float64 sums. For float32 products, whose errors are independent, the
    error is about sqrt(d) times the unit roundoff. 4 is a margin.

    Parameters
    ----------
    d : int
        Number of features.
    roundoff : float
        Unit roundoff of the products whose sum is the covariance.
    """
    return float(4.0 * max(d * EPS, d**0.5 * roundoff if roundoff > EPS else 0.0))


def computed(deviations: NDArray[np.float64], roundoff: float) -> NDArray[np.float64]:
    """Standard deviations, (d,), below which features of erased rows hold rounding error alone.

    The maximum of three bounds: sqrt(`eigenvalue`) times the standard deviation of the feature
    before erasure; 4 EPS32 times the same standard deviation, because float32 rounds every
    feature; and 4 EPS32 times the root mean square of all standard deviations, because an eraser
    in float32 adds products of other features to each. 4 is a margin.

    Parameters
    ----------
    deviations : (d,) float64
        Standard deviations of the features before erasure.
    roundoff : float
        Unit roundoff of the products whose sum is the covariance before erasure.
    """
    single = max(eigenvalue(len(deviations), roundoff) ** 0.5, 4.0 * EPS32)
    mixed = 4.0 * EPS32 * float(np.mean(deviations**2)) ** 0.5
    return np.asarray(np.maximum(single * deviations, mixed))


def eigenvalue_of_columns(k: int, n_rows: int, cancelled: float) -> float:
    """Rounding error of the eigenvalues of the (k, k) correlation matrix of label columns.

    The covariance of the columns is summed about a reference point, and `cancelled` is the largest
    ratio of a mean square about this point to the variance. A sum of n squares has an error of
    sqrt(n) roundings.
    """
    return float(16.0 * EPS * k * n_rows**0.5 * cancelled)


def noise(d: int, smallest: float) -> float:
    """Rounding level of whitened cross-covariances, in units of correlation.

    A sum of d terms of order one has an error of a few sqrt(d) eps. Whitening amplifies it by at
    most 1 / sqrt(smallest), where `smallest` is the smallest eigenvalue of the covariance scaled
    to unit diagonal.
    """
    return float(16.0 * EPS * (d / smallest) ** 0.5)


def noise_unwhitened(variance: float) -> float:
    """Rounding level of unwhitened cross-covariances; `variance` is the total variance of x."""
    return float(16.0 * EPS * variance**0.5)


def row_rounding(error: float, deviation: float, smallest: float, n_rows: int) -> float:
    """Rounding level of spans Cov(x, z) of rows that were rounded to their dtype.

    The rounding error of an entry x is at most eps |x| / 2. The error of Cov(x, z) is the mean of n
    errors, eps sqrt(E|x|^2 / n) / 2, and whitening divides it by sqrt(smallest). 8 is a margin. For
    labels independent of x the norm of the span is sqrt(E|x - mean|^2 / n): the level is at most a
    hundredth of this norm, so that no association above the chance level counts as rounding error.

    Parameters
    ----------
    error, deviation : float
        eps sqrt(E|x|^2), and sqrt(E|x - mean|^2), in the units of the span before whitening.
    smallest : float
        Smallest eigenvalue of the covariance in these units; 1 without whitening.
    n_rows : int
        Number of rows, n.
    """
    return float(min(4.0 * error / smallest**0.5, 0.01 * deviation) / n_rows**0.5)


def relative(d: int, rank_tol: float | str) -> float:
    """Relative threshold of singular values: rounding error of an SVD, or `rank_tol` if larger."""
    least = float(16.0 * EPS * d**0.5)
    return least if isinstance(rank_tol, str) else max(float(rank_tol), least)


def residual(d: int, spread: float, size: float) -> float:
    """Bound of the relative rounding error of a constraint, 8 d eps q |P|^2.

    The error is relative to the norm of the cross-covariance. d is the length of the sums, and 8
    exceeds the number of steps. q = `spread` is the condition number of the whitened
    cross-covariances. |P| = `size` is the spectral norm for features scaled to unit standard
    deviation; a norm below 1 counts as 1.
    """
    return 8.0 * d * EPS * spread * max(1.0, size) ** 2
