"""Rows that wait until a block is full, and the memory in which blocks are reduced."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.joining import MOST_VARIABLES, Joining
from splince_fast.labels import VariableName
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.passes import Centred, Gram, buffer_rows
from splince_fast.moments.variable import Labels, Variable

Float = NDArray[np.float64]

_PART_BYTES = 1 << 20
# Without it nothing keeps other threads away while a single row joins those that wait.
_HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


@dataclass(slots=True)
class LabelledRows:
    """A run of rows with what is known of each: the unit that waits and is reduced."""

    rows: NDArray[Any]  # (m, d)
    weight: Float | None  # (n,), None for unit weights
    labels: dict[VariableName, Labels] = field(default_factory=dict)
    index: NDArray[np.intp] | None = None  # (n,): which of `rows`, None for all of them

    def __len__(self) -> int:
        return int(self.rows.shape[0]) if self.index is None else len(self.index)

    def slice(self, start: int, stop: int) -> LabelledRows:
        if start == 0 and stop == len(self):
            return self
        whole = self.index is None
        return LabelledRows(
            self.rows[start:stop] if whole else self.rows,
            None if self.weight is None else self.weight[start:stop],
            {name: labels[start:stop] for name, labels in self.labels.items()},
            None if self.index is None else self.index[start:stop],
        )

    def copy_rows(self, out: NDArray[Any]) -> None:
        """Write the rows to `out`, (n, d) of any dtype."""
        rows, index = self.rows, self.index
        if index is None:
            out[...] = rows
        elif rows.dtype == out.dtype and rows.flags.c_contiguous and rows.flags.aligned:
            np.take(rows, index, axis=0, out=out, mode="clip")
        else:  # by way of parts that a cache holds
            step = max(1, _PART_BYTES // max(1, rows.shape[1] * rows.dtype.itemsize))
            for start in range(0, len(index), step):
                part = index[start : start + step]
                out[start : start + len(part)] = rows[part]


class Buffer:
    """Labelled rows that wait for a block to fill up.

    Rows of another dtype widen those that wait, so that rows of two dtypes in turn cost no more
    than rows of the wider one.

    Attributes
    ----------
    rows : ndarray of shape (capacity, d)
        What is written from `filled` on is nothing yet.
    filled : int
        Rows that wait.
    joining : Joining or None
        The short way of a single row that is like those that wait, of which one came alone. Rows
        one at a time are the price of a call each: it asks nothing that is known.
    """

    def __init__(self, capacity: int, width: int, dtype: np.dtype[Any]) -> None:
        self._memory = np.empty(-(-capacity * width * dtype.itemsize // 8))
        self._width = width
        self.filled = 0
        self._weight: Float | None = None
        self._labels: dict[VariableName, Labels] = {}
        self.rows: NDArray[Any] = self._view(capacity, dtype)
        self.joining: Joining | None = None

    def _view(self, capacity: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        flat: NDArray[Any] = self._memory.view(dtype)
        return flat[: capacity * self._width].reshape(capacity, self._width)

    def offers(self, capacity: int, dtype: np.dtype[Any]) -> bool:
        """Whether, empty, it can be a buffer of this size and dtype, and become one if so."""
        if self.filled or self._memory.nbytes < capacity * self._width * dtype.itemsize:
            return False
        self.rows, self.joining = self._view(capacity, dtype), None
        return True

    @property
    def room(self) -> int:
        return len(self.rows) - self.filled

    @property
    def nbytes(self) -> int:
        others = [self._weight, *self._labels.values()]
        return self._memory.nbytes + sum(a.nbytes for a in others if a is not None)

    def widened(self, capacity: int, dtype: np.dtype[Any]) -> Buffer:
        """The same rows in a buffer of another dtype."""
        wide = Buffer(capacity, self._width, dtype)
        if self.filled:
            contents = self.contents()
            wide.append(contents, {name: _blank(v) for name, v in contents.labels.items()})
        return wide

    def append(self, block: LabelledRows, blanks: dict[VariableName, Any]) -> None:
        """Copy at most `room` rows in; they count from the last assignment on.

        Parameters
        ----------
        blanks : dict
            A missing label of each variable of the block.
        """
        capacity, start = len(self.rows), self.filled
        stop = start + len(block)
        block.copy_rows(self.rows[start:stop])
        if block.weight is not None and self._weight is None:
            weight = np.ones(capacity)
            weight[start:stop] = block.weight
            self._weight, self.joining = weight, None
        elif self._weight is not None:
            self._weight[start:stop] = 1.0 if block.weight is None else block.weight
        for name, labels in block.labels.items():
            known = self._labels.get(name)
            if known is None:
                shape = (capacity, *labels.shape[1:])
                known = np.full(shape, blanks[name], labels.dtype)
                self._labels[name], self.joining = known, None
            known[start:stop] = labels
        if len(self._labels) > len(block.labels):
            for name in self._labels.keys() - block.labels.keys():
                known = self._labels[name]
                known[start:stop] = _blank(known)
        self.filled = stop

    def let_join(
        self, variables: Mapping[VariableName, Variable], kinds: Mapping[str, str]
    ) -> None:
        """Let single rows like these join them by the short way, unless they have weights.

        All labels must be of classes, and of every variable in `kinds`: the short way does not
        tell that one is not there.
        """
        known = [(name, variables[name], codes) for name, codes in self._labels.items()]
        if (
            _HAS_GIL
            and self._weight is None
            and len(known) <= MOST_VARIABLES
            and all(isinstance(variable, ClassSums) for _, variable, _ in known)
            and kinds.keys() <= self._labels.keys()
        ):
            self.joining = Joining(self.rows, known)

    def contents(self) -> LabelledRows:
        """What waits, as views."""
        stop = self.filled
        # A variable that only a failed append has brought is blank throughout.
        labels = {name: labels[:stop] for name, labels in self._labels.items()}
        weight = None if self._weight is None else self._weight[:stop]
        return LabelledRows(self.rows[:stop], weight, labels)

    def clear(self) -> None:
        self.filled = 0
        self._weight = self.joining = None
        self._labels.clear()

    def forget(self, known: Any) -> None:
        """Drop the labels of variables that are not `known`: those of a failed append."""
        self._labels = {name: v for name, v in self._labels.items() if name in known}


def _blank(labels: Labels) -> float:
    """A missing label, in an array of labels."""
    return np.nan if labels.dtype.kind == "f" else -1


class Workspace:
    """Memory in which blocks are reduced; solves borrow it meanwhile.

    Attributes
    ----------
    capacities : dict
        Rows of a block, by width and dtype, for which there is room.
    product : ndarray of float32, shape (d, d), or None
        Takes the product of a block of float32 rows with itself, unless a :class:`Gram` does.
    """

    def __init__(self) -> None:
        self._memory: NDArray[np.float64] = np.empty(0)
        self._grams: dict[tuple[int, np.dtype[Any]], Gram] = {}
        self.product: NDArray[np.float32] | None = None
        self.capacities: dict[tuple[int, np.dtype[Any]], int] = {}
        self._borrowed = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + (0 if self.product is None else self.product.nbytes)

    def reserve(self, block_rows: int, width: int, dtype: np.dtype[Any]) -> None:
        """Make room for blocks of this shape and dtype."""
        size = -(-buffer_rows(block_rows) * width * dtype.itemsize // 8)
        served = Gram.serves(block_rows, width, dtype)
        if served:
            size = max(size, Gram.size(block_rows, width, dtype))
        if self._memory.size < size:
            self._memory = np.empty(size)
            self._grams.clear()
            self.capacities.clear()
        if served:
            self._grams[width, dtype] = Gram(block_rows, width, dtype, self._memory)
        elif dtype == np.float32 and (self.product is None or len(self.product) != width):
            self.capacities.clear()
            self.product = np.empty((width, width), np.float32, order="F")
        self.capacities[width, dtype] = block_rows

    def for_block(self, n: int, width: int, dtype: np.dtype[Any]) -> Centred | Gram:
        """The memory as `reduce_block` takes it for n rows."""
        gram = self._grams.get((width, dtype))
        if gram is not None:
            return gram
        rows = buffer_rows(n)
        flat: NDArray[Any] = self._memory.view(dtype)
        return Centred(flat[: rows * width].reshape(rows, width))

    @contextmanager
    def borrowed(self, size: int) -> Iterator[Float]:
        """Memory for `size` float64 numbers: this one if it is large enough and free, or new.

        Fresh memory for a large factorisation costs page faults, and the job its peak.
        """
        if self._memory.size < size or not self._borrowed.acquire(blocking=False):
            yield np.empty(size)
            return
        try:
            yield self._memory[:size]
        finally:
            self._borrowed.release()
