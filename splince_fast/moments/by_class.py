"""Sums of x and of all variables per class of one variable; their total is that of all rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import Rows
from splince_fast.exceptions import IncompatibleMomentsError, InputError, LabelError
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, VariableName, class_key
from splince_fast.moments.accumulator import Accumulator, check_column
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.variable import Variable

Float: TypeAlias = NDArray[np.float64]

# Largest number of classes: each has a d x d matrix and a block of rows.
MOST_CLASSES = 64


class ClassAccumulator(Accumulator):
    """One accumulator per class of a variable, and one for the rows without its label.

    The state and the variables of the base class are those of all rows: the parts merged, in the
    order of their names. They are made when they are read.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parts: dict[ClassName | None, Accumulator] = {}
        self._total: dict[VariableName, Variable] = {}
        self._merged = True
        super().__init__(parameters)

    @property
    def variables(self) -> dict[VariableName, Variable]:
        """The merged variables; while rows are pending, those of one part per name."""
        if not self.has_pending:
            return self._total
        return {name: v for part in self.parts.values() for name, v in part.variables.items()}

    @variables.setter
    def variables(self, variables: dict[VariableName, Variable]) -> None:
        self._total = variables

    def described(self) -> dict[VariableName, str]:
        texts = super().described()
        keys: dict[VariableName, set[object]] = {}  # of the classes in all parts
        for part in self.parts.values():
            for name, variable in part.variables.items():
                if isinstance(variable, ClassSums):
                    keys.setdefault(name, set()).update(variable.position_by_key)
        return texts | {name: f"{len(own)} classes" for name, own in keys.items()}

    @property
    def width(self) -> int | None:
        """Features d; None before the first rows."""
        return next((part.width for part in self.parts.values() if part.width), None)

    @property
    def n_rows(self) -> int:
        """Rows seen, waiting ones included."""
        return sum(part.n_rows for part in self.parts.values())

    @property
    def has_pending(self) -> bool:
        """Whether rows wait, or the total lacks rows of the parts."""
        return not self._merged or any(part.has_pending for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the states of all classes, of the total and of the work memory."""
        own = sum(part.nbytes - self._work.nbytes for part in self.parts.values())
        return super().nbytes + own

    def merge_pending(self) -> None:
        """Merge all waiting rows, and the parts into the total."""
        for part in self.parts.values():
            part.merge_pending()
        total = Accumulator(self.parameters)
        for name in _sorted(self.parts):
            total.add(self.parts[name])
        self.state, self._total, self.pairs = total.state, total.variables, total.pairs
        self._merged = True

    def update(
        self,
        rows: Rows,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        *,
        in_order: bool = False,
        checked: bool = False,
        index: NDArray[np.intp] | None = None,
        merge_all: bool = False,
    ) -> None:
        """Add rows to the parts of their classes; see the base class."""
        if not checked:
            rows.check()
        n = len(rows.array) if index is None else len(index)
        numbers = np.arange(n) if index is None else index
        chosen = {
            name: places for name, places in self._classes_of(encoded, n).items() if len(places)
        }
        parts = self.parts | {name: self._empty_part() for name in chosen if name not in self.parts}
        if len(parts) > MOST_CLASSES + (None in parts):
            raise InputError(
                f"by={self.parameters.by!r} has more than {MOST_CLASSES} classes, and each keeps a "
                "d x d matrix; name a variable of fewer classes"
            )
        for key, column in encoded.items():  # raise before any part changes
            for part in self.parts.values():
                if key in part.variables:
                    check_column(part.variables[key], column, key)
        self._merged = False
        self.parts = parts
        for name, places in chosen.items():
            parts[name].update(
                rows,
                None if weight is None else weight[places],
                {key: _present(rows_of(column, places)) for key, column in encoded.items()},
                in_order=in_order,
                checked=True,
                index=np.ascontiguousarray(numbers[places]),
                merge_all=merge_all,
            )

    def _classes_of(
        self, encoded: Mapping[VariableName, Encoded], n: int
    ) -> dict[ClassName | None, NDArray[np.intp]]:
        """Positions of the rows of each class; under None, of those without a label."""
        by = self.parameters.by
        column = encoded.get(by) if by is not None else None
        if column is None:
            return {None: np.arange(n)}
        if not isinstance(column, ClassCodes):
            raise LabelError(
                f"by={by!r} names a continuous variable; pass its values as strings or integers, "
                f"or kinds={{{by!r}: 'classes'}}"
            )
        existing = {class_key(name): name for name in self.parts if name is not None}
        names = [existing.get(class_key(name), name) for name in column.classes]
        positions: dict[ClassName | None, NDArray[np.intp]] = {
            name: np.flatnonzero(column.codes == i) for i, name in enumerate(names)
        }
        return {**positions, None: np.flatnonzero(column.codes < 0)}

    def _empty_part(self) -> Accumulator:
        """An empty accumulator that shares the work memory."""
        part = Accumulator(self.parameters)
        part._work = self._work
        return part

    def add_part(self, name: ClassName | None, part: Accumulator) -> None:
        """Add an accumulator for the rows of a new class."""
        part._work = self._work
        self.parts[name], self._merged = part, False

    def append_row(self, X: NDArray[np.generic], labels: object) -> bool:
        """Return False, so that the caller adds the row by `update`."""
        return False

    def n_missing(self, rows: Rows) -> int:
        """Number of rows that complete a block, whatever rows wait."""
        return self.parameters.capacity(rows.width, rows.dtype.itemsize)

    # -- algebra ---------------------------------------------------------------------------

    def add(self, other: Accumulator) -> None:
        """Add the parts of another accumulator; neither side has pending rows."""
        self.check_like(other)
        theirs = _parts_of(other)
        parts = dict(self.parts)
        for name in theirs:
            part = parts[name].copy() if name in parts else self._empty_part()
            part.add(theirs[name])
            parts[name] = part
        self.parts, self._merged = parts, False
        self.feature_names = self.feature_names or other.feature_names
        self.merge_pending()

    def without(self, part: Accumulator) -> Accumulator:
        """The accumulator without the rows of `part`; neither side has pending rows."""
        self.check_like(part)
        result = ClassAccumulator(self.parameters)
        result.feature_names = self.feature_names
        theirs = _parts_of(part)
        for name in theirs:
            if name not in self.parts and theirs[name].n_rows:
                raise IncompatibleMomentsError(
                    f"cannot remove a part with rows of the class {name!r}, which the whole never "
                    "saw: it is not a part of it"
                )
        for name, own in self.parts.items():
            result.parts[name] = own.without(theirs[name]) if name in theirs else own.copy()
        result.merge_pending()
        return result

    def copy(self) -> ClassAccumulator:
        """An independent copy, waiting rows included."""
        other = ClassAccumulator(self.parameters)
        other.parts = {name: part.copy() for name, part in self.parts.items()}
        for part in other.parts.values():
            part._work = other._work
        other._merged, other.feature_names = False, self.feature_names
        return other

    def scale(self, factor: float) -> None:
        """Multiply every weight by a factor; no rows wait."""
        for part in self.parts.values():
            part.scale(factor)
        self._merged = False

    def sort_classes(self, name: VariableName, order: list[ClassName]) -> None:
        """Reorder the classes of a variable to `order` in every part."""
        for part in self.parts.values():
            part.sort_classes(name, order)
        self._merged = False


def rows_of(column: Encoded, chosen: NDArray[np.intp]) -> Encoded:
    """Some rows of an encoded column, with all its classes."""
    if isinstance(column, ClassCodes):
        return ClassCodes(column.classes, column.codes[chosen])
    present = None if column.present is None else column.present[chosen]
    return Columns(column.columns, column.values[chosen], present)


def _present(column: Encoded) -> Encoded:
    """A column with only those classes that its rows have."""
    if not isinstance(column, ClassCodes):
        return column
    codes = column.codes
    counts = np.bincount(codes[codes >= 0], minlength=len(column.classes))
    kept = np.flatnonzero(counts)
    if len(kept) == len(column.classes):
        return column
    places = np.full(len(counts) + 1, -1, codes.dtype)
    places[kept] = np.arange(len(kept))
    return ClassCodes(tuple(column.classes[i] for i in kept.tolist()), places[codes])


def class_of(part: Accumulator, by: str) -> ClassName | None:
    """The class of the rows of a part; None where they carry no label."""
    variable = part.variables.get(by)
    if not isinstance(variable, ClassSums):
        return None
    # Several names only after `sort_classes`, when their rows have been merged.
    return variable.names[int(np.argmax(variable.tensors()["rows"]))]


def _parts_of(other: Accumulator) -> dict[ClassName | None, Accumulator]:
    assert isinstance(other, ClassAccumulator)  # the caller has compared the parameters
    return other.parts


def _sorted(parts: Mapping[ClassName | None, Accumulator]) -> list[ClassName | None]:
    """Sorted names; None, for rows without a label, comes first."""
    return sorted(
        parts, key=lambda name: ("", "") if name is None else ("a", repr(class_key(name)))
    )
