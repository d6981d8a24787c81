"""Buffer of labelled rows that do not fill a block yet."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.labels import VariableName
from splince_fast.moments.variable import Labels

Float = NDArray[np.float64]

_PART_BYTES = 1 << 20
_FLOAT32 = np.dtype(np.float32)
# A row with a sum of squares of at most this is finite, and valid in float32 and float64.
_LARGEST_SQUARES = 1e38


@dataclass(slots=True)
class LabelledRows:
    """Rows with their weights and labels: n rows of an array, by default all rows."""

    rows: NDArray[np.generic]  # (m, d)
    weight: Float | None  # (n,); None for unit weights
    labels: dict[VariableName, Labels] = field(default_factory=dict)
    index: NDArray[np.intp] | None = None  # (n,): positions in `rows`; None for all rows

    def __len__(self) -> int:
        return int(self.rows.shape[0]) if self.index is None else len(self.index)

    def slice(self, start: int, stop: int) -> LabelledRows:
        if start == 0 and stop == len(self):
            return self
        return LabelledRows(
            self.rows[start:stop] if self.index is None else self.rows,
            None if self.weight is None else self.weight[start:stop],
            {name: labels[start:stop] for name, labels in self.labels.items()},
            None if self.index is None else self.index[start:stop],
        )

    def copy_rows(self, out: NDArray[np.generic]) -> None:
        """Copy the n rows to `out`, an (n, d) array of any dtype."""
        rows, index = self.rows, self.index
        if index is None:
            out[...] = rows
        elif rows.dtype == out.dtype and rows.flags.c_contiguous and rows.flags.aligned:
            np.take(rows, index, axis=0, out=out, mode="clip")
        else:  # convert in parts that fit into the cache
            step = max(1, _PART_BYTES // max(1, rows.shape[1] * rows.dtype.itemsize))
            for start in range(0, len(index), step):
                part = index[start : start + step]
                out[start : start + len(part)] = rows[part]


class Buffer:
    """Memory for the labelled rows of a block that is not full yet."""

    # A buffer has one dtype: :meth:`converted` converts the rows if a row of a wider dtype is
    # added, and rows of a narrower dtype are converted when they are added. Alternating dtypes
    # therefore cost no more than the wider dtype alone.

    def __init__(
        self,
        capacity: int,
        width: int,
        dtype: np.dtype[np.generic],
        empty: Callable[[int], Any] | None = None,
    ) -> None:
        # `empty(size)` returns memory for `size` float64 numbers: an array by default, or a tensor
        # if `dtype` is a torch dtype.
        size = -(-capacity * width * dtype.itemsize // 8)
        self._memory: Float = np.empty(size) if empty is None else empty(size)
        self._width = width
        self.filled = 0
        self._weight: Float | None = None
        self._labels: dict[VariableName, Labels] = {}
        # (capacity, d): memory for the rows; rows from position `filled` on are unused
        self.rows = self._view(capacity, dtype)

    def _view(self, capacity: int, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        flat: NDArray[np.generic] = self._memory.view(dtype)
        return flat[: capacity * self._width].reshape(capacity, self._width)

    def try_resize(self, capacity: int, dtype: np.dtype[np.generic]) -> bool:
        """Set the capacity and dtype of the buffer, if it is empty and its memory suffices."""
        if self.filled or self._memory.nbytes < capacity * self._width * dtype.itemsize:
            return False
        self.rows = self._view(capacity, dtype)
        return True

    @property
    def n_free(self) -> int:
        return len(self.rows) - self.filled

    @property
    def nbytes(self) -> int:
        others = [self._weight, *self._labels.values()]
        return self._memory.nbytes + sum(a.nbytes for a in others if a is not None)

    def converted(self, capacity: int, dtype: np.dtype[np.generic]) -> Buffer:
        """Return a new buffer of this capacity and dtype with a copy of the buffered rows."""
        result = Buffer(capacity, self._width, dtype)
        if self.filled:
            contents = self.contents()
            result.append(
                contents, {name: _missing_label(v) for name, v in contents.labels.items()}
            )
        return result

    def append(self, block: LabelledRows, missing_labels: Mapping[VariableName, float]) -> None:
        """Copy a block of at most `n_free` rows into the buffer."""
        # `filled` changes last, so that an error leaves the buffered rows intact.
        capacity, start = len(self.rows), self.filled
        stop = start + len(block)
        block.copy_rows(self.rows[start:stop])
        if block.weight is not None and self._weight is None:
            weight = np.ones(capacity)
            weight[start:stop] = block.weight
            self._weight = weight
        elif self._weight is not None:
            self._weight[start:stop] = 1.0 if block.weight is None else block.weight
        for name, labels in block.labels.items():
            column = self._labels.get(name)
            if column is None:
                column = np.full((capacity, *labels.shape[1:]), missing_labels[name], labels.dtype)
                self._labels[name] = column
            column[start:stop] = labels
        if len(self._labels) > len(block.labels):
            for name in self._labels.keys() - block.labels.keys():
                column = self._labels[name]
                column[start:stop] = _missing_label(column)
        self.filled = stop

    def append_row(self, X: NDArray[np.generic], codes: Mapping[VariableName, int]) -> bool:
        """Append a row X, (1, d), with a class code for every variable of the buffered rows."""
        # False changes nothing: the buffer is empty, holds weights or has other variables, or the
        # row is not finite, has another shape or a dtype that is neither float32 nor that of the
        # buffer, or completes a block.
        start, rows = self.filled, self.rows
        if (
            not 0 < start < len(rows) - 1
            or self._weight is not None
            or X.shape != (1, self._width)
            or X.dtype not in (rows.dtype, _FLOAT32)
            or codes.keys() != self._labels.keys()
        ):
            return False
        row = rows[start]
        row[:] = X[0]
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.dot(row, row) <= _LARGEST_SQUARES:  # `not <=` is true for NaN, too
                return False
        for name, code in codes.items():
            self._labels[name][start] = code
        self.filled = start + 1
        return True

    def contents(self) -> LabelledRows:
        """Return the buffered rows as views of the memory."""
        stop = self.filled
        # A failed append of a block may leave a variable without labels in any buffered row.
        labels = {name: labels[:stop] for name, labels in self._labels.items()}
        weight = None if self._weight is None else self._weight[:stop]
        return LabelledRows(self.rows[:stop], weight, labels)

    def clear(self) -> None:
        self.filled = 0
        self._weight = None
        self._labels.clear()

    def remove_unregistered(self, registered: Container[VariableName]) -> None:
        """Remove the variables that are not in `registered`, after a failed append."""
        self._labels = {name: v for name, v in self._labels.items() if name in registered}


def _missing_label(labels: Labels) -> float:
    """Return the missing label of an array of labels: NaN for values, -1 for class codes."""
    return np.nan if labels.dtype.kind == "f" else -1
