"""Moments of x: weight sum, number of rows, mean and scatter.

The scatter is sum w (x - m)(x - m)^T about the weighted mean m, or the diagonal of this matrix.
For full precision, sums of x are sums of deviations from a point near the mean: those of a block
from its shift, and those of a state from its reference. An offset is the shift of a block, or the
reference of another state, minus the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._kernels.row_kernels import Assignment, Call, Change, ScatterAddition
from splince_fast._runtime.files import Layout, Tensors, check_tensors
from splince_fast.exceptions import IncompatibleMomentsError
from splince_fast.moments.block import Block, BlockSums

Float = NDArray[np.float64]

EPS64 = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)

# The reference point r moves to the mean if, in some feature, their distance exceeds both _FAR
# standard deviations and _ROUNDINGS |r|. The second bound is for constant features: it exceeds the
# rounding error of their mean.
_FAR, _ROUNDINGS = 16.0, 1024 * EPS64
# If a removal leaves less than this fraction of a sum of squares, precision is lost:
# `State.rounding_bound` then has the rounding error of the sum before the removal.
_CANCELLED = 0.25


def not_added(problem: str) -> IncompatibleMomentsError:
    return IncompatibleMomentsError(f"{problem}; subtract only moments that were added")


class FactorInput(NamedTuple):
    """A covariance to factor, `scatter` / `weight`."""

    scatter: Float  # (d, d): Fortran-ordered, only the lower triangle is valid; or its diagonal
    weight: float
    n_rows: int  # number of rows, which limits the rank
    n_effective: float  # weight sum of the rows, or effective number of sampled rows
    unit_roundoff: float
    sample: Any = None  # `SampleStatistics`, if the covariance was estimated from a sample

    def times(self, rows: Float) -> Float:
        """Return the product of the covariance with each row of `rows`, (r, d)."""
        import scipy.linalg.blas

        product = scipy.linalg.blas.dsymm(1.0 / self.weight, self.scatter, rows.T, lower=1)
        return np.asarray(product.T)


@dataclass(slots=True, eq=False)
class Scatter:
    """The scatter sum w (x - m)(x - m)^T about the mean m."""

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
                "which could not be allocated; pass covariance_type='diag' to the moments "
                "(variances instead of the covariance) and refine= to the method, or use fewer "
                "features (a random projection or the first principal components)"
            ) from error

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def copy(self) -> Self:
        return replace(self, matrix=self.matrix.copy(order="K"))

    def scale(self, factor: float) -> None:
        self.matrix *= factor

    def diagonal(self) -> Float:
        """Return the sums of squares, (d,), as a writable view."""
        diagonal = self.matrix.diagonal()
        diagonal.setflags(write=True)
        return diagonal

    def added(
        self, sums: BlockSums, difference: Float, coefficient: float, block: Block
    ) -> list[Change]:
        """Return the changes that add a block: its scatter, and coefficient g g^T."""
        # g is `difference`, the difference of the means of the block and the state.
        import splince_fast._kernels.blas as blas_kernels

        changes: list[Change] = []
        if sums.product is None:
            changes.append(Call(blas_kernels.syrk_f64_into, sums.shifted, self.matrix))
        elif sums.product.dtype == np.float32:
            changes.append(Assignment(self, {"unit_roundoff": EPS32}))
        vectors = np.empty((2, len(difference)))
        vectors[0], vectors[1] = difference, sums.total / sums.weight_sum
        coefficients = np.array([coefficient, -sums.weight_sum])
        return [*changes, ScatterAddition(self.matrix, sums.product, 1.0, vectors, coefficients)]

    def merged(self, other: Any, sign: int, difference: Float, coefficient: float) -> list[Change]:
        """Return the changes that add sign (S + coefficient g g^T), with S the scatter `other`."""
        vectors = np.stack([difference, np.zeros(len(difference))])
        coefficients = np.array([sign * coefficient, 0.0])
        return [
            ScatterAddition(self.matrix, other.matrix, float(sign), vectors, coefficients),
            Assignment(self, {"unit_roundoff": max(self.unit_roundoff, other.unit_roundoff)}),
        ]

    def make_constant(self, features: NDArray[np.intp]) -> None:
        """Make features constant: set their rows and columns to exactly 0."""
        self.matrix[features] = 0.0
        self.matrix.T[features] = 0.0

    def factor_input(self, state: State, names: tuple[str, ...] | None) -> FactorInput:
        """Return Cov(x), or an estimate of it; no rows may be buffered."""
        return FactorInput(
            self.matrix, state.weight, state.n_rows, state.weight, self.unit_roundoff
        )

    def tensors(self, packed: bool) -> Tensors:
        """Return the tensors of a file or, with `packed`, the lower triangle for a pickle."""
        if not packed:
            import splince_fast._kernels.blas as blas_kernels

            blas_kernels.mirror_lower(self.matrix)
            return {"scatter": self.matrix.T}
        return {"scatter.lower": self.matrix.T[_lower_triangle(len(self.matrix))]}

    def read(self, tensors: Tensors, width: int) -> None:
        if "scatter.lower" in tensors:
            layout: Layout = {"scatter.lower": (np.float64, (width * (width + 1) // 2,))}
            (lower,) = check_tensors(tensors, layout)
            self.matrix = Scatter.empty(width).matrix
            self.matrix.T[_lower_triangle(width)] = lower
        else:
            (scatter,) = check_tensors(tensors, {"scatter": (np.float64, (width, width))})
            self.matrix = np.asfortranarray(scatter.T)


def _lower_triangle(width: int) -> NDArray[np.bool_]:
    """Return whether an entry of the transpose of a matrix is in the matrix's lower triangle."""
    return ~np.tri(width, k=-1, dtype=bool)


