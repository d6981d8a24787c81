"""The rows and labels of a comparison: reading, checking, and knowing them again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import sources
from splince_fast._runtime.arrays import as_rows, check_values
from splince_fast.evaluation._pages import release, slices
from splince_fast.exceptions import InputError
from splince_fast.labels import ClassCodes, Encoded

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
        X = sources.from_parquet(path, embedding="embedding")
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
