"""Rows and labels of a comparison: reading, checks, fingerprint, and moments of every level."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import sources
from splince_fast._runtime.arrays import as_rows, check_values
from splince_fast.evaluation._pages import BLOCK, gathered, release, slices
from splince_fast.exceptions import InputError
from splince_fast.labels import ClassCodes, Columns, Encoded
from splince_fast.moments import Moments

Part = tuple[NDArray[np.intp], NDArray[np.float64] | None]  # row numbers, and weights if not 1

_WHOLE_HASH = 1 << 28
_SAMPLED_ROWS = 1 << 16


def check_rows(rows: NDArray[Any]) -> None:
    """Refuse NaN and infinity, block by block."""
    for _, block in slices(rows):
        try:
            check_values(block, "X")
        except InputError:
            check_values(rows, "X")  # names the rows of the whole
            raise


def read_rows(X: Any) -> NDArray[Any]:
    """Rows of shape (n, d) from an array, frame, tensor, or a .npy or .parquet file."""
    if isinstance(X, str | os.PathLike):
        path = Path(X)
        if path.suffix == ".npy":
            try:
                return as_rows(np.load(path, mmap_mode="r", allow_pickle=False))
            except (ValueError, EOFError) as error:
                raise InputError(
                    f"{str(path)!r} cannot be read as a .npy array: {error}. It may be truncated, "
                    "of another format, or hold Python objects"
                ) from error
        if path.suffix != ".parquet":
            raise InputError(f"{str(path)!r} is neither a .npy nor a .parquet file")
        try:
            X = sources.from_parquet(path, embedding="embedding")
        except InputError as error:
            error.add_note(
                "compare reads the column 'embedding'; for another pass "
                f"splince_fast.sources.from_parquet({str(path)!r}, COLUMN)"
            )
            raise
    if isinstance(X, sources.Source):
        return np.concatenate([np.array(as_rows(block.X)) for block in X])
    return as_rows(X)


def present(encoded: Encoded) -> NDArray[np.bool_]:
    """Rows that have the label."""
    if isinstance(encoded, ClassCodes):
        return np.asarray(encoded.codes >= 0)
    return np.ones(len(encoded.values), bool) if encoded.present is None else encoded.present


def fingerprint(
    rows: NDArray[Any],
    labels: Sequence[Encoded],
    groups: NDArray[np.intp] | None,
    parts: NDArray[np.int8] | None,
) -> str:
    """Hash of the data: all labels, and all rows or, beyond 256 MiB, 65,536 evenly spaced ones."""
    digest = hashlib.sha256(repr((rows.shape, rows.dtype.str)).encode())
    step = 1 if rows.nbytes <= _WHOLE_HASH else max(1, len(rows) // _SAMPLED_ROWS)
    for start in range(0, len(rows), 8192 * step):
        digest.update(np.ascontiguousarray(rows[start : start + 8192 * step : step]).tobytes())
        release(rows)
    for encoded in labels:
        if isinstance(encoded, ClassCodes):
            digest.update(repr(encoded.classes).encode() + encoded.codes.tobytes())
        else:
            digest.update(encoded.values.tobytes() + present(encoded).tobytes())
    for extra in (groups, parts):
        digest.update(b"-" if extra is None else extra.tobytes())
    return digest.hexdigest()[:16]


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
            chosen = {name: of_rows(column, block) for name, column in labels.items()}
            piece.update(gathered(X, block), chosen)
        for i in np.flatnonzero(weights).tolist():
            weighted = piece.copy() if weights[i] == 1.0 else piece.scaled(float(weights[i]))
            total = merged[i]
            merged[i] = weighted if total is None else total + weighted
    return [Moments() if moments is None else moments for moments in merged]


def of_rows(column: Encoded, rows: NDArray[np.intp]) -> Encoded:
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
