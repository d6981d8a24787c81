"""Reduction of a block of rows to its moments in parallel, and the work memory for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast._runtime.rows import check_values

Float = NDArray[np.float64]
Codes = NDArray[np.intp]

# Least number of elements per thread. For fewer elements, starting the thread takes more time than
# the thread saves.
_GRAIN = 1 << 20
# Least width, in bytes, of a stripe: the columns that one thread centres. Hardware prefetching
# works within a page, and narrower stripes take up to 1.5 times as long. With more than
# `_FEW_THREADS` threads, `Centred` uses narrower stripes: the additional threads save more time
# than the stripes lose, even while idle BLAS threads occupy processors.
_PAGE, _FEW_THREADS = 4096, 2
_LINE = 64  # bytes of a cache line
# Rows per matrix product of `Gram`. With more rows, float32 sums lose precision; with fewer rows,
# memory traffic increases.
_CHUNK_ROWS = 256
# `Gram` reduces a block on one thread if it takes fewer than this number of multiplications, n d^2.
_GRAIN_PRODUCTS = 1 << 26
# Least number of threads per stripe in `Gram`. Centring takes about a tenth of the time of a
# reduction on one thread, so fewer stripes than threads suffice.
_THREADS_PER_STRIPE = 4
# Bytes of a part: consecutive rows of a block that stay in the second-level cache of a processor
# between centring and the sums per class.
_PART_BYTES = 1 << 20
# Angles by which the kernel rotates pairs of rows; the product of the block with itself does not
# depend on the angles. Without rotation, rows with few distinct values would have equal products,
# whose rounding errors add up. Multiples of the golden angle are well separated.
_ANGLES = np.arange(256) * (np.pi * (3.0 - 5.0**0.5))
_ROTATIONS = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
# Rows of padding after each panel (the columns of a chunk that fill one register). The padding
# avoids conflicts in a set-associative cache.
_GAP_ROWS = 4
# A block needs a second pass if (mean - shift)^2 exceeds this multiple of the variance in a column.
_EXCESS = 4.0
# At or above this number of label columns, GEMM computes their products with the rows faster than
# the row kernel.
MATRIX_PRODUCT_FROM = 8


class Centred:
    """Work memory for the centred rows of a block, from which BLAS computes the scatter later."""

    product = None

    def __init__(self, out: NDArray[np.generic]) -> None:
        self.shifted = out

    def reduce(self, block: row_kernels.Block) -> None:
        """Centre the rows of a block, where each thread centres a range of columns."""
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
    """Work memory in which a block is centred and multiplied by itself in one pass."""

    shifted = None

    def __init__(self, block_rows: int, width: int, dtype: np.dtype[np.generic]) -> None:
        self._width, self._dtype = width, dtype
        self._register_width = lanes = row_kernels.register_width(dtype.itemsize)
        self._chunk = min(_CHUNK_ROWS, buffer_rows(block_rows))
        self._padded = padded = -(-width // lanes) * lanes
        numbers = (2 * (self._chunk + _GAP_ROWS) + padded) * padded
        # least length of the argument of `set_memory`
        self.size = -(-numbers * dtype.itemsize // 8) + _LINE // 8

    def set_memory(self, memory: Float) -> Gram:
        """Use the float64 array `memory` as work memory, and return this object."""
        padded, n_panels = self._padded, 2 * self._padded // self._register_width
        start = -memory.ctypes.data % _LINE // 8
        flat: NDArray[np.generic] = memory[start:].view(self._dtype)
        end = 2 * (self._chunk + _GAP_ROWS) * padded
        self._panels = flat[:end].reshape(n_panels, -1)
        self._product = flat[end : end + padded**2].reshape(padded, padded)
        self.product = self._product.T
        return self

    @staticmethod
    def is_used_for(block_rows: int, width: int, dtype: np.dtype[np.generic]) -> bool:
        """Return whether this class, and not BLAS, multiplies blocks of this shape and dtype."""
        # The processor must have wide registers. A float64 product must also take no more memory
        # than a block, since BLAS adds float64 products to the state without memory for the
        # product.
        return row_kernels.wide() and (dtype == np.float32 or width <= block_rows)

    def reduce(self, block: row_kernels.Block) -> None:
        """Centre a block and multiply it by itself, chunk by chunk; threads share the work."""
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
    """Work memory for the reduction of blocks."""

    def __init__(self) -> None:
        self._memory: NDArray[np.float64] = np.empty(0)
        self._grams: dict[tuple[int, np.dtype[np.generic]], Gram] = {}
        # (d, d): memory in which BLAS computes the product of a float32 block with itself; None if
        # no block needs it, as with a :class:`Gram`
        self.product: NDArray[np.float32] | None = None
        # rows per block for which memory is allocated, by width and dtype
        self.capacities: dict[tuple[int, np.dtype[np.generic]], int] = {}

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + (0 if self.product is None else self.product.nbytes)

    def reserve(self, block_rows: int, width: int, dtype: np.dtype[np.generic]) -> None:
        """Allocate memory for blocks of this shape and dtype."""
        size = -(-buffer_rows(block_rows) * width * dtype.itemsize // 8)
        gram = (
            Gram(block_rows, width, dtype) if Gram.is_used_for(block_rows, width, dtype) else None
        )
        if gram is not None:
            size = max(size, gram.size)
        if self._memory.size < size:
            self._memory = np.empty(size)
            self._grams.clear()
            self.capacities.clear()
        if gram is not None:
            self._grams[width, dtype] = gram.set_memory(self._memory)
        elif dtype == np.float32 and (self.product is None or len(self.product) != width):
            self.capacities.clear()
            self.product = np.empty((width, width), np.float32, order="F")
        self.capacities[width, dtype] = block_rows

    def for_block(self, n: int, width: int, dtype: np.dtype[np.generic]) -> Centred | Gram:
        """Return the argument `memory` of `reduce_block` for a block of n rows."""
        gram = self._grams.get((width, dtype))
        if gram is not None:
            return gram
        rows = buffer_rows(n)
        flat: NDArray[np.generic] = self._memory.view(dtype)
        return Centred(flat[: rows * width].reshape(rows, width))


@lru_cache(maxsize=64)
def part_rows(width: int, itemsize: int) -> int:
    """Return the number of rows per part: consecutive rows of a block that fit into the cache."""
    # The number depends on width and dtype alone, so that results are reproducible.
    return min(512, max(64, _PART_BYTES // (width * itemsize))) // 4 * 4


def buffer_rows(block_rows: int) -> int:
    """Return `block_rows` rounded up to a multiple of 4, as the kernel requires."""
    return -(-block_rows // 4) * 4


@dataclass(slots=True)
class BlockSample:
    """Weighted mean and sum of squares of a sample of the rows of a block."""

    shift: Float  # (d,): weighted mean of the sampled rows
    squares: Float  # (d,): sum w (x - shift)^2 over the sampled rows
    weight: float  # weight sum of the sampled rows
    block_weight: float  # weight sum of the block


@dataclass(slots=True)
class Reduced:
    """Moments of one block about a reference point."""

    n_rows: int
    weight: float
    deviation: Float  # (d,): sum w (x - reference)
    residual: Float  # (d,): mean of the block minus the shift in `shifted`
    # The scatter is shifted^T shifted - weight residual residual^T. Either `shifted` or `product`,
    # which is shifted^T shifted, is None.
    shifted: NDArray[np.generic] | None  # (m, d): rows sqrt(w) (x - shift), each pair rotated
    product: NDArray[np.generic] | None  # (m, m), m >= d, Fortran-ordered; lower triangle valid
    class_sums: Float  # (c, d): sum w (x - reference) per class
    products: Float  # (q, d): matrix product of `values` and x - reference


def rows_of(rows: NDArray[np.generic], index: Codes | None, start: int, stop: int) -> NDArray[Any]:
    """Return rows start to stop - 1 of ``rows[index]``, or of `rows` if `index` is None."""
    return rows[start:stop] if index is None else rows[index[start:stop]]


def sample_block(
    rows: NDArray[Any], weight: Float | None, index: Codes | None = None
) -> BlockSample:
    """Return a sample of about 4 sqrt(n) rows of a block; NaN and infinity raise no error."""
    # `index`, (n,), holds the positions of the rows of the block; by default all rows.
    n = len(rows) if index is None else len(index)
    stride = math.ceil(n**0.5 / 4)
    shift, squares = row_kernels.sample_columns(rows, index, weight, stride)
    if weight is None:
        return BlockSample(shift, squares, float(-(-n // stride)), float(n))
    return BlockSample(shift, squares, float(weight[::stride].sum()), float(weight.sum()))


def reduce_block(
    rows: NDArray[np.generic],
    weight: Float | None,
    sample: BlockSample,
    reference: Float,
    codes: NDArray[np.intp],
    n_codes: int,
    values: Float,
    memory: Centred | Gram,
    index: Codes | None = None,
) -> Reduced:
    """Return the moments of a block, in one pass unless precision requires a second."""
    # The shift s is the mean of the sample. With block mean m, weight sum W and r = m - s, the sum
    # of squares of a feature about the mean is:
    #     sum w (x - m)^2 = sum w (x - s)^2 - W r^2
    # The subtraction loses little precision if W r^2 <= 4 V for a lower bound V of the left side,
    # since the sum about s is then at most five times the sum about m. V is the larger of two
    # bounds: the sum of squares of the sample about its own mean, and w (x - m)^2 of the row
    # furthest from s. If the inequality fails for a feature, a second pass uses s = m. For normal
    # rows in random order and unit weights, the inequality fails if s is more than about eight
    # standard errors (of the sample mean) from m.
    # A block whose float32 products would overflow or underflow is reduced in float64.
    n, d = len(rows) if index is None else len(index), rows.shape[1]
    shift, weight_sum = sample.shift, sample.block_weight
    offset = shift - reference
    by_matrix = len(values) >= MATRIX_PRODUCT_FROM
    block = row_kernels.Block(
        rows, index, weight, shift, offset, codes, n_codes, values[:0] if by_matrix else values,
        part_rows(d, rows.itemsize),
    )  # fmt: skip
    least_weight, largest_weight = (1.0, 1.0) if weight is None else (weight.min(), weight.max())
    memory.reduce(block)
    weights = weight_sum, least_weight, largest_weight
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
    """Compute products = values (rows - shift + offset) in place and in float64."""
    # SciPy's BLAS computes this product, as it computes all others of rows: idle threads of a
    # second BLAS, that of NumPy, would occupy processors.
    import splince_fast._kernels.blas as blas_kernels

    np.multiply(values.sum(axis=1)[:, None], offset, out=products)
    step, n = 512, values.shape[1]
    columns = np.ascontiguousarray(values.T)
    centred = np.empty((min(step, n), rows.shape[1]))
    for start in range(0, n, step):
        part = centred[: n - start]
        np.subtract(rows_of(rows, index, start, start + step), shift, out=part)
        blas_kernels.gemm_f64_into(columns[start : start + step], part, products)
