"""Arrays aligned to cache lines."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_LINE = 64  # bytes per cache line


def aligned(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return an uninitialised float64 array whose memory begins at a cache line."""
    size = math.prod(shape)
    memory = np.empty(size + _LINE // 8)
    start = -memory.ctypes.data % _LINE // 8
    return memory[start : start + size].reshape(shape)
