"""Moments of every level of a seed, from one reading of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation._pages import BLOCK, gathered
from splince_fast.labels import ClassCodes, Columns, Encoded
from splince_fast.moments import Moments

Part = tuple[NDArray[np.intp], NDArray[np.float64] | None]  # row numbers, and weights if not 1


def level_moments(
    X: NDArray[Any], labels: Mapping[str, Encoded], parts: Sequence[Part]
) -> list[Moments]:
    """Moments of several overlapping sets of rows, every row read at most once.

    Rows that have the same weight in every set, 0 where they are not in it, are one piece with
    moments of its own; those of a set are the merge of its pieces, each times its weight.

    Parameters
    ----------
    X : (n, d)
    labels : mapping of name to ClassCodes or Columns of n entries
    parts : sequence of (row numbers, positive weights)
    """
    pieces = _pieces(len(X), parts)
    merged: list[Moments | None] = [None] * len(parts)
    for rows, weights in pieces:
        piece = Moments()
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            chosen = {name: _of_rows(column, block) for name, column in labels.items()}
            piece.update(gathered(X, block), chosen)
        for i in np.flatnonzero(weights).tolist():
            weighted = piece.copy() if weights[i] == 1.0 else piece.scaled(float(weights[i]))
            known = merged[i]
            merged[i] = weighted if known is None else known + weighted
    return [Moments() if moments is None else moments for moments in merged]


def _of_rows(column: Encoded, rows: NDArray[np.intp]) -> Encoded:
    """Some rows of a column; of its classes only those that occur among them."""
    if isinstance(column, Columns):
        present = None if column.present is None else column.present[rows]
        return Columns(column.columns, column.values[rows], present)
    codes = column.codes[rows]
    seen, local = np.unique(codes, return_inverse=True)
    absent = int(len(seen) > 0 and seen[0] < 0)  # the first code is -1, a missing label
    return ClassCodes(tuple(column.classes[code] for code in seen[absent:]), local - absent)


def _pieces(n: int, parts: Sequence[Part]) -> list[tuple[NDArray[np.intp], NDArray[np.float64]]]:
    """Rows of each piece, ascending, and its weight in every part."""
    codes = np.zeros(n, dtype=np.int64)
    by_part = []
    for rows, weights in parts:
        own = np.zeros(n)
        own[rows] = 1.0 if weights is None else weights
        levels, local = np.unique(own, return_inverse=True)
        _, codes = np.unique(codes * len(levels) + local, return_inverse=True)
        by_part.append(own)
    order = np.argsort(codes, kind="stable")
    firsts = np.searchsorted(codes[order], np.arange(int(codes.max(initial=-1)) + 1))
    pieces = []
    for rows in np.split(order, firsts[1:]):
        weights_of = np.array([own[rows[0]] for own in by_part])
        if weights_of.any():
            pieces.append((rows, weights_of))
    return pieces
