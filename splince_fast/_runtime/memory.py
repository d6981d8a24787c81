"""Memory: the most that this process may have, and arrays that begin at a cache line."""

from __future__ import annotations

import contextlib
import math
import os
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_LINE = 64  # bytes of a cache line


@cache
def total_memory() -> int | None:
    """Bytes of memory of the machine, or of the container; None where neither is known.

    Free memory does not count: the same run gives the same result twice.
    """
    found = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no POSIX system
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _LIMITS:
        try:
            found.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # there is no such limit, or it is "max"
    return min((size for size in found if size > 0), default=None)


def aligned(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Uninitialised float64 memory that begins at a cache line."""
    size = math.prod(shape)
    memory = np.empty(size + _LINE // 8)
    start = -memory.ctypes.data % _LINE // 8
    return memory[start : start + size].reshape(shape)
