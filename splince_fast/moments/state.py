"""Moments of x: weight sum, number of rows, mean and scatter.

The scatter is sum w (x - m)(x - m)^T about the weighted mean m, or the diagonal of this matrix.
For full precision, sums of x are sums of deviations u = x - r from a reference point r near the
mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast._runtime.files import Layout, Tensors
from splince_fast._runtime.rows import check_values
from splince_fast.exceptions import IncompatibleMomentsError
from splince_fast.moments.block import BlockSample, Reduced, rows_of

Float = NDArray[np.float64]

EPS64 = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)

# Least number of elements per thread: for fewer, the start of a thread costs more than it saves.
_GRAIN = 1 << 20
# Value of the argument `product` of `Scatter.add` if BLAS has already added the product to the
# scatter. The value is a constant because the merge of a block must not allocate memory.
_NO_PRODUCT = np.empty((0, 0), order="F")
# The first reference point is the mean of at most this many rows at the start of the first block.
_HEAD = 256
# The reference point r moves to the mean if, in some feature, their distance exceeds both _FAR
# standard deviations and _ROUNDINGS |r|. The second bound is for constant features: it exceeds the
# rounding error of their mean.
_FAR, _ROUNDINGS = 16.0, 1024 * EPS64
# The sum of the squares of d numbers of at most this magnitude is finite for every practical d.
_LARGEST_VALUE = 1e140
# If a removal leaves less than this fraction of a sum of squares, precision is lost:
# `State.rounding_bound` then has the rounding error of the sum before the removal.
_CANCELLED = 0.25


@dataclass(slots=True)
class Scatter:
    """The scatter sum w (x - m)(x - m)^T about the mean m."""

    # Tensors of a file, and of a pickle, which has only the lower triangle by columns.
    TENSORS: ClassVar[Layout] = {"scatter": (np.float64, ("d", "d"))}
    PACKED_TENSORS: ClassVar[Layout] = {"scatter.lower": (np.float64, ("d(d+1)/2",))}

    matrix: Float  # (d, d): Fortran-ordered; only the lower triangle is valid
    unit_roundoff: float = EPS64  # unit roundoff of the least precise products in the sum

    @classmethod
    def empty(cls, width: int) -> Scatter:
        """Return a scatter of zeros; a MemoryError states how much memory a scatter takes."""
        try:
            return cls(np.zeros((width, width), order="F"))
        except MemoryError as error:
            raise MemoryError(
                f"the covariance of {width} features takes {8 * width * width / 2**30:.1f} GiB, "
                "which could not be allocated; pass sketch_size=64 to the moments (64 numbers per "
                "feature instead of the covariance) and refine= to the method, or use fewer "
                "features (a random projection or the first principal components)"
            ) from error

    @property
    def width(self) -> int:
        return len(self.matrix)

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def copy(self) -> Scatter:
        return Scatter(self.matrix.copy(order="F"), self.unit_roundoff)

    def scale(self, factor: float) -> None:
        self.matrix *= factor

    def diagonal(self) -> Float:
        """Return the sums of squares, (d,), as a writable view."""
        diagonal = self.matrix.diagonal()
        diagonal.setflags(write=True)
        return diagonal

    def add_block(
        self,
        shifted: NDArray[Any],
        product: NDArray[np.float32] | None,
        vectors: Float,
        coefficients: Float,
    ) -> None:
        """Add shifted^T shifted + sum_k coefficients[k] vectors[k] vectors[k]^T."""
        # `product` is (d, d) float32 work memory for float32 blocks; None for float64 blocks.
        import splince_fast._kernels.blas as blas_kernels

        if shifted.dtype == np.float32:
            if product is None:
                raise RuntimeError("float32 blocks need work memory for the product")
            blas_kernels.syrk_f32_out(shifted, product)
            self.add(product, 1.0, vectors, coefficients)
        else:
            blas_kernels.syrk_f64_into(shifted, self.matrix)
            self.add(_NO_PRODUCT, 1.0, vectors, coefficients)

    def merge(self, other: Scatter, sign: int, difference: Float, coefficient: float) -> None:
        """Merge (sign 1) or remove (sign -1) a part: add sign (S + coefficient g g^T)."""
        # S is the scatter `other` of the part, and g is `difference`, the difference of the means.
        vectors = np.stack([difference, np.zeros(len(difference))])
        self.add(other.matrix, float(sign), vectors, np.array([sign * coefficient, 0.0]))
        self.unit_roundoff = max(self.unit_roundoff, other.unit_roundoff)

    def add(self, product: NDArray[Any], sign: float, vectors: Float, coefficients: Float) -> None:
        """Add sign product + sum_k coefficients[k] vectors[k] vectors[k]^T."""
        # `product` is (m, m) with m >= d, or `_NO_PRODUCT`; float32 or float64, Fortran-ordered;
        # only its lower triangle is read.
        if product.dtype == np.float32:
            self.unit_roundoff = EPS32

        matrix, d = self.matrix, len(self.matrix)
        if d * d < 2 * _GRAIN:  # too few elements for two threads
            row_kernels.add_lower(matrix, product, sign, vectors, coefficients, 0, (d + 1) // 2)
            return

        def work(first: int, last: int) -> None:
            row_kernels.add_lower(matrix, product, sign, vectors, coefficients, first, last)

        threads.split(work, (d + 1) // 2, grain=max(1, _GRAIN // d))

    def make_constant(self, features: NDArray[np.intp]) -> None:
        """Make features constant: set their rows and columns to exactly 0."""
        self.matrix[features, :] = 0.0
        self.matrix[:, features] = 0.0

    def reset(self) -> None:
        self.matrix[...] = 0.0
        self.unit_roundoff = EPS64

    def full(self) -> Float:
        """Return the matrix with both triangles valid, without a copy."""
        import splince_fast._kernels.blas as blas_kernels

        blas_kernels.mirror_lower(self.matrix)
        return self.matrix

    def tensors(self, packed: bool) -> Tensors:
        """Return the tensors of a file or, with `packed`, of a pickle."""
        if not packed:
            return {"scatter": self.full().T}
        lower = np.empty(self.width * (self.width + 1) // 2)
        for part, column in _columns(lower, self.matrix):
            part[...] = column
        return {"scatter.lower": lower}

    @classmethod
    def unpacked(cls, packed: Float, width: int) -> Scatter:
        """Return a scatter with the lower triangle `packed`, column by column."""
        scatter = cls.empty(width)
        for part, column in _columns(packed, scatter.matrix):
            column[...] = part
        return scatter


def _columns(packed: Float, matrix: Float) -> Iterator[tuple[Float, Float]]:
    """Yield two views of each column of the lower triangle, in the packed array and the matrix."""
    start = 0
    for j in range(len(matrix)):
        column = matrix[j:, j]
        yield packed[start : start + len(column)], column
        start += len(column)


class Diagonal(Scatter):
    """The diagonal of a scatter only; `matrix` has shape (d,)."""

    TENSORS: ClassVar[Layout] = {"variances": (np.float64, ("d",))}

    @classmethod
    def empty(cls, width: int) -> Diagonal:
        return cls(np.zeros(width))

    def copy(self) -> Diagonal:
        return Diagonal(self.matrix.copy(), self.unit_roundoff)

    def diagonal(self) -> Float:
        return self.matrix

    def tensors(self, packed: bool) -> Tensors:
        return {"variances": self.matrix}

    def merge(self, other: Scatter, sign: int, difference: Float, coefficient: float) -> None:
        self.matrix += sign * (other.diagonal() + coefficient * difference * difference)

    def make_constant(self, features: NDArray[np.intp]) -> None:
        self.matrix[features] = 0.0


@dataclass(slots=True)
class State:
    """Moments of x, as sums of the deviations x - reference from the reference point."""

    # Tensors of a file; `Scatter.tensors` are those of the second moments.
    TENSORS: ClassVar[Layout] = {
        "reference": (np.float64, ("d",)),
        "weight": (np.float64, (1,), 0),
        "deviation": (np.float64, ("d",)),
    }

    reference: Float  # (d,)
    n_rows: int
    weight: float
    deviation: Float  # (d,): sum w (x - reference)
    second: Scatter  # sum w (x - mean)(x - mean)^T
    # (d,): bound of the rounding error of each sum of squares; None unless a removal of rows lost
    # precision, for example because their mean is far from the mean of the other rows.
    rounding_bound: Float | None = None
    row_eps: float = 0.0  # largest machine epsilon of the rows' dtypes; 0 for float64 and integers

    @classmethod
    def empty_diagonal(cls, width: int) -> State:
        """Return a state without rows that keeps only the diagonal of the scatter."""
        return cls(np.zeros(width), 0, 0.0, np.zeros(width), Diagonal.empty(width))

    @classmethod
    def empty(cls, width: int) -> State:
        return cls(np.zeros(width), 0, 0.0, np.zeros(width), Scatter.empty(width))

    @property
    def width(self) -> int:
        return len(self.reference)

    @property
    def mean(self) -> Float:
        return np.asarray(self.reference + self.deviation / self.weight)

    @property
    def mean_deviation(self) -> Float:
        """(d,): mean minus reference point; 0 without rows."""
        return np.asarray(self.deviation / self.weight if self.weight else self.deviation)

    @property
    def scatter(self) -> Float:
        """The scatter, (d, d) Fortran-ordered; only the lower triangle is valid."""
        return self.second.matrix

    @property
    def unit_roundoff(self) -> float:
        """Unit roundoff of the least precise products in the scatter."""
        return self.second.unit_roundoff

    @property
    def nbytes(self) -> int:
        return self.second.nbytes + self.reference.nbytes + self.deviation.nbytes

    def copy(self) -> State:
        return State(
            self.reference.copy(),
            self.n_rows,
            self.weight,
            self.deviation.copy(),
            self.second.copy(),
            None if self.rounding_bound is None else self.rounding_bound.copy(),
            self.row_eps,
        )

    def scale(self, factor: float) -> None:
        self.weight *= factor
        self.deviation *= factor
        self.second.scale(factor)
        if self.rounding_bound is not None:
            self.rounding_bound *= factor

    # -- the reference point ---------------------------------------------------------------

    def reference_for(
        self, rows: NDArray[np.generic], weight: Float | None, sample: BlockSample,
        index: NDArray[np.intp] | None = None,
    ) -> Float:  # fmt: skip
        """Return the reference point for the sum of the state and a block."""
        # For the first block, the reference point is the weighted mean of its first rows. For later
        # blocks, the state keeps its reference point unless the mean after the block is far from
        # this point: then that mean is the new reference point. Sums about a point at c standard
        # deviations from the mean lose a factor c of precision.
        if self.weight == 0.0:
            return head_mean(rows, weight, index)
        if not self._mean_would_be_far(
            sample.shift, sample.squares, sample.weight, sample.block_weight
        ):
            return self.reference
        block = sample.block_weight * (sample.shift - self.reference)
        mean_deviation = (self.deviation + block) / (self.weight + sample.block_weight)
        return np.asarray(self.reference + mean_deviation)

    def reference_with(self, other: State) -> Float:
        """Return the reference point for the sum of two states, by the rule of `reference_for`."""
        if not other.weight:
            return self.reference
        if not self.weight:
            return other.reference.copy()
        weight = other.weight
        if not self._mean_would_be_far(other.mean, other.second.diagonal(), weight, weight):
            return self.reference
        offset = other.reference - self.reference
        deviation = self.deviation + other.deviation + weight * offset
        return np.asarray(self.reference + deviation / (self.weight + weight))

    def _mean_would_be_far(
        self, mean: Float, squares: Float, sampled: float, weight: float
    ) -> bool:
        """Return whether the mean is far from the reference point after an addition of rows."""
        # `weight` is the weight sum of the added rows. A sample of the added rows has the weight
        # sum `sampled`, the mean `mean`, and the sums of squares `squares` about this mean.
        return row_kernels.reference_is_far(
            self.reference, self.deviation, self.weight, self.second.diagonal(), mean, squares,
            sampled, weight, _FAR, _ROUNDINGS,
        )  # fmt: skip

    def _deviation_about(self, reference: Float) -> Float:
        """Return sum w (x - reference)."""
        if reference is self.reference:
            return self.deviation
        return np.asarray(self.deviation + self.weight * (self.reference - reference))

    # -- adding and removing ---------------------------------------------------------------

    def merge_block(
        self, reference: Float, block: Reduced, product: NDArray[np.float32] | None
    ) -> None:
        """Add a block with sums about `reference`, which becomes the reference point."""
        same = reference is self.reference
        deviation = self.deviation if same else self._deviation_about(reference)
        vectors, coefficients = np.zeros((2, len(deviation))), np.array([0.0, -block.weight])
        if self.weight:
            np.subtract(block.deviation / block.weight, deviation / self.weight, out=vectors[0])
            coefficients[0] = self.weight * block.weight / (self.weight + block.weight)
        vectors[1] = block.residual
        block.deviation += deviation
        if block.product is not None:
            self.second.add(block.product, 1.0, vectors, coefficients)
        elif block.shifted is not None:
            self.second.add_block(block.shifted, product, vectors, coefficients)
        self.reference, self.deviation = reference, block.deviation
        self.n_rows += block.n_rows
        self.weight += block.weight

    def _mean_difference(
        self, weight: float, mean: Float, deviation: Float | None = None
    ) -> tuple[Float, float]:
        """Return the difference g of the means of a part and the state, and the factor of g g^T."""
        if self.weight == 0.0 or weight == 0.0:
            return np.zeros(self.width), 0.0
        mean_of_state = (self.deviation if deviation is None else deviation) / self.weight
        return mean - mean_of_state, self.weight * weight / (self.weight + weight)

    def add(self, other: State, reference: Float) -> None:
        """Add the moments of other rows, in place; `reference` becomes the reference point."""
        # For parts a and b with scatters S_a and S_b, weight sums w_a and w_b, and w = w_a + w_b,
        # the scatter is S = S_a + S_b + (w_a w_b / w) g g^T, g = mean_b - mean_a (Chan, Golub and
        # LeVeque 1983).
        if not other.weight:
            return
        deviation = self._deviation_about(reference)
        offset = other.reference - reference
        added = other.deviation + other.weight * offset
        difference, coefficient = self._mean_difference(
            other.weight, added / other.weight, deviation
        )
        total = deviation + added
        self.second.merge(other.second, 1, difference, coefficient)
        self.reference, self.deviation = reference, total
        self.rounding_bound = _sum_of(self.rounding_bound, other.rounding_bound)
        self.row_eps = max(self.row_eps, other.row_eps)
        self.n_rows += other.n_rows
        self.weight += other.weight

    def remove(self, part: State) -> tuple[NDArray[np.intp], Float]:
        """Subtract the moments of a part of the rows, in place: the inverse of `add`."""
        # constant, (c,): features whose remaining variance does not exceed the rounding error of
        # the variance before the removal. The caller makes them constant unless their mean differs
        # between labels. rounding, (d,): rounding error of the mean of each feature. After an error
        # the state is invalid.
        none_constant = np.empty(0, np.intp), np.empty(0)
        if part.n_rows > self.n_rows:
            raise IncompatibleMomentsError(
                f"cannot remove {part.n_rows} rows from {self.n_rows} rows; subtract only moments "
                "that were added"
            )
        if part.n_rows == self.n_rows:
            self._check_same_rows(part)
            self.n_rows, self.weight = 0, 0.0
            self.deviation[...] = 0.0
            self.second.reset()
            self.rounding_bound = None
            return none_constant
        if part.weight >= self.weight:
            raise IncompatibleMomentsError(
                f"cannot remove {part.n_rows} rows of weight {part.weight:g} from {self.n_rows} "
                f"rows of weight {self.weight:g}; subtract only moments that were added"
            )
        if not part.weight:
            return none_constant
        squares = self.second.diagonal().copy()
        squares_bound, constant_bound, mean_bound = self._rounding_of_removal(part)
        had_bound = self.rounding_bound is not None or part.rounding_bound is not None
        offset = part.reference - self.reference
        deviation = part.deviation + part.weight * offset
        self.n_rows -= part.n_rows
        self.weight -= part.weight
        self.deviation -= deviation
        difference, coefficient = self._mean_difference(part.weight, deviation / part.weight)
        self.second.merge(part.second, -1, difference, coefficient)
        diagonal = self.second.diagonal()
        if (diagonal < -squares_bound).any():
            raise IncompatibleMomentsError(
                "cannot remove these moments: a variance would become negative; subtract only "
                "moments that were added"
            )
        # If most of a sum cancels, its rounding error remains that of the sum before the removal.
        # A bound computed from the remaining sum would be too small.
        cancelled = bool((diagonal < _CANCELLED * squares).any())
        self.rounding_bound = squares_bound if had_bound or cancelled else None
        constant = np.flatnonzero(diagonal <= constant_bound)
        np.maximum(diagonal, 0.0, out=diagonal)
        return constant, mean_bound

    def _check_same_rows(self, part: State) -> None:
        """Raise IncompatibleMomentsError unless a part with all rows has the same moments."""
        # Weights, means and variances are compared within their rounding errors.
        if self.weight and part.weight:
            squares_bound, _, mean_bound = self._rounding_of_removal(part)
            means = part.reference - self.reference
            means += part.deviation / part.weight - self.deviation / self.weight
            squares = self.second.diagonal() - part.second.diagonal()
            rounding = EPS64 * (512 + 8 * self.n_rows**0.5) * self.weight
            same = bool(
                abs(self.weight - part.weight) <= rounding
                and (np.abs(means) <= mean_bound).all()
                and (np.abs(squares) <= squares_bound).all()
            )
        else:
            same = self.weight == part.weight
        if not same:
            raise IncompatibleMomentsError(
                f"cannot remove {part.n_rows} rows, the number of all rows: their weight, means or "
                "variances differ from those of the rows that were added; subtract only moments "
                "that were added"
            )

    def _rounding_of_removal(self, part: State) -> tuple[Float, Float, Float]:
        """Return three bounds of rounding errors for `remove`, (d,) each."""
        # They bound the errors of a sum of squares (at the larger unit roundoff of the two states),
        # of the sum of squares of a constant feature, and of the mean. The weights of both states
        # must be positive.
        # A bound of the rounding error of a sum of squares has two terms: a fraction of the sum,
        # and `mean_term`, which is large if the mean of the rows is far from 0.
        squares = self.second.diagonal()
        abs_mean = np.abs(self.reference) + np.abs(self.deviation / self.weight)
        mean_term = self.weight * (64 * EPS64 * abs_mean) ** 2
        roundoff = max(self.unit_roundoff, part.unit_roundoff)
        steps = 512 + 8 * self.n_rows**0.5
        squares_bound = roundoff * steps * squares + mean_term
        constant_bound = EPS64 * steps * squares + mean_term
        if roundoff > EPS64:
            constant_bound += 64 * EPS32 * squares
        mean_bound = EPS64 * steps * np.sqrt(squares / self.weight) + 64 * EPS64 * abs_mean
        rounding_bound = _sum_of(self.rounding_bound, part.rounding_bound)
        if rounding_bound is not None:
            squares_bound += rounding_bound
            constant_bound += rounding_bound
            mean_bound += np.sqrt(rounding_bound / self.weight)
        return squares_bound, constant_bound, mean_bound


def _sum_of(a: Float | None, b: Float | None) -> Float | None:
    """Return a + b, where None counts as 0; None if both are None."""
    if a is None or b is None:
        return b if a is None else a
    return np.asarray(a + b)


def head_mean(
    rows: NDArray[np.generic], weight: Float | None, index: NDArray[np.intp] | None = None
) -> Float:
    """Return the weighted mean of the first rows of a block; raise an error for invalid values."""
    head = rows_of(rows, index, 0, _HEAD).astype(np.float64, order="C")
    # The check precedes the subtraction: inf - inf would raise a warning, and the differences of
    # values that are too large may be small.
    if not (head.max() <= _LARGEST_VALUE and head.min() >= -_LARGEST_VALUE):
        check_values(rows if index is None else rows[index])
    # Average the deviations from the first row, so that the mean of a constant column is exact.
    first = head[0].copy()
    head -= first
    mean = head.mean(axis=0) if weight is None else weight[:_HEAD] @ head / (
        weight[:_HEAD].sum()
    )  # fmt: skip
    return np.asarray(first + mean)
