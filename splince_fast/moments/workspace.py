"""Memory that an accumulator works in: made once, and lent to the solves meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.moments.state import buffer_rows

Float = NDArray[np.float64]


class Workspace:
    """Work arrays for blocks of one size and dtype.

    Attributes
    ----------
    shifted : ndarray of shape (n rounded up to a multiple of 4, d)
        A block that was shifted towards its mean.
    product : ndarray of float32, shape (d, d), or None
        Its product with itself, where that is taken in float32.
    """

    def __init__(self, block_rows: int, width: int, dtype: np.dtype[Any]) -> None:
        self.shifted = np.empty((buffer_rows(block_rows), width), dtype)
        self.product: NDArray[np.float32] | None = None
        if dtype == np.float32:
            self.product = np.empty((width, width), np.float32, order="F")
        self._lent = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self.shifted.nbytes + (0 if self.product is None else self.product.nbytes)

    @contextmanager
    def lent(self, size: int) -> Iterator[Float]:
        """Memory for `size` float64 numbers: `shifted` if it is large enough and not lent, or new.

        Fresh memory for a large factorisation costs page faults, and the job its peak.
        """
        if self.shifted.nbytes < 8 * size or not self._lent.acquire(blocking=False):
            yield np.empty(size)
            return
        try:
            yield self.shifted.reshape(-1).view(np.float64)[:size]
        finally:
            self._lent.release()
