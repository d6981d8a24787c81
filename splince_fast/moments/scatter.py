"""Sum of w (x - m)(x - m)^T about the weighted mean m, or its diagonal: blocks are added.

Also the fourth moment that Ledoit-Wolf shrinkage needs, sum w |x - mean|^4, streamed and merged.
With u = x - r for the reference point r of the state, s = |u|^2 and e = mean - r::

    |x - mean|^4 = (s - 2 u.e + |e|^2)^2

so that sum w s^2 and sum w s u, beside the scatter, are enough: O(d) more state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast.moments.block import rows_of

Float = NDArray[np.float64]

EPS64 = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)

# Fewer elements per thread cost more in starting it than they save.
_GRAIN = 1 << 20
# A merge allocates nothing once it has begun.
_NO_PRODUCT = np.empty((0, 0), order="F")


@dataclass(slots=True)
class Scatter:
    """sum w (x - m)(x - m)^T.

    Attributes
    ----------
    matrix : ndarray of shape (d, d)
        Fortran-ordered; only the lower triangle is meaningful.
    unit_roundoff : float
        Of the least precise products that went into it.
    """

    matrix: Float
    unit_roundoff: float = EPS64

    @classmethod
    def empty(cls, width: int) -> Scatter:
        """Zeros; a MemoryError says how much they take."""
        try:
            return cls(np.zeros((width, width), order="F"))
        except MemoryError as error:
            raise MemoryError(
                f"the covariance of {width} features takes {8 * width * width / 2**30:.1f} GiB, "
                "which could not be allocated; pass sketch_size=64 to the moments, which keep 64 "
                "numbers per feature in its place, and refine= to the method, or use fewer "
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
        """Multiply every weight by a factor."""
        self.matrix *= factor

    def diagonal(self) -> Float:
        """(d,) sums of squares, as a view that can be written to."""
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
        """Add shifted^T shifted + sum_k coefficients[k] vectors[k] vectors[k]^T.

        `product` is (d, d) float32 scratch, needed for float32 blocks alone.
        """
        import splince_fast._kernels.blas as blas_kernels

        if shifted.dtype == np.float32:
            if product is None:
                raise RuntimeError("float32 blocks need a buffer for their product")
            blas_kernels.syrk_f32_out(shifted, product)
            self.add(product, 1.0, vectors, coefficients)
        else:
            blas_kernels.syrk_f64_into(shifted, self.matrix)
            self.add(_NO_PRODUCT, 1.0, vectors, coefficients)

    def merge(self, other: Scatter, sign: int, gap: Float, coefficient: float) -> None:
        """Add sign (other + coefficient gap gap^T), the merge of a part or its removal."""
        vectors = np.stack([gap, np.zeros(self.width)])
        self.add(other.matrix, float(sign), vectors, np.array([sign * coefficient, 0.0]))
        self.unit_roundoff = max(self.unit_roundoff, other.unit_roundoff)

    def add(self, product: NDArray[Any], sign: float, vectors: Float, coefficients: Float) -> None:
        """Add sign product + sum_k coefficients[k] vectors[k] vectors[k]^T.

        `product` is (at least d, d), float32 or float64 and Fortran-ordered; its lower triangle
        counts.
        """
        if product.dtype == np.float32:
            self.unit_roundoff = EPS32

        matrix, d = self.matrix, len(self.matrix)
        if d * d < 2 * _GRAIN:  # a single thread
            row_kernels.add_lower(matrix, product, sign, vectors, coefficients, 0, (d + 1) // 2)
            return

        def work(first: int, last: int) -> None:
            row_kernels.add_lower(matrix, product, sign, vectors, coefficients, first, last)

        threads.split(work, (d + 1) // 2, grain=max(1, _GRAIN // d))

    def clear(self, features: NDArray[np.intp]) -> None:
        """Make features constant: their rows and columns become exactly 0."""
        self.matrix[features, :] = 0.0
        self.matrix[:, features] = 0.0

    def reset(self) -> None:
        """Remove all rows."""
        self.matrix[...] = 0.0
        self.unit_roundoff = EPS64

    def full(self) -> Float:
        """The matrix with both triangles meaningful; no copy."""
        import splince_fast._kernels.blas as blas_kernels

        blas_kernels.mirror_lower(self.matrix)
        return self.matrix

    def packed(self) -> Float:
        """(d (d + 1) / 2,) the lower triangle, column by column: half the bytes."""
        out = np.empty(self.width * (self.width + 1) // 2)
        for part, column in _columns(out, self.matrix):
            part[...] = column
        return out

    @classmethod
    def unpacked(cls, packed: Float, width: int, unit_roundoff: float) -> Scatter:
        """The inverse of `packed`."""
        scatter = cls.empty(width)
        scatter.unit_roundoff = unit_roundoff
        for part, column in _columns(packed, scatter.matrix):
            column[...] = part
        return scatter


def _columns(packed: Float, matrix: Float) -> Iterator[tuple[Float, Float]]:
    """Views of each column of the lower triangle: in the packed array and in the matrix."""
    start = 0
    for j in range(len(matrix)):
        column = matrix[j:, j]
        yield packed[start : start + len(column)], column
        start += len(column)


class Diagonal(Scatter):
    """The diagonal of a scatter alone, (d,) in place of `matrix`: O(d) state."""

    @classmethod
    def empty(cls, width: int) -> Diagonal:
        return cls(np.zeros(width))

    def copy(self) -> Diagonal:
        return Diagonal(self.matrix.copy(), self.unit_roundoff)

    def diagonal(self) -> Float:
        return self.matrix

    def merge(self, other: Scatter, sign: int, gap: Float, coefficient: float) -> None:
        self.matrix += sign * (other.diagonal() + coefficient * gap * gap)

    def clear(self, features: NDArray[np.intp]) -> None:
        self.matrix[features] = 0.0


_CHUNK = 1 << 18


@dataclass(slots=True)
class FourthMoment:
    """sum w |u|^4 and sum w |u|^2 u, of u = x - reference."""

    quartic: float
    cubic: Float  # (d,)

    @classmethod
    def empty(cls, width: int) -> FourthMoment:
        return cls(0.0, np.zeros(width))

    def copy(self) -> FourthMoment:
        return FourthMoment(self.quartic, self.cubic.copy())

    def scaled(self, factor: float) -> FourthMoment:
        """The same sums with every weight times a factor."""
        return FourthMoment(factor * self.quartic, factor * self.cubic)

    def add_rows(
        self, rows: NDArray[Any], weight: Float | None, reference: Float,
        index: NDArray[np.intp] | None = None,
    ) -> None:  # fmt: skip
        """Add a block of rows; `weight` is None for unit weights, and `index` for all rows."""
        step = max(1, _CHUNK // rows.shape[1])
        for start in range(0, len(rows) if index is None else len(index), step):
            deviations = rows_of(rows, index, start, start + step) - reference
            squares = np.einsum("ij,ij->i", deviations, deviations)
            weighted = squares if weight is None else weight[start : start + step] * squares
            self.quartic += float(weighted @ squares)
            self.cubic += weighted @ deviations

    def moved(self, step: Float, weight: float, deviation: Float, scatter: Float) -> FourthMoment:
        """The same sums about the reference point r - step.

        Parameters
        ----------
        deviation, scatter : (d,), (d, d)
            sum w u, and the lower triangle of the scatter about the mean, of the same rows.
        """
        along = _second_moment_times(scatter, deviation, weight, step)
        square = float(step @ step)
        total = float(np.einsum("ii->", scatter)) + float(deviation @ deviation) / weight
        drift = float(deviation @ step)
        quartic = (
            self.quartic
            + 4 * float(step @ along)
            + weight * square**2
            + 4 * float(self.cubic @ step)
            + 2 * square * total
            + 4 * square * drift
        )
        cubic = (
            self.cubic
            + 2 * along
            + square * deviation
            + (total + 2 * drift + weight * square) * step
        )
        return FourthMoment(quartic, cubic)

    def centred(self, weight: float, deviation: Float, scatter: Float) -> float:
        """sum w |x - mean|^4."""
        mean = deviation / weight
        return max(0.0, self.moved(-mean, weight, deviation, scatter).quartic)


def _second_moment_times(scatter: Float, deviation: Float, weight: float, v: Float) -> Float:
    """(sum w u u^T) v, from the lower triangle of the scatter about the mean."""
    import scipy.linalg.blas

    product = scipy.linalg.blas.dsymv(1.0, scatter, v, lower=1)
    return np.asarray(product + deviation * (float(deviation @ v) / weight))
