"""Buffer of labelled rows that do not fill a block yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.row_kernels import Assignment, Call, Change, add
from splince_fast.labels import VariableName
from splince_fast.moments.block import Block, Labels

Float = NDArray[np.float64]

_FLOAT32 = np.dtype(np.float32)
# A row with a sum of squares of at most this is finite, and valid in float32 and float64.
_LARGEST_SQUARES = 1e38


class Buffer:
    """Memory for the labelled rows of a block that is not full yet."""

    # A buffer has one dtype: :meth:`converted` converts the rows if a row of a wider dtype is
    # added, and rows of a narrower dtype are converted when they are added. Alternating dtypes
    # therefore cost no more than the wider dtype alone.
    # Rows are written beyond position `filled`; a change of `filled` then adds them.

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
        self._weight: Float | None = None  # (capacity,)
        self._labels: dict[VariableName, Labels] = {}  # (capacity, ...) by variable
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
    def nbytes(self) -> int:
        others = [self._weight, *self._labels.values()]
        return self._memory.nbytes + sum(a.nbytes for a in others if a is not None)

    def converted(self, capacity: int, dtype: np.dtype[np.generic]) -> Buffer:
        """Return a new buffer of this capacity and dtype with a copy of the buffered rows."""
        result = Buffer(capacity, self._width, dtype)
        if self.filled:
            add(result.appended(self.contents(), 0))
        return result

    def appended(self, block: Block, start: int) -> list[Change]:
        """Return the changes that make a block the rows from position `start` on."""
        # `start` is `filled`, or 0 if earlier changes empty the buffer.
        changes: list[Change] = []
        if start < self.filled:  # these rows are in use until the changes are applied
            rows = np.empty((block.n, self._width), self.rows.dtype)
            block.copy_rows(rows)
            changes.append(Call(self.rows[: block.n].__setitem__, ..., rows))
        else:
            block.copy_rows(self.rows[start : start + block.n])
        weight, labels = self._written(block, start)
        filled = start + block.n
        changes.append(Assignment(self, {"filled": filled, "_weight": weight, "_labels": labels}))
        return changes

    def completed(self, block: Block) -> tuple[Block, Change]:
        """Return the buffered rows with a block that fills the buffer, and a change to empty it."""
        block.copy_rows(self.rows[self.filled :])
        weight, labels = self._written(block, self.filled)
        return Block(len(self.rows), self.rows, weight, labels), self.emptied()

    def emptied(self) -> Change:
        return Assignment(self, {"filled": 0, "_weight": None, "_labels": {}})

    def _written(self, block: Block, start: int) -> tuple[Float | None, dict[VariableName, Labels]]:
        """Return the weights and labels of the buffer with those of a block from `start` on."""
        capacity, stop, continues = len(self.rows), start + block.n, start == self.filled
        weight = self._weight if continues else None
        if block.weight is not None and weight is None:
            weight = np.ones(capacity)
        if weight is not None:
            weight[start:stop] = 1.0 if block.weight is None else block.weight
        labels = dict(self._labels) if continues else {}
        for name in labels.keys() - block.labels.keys():
            labels[name][start:stop] = missing_label(labels[name])
        for name, added in block.labels.items():
            if name not in labels:
                shape = capacity, *added.shape[1:]
                labels[name] = np.full(shape, missing_label(added), added.dtype)
            labels[name][start:stop] = added
        return weight, labels

    def append_row(
        self, X: NDArray[np.generic], codes: Mapping[VariableName, int], changes: list[Change]
    ) -> bool:
        """Append a row X, (1, d), with a class code for every variable of the buffered rows."""
        # `changes` are applied together with the append. False changes nothing: the buffer is
        # empty, holds weights or has other variables, or the row is not finite, has another shape
        # or a dtype that is neither float32 nor that of the buffer, or completes a block.
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
        if changes:
            add([*changes, Assignment(self, {"filled": start + 1})])
        else:
            self.filled = start + 1
        return True

    def contents(self) -> Block:
        """Return the buffered rows as views of the memory."""
        stop = self.filled
        labels = {name: labels[:stop] for name, labels in self._labels.items()}
        weight = None if self._weight is None else self._weight[:stop]
        return Block(stop, self.rows[:stop], weight, labels)


def missing_label(labels: Labels) -> float:
    """Return the missing label of an array of labels: NaN for values, -1 for class codes."""
    return np.nan if labels.dtype.kind == "f" else -1
