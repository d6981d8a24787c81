"""Reduction of one block of rows to its own moments, in work memory; no state changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime.arrays import check_values
from splince_fast.moments.gram import Centred, Gram, buffer_rows, part_rows

Float = NDArray[np.float64]
Codes = NDArray[np.intp]

# Largest ratio of |mean - shift|^2 to the variance of a column, beyond which a second pass centres.
_EXCESS = 4.0
# At or above this many label columns, GEMM is faster than the fused loop.
MATRIX_PRODUCT_FROM = 8


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
    residual: Float  # (d,): mean of the block minus the shift of `shifted`
    # The scatter is shifted^T shifted - weight residual residual^T. Either `shifted` or the product
    # shifted^T shifted is set:
    shifted: NDArray[Any] | None  # (m, d)
    product: NDArray[Any] | None  # (at least d, d), Fortran-ordered; lower triangle
    class_sums: Float  # (c, d)
    products: Float  # (q, d)


def rows_of(rows: NDArray[Any], index: Codes | None, start: int, stop: int) -> NDArray[Any]:
    """Rows start to stop - 1 of the block ``rows[index]``, or of `rows` without an index."""
    return rows[start:stop] if index is None else rows[index[start:stop]]


def sample_block(rows: NDArray[Any], weight: Float | None, index: Codes | None = None) -> Sample:
    """Mean and squares of 4 sqrt(n) rows of a block; values may be unchecked.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous
    weight : (n,) float64 > 0, or None for unit weights
    index : (n,) intp, optional
        The n >= 1 rows of the block among them, in its order; all without it.
    """
    n = len(rows) if index is None else len(index)
    stride = math.ceil(n**0.5 / 4)
    shift, spread = row_kernels.sample_columns(rows, index, weight, stride)
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
    memory: Centred | Gram,
    index: Codes | None = None,
) -> Reduced:
    """Reduce a block in one pass over memory, columns split over threads.

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
    memory : Centred or Gram
        Overwritten. With a :class:`Gram` the product is taken in the same pass.
    index : (n,) intp, optional
        The n >= 1 rows of the block among `rows`, in its order, which are read where they lie; all
        without it.

    Raises
    ------
    NonFiniteError, InputError
        As `check_values`.
    """
    n, d = len(rows) if index is None else len(index), rows.shape[1]
    shift, whole = sample.shift, sample.whole
    offset = shift - reference
    by_matrix = len(values) >= MATRIX_PRODUCT_FROM
    block = row_kernels.Block(
        rows, index, weight, shift, offset, codes, n_codes, values[:0] if by_matrix else values,
        part_rows(d, rows.itemsize),
    )  # fmt: skip
    lightest, heaviest = (1.0, 1.0) if weight is None else (weight.min(), weight.max())
    memory.reduce(block)
    weights = whole, lightest, heaviest
    suspect, far, narrow = block.judge(sample.spread, *weights, _EXCESS)
    if suspect:
        check_values(rows_of(rows, index, 0, n))
    total = block.sums[0]
    if far:
        shift += total / whole
        np.subtract(shift, reference, out=offset)
        memory.reduce(block)
        narrow = block.judge(sample.spread, *weights, np.inf)[2]
    if rows.dtype == np.float32 and narrow:
        wide = rows_of(rows, index, 0, n).astype(np.float64)
        return reduce_block(
            wide, weight, sample_block(wide, weight), reference, codes, n_codes, values,
            Centred(np.empty((buffer_rows(n), d))),
        )  # fmt: skip
    products = block.sums[2 + n_codes :]
    if by_matrix:
        products = np.empty((len(values), d))
        add_products(rows, values, shift, offset, products, index)
    return Reduced(
        n, whole, total + whole * offset, total / whole, memory.shifted, memory.product,
        block.sums[2 : 2 + n_codes], products,
    )  # fmt: skip


def add_products(
    rows: NDArray[Any], values: Float, shift: Float, offset: Float, products: Float,
    index: Codes | None = None,
) -> None:  # fmt: skip
    """Compute products = values (rows - shift + offset) in float64, 512 rows at a time.

    SciPy's BLAS, which computes all other products, is used: threads of a second BLAS would spin.
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