@dataclass(slots=True, eq=False)
class State:
    """Moments of x, as sums of the deviations x - reference from the reference point."""

    # Only the scatter changes in place.

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
    # (d,): bound of the rounding error of each sum of squares; 0.0 unless a removal of rows lost
    # precision, for example because their mean is far from the mean of the other rows.
    rounding_bound: Float | float = 0.0
    row_eps: float = 0.0  # largest machine epsilon of the rows' dtypes; 0 for float64 and integers

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
    def nbytes(self) -> int:
        return self.second.nbytes + self.reference.nbytes + self.deviation.nbytes

    def copy(self) -> State:
        return replace(self, second=self.second.copy())

    def scale(self, factor: float) -> None:
        self.weight *= factor
        self.deviation = factor * self.deviation
        self.rounding_bound = factor * self.rounding_bound
        self.second.scale(factor)

    def reference_with(self, point: Float, mean: Float, squares: Float, weight: float) -> Float:
        """Return the reference point for the sum of the state and of rows summed about `point`."""
        # It is that of the state, unless the mean of all rows is far from it: sums about a point at
        # c standard deviations from the mean lose a factor c of precision. `squares` are the sums
        # of squares about the mean of the rows; NaN keeps the reference point.
        if not weight:
            return self.reference
        if not self.weight:
            return point
        if not row_kernels.reference_is_far(
            self.reference, self.deviation, self.weight, self.second.diagonal(), mean, squares,
            weight, _FAR, _ROUNDINGS,
        ):  # fmt: skip
            return self.reference
        deviation = self.deviation + weight * (mean - self.reference)
        return np.asarray(self.reference + deviation / (self.weight + weight))

    def _joined(
        self, n_rows: int, weight: float, point: Float, total: Float, reference: Float
    ) -> tuple[Float, float, dict[str, Any]]:
        """Return the difference g of means, the factor of g g^T, and the sums with added rows."""
        # `total` is the sum of the added rows about `point`; `reference` becomes the reference.
        # For parts a and b with scatters S_a and S_b, weight sums w_a and w_b, and w = w_a + w_b,
        # the scatter is S = S_a + S_b + (w_a w_b / w) g g^T, g = mean_b - mean_a (Chan, Golub and
        # LeVeque 1983).
        deviation, ours = total + weight * (point - reference), self.deviation
        difference, coefficient = np.zeros(len(total)), 0.0
        if reference is not self.reference:
            ours = self.deviation + self.weight * (self.reference - reference)
        if self.weight:
            difference = deviation / weight - ours / self.weight
            coefficient = self.weight * weight / (self.weight + weight)
        sums = {
            "reference": reference, "deviation": ours + deviation, "n_rows": self.n_rows + n_rows,
            "weight": self.weight + weight,
        }  # fmt: skip
        return difference, coefficient, sums

    def added(self, sums: BlockSums, reference: Float, block: Block) -> list[Change]:
        difference, coefficient, new = self._joined(
            sums.n_rows, sums.weight_sum, sums.shift, sums.total, reference
        )
        return [*self.second.added(sums, difference, coefficient, block), Assignment(self, new)]

    def merged(self, other: State, reference: Float) -> list[Change]:
        if not other.weight:
            return []
        difference, coefficient, new = self._joined(
            other.n_rows, other.weight, other.reference, other.deviation, reference
        )
        new["rounding_bound"] = self.rounding_bound + other.rounding_bound
        new["row_eps"] = max(self.row_eps, other.row_eps)
        changes = self.second.merged(other.second, 1, difference, coefficient)
        return [*changes, Assignment(self, new)]

    def remove(self, part: State) -> tuple[NDArray[np.intp], Float]:
        """Subtract the moments of fewer rows, in place: the inverse of a merge."""
        # Return features, (c,), and the rounding error of the mean, (d,). The remaining variance of
        # these features is within the rounding error of their variance before the removal: the
        # caller makes them constant unless their mean differs between labels. After an error the
        # state is invalid.
        if part.n_rows > self.n_rows or part.weight >= self.weight:
            raise not_added(
                f"cannot remove {part.n_rows} rows of weight {part.weight:g} from {self.n_rows} "
                f"rows of weight {self.weight:g}"
            )
        squares = self.second.diagonal().copy()
        squares_bound, constant_bound, mean_bound = self._rounding_of_removal(part)
        had_bound = np.ndim(self.rounding_bound + part.rounding_bound) > 0
        deviation = part.deviation + part.weight * (part.reference - self.reference)
        self.n_rows -= part.n_rows
        self.weight -= part.weight
        self.deviation = self.deviation - deviation
        difference = deviation / part.weight - self.deviation / self.weight
        coefficient = self.weight * part.weight / (self.weight + part.weight)
        row_kernels.add(self.second.merged(part.second, -1, difference, coefficient))
        diagonal = self.second.diagonal()
        if (diagonal < -squares_bound).any():
            raise not_added("cannot remove these moments: a variance would become negative")
        # If most of a sum cancels, its rounding error remains that of the sum before the removal.
        cancelled = bool((diagonal < _CANCELLED * squares).any())
        self.rounding_bound = squares_bound if had_bound or cancelled else 0.0
        constant = np.flatnonzero(diagonal <= constant_bound)
        np.maximum(diagonal, 0.0, out=diagonal)
        return constant, mean_bound

    def check_same_rows(self, part: State) -> None:
        """Raise IncompatibleMomentsError unless a part with all rows has the same moments."""
        # Weights, means and variances are compared within their rounding errors.
        same = self.weight == part.weight
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
        if not same:
            raise not_added(
                f"cannot remove {part.n_rows} rows, the number of all rows: their weight, means or "
                "variances differ from those of the rows that were added"
            )

    def _rounding_of_removal(self, part: State) -> tuple[Float, Float, Float]:
        """Return three bounds of rounding errors for `remove`, (d,) each."""
        # They bound the errors of a sum of squares, of that of a constant feature, and of the mean.
        # The weights of both states must be positive.
        # `mean_term` is large if the mean of the rows is far from 0.
        squares = self.second.diagonal()
        abs_mean = np.abs(self.reference) + np.abs(self.deviation / self.weight)
        mean_term = self.weight * (64 * EPS64 * abs_mean) ** 2
        roundoff = max(self.second.unit_roundoff, part.second.unit_roundoff)
        steps = 512 + 8 * self.n_rows**0.5
        # If the part was added, its errors are among those of the sum.
        lost = np.maximum(self.rounding_bound, part.rounding_bound)
        squares_bound = roundoff * steps * squares + mean_term + lost
        constant_bound = EPS64 * steps * squares + mean_term + lost
        if roundoff > EPS64:
            constant_bound += 64 * EPS32 * squares
        mean_bound = EPS64 * steps * np.sqrt(squares / self.weight) + 64 * EPS64 * abs_mean
        return squares_bound, constant_bound, mean_bound + np.sqrt(lost / self.weight)
