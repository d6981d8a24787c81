"""Spans (cross-covariances of x with label columns of unit variance), from sums over rows."""

import numpy as np

from libc.math cimport fabs, sqrt
from libc.stdlib cimport calloc, free

from splince_fast._kernels.shapes cimport check_length

cdef double EPS = 2.220446049250313e-16
# A column with a standard deviation below CONSTANT_ROUNDINGS * EPS * |mean| counts as constant; see
# `splince_fast._solve.tolerances`.
CONSTANT_ROUNDINGS = 64.0
cdef double CONSTANT = CONSTANT_ROUNDINGS * EPS


def class_span(const double[:, ::1] sums not None, const double[::1] weights not None):
    """Return the span of a class-coded variable, (k', d).

    A row is the covariance of x with the indicator of a class, divided by the standard deviation
    sqrt(p (1 - p)) of the indicator, with p the fraction of the class. As the indicators sum to
    one, the most frequent class is left out. Classes without weight are left out too.

    Parameters
    ----------
    sums : (k, d) float64
        Sums of w (x - reference) per class.
    weights : (k,) float64
        Weight sum per class.
    """
    cdef Py_ssize_t k = sums.shape[0], d = sums.shape[1], c, j, n_present = 0, largest = 0, row = 0
    cdef double weight = 0.0, fraction, factor
    check_length(weights.shape[0], k, "weights")
    for c in range(k):
        weight += weights[c]
        if weights[c] > 0.0:
            n_present += 1
        if weights[c] > weights[largest]:
            largest = c
    if n_present < 2:
        return np.zeros((0, d))
    span_a = np.empty((n_present - 1, d))
    cdef double[:, ::1] span = span_a
    cdef double* total = <double*>calloc(d, sizeof(double))
    if total == NULL:
        raise MemoryError("no memory for the sum over the classes")
    with nogil:
        for c in range(k):
            for j in range(d):
                total[j] += sums[c, j]
        for c in range(k):
            if c == largest or weights[c] <= 0.0:
                continue
            fraction = weights[c] / weight
            factor = 1.0 / (weight * sqrt(fraction * (1.0 - fraction)))
            for j in range(d):
                span[row, j] = factor * (sums[c, j] - fraction * total[j])
            row += 1
    free(total)
    return span_a


def largest_correlation(const double[:, ::1] rows not None, const double[::1] variances not None):
    """Return the largest squared correlation of a feature that varies with a label column.

    Parameters
    ----------
    rows : (k, d) float64
        Span: covariances of x with label columns of unit standard deviation.
    variances : (d,) float64
        Variances of the features.
    """
    cdef Py_ssize_t d = rows.shape[1], i, j
    cdef double square, largest = 0.0
    check_length(variances.shape[0], d, "variances")
    for i in range(rows.shape[0]):
        for j in range(d):
            square = rows[i, j] * rows[i, j]
            if square > largest * variances[j] and variances[j] > 0.0:
                largest = square / variances[j]
    return largest


def column_deviations(const double[::1] z_sum not None, const double[:, ::1] squares not None,
                      const double[::1] reference not None, double weight):
    """Return the standard deviations of the columns of a continuous variable, (k,).

    The standard deviation is 0 for a column that varies by rounding error alone. The parameters are
    those of `column_span`.
    """
    cdef Py_ssize_t k = z_sum.shape[0], c
    cdef double mean, square, variance, threshold
    check_length(squares.shape[0], k, "squares")
    check_length(squares.shape[1], k, "squares")
    check_length(reference.shape[0], k, "reference")
    deviations_a = np.empty(k)
    cdef double[::1] deviations = deviations_a
    for c in range(k):
        mean, square = z_sum[c] / weight, squares[c, c] / weight
        variance = square - mean * mean
        threshold = CONSTANT * (fabs(reference[c]) + sqrt(square))
        deviations[c] = sqrt(variance) if variance > threshold * threshold else 0.0
    return deviations_a


def column_span(const double[:, ::1] products not None, const double[::1] z_sum not None,
                const double[::1] x_sum not None, const double[:, ::1] squares not None,
                const double[::1] reference not None, double weight):
    """Return the span of a continuous variable z, (k', d).

    A row is the covariance of x with a column of z, divided by the standard deviation of the
    column. Constant columns are left out.

    Parameters
    ----------
    products : (k, d) float64
        Sum of w (z - reference) (x - x_reference)^T over the labelled rows.
    z_sum, x_sum : (k,), (d,) float64
        Sums of w (z - reference) and of w (x - x_reference).
    squares : (k, k) float64
        Sum of w (z - reference) (z - reference)^T.
    reference : (k,) float64
        Reference point of z.
    weight : float, positive
        Weight sum of the labelled rows.
    """
    cdef Py_ssize_t k = products.shape[0], d = products.shape[1], c, j, row = 0
    cdef double mean, factor
    check_length(z_sum.shape[0], k, "z_sum")
    check_length(x_sum.shape[0], d, "x_sum")
    cdef double[::1] deviations = column_deviations(z_sum, squares, reference, weight)
    span_a = np.empty((k, d))
    cdef double[:, ::1] span = span_a
    with nogil:
        for c in range(k):
            if deviations[c] == 0.0:
                continue
            mean = z_sum[c] / weight
            factor = 1.0 / (weight * deviations[c])
            for j in range(d):
                span[row, j] = factor * (products[c, j] - mean * x_sum[j])
            row += 1
    return span_a[:row]
