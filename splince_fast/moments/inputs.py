"""The arguments of `update` as rows, weights and encoded labels of one length.

Leading dimensions become one, rows that are masked out or of weight zero are dropped before their
values and labels are looked at: they are absent, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import (
    Rows,
    as_mask,
    as_numbers,
    as_weights,
    check_feature_names,
    feature_names,
    is_sparse,
)
from splince_fast._runtime.sparse import SparseRows
from splince_fast.exceptions import InputError
from splince_fast.labels import Encoded, VariableName, encode
from splince_fast.labels.positions import along, check_index, taken
from splince_fast.moments.accumulator import Accumulator

Float = NDArray[np.float64]


class Update(NamedTuple):
    """The arguments of one update, read and checked."""

    rows: Rows
    weight: Float | None
    encoded: Mapping[VariableName, Encoded]
    kept: NDArray[np.intp] | None  # positions of these rows in X, where some were dropped
    n_passed: int
    n: int  # number of rows
    feature_names: tuple[str, ...] | None  # of a data frame


def read_update(
    X: object, labels: object, sample_weight: object, mask: object, accumulator: Accumulator
) -> Update:
    """Read and check the arguments of `Moments.update`."""
    state, parameters = accumulator.state, accumulator.parameters
    width = None if state is None else len(state.reference)
    if mask is not None or len(getattr(X, "shape", ())) > 2:
        X, labels, sample_weight = _flattened(X, labels, sample_weight, mask)
    if parameters.sketch_size is not None and is_sparse(X):
        rows: Rows = SparseRows.of(X, width=width)
    else:
        rows = Rows.of(X, width=width)
    n, index = rows.array.shape[0], None
    names = None
    if hasattr(X, "columns"):
        names = feature_names(X, rows.array.shape[1])
        check_feature_names(names, accumulator.feature_names)
    if hasattr(X, "index"):
        check_index(X, labels)
        check_index(X, sample_weight, "sample_weight")
    weight = None if sample_weight is None else as_weights(sample_weight, n)
    if weight is not None and not weight.all():
        index = np.flatnonzero(weight)
        labels = None if labels is None else _taken_labels(labels, index, n)
        rows, weight = rows.select(index), weight[index]
    left = n if index is None else len(index)
    encoded = encode(labels, left, kinds=parameters.kinds or None, joint=parameters.joint)
    return Update(rows, weight, encoded, index, n, left, names)


def _flattened(X: Any, labels: Any, sample_weight: Any, mask: Any) -> tuple[Any, Any, Any]:
    """(n, d) rows of an array of shape (..., d), at the positions where `mask` is True."""
    array = as_numbers(X)
    if array.ndim < 2:
        raise InputError(f"X has shape {array.shape}; it must be (n, d), or (batch, token, d)")
    lead = array.shape[:-1]
    n = int(np.prod(lead))
    rows = array.reshape(n, array.shape[-1])
    chosen = np.arange(n) if mask is None else np.flatnonzero(as_mask(mask, lead))
    if labels is not None:
        labels = _spread(labels, lambda column, what: along(column, lead, chosen, what))
    if sample_weight is not None:
        sample_weight = along(sample_weight, lead, chosen, "sample_weight")
    return rows if mask is None else rows[chosen], labels, sample_weight


def _spread(labels: Any, change: Any) -> Any:
    """Apply ``change(column, description)`` to every column of labels."""
    if isinstance(labels, Mapping):
        return {name: change(column, f"labels[{name!r}]") for name, column in labels.items()}
    return change(labels, "labels")


def _taken_labels(labels: Any, index: NDArray[np.intp], n: int) -> Any:
    """Labels of some rows; `encode` raises for columns of another length."""

    def change(column: Any, what: str) -> Any:
        shape = getattr(column, "shape", None)
        try:
            length = shape[0] if shape else len(column)
        except TypeError:
            return column
        return taken(column, index) if length == n else column

    return _spread(labels, change)
