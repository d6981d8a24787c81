"""Passes over rows that BLAS has no verb for, compiled by Numba.

Every kernel is serial; the threads split the work by rows, each of which comes from the same
operations whatever their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from splince_fast._kernels.jit import kernel, prefetch
from splince_fast._kernels.tiles import COLUMNS, ROWS, add_product, settle, stream

# Rows that are worked on together, and features of a product of theirs: both factors of it stay in
# the first cache, and a panel of the map is read once for so many rows.
_GROUP = 32
_DEPTH = 64
_LINE = 64  # bytes of a cache line


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
def _aligned(rows: int, columns: int) -> Any:
    """Zeros (rows, columns) in float64 that begin at a cache line."""
    memory = np.zeros(rows * columns + _LINE // 8)
    skip = (-memory.ctypes.data) % _LINE // 8
    return memory[skip : skip + rows * columns].reshape(rows, columns)


@kernel
def _panels(factor: Any, sign: float) -> Any:
    """sign * factor (k, m) as panels (m / COLUMNS rounded up, k, COLUMNS), filled up with zeros."""
    depth, columns = factor.shape
    count = (columns + COLUMNS - 1) // COLUMNS
    panels = _aligned(count * depth, COLUMNS).reshape(count, depth, COLUMNS)
    for p in range(count):
        for q in range(min(COLUMNS, columns - p * COLUMNS)):
            for t in range(depth):
                panels[p, t, q] = sign * factor[t, p * COLUMNS + q]
    return panels


@kernel
def panels(left: Any, right: Any) -> tuple[Any, Any]:
    """right^T and -left, both (r, d) float64, as `apply_rows` reads them."""
    return _panels(right.T, 1.0), _panels(left, -1.0)


# What a map of rank 1 needs of them.
NO_PANELS = (np.empty((0, 0, COLUMNS)),) * 2


@kernel
def _write(rows: Any, width: int, out: Any, start: int, stop: int, streamed: bool) -> None:
    """out[start:stop] = rows[:stop - start, :width]."""
    if streamed and rows.shape[1] == width:
        stream(rows[: stop - start].reshape(-1), out[start:stop].reshape(-1))
        return
    for i in range(start, stop):
        row, target = rows[i - start], out[i]
        if streamed:
            stream(row[:width], target)
        else:
            for j in range(width):
                target[j] = row[j]


@kernel
def apply_rows(
    rows: Any, left: Any, right: Any, mean: Any, shift: Any, measuring: Any, removing: Any,
    streamed: bool, start: int, stop: int, out: Any,
) -> None:  # fmt: skip
    """out[i] = rows[i] - left^T (right (rows[i] - mean) - shift), start <= i < stop, in float64.

    The mean goes off first, so that a feature of large mean costs the others no digit. Every row
    goes the same way, whatever its neighbours: the last group is filled up with other rows.

    Parameters
    ----------
    rows, out : (n, d) float32 or float64, C-contiguous; may be the same array
    left, right : (r, d) float64, C-contiguous: the transposed factors of I - P
    mean : (d,) float64
    shift : (r,) float64, 0 unless the map is a composition
    measuring, removing : as `panels` makes them of `left` and `right`; NO_PANELS for rank 1
    streamed : bool
        Write past the caches, unless the rows are in `out` already.
    """
    rank, width = left.shape
    streamed = streamed and rows.ctypes.data != out.ctypes.data
    step = _LINE // rows.itemsize  # the rows of the next group are asked for, line by line
    if rank == 1:
        u, v = left[0], right[0]
        results = np.empty((_GROUP if streamed else 0, width), out.dtype)
        for begin in range(start, stop, _GROUP):
            end = min(begin + _GROUP, stop)
            for i in range(begin, end):
                row = rows[i]
                target = results[i - begin] if streamed else out[i]
                coefficient = -shift[0]
                for j in range(width):
                    coefficient += (row[j] - mean[j]) * v[j]
                if streamed:
                    for j in range(0, width, step):
                        prefetch(rows, i + _GROUP, j)
                for j in range(width):
                    target[j] = row[j] - coefficient * u[j]
            if streamed:
                _write(results, width, out, begin, end, streamed)
        if streamed:
            settle()
        return
    # The rows of a group as they come, to which the correction is added, and about the mean.
    # Numbers beyond the rank meet zeros, and those beyond the width are never read.
    corrected = np.zeros((_GROUP, len(removing) * COLUMNS), out.dtype)
    centred = _aligned(_GROUP, _DEPTH)
    coefficients = _aligned(_GROUP, len(measuring) * COLUMNS)
    for begin in range(start, stop, _GROUP):
        end = min(begin + _GROUP, stop)
        for i in range(_GROUP):
            for r in range(rank):
                coefficients[i, r] = -shift[r]
        for first in range(0, width, _DEPTH):
            last = min(first + _DEPTH, width)
            middle = mean[first:last]
            for i in range(begin, end):
                row = rows[i, first:last]
                about_mean = centred[i - begin]
                same = corrected[i - begin, first:last]
                for j in range(last - first):
                    about_mean[j] = row[j] - middle[j]
                    same[j] = row[j]
            for p in range(len(measuring)):
                for i in range(0, end - begin, ROWS):
                    add_product(
                        centred, i, measuring[p], first, last - first, coefficients, p * COLUMNS
                    )
        for p in range(len(removing)):
            for i in range(0, end - begin, ROWS):
                add_product(coefficients, i, removing[p], 0, rank, corrected, p * COLUMNS)
            for i in range(end, end + _GROUP):
                for j in range(p * COLUMNS, (p + 1) * COLUMNS, step):
                    prefetch(rows, i, j)
        _write(corrected, width, out, begin, end, streamed)
    if streamed:
        settle()


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
