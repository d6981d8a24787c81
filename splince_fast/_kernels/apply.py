"""Passes over rows that BLAS has no verb for, compiled by Numba.

Every kernel is serial; the threads split the work by rows, each of which comes from the same
operations whatever their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload
from numba.np.numpy_support import as_dtype

from splince_fast._kernels.jit import kernel
from splince_fast._kernels.registers import LINE, aligned
from splince_fast._kernels.tiles import (
    COLUMNS,
    LANES,
    ROWS,
    STREAMED,
    add_narrow_product_and_stream,
    add_product,
    add_product_and_stream,
    add_row_product,
    ask_for_tile,
    centre_row,
    erase_row,
    move_row,
    move_tile,
    settle,
    stream,
)

# Rows that are worked on together, and features of a product of theirs: both factors of it stay in
# the first cache, and a panel of the map is read once for so many rows.
_GROUP = 32
_DEPTH = 64
_PANELS = 8  # whose products with a tile of rows follow each other, along its cache lines
_AHEAD = 8  # rows that are asked for before they are needed


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
def _panels(factor: Any, sign: float, columns: int) -> Any:
    """sign * factor (k, m) as panels (m / columns rounded up, k, columns), filled up with zeros."""
    depth, width = factor.shape
    count = (width + columns - 1) // columns
    panels = aligned(count * depth, columns).reshape(count, depth, columns)
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


def _lines(array: Any, begin: int, end: int, memory: Any) -> Any:
    """Rows begin..end of an array that the kernels work on as it lies; else as many of memory."""


@overload(_lines, strict=False)  # else annotations would count as other names
def _lines_of(array: Any, begin: Any, end: Any, memory: Any) -> Any:
    if array.layout == "C" and array.dtype != types.uint16:
        return lambda array, begin, end, memory: array[begin:end]
    return lambda array, begin, end, memory: memory[: end - begin]


def _memory(count: int, array: Any) -> Any:
    """Memory for rows of an array, in C order and in its dtype, float32 for halves."""


@overload(_memory, strict=False)
def _memory_of(count: Any, array: Any) -> Any:
    dtype = as_dtype(types.float32 if array.dtype == types.uint16 else array.dtype)
    return lambda count, array: np.empty((count, array.shape[1]), dtype)


@kernel
def _transpose(source: Any, target: Any) -> None:
    """target = source; source lies in memory column by column, target row by row."""
    n, width = source.shape
    tiled, whole = n // LANES * LANES, width // LANES * LANES
    for j in range(0, whole, LANES):
        for i in range(0, tiled, LANES):
            move_tile(source, i, j, target)
    for i in range(n):
        for j in range(whole if i < tiled else 0, width):
            target[i, j] = source[i, j]


@kernel
def _whole_lines(source: Any, target: Any) -> Any:
    """Both in one dimension, cut to the whole cache lines of target; the rest is copied."""
    given, into, line = source.reshape(-1), target.reshape(-1), LINE // target.itemsize
    first = min((-target.ctypes.data) % LINE // target.itemsize, len(into))
    last = len(into) - (len(into) - first) % line
    into[:first], into[last:] = given[:first], given[last:]
    return given[first:last], into[first:last]


def _move(source: Any, target: Any) -> Any:
    """target = source, where that is no view of it; one of both is in C order and no halves.

    Returns
    -------
    int
        The first row with a finite number that is none in float16, or -1.
    """


@overload(_move, strict=False)
def _move_of(source: Any, target: Any) -> Any:
    narrowed = source.dtype != target.dtype and target.dtype == types.uint16
    if source.layout == target.layout == "C":
        if source.dtype == target.dtype:
            return lambda source, target: -1

        def move(source: Any, target: Any) -> Any:
            lost = -1
            for i in range(len(source)):
                if not narrowed:
                    widen_halves(source[i], target[i])
                elif narrow_halves(source[i], target[i]) and lost < 0:
                    lost = i
            return lost

    elif source.dtype != target.dtype:

        def move(source: Any, target: Any) -> Any:
            halves = np.empty(source.shape, np.uint16)
            return _move(source, halves) + _move(halves, target) + 1  # one of both is -1

    else:

        def move(source: Any, target: Any) -> Any:
            size = source.itemsize
            if source.strides[0] == size == target.strides[1]:
                _transpose(source, target)
            elif source.strides[1] == size == target.strides[0]:
                _transpose(source.T, target.T)
            elif source.strides[1] == size == target.strides[1]:
                for i in range(len(source)):
                    move_row(source, i, target)
            else:
                for i in range(len(source)):
                    for j in range(source.shape[1]):
                        target[i, j] = source[i, j]
            return -1

    return move


@kernel
def apply_rows(
    rows: Any, measuring: Any, removing: Any, mean: Any, shift: Any, streamed: bool,
    start: int, stop: int, out: Any,
) -> int:  # fmt: skip
    """out[i] = rows[i] - left^T (right (rows[i] - mean) - shift), start <= i < stop, in float64.

    The mean goes off first, so that a feature of large mean costs the others no digit. Every row
    goes the same way, whatever its neighbours and its layout: what is not in C order passes
    through memory that is, group by group.

    Parameters
    ----------
    rows, out : (n, d) float32, float64, or halves as in `widen_halves`; aligned, of any strides;
        may be the same array
    measuring, removing : as `panels` makes them of right and left, the transposed factors of I - P
    mean : (d,) float64
    shift : (r,) float64, 0 unless the map is a composition
    streamed : bool
        Write past the caches, unless the rows are in `out` already.

    Returns
    -------
    int
        The first row with a finite number that is none in float16, or -1.
    """
    rank, width = len(shift), len(mean)
    given = rows.flags.c_contiguous and rows.itemsize > 2
    written = out.flags.c_contiguous and out.itemsize > 2
    streamed = streamed and written and rows.ctypes.data != out.ctypes.data
    whole = (width * out.itemsize | out.ctypes.data) % STREAMED == 0
    apart = not written or (streamed and not (rank == 1 and whole))
    size = stop - start if rank == 1 and given and not apart else _GROUP
    copies, results = _memory(0 if given else _GROUP, rows), _memory(_GROUP if apart else 0, out)
    finished = place = results[:0].reshape(-1)
    # Rows and coefficients that fill up the last tile are never read.
    tiles = 0 if rank == 1 else min(_GROUP, (stop - start + ROWS - 1) // ROWS * ROWS)
    centred = aligned(tiles, _DEPTH)
    coefficients = aligned(tiles, measuring.shape[0] * measuring.shape[2])
    lost = -1
    for begin in range(start, stop, max(1, size)):
        end = min(begin + size, stop)
        block, target = _lines(rows, begin, end, copies), _lines(out, begin, end, results)
        _move(rows[begin:end], block)
        if apart:
            target = results[: end - begin]
        if rank == 1:
            stream(finished, 0, len(finished), place)
            _apply_by_rows(
                block, measuring, removing, mean, shift[0], streamed and not apart, target
            )
        else:
            following = _lines(rows, end, min(end + _GROUP, stop), copies[:0])
            _apply_by_tiles(
                block, measuring, removing, mean, shift, centred, coefficients, following,
                finished, place, target,
            )  # fmt: skip
        row = _move(target, out[begin:end])
        if row >= 0 and lost < 0:
            lost = begin + row
        if streamed and apart:
            finished, place = _whole_lines(target, _lines(out, begin, end, results))
    if streamed:
        stream(finished, 0, len(finished), place)
        settle()
    return lost


@kernel
def _apply_by_rows(
    rows: Any, measuring: Any, removing: Any, mean: Any, shift: float, streamed: bool, out: Any
) -> None:
    """`apply_rows` at rank 1: a row is measured while the one before it is written."""
    n, width = rows.shape
    u, v = removing.reshape(-1), measuring.reshape(-1)
    whole = width // COLUMNS * COLUMNS
    coefficient = 0.0
    nowhere = np.empty((1, width), out.dtype)  # for the row before the first
    for i in range(n + 1):
        before, measured, ahead = max(i - 1, 0), min(i, n - 1), min(i + _AHEAD, n - 1)
        target, k = (out, before) if i > 0 else (nowhere, 0)
        found = erase_row(
            rows, before, u, coefficient, target, k, measured, ahead, mean, v, whole,
            streamed and i > 0,
        )  # fmt: skip
        # Apart from the stores, so that the sum has one order whether or not these are in place.
        for j in range(whole, width):
            found += (rows[measured, j] - mean[j]) * v[j]
        for j in range(whole, width):
            target[k, j] = rows[before, j] + coefficient * u[j]
        coefficient = found - shift


@kernel
def _apply_by_tiles(
    rows: Any, measuring: Any, removing: Any, mean: Any, shift: Any, centred: Any,
    coefficients: Any, following: Any, finished: Any, place: Any, out: Any,
) -> None:  # fmt: skip
    """`apply_rows` to so many rows as have coefficients, or fewer.

    Memory works beside the products: on the `finished` rows before these, which go to `place` in
    whole lines, and on those following.
    """
    n, width = rows.shape
    rank, columns = len(shift), measuring.shape[2]
    done, line = 0, LINE // out.itemsize
    for i in range(n):
        for r in range(rank):
            coefficients[i, r] = -shift[r]
    for first in range(0, width, _DEPTH):
        depth = min(_DEPTH, width - first)
        whole = depth // LANES * LANES
        for i in range(n):
            centre_row(rows, i, mean, first, whole, centred)
            for j in range(whole, depth):
                centred[i, j] = rows[i, first + j] - mean[first + j]
        for p in range(len(measuring)):
            panel, j = measuring[p], p * columns
            for i in range(0, n, ROWS):
                until = min(done + ROWS * depth // line * line, len(finished))
                if columns == COLUMNS:
                    add_product_and_stream(
                        centred, i, panel, first, depth, coefficients, i, coefficients, i, j,
                        finished, done, until, place,
                    )  # fmt: skip
                else:
                    add_narrow_product_and_stream(
                        centred, i, panel, first, depth, coefficients, i, coefficients, i, j,
                        finished, done, until, place,
                    )  # fmt: skip
                done = until
    stream(finished, done, len(finished), place)
    factor = removing.reshape(-1, COLUMNS)
    whole, tiled = width // COLUMNS, n // ROWS * ROWS
    for begin in range(0, whole, _PANELS):
        end = min(begin + _PANELS, whole)
        for i in range(0, tiled, ROWS):
            for p in range(begin, end):
                j = p * COLUMNS
                if i < len(following):
                    ask_for_tile(following, i, j)
                add_product(coefficients, i, factor, p * rank, rank, rows, i, out, i, j)
        for i in range(tiled, n):
            for p in range(begin, end):
                j = p * COLUMNS
                add_row_product(coefficients, i, factor, p * rank, rank, rows, i, out, i, j)
    first = whole * COLUMNS
    edge = np.zeros((1, COLUMNS), out.dtype)
    for i in range(n if first < width else 0):
        for j in range(first, width):
            edge[0, j - first] = rows[i, j]
        add_row_product(coefficients, i, factor, whole * rank, rank, edge, 0, edge, 0, 0)
        for j in range(first, width):
            out[i, j] = edge[0, j - first]
