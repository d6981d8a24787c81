"""Moments without a d x d matrix: variances and r products of the scatter; dense or sparse rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import NO_WEIGHT, Rows, is_sparse
from splince_fast._runtime.sparse import SparseRows, parts, subtracted
from splince_fast.exceptions import InputError
from splince_fast.labels import Encoded, VariableName
from splince_fast.moments.accumulator import Accumulator, Batch, sweep_of
from splince_fast.moments.block import rows_of
from splince_fast.moments.buffer import LabelledRows
from splince_fast.moments.sketch import Sketch, add_images, add_outer, times
from splince_fast.moments.state import State, head_mean
from splince_fast.moments.swept import Sweep, SweptAccumulator, class_weights

Float = NDArray[np.float64]

# Sparse rows that are reduced at a time: merging a block costs O(d (r + k)).
_SPARSE_ROWS = 1 << 14
# Rows whose mean is the point that a block of dense rows is summed about: rows are wide here.
_HEAD = 16
# Columns of sparse rows are summed about 0 while their mean is at most so many deviations from it.
_FAR = 16.0


class SketchAccumulator(SweptAccumulator):
    """An accumulator whose state is variances and a sketch, O(d (r + k)) numbers."""

    @property
    def sketch_size(self) -> int:
        """Columns r of the sketch."""
        return cast(int, self.parameters.sketch_size)

    def check_width(self, width: int) -> None:
        """Raise InputError where the sketch has more columns than the rows."""
        if self.sketch_size > width:
            raise InputError(
                f"sketch_size is {self.sketch_size}, and the rows have {width} features; pass "
                f"sketch_size=0 to sketch_size={width}, or leave it out: {width} x {width} "
                "numbers are fewer"
            )

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
        """Add rows; sparse ones at once, dense ones by full blocks.

        Raises
        ------
        NonFiniteError, InputError, LabelError
            Before anything changes.
        """
        self.check_width(rows.width)
        if not isinstance(rows, SparseRows):
            super().update(rows, weight, encoded, in_order=in_order, checked=checked, index=index)
            return
        if not checked:
            rows.check()
        if index is not None:
            rows = rows.taken(index)
        batch = self._prepare(LabelledRows(rows.array, weight), encoded)
        step = self.parameters.block_rows or _SPARSE_ROWS
        for start in range(0, len(rows), step):
            self._merge(batch, batch.block.slice(start, min(len(rows), start + step)))

    def room(self, rows: Rows) -> int:
        """Sparse rows are taken as they come."""
        return max(1, len(rows)) if isinstance(rows, SparseRows) else super().room(rows)

    def _empty_state(self, width: int) -> State:
        sketch = Sketch.of(width, self.sketch_size, self.parameters.random_state)
        return State(np.zeros(width), 0, 0.0, np.zeros(width), sketch, None)

    def _merge(self, batch: Batch, block: LabelledRows) -> None:
        """Sum a block and its products with the signs, and add both."""
        state, n = batch.state, len(block)
        rows = block.rows if block.index is None else rows_of(block.rows, block.index, 0, n)
        weight = None if block.weight is None else np.ascontiguousarray(block.weight)
        like = cast(Sketch, state.second)
        asked = [batch.variables[name].ask(labels, weight) for name, labels in block.labels.items()]
        codes, n_sums, values = sweep_of(asked, n)
        reduce = _reduce_sparse if is_sparse(rows) else _reduce_dense
        own, sums = reduce(rows, weight, like, codes, n_sums, values)
        self._add_sums(batch, block, asked, own, sums, self._meet(state, own))
        if len(block.labels) > 1:
            self.pairs.add(block.labels, batch.variables, weight, within=False)


def _reduce_dense(
    rows: NDArray[Any],
    weight: Float | None,
    like: Sketch,
    codes: NDArray[np.intp],
    n_sums: int,
    values: Float,
) -> tuple[State, tuple[Float, Float, Float, Float]]:
    """The state of a block of dense rows about a point near its mean, and its other sums."""
    shift = head_mean(rows[:_HEAD], None if weight is None else weight[:_HEAD])
    sweep = Sweep(rows, weight, shift, codes, n_sums, values)
    sweep.run(np.zeros(len(shift)))
    sweep.check()
    sketch = Sketch.of_block(like, sweep.variances)
    add_images(rows, weight, shift, like.signs, sketch.images)
    residual = sweep.total / sweep.whole
    add_outer(sketch.images, -sweep.whole, residual, times(residual[None], like.signs)[0])
    own = State(shift, len(rows), sweep.whole, sweep.total.copy(), sketch, None)
    return own, sweep.sums


def _reduce_sparse(
    rows: Any,
    weight: Float | None,
    like: Sketch,
    codes: NDArray[np.intp],
    n_sums: int,
    values: Float,
) -> tuple[State, tuple[Float, Float, Float, Float]]:
    """The same of sparse rows, of which only what is stored is read.

    About 0, but for columns far from it: they are summed about a point near their mean. A column
    whose mean is more than 16 deviations from 0 has fewer than one implicit zero in 257 rows.
    """
    import splince_fast._kernels.sparse as kernels

    n, d = rows.shape
    given = NO_WEIGHT if weight is None else weight
    whole = float(n) if weight is None else float(weight.sum())

    def swept(rows: Any) -> tuple[Float, Float, Float, Float]:
        csr = parts(rows)
        total, squares = np.zeros(d), np.empty(d)
        class_sums, products = np.zeros((n_sums, d)), np.zeros((len(values), d))
        kernels.sum_rows(*csr, given, codes, values, total, class_sums, products)
        kernels.sum_squares(*csr, given, total / whole, whole, squares)
        return total, np.maximum(squares, 0.0, out=squares), class_sums, products

    shift = np.zeros(d)
    total, squares, class_sums, products = swept(rows)
    far = far_from_zero(total / whole, squares / whole)
    if len(far):
        head = rows[:_HEAD][:, far].toarray()
        shift[far] = head_mean(head, None if weight is None else weight[:_HEAD])
        rows = subtracted(rows, shift)
        total, squares, class_sums, products = swept(rows)
    mean = total / whole
    sketch = Sketch.of_block(like, squares)
    left = add_images(rows, weight, mean, like.signs, sketch.images)
    add_outer(sketch.images, -1.0, mean, left)  # about the mean, not about the shift
    own = State(shift, n, whole, total, sketch, None)
    weights = class_weights(codes, n_sums, given)
    return own, (class_sums, weights, products, values.sum(axis=1))


def far_from_zero(mean: Float, variances: Float) -> NDArray[np.intp]:
    """Columns whose sums about 0 lose digits: their mean is many deviations away from it."""
    return np.flatnonzero(np.abs(mean) > _FAR * np.sqrt(variances))


def sketch_of(accumulator: Accumulator) -> Sketch | None:
    """The sketch of the rows that an accumulator saw; None where it keeps none."""
    second = None if accumulator.state is None else accumulator.state.second
    return second if isinstance(second, Sketch) else None
