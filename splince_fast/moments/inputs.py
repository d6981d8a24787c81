"""Validation of the arguments of `update`: rows, weights and encoded labels of equal length.

The leading dimensions of X are flattened. Rows that are masked out or have weight zero are dropped
before values and labels are validated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.rows import (
    Rows,
    SparseRows,
    as_mask,
    as_numbers,
    as_weights,
    checked_names,
    is_sparse,
)
from splince_fast.exceptions import InputError
from splince_fast.labels import Encoded, VariableName, encode
from splince_fast.labels.containers import check_index, map_labels, take_entries, take_positions
from splince_fast.moments.accumulator import Accumulator

Float = NDArray[np.float64]


class Update(NamedTuple):
    """Validated arguments of one update."""

    rows: Rows
    weight: Float | None
    encoded: Mapping[VariableName, Encoded]
    row_index: NDArray[np.intp] | None  # indices of the rows with nonzero weight; None: all
    n_input_rows: int  # number of rows, including those of weight zero
    n: int  # number of rows with nonzero weight
    feature_names: tuple[str, ...] | None  # columns of a data frame


def read_update(
    X: object, labels: object, sample_weight: object, mask: object, accumulator: Accumulator
) -> Update:
    """Return the validated arguments of `Moments.update`."""
    width, parameters = accumulator.width, accumulator.parameters
    if mask is not None or len(getattr(X, "shape", ())) > 2:
        X, labels, sample_weight = _flattened(X, labels, sample_weight, mask)
    if parameters.is_diagonal and is_sparse(X):
        rows: Rows = SparseRows.of(X, width=width)
    else:
        rows = Rows.of(X, width=width)
    n, index = rows.array.shape[0], None
    names = None
    if hasattr(X, "columns"):
        names = checked_names(
            X, rows.array.shape[1], accumulator.feature_names, first=not accumulator.n_rows
        )
    if hasattr(X, "index"):
        check_index(X, labels)
        check_index(X, sample_weight, "sample_weight")
    weight = None if sample_weight is None else as_weights(sample_weight, n)
    if weight is not None and not weight.all():
        index = np.flatnonzero(weight)
        labels = None if labels is None else _select_labels(labels, index, n)
        rows, weight = rows.select(index), weight[index]
    n_kept = n if index is None else len(index)
    encoded = encode(labels, n_kept, kinds=parameters.kinds or None, joint=parameters.joint)
    return Update(rows, weight, encoded, index, n, n_kept, names)


def _flattened(X: Any, labels: Any, sample_weight: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Return the rows of X, (n, d), and their labels and weights, without leading dimensions."""
    # `mask`, (...), is False for the rows to leave out; None keeps all rows.
    array = as_numbers(X)
    if array.ndim < 2:
        raise InputError(f"X has shape {array.shape}; it must be (n, d), or (batch, token, d)")
    leading = array.shape[:-1]
    n = int(np.prod(leading))
    rows = array.reshape(n, array.shape[-1])
    selected = np.arange(n) if mask is None else np.flatnonzero(as_mask(mask, leading))
    labels = map_labels(
        labels, lambda column, name: take_positions(column, leading, selected, name)
    )
    if sample_weight is not None:
        sample_weight = take_positions(sample_weight, leading, selected, "sample_weight")
    return rows if mask is None else rows[selected], labels, sample_weight


def _select_labels(labels: Any, index: NDArray[np.intp], n: int) -> Any:
    """Return the labels of the rows `index`."""
    # A column whose length is not n is returned unchanged: `encode` raises an error for it later.

    def select(column: Any, description: str) -> Any:
        shape = getattr(column, "shape", None)
        try:
            length = shape[0] if shape else len(column)
        except TypeError:
            return column
        return take_entries(column, index) if length == n else column

    return map_labels(labels, select)
