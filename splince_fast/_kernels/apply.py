"""Passes over rows that BLAS has no verb for, compiled by Numba.

Every kernel is serial; the threads split the work by rows, each of which comes from the same
operations whatever their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from splince_fast._kernels.jit import kernel, prefetch
from splince_fast._kernels.tiles import (
    COLUMNS,
    LANES,
    ROWS,
    add_narrow_product,
    add_product,
    add_row_product,
    settle,
    stream,
)

# Rows that are worked on together, and features of a product of theirs: both factors of it stay in
# the first cache, and a panel of the map is read once for so many rows.
_GROUP = 32
_DEPTH = 128
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
def _panels(factor: Any, sign: float, columns: int) -> Any:
    """sign * factor (k, m) as panels (m / columns rounded up, k, columns), filled up with zeros."""
    depth, width = factor.shape
    count = (width + columns - 1) // columns
    panels = _aligned(count * depth, columns).reshape(count, depth, columns)
    for p in range(count):
        for t in range(depth):
            for q in range(min(columns, width - p * columns)):
                panels[p, t, q] = sign * factor[t, p * columns + q]
    return panels


@kernel
def panels(left: Any, right: Any) -> tuple[Any, Any]:
    """right^T and -left, both (r, d) float64, as `apply_rows` reads them.

    The panels are as wide as a tile of sums; at rank 1 there are no tiles.
    """
    rank = len(left)
    narrow = LANES if rank <= LANES else COLUMNS
    return (
        _panels(right.T, 1.0, 1 if rank == 1 else narrow),
        _panels(left, -1.0, 1 if rank == 1 else COLUMNS),
    )


@kernel
def apply_rows(
    rows: Any, measuring: Any, removing: Any, mean: Any, shift: Any, streamed: bool,
    start: int, stop: int, out: Any,
) -> None:  # fmt: skip
    """out[i] = rows[i] - left^T (right (rows[i] - mean) - shift), start <= i < stop, in float64.

    The mean goes off first, so that a feature of large mean costs the others no digit. Every row
    goes the same way, whatever its neighbours: the last tile is filled up with other rows.

    Parameters
    ----------
    rows, out : (n, d) float32 or float64, C-contiguous; may be the same array
    measuring, removing : as `panels` makes them of right and left, the transposed factors of I - P
    mean : (d,) float64
    shift : (r,) float64, 0 unless the map is a composition
    streamed : bool
        Write past the caches, unless the rows are in `out` already.
    """
    rank, width = len(shift), len(mean)
    streamed = streamed and rows.ctypes.data != out.ctypes.data
    results = np.empty((_GROUP if streamed else 0, width), out.dtype)
    step = _LINE // rows.itemsize  # the rows of the next group are asked for, line by line
    if rank == 1:
        u, v = removing.reshape(-1), measuring.reshape(-1)
        for begin in range(start, stop, _GROUP):
            end = min(begin + _GROUP, stop)
            for i in range(begin, end):
                row = rows[i]
                target = results[i - begin] if streamed else out[i]
                coefficient = -shift[0]
                for j in range(width):
                    coefficient += (row[j] - mean[j]) * v[j]
                if streamed and i + _GROUP < stop:
                    for j in range(0, width, step):
                        prefetch(rows, i + _GROUP, j)
                for j in range(width):
                    target[j] = row[j] + coefficient * u[j]
            if streamed:
                stream(results[: end - begin].reshape(-1), out[begin:end].reshape(-1))
        if streamed:
            settle()
        return
    # Rows and coefficients that fill up the last tile are never read.
    size = min(_GROUP, (stop - start + ROWS - 1) // ROWS * ROWS)
    columns = measuring.shape[2]
    centred = _aligned(size, _DEPTH)
    coefficients = _aligned(size, len(measuring) * columns)
    edge = np.zeros((1, COLUMNS), out.dtype)
    target = results if streamed else out
    for begin in range(start, stop, _GROUP):
        end = min(begin + _GROUP, stop)
        place = 0 if streamed else begin
        for i in range(end - begin):
            for r in range(rank):
                coefficients[i, r] = -shift[r]
        for first in range(0, width, _DEPTH):
            depth = min(_DEPTH, width - first)
            middle = mean[first : first + depth]
            for i in range(begin, end):
                row, about_mean = rows[i, first : first + depth], centred[i - begin]
                for j in range(depth):
                    about_mean[j] = row[j] - middle[j]
            for p in range(len(measuring)):
                panel, j = measuring[p], p * columns
                for i in range(0, end - begin, ROWS):
                    if columns == COLUMNS:
                        add_product(
                            centred, i, panel, first, depth, coefficients, i, coefficients, i, j
                        )
                    else:
                        add_narrow_product(
                            centred, i, panel, first, depth, coefficients, i, coefficients, i, j
                        )
        for p in range(len(removing)):
            panel, first = removing[p], p * COLUMNS
            left = width - first
            tiled = (end - begin) // ROWS * ROWS if left >= COLUMNS else 0
            for i in range(0, tiled, ROWS):
                add_product(
                    coefficients, i, panel, 0, rank, rows, begin + i, target, place + i, first
                )
            for i in range(tiled, end - begin):
                if left >= COLUMNS:
                    add_row_product(
                        coefficients, i, panel, 0, rank, rows, begin + i, target, place + i, first
                    )
                else:
                    for j in range(left):
                        edge[0, j] = rows[begin + i, first + j]
                    add_row_product(coefficients, i, panel, 0, rank, edge, 0, edge, 0, 0)
                    for j in range(left):
                        target[place + i, first + j] = edge[0, j]
            for i in range(end, min(end + _GROUP, stop)):
                for j in range(first, first + COLUMNS, step):
                    prefetch(rows, i, j)
        if streamed:
            stream(results[: end - begin].reshape(-1), out[begin:end].reshape(-1))
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
def narrow_halves(values: Any, out: Any) -> bool:
    """out = float16 of float32 values, to nearest, ties to even, as bits in uint16.

    Returns
    -------
    bool
        A finite value became infinite.
    """
    lost = 0
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
            if magnitude < np.uint32(0x7F800000):
                lost += 1
        if magnitude > np.uint32(0x7F800000):
            half = np.uint32(0x7E00)
        sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
        out[i] = np.uint16(half | sign)
    return lost > 0
