"""Sketch of a d x d scatter: its diagonal, and its product with a matrix of random signs.

With O a fixed (d, r) matrix of random signs and S the scatter about the mean, the state is diag(S)
and the sketch Y = S O. Both are linear in S, so that states can be added, subtracted and weighted.
Cov(x) is approximated by D + U U^T, divided by the weight sum (Nystroem approximation):

    U U^T = Y (O^T Y)^+ Y^T <= S,    D = diag(S) - diag(U U^T) >= 0

The approximation is positive definite and has the exact variances; see
:mod:`splince_fast._solve.low_rank`. Rows may be dense or sparse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.files import Layout, Tensors
from splince_fast._runtime.hashing import splitmix64
from splince_fast._runtime.rows import NO_WEIGHT, Rows, is_sparse
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

# Number of elements of the rows that `add_images` centres at once.
_PIECE = 1 << 20
# Number of rows of a (d, r) matrix that are processed at once.
_STRIPE = 1 << 12


@lru_cache(maxsize=2)
def signs(width: int, sketch_size: int, random_state: int) -> Signs:
    """Return the matrix O of random signs -1 and 1, (width, sketch_size)."""
    # The signs are bits of hashes. The array is cached, and read-only.
    words = -(-sketch_size // 64)
    key = splitmix64(splitmix64(np.array([random_state], np.uint64)))[0]
    numbers = splitmix64(np.arange(width * words, dtype=np.uint64) + key)
    octets = numbers.astype("<u8").view(np.uint8).reshape(width, 8 * words)
    drawn = np.unpackbits(octets, axis=1, count=sketch_size).view(np.int8)
    drawn *= 2
    drawn -= 1
    drawn.flags.writeable = False
    return drawn


def times(rows: Float, vectors: NDArray[np.generic]) -> Float:
    """Return rows @ vectors, (k, m), for float64 or int8 `vectors`, in stripes of features."""
    out = np.zeros((len(rows), vectors.shape[1]))
    if out.size:
        for start in range(0, len(vectors), _STRIPE):
            part = slice(start, start + _STRIPE)
            out += rows[:, part] @ vectors[part].astype(np.float64, copy=False)
    return out


def add_outer(out: Float, sign: float, column: Float, row: Float) -> None:
    """Add sign column row^T to `out`, in place, in stripes of rows."""
    if out.size:
        for start in range(0, len(out), _STRIPE):
            part = slice(start, start + _STRIPE)
            out[part] += np.outer(sign * column[part], row)


def add_images(
    rows: Any, weight: Float | None, shift: Float, vectors: NDArray[Any], out: Float
) -> Float:
    """Add sum w (x - c)(x - c)^T V to `out`, with c the shift."""
    # For sparse rows only sum w x (x - c)^T V is added: the caller subtracts c t^T, with the
    # returned t = sum w V^T (x - c), (m,).
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
    """Sketch of a scatter S; the inherited `matrix` holds only the diagonal of S, (d,)."""

    TENSORS: ClassVar[Layout] = {**Diagonal.TENSORS, "images": (np.float64, ("d", "r"))}

    # (d, r): Y = S O
    images: Float = None  # type: ignore[assignment]
    # (d, r): random signs O, shared by all sketches of these parameters
    signs: Signs = None  # type: ignore[assignment]

    @classmethod
    def zeros(cls, width: int, sketch_size: int, random_state: int) -> Sketch:
        """Return the sketch of a scatter of zeros."""
        images = np.zeros((width, sketch_size))
        return cls(np.zeros(width), images=images, signs=signs(width, sketch_size, random_state))

    @classmethod
    def of_block(cls, prototype: Sketch, squares: Float) -> Sketch:
        """Return a sketch with the diagonal `squares`, images 0, and the signs of `prototype`."""
        return cls(squares, images=np.zeros(prototype.images.shape), signs=prototype.signs)

    @property
    def sketch_size(self) -> int:
        return int(self.images.shape[1])

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + self.images.nbytes + self.signs.nbytes

    def copy(self) -> Sketch:
        return Sketch(
            self.matrix.copy(), self.unit_roundoff, images=self.images.copy(), signs=self.signs
        )

    def tensors(self, packed: bool) -> Tensors:
        return {"variances": self.matrix, "images": self.images}

    def merge(self, other: Scatter, sign: int, difference: Float, coefficient: float) -> None:
        assert isinstance(other, Sketch)
        self.matrix += sign * (other.matrix + coefficient * difference * difference)
        (np.add if sign > 0 else np.subtract)(self.images, other.images, out=self.images)
        if coefficient:
            add_outer(
                self.images, sign * coefficient, difference, times(difference[None], self.signs)[0]
            )

    def make_constant(self, features: NDArray[np.intp]) -> None:
        self.matrix[features] = 0.0
        self.images[features] = 0.0

    def reset(self) -> None:
        self.matrix[...] = 0.0
        self.images[...] = 0.0


# Sparse rows per block. Blocks are larger than for dense rows, since the merge of a block takes
# O(d (r + k)) operations even if the block has few stored entries.
_SPARSE_ROWS = 1 << 14
# The shift is the mean of this many rows at the start of a block.
_HEAD = 16
# A column of sparse rows is summed about 0 unless |mean| exceeds this many standard deviations.
_FAR = 16.0


class SketchAccumulator(DiagonalAccumulator):
    """An accumulator of variances and a sketch: O(d (r + k)) numbers for k label columns."""

    @property
    def sketch_size(self) -> int:
        return cast(int, self.parameters.sketch_size)

    def check_width(self, width: int) -> None:
        """Raise InputError if the sketch has more columns than the rows have features."""
        if self.sketch_size > width:
            raise InputError(
                f"sketch_size is {self.sketch_size}, and the rows have only {width} features; pass "
                f"a number from 0 to {width}, or omit sketch_size=: a {width} x {width} covariance "
                "is smaller than the sketch"
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
        """Add rows; sparse rows are merged into the sums at once, without a buffer."""
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

    def n_to_full_block(self, rows: Rows) -> int:
        """Return the number of rows that complete a block; all of them if the rows are sparse."""
        return max(1, len(rows)) if isinstance(rows, SparseRows) else super().n_to_full_block(rows)

    def _empty_state(self, width: int) -> State:
        sketch = Sketch.zeros(width, self.sketch_size, self.parameters.random_state)
        return State(np.zeros(width), 0, 0.0, np.zeros(width), sketch)

    def _merge(self, batch: Batch, block: LabelledRows) -> None:
        """Compute the sums and the sketch of a block, and add both to the state."""
        state, n = batch.state, len(block)
        rows = block.rows if block.index is None else rows_of(block.rows, block.index, 0, n)
        weight = None if block.weight is None else np.ascontiguousarray(block.weight)
        prototype = cast(Sketch, state.second)
        requests = [batch.variables[name].request(z, weight) for name, z in block.labels.items()]
        codes, n_sums, values = joined_requests(requests, n)
        reduce = _reduce_sparse if is_sparse(rows) else _reduce_dense
        block_state, sums = reduce(rows, weight, prototype, codes, n_sums, values)
        common = self._common_reference(state, block_state)
        self._add_sums(batch, block, requests, block_state, sums, common)
        if len(block.labels) > 1:
            self.label_products.add(block.labels, batch.variables, weight, within=False)


def _reduce_dense(
    rows: NDArray[np.generic],
    weight: Float | None,
    prototype: Sketch,
    codes: NDArray[np.intp],
    n_sums: int,
    values: Float,
) -> tuple[State, tuple[Float, Float, Float, Float]]:
    """Return the state of a block of dense rows, and the sums for its variables."""
    # All sums are about a shift near the mean.
    shift = head_mean(rows[:_HEAD], None if weight is None else weight[:_HEAD])
    block_sums = BlockSums(rows, weight, shift, codes, n_sums, values)
    block_sums.compute(np.zeros(len(shift)))
    block_sums.check()
    sketch = Sketch.of_block(prototype, block_sums.centred_squares)
    add_images(rows, weight, shift, prototype.signs, sketch.images)
    residual = block_sums.total / block_sums.weight_sum
    add_outer(
        sketch.images, -block_sums.weight_sum, residual, times(residual[None], prototype.signs)[0]
    )
    total = block_sums.total.copy()
    state = State(shift, len(rows), block_sums.weight_sum, total, sketch)
    return state, block_sums.sums


def _reduce_sparse(
    rows: Any,
    weight: Float | None,
    prototype: Sketch,
    codes: NDArray[np.intp],
    n_sums: int,
    values: Float,
) -> tuple[State, tuple[Float, Float, Float, Float]]:
    """Return the state of a block of sparse rows, and the sums for its variables."""
    # Only stored entries are read. Columns are summed about 0, except columns whose mean is more
    # than 16 standard deviations from 0. These are summed about a shift near the mean, which makes
    # them dense, but adds few entries: such a column has less than one implicit zero in 257 rows.
    import splince_fast._kernels.sparse as kernels

    n, d = rows.shape
    row_weights = NO_WEIGHT if weight is None else weight
    weight_sum = float(n) if weight is None else float(weight.sum())

    def column_sums(rows: object) -> tuple[Float, Float, Float, Float]:
        csr = parts(rows)
        total, squares = np.zeros(d), np.empty(d)
        class_sums, products = np.zeros((n_sums, d)), np.zeros((len(values), d))
        kernels.sum_rows(*csr, row_weights, codes, values, total, class_sums, products)
        kernels.sum_squares(*csr, row_weights, total / weight_sum, weight_sum, squares)
        return total, np.maximum(squares, 0.0, out=squares), class_sums, products

    shift = np.zeros(d)
    total, squares, class_sums, products = column_sums(rows)
    far = far_from_zero(total / weight_sum, squares / weight_sum)
    if len(far):
        head = rows[:_HEAD][:, far].toarray()
        shift[far] = head_mean(head, None if weight is None else weight[:_HEAD])
        rows = subtracted(rows, shift)
        total, squares, class_sums, products = column_sums(rows)
    mean = total / weight_sum
    sketch = Sketch.of_block(prototype, squares)
    projected_sum = add_images(rows, weight, mean, prototype.signs, sketch.images)
    add_outer(sketch.images, -1.0, mean, projected_sum)  # sum w (x - mean)(x - mean)^T O
    state = State(shift, n, weight_sum, total, sketch)
    weights = class_weights(codes, n_sums, row_weights)
    return state, (class_sums, weights, products, values.sum(axis=1))


def far_from_zero(mean: Float, variances: Float) -> NDArray[np.intp]:
    """Return the columns whose mean is more than 16 standard deviations from 0."""
    return np.flatnonzero(np.abs(mean) > _FAR * np.sqrt(variances))
