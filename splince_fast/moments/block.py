"""One block of rows reduced to its own moments, in work memory: it can fail without a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import threads
from splince_fast._runtime.arrays import ALL_ROWS, NO_WEIGHT, check_values

Float = NDArray[np.float64]
Codes = NDArray[np.intp]

# Elements of a block below which a second thread costs more than it saves.
_GRAIN = 1 << 20
# The processor foresees reads along a row: stripes narrower than a page take up to half as long
# again as whole rows. Two threads do not make up for it while that of a product still spins.
_PAGE, _FEW_THREADS = 4096, 2
_LINE = 64  # bytes of a cache line
# Rows that are multiplied at once: float32 sums of more terms would lose digits, and sums of
# fewer be read and written more often.
_CHUNK_ROWS = 256
# Products below which a second thread costs more than it saves.
_GRAIN_PRODUCTS = 1 << 26
# Centring takes about a tenth of the time of one thread, and one more stripe serves so many.
_THREADS_PER_STRIPE = 4
# A part of a block fits in a processor's second-level cache.
_PART_BYTES = 1 << 20
# A shift may leave this multiple of a column's own sum of squares in its uncentred one.
_EXCESS = 4.0
# From so many products with columns on, a matrix product is faster than the sweep.
MATRIX_PRODUCT_FROM = 8
# Angles by which pairs of rows are rotated: multiples of the golden one never come close together.
_ANGLES = np.arange(256) * (np.pi * (3.0 - 5.0**0.5))
_ROTATIONS = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
_NO_VALUES = np.empty((0, 0))
_NO_PANELS = {np.dtype(t): np.empty((0, 0, 0), t) for t in (np.float32, np.float64)}


@dataclass(slots=True)
class Sample:
    """Mean of some rows of a block, and their weighted sum of squares about it."""

    shift: Float  # (d,)
    spread: Float  # (d,)
    weight: float  # of these rows
    whole: float  # of all rows


@dataclass(slots=True)
class Reduced:
    """The moments of one block; sums are of deviations from the reference."""

    n_rows: int
    weight: float
    deviation: Float  # (d,)
    residual: Float  # (d,): the block's mean less the shift that `shifted` is about
    # shifted^T shifted - weight residual residual^T is the scatter; that product is taken, or not:
    shifted: NDArray[Any] | None  # (m, d)
    product: NDArray[Any] | None  # (at least d, d), Fortran-ordered, of which the lower triangle
    class_sums: Float  # (c, d)
    products: Float  # (q, d)


class Sweep:
    """Memory in which the rows of a block are centred, for BLAS to multiply.

    Parameters
    ----------
    out : ndarray of shape (at least n rounded up to a multiple of 4, d), dtype of the rows
    """

    product = None

    def __init__(self, out: NDArray[Any]) -> None:
        self.shifted = out

    def reduce(
        self, rows: NDArray[Any], where: Codes, weight: Float, shift: Float, offset: Float,
        codes: Codes, order: Codes, cell: Codes, values: Float, peak: Float, total: Float,
        class_sums: Float, products: Float,
    ) -> None:  # fmt: skip
        """Call `centre_block` in stripes of columns, over threads."""
        import splince_fast._kernels.accumulate as kernels

        n, d = len(order), rows.shape[1]
        out = self.shifted = self.shifted[: buffer_rows(n)]
        if len(out) < n:
            raise RuntimeError("the work buffer has no room for the block")
        part = part_rows(d, rows.itemsize)
        panels = _NO_PANELS[rows.dtype]

        def work(first: int, last: int) -> None:
            kernels.centre_block(
                rows, where, weight, shift, offset, codes, order, cell, values, _ROTATIONS, part,
                0, n, first, last, out, panels, peak, total, class_sums, products,
            )  # fmt: skip

        grain = max(16, _GRAIN // n)
        if d >= 2 * grain and threads.thread_count() <= _FEW_THREADS:
            grain = max(grain, _PAGE // rows.itemsize)
        threads.split(work, d, grain=grain, align=16)


class Gram:
    """Memory in which blocks are centred and multiplied in one pass, chunk by chunk.

    Parameters
    ----------
    block_rows, width : int
        Rows and features d of most blocks.
    dtype : dtype
        float32 or float64, that of the rows.
    memory : ndarray of float64, of `size`
        It may be overwritten between two blocks.
    """

    shifted = None

    def __init__(self, block_rows: int, width: int, dtype: np.dtype[Any], memory: Float) -> None:
        self._width, self._itemsize = width, dtype.itemsize
        chunk, whole, self._lanes = self._shape(block_rows, width, dtype)
        padded = whole * self._lanes
        self._four = np.zeros((4, padded), dtype)
        start = -memory.ctypes.data % _LINE // 8
        flat: NDArray[Any] = memory[start:].view(dtype)
        n_panels = 2 * chunk * padded
        self._panels = flat[:n_panels].reshape(2, whole, chunk, self._lanes)
        self._product = flat[n_panels : n_panels + padded**2].reshape(padded, padded)
        self.product = self._product.T

    @staticmethod
    def _shape(block_rows: int, width: int, dtype: np.dtype[Any]) -> tuple[int, int, int]:
        """Rows of a chunk, panels, and numbers of a register."""
        from splince_fast._kernels.tiles import REGISTER

        lanes = REGISTER // dtype.itemsize
        return min(_CHUNK_ROWS, buffer_rows(block_rows)), -(-width // lanes), lanes

    @classmethod
    def size(cls, block_rows: int, width: int, dtype: np.dtype[Any]) -> int:
        """Numbers of float64 that the memory has."""
        chunk, whole, lanes = cls._shape(block_rows, width, dtype)
        padded = whole * lanes
        return -(-(2 * chunk + padded) * padded * dtype.itemsize // 8) + _LINE // 8

    @staticmethod
    def serves(block_rows: int, width: int, dtype: np.dtype[Any]) -> bool:
        """Whether such rows are multiplied here.

        The processor has to have wide registers. The product of rows of float64, which BLAS adds
        to the state where it is, must not take more memory than a block.
        """
        import splince_fast._kernels.gram as kernels

        return kernels.WIDE and (dtype == np.float32 or width <= block_rows)

    def reduce(
        self, rows: NDArray[Any], where: Codes, weight: Float, shift: Float, offset: Float,
        codes: Codes, order: Codes, cell: Codes, values: Float, peak: Float, total: Float,
        class_sums: Float, products: Float,
    ) -> None:  # fmt: skip
        """Call `reduce_chunks` in every thread."""
        import splince_fast._kernels.gram as kernels

        n, d = len(order), self._width
        count = threads.thread_count() if n * d * d >= _GRAIN_PRODUCTS else 1
        stripe = max(_PAGE // self._itemsize, -(-d // max(1, count // _THREADS_PER_STRIPE)))
        stripe = -(-stripe // self._lanes) * self._lanes
        part = part_rows(d, self._itemsize)
        counters = np.zeros((-(-n // self._panels.shape[2]) + 1, 16), np.int64)

        def work(first: int, last: int) -> None:
            kernels.reduce_chunks(
                rows, where, weight, shift, offset, codes, order, cell, values, _ROTATIONS, part,
                stripe, self._four, self._panels, peak, total, class_sums, products,
                self._product, counters,
            )  # fmt: skip

        threads.split(work, count, grain=1)


def rows_of(rows: NDArray[Any], index: Codes | None, start: int, stop: int) -> NDArray[Any]:
    """Rows start..stop of a block, whose rows `index` numbers where it is not all of them."""
    return rows[start:stop] if index is None else rows[index[start:stop]]


def sample_block(rows: NDArray[Any], weight: Float | None, index: Codes | None = None) -> Sample:
    """Look at 4 sqrt(n) rows of a block; values may be unchecked.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous
    weight : (n,) float64 > 0, or None for unit weights
    index : (n,) intp, optional
        The n >= 1 rows of the block among them, in its order; all without it.
    """
    import splince_fast._kernels.accumulate as kernels

    n, d = len(rows) if index is None else len(index), rows.shape[1]
    stride = math.ceil(n**0.5 / 4)
    shift, spread = np.empty(d), np.empty(d)
    given = NO_WEIGHT if weight is None else weight
    kernels.sample_columns(rows, ALL_ROWS if index is None else index, given, stride, shift, spread)
    if weight is None:
        return Sample(shift, spread, float(-(-n // stride)), float(n))
    return Sample(shift, spread, float(weight[::stride].sum()), float(weight.sum()))


def reduce_block(
    rows: NDArray[Any],
    weight: Float | None,
    sample: Sample,
    reference: Float,
    codes: NDArray[np.intp],
    n_codes: int,
    values: Float,
    memory: Sweep | Gram,
    index: Codes | None = None,
) -> Reduced:
    """Reduce a block in one sweep over memory, columns split over threads.

    With shift s, block mean m, weight W and r = m - s, the scatter about the mean is

        sum w (x - m)^2 = sum w (x - s)^2 - W r^2,

    and the subtraction costs few digits while W r^2 <= 4 V for a lower bound V of the left side:
    the uncentred sum is at most five times the centred one then. V is the larger of the sample's
    sum of squares about its own mean and w |x - m|^2 of the row furthest from s alone. Where the
    condition fails, which for normal rows in random order takes a deviation of eight standard
    errors, a second sweep uses s = m.

    Where float32 products would overflow or underflow, the block is reduced in float64.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous; values may be unchecked
    weight : (n,) float64 > 0, or None for unit weights
    sample : Sample
        Of this block; its shift is overwritten by a second sweep.
    reference : (d,) float64
    codes : (v, n) intp into n_codes rows of class sums, -1 for none
    values : (q, n) float64
    memory : Sweep or Gram
        Overwritten. With a :class:`Gram` the product is taken in the same pass.
    index : (n,) intp, optional
        The n >= 1 rows of the block among `rows`, in its order, which are read where they lie; all
        without it.

    Raises
    ------
    NonFiniteError, InputError
        As `check_values`.
    """
    import splince_fast._kernels.accumulate as kernels

    n, d = len(rows) if index is None else len(index), rows.shape[1]
    order, cell = np.empty(n, np.intp), np.empty(n, np.intp)
    kernels.sort_by_cell(codes, n_codes, part_rows(d, rows.itemsize), order, cell)
    shift, whole = sample.shift, sample.whole
    peak, total = np.empty(d), np.empty(d)
    class_sums, products = np.empty((n_codes, d)), np.empty((len(values), d))
    given = NO_WEIGHT if weight is None else weight
    where = ALL_ROWS if index is None else index
    by_matrix = len(values) >= MATRIX_PRODUCT_FROM
    labels = (codes, order, cell, _NO_VALUES.reshape(0, n) if by_matrix else values)
    sums = (peak, total, class_sums, products[:0] if by_matrix else products)
    lightest, heaviest = (1.0, 1.0) if weight is None else (weight.min(), weight.max())
    offset = shift - reference
    memory.reduce(rows, where, given, shift, offset, *labels, *sums)
    verdict = kernels.judge_sweep(
        shift, sample.spread, peak, total, whole, lightest, heaviest, n, _EXCESS
    )
    if verdict & kernels.SUSPECT:
        check_values(rows_of(rows, index, 0, n))
    if verdict & kernels.FAR:
        shift += total / whole
        offset = shift - reference
        memory.reduce(rows, where, given, shift, offset, *labels, *sums)
        verdict = kernels.judge_sweep(
            shift, sample.spread, peak, total, whole, lightest, heaviest, n, np.inf
        )
    if rows.dtype == np.float32 and verdict & kernels.NEEDS_FLOAT64:
        wide = rows_of(rows, index, 0, n).astype(np.float64)
        return reduce_block(
            wide, weight, sample_block(wide, weight), reference, codes, n_codes, values,
            Sweep(np.empty((buffer_rows(n), d))),
        )  # fmt: skip
    if by_matrix:
        add_products(rows, values, shift, offset, products, index)
    return Reduced(
        n, whole, total + whole * offset, total / whole, memory.shifted, memory.product,
        class_sums, products,
    )  # fmt: skip


def add_products(
    rows: NDArray[Any], values: Float, shift: Float, offset: Float, products: Float,
    index: Codes | None = None,
) -> None:  # fmt: skip
    """products = values (rows - reference) in float64, as (rows - shift) + offset, in parts.

    By the BLAS of all other products: the threads of another one would spin beside them.
    """
    import splince_fast._kernels.blas as blas_kernels

    np.multiply(values.sum(axis=1)[:, None], offset, out=products)
    step, n = 512, values.shape[1]
    columns = np.ascontiguousarray(values.T)
    centred = np.empty((min(step, n), rows.shape[1]))
    for start in range(0, n, step):
        part = centred[: n - start]
        np.subtract(rows_of(rows, index, start, start + step), shift, out=part)
        blas_kernels.gemm_f64_into(columns[start : start + step], part, products)


@lru_cache(maxsize=64)
def part_rows(width: int, itemsize: int) -> int:
    """Rows of a part: a function of shape and dtype alone, so that results are reproducible."""
    return min(512, max(64, _PART_BYTES // (width * itemsize))) // 4 * 4


def buffer_rows(block_rows: int) -> int:
    """Rows of a work buffer for a block: the kernel takes four at a time."""
    return -(-block_rows // 4) * 4
