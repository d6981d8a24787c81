"""Work memory of blocks, and the pass of a block through it: centred, or centred and multiplied."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads

Float = NDArray[np.float64]

# Fewer elements per thread cost more in starting it than they save.
_GRAIN = 1 << 20
# Hardware prefetching follows rows within a page: stripes narrower than a page take up to 1.5 times
# as long. More than this number of threads gain from them nonetheless, while BLAS threads spin.
_PAGE, _FEW_THREADS = 4096, 2
_LINE = 64  # bytes of a cache line
# Rows per float32 product: longer sums lose digits, shorter ones are read and written more often.
_CHUNK_ROWS = 256
# Fewer multiplications per thread cost more in starting it than they save.
_GRAIN_PRODUCTS = 1 << 26
# Threads for each stripe that is centred: centring takes about a tenth of the time of one thread,
# so that fewer stripes than threads suffice.
_THREADS_PER_STRIPE = 4
# A part of a block fits in a processor's second-level cache.
_PART_BYTES = 1 << 20
# Rotation angles of row pairs: multiples of the golden angle are well separated.
_ANGLES = np.arange(256) * (np.pi * (3.0 - 5.0**0.5))
_ROTATIONS = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
# Padding between panels, against conflicts in a set-associative cache.
_GAP_ROWS = 4


class Centred:
    """Memory in which the rows of a block are centred, for BLAS to multiply.

    Parameters
    ----------
    out : ndarray of shape (at least n rounded up to a multiple of 4, d), dtype of the rows
    """

    product = None

    def __init__(self, out: NDArray[Any]) -> None:
        self.shifted = out

    def reduce(self, block: row_kernels.Block) -> None:
        """Call `centre_columns` in stripes, over threads."""
        n, d = block.n, self.shifted.shape[1]
        out = self.shifted = self.shifted[: buffer_rows(n)]
        if len(out) < n:
            raise RuntimeError("the work buffer has no room for the block")

        def work(first: int, last: int) -> None:
            row_kernels.centre_columns(block, _ROTATIONS, out, first, last)

        grain = max(16, _GRAIN // n)
        if d >= 2 * grain and threads.thread_count() <= _FEW_THREADS:
            grain = max(grain, _PAGE // out.itemsize)
        threads.split(work, d, grain=grain, align=16)


class Gram:
    """Memory in which blocks are centred and multiplied in one pass, chunk by chunk.

    Parameters
    ----------
    block_rows, width : int
        Rows and features d of most blocks.
    dtype : dtype
        float32 or float64, that of the rows.

    Attributes
    ----------
    size : int
        Size of the memory that `place` needs, in float64 numbers.
    """

    shifted = None

    def __init__(self, block_rows: int, width: int, dtype: np.dtype[Any]) -> None:
        self._width, self._dtype = width, dtype
        self._lanes = lanes = row_kernels.register_width(dtype.itemsize)
        self._chunk = min(_CHUNK_ROWS, buffer_rows(block_rows))
        self._padded = padded = -(-width // lanes) * lanes
        numbers = (2 * (self._chunk + _GAP_ROWS) + padded) * padded
        self.size = -(-numbers * dtype.itemsize // 8) + _LINE // 8

    def place(self, memory: Float) -> Gram:
        """Use this memory, of float64, which may be overwritten between two blocks."""
        padded, n_panels = self._padded, 2 * self._padded // self._lanes
        start = -memory.ctypes.data % _LINE // 8
        flat: NDArray[Any] = memory[start:].view(self._dtype)
        end = 2 * (self._chunk + _GAP_ROWS) * padded
        self._panels = flat[:end].reshape(n_panels, -1)
        self._product = flat[end : end + padded**2].reshape(padded, padded)
        self.product = self._product.T
        return self

    @staticmethod
    def serves(block_rows: int, width: int, dtype: np.dtype[Any]) -> bool:
        """Whether products of such rows are computed here rather than by BLAS.

        The processor has to have wide registers. The product of rows of float64, which BLAS adds
        to the state where it is, must not take more memory than a block.
        """
        return row_kernels.wide() and (dtype == np.float32 or width <= block_rows)

    def reduce(self, block: row_kernels.Block) -> None:
        """Call `reduce_chunks` in every thread."""
        n, d = block.n, self._width
        count = threads.thread_count() if n * d * d >= _GRAIN_PRODUCTS else 1
        stripe = max(_PAGE // self._dtype.itemsize, -(-d // max(1, count // _THREADS_PER_STRIPE)))
        stripe = -(-stripe // self._lanes) * self._lanes
        counters = np.zeros((-(-n // self._chunk) + 1, 16), np.int64)

        def work(first: int, last: int) -> None:
            row_kernels.reduce_chunks(
                block, _ROTATIONS, self._chunk, stripe, self._panels, self._product, counters
            )

        threads.split(work, count, grain=1)


class Workspace:
    """Memory in which blocks are reduced; solves borrow it in between.

    Attributes
    ----------
    capacities : dict
        Rows of a block, by width and dtype, for which there is room.
    product : ndarray of float32, shape (d, d), or None
        Takes the product of a block of float32 rows with itself, unless a :class:`Gram` does.
    """

    def __init__(self) -> None:
        self._memory: NDArray[np.float64] = np.empty(0)
        self._grams: dict[tuple[int, np.dtype[Any]], Gram] = {}
        self.product: NDArray[np.float32] | None = None
        self.capacities: dict[tuple[int, np.dtype[Any]], int] = {}
        self._borrowed = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + (0 if self.product is None else self.product.nbytes)

    def reserve(self, block_rows: int, width: int, dtype: np.dtype[Any]) -> None:
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

    def for_block(self, n: int, width: int, dtype: np.dtype[Any]) -> Centred | Gram:
        """The memory in the form that `reduce_block` needs for n rows."""
        gram = self._grams.get((width, dtype))
        if gram is not None:
            return gram
        rows = buffer_rows(n)
        flat: NDArray[Any] = self._memory.view(dtype)
        return Centred(flat[: rows * width].reshape(rows, width))

    @contextmanager
    def borrowed(self, size: int) -> Iterator[Float]:
        """Memory for `size` float64 numbers: this one if it is large enough and free, else new.

        Fresh memory for a large factorisation costs page faults, and the job its peak.
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
    """Rows of a part: a function of shape and dtype alone, so that results are reproducible."""
    return min(512, max(64, _PART_BYTES // (width * itemsize))) // 4 * 4


def buffer_rows(block_rows: int) -> int:
    """Rows of a work buffer for a block, a multiple of 4 as the kernel needs."""
    return -(-block_rows // 4) * 4
