"""Tolerances of a solve: all rules for rounding errors and ranks.

Thresholds apply to features and labels scaled to unit standard deviation, whatever their units. A
span is a cross-covariance Cov(x, v), one row per column of v; its rank is the number of singular
values above `max(noise, relative * largest)`. S is the covariance that is factored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import spans

Float = NDArray[np.float64]

EPS = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)

# Features with a standard deviation below this fraction of |mean| count as constant. It exceeds the
# rounding error of a mean of any practical number of rows, and is far below a float32 feature that
# varies by one unit in the last place.
CONSTANT = spans.CONSTANT_ROUNDINGS * EPS

# An amplification above this value causes a warning: float32 rows lose more than half of their
# digits.
AMPLIFICATION = 1e4

# A sensitivity above this value causes a warning: rounding x to float32 then changes the erased
# rows by more than this fraction of the standard deviation of x.
SENSITIVITY = 1e-3
# The warning also needs |P - I| to exceed this multiple of sqrt(rank), the norm of an orthogonal
# projection.
OBLIQUE = 10.0

# Features with a standard deviation below this fraction of the root mean square one count as
# constant: units of 1e-12 and 1e12 have a ratio of 1e-24, and features vary unequally in one unit.
MIN_SCALE = 1e-26

# A part of the whitened spans counts as rounding error below this fraction of their squared norm.
# Example: rows after a layer norm lie in a hyperplane up to rounding; their covariance with labels
# along its normal is below this value, and erasing it adds no distortion.
NOISE_FRACTION = 1e-7


def floor(variances: Float, mean: Float, row_eps: float) -> Float:
    """Return the largest standard deviations of features that count as constant, (d,)."""
    # Features that vary by at most the rounding of the rows count as constant, unless all features
    # do. `row_eps` is the machine epsilon of the rows, 0 for float64.
    rms = (float(variances.sum()) / len(variances)) ** 0.5
    rounding = max(CONSTANT, row_eps) * np.abs(mean)
    if (variances <= rounding**2).all():
        rounding = CONSTANT * np.abs(mean)
    return np.asarray(np.maximum(rounding, MIN_SCALE * rms))


def eigenvalue(d: int, roundoff: float) -> float:
    """Return the rounding error of the eigenvalues of a (d, d) covariance with unit diagonal."""
    # d eps bounds the error of float64 sums. For float32 products, whose errors are independent,
    # the error is about sqrt(d) times the unit roundoff. The factor 4 is a safety margin.
    return float(4.0 * max(d * EPS, d**0.5 * roundoff if roundoff > EPS else 0.0))


def erased_rounding(deviations: Float, roundoff: float) -> Float:
    """Return the rounding error of the standard deviations of erased features, (d,)."""
    # A feature with a smaller standard deviation is rounding error of the eraser. Three bounds:
    # sqrt(`eigenvalue`) and 4 EPS32 times the deviation before erasure, because float32 rounds
    # every feature; and 4 EPS32 times the root mean square of all deviations, because an eraser in
    # float32 adds multiples of the other features. The factor 4 is a safety margin.
    single = max(eigenvalue(len(deviations), roundoff) ** 0.5, 4.0 * EPS32)
    mixed = 4.0 * EPS32 * float(np.mean(deviations**2)) ** 0.5
    return np.asarray(np.maximum(single * deviations, mixed))


def eigenvalue_of_columns(k: int, n_rows: int, cancelled: float) -> float:
    """Return the rounding error of the eigenvalues of the correlation matrix of k label columns."""
    # A sum of n squares about a reference point has an error of about sqrt(n) eps. `cancelled` is
    # the largest ratio of the mean square of a column about that point to its variance.
    return float(16.0 * EPS * k * n_rows**0.5 * cancelled)


def noise(variance: float, smallest: float = 1.0) -> float:
    """Return the rounding error of spans, due to the rounding of sums."""
    # A sum of d terms of order one has an error of a few sqrt(d) eps, where d = `variance` is the
    # sum of the variances of x. Whitening amplifies it by at most 1 / sqrt(smallest eigenvalue).
    return float(16.0 * EPS * (variance / smallest) ** 0.5)


def row_rounding(error: float, deviation: float, smallest: float, n_rows: int) -> float:
    """Return the rounding error of spans Cov(x, z) of rows that were rounded to their dtype."""
    # The error of an entry x is at most eps |x| / 2, with eps of the dtype, and that of Cov(x, z),
    # the mean of n such errors, eps sqrt(E|x|^2 / n) / 2, times 1 / sqrt(smallest) by whitening.
    # The factor 8 is a safety margin. The result is at most a hundredth of
    # sqrt(E|x - mean|^2 / n), the norm of the span for labels independent of x, so that no
    # association above the chance level counts as rounding error.
    return float(min(4.0 * error / smallest**0.5, 0.01 * deviation) / n_rows**0.5)


def relative(d: int, rank_tol: float | str) -> float:
    """Return the threshold of singular values relative to the largest."""
    minimum = float(16.0 * EPS * d**0.5)
    return minimum if isinstance(rank_tol, str) else max(float(rank_tol), minimum)


def residual(d: int, spread: float, size: float) -> float:
    """Return the bound 8 d eps q |P|^2 of the rounding error of a constraint."""
    # Relative to the norm of the cross-covariance: d is the length of the sums, and 8 exceeds the
    # number of steps. q = `spread` is the condition number of the whitened cross-covariances, and
    # |P| = `size`, at least 1, the spectral norm for features of unit standard deviation.
    return 8.0 * d * EPS * spread * max(1.0, size) ** 2
