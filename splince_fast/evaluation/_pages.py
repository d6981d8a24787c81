"""Rows read from memory maps block by block, their pages let go behind the reader.

Pages of a map that were read count as resident memory of the process until the system wants them
back; with several processes over one large file they are counted, and may crowd, several times.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 12  # rows that are read at a time
_SCATTERED = 1 << 6  # rows here and there: the system maps up to 2 MiB around each of them


def slices(X: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """(start, rows) of consecutive blocks.

    Parameters
    ----------
    X : (n, d)
    """
    for start in range(0, len(X), BLOCK):
        yield start, X[start : start + BLOCK]
        release(X)


def gathered(X: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """X[rows] as float64, without a copy in between.

    Parameters
    ----------
    X : (n, d)
    rows : (m,) row numbers
    """
    taken = np.empty((len(rows), X.shape[1]))
    if _map_of(X) is None:
        for start in range(0, len(rows), BLOCK):
            taken[start : start + BLOCK] = X[rows[start : start + BLOCK]]
        return taken
    order = np.argsort(rows, kind="stable")  # as they lie in the file
    for start in range(0, len(rows), _SCATTERED):
        chosen = order[start : start + _SCATTERED]
        taken[chosen] = X[rows[chosen]]
        release(X)
    return taken


def release(X: NDArray[Any]) -> None:
    """Let go of the pages of a map that were read; they are read again where they are wanted.

    Parameters
    ----------
    X : (n, d)
        A map, a view of one, or an array in memory, for which nothing is done.
    """
    found = _map_of(X)
    if found is not None:
        found.madvise(mmap.MADV_DONTNEED)


def _map_of(X: NDArray[Any]) -> Any:
    """The map behind an array; None for one in memory, or in mode "c", whose changes would go."""
    array: Any = X
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array.mode == "c":
            return None
        array = array.base
    return array if isinstance(array, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") else None
