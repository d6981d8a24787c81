"""The state of x: weight, rows, mean and scatter, and how a block of rows is merged into it.

A block is first reduced to its own moments in work buffers (`reduce_block`), which can fail
without a trace; `State.merge_block` then adds them, which cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import _threads
from splince_fast._fourth import FourthMoment
from splince_fast.exceptions import IncompatibleMomentsError

Float = NDArray[np.float64]

EPS64 = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)

# Elements of a block below which a second thread costs more than it saves.
_GRAIN = 1 << 18
# A part of a block fits in a processor's second-level cache.
_PART_BYTES = 1 << 20
# Least deviation, and greatest root of a sum of squares, that float32 holds to full precision.
_FLOAT32_RANGE = (1e-15, 1e18)


@dataclass(slots=True)
class Reduced:
    """The moments of one block, about its own mean; sums are of deviations from the reference."""

    n_rows: int
    weight: float
    deviation: Float  # (d,)
    centred: NDArray[Any]  # (n + parts, d): centred^T centred is the block's scatter
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

    Where float32 products would overflow or underflow, the block is centred in float64.

    Parameters
    ----------
    rows : (n, d) float32 or float64, C-contiguous, n >= 1
    weight : (n,) float64 > 0, or empty for unit weights
    reference : (d,) float64
    codes : (v, n) intp into n_codes rows of class sums, -1 for none
    values : (q, n) float64
    buffer : (at least n + parts, d), dtype of rows, overwritten
    """
    from splince_fast._kernels import rows as kernels

    n, d = rows.shape
    part_rows = rows_per_part(d, rows.dtype)
    starts = np.arange(0, n, part_rows)
    if weight.size:
        part_weight = np.add.reduceat(weight, starts)
    else:
        part_weight = np.diff(np.append(starts, n)).astype(np.float64)
    root_weight = np.sqrt(weight)
    out = buffer[: n + len(starts)]
    if len(out) != n + len(starts):
        raise RuntimeError("the work buffer has no room for the block and the means of its parts")
    peak, deviation = np.empty(d), np.empty(d)
    class_sums, products = np.empty((n_codes, d)), np.empty((len(values), d))

    def work(first: int, last: int) -> None:
        kernels.centre_block(
            rows, weight, root_weight, reference, codes, values, part_rows, part_weight,
            first, last, out, peak, deviation, class_sums, products,
        )  # fmt: skip

    _threads.split(work, d, grain=max(16, _GRAIN // n), align=16)
    if out.dtype == np.float32:
        # A constant column shows roundings of its mean, and no more: that is no small spread.
        varies = peak > 1e-13 * np.abs(reference)
        if peak.max() * n**0.5 > _FLOAT32_RANGE[1] or (varies & (peak < _FLOAT32_RANGE[0])).any():
            wide = np.empty((buffer_rows(n, d, np.dtype(np.float64)), d))
            return reduce_block(
                rows.astype(np.float64), weight, reference, codes, n_codes, values, wide
            )
    total = float(part_weight.sum())
    return Reduced(n, total, deviation, out, class_sums, products)


def rows_per_part(width: int, dtype: np.dtype[Any]) -> int:
    """Rows of a part: a function of shape and dtype alone, so that results are reproducible."""
    return int(np.clip(_PART_BYTES // (width * dtype.itemsize), 64, 512))


def buffer_rows(block_rows: int, width: int, dtype: np.dtype[Any]) -> int:
    """Rows of a work buffer that takes a centred block and the means of its parts."""
    return block_rows + -(-block_rows // rows_per_part(width, dtype))


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
        if block.centred.dtype == np.float32:
            if product is None:
                raise RuntimeError("float32 blocks need a buffer for their product")
            blas.syrk_f32_out(block.centred, product)
            self._add(product, 1.0, gap, coefficient)
            self.unit_roundoff = EPS32
        else:
            blas.syrk_f64_into(block.centred, self.scatter)
            if coefficient:
                blas.rank_one_lower(self.scatter, gap, coefficient)
        self.n_rows += block.n_rows
        self.weight += block.weight
        self.deviation += block.deviation

    def _gap(self, weight: float, mean: Float) -> tuple[Float, float]:
        """Difference of the means and the coefficient of its square in the merged scatter."""
        if self.weight == 0.0 or weight == 0.0:
            return np.zeros(self.width), 0.0
        return mean - self.deviation / self.weight, self.weight * weight / (self.weight + weight)

    def _add(self, product: NDArray[Any], sign: float, gap: Float, coefficient: float) -> None:
        from splince_fast._kernels import blas

        def work(first: int, last: int) -> None:
            blas.add_lower(self.scatter, product, sign, gap, coefficient, first, last)

        d = self.width
        _threads.split(work, (d + 1) // 2, grain=max(1, _GRAIN // d))

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
                result._add(other.scatter, 1.0, gap, coefficient)
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
            result._add(other.scatter, -1.0, gap, -coefficient)
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
