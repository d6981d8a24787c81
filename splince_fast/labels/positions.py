"""Alignment of label columns with the rows of X, also for X of shape (batch, token, d)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.rows import to_array
from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels.containers import is_class_label, with_missing


def check_index(X: Any, labels: Any, name: str = "labels", *, of: str = "X") -> None:
    """Raise LabelError if labels or weights have the pandas index of X in another order."""
    # Labels belong to rows by position. A RangeIndex, or an index of other entries, is accepted.
    index: Any = getattr(X, "index", None)
    if not hasattr(index, "symmetric_difference"):
        return
    columns = dict(enumerate(labels)) if isinstance(labels, tuple) else labels
    columns = columns if isinstance(columns, Mapping) else {None: columns}
    for key, column in columns.items():
        other: Any = getattr(column, "index", None)
        has_index = hasattr(other, "symmetric_difference") and type(other).__name__ != "RangeIndex"
        if not has_index or index.equals(other):
            continue
        if len(index) == len(other) and index.is_unique and index.symmetric_difference(other).empty:
            column_name = name if key is None else f"{name}[{key!r}]"
            raise LabelError(
                f"{column_name} has the index of {of} in another order, and rows are matched by "
                f"position; pass {column_name}.loc[{of}.index], or {column_name}.to_numpy() if the "
                "positions agree"
            )


def take_positions(
    column: Any, leading: tuple[int, ...], positions: NDArray[np.intp], name: str
) -> Any:
    """Return the labels at flat `positions` of X, whose shape without features is `leading`."""
    # A column has one label per position, or one per sequence (entry of the first axis).
    n, n_sequences = int(np.prod(leading)), leading[0]
    if _gives_array(column):
        column = to_array(column, name)
    is_sequence = isinstance(column, Sequence) and not isinstance(column, str | bytes)
    if is_sequence and len(column) and isinstance(column[0], list | tuple | np.ndarray):
        column = _stack_lists(column)
    shape = getattr(column, "shape", None)
    if shape is None:
        shape = (len(column),)
    if tuple(shape[: len(leading)]) == leading:
        if len(leading) > 1:
            column = column.reshape(n, *shape[len(leading) :])
    elif shape[:1] == (n,):
        pass
    elif shape[:1] == (n_sequences,):
        positions = positions // (n // n_sequences)
    else:
        raise InputError(
            f"{name} has shape {tuple(shape)} for rows of shape {leading}; pass one entry per "
            f"sequence, {(n_sequences,)}, or one per position, {leading}"
        )
    return take_entries(column, positions)


def _stack_lists(column: Any) -> Any:
    """Convert a list of equally long lists to a 2-D array of objects; the entries are unchanged."""
    lengths = {len(part) for part in column}
    if len(lengths) != 1:
        raise InputError("labels hold sequences of different lengths; pad them to the length of X")
    array = np.empty((len(column), lengths.pop()), object)
    for i, part in enumerate(column):
        array[i, :] = part if not isinstance(part, np.ndarray) else part.tolist()
    return array


def map_labels(labels: Any, function: Callable[[Any, str], Any]) -> Any:
    """Return ``function(column, name)`` of each column of labels; `name` is for messages."""
    if labels is None:
        return None
    if isinstance(labels, Mapping):
        return {name: function(column, f"labels[{name!r}]") for name, column in labels.items()}
    return function(labels, "labels")


def _gives_array(column: Any) -> bool:
    """Return whether a column is a tensor, a data set of a file, or the like, but no frame."""
    is_array = isinstance(column, np.ndarray)
    return hasattr(column, "__array__") and not (is_array or hasattr(column, "to_numpy"))


def take_entries(column: Any, index: NDArray[np.intp]) -> Any:
    """Return entries of a column, or rows of a frame, by position."""
    if _gives_array(column):
        column = to_array(column, "labels")
    if isinstance(column, np.ndarray):
        return column[index]
    if isinstance(column, Sequence) and not hasattr(column, "dtype"):
        labels = [column[i] for i in index.tolist()]
        return with_missing(labels) if is_class_label(column) else labels
    if hasattr(column, "iloc"):
        return column.iloc[index]
    if hasattr(column, "take"):  # pandas extension arrays, and Arrow arrays
        return column.take(index)
    return column[index]
