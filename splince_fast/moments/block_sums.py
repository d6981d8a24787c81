"""Sums of one block of dense rows about a shift, without a d x d product."""

from __future__ import annotations

import functools
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast._runtime.memory import aligned
from splince_fast._runtime.rows import check_values
from splince_fast.moments.block import (
    MATRIX_PRODUCT_FROM,
    Block,
    BlockSums,
    label_products,
)

Float = NDArray[np.float64]

# Least number of elements per thread. For fewer elements, starting the thread takes more time than
# the thread saves.
_GRAIN = 3 << 17
# All values of a block with weights of at least 1 are valid if the sum of squares of each feature
# about a point is at most this, and no coordinate of the point is larger.
_LARGEST_SQUARES, _LARGEST_SHIFT = 1e280, 1e140
# Largest number of segments (see `_segment_rows`) of a block: a few threads saturate the memory
# bandwidth. The number is odd because the first of two threads starts earlier, and sums one segment
# more than the second.
_MOST_SEGMENTS = 7
# Least number of columns per task, a multiple of 16.
_LEAST_COLUMNS = 192


def sum_block(
    rows: NDArray[np.generic],
    weight: Float | None,
    shift: Float,
    codes: NDArray[np.intp],
    n_codes: int,
    values: Float,
    index: NDArray[np.intp] | None = None,
) -> BlockSums:
    """Return the sums of a block; raise the error of :func:`check_values` for invalid rows."""
    n, d, by_matrix = (
        len(rows) if index is None else len(index),
        rows.shape[1],
        (len(values) >= MATRIX_PRODUCT_FROM),
    )
    given = Block(n, rows, weight, {}, index)
    columns = values[:0] if by_matrix else values
    n_sums = n_codes + len(columns) + 2
    segment = _segment_rows(n, d, n_sums)
    n_segments, n_pieces = -(-n // segment), 1
    block = row_kernels.Block(rows, index, weight, shift, codes, n_codes, columns, segment)
    if n_segments == 1:
        n_pieces = max(1, min(d // max(_LEAST_COLUMNS, _GRAIN // n), threads.thread_count()))
    piece_width = -(-d // (n_pieces * _LEAST_COLUMNS)) * _LEAST_COLUMNS
    parts = np.empty((n_segments, *block.sums.shape))
    scratch, counter = aligned((n_segments, 3, -(-d // 8) * 8)), np.zeros(1, np.int64)

    def work(first: int, last: int) -> None:
        row_kernels.sum_block(block, piece_width, parts, scratch, counter)

    threads.split(work, max(n_segments, n_pieces), grain=1)
    with np.errstate(over="ignore", invalid="ignore"):  # the check below reports overflow
        block.sums[...] = functools.reduce(np.add, parts)  # fixed order: reproducible sums
    least_weight = 1.0 if weight is None else min(1.0, weight.min())
    is_small = np.abs(shift).max() <= _LARGEST_SHIFT  # false for NaN, too
    if not (is_small and block.squares.max() <= _LARGEST_SQUARES * least_weight):
        check_values(given.array())
    weight_sum = float(n) if weight is None else float(weight.sum())
    products = label_products(given, values, shift) if by_matrix else block.products
    return BlockSums(n, weight_sum, shift, block.total, block.squares, block.class_sums, products)


@lru_cache(maxsize=64)
def _segment_rows(n: int, d: int, n_sums: int) -> int:
    """Return the number of rows per segment, a multiple of 4."""
    # A segment is a range of rows of a block; each segment has its own sums, so that threads can
    # sum several segments in parallel. The number of segments depends on shapes alone, for
    # reproducible results, and is small enough that the sums take a small fraction of the memory of
    # the block. If a block has a single segment, threads split its columns.
    count = max(1, min(_MOST_SEGMENTS, n * d // _GRAIN, n // (16 * n_sums)))
    return -(-n // (4 * count)) * 4
