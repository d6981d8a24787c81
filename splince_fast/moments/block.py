"""A block of labelled rows: the buffer in which it fills, and its reduction to sums in parallel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._kernels.row_kernels import Assignment, Call, Change, add
from splince_fast._runtime import threads
from splince_fast._runtime.memory import aligned
from splince_fast._runtime.rows import check_values
from splince_fast.labels import VariableName

Float = NDArray[np.float64]
Codes = NDArray[np.intp]
# Encoded labels of n rows: class codes, (n,) intp, with -1 for missing labels; or values, (n, k)
# float64, with NaN for missing labels.
Labels = NDArray[Any]

# Least numbers of elements per thread for centring and for sums: starting a thread for fewer takes
# more time than the thread saves.
_GRAIN, _GRAIN_OF_SUMS = 1 << 20, 3 << 17
# Least width, in bytes, of a stripe, the columns that one thread centres: narrower stripes take up
# to 1.5 times as long. With more than `_FEW_THREADS` threads, `Centred` uses narrower stripes.
_PAGE, _FEW_THREADS = 4096, 2
_LINE = 64  # bytes of a cache line
# Rows per matrix product of `Gram`. With more rows, float32 sums lose precision; with fewer rows,
# memory traffic increases.
_CHUNK_ROWS = 256
# `Gram` reduces a block on one thread if it takes fewer than this number of multiplications, n d^2.
_GRAIN_PRODUCTS = 1 << 26
# Least number of threads per stripe in `Gram`, where centring takes a tenth of the time.
_THREADS_PER_STRIPE = 4
# Bytes of a part: consecutive rows of a block that stay in the second-level cache of a processor
# between centring and the sums per class.
_PART_BYTES = 1 << 20
# Angles by which the kernel rotates pairs of rows; the product of the block with itself does not
# depend on the angles. Without rotation, rows with few distinct values would have equal products,
# whose rounding errors add up. Multiples of the golden angle are well separated.
_ANGLES = np.arange(256) * (np.pi * (3.0 - 5.0**0.5))
_ROTATIONS = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
# Rows of padding after each panel (the columns of a chunk that fill one register), against
# conflicts in a set-associative cache.
_GAP_ROWS = 4
# A block needs a second pass if (mean - shift)^2 exceeds this multiple of the variance in a column.
_EXCESS = 4.0
# At or above this number of label columns, GEMM is faster than the row kernel.
MATRIX_PRODUCT_FROM = 8
# All values of a block with weights of at least 1 are valid if the sum of squares of each feature
# about a point is at most this, and no coordinate of the point is larger.
_LARGEST_SQUARES, _LARGEST_SHIFT = 1e280, 1e140
# Largest number of segments (see `_segment_rows`) of a block: a few threads saturate the memory
# bandwidth. It is odd because the first of two threads starts earlier, and sums one segment more.
_MOST_SEGMENTS = 7
# Least number of columns per task, a multiple of 16.
_LEAST_COLUMNS = 192
# A row with a sum of squares of at most this is finite, and valid in float32 and float64.
_LARGEST_ROW = 1e38


@dataclass(slots=True)
class Block:
    """Rows with their weights and labels: n rows of an array, by default all rows."""

    n: int
    rows: NDArray[Any]  # (m, d)
    weight: Float | None  # (n,); None for unit weights
    labels: dict[VariableName, Labels] = field(default_factory=dict)
    index: Codes | None = None  # (n,): positions in `rows`; None for all rows

    def slice(self, start: int, stop: int) -> Block:
        if start == 0 and stop == self.n:
            return self
        return Block(
            stop - start,
            self.rows[start:stop] if self.index is None else self.rows,
            None if self.weight is None else self.weight[start:stop],
            {name: labels[start:stop] for name, labels in self.labels.items()},
            None if self.index is None else self.index[start:stop],
        )

    def array(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return the rows `start` to `stop` - 1, (stop - start, d)."""
        return self.rows[start:stop] if self.index is None else self.rows[self.index[start:stop]]

    def copy_rows(self, out: NDArray[Any]) -> None:
        """Copy the n rows to `out`, an (n, d) array of any dtype."""
        rows, index = self.rows, self.index
        if index is None:
            out[...] = rows
        elif rows.dtype == out.dtype and rows.flags.c_contiguous and rows.flags.aligned:
            np.take(rows, index, axis=0, out=out, mode="clip")
        else:
            out[...] = rows[index]


class LabelSums(NamedTuple):
    """Sums of the labels of one variable over a block, and the sums of x that they need."""

    codes: Codes | None  # (n,): number of the class sum of each row; -1 for none
    weights: Float  # (c,): weight sum of each class sum of x
    values: Float  # (q, n): for q products with x, coefficient times weight of each row
    data: tuple[Any, ...]  # sums of the labels, by kind of variable


