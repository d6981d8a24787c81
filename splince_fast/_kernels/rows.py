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
    centred = np.empty(width)
    class_sums[:, first:last] = 0.0
    products[:, first:last] = 0.0
    deviation[first:last] = 0.0
    peak[first:last] = 0.0
    w = 1.0
    root = 1.0
    for p in range(parts):
        start = p * part_rows
        stop = min(start + part_rows, n)
        mean = means[p]
        for i in range(start, stop):
            if weighted:
                w = weight[i]
                for j in range(width):
                    mean[j] += w * (rows[i, first + j] - reference[first + j])
            else:
                for j in range(width):
                    mean[j] += rows[i, first + j] - reference[first + j]
        inverse = 1.0 / part_weight[p]
        for j in range(width):
            deviation[first + j] += mean[j]
            mean[j] *= inverse
        for i in range(start, stop):
            if weighted:
                w = weight[i]
                root = root_weight[i]
            for j in range(width):
                centred[j] = rows[i, first + j] - reference[first + j]
                scaled = root * (centred[j] - mean[j])
                out[i, first + j] = scaled
                peak[first + j] = max(peak[first + j], abs(scaled))
            for v in range(codes.shape[0]):
                c = codes[v, i]
                if c >= 0:
                    for j in range(width):
                        class_sums[c, first + j] += w * centred[j]
            for q in range(values.shape[0]):
                value = values[q, i]
                if value != 0.0:
                    for j in range(width):
                        products[q, first + j] += value * centred[j]
    total = 0.0
    for p in range(parts):
        total += part_weight[p]
    for p in range(parts):
        root = np.sqrt(part_weight[p])
        for j in range(width):
            scaled = root * (means[p, j] - deviation[first + j] / total)
            out[n + p, first + j] = scaled
            peak[first + j] = max(peak[first + j], abs(scaled))


@_kernel
def scan(rows: Any, start: int, stop: int) -> tuple[bool, float]:
    """Whether rows start..stop are all finite, and their largest magnitude."""
    largest = 0.0
    for i in range(start, stop):
        total = 0.0
        peak = 0.0
        for j in range(rows.shape[1]):
            total += rows[i, j] * 0.0
            peak = max(peak, abs(rows[i, j]))
        if total != 0.0:
            return False, largest
        largest = max(largest, peak)
    return True, largest


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
        for i in range(start, stop):
            total = 0.0
            for j in range(width):
                total += rows[i, j] * right[0, j]
            total -= bias[0]
            for j in range(width):
                out[i, j] = rows[i, j] - total * left[0, j]
        return
    # Four rows at a time share each load of the factors.
    tile = np.empty((4, width))
    for begin in range(start, stop, 4):
        count = min(4, stop - begin)
        for i in range(4):
            source = begin + min(i, count - 1)
            for j in range(width):
                tile[i, j] = rows[source, j]
        for r in range(rank):
            a = 0.0
            b = 0.0
            c = 0.0
            e = 0.0
            for j in range(width):
                x = right[r, j]
                a += rows[begin, j] * x
                b += rows[begin + min(1, count - 1), j] * x
                c += rows[begin + min(2, count - 1), j] * x
                e += rows[begin + min(3, count - 1), j] * x
            a -= bias[r]
            b -= bias[r]
            c -= bias[r]
            e -= bias[r]
            for j in range(width):
                x = left[r, j]
                tile[0, j] -= a * x
                tile[1, j] -= b * x
                tile[2, j] -= c * x
                tile[3, j] -= e * x
        for i in range(count):
            for j in range(width):
                out[begin + i, j] = tile[i, j]
