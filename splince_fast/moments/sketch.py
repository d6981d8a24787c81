"""Sketch of a scatter that is too large to keep: its diagonal, and its products with r signs.

With O a fixed (d, r) matrix of random signs and S the scatter about the mean, the state is diag(S)
and Y = S O: linear in the data, so that states are added, subtracted and weighted. From it

    U U^T = Y (O^T Y)^+ Y^T <= S,    D = diag(S) - diag(U U^T) >= 0

(Nystroem approximation), and D + U U^T is the metric of an eraser: positive definite, with the
exact variances. See :mod:`splince_fast._solve.low_rank`. Rows may be dense or sparse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import NO_WEIGHT, Rows, is_sparse
from splince_fast._runtime.hashing import splitmix64
from splince_fast._runtime.sparse import SparseRows, parts, subtracted
from splince_fast.exceptions import InputError
from splince_fast.labels import Encoded, VariableName
from splince_fast.moments.accumulator import Batch, joined_requests
from splince_fast.moments.block import rows_of
from splince_fast.moments.block_sums import BlockSums, DiagonalAccumulator, class_weights
from splince_fast.moments.buffer import LabelledRows
from splince_fast.moments.state import Diagonal, Scatter, State, head_mean

Float = NDArray[np.float64]
Signs = NDArray[np.int8]

# Numbers that are centred per step.
_PIECE = 1 << 20
# Rows of (d, r) matrices per step.
_STRIPE = 1 << 12


@lru_cache(maxsize=2)
def signs(width: int, rank: int, seed: int) -> Signs:
    """(width, rank) of -1 and 1: bits of hashes of `seed`, the feature and the column.

    The array is shared, and read-only.
    """
    words = -(-rank // 64)
    key = splitmix64(splitmix64(np.array([seed], np.uint64)))[0]
    numbers = splitmix64(np.arange(width * words, dtype=np.uint64) + key)
    octets = numbers.astype("<u8").view(np.uint8).reshape(width, 8 * words)
    drawn = np.unpackbits(octets, axis=1, count=rank).view(np.int8)
    drawn *= 2
    drawn -= 1
    drawn.flags.writeable = False
    return drawn


def times(rows: Float, vectors: NDArray[np.generic]) -> Float:
    """rows @ vectors, (k, d) times (d, m), where `vectors` may hold signs: by stripes of d."""
    out = np.zeros((len(rows), vectors.shape[1]))
    if out.size:
        for start in range(0, len(vectors), _STRIPE):
            part = slice(start, start + _STRIPE)
            out += rows[:, part] @ vectors[part].astype(np.float64, copy=False)
    return out


def add_outer(out: Float, sign: float, column: Float, row: Float) -> None:
    """out += sign column row^T, by stripes."""
    if out.size:
        for start in range(0, len(out), _STRIPE):
            part = slice(start, start + _STRIPE)
            out[part] += np.outer(sign * column[part], row)


def add_images(
    rows: Any, weight: Float | None, shift: Float, vectors: NDArray[Any], out: Float
) -> Float:
    """Add sum w (x - s)(x - c)^T V, V = `vectors`, over dense or sparse rows in float64.

    For dense rows s = c = `shift`. For sparse ones c is `shift` and s = 0: the caller takes away
    s t^T, with t the sum that is returned.

    Parameters
    ----------
    rows : (n, d) array, or CSR matrix
    weight : (n,) float64 or None
    shift : (d,) float64
    vectors : (d, m) int8 or float64
    out : (d, m) float64

    Returns
    -------
    (m,) float64
        sum w V^T (x - c).
    """
    m = vectors.shape[1]
    if not m:
        return np.zeros(0)
    if is_sparse(rows):
        import splince_fast._kernels.sparse as kernels

        total = np.zeros(m)
        row_weights = np.empty(0) if weight is None else weight
        centre = times(shift[None], vectors)[0]
        kernels.add_images(*parts(rows), row_weights, vectors, centre, np.empty(m), total, out)
        return total
    n, d = rows.shape
    step = max(64, _PIECE // n)
    coordinates = np.zeros((n, m))
    centred = np.empty((n, min(step, d)))
    for start in range(0, d, step):
        part = slice(start, min(d, start + step))
        piece = centred[:, : part.stop - start]
        np.subtract(rows[:, part], shift[part], out=piece)
        coordinates += piece @ vectors[part].astype(np.float64, copy=False)
    if weight is not None:
        coordinates *= weight[:, None]
    for start in range(0, d, step):
        part = slice(start, min(d, start + step))
        piece = centred[:, : part.stop - start]
        if step < d:
            np.subtract(rows[:, part], shift[part], out=piece)
        out[part] += piece.T @ coordinates
    return np.asarray(coordinates.sum(axis=0))


@dataclass(slots=True)
class Sketch(Diagonal):
    """Sketch of a scatter S: diag(S), (d,), in `matrix`, and Y = S O.

    Attributes
    ----------
    images : ndarray of shape (d, r)
        Y.
    signs : ndarray of int8, shape (d, r)
        O; shared.
    """

    images: Float = None  # type: ignore[assignment]
    signs: Signs = None  # type: ignore[assignment]

    @classmethod
    def of(cls, width: int, rank: int, seed: int) -> Sketch:
        """The sketch of no rows."""
        own = signs(width, rank, seed)
        return cls(np.zeros(width), images=np.zeros((width, rank)), signs=own)

    @classmethod
    def of_block(cls, like: Sketch, squares: Float) -> Sketch:
        """The sketch of a block with these sums of squares; its images are added later."""
        return cls(squares, images=np.zeros(like.images.shape), signs=like.signs)

    @property
    def rank(self) -> int:
        return int(self.images.shape[1])

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + self.images.nbytes + self.signs.nbytes

    def copy(self) -> Sketch:
        return Sketch(
            self.matrix.copy(), self.unit_roundoff, images=self.images.copy(), signs=self.signs
        )

    def merge(self, other: Scatter, sign: int, gap: Float, coefficient: float) -> None:
        assert isinstance(other, Sketch)
        self.matrix += sign * (other.matrix + coefficient * gap * gap)
        (np.add if sign > 0 else np.subtract)(self.images, other.images, out=self.images)
        if coefficient:
            add_outer(self.images, sign * coefficient, gap, times(gap[None], self.signs)[0])

    def clear(self, features: NDArray[np.intp]) -> None:
        self.matrix[features] = 0.0
        self.images[features] = 0.0

    def reset(self) -> None:
        self.matrix[...] = 0.0
        self.images[...] = 0.0


# Sparse rows per block: merging a block costs O(d (r + k)).
_SPARSE_ROWS = 1 << 14
# Rows of a dense block whose mean is its shift.
_HEAD = 16
# Largest mean, in deviations, for which columns of sparse rows are summed about 0.
_FAR = 16.0


class SketchAccumulator(DiagonalAccumulator):
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
        merge_all: bool = False,
    ) -> None:
        """Add rows; sparse ones at once, dense ones by full blocks.

        Raises
        ------
        NonFiniteError, InputError, LabelError
            Before anything changes.
        """
        self.check_width(rows.width)
        if not isinstance(rows, SparseRows):
            super().update(
                rows, weight, encoded, in_order=in_order, checked=checked, index=index,
                merge_all=merge_all,
            )  # fmt: skip
            return
        if not checked:
            rows.check()
        if index is not None:
            rows = rows.select(index)
        batch = self._prepare(LabelledRows(rows.array, weight), encoded)
        step = self.parameters.block_rows or _SPARSE_ROWS
        for start in range(0, len(rows), step):
            self._merge(batch, batch.block.slice(start, min(len(rows), start + step)))

    def n_missing(self, rows: Rows) -> int:
        """Number of rows that complete a block; sparse rows are not buffered."""
        return max(1, len(rows)) if isinstance(rows, SparseRows) else super().n_missing(rows)

    def _empty_state(self, width: int) -> State:
        sketch = Sketch.of(width, self.sketch_size, self.parameters.random_state)
        return State(np.zeros(width), 0, 0.0, np.zeros(width), sketch, None)

    def _merge(self, batch: Batch, block: LabelledRows) -> None:
        """Sum a block and its products with the signs, then merge both into the state."""
        state, n = batch.state, len(block)
        rows = block.rows if block.index is None else rows_of(block.rows, block.index, 0, n)
        weight = None if block.weight is None else np.ascontiguousarray(block.weight)
        like = cast(Sketch, state.second)
        asked = [batch.variables[name].ask(labels, weight) for name, labels in block.labels.items()]
        codes, n_sums, values = joined_requests(asked, n)
        reduce = _reduce_sparse if is_sparse(rows) else _reduce_dense
        own, sums = reduce(rows, weight, like, codes, n_sums, values)
        self._add_sums(batch, block, asked, own, sums, self._common_reference(state, own))
        if len(block.labels) > 1:
            self.pairs.add(block.labels, batch.variables, weight, within=False)


def _reduce_dense(
    rows: NDArray[np.generic],
    weight: Float | None,
    like: Sketch,
    codes: NDArray[np.intp],
    n_sums: int,
    values: Float,
) -> tuple[State, tuple[Float, Float, Float, Float]]:
    """State and sums of a block of dense rows, about a point near its mean."""
    shift = head_mean(rows[:_HEAD], None if weight is None else weight[:_HEAD])
    block_sums = BlockSums(rows, weight, shift, codes, n_sums, values)
    block_sums.compute(np.zeros(len(shift)))
    block_sums.check()
    sketch = Sketch.of_block(like, block_sums.variances)
    add_images(rows, weight, shift, like.signs, sketch.images)
    residual = block_sums.total / block_sums.weight_sum
    add_outer(sketch.images, -block_sums.weight_sum, residual, times(residual[None], like.signs)[0])
    own = State(shift, len(rows), block_sums.weight_sum, block_sums.total.copy(), sketch, None)
    return own, block_sums.sums


def _reduce_sparse(
    rows: Any,
    weight: Float | None,
    like: Sketch,
    codes: NDArray[np.intp],
    n_sums: int,
    values: Float,
) -> tuple[State, tuple[Float, Float, Float, Float]]:
    """State and sums of a block of sparse rows; only stored entries are read.

    About 0, but for columns far from it: they are summed about a point near their mean. A column
    whose mean is more than 16 deviations from 0 has fewer than one implicit zero in 257 rows.
    """
    import splince_fast._kernels.sparse as kernels

    n, d = rows.shape
    row_weights = NO_WEIGHT if weight is None else weight
    weight_sum = float(n) if weight is None else float(weight.sum())

    def summed(rows: object) -> tuple[Float, Float, Float, Float]:
        csr = parts(rows)
        total, squares = np.zeros(d), np.empty(d)
        class_sums, products = np.zeros((n_sums, d)), np.zeros((len(values), d))
        kernels.sum_rows(*csr, row_weights, codes, values, total, class_sums, products)
        kernels.sum_squares(*csr, row_weights, total / weight_sum, weight_sum, squares)
        return total, np.maximum(squares, 0.0, out=squares), class_sums, products

    shift = np.zeros(d)
    total, squares, class_sums, products = summed(rows)
    far = far_from_zero(total / weight_sum, squares / weight_sum)
    if len(far):
        head = rows[:_HEAD][:, far].toarray()
        shift[far] = head_mean(head, None if weight is None else weight[:_HEAD])
        rows = subtracted(rows, shift)
        total, squares, class_sums, products = summed(rows)
    mean = total / weight_sum
    sketch = Sketch.of_block(like, squares)
    left = add_images(rows, weight, mean, like.signs, sketch.images)
    add_outer(sketch.images, -1.0, mean, left)  # about the mean, not about the shift
    own = State(shift, n, weight_sum, total, sketch, None)
    weights = class_weights(codes, n_sums, row_weights)
    return own, (class_sums, weights, products, values.sum(axis=1))


def far_from_zero(mean: Float, variances: Float) -> NDArray[np.intp]:
    """Columns whose sums about 0 lose digits, as their mean is many deviations from 0."""
    return np.flatnonzero(np.abs(mean) > _FAR * np.sqrt(variances))
