"""Passes over rows that BLAS has no verb for, compiled by Numba.

Every kernel is serial; the threads split the work by rows, each of which comes from the same
operations whatever their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from splince_fast._kernels.jit import kernel


@kernel
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


@kernel
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
    # Four rows share each load of the factors, four factors each load of the rows. The last group
    # of rows may repeat one; the last group of factors repeats one with coefficients of 0.
    sums = np.empty((4, width))
    sum_a, sum_b, sum_c, sum_d = sums[0], sums[1], sums[2], sums[3]
    for begin in range(start, stop, 4):
        count = min(4, stop - begin)
        row_a = rows[begin]
        row_b = rows[begin + min(1, count - 1)]
        row_c = rows[begin + min(2, count - 1)]
        row_d = rows[begin + min(3, count - 1)]
        for j in range(width):
            sum_a[j] = row_a[j]
            sum_b[j] = row_b[j]
            sum_c[j] = row_c[j]
            sum_d[j] = row_d[j]
        for r in range(0, rank, 4):
            second, third, fourth = r + 1 < rank, r + 2 < rank, r + 3 < rank
            r1 = r + 1 if second else r
            r2 = r + 2 if third else r
            r3 = r + 3 if fourth else r
            v0, v1, v2, v3 = right[r], right[r1], right[r2], right[r3]
            a0 = b0 = c0 = d0 = -bias[r]
            a1 = b1 = c1 = d1 = -bias[r1]
            a2 = b2 = c2 = d2 = -bias[r2]
            a3 = b3 = c3 = d3 = -bias[r3]
            for j in range(width):
                a, b, c, d = row_a[j], row_b[j], row_c[j], row_d[j]
                a0 += a * v0[j]
                b0 += b * v0[j]
                c0 += c * v0[j]
                d0 += d * v0[j]
                a1 += a * v1[j]
                b1 += b * v1[j]
                c1 += c * v1[j]
                d1 += d * v1[j]
                a2 += a * v2[j]
                b2 += b * v2[j]
                c2 += c * v2[j]
                d2 += d * v2[j]
                a3 += a * v3[j]
                b3 += b * v3[j]
                c3 += c * v3[j]
                d3 += d * v3[j]
            if not second:
                a1 = b1 = c1 = d1 = 0.0
            if not third:
                a2 = b2 = c2 = d2 = 0.0
            if not fourth:
                a3 = b3 = c3 = d3 = 0.0
            u0, u1, u2, u3 = left[r], left[r1], left[r2], left[r3]
            for j in range(width):
                p, q, s, t = u0[j], u1[j], u2[j], u3[j]
                sum_a[j] -= (a0 * p + a1 * q) + (a2 * s + a3 * t)
                sum_b[j] -= (b0 * p + b1 * q) + (b2 * s + b3 * t)
                sum_c[j] -= (c0 * p + c1 * q) + (c2 * s + c3 * t)
                sum_d[j] -= (d0 * p + d1 * q) + (d2 * s + d3 * t)
        for i in range(count):
            target = out[begin + i]
            source = sums[i]
            for j in range(width):
                target[j] = source[j]