@dataclass(slots=True)
class BlockSums:
    """Sums of the rows x of one block about a point `shift`."""

    n_rows: int
    weight_sum: float
    shift: Float  # (d,)
    total: Float  # (d,): sum w (x - shift)
    squares: Float  # (d,): sum w (x - mean)^2, or an estimate of it; NaN if it is unknown
    class_sums: Float  # (c, d): sums w (x - shift) of the rows of each class
    products: Float  # (q, d): products of the label columns with x - shift
    # The scatter about the shift is `product`; if that is None, it is shifted^T shifted.
    shifted: NDArray[Any] | None = None  # (m, d): rows sqrt(w) (x - shift), each pair rotated
    product: NDArray[Any] | None = None  # (m, m), m >= d, Fortran-ordered; lower triangle valid


class Centred:
    """Work memory for the centred rows of a block, of which BLAS computes the scatter."""

    def __init__(self, out: NDArray[Any], product: NDArray[Any] | None = None) -> None:
        # `product`, (d, d), Fortran-ordered, is memory for the product of float32 rows. The product
        # of float64 rows is added to the state without memory of its own.
        self.shifted, self.product = out, product

    def reduce(self, block: row_kernels.Block) -> None:
        """Centre the rows of a block, where each thread centres a range of columns."""
        n, d = block.n, self.shifted.shape[1]
        out = self.shifted = self.shifted[: buffer_rows(n)]

        def work(first: int, last: int) -> None:
            row_kernels.centre_columns(block, _ROTATIONS, out, first, last)

        grain = max(16, _GRAIN // n)
        if d >= 2 * grain and threads.thread_count() <= _FEW_THREADS:
            grain = max(grain, _PAGE // out.itemsize)
        threads.split(work, d, grain=grain, align=16)

    def multiply(self) -> None:
        if self.product is not None:
            import splince_fast._kernels.blas as blas_kernels

            blas_kernels.syrk_f32_out(self.shifted, self.product)


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
    def __init__(self) -> None:
        self._memory: Float = np.empty(0)
        self.grams: dict[tuple[int, np.dtype[np.generic]], Gram] = {}
        # rows per block for which memory is allocated, by width and dtype
        self.capacities: dict[tuple[int, np.dtype[np.generic]], int] = {}

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def reserve(self, block_rows: int, width: int, dtype: np.dtype[np.generic]) -> None:
        numbers = buffer_rows(block_rows) * width + (dtype == np.float32) * width**2
        size, gram = -(-numbers * dtype.itemsize // 8), None
        # BLAS adds float64 products to the state, without memory for a product that would be larger
        # than a block.
        if row_kernels.wide() and (dtype == np.float32 or width <= block_rows):
            gram = Gram(block_rows, width, dtype)
            size = gram.size
        if self._memory.size < size:
            self._memory = np.empty(size)
            self.capacities.clear()
        if gram is not None:
            self.grams[width, dtype] = gram.set_memory(self._memory)

    def centred(self, n: int, width: int, dtype: np.dtype[np.generic]) -> Centred:
        """Return the argument `memory` of `reduce_block` for n rows, if no `Gram` is used."""
        rows, flat, product = buffer_rows(n), self._memory.view(dtype), None
        if dtype == np.float32:
            product, flat = flat[: width**2].reshape(width, width).T, flat[width**2 :]
        return Centred(flat[: rows * width].reshape(rows, width), product)


@lru_cache(maxsize=64)
def part_rows(width: int, itemsize: int) -> int:
    """Return the number of rows per part: consecutive rows of a block that fit into the cache."""
    # The number depends on width and dtype alone, so that results are reproducible.
    return min(512, max(64, _PART_BYTES // (width * itemsize))) // 4 * 4


def buffer_rows(block_rows: int) -> int:
    """Return `block_rows` rounded up to a multiple of 4, as the kernel requires."""
    return -(-block_rows // 4) * 4


def reduce_block(
    block: Block, codes: Codes, n_codes: int, values: Float, memory: Centred | Gram
) -> BlockSums:
    """Return the sums of a block, in one pass unless precision requires a second."""
    # `codes`, (v, n), are the numbers of the class sums of each row for v variables, or -1;
    # `values`, (q, n), are label columns multiplied by the weights.
    # The shift s is the mean of a sample of about 4 sqrt(n) rows. With block mean m, weight sum W
    # and r = m - s, sum w (x - m)^2 = sum w (x - s)^2 - W r^2 loses little precision if W r^2 <=
    # 4 V for a lower bound V of the left side: the sum of squares of the sample about its own mean,
    # or w (x - m)^2 of the row furthest from s. If this fails for a feature, a second pass uses
    # s = m. For normal rows in random order and unit weights, it fails if s is more than about
    # eight standard errors (of the sample mean) from m.
    # A block whose float32 products would overflow or underflow is reduced in float64.
    rows, weight, index, n = block.rows, block.weight, block.index, block.n
    stride = math.ceil(n**0.5 / 4)
    shift, squares = row_kernels.sample_columns(rows, index, weight, stride)
    weight_sum, least, largest, sampled = float(n), 1.0, 1.0, float(-(-n // stride))
    if weight is not None:
        weight_sum, sampled = float(weight.sum()), float(weight[::stride].sum())
        least, largest = float(weight.min()), float(weight.max())
    by_matrix = len(values) >= MATRIX_PRODUCT_FROM
    reduced = row_kernels.Block(
        rows, index, weight, shift, codes, n_codes, values[:0] if by_matrix else values,
        part_rows(rows.shape[1], rows.itemsize),
    )  # fmt: skip
    memory.reduce(reduced)
    needs_check, off_centre, needs_float64 = reduced.check_sums(
        squares, weight_sum, least, largest, _EXCESS
    )
    if needs_check:
        check_values(block.array())
    if off_centre:
        shift += reduced.total / weight_sum
        memory.reduce(reduced)
        needs_float64 = reduced.check_sums(squares, weight_sum, least, largest, np.inf)[2]
    if rows.dtype == np.float32 and needs_float64:
        wide = Block(n, block.array().astype(np.float64), weight)
        float64_memory = Centred(np.empty((buffer_rows(n), rows.shape[1])))
        return reduce_block(wide, codes, n_codes, values, float64_memory)
    if isinstance(memory, Centred):
        memory.multiply()
    products = label_products(block, values, shift) if by_matrix else reduced.products
    return BlockSums(
        n, weight_sum, shift, reduced.total, squares * (weight_sum / sampled), reduced.class_sums,
        products, memory.shifted, memory.product,
    )  # fmt: skip


def label_products(block: Block, values: Float, shift: Float) -> Float:
    """Return values (x - shift), (q, d), by matrix products in float64."""
    # by SciPy's BLAS: idle threads of a second BLAS, that of NumPy, would occupy processors
    import splince_fast._kernels.blas as blas_kernels

    products = np.zeros((len(values), len(shift)))
    step, n = 512, values.shape[1]
    columns = np.ascontiguousarray(values.T)
    centred = np.empty((min(step, n), len(shift)))
    for start in range(0, n, step):
        part = centred[: n - start]
        np.subtract(block.array(start, start + step), shift, out=part)
        blas_kernels.gemm_f64_into(columns[start : start + step], part, products)
    return products


def sum_block(given: Block, shift: Float, codes: Codes, n_codes: int, values: Float) -> BlockSums:
    """Return the sums of a block; raise the error of :func:`check_values` for invalid rows."""
    n, rows, weight, index = given.n, given.rows, given.weight, given.index
    d, by_matrix = rows.shape[1], len(values) >= MATRIX_PRODUCT_FROM
    columns = values[:0] if by_matrix else values
    segment = _segment_rows(n, d, n_codes + len(columns) + 2)
    n_segments, n_pieces = -(-n // segment), 1
    block = row_kernels.Block(rows, index, weight, shift, codes, n_codes, columns, segment)
    if n_segments == 1:
        least = max(_LEAST_COLUMNS, _GRAIN_OF_SUMS // n)
        n_pieces = max(1, min(d // least, threads.thread_count()))
    piece_width = -(-d // (n_pieces * _LEAST_COLUMNS)) * _LEAST_COLUMNS
    parts = np.empty((n_segments, *block.sums.shape))
    scratch, counter = aligned((n_segments, 3, -(-d // 8) * 8)), np.zeros(1, np.int64)

    def work(first: int, last: int) -> None:
        row_kernels.sum_block(block, piece_width, parts, scratch, counter)

    threads.split(work, max(n_segments, n_pieces), grain=1)
    with np.errstate(over="ignore", invalid="ignore"):  # the check below reports overflow
        block.sums[...] = functools.reduce(np.add, parts)  # fixed order: reproducible sums
    least_weight = 1.0 if weight is None else min(1.0, weight.min())
    is_small = np.abs(shift).max() <= _LARGEST_SHIFT  # false for NaN, too
    if not (is_small and block.squares.max() <= _LARGEST_SQUARES * least_weight):
        check_values(given.array())
    weight_sum = float(n) if weight is None else float(weight.sum())
    products = label_products(given, values, shift) if by_matrix else block.products
    return BlockSums(n, weight_sum, shift, block.total, block.squares, block.class_sums, products)


@lru_cache(maxsize=64)
def _segment_rows(n: int, d: int, n_sums: int) -> int:
    """Return the number of rows per segment, a multiple of 4."""
    # A segment is a range of rows with its own sums, so that threads can sum several in parallel;
    # their number depends on shapes alone, for reproducible results. Threads split the columns of a
    # single segment.
    count = max(1, min(_MOST_SEGMENTS, n * d // _GRAIN_OF_SUMS, n // (16 * n_sums)))
    return -(-n // (4 * count)) * 4


class Buffer:
    """Memory for the labelled rows of a block that is not full yet."""

    # A buffer has one dtype, and rows of a narrower dtype are converted when they are added.
    # Rows are written beyond position `filled`; a change of `filled` then adds them.

    def __init__(
        self, capacity: int, width: int, dtype: Any, empty: Callable[..., Any] | None = None
    ) -> None:
        # `empty(shape, dtype=)` returns memory: an array, or a tensor if `dtype` is a torch dtype.
        self.filled = 0
        self._weight: Float | None = None  # (capacity,)
        self._labels: dict[VariableName, Labels] = {}  # (capacity, ...) by variable
        # (capacity, d): memory for the rows; rows from position `filled` on are unused
        self.rows: NDArray[Any] = (empty or np.empty)((capacity, width), dtype=dtype)

    @property
    def nbytes(self) -> int:
        arrays = [self.rows, self._weight, *self._labels.values()]
        return sum(a.nbytes for a in arrays if a is not None)

    def copy(self) -> Buffer:
        capacity, width = self.rows.shape
        result = Buffer(capacity, width, self.rows.dtype)
        add(result.appended(self.contents(), 0))
        return result

    def appended(self, block: Block, start: int) -> list[Change]:
        """Return the changes that make a block the rows from position `start` on."""
        # `start` is `filled`, or 0 if earlier changes empty the buffer.
        changes: list[Change] = []
        if start < self.filled:  # these rows are in use until the changes are applied
            rows = np.empty((block.n, self.rows.shape[1]), self.rows.dtype)
            block.copy_rows(rows)
            changes.append(Call(self.rows[: block.n].__setitem__, ..., rows))
        else:
            block.copy_rows(self.rows[start : start + block.n])
        weight, labels = self._written(block, start)
        filled = start + block.n
        changes.append(Assignment(self, {"filled": filled, "_weight": weight, "_labels": labels}))
        return changes

    def completed(self, block: Block) -> tuple[Block, Change]:
        """Return the buffered rows with a block that fills the buffer, and a change to empty it."""
        block.copy_rows(self.rows[self.filled :])
        weight, labels = self._written(block, self.filled)
        return Block(len(self.rows), self.rows, weight, labels), self.emptied()

    def emptied(self) -> Change:
        return Assignment(self, {"filled": 0, "_weight": None, "_labels": {}})

    def _written(self, block: Block, start: int) -> tuple[Float | None, dict[VariableName, Labels]]:
        """Return the weights and labels of the buffer with those of a block from `start` on."""
        capacity, stop, continues = len(self.rows), start + block.n, start == self.filled
        weight = self._weight if continues else None
        if block.weight is not None and weight is None:
            weight = np.ones(capacity)
        if weight is not None:
            weight[start:stop] = 1.0 if block.weight is None else block.weight
        labels = dict(self._labels) if continues else {}
        for name in labels.keys() - block.labels.keys():
            labels[name][start:stop] = missing_label(labels[name])
        for name, added in block.labels.items():
            if name not in labels:
                shape = capacity, *added.shape[1:]
                labels[name] = np.full(shape, missing_label(added), added.dtype)
            labels[name][start:stop] = added
        return weight, labels

    def append_row(self, X: NDArray[np.generic], codes: Mapping[VariableName, int]) -> bool:
        """Append a row X, (1, d), with a class code for every variable of the buffered rows."""
        # False changes nothing: the row is not finite or has another shape or dtype, completes a
        # block, or the buffer is empty, holds weights or has other variables.
        start, rows = self.filled, self.rows
        if (
            not 0 < start < len(rows) - 1
            or self._weight is not None
            or X.shape != (1, rows.shape[1])
            or X.dtype != rows.dtype
            or codes.keys() != self._labels.keys()
        ):
            return False
        row = rows[start]
        row[:] = X[0]
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.dot(row, row) <= _LARGEST_ROW:  # `not <=` is true for NaN, too
                return False
        for name, code in codes.items():
            self._labels[name][start] = code
        self.filled = start + 1
        return True

    def contents(self) -> Block:
        stop = self.filled
        labels = {name: labels[:stop] for name, labels in self._labels.items()}
        weight = None if self._weight is None else self._weight[:stop]
        return Block(stop, self.rows[:stop], weight, labels)


def missing_label(labels: Labels) -> float:
    """Return the missing label of an array of labels: NaN for values, -1 for class codes."""
    return np.nan if labels.dtype.kind == "f" else -1
