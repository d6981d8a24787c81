"""States of O(d) or O(d r) numbers: a block is summed where it lies, about a point of its own."""

from __future__ import annotations

import functools
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast._runtime.arrays import check_values
from splince_fast._runtime.memory import aligned
from splince_fast.labels import VariableName
from splince_fast.moments.accumulator import Accumulator, Batch
from splince_fast.moments.block import MATRIX_PRODUCT_FROM, add_products, rows_of
from splince_fast.moments.buffer import LabelledRows
from splince_fast.moments.state import State
from splince_fast.moments.variable import Request, Variable

Float = NDArray[np.float64]

# Fewer elements per thread cost more in starting it than they save.
_GRAIN = 3 << 17
# Rows pass `check_values` if the sums of squares about a finite point are below this.
_LARGEST = 1e280
# A few processors saturate the memory. Of two threads the first, which starts earlier, takes one
# task more.
_MOST_SEGMENTS = 7
# Columns per stripe: `leverage` holds one partial sum per row and stripe.
STRIPE = 192


class DiagonalAccumulator(Accumulator):
    """An accumulator whose blocks are reduced without a copy, and without a d x d product."""

    def _reserve(self, width: int, dtype: np.dtype[np.generic]) -> int:
        """Rows of a block, which is reduced in place without work memory."""
        threads.thread_count()  # raises for an invalid setting
        capacity = self.parameters.capacity(width, dtype.itemsize)
        self._work.capacities[width, dtype] = capacity
        return capacity

    def _common_reference(
        self, state: State, own: State
    ) -> tuple[Float, dict[VariableName, Variable]]:
        """The common reference point of a state and a block, and the variables that move to it."""
        reference = state.reference_with(own)
        return reference, {} if reference is state.reference else self._moved(state, reference)

    def _add_sums(
        self,
        batch: Batch,
        block: LabelledRows,
        asked: list[Request],
        own: State,
        sums: tuple[Float, Float, Float, Float],
        common: tuple[Float, dict[VariableName, Variable]],
    ) -> None:
        """Add the state `own` of a block and its sums for the variables.

        `sums` are those per class, the weights of the classes, the products with columns, and the
        sums of these columns; all about the reference point of `own`.
        """
        reference, moved = common
        class_sums, class_weights, products, value_sums = sums
        offset = own.reference - reference
        class_sums += class_weights[:, None] * offset
        if len(products):
            products += np.outer(value_sums, offset)
        batch.state.add(own, reference)
        self._commit(batch, block, moved, asked, class_sums, products)


class BlockSums:
    """Sums of one block about `shift`; every call of `compute` computes them anew.

    Attributes
    ----------
    cells : tuple of (c,) intp and (c,) float64
        A row of each cell, the rows of equal codes in a segment, and the weight of the cell.
    """

    def __init__(
        self,
        rows: NDArray[np.generic],
        weight: Float | None,
        shift: Float,
        codes: NDArray[np.intp],
        n_codes: int,
        values: Float,
        index: NDArray[np.intp] | None = None,
    ) -> None:
        n, d = len(rows) if index is None else len(index), rows.shape[1]
        self._rows, self._index, self._codes, self._n_codes = rows, index, codes, n_codes
        self.leverage = np.empty((-(-d // STRIPE), n))
        self.weight_sum = float(n) if weight is None else float(weight.sum())
        self._least = 1.0 if weight is None else min(1.0, weight.min())
        self._given = values
        self._products: Float | None = None
        if len(values) >= MATRIX_PRODUCT_FROM:
            self._products = np.empty((len(values), d))
            add_products(rows, values, shift, np.zeros(d), self._products, index)
            values = values[:0]
        n_sums = 2 + n_codes + len(values)
        segment = _segment_rows(n, d, n_sums)
        self._sums = np.empty((-(-n // segment), n_sums, d))
        self._block = row_kernels.Block(
            rows, index, weight, shift, None, codes, n_codes, values, segment
        )
        order, cell = self._block.cells
        starts = np.append(0, np.flatnonzero(cell[1:] != cell[:-1]) + 1)
        ordered = np.ones(n) if weight is None else weight[order]
        self.cells = order[starts], np.add.reduceat(ordered, starts)

    def compute(self, inverse: Float) -> None:
        """Compute total, squares, class_sums, products and leverage."""
        n, (segments, _, d), pieces = self._block.n, self._sums.shape, 1
        if segments == 1:
            pieces = max(1, min(d // max(STRIPE, _GRAIN // n), threads.thread_count()))
        width = -(-d // (pieces * STRIPE)) * STRIPE
        near, counter = aligned((segments, 4, -(-d // 8) * 8)), np.zeros(1, np.int64)

        def work(first: int, last: int) -> None:
            row_kernels.sum_block(
                self._block, inverse, width, STRIPE, self._sums, near, self.leverage, counter
            )

        threads.split(work, max(segments, pieces), grain=1)
        with np.errstate(over="ignore", invalid="ignore"):  # `check` raises for such rows
            sums = functools.reduce(np.add, self._sums)  # in the order of segments
        self.total: Float = sums[0]
        self.squares: Float = sums[1]
        self.class_sums: Float = sums[2 : 2 + self._n_codes]
        self.products = sums[2 + self._n_codes :] if self._products is None else self._products

    def check(self) -> None:
        """Raise the errors of :func:`check_values` for the rows."""
        if not self.squares.max() <= _LARGEST * self._least:
            check_values(rows_of(self._rows, self._index, 0, self._block.n))

    @property
    def variances(self) -> Float:
        """(d,): sums of squares about the mean of the block, not divided by its weight."""
        return np.maximum(0.0, self.squares - self.total**2 / self.weight_sum)

    @property
    def sums(self) -> tuple[Float, Float, Float, Float]:
        """The arguments of `DiagonalAccumulator._add_sums`."""
        rows, weights = self.cells
        weights = class_weights(self._codes.take(rows, axis=1), self._n_codes, weights)
        return self.class_sums, weights, self.products, self._given.sum(axis=1)


@lru_cache(maxsize=64)
def _segment_rows(n: int, d: int, n_sums: int) -> int:
    """Rows of a segment, a multiple of 4: each segment has sums of its own.

    Their number depends on shapes alone, and sums take a small fraction of the block. Where it is
    1, with many classes or very wide rows, threads share columns instead.
    """
    count = max(1, min(_MOST_SEGMENTS, n * d // _GRAIN, n // (16 * n_sums)))
    return -(-n // (4 * count)) * 4


def class_weights(codes: NDArray[np.intp], n_codes: int, weight: Float) -> Float:
    """Weight of the rows in each class sum; `weight` is empty for unit weights."""
    weights = np.zeros(n_codes + 1)  # the first one of missing labels
    for column in codes:
        weights += np.bincount(column + 1, weight if len(weight) else None, n_codes + 1)
    return weights[1:]
