"""Reduction of a block of rows to its moments: work memory, passes over threads, and sums."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast._runtime.arrays import check_values

Float = NDArray[np.float64]
Codes = NDArray[np.intp]

# Least number of elements per thread: for fewer, the start of a thread costs more than it saves.
_GRAIN = 1 << 20
# Bytes per row of a stripe, the columns that one thread centres. Hardware prefetching follows rows
# within a page: narrower stripes take up to 1.5 times as long. With more than `_FEW_THREADS`
# threads, stripes may be narrower: further threads save more time, even while BLAS threads spin.
_PAGE, _FEW_THREADS = 4096, 2
_LINE = 64  # bytes of a cache line
# Rows per float32 matrix product: more rows lose precision, fewer rows cost more memory traffic.
_CHUNK_ROWS = 256
# Blocks with fewer multiplications, n d^2, are reduced by one thread.
_GRAIN_PRODUCTS = 1 << 26
# Threads per stripe. Centring takes about a tenth of the time of a reduction on one thread, so that
# fewer stripes than threads suffice.
_THREADS_PER_STRIPE = 4
# Bytes of a part of a block, which fits into the second-level cache of a processor.
_PART_BYTES = 1 << 20
# Rotation angles of row pairs: multiples of the golden angle are well separated.
_ANGLES = np.arange(256) * (np.pi * (3.0 - 5.0**0.5))
_ROTATIONS = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
# Rows of padding between panels, against conflicts in a set-associative cache.
_GAP_ROWS = 4
# A second pass is needed if |mean - shift|^2 of a column exceeds this multiple of its variance.
_EXCESS = 4.0
# At or above this many label columns, GEMM is faster than the fused loop.
MATRIX_PRODUCT_FROM = 8


class Centred:
    """Memory for the centred rows of a block, which BLAS multiplies.

    Parameters
    ----------
    out : ndarray of shape (m, d), dtype of the rows
        m is at least n, rounded up to a multiple of 4.
    """

    product = None

    def __init__(self, out: NDArray[np.generic]) -> None:
        self.shifted = out

    def reduce(self, block: row_kernels.Block) -> None:
        """Centre the rows of a block, in stripes of columns over threads."""
        n, d = block.n, self.shifted.shape[1]
        out = self.shifted = self.shifted[: buffer_rows(n)]
        if len(out) < n:
            raise RuntimeError("the work memory is too small for the block")

        def work(first: int, last: int) -> None:
            row_kernels.centre_columns(block, _ROTATIONS, out, first, last)

        grain = max(16, _GRAIN // n)
        if d >= 2 * grain and threads.thread_count() <= _FEW_THREADS:
            grain = max(grain, _PAGE // out.itemsize)
        threads.split(work, d, grain=grain, align=16)


class Gram:
    """Memory in which a block is centred and multiplied by itself in one pass over its rows.

    Parameters
    ----------
    block_rows, width : int
        Number of rows and number of features d of most blocks.
    dtype : dtype
        Dtype of the rows, float32 or float64.

    Attributes
    ----------
    size : int
        Size of the memory for `place`, in float64 numbers.
    """

    shifted = None

    def __init__(self, block_rows: int, width: int, dtype: np.dtype[np.generic]) -> None:
        self._width, self._dtype = width, dtype
        self._register_width = lanes = row_kernels.register_width(dtype.itemsize)
        self._chunk = min(_CHUNK_ROWS, buffer_rows(block_rows))
        self._padded = padded = -(-width // lanes) * lanes
        numbers = (2 * (self._chunk + _GAP_ROWS) + padded) * padded
        self.size = -(-numbers * dtype.itemsize // 8) + _LINE // 8

    def place(self, memory: Float) -> Gram:
        """Use `memory`, float64, as work memory; it may be overwritten between two blocks."""
        padded, n_panels = self._padded, 2 * self._padded // self._register_width
        start = -memory.ctypes.data % _LINE // 8
        flat: NDArray[np.generic] = memory[start:].view(self._dtype)
        end = 2 * (self._chunk + _GAP_ROWS) * padded
        self._panels = flat[:end].reshape(n_panels, -1)
        self._product = flat[end : end + padded**2].reshape(padded, padded)
        self.product = self._product.T
        return self

    @staticmethod
    def serves(block_rows: int, width: int, dtype: np.dtype[np.generic]) -> bool:
        """Return whether this class, and not BLAS, multiplies blocks of this shape and dtype.

        It requires a processor with wide registers and, for float64, a product that takes no more
        memory than a block: BLAS adds float64 products to the state without further memory.
        """
        return row_kernels.wide() and (dtype == np.float32 or width <= block_rows)

    def reduce(self, block: row_kernels.Block) -> None:
        """Centre and multiply the rows of a block, in chunks of rows over threads."""
        n, d = block.n, self._width
        count = threads.thread_count() if n * d * d >= _GRAIN_PRODUCTS else 1
        stripe = max(_PAGE // self._dtype.itemsize, -(-d // max(1, count // _THREADS_PER_STRIPE)))
        stripe = -(-stripe // self._register_width) * self._register_width
        counters = np.zeros((-(-n // self._chunk) + 1, 16), np.int64)

        def work(first: int, last: int) -> None:
            row_kernels.reduce_chunks(
                block, _ROTATIONS, self._chunk, stripe, self._panels, self._product, counters
            )

        threads.split(work, count, grain=1)


class Workspace:
    """Scratch memory for the reduction of blocks, lent to solvers while no block is reduced.

    Attributes
    ----------
    capacities : dict
        Rows per block for which memory is allocated, by width and dtype.
    product : ndarray of float32, shape (d, d), or None
        Output of the product of a float32 block with itself, unless a :class:`Gram` holds it.
    """

    def __init__(self) -> None:
        self._memory: NDArray[np.float64] = np.empty(0)
        self._grams: dict[tuple[int, np.dtype[np.generic]], Gram] = {}
        self.product: NDArray[np.float32] | None = None
        self.capacities: dict[tuple[int, np.dtype[np.generic]], int] = {}
        self._borrowed = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + (0 if self.product is None else self.product.nbytes)

    def reserve(self, block_rows: int, width: int, dtype: np.dtype[np.generic]) -> None:
        """Allocate memory for blocks of this shape and dtype."""
        size = -(-buffer_rows(block_rows) * width * dtype.itemsize // 8)
        gram = Gram(block_rows, width, dtype) if Gram.serves(block_rows, width, dtype) else None
        if gram is not None:
            size = max(size, gram.size)
        if self._memory.size < size:
            self._memory = np.empty(size)
            self._grams.clear()
            self.capacities.clear()
        if gram is not None:
            self._grams[width, dtype] = gram.place(self._memory)
        elif dtype == np.float32 and (self.product is None or len(self.product) != width):
            self.capacities.clear()
            self.product = np.empty((width, width), np.float32, order="F")
        self.capacities[width, dtype] = block_rows

    def for_block(self, n: int, width: int, dtype: np.dtype[np.generic]) -> Centred | Gram:
        """Return the memory in the form that `reduce_block` needs for n rows."""
        gram = self._grams.get((width, dtype))
        if gram is not None:
            return gram
        rows = buffer_rows(n)
        flat: NDArray[np.generic] = self._memory.view(dtype)
        return Centred(flat[: rows * width].reshape(rows, width))

    @contextmanager
    def borrowed(self, size: int) -> Iterator[Float]:
        """Yield memory for `size` float64 numbers: the work memory if it is free and large enough.

        New memory for a large factorisation would cost page faults and raise the peak of memory.
        """
        if self._memory.size < size or not self._borrowed.acquire(blocking=False):
            yield np.empty(size)
            return
        try:
            yield self._memory[:size]
        finally:
            self._borrowed.release()


@lru_cache(maxsize=64)
def part_rows(width: int, itemsize: int) -> int:
    """Return the number of rows per part of a block.

    It depends on shape and dtype alone, so that results are reproducible.
    """
    return min(512, max(64, _PART_BYTES // (width * itemsize))) // 4 * 4


def buffer_rows(block_rows: int) -> int:
    """Return the number of rows of work memory for a block, a multiple of 4 for the kernel."""
    return -(-block_rows // 4) * 4


@dataclass(slots=True)
class Sample:
    """Weighted mean and sum of squares of a sample of the rows of a block."""

    shift: Float  # (d,): mean of the sampled rows
    squares: Float  # (d,): sum w (x - shift)^2 over the sampled rows
    weight: float  # weight sum of the sampled rows
    block_weight: float  # weight sum of the block


@dataclass(slots=True)
class Reduced:
    """Moments of one block; sums are of deviations x - reference from the reference point."""

    n_rows: int
    weight: float
    deviation: Float  # (d,): sum w (x - reference)
    residual: Float  # (d,): mean of the block minus the shift that `shifted` subtracts
    # The scatter is shifted^T shifted - weight residual residual^T. Either `shifted` or the product
    # shifted^T shifted is set:
    shifted: NDArray[np.generic] | None  # (m, d): sqrt(w) (x - shift), rotated in pairs
    product: NDArray[np.generic] | None  # (m, d), m >= d, Fortran-ordered; lower triangle valid
    class_sums: Float  # (c, d): sum w (x - reference) per class
    products: Float  # (q, d): values (x - reference)


def rows_of(rows: NDArray[np.generic], index: Codes | None, start: int, stop: int) -> NDArray[Any]:
    """Return rows start to stop - 1 of ``rows[index]``, or of `rows` if `index` is None."""
    return rows[start:stop] if index is None else rows[index[start:stop]]


def sample_block(rows: NDArray[Any], weight: Float | None, index: Codes | None = None) -> Sample:
    """Return mean and sum of squares of about 4 sqrt(n) rows of a block; values may be invalid.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous
    weight : (n,) float64 > 0, or None for unit weights
    index : (n,) intp, optional
        Positions in `rows` of the n >= 1 rows of the block; by default all rows.
    """
    n = len(rows) if index is None else len(index)
    stride = math.ceil(n**0.5 / 4)
    shift, squares = row_kernels.sample_columns(rows, index, weight, stride)
    if weight is None:
        return Sample(shift, squares, float(-(-n // stride)), float(n))
    return Sample(shift, squares, float(weight[::stride].sum()), float(weight.sum()))


def reduce_block(
    rows: NDArray[np.generic],
    weight: Float | None,
    sample: Sample,
    reference: Float,
    codes: NDArray[np.intp],
    n_codes: int,
    values: Float,
    memory: Centred | Gram,
    index: Codes | None = None,
) -> Reduced:
    """Reduce a block to its moments in one pass over memory, with columns split over threads.

    With shift s, block mean m, weight W and r = m - s, the scatter about the mean is

        sum w (x - m)^2 = sum w (x - s)^2 - W r^2.

    The subtraction loses little precision while W r^2 <= 4 V for a lower bound V of the left side:
    the sum about s is then at most five times the sum about m. V is the larger of two bounds: the
    sum of squares of the sample about its own mean, and w |x - m|^2 of the row furthest from s. If
    the inequality fails, a second pass uses s = m. For normal rows in random order it fails if s is
    eight standard errors from m.

    A block whose float32 products would overflow or underflow is reduced in float64.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous; values may be invalid
    weight : (n,) float64 > 0, or None for unit weights
    sample : Sample
        Sample of the block; a second pass overwrites its shift.
    reference : (d,) float64
        Reference point, which is subtracted from x in all sums.
    codes : (v, n) intp
        For each of v variables, the class sum of each row, below n_codes; -1 for none.
    values : (q, n) float64
        Coefficients of the rows in q sums of products.
    memory : Centred or Gram
        Work memory, overwritten. A :class:`Gram` computes the product in the same pass.
    index : (n,) intp, optional
        Positions in `rows` of the n >= 1 rows of the block, which are not copied; by default all
        rows.

    Raises
    ------
    NonFiniteError, InputError
        As for `check_values`.
    """
    n, d = len(rows) if index is None else len(index), rows.shape[1]
    shift, weight_sum = sample.shift, sample.block_weight
    offset = shift - reference
    by_matrix = len(values) >= MATRIX_PRODUCT_FROM
    block = row_kernels.Block(
        rows, index, weight, shift, offset, codes, n_codes, values[:0] if by_matrix else values,
        part_rows(d, rows.itemsize),
    )  # fmt: skip
    lightest, heaviest = (1.0, 1.0) if weight is None else (weight.min(), weight.max())
    memory.reduce(block)
    weights = weight_sum, lightest, heaviest
    needs_check, off_centre, needs_float64 = block.check_sums(sample.squares, *weights, _EXCESS)
    if needs_check:
        check_values(rows_of(rows, index, 0, n))
    total = block.sums[0]
    if off_centre:
        shift += total / weight_sum
        np.subtract(shift, reference, out=offset)
        memory.reduce(block)
        needs_float64 = block.check_sums(sample.squares, *weights, np.inf)[2]
    if rows.dtype == np.float32 and needs_float64:
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
        n, weight_sum, total + weight_sum * offset, total / weight_sum, memory.shifted,
        memory.product, block.sums[2 : 2 + n_codes], products,
    )  # fmt: skip


def add_products(
    rows: NDArray[np.generic], values: Float, shift: Float, offset: Float, products: Float,
    index: Codes | None = None,
) -> None:  # fmt: skip
    """Compute products = values (rows - shift + offset) in float64, 512 rows at a time.

    SciPy's BLAS is used, as for all other products: the threads of a second BLAS would spin.
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
