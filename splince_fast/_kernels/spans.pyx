"""Spans (cross-covariances of x with label columns of unit variance), from sums over rows."""

import numpy as np

from libc.math cimport sqrt

from splince_fast._kernels.shapes cimport check_length

# A column with a standard deviation below CONSTANT_ROUNDINGS * eps * |mean| counts as constant; see
# `splince_fast._solve.tolerances`.
CONSTANT_ROUNDINGS = 64.0


def class_span(const double[:, ::1] sums not None, const double[::1] weights not None):
    """Return the span of a class-coded variable, from sums of w (x - reference) and of w per class.

    A row is Cov(x, indicator of a class) / sqrt(p (1 - p)), with p the fraction of the class. The
    most frequent class, which follows from the others, and classes without weight are left out.
    """
    cdef Py_ssize_t k = sums.shape[0], d = sums.shape[1], c, j, largest = 0, row = 0
    cdef double weight = 0.0, p, scale
    check_length(weights.shape[0], k, "weights")
    for c in range(k):
        weight += weights[c]
        if weights[c] > weights[largest]:
            largest = c
    span_a, total_a = np.empty((k, d)), np.zeros(d)
    cdef double[:, ::1] span = span_a
    cdef double[::1] total = total_a
    for c in range(k):
        for j in range(d):
            total[j] += sums[c, j]
    for c in range(k):
        if c != largest and weights[c] > 0.0:
            p = weights[c] / weight
            scale = 1.0 / (weight * sqrt(p * (1.0 - p)))
            for j in range(d):
                span[row, j] = scale * (sums[c, j] - p * total[j])
            row += 1
    return span_a[:row]


def largest_correlation(const double[:, ::1] span not None, const double[::1] variances not None):
    """Return the largest squared correlation of a feature that varies with a label column."""
    cdef Py_ssize_t d = span.shape[1], i, j
    cdef double largest = 0.0
    check_length(variances.shape[0], d, "variances")
    for i in range(span.shape[0]):
        for j in range(d):
            if variances[j] > 0.0:
                largest = max(largest, span[i, j] * span[i, j] / variances[j])
    return largest


def column_deviations(z_sum, squares, reference, double weight):
    """Return the standard deviations of the columns of a variable, (k,); 0 for rounding error."""
    mean, square = z_sum / weight, np.diagonal(squares) / weight
    variance = square - mean * mean
    constant = CONSTANT_ROUNDINGS * np.finfo(np.float64).eps
    varies = variance > np.square(constant * (np.abs(reference) + np.sqrt(square)))
    return np.sqrt(np.where(varies, variance, 0.0))


def column_span(products, z_sum, x_sum, squares, reference, double weight):
    """Return the span of a continuous variable z, from sums about reference points of z and x.

    A row is the covariance of x with a column of z that varies, divided by its standard deviation.
    The sums over rows are those of w z x^T, w z, w x, w z z^T and w; `reference` is that of z.
    """
    deviations = column_deviations(z_sum, squares, reference, weight)
    used = deviations > 0.0
    means, scale = z_sum[used, None] / weight, 1.0 / (weight * deviations[used, None])
    return scale * (products[used] - means * x_sum)
