"""Rows that wait until a block is full, so that small updates cost no d x d work each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import check_values
from splince_fast._runtime.files import check_tensors
from splince_fast.exceptions import FileFormatError, InputError
from splince_fast.labels import VariableName

Float = NDArray[np.float64]
Codes = NDArray[np.intp]


@dataclass(slots=True)
class LabelledRows:
    """A run of rows with what is known of each: the unit that is staged and reduced.

    `codes` index the classes of their variable in the state; `values` are NaN where missing.
    """

    rows: NDArray[Any]  # (n, d)
    weight: Float | None  # (n,), None for unit weights
    codes: dict[VariableName, Codes] = field(default_factory=dict)
    values: dict[VariableName, Float] = field(default_factory=dict)  # (n, k)

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, stop: int) -> LabelledRows:
        if start == 0 and stop == len(self):
            return self
        return LabelledRows(
            self.rows[start:stop],
            None if self.weight is None else self.weight[start:stop],
            {name: codes[start:stop] for name, codes in self.codes.items()},
            {name: values[start:stop] for name, values in self.values.items()},
        )


class Stage:
    """A buffer of labelled rows with room for one block."""

    def __init__(self, capacity: int, width: int, dtype: np.dtype[Any]) -> None:
        self._buffer = np.empty((capacity, width), dtype)
        self._weight: Float | None = None
        self._codes: dict[VariableName, Codes] = {}
        self._values: dict[VariableName, Float] = {}
        self.filled = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self._buffer.dtype
        return dtype

    @property
    def width(self) -> int:
        return int(self._buffer.shape[1])

    @property
    def room(self) -> int:
        return len(self._buffer) - self.filled

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def append(self, block: LabelledRows) -> None:
        """Copy at most `room` rows in, widening to the buffer's dtype."""
        capacity, start, stop = len(self._buffer), self.filled, self.filled + len(block)
        np.copyto(self._buffer[start:stop], block.rows, casting="unsafe")
        if block.weight is not None and self._weight is None:
            self._weight = np.ones(capacity)
        if self._weight is not None:
            self._weight[start:stop] = 1.0 if block.weight is None else block.weight
        for name, codes in block.codes.items():
            if name not in self._codes:
                self._codes[name] = np.full(capacity, -1, np.intp)
            self._codes[name][start:stop] = codes
        for name, values in block.values.items():
            if name not in self._values:
                self._values[name] = np.full((capacity, values.shape[1]), np.nan)
            self._values[name][start:stop] = values
        for name in self._codes.keys() - block.codes.keys():
            self._codes[name][start:stop] = -1
        for name in self._values.keys() - block.values.keys():
            self._values[name][start:stop] = np.nan
        self.filled = stop

    def contents(self) -> LabelledRows:
        """What is staged, as views."""
        return LabelledRows(self._buffer, self._weight, self._codes, self._values).slice(
            0, self.filled
        )

    def clear(self) -> None:
        self.filled = 0
        self._weight = None
        self._codes.clear()
        self._values.clear()

    def rewind(self, filled: int, known: Collection[VariableName]) -> None:
        """Let go of the rows behind the first `filled`, and of variables that are not `known`."""
        self.filled = filled
        self._codes = {name: codes for name, codes in self._codes.items() if name in known}
        self._values = {name: values for name, values in self._values.items() if name in known}

    def tensors(self, order: list[VariableName]) -> dict[str, NDArray[Any]]:
        """The staged rows as named arrays; variables are named by their place in `order`."""
        if not self.filled:
            return {}
        block = self.contents()
        tensors: dict[str, NDArray[Any]] = {"staged.rows": block.rows}
        if block.weight is not None:
            tensors["staged.weight"] = block.weight
        for name, codes in block.codes.items():
            tensors[f"staged.{order.index(name)}"] = codes.astype(np.int64)
        for name, values in block.values.items():
            tensors[f"staged.{order.index(name)}"] = values
        return tensors

    @staticmethod
    def read(
        tensors: Mapping[str, NDArray[Any]],
        width: int,
        sizes: Mapping[VariableName, int],
        classes: frozenset[VariableName],
    ) -> LabelledRows | None:
        """The inverse of `tensors`; `sizes` is the number of classes or columns by variable."""
        rows = tensors.get("staged.rows")
        if rows is None:
            return None
        n = len(rows) if rows.ndim else 0
        dtype = np.float32 if rows.dtype == np.float32 else np.float64
        check_tensors(tensors, {"staged.rows": (dtype, (n, width))})
        try:
            check_values(rows, "staged.rows")
        except InputError as error:
            raise FileFormatError(str(error)) from error
        block = LabelledRows(rows, None)
        if "staged.weight" in tensors:
            check_tensors(tensors, {"staged.weight": (np.float64, (n,))})
            block.weight = tensors["staged.weight"]
            if (block.weight <= 0).any():
                raise FileFormatError(
                    "the tensor 'staged.weight' holds weights that are not positive"
                )
        for i, (name, size) in enumerate(sizes.items()):
            key = f"staged.{i}"
            if key not in tensors:
                continue
            if name in classes:
                check_tensors(tensors, {key: (np.int64, (n,))})
                codes = tensors[key].astype(np.intp)
                if n and (codes.min() < -1 or codes.max() >= size):
                    raise FileFormatError(f"the tensor {key!r} names a class that does not exist")
                block.codes[name] = codes
            else:
                values = tensors[key]
                if values.dtype != np.float64 or values.shape != (n, size):
                    raise FileFormatError(f"the tensor {key!r} has the wrong dtype or shape")
                if np.isinf(values).any():
                    raise FileFormatError(f"the tensor {key!r} holds infinity")
                block.values[name] = values
        return block
