"""Moments of every level of a seed, from one reading of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation._pages import BLOCK, gathered
from splince_fast.moments import Moments

_MOST_LEVELS = 62  # bits of a signature


def level_moments(
    X: NDArray[Any], labels: Mapping[str, Any], parts: Sequence[NDArray[np.intp]]
) -> list[Moments]:
    """Moments of several overlapping sets of rows, every row read at most once.

    Rows that belong to the same sets are one piece with moments of its own; those of a set are
    the merge of its pieces.

    Parameters
    ----------
    X : (n, d)
    labels : mapping of name to a column of n entries
    parts : sequence of row numbers
    """
    if len(parts) > _MOST_LEVELS:
        half = len(parts) // 2
        return level_moments(X, labels, parts[:half]) + level_moments(X, labels, parts[half:])
    signature = np.zeros(len(X), dtype=np.int64)
    for bit, rows in enumerate(parts):
        signature[rows] |= 1 << bit
    merged: list[Moments | None] = [None] * len(parts)
    for value in np.unique(signature[signature > 0]).tolist():
        rows = np.flatnonzero(signature == value)
        piece = Moments()
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            chosen = {name: column[block] for name, column in labels.items()}
            piece.update(gathered(X, block), chosen)
        for bit in range(len(parts)):
            if value >> bit & 1:
                known = merged[bit]
                merged[bit] = piece.copy() if known is None else known + piece
    return [Moments() if moments is None else moments for moments in merged]
