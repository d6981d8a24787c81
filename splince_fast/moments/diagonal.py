"""Accumulators of the variances of x, without a d x d product; rows may be dense or sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import threads
from splince_fast._runtime.rows import NO_WEIGHT, Rows, SparseRows, is_sparse, parts, subtracted
from splince_fast.labels import Encoded, VariableName
from splince_fast.moments.accumulator import Accumulator, Batch, joined_requests
from splince_fast.moments.block_sums import BlockSums, class_weights, sum_block
from splince_fast.moments.buffer import LabelledRows
from splince_fast.moments.state import Diagonal, State, head_mean
from splince_fast.moments.variable import Variable

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

    def update(
        self,
        rows: Rows,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        *,
        in_order: bool = False,
        checked: bool = False,
        index: NDArray[np.intp] | None = None,
    ) -> None:
        """Add rows; sparse rows are merged into the sums at once, without a buffer."""
        if not isinstance(rows, SparseRows):
            super().update(rows, weight, encoded, in_order=in_order, checked=checked, index=index)
            return
        if not checked:
            rows.check()
        if index is not None:
            rows = rows.select(index)
        batch = self._prepare(LabelledRows(rows.array, weight), encoded)
        step = self.parameters.block_rows or _SPARSE_ROWS
        for start in range(0, len(rows), step):
            self._merge(batch, batch.block.slice(start, min(len(rows), start + step)))

    def _reserve(self, width: int, dtype: np.dtype[np.generic]) -> int:
        """Return the rows per block; the reduction needs no work memory."""
        threads.thread_count()  # raises InputError if SPLINCE_FAST_NUM_THREADS is invalid
        capacity = self.parameters.capacity(width, dtype.itemsize)
        self._work.capacities[width, dtype] = capacity
        return capacity

    def _empty_state(self, width: int) -> State:
        return State.empty_diagonal(width)

    def _merge(self, batch: Batch, block: LabelledRows) -> None:
        """Compute the sums of a block, and add them to the state and to the variables."""
        state, n, rows, index = batch.state, len(block), block.rows, block.index
        weight = None if block.weight is None else np.ascontiguousarray(block.weight)
        requests = [batch.variables[name].request(z, weight) for name, z in block.labels.items()]
        codes, n_sums, values = joined_requests(requests, n)
        if is_sparse(rows):
            shift, sums = _sum_sparse(rows, weight, codes, n_sums, values)
            squares = sums.squares
        else:
            head = rows[:_HEAD] if index is None else rows[index[:_HEAD]]
            shift = head_mean(head, None if weight is None else weight[:_HEAD])
            sums = sum_block(rows, weight, shift, codes, n_sums, values, index)
            squares = np.maximum(0.0, sums.squares - sums.total**2 / sums.weight_sum)
        block_state = State(shift, n, sums.weight_sum, sums.total.copy(), Diagonal(squares))
        reference = state.reference_with(block_state)
        moved: dict[VariableName, Variable] = {}
        if reference is not state.reference:
            moved = self._moved(state, reference)
        offset, class_sums, products = shift - reference, sums.class_sums, sums.products
        weights = class_weights(codes, n_sums, NO_WEIGHT if weight is None else weight)
        class_sums += weights[:, None] * offset
        if len(products):
            products += np.outer(values.sum(axis=1), offset)
        self._add_to_sample(block, weight)
        state.add(block_state, reference)
        self._commit(batch, block, moved, requests, class_sums, products)
        if len(block.labels) > 1:
            self.label_products.add(block.labels, batch.variables, weight)

    def _add_to_sample(self, block: LabelledRows, weight: Float | None) -> None:
        """Do nothing: only `SampledAccumulator` samples the rows."""


def _sum_sparse(
    rows: Any, weight: Float | None, codes: NDArray[np.intp], n_sums: int, values: Float
) -> tuple[Float, BlockSums]:
    """Return a shift and the sums of a block of sparse rows about it."""
    # Only stored entries are read. Columns are summed about 0, except columns whose mean is more
    # than 16 standard deviations from 0. These are summed about a shift near the mean, which makes
    # them dense, but adds few entries: such a column has less than one implicit zero in 257 rows.
    shift = np.zeros(rows.shape[1])
    sums = sum_stored(rows, weight, codes, n_sums, values)
    far = far_from_zero(sums.total / sums.weight_sum, sums.squares / sums.weight_sum)
    if len(far):
        head = rows[:_HEAD][:, far].toarray()
        shift[far] = head_mean(head, None if weight is None else weight[:_HEAD])
        sums = sum_stored(subtracted(rows, shift), weight, codes, n_sums, values)
    return shift, sums


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
    return BlockSums(weight_sum, total, squares, class_sums, products)


def far_from_zero(mean: Float, variances: Float) -> NDArray[np.intp]:
    """Return the columns whose mean is more than 16 standard deviations from 0."""
    return np.flatnonzero(np.abs(mean) > _FAR * np.sqrt(variances))
