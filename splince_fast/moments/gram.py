"""The pass of a block through memory and threads: centred for BLAS, or centred and multiplied."""

from __future__ import annotations

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
    memory : ndarray of float64, of `size`
        It may be overwritten between two blocks.
    """

    shifted = None

    def __init__(self, block_rows: int, width: int, dtype: np.dtype[Any], memory: Float) -> None:
        self._width, self._itemsize = width, dtype.itemsize
        self._chunk, whole, self._lanes = self._shape(block_rows, width, dtype)
        padded = whole * self._lanes
        start = -memory.ctypes.data % _LINE // 8
        flat: NDArray[Any] = memory[start:].view(dtype)
        n_panels = 2 * (self._chunk + _GAP_ROWS) * padded
        self._panels = flat[:n_panels].reshape(2 * whole, -1)
        self._product = flat[n_panels : n_panels + padded**2].reshape(padded, padded)
        self.product = self._product.T

    @staticmethod
    def _shape(block_rows: int, width: int, dtype: np.dtype[Any]) -> tuple[int, int, int]:
        """Rows per chunk, number of panels, and lanes of a register."""
        lanes = row_kernels.register_width(dtype.itemsize)
        return min(_CHUNK_ROWS, buffer_rows(block_rows)), -(-width // lanes), lanes

    @classmethod
    def size(cls, block_rows: int, width: int, dtype: np.dtype[Any]) -> int:
        """Size of the memory, in float64 numbers."""
        chunk, whole, lanes = cls._shape(block_rows, width, dtype)
        padded = whole * lanes
        return -(-(2 * (chunk + _GAP_ROWS) + padded) * padded * dtype.itemsize // 8) + _LINE // 8

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
        stripe = max(_PAGE // self._itemsize, -(-d // max(1, count // _THREADS_PER_STRIPE)))
        stripe = -(-stripe // self._lanes) * self._lanes
        counters = np.zeros((-(-n // self._chunk) + 1, 16), np.int64)

        def work(first: int, last: int) -> None:
            row_kernels.reduce_chunks(
                block, _ROTATIONS, self._chunk, stripe, self._panels, self._product, counters
            )

        threads.split(work, count, grain=1)


@lru_cache(maxsize=64)
def part_rows(width: int, itemsize: int) -> int:
    """Rows of a part: a function of shape and dtype alone, so that results are reproducible."""
    return min(512, max(64, _PART_BYTES // (width * itemsize))) // 4 * 4


def buffer_rows(block_rows: int) -> int:
    """Rows of a work buffer for a block, a multiple of 4 as the kernel needs."""
    return -(-block_rows // 4) * 4
