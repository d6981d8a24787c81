"""Rows of an array."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from splince_fast._runtime.arguments import described_type
from splince_fast._runtime.rows import choose_block_rows, is_sparse, is_tensor, torch_to_numpy
from splince_fast.exceptions import InputError
from splince_fast.labels.containers import check_index, map_labels, unmarked
from splince_fast.sources.base import Block, PieceSource, Source, describe, is_matrix


def from_arrays(
    X: Any,
    labels: object = None,
    *,
    sample_weight: object = None,
    block_rows: int | None = None,
) -> Source:
    """Return a source of the rows of one array.

    Parameters
    ----------
    X : array of shape (n, d)
        Any two-dimensional container whose rows ``X[start:stop]`` selects: a NumPy array in any
        layout, a memory map, a torch tensor, a frame, an HDF5 or Zarr data set, or a CSR matrix
        (for moments with ``covariance_type="diag"``).
    labels : mapping of str to column(s), frame, or a single column, optional
        Labels of n rows for each variable.
    sample_weight : array of shape (n,), optional
        Non-negative frequencies of the rows.
    block_rows : int, optional
        Rows per block; the default is 4096, or fewer if a block would exceed 64 MiB.

    Returns
    -------
    Source
        Blocks are views of an array in memory or of a memory map, and copies otherwise.

    Raises
    ------
    InputError
        X is not two-dimensional, lengths differ, or a container cannot be sliced by rows.
    LabelError
        Labels or weights have the same pandas index as X, but in another order.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import sources
    >>> source = sources.from_arrays(np.ones((5, 2)), {"z": [0, 1, 0, 1, 1]}, block_rows=2)
    >>> [block.labels["z"] for block in source.iter_from(1)]
    [[0, 1], [1]]
    """
    if not is_matrix(X):
        raise InputError(f"X is {describe(X)}; pass an array of shape (n, d), one row per sample")
    n, d = count_rows(X, "X"), int(X.shape[1])
    check_columns(labels, sample_weight, n, "X")
    # Compare the indexes of all rows here, because a block has only a part of the index.
    check_index(X, labels)
    check_index(X, sample_weight, "sample_weight")
    itemsize = getattr(getattr(X, "dtype", None), "itemsize", None)
    # A sparse row stores a value and a column index per entry.
    width = 2 * math.ceil(X.nnz / max(1, n)) if is_sparse(X) else d
    size = choose_block_rows(block_rows, width, itemsize or 8)

    def read(_: int, row: int) -> Iterator[Block]:
        for start in range(row, n, size):
            stop = min(start + size, n)
            yield take_block(slice_rows(X, start, stop), labels, sample_weight, start, stop)

    return PieceSource(
        f"{type(X).__name__} of shape ({n}, {d})",
        read,
        [n],
        size,
        n_features=d,
        nbytes=None if itemsize is None else n * width * itemsize,
    )


def take_block(rows: Any, labels: object, sample_weight: object, start: int, stop: int) -> Block:
    """Return a block of rows, and of entries `start` to `stop` - 1 of labels and weights."""
    return Block(
        torch_to_numpy(rows) if is_tensor(rows) else rows,
        map_labels(labels, lambda column, _: slice_rows(column, start, stop)),
        None if sample_weight is None else slice_rows(sample_weight, start, stop),
    )


def slice_rows(values: Any, start: int, stop: int) -> Any:
    """Return rows `start` to `stop` - 1 by position."""
    # Before pandas 3, values[start:stop] of a pandas object may use labels.
    rows = values.iloc[start:stop] if hasattr(values, "iloc") else values[start:stop]
    return unmarked(rows, values)


def count_rows(values: Any, name: str) -> int:
    """Return the number of rows of a container; raise InputError if rows cannot be sliced."""
    try:
        if isinstance(values, str | bytes | Mapping):
            raise TypeError("it is not a column")
        shape = getattr(values, "shape", None)
        rows = operator.index(shape[0] if shape else len(values))
        slice_rows(values, 0, 0)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{name} is {described_type(values)}, which cannot be sliced by rows ({error}); pass "
            "an array, list or frame in memory"
        ) from error
    return rows


def check_columns(labels: object, sample_weight: object, n_rows: int, rows_of: str) -> None:
    """Raise InputError unless labels and weights have one entry per row of `rows_of`."""
    map_labels(labels, lambda column, name: check_length(column, n_rows, name, rows_of))
    if sample_weight is not None:
        check_length(sample_weight, n_rows, "sample_weight", rows_of)


def check_length(values: object, n_rows: int, name: str, rows_of: str) -> None:
    """Raise InputError unless a column has `n_rows` entries, one per row of `rows_of`."""
    length = count_rows(values, name)
    if length != n_rows:
        raise InputError(
            f"{name} has {length} rows but there are {n_rows} in {rows_of}; pass one entry per row"
        )
