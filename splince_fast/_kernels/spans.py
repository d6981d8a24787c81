"""Spans (cross-covariances of x with label columns of unit variance), from sums over rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]

# A column with a standard deviation below CONSTANT_ROUNDINGS * eps * |mean| counts as constant; see
# `splince_fast._solve.tolerances`.
CONSTANT_ROUNDINGS = 64.0
_CONSTANT = CONSTANT_ROUNDINGS * float(np.finfo(np.float64).eps)


def class_span(sums: Float, weights: Float) -> Float:
    """Return the span of a class-coded variable, from sums of w (x - reference) and of w per class.

    A row is the covariance of x with the indicator of a class, divided by the standard deviation
    sqrt(p (1 - p)) of the indicator, with p the fraction of the class. As the indicators sum to
    one, the most frequent class is left out. Classes without weight are left out too.
    """
    weight, used = weights.sum(), weights > 0.0
    if weight > 0.0:
        used[weights.argmax()] = False
    p = weights[used, None] / weight
    scale = 1.0 / (weight * np.sqrt(p * (1.0 - p)))
    return np.asarray(scale * (sums[used] - p * sums.sum(axis=0)))


def column_deviations(z_sum: Float, squares: Float, reference: Float, weight: float) -> Float:
    """Return the standard deviations of the columns of a continuous variable, (k,).

    The deviation of a column that varies by rounding error alone is 0. The arguments are as for
    `column_span`.
    """
    mean, square = z_sum / weight, np.diagonal(squares) / weight
    variance = square - mean * mean
    varies = variance > np.square(_CONSTANT * (np.abs(reference) + np.sqrt(square)))
    return np.sqrt(np.where(varies, variance, 0.0))


def column_span(
    products: Float, z_sum: Float, x_sum: Float, squares: Float, reference: Float, weight: float
) -> Float:
    """Return the span of a continuous variable z, from sums about reference points of z and x.

    A row is the covariance of x with a column of z, divided by the standard deviation of the
    column. Constant columns are left out. Over rows with the weight sum `weight`, `products`,
    (k, d), sums w z x^T, `z_sum` w z, `x_sum` w x, and `squares`, (k, k), w z z^T. `reference` is
    that of z.
    """
    deviations = column_deviations(z_sum, squares, reference, weight)
    used = deviations > 0.0
    means, scale = z_sum[used, None] / weight, 1.0 / (weight * deviations[used, None])
    return np.asarray(scale * (products[used] - means * x_sum))


def largest_correlation(span: Float, variances: Float) -> float:
    """Return the largest squared correlation of a feature that varies with a label column."""
    squares = np.divide(span * span, variances, out=np.zeros(span.shape), where=variances > 0.0)
    return float(squares.max(initial=0.0))
