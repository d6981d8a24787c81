"""Base class of accumulators without a d x d product, and the sums of one block about a shift."""

from __future__ import annotations

import functools
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast._runtime.memory import aligned
from splince_fast._runtime.rows import check_values
from splince_fast.labels import VariableName
from splince_fast.moments.accumulator import Accumulator, Batch
from splince_fast.moments.block import MATRIX_PRODUCT_FROM, add_products, rows_of
from splince_fast.moments.buffer import LabelledRows
from splince_fast.moments.state import State
from splince_fast.moments.variable import Request, Variable

Float = NDArray[np.float64]

# Least number of elements per thread. For fewer elements, starting the thread takes more time than
# the thread saves.
_GRAIN = 3 << 17
# All values of a block with weights of at least 1 are valid if the sum of squares of each feature
# about a finite point is at most this.
_LARGEST_SQUARES = 1e280
# Largest number of segments (see `_segment_rows`) of a block: a few threads saturate the memory
# bandwidth. The number is odd because the first of two threads starts earlier, and sums one segment
# more than the second.
_MOST_SEGMENTS = 7
# Number of columns per stripe. `BlockSums.leverage` holds one partial sum per row and stripe.
STRIPE = 192


class DiagonalAccumulator(Accumulator):
    """Base class of accumulators that sum blocks without a copy and without a d x d product."""

    def _reserve(self, width: int, dtype: np.dtype[np.generic]) -> int:
        """Return the rows per block; the reduction needs no work memory."""
        threads.thread_count()  # raises InputError if SPLINCE_FAST_NUM_THREADS is invalid
        capacity = self.parameters.capacity(width, dtype.itemsize)
        self._work.capacities[width, dtype] = capacity
        return capacity

    def _common_reference(
        self, state: State, block_state: State
    ) -> tuple[Float, dict[VariableName, Variable]]:
        """Return a common reference point of two states, and copies of the variables about it."""
        # The dict is empty if the variables already have this reference point.
        reference = state.reference_with(block_state)
        return reference, {} if reference is state.reference else self._moved(state, reference)

    def _add_sums(
        self,
        batch: Batch,
        block: LabelledRows,
        requests: list[Request],
        block_state: State,
        sums: tuple[Float, Float, Float, Float],
        common: tuple[Float, dict[VariableName, Variable]],
    ) -> None:
        """Add the moments of a block to the state, and its label sums to the variables."""
        # `sums` are taken about the reference point of `block_state`, and are changed in place:
        # sums of x per class, weight sums of the classes, products of label columns with x, and
        # sums of the label columns.
        reference, moved = common
        class_sums, class_weights, products, value_sums = sums
        offset = block_state.reference - reference
        class_sums += class_weights[:, None] * offset
        if len(products):
            products += np.outer(value_sums, offset)
        batch.state.add(block_state, reference)
        self._commit(batch, block, moved, requests, class_sums, products)


class BlockSums:
    """Sums of the rows of one block and of their squares, about the point `shift`."""

    # `compute` sets the sums as attributes.

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
        self._least_weight = 1.0 if weight is None else min(1.0, weight.min())
        self._values = values
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
        # (c,) intp and (c,): number of one row of each cell, and the weight sum of each cell. A
        # cell consists of the rows of a segment (see `_segment_rows`) with equal codes of all
        # variables.
        self.cells = order[starts], np.add.reduceat(ordered, starts)

    def compute(self, inverse: Float) -> None:
        """Compute the attributes total, squares, class_sums, products and leverage."""
        # `leverage[s, i]` is the sum of inverse_j (x_ij - shift_j)^2 over the features j of stripe
        # s.
        n, (n_segments, _, d), n_pieces = self._block.n, self._sums.shape, 1
        if n_segments == 1:
            n_pieces = max(1, min(d // max(STRIPE, _GRAIN // n), threads.thread_count()))
        piece_width = -(-d // (n_pieces * STRIPE)) * STRIPE
        scratch, counter = aligned((n_segments, 4, -(-d // 8) * 8)), np.zeros(1, np.int64)

        def work(first: int, last: int) -> None:
            row_kernels.sum_block(
                self._block, inverse, piece_width, STRIPE, self._sums, scratch, self.leverage,
                counter,
            )  # fmt: skip

        threads.split(work, max(n_segments, n_pieces), grain=1)
        with np.errstate(over="ignore", invalid="ignore"):  # `check` reports overflow
            sums = functools.reduce(np.add, self._sums)  # fixed order: reproducible sums
        self.total: Float = sums[0]
        self.squares: Float = sums[1]
        self.class_sums: Float = sums[2 : 2 + self._n_codes]
        self.products = sums[2 + self._n_codes :] if self._products is None else self._products

    def check(self) -> None:
        """Raise the error of :func:`check_values` if a value of the rows is invalid."""
        if not self.squares.max() <= _LARGEST_SQUARES * self._least_weight:
            check_values(rows_of(self._rows, self._index, 0, self._block.n))

    @property
    def centred_squares(self) -> Float:
        """Sums of squares about the mean of the block, (d,), not divided by the weight sum."""
        return np.maximum(0.0, self.squares - self.total**2 / self.weight_sum)

    @property
    def sums(self) -> tuple[Float, Float, Float, Float]:
        """The argument `sums` of `DiagonalAccumulator._add_sums`."""
        rows, weights = self.cells
        weights = class_weights(self._codes.take(rows, axis=1), self._n_codes, weights)
        return self.class_sums, weights, self.products, self._values.sum(axis=1)


@lru_cache(maxsize=64)
def _segment_rows(n: int, d: int, n_sums: int) -> int:
    """Return the number of rows per segment, a multiple of 4."""
    # A segment is a range of rows of a block; each segment has its own sums, so that threads can
    # sum several segments in parallel. The number of segments depends on shapes alone, for
    # reproducible results, and is small enough that the sums take a small fraction of the memory of
    # the block. If a block has a single segment, threads split its columns.
    count = max(1, min(_MOST_SEGMENTS, n * d // _GRAIN, n // (16 * n_sums)))
    return -(-n // (4 * count)) * 4


def class_weights(codes: NDArray[np.intp], n_codes: int, weight: Float) -> Float:
    """Return the weight sum of each class, (n_codes,); an empty `weight` means unit weights."""
    # `codes`, (v, n), holds the classes of v variables, numbered over all variables.
    weights = np.zeros(n_codes + 1)  # entry 0 is for missing labels, code -1
    for column in codes:
        weights += np.bincount(column + 1, weight if len(weight) else None, n_codes + 1)
    return weights[1:]
