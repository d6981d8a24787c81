"""Memory size of the machine or container, and arrays aligned to cache lines."""

from __future__ import annotations

import contextlib
import math
import os
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_LINE = 64  # bytes per cache line


@cache
def total_memory() -> int | None:
    """Return the memory size of the machine or container in bytes; None if unknown."""
    # The size includes memory that is in use, so that decisions based on it are reproducible.
    sizes = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not a POSIX system
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _LIMITS:
        try:
            sizes.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # the file does not exist, or holds "max" for no limit
    return min((size for size in sizes if size > 0), default=None)


def aligned(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return an uninitialised float64 array whose memory begins at a cache line."""
    size = math.prod(shape)
    memory = np.empty(size + _LINE // 8)
    start = -memory.ctypes.data % _LINE // 8
    return memory[start : start + size].reshape(shape)
