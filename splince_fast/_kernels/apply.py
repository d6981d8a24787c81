"""Passes over rows that BLAS has no verb for, compiled by Numba.

Every kernel is serial; the threads split the work by rows, each of which comes from the same
operations whatever their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from splince_fast._kernels.jit import kernel

# Rows that are worked on together: each load of a factor serves so many.
_GROUP = 8


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
    rows: Any, left: Any, right: Any, mean: Any, shift: Any, start: int, stop: int, out: Any
) -> None:
    """out[i] = rows[i] - left^T (right (rows[i] - mean) - shift), start <= i < stop, in float64.

    The mean goes off first, so that a feature of large mean costs the others no digit.

    Parameters
    ----------
    rows, out : (n, d) float32 or float64, C-contiguous; may be the same array
    left, right : (r, d) float64, C-contiguous: the transposed factors of I - P
    mean : (d,) float64
    shift : (r,) float64, 0 unless the map is a composition
    """
    rank, width = left.shape
    if rank == 1:
        u = left[0]
        v = right[0]
        for i in range(start, stop):
            row = rows[i]
            target = out[i]
            coefficient = -shift[0]
            for j in range(width):
                coefficient += (row[j] - mean[j]) * v[j]
            for j in range(width):
                target[j] = row[j] - coefficient * u[j]
        return
    # Products take four rows by two factors, corrections two rows by four factors: as many sums as
    # registers hold. Rows and factors that are missing from the last tile repeat the last one;
    # such a factor gets the coefficient 0.
    centred = np.empty((_GROUP, width))
    removed = np.empty((_GROUP, width))
    coefficients = np.empty((_GROUP, 4))
    last = rank - 1
    for begin in range(start, stop, _GROUP):
        count = min(_GROUP, stop - begin)
        padded = (count + 3) // 4 * 4
        for i in range(padded):
            row = rows[begin + min(i, count - 1)]
            about_mean = centred[i]
            for j in range(width):
                about_mean[j] = row[j] - mean[j]
        removed[:] = 0.0
        for r in range(0, rank, 4):
            for i in range(0, padded, 4):
                x0, x1, x2, x3 = centred[i], centred[i + 1], centred[i + 2], centred[i + 3]
                for k in range(0, 4, 2):
                    first, second = min(r + k, last), min(r + k + 1, last)
                    v = right[first]
                    w = right[second]
                    a0 = a1 = a2 = a3 = -shift[first]
                    b0 = b1 = b2 = b3 = -shift[second]
                    for j in range(width):
                        p, q = v[j], w[j]
                        a0 += x0[j] * p
                        a1 += x1[j] * p
                        a2 += x2[j] * p
                        a3 += x3[j] * p
                        b0 += x0[j] * q
                        b1 += x1[j] * q
                        b2 += x2[j] * q
                        b3 += x3[j] * q
                    if r + k > last:
                        a0 = a1 = a2 = a3 = 0.0
                    if r + k + 1 > last:
                        b0 = b1 = b2 = b3 = 0.0
                    coefficients[i, k], coefficients[i, k + 1] = a0, b0
                    coefficients[i + 1, k], coefficients[i + 1, k + 1] = a1, b1
                    coefficients[i + 2, k], coefficients[i + 2, k + 1] = a2, b2
                    coefficients[i + 3, k], coefficients[i + 3, k + 1] = a3, b3
            u0, u1 = left[r], left[min(r + 1, last)]
            u2, u3 = left[min(r + 2, last)], left[min(r + 3, last)]
            for i in range(0, padded, 2):
                removed_a, removed_b = removed[i], removed[i + 1]
                a0, a1 = coefficients[i, 0], coefficients[i, 1]
                a2, a3 = coefficients[i, 2], coefficients[i, 3]
                b0, b1 = coefficients[i + 1, 0], coefficients[i + 1, 1]
                b2, b3 = coefficients[i + 1, 2], coefficients[i + 1, 3]
                for j in range(width):
                    p, q, s, t = u0[j], u1[j], u2[j], u3[j]
                    removed_a[j] += (a0 * p + a1 * q) + (a2 * s + a3 * t)
                    removed_b[j] += (b0 * p + b1 * q) + (b2 * s + b3 * t)
        for i in range(count):
            row = rows[begin + i]
            target = out[begin + i]
            difference = removed[i]
            for j in range(width):
                target[j] = row[j] - difference[j]


@kernel
def widen_halves(halves: Any, out: Any) -> None:
    """out = halves, exactly; halves are the 16 bits of float16 in uint16, out is float32."""
    for i in range(halves.shape[0]):
        bits = np.uint32(halves[i])
        magnitude = np.uint32(bits & np.uint32(0x7FFF))
        # The exponents' biases differ by 112; the product is exact, for subnormal halves too.
        small = np.uint32(magnitude << np.uint32(13)).view(np.float32)
        wide = np.float32(small * np.float32(2.0**112)).view(np.uint32)
        if magnitude >= np.uint32(0x7C00):  # infinity and NaN keep the largest exponent
            wide = np.uint32(wide | np.uint32(0x7F800000))
        sign = np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))
        out[i] = np.uint32(wide | sign).view(np.float32)


@kernel
def narrow_halves(values: Any, out: Any) -> None:
    """out = float16 of float32 values, to nearest, ties to even, as bits in uint16."""
    for i in range(values.shape[0]):
        bits = np.float32(values[i]).view(np.uint32)
        magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
        # Normal halves: rebias the exponent, add half an ulp less one and the last bit that stays.
        odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
        rounded = np.uint32(magnitude + np.uint32(0xC8000FFF))
        half = np.uint32(np.uint32(rounded + odd) >> np.uint32(13))
        if magnitude < np.uint32(0x38800000):  # subnormal halves: 0.5 has their ulp as its own
            shifted = np.float32(magnitude.view(np.float32) + np.float32(0.5))
            half = np.uint32(shifted.view(np.uint32) - np.uint32(0x3F000000))
        if magnitude > np.uint32(0x477FEFFF):  # from 65520 on
            half = np.uint32(0x7C00)
        if magnitude > np.uint32(0x7F800000):
            half = np.uint32(0x7E00)
        sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
        out[i] = np.uint16(half | sign)
