"""Accumulators of the variances of x, without a d x d product; rows may be dense or sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.row_kernels import Assignment, Change, sample_columns
from splince_fast._runtime import threads
from splince_fast._runtime.rows import NO_WEIGHT, Rows, SparseRows, is_sparse, parts, subtracted
from splince_fast.labels import Encoded, VariableName
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.block import Block, BlockSums
from splince_fast.moments.block_sums import sum_block
from splince_fast.moments.state import State

Float = NDArray[np.float64]

# The shift of a block is the mean of this many rows at its start.
_HEAD = 16
# Sparse rows per block. Blocks are larger than for dense rows, since the merge of a block takes
# O(d k) operations even if the block has few stored entries.
_SPARSE_ROWS = 1 << 14
# A column of sparse rows is summed about 0 unless |mean| exceeds this many standard deviations.
_FAR = 16.0


class DiagonalAccumulator(Accumulator):
    """An accumulator of variances: O(d k) numbers for k label columns."""

    def n_merges(self, rows: Rows, n: int) -> int:
        step = self.parameters.block_rows or _SPARSE_ROWS
        return -(-n // step) if is_sparse(rows.array) else super().n_merges(rows, n)

    def _add_rows(
        self,
        rows: Rows,
        n: int,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        in_order: bool,
        index: NDArray[np.intp] | None,
        sink: Callable[[list[Change]], None],
    ) -> None:
        """Pass the changes to `sink`; sparse rows are merged at once, without a buffer."""
        if not isinstance(rows, SparseRows):
            super()._add_rows(rows, n, weight, encoded, in_order, index, sink)
            return
        rows = rows if index is None else rows.select(index)
        block, state, variables = self._encoded(rows, n, weight, encoded, None)
        step = self.parameters.block_rows or _SPARSE_ROWS
        for start in range(0, n, step):
            part = block.slice(start, min(n, start + step))
            changes, variables = self._merge(part, state, variables)
            sink(changes)
        sink([Assignment(self, {"state": state, "variables": variables})])

    def _reserve(self, width: int, dtype: np.dtype[np.generic]) -> int:
        """Return the rows per block; the reduction needs no work memory."""
        threads.thread_count()  # raises InputError if SPLINCE_FAST_NUM_THREADS is invalid
        capacity = self.parameters.capacity(width, dtype.itemsize)
        self._work.capacities[width, dtype] = capacity
        return capacity

    def _empty_state(self, width: int) -> State:
        return State.empty_diagonal(width)

    def _reduce(
        self, block: Block, codes: NDArray[np.intp], class_weights: Float, values: Float
    ) -> BlockSums:
        """Return the sums of a block about a shift, with the sums of squares about its mean."""
        if is_sparse(block.rows):
            return _sum_sparse(block.rows, block.weight, codes, len(class_weights), values)
        head = block.slice(0, min(block.n, _HEAD))
        shift = sample_columns(head.rows, head.index, head.weight, 1)[0]
        sums = sum_block(
            block.rows, block.weight, shift, codes, len(class_weights), values, block.index
        )
        squares = np.maximum(0.0, sums.squares - sums.total**2 / sums.weight_sum)
        return replace(sums, squares=squares)


def _sum_sparse(
    rows: Any, weight: Float | None, codes: NDArray[np.intp], n_sums: int, values: Float
) -> BlockSums:
    """Return the sums of a block of sparse rows about a shift."""
    # Only stored entries are read. Columns are summed about 0, except columns whose mean is more
    # than 16 standard deviations from 0. These are summed about a shift near the mean, which makes
    # them dense, but adds few entries: such a column has less than one implicit zero in 257 rows.
    sums = sum_stored(rows, weight, codes, n_sums, values)
    far = far_from_zero(sums.total / sums.weight_sum, sums.squares / sums.weight_sum)
    if len(far):
        shift = np.zeros(rows.shape[1])
        head = rows[:_HEAD][:, far].toarray()
        shift[far] = sample_columns(head, None, None if weight is None else weight[:_HEAD], 1)[0]
        sums = sum_stored(subtracted(rows, shift), weight, codes, n_sums, values)
        sums.shift = shift
    return sums


def sum_stored(
    rows: Any,
    weight: Float | None,
    codes: NDArray[np.intp],
    n_sums: int,
    values: Float,
    mean: Float | None = None,
) -> BlockSums:
    """Return the sums of sparse rows about 0, but the sums of squares about `mean`."""
    # By default, `mean` is that of the rows.
    import splince_fast._kernels.sparse as kernels

    n, d = rows.shape
    row_weights = NO_WEIGHT if weight is None else weight
    weight_sum = float(n) if weight is None else float(weight.sum())
    total, squares = np.zeros(d), np.empty(d)
    class_sums, products = np.zeros((n_sums, d)), np.zeros((len(values), d))
    kernels.sum_rows(*parts(rows), row_weights, codes, values, total, class_sums, products)
    mean = total / weight_sum if mean is None else mean
    kernels.sum_squares(*parts(rows), row_weights, mean, weight_sum, squares)
    return BlockSums(n, weight_sum, np.zeros(d), total, squares, class_sums, products)


def far_from_zero(mean: Float, variances: Float) -> NDArray[np.intp]:
    """Return the columns whose mean is more than 16 standard deviations from 0."""
    return np.flatnonzero(np.abs(mean) > _FAR * np.sqrt(variances))
