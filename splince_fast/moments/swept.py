"""States of O(d) or O(d r) numbers: a block is summed where it lies, about a point of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import threads
from splince_fast._runtime.arrays import ALL_ROWS, NO_WEIGHT, check_values
from splince_fast.labels import VariableName
from splince_fast.moments.accumulator import Accumulator, Batch
from splince_fast.moments.block import MATRIX_PRODUCT_FROM, add_products, part_rows, rows_of
from splince_fast.moments.buffer import LabelledRows
from splince_fast.moments.state import State
from splince_fast.moments.variable import Request, Variable

Float = NDArray[np.float64]

# Elements of a block below which a second thread costs more than it saves.
_GRAIN = 1 << 19


class SweptAccumulator(Accumulator):
    """An accumulator whose blocks are reduced without a copy, and without a d x d product."""

    def _reserve(self, width: int, dtype: np.dtype[Any]) -> int:
        """Rows of a block; it is reduced where it lies, so that no memory is needed."""
        threads.thread_count()  # so that a wrong setting is told at once
        return self.parameters.capacity(width, dtype.itemsize)

    def _meet(self, state: State, own: State) -> tuple[Float, dict[VariableName, Variable]]:
        """Where the sums of a state and of a block meet, and the variables that have to move."""
        reference = state.reference_with(own)
        return reference, {} if reference is state.reference else self._moved(state, reference)

    def _add_sums(
        self,
        batch: Batch,
        block: LabelledRows,
        asked: list[Request],
        own: State,
        sums: tuple[Float, Float, Float, Float],
        met: tuple[Float, dict[VariableName, Variable]],
    ) -> None:
        """Add the state `own` of a block, and its sums for the variables, to what was seen.

        `sums` are those per class, the weights of the classes, the products with columns, and the
        sums of these columns; all about the reference point of `own`.
        """
        reference, moved = met
        class_sums, class_weights, products, value_sums = sums
        offset = own.reference - reference
        class_sums += class_weights[:, None] * offset
        products += np.outer(value_sums, offset)
        batch.state.add(own, reference)
        self._commit(batch, block, moved, asked, class_sums, products)


class Sweep:
    """The sums of one block about `shift`, see `sweep_block`; `run` may be called again."""

    def __init__(
        self,
        rows: NDArray[Any],
        weight: Float | None,
        shift: Float,
        codes: NDArray[np.intp],
        n_codes: int,
        values: Float,
        index: NDArray[np.intp] | None = None,
    ) -> None:
        import splince_fast._kernels.accumulate as kernels
        from splince_fast._kernels.sampled import STRIPE

        n, d = len(rows) if index is None else len(index), rows.shape[1]
        self._rows, self._shift, self._codes = rows, shift, codes
        self._index = ALL_ROWS if index is None else index
        self._weight = NO_WEIGHT if weight is None else weight
        self._order, self._cell = np.empty(n, np.intp), np.empty(n, np.intp)
        kernels.sort_by_cell(codes, n_codes, part_rows(d, rows.itemsize), self._order, self._cell)
        self.total, self.squares = np.empty(d), np.empty(d)
        self.class_sums, self.products = np.empty((n_codes, d)), np.empty((len(values), d))
        self.leverage = np.empty((-(-d // STRIPE), n))
        self.whole = float(n) if weight is None else float(weight.sum())
        self._given, self._values, self._swept = values, values, self.products
        if len(values) >= MATRIX_PRODUCT_FROM:
            add_products(rows, values, shift, np.zeros(d), self.products, index)
            self._values, self._swept = values[:0], self.products[:0]

    def run(self, inverse: Float) -> None:
        """Fill total, squares, class_sums, products and leverage."""
        import splince_fast._kernels.sampled as kernels

        def work(first: int, last: int) -> None:
            kernels.sweep_block(
                self._rows, self._index, self._weight, self._shift, inverse, self._codes,
                self._order, self._cell, self._values, first, last, self.total, self.squares,
                self.class_sums, self._swept, self.leverage,
            )  # fmt: skip

        n, d = len(self._order), len(self._shift)
        threads.split(work, d, grain=max(kernels.STRIPE, _GRAIN // n), align=kernels.STRIPE)

    def check(self) -> None:
        """Raise what :func:`check_values` says of the rows, where their squares do not sum."""
        with np.errstate(invalid="ignore", over="ignore"):
            usable = bool(np.isfinite(self.squares.sum()))
        if not usable:
            index = self._index if len(self._index) else None
            check_values(rows_of(self._rows, index, 0, len(self._order)))

    @property
    def variances(self) -> Float:
        """(d,): the sums of squares about the block's own mean."""
        return np.maximum(0.0, self.squares - self.total**2 / self.whole)

    @property
    def sums(self) -> tuple[Float, Float, Float, Float]:
        """What `SweptAccumulator._add_sums` takes."""
        weights = class_weights(self._codes, len(self.class_sums), self._weight)
        return self.class_sums, weights, self.products, self._given.sum(axis=1)


def class_weights(codes: NDArray[np.intp], n_codes: int, weight: Float) -> Float:
    """Weight of the rows in each class sum; `weight` is empty for unit weights."""
    weights = np.zeros(n_codes)
    share = weight if len(weight) else None
    for column in codes:
        # Rows without a label are counted first, and left out.
        weights += np.bincount(column + 1, share, minlength=n_codes + 1)[1:]
    return weights
