"""Passes over rows that BLAS has no verb for, compiled for the host by Numba.

Every kernel is serial and releases the GIL; `splince_fast._threads` splits the work. Centring is
split by columns and applying by rows, in both cases so that each number comes from the same
operations in the same order whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with the one set of options that all kernels share."""
    # Reassociation and contraction let sums use SIMD; NaN and infinity keep their meaning.
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": {"reassoc", "contract"},
        "error_model": "numpy",
    }
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache: compile once in each process
        compiled = numba.njit(**options)(function)
    return compiled


@_kernel
def centre_block(
    rows: Any,
    weight: Any,
    root_weight: Any,
    reference: Any,
    codes: Any,
    values: Any,
    part_rows: int,
    part_weight: Any,
    first: int,
    last: int,
    out: Any,
    peak: Any,
    deviation: Any,
    class_sums: Any,
    products: Any,
) -> None:
    """Reduce the columns first..last of a block of rows, part by part, in one sweep over memory.

    A part of `part_rows` rows stays in cache between the pass that finds its mean m_p and the pass
    that uses it. With y_i = x_i - reference, and W_p, W the weights of a part and of the block::

        out[i]     = sqrt(w_i) (y_i - m_p)         deviation     = sum_i w_i y_i
        out[n + p] = sqrt(W_p) (m_p - m)           class_sums[c] = sum_{i: codes[., i] = c} w_i y_i
                                                   products[q]   = sum_i values[q, i] y_i

    so that out^T out is the scatter of the block about its own mean m.

    Parameters
    ----------
    rows : (n, d) float32 or float64, C-contiguous
    weight, root_weight : (n,) float64 > 0 and their square roots; both empty for unit weights
    reference : (d,) float64
    codes : (v, n) intp, rows of class_sums to add each row to; -1 for none
    values : (q, n) float64, already multiplied by the weights
    part_weight : (parts,) float64, weight of each part
    out : (n + parts, d), dtype of rows
    peak, deviation, class_sums, products : (d,), (d,), (c, d), (q, d) float64, overwritten
    """
    n = rows.shape[0]
    parts = part_weight.shape[0]
    width = last - first
    weighted = weight.shape[0] > 0
    means = np.zeros((parts, width))
    largest = np.zeros(width)
    # Views of the stripe: indices that start at zero are what the compiler can vectorise.
    origin = reference[first:last]
    total = deviation[first:last]
    total[:] = 0.0
    class_sums[:, first:last] = 0.0
    products[:, first:last] = 0.0
    w = 1.0
    root = 1.0
    for p in range(parts):
        start = p * part_rows
        stop = min(start + part_rows, n)
        mean = means[p]
        for i in range(start, stop):
            row = rows[i, first:last]
            if weighted:
                w = weight[i]
                for j in range(width):
                    mean[j] += w * (row[j] - origin[j])
            else:
                for j in range(width):
                    mean[j] += row[j] - origin[j]
        inverse = 1.0 / part_weight[p]
        for j in range(width):
            total[j] += mean[j]
            mean[j] *= inverse
        for i in range(start, stop):
            row = rows[i, first:last]
            target = out[i, first:last]
            if weighted:
                w = weight[i]
                root = root_weight[i]
            for j in range(width):
                scaled = root * (row[j] - origin[j] - mean[j])
                target[j] = scaled
                largest[j] = max(largest[j], abs(scaled))
            for v in range(codes.shape[0]):
                c = codes[v, i]
                if c >= 0:
                    sums = class_sums[c, first:last]
                    for j in range(width):
                        sums[j] += w * (row[j] - origin[j])
            for q in range(values.shape[0]):
                value = values[q, i]
                if value != 0.0:
                    sums = products[q, first:last]
                    for j in range(width):
                        sums[j] += value * (row[j] - origin[j])
    inverse = 1.0 / part_weight.sum()
    for p in range(parts):
        root = np.sqrt(part_weight[p])
        mean = means[p]
        target = out[n + p, first:last]
        for j in range(width):
            scaled = root * (mean[j] - total[j] * inverse)
            target[j] = scaled
            largest[j] = max(largest[j], abs(scaled))
    peak[first:last] = largest


@_kernel
def squares_finite(rows: Any, start: int, stop: int) -> bool:
    """Whether the sum of squares of each row start..stop is below 1e298.

    If so, the row holds neither NaN nor infinity nor numbers whose squares overflow.
    """
    for i in range(start, stop):
        row = rows[i]
        total = 0.0
        for j in range(row.shape[0]):
            x = np.float64(row[j])
            total += x * x
        if not total < 1e298:  # NaN included; leaves room for sums over many rows
            return False
    return True


@_kernel
def apply_rows(
    rows: Any, left: Any, right: Any, bias: Any, start: int, stop: int, out: Any
) -> None:
    """out[i] = rows[i] - left^T (right rows[i] - bias) for start <= i < stop, in float64 inside.

    Parameters
    ----------
    rows, out : (n, d) float32 or float64, C-contiguous; may be the same array
    left, right : (r, d) float64, C-contiguous: the transposed factors of I - P
    bias : (r,) float64, right @ mean
    """
    rank, width = left.shape
    if rank == 1:
        u = left[0]
        v = right[0]
        for i in range(start, stop):
            row = rows[i]
            target = out[i]
            coefficient = -bias[0]
            for j in range(width):
                coefficient += row[j] * v[j]
            for j in range(width):
                target[j] = row[j] - coefficient * u[j]
        return
    # Four rows at a time share each load of the factors; the last four may repeat a row.
    sums = np.empty((4, width))
    for begin in range(start, stop, 4):
        count = min(4, stop - begin)
        row_a = rows[begin]
        row_b = rows[begin + min(1, count - 1)]
        row_c = rows[begin + min(2, count - 1)]
        row_d = rows[begin + min(3, count - 1)]
        sum_a, sum_b, sum_c, sum_d = sums[0], sums[1], sums[2], sums[3]
        for j in range(width):
            sum_a[j] = row_a[j]
            sum_b[j] = row_b[j]
            sum_c[j] = row_c[j]
            sum_d[j] = row_d[j]
        for r in range(rank):
            u = left[r]
            v = right[r]
            a = -bias[r]
            b = a
            c = a
            d = a
            for j in range(width):
                a += row_a[j] * v[j]
                b += row_b[j] * v[j]
                c += row_c[j] * v[j]
                d += row_d[j] * v[j]
            for j in range(width):
                sum_a[j] -= a * u[j]
                sum_b[j] -= b * u[j]
                sum_c[j] -= c * u[j]
                sum_d[j] -= d * u[j]
        for i in range(count):
            target = out[begin + i]
            source = sums[i]
            for j in range(width):
                target[j] = source[j]
