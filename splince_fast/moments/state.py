"""The state of x: weight, rows, mean and scatter, and how a block of rows is merged into it.

A block is first reduced to its own moments in work buffers (`reduce_block`), which can fail
without a trace; `State.merge_block` then adds them, which cannot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import threads
from splince_fast._runtime.arrays import check_values
from splince_fast.exceptions import IncompatibleMomentsError
from splince_fast.moments.fourth_moment import FourthMoment

Float = NDArray[np.float64]

EPS64 = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)

# Elements of a block below which a second thread costs more than it saves.
_GRAIN = 1 << 20
# A part of a block fits in a processor's second-level cache.
_PART_BYTES = 1 << 20
# Least deviation, and greatest root of a sum of squares, that float32 holds to full precision.
_FLOAT32_RANGE = (1e-15, 1e18)
# Below this no row's sum of squares can reach what `check_values` refuses.
_LARGEST_SQUARES = 1e297
# A shift may leave this multiple of a column's own sum of squares in its uncentred one.
_EXCESS = 4.0
# Angles by which pairs of rows are turned: multiples of the golden one never come close together.
_ANGLES = np.arange(256) * (np.pi * (3.0 - 5.0**0.5))
_TURNS = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
# Made once: a merge must not need memory when it has begun.
_NO_PRODUCT = np.empty((0, 0), order="F")


@dataclass(slots=True)
class Reduced:
    """The moments of one block; sums are of deviations from the reference."""

    n_rows: int
    weight: float
    deviation: Float  # (d,)
    residual: Float  # (d,): the block's mean less the shift that `shifted` is about
    shifted: NDArray[Any]  # (m, d): shifted^T shifted - weight residual residual^T is the scatter
    class_sums: Float  # (c, d)
    products: Float  # (q, d)


def reduce_block(
    rows: NDArray[Any],
    weight: Float,
    reference: Float,
    codes: NDArray[np.intp],
    n_codes: int,
    values: Float,
    buffer: NDArray[Any],
) -> Reduced:
    """Reduce a block in one sweep over memory, columns split over threads.

    Rows are shifted by the mean of a sample of 4 sqrt(n) of them. Let V be a lower bound of the
    block's sum of squares about its own mean: the sample's about the sample's mean, or what the
    row furthest from the shift contributes alone. With r what the block's mean turns out to differ
    from the shift, W r^2 <= 4 V bounds the digits that subtracting W r r^T can cost: the uncentred
    sum of squares is at most five times the centred one. Where that fails, which for normal rows
    in random order takes a deviation of eight standard errors, a second sweep uses the exact mean.

    Where float32 products would overflow or underflow, the block is reduced in float64.

    Parameters
    ----------
    rows : (n, d) float32 or float64, C-contiguous, n >= 1; values may be unchecked
    weight : (n,) float64 > 0, or empty for unit weights
    reference : (d,) float64
    codes : (v, n) intp into n_codes rows of class sums, -1 for none
    values : (q, n) float64
    buffer : (at least n rounded up to a multiple of 4, d), dtype of rows, overwritten

    Raises
    ------
    NonFiniteError, InputError
        As `check_values`.
    """
    from splince_fast._kernels import accumulate

    n, d = rows.shape
    out = buffer[: buffer_rows(n)]
    if len(out) != buffer_rows(n):
        raise RuntimeError("the work buffer has no room for the block")
    order, cell = np.empty(n, np.intp), np.empty(n, np.intp)
    part_rows = _rows_per_part(d, rows.dtype)
    accumulate.sort_by_cell(codes, n_codes, part_rows, order, cell)
    shift, spread = np.empty(d), np.empty(d)
    peak, total = np.empty(d), np.empty(d)
    class_sums, products = np.empty((n_codes, d)), np.empty((len(values), d))

    def sweep() -> Float:
        """Reduce about `shift`, which stands `offset` from the reference."""
        offset = shift - reference

        def work(first: int, last: int) -> None:
            accumulate.centre_block(
                rows, weight, shift, offset, codes, order, cell, values, _TURNS, part_rows,
                first, last, out, peak, total, class_sums, products,
            )  # fmt: skip

        threads.split(work, d, grain=max(16, _GRAIN // n), align=16)
        return offset

    whole = float(weight.sum()) if weight.size else float(n)
    lightest, heaviest = (weight.min(), weight.max()) if weight.size else (1.0, 1.0)
    with np.errstate(invalid="ignore", over="ignore"):
        accumulate.sample_columns(rows, weight, math.ceil(n**0.5 / 4), shift, spread)
        offset = sweep()
        largest = float(np.sum((np.abs(shift) + peak) ** 2))
        if not (largest < _LARGEST_SQUARES and np.isfinite(total).all()):
            check_values(rows)
        allowed = _EXCESS * whole
        if (total * total > allowed * spread).any():
            # The row of the peak alone has that much about the block's mean.
            tip = lightest * np.maximum(0.0, peak - np.abs(total) / whole) ** 2
            if (total * total > allowed * np.maximum(spread, tip)).any():
                shift += total / whole
                offset = sweep()
    if out.dtype == np.float32:
        least, most = _FLOAT32_RANGE
        faint = (peak > 0) & (peak * lightest**0.5 < least)
        if peak.max() * (heaviest * n) ** 0.5 > most or faint.any():
            wide = np.empty((buffer_rows(n), d))
            return reduce_block(
                rows.astype(np.float64), weight, reference, codes, n_codes, values, wide
            )
    return Reduced(n, whole, total + whole * offset, total / whole, out, class_sums, products)


def _rows_per_part(width: int, dtype: np.dtype[Any]) -> int:
    """Rows of a part: a function of shape and dtype alone, so that results are reproducible."""
    return int(np.clip(_PART_BYTES // (width * dtype.itemsize), 64, 512)) // 4 * 4


def buffer_rows(block_rows: int) -> int:
    """Rows of a work buffer for a block: the kernel takes four at a time."""
    return -(-block_rows // 4) * 4


@dataclass(slots=True)
class State:
    """Moments of x. `scatter` is Fortran-ordered with only the lower triangle meaningful."""

    reference: Float  # (d,)
    n_rows: int
    weight: float
    deviation: Float  # (d,): sum w (x - reference)
    scatter: Float  # (d, d): sum w (x - mean)(x - mean)^T
    unit_roundoff: float  # of the products that went into the scatter
    fourth: FourthMoment | None  # where Ledoit-Wolf shrinkage was asked for

    @classmethod
    def empty(cls, reference: Float, *, fourth: bool) -> State:
        d = len(reference)
        try:
            scatter = np.zeros((d, d), order="F")
        except MemoryError as error:
            raise MemoryError(
                f"the covariance of {d} features takes {8 * d * d / 2**30:.1f} GiB, which could "
                "not be allocated; use a machine with more memory or fewer features (a random "
                "projection or the first principal components)"
            ) from error
        moment = FourthMoment.empty(d) if fourth else None
        return cls(reference, 0, 0.0, np.zeros(d), scatter, EPS64, moment)

    @property
    def width(self) -> int:
        return len(self.reference)

    @property
    def mean(self) -> Float:
        return np.asarray(self.reference + self.deviation / self.weight)

    @property
    def eigen_tolerance(self) -> float:
        """Noise in the eigenvalues of the scatter scaled to unit diagonal.

        d eps bounds it; sqrt(d) eps is its size where errors are independent, as those of float32
        products are.
        """
        d, eps = self.width, self.unit_roundoff
        return float(4.0 * max(d * EPS64, d**0.5 * eps if eps > EPS64 else 0.0))

    def copy(self) -> State:
        return State(
            self.reference.copy(),
            self.n_rows,
            self.weight,
            self.deviation.copy(),
            self.scatter.copy(order="F"),
            self.unit_roundoff,
            None if self.fourth is None else self.fourth.copy(),
        )

    def merge_block(self, block: Reduced, product: NDArray[np.float32] | None) -> None:
        """Add a block; `product` is (d, d) float32 scratch, needed for float32 blocks alone."""
        from splince_fast._kernels import blas

        gap, coefficient = self._gap(block.weight, block.deviation / block.weight)
        vectors = np.stack([gap, block.residual])
        coefficients = np.array([coefficient, -block.weight])
        if block.shifted.dtype == np.float32:
            if product is None:
                raise RuntimeError("float32 blocks need a buffer for their product")
            blas.syrk_f32_out(block.shifted, product)
            self._add(product, 1.0, vectors, coefficients)
            self.unit_roundoff = EPS32
        else:
            blas.syrk_f64_into(block.shifted, self.scatter)
            self._add(None, 1.0, vectors, coefficients)
        self.n_rows += block.n_rows
        self.weight += block.weight
        self.deviation += block.deviation

    def _gap(self, weight: float, mean: Float) -> tuple[Float, float]:
        """Difference of the means and the coefficient of its square in the merged scatter."""
        if self.weight == 0.0 or weight == 0.0:
            return np.zeros(self.width), 0.0
        return mean - self.deviation / self.weight, self.weight * weight / (self.weight + weight)

    def _add(
        self, product: NDArray[Any] | None, sign: float, vectors: Float, coefficients: Float
    ) -> None:
        """scatter += sign product + sum_k coefficients[k] vectors[k] vectors[k]^T."""
        from splince_fast._kernels import accumulate

        added = _NO_PRODUCT if product is None else product

        def work(first: int, last: int) -> None:
            accumulate.add_lower(self.scatter, added, sign, vectors, coefficients, first, last)

        d = self.width
        threads.split(work, (d + 1) // 2, grain=max(1, _GRAIN // d))

    def _add_scatter(self, scatter: Float, sign: float, gap: Float, coefficient: float) -> None:
        """scatter += sign (scatter + coefficient gap gap^T), the merge of a part or its removal."""
        vectors = np.stack([gap, np.zeros(self.width)])
        self._add(scatter, sign, vectors, np.array([sign * coefficient, 0.0]))

    def merged(self, other: State, sign: int) -> State:
        """self + other or self - other, about self's reference.

        With a, b the parts, S = S_a + S_b + (w_a w_b / w) g g^T, g = mean_b - mean_a
        (Chan, Golub and LeVeque 1983); removal solves the same equation for S_a.
        """
        result = self.copy()
        shift = other.reference - self.reference
        deviation = other.deviation + other.weight * shift
        result.unit_roundoff = max(self.unit_roundoff, other.unit_roundoff)
        result.fourth = self._merged_fourth(other, shift, sign)
        if sign > 0:
            if other.weight:
                gap, coefficient = result._gap(other.weight, deviation / other.weight)
                result._add_scatter(other.scatter, 1.0, gap, coefficient)
                result.n_rows += other.n_rows
                result.weight += other.weight
                result.deviation += deviation
            return result
        result.n_rows -= other.n_rows
        if result.n_rows < 0:
            raise IncompatibleMomentsError(
                f"cannot remove a part of {other.n_rows} rows from a whole of {self.n_rows}: it is "
                "not a part of it"
            )
        if result.n_rows == 0:
            return State.empty(self.reference.copy(), fourth=self.fourth is not None)
        result.weight -= other.weight
        if result.weight <= 0:
            raise IncompatibleMomentsError(
                f"cannot remove a part of weight {other.weight:g} from a whole of weight "
                f"{self.weight:g}: it is not a part of it"
            )
        result.deviation -= deviation
        if other.weight:
            gap, coefficient = result._gap(other.weight, deviation / other.weight)
            result._add_scatter(other.scatter, -1.0, gap, coefficient)
            diagonal = np.einsum("ii->i", result.scatter)
            # What rounding can leave of a variance: of the whole's, and of its offset.
            offset = np.abs(self.reference) + np.abs(self.deviation / self.weight)
            rounding = self.unit_roundoff * (512 + 8 * self.n_rows**0.5)
            slack = rounding * np.einsum("ii->i", self.scatter)
            slack = slack + self.weight * (64 * EPS64 * offset) ** 2
            if (diagonal < -slack).any():
                raise IncompatibleMomentsError(
                    "cannot remove these moments: a variance would become negative, so they are "
                    "not a part of the whole"
                )
            np.maximum(diagonal, 0.0, out=diagonal)
        return result

    def _merged_fourth(self, other: State, shift: Float, sign: int) -> FourthMoment | None:
        """Fourth moments of self + sign * other, about self's reference."""
        if self.fourth is None or other.fourth is None:
            return None
        if not other.weight:
            return self.fourth.copy()
        moved = other.fourth.moved(shift, other.weight, other.deviation, other.scatter)
        return FourthMoment(
            self.fourth.quartic + sign * moved.quartic, self.fourth.cubic + sign * moved.cubic
        )
