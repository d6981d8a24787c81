"""Sums of x and of all variables for each class of one variable, and their total."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.row_kernels import Assignment, Change, add
from splince_fast._runtime.rows import Rows
from splince_fast.exceptions import IncompatibleMomentsError, InputError, LabelError
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, VariableName, class_key
from splince_fast.labels.names import listed
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.variable import KIND_OF_COLUMN, check_column

Float: TypeAlias = NDArray[np.float64]

# Largest number of classes: the memory for each class is a d x d matrix and a block of rows.
MOST_CLASSES = 64


class ClassAccumulator(Accumulator):
    """One accumulator, a part, per class of a variable, and one for the rows without a label."""

    # `state`, `variables` and `label_products` hold the total, which is the sum of all parts.
    # `merge_pending` computes the total in the order of the class names, for reproducible results.

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.parts: dict[ClassName | None, Accumulator] = {}

    def _set_parts(self, parts: dict[ClassName | None, Accumulator]) -> None:
        """Set the parts, and the variables of the total until the total is computed."""
        # A variable of one part stands for that of the total: its kind is right, but its classes
        # and sums may be incomplete.
        self.parts = parts
        self.variables = {name: v for part in parts.values() for name, v in part.variables.items()}

    def descriptions(self) -> dict[VariableName, str]:
        texts = super().descriptions()
        keys: dict[VariableName, set[object]] = {}  # class keys in any part
        for part in self.parts.values():
            for name, variable in part.variables.items():
                if isinstance(variable, ClassSums):
                    keys.setdefault(name, set()).update(variable.position_by_key)
        return texts | {name: f"{len(classes)} classes" for name, classes in keys.items()}

    @property
    def width(self) -> int | None:
        return next((part.width for part in self.parts.values() if part.width), None)

    @property
    def n_rows(self) -> int:
        return sum(part.n_rows for part in self.parts.values())

    @property
    def has_pending(self) -> bool:
        """Whether rows are buffered, or the total does not contain all rows of the parts."""
        n_merged = 0 if self.state is None else self.state.n_rows
        return n_merged != self.n_rows or any(part.has_pending for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        parts = sum(part.nbytes - self._work.nbytes for part in self.parts.values())
        return super().nbytes + parts

    def merge_pending(self) -> None:
        """Merge the buffered rows of every part, and compute the total of all parts."""
        for part in self.parts.values():
            part.merge_pending()
        total = Accumulator(self.parameters)
        for name in _sorted(self.parts):
            total.add(self.parts[name])
        sums = {"variables": total.variables, "label_products": total.label_products}
        add([Assignment(self, {"state": total.state, **sums})])

    def prepare(
        self,
        rows: Rows,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        *,
        in_order: bool = False,
        checked: bool = False,
        index: NDArray[np.intp] | None = None,
        copy: bool = False,
    ) -> list[Change]:
        """Return the changes that add rows to the parts of their classes."""
        if not checked:
            rows.check()
        n = len(rows.array) if index is None else len(index)
        numbers = np.arange(n) if index is None else index
        rows_by_class = self._rows_by_class(encoded, n)
        parts = self.parts | {k: self._empty_part() for k in rows_by_class if k not in self.parts}
        if len(parts) > MOST_CLASSES + (None in parts):
            raise InputError(
                f"by={self.parameters.by!r} has more than {MOST_CLASSES} classes, and each class "
                "needs a d x d matrix; pass a variable of fewer classes"
            )
        variables, width = dict(self.variables), rows.array.shape[1]
        for key, column in encoded.items():
            for part in self.parts.values():
                if key in part.variables:
                    check_column(part.variables[key], column, key)
            variable = KIND_OF_COLUMN[type(column)].new(width, column)
            if key not in variables and variable.encode(column, key)[0] is not None:
                variables[key] = variable
        # The parts share the work memory, which holds the sums of one block.
        merges = [parts[k].n_merges(rows, len(chosen)) for k, chosen in rows_by_class.items()]
        copy = copy or sum(map(bool, merges)) > 1
        changes: list[Change] = []
        for name, chosen in rows_by_class.items():
            changes += parts[name].prepare(
                rows,
                None if weight is None else weight[chosen],
                {k: _without_empty_classes(v) for k, v in take_labels(encoded, chosen).items()},
                in_order=in_order,
                checked=True,
                index=np.ascontiguousarray(numbers[chosen]),
                copy=copy,
            )
        return [*changes, Assignment(self, {"parts": parts, "variables": variables})]

    def _rows_by_class(
        self, encoded: Mapping[VariableName, Encoded], n: int
    ) -> dict[ClassName | None, NDArray[np.intp]]:
        """Return the positions of the rows of each class, by class name."""
        # The key None stands for rows without a label.
        by = self.parameters.by
        column = encoded.get(by) if by is not None else None
        if column is None and encoded:
            raise LabelError(
                f"by is {by!r}, which is not among the variables {listed(encoded)}; pass labels of "
                f"{by!r}, with None for rows without one"
            )
        if column is None:
            return {None: np.arange(n)} if n else {}
        if not isinstance(column, ClassCodes):
            raise LabelError(
                f"by={by!r} names a continuous variable; pass its values as strings or integers, "
                f"or kinds={{{by!r}: 'classes'}}"
            )
        existing = {class_key(name): name for name in self.parts if name is not None}
        positions: dict[ClassName | None, NDArray[np.intp]] = {}
        for code in np.unique(column.codes).tolist():
            name = column.classes[code] if code >= 0 else None
            key = existing.get(class_key(name), name) if name is not None else None
            positions[key] = np.flatnonzero(column.codes == code)
        return positions

    def _empty_part(self) -> Accumulator:
        """Return an empty accumulator that shares the work memory."""
        part = Accumulator(self.parameters)
        part._work = self._work
        return part

    def add_part(self, name: ClassName | None, part: Accumulator) -> None:
        """Add an accumulator that holds the rows of a new class."""
        part._work = self._work
        self._set_parts(self.parts | {name: part})

    def append_row(self, X: NDArray[np.generic], labels: object) -> bool:
        """Return False: there is no fast path, and the caller must call `update`."""
        return False

    # -- algebra ---------------------------------------------------------------------------

    def add(self, other: Accumulator) -> None:
        """Add the parts of another accumulator. Neither accumulator may have pending rows."""
        self.check_compatible(other)
        theirs = _parts_of(other)
        parts = dict(self.parts)
        for name in theirs:
            part = parts[name].copy() if name in parts else self._empty_part()
            part.add(theirs[name])
            parts[name] = part
        self.parts = parts
        self.feature_names = self.feature_names or other.feature_names
        self.merge_pending()

    def without(self, part: Accumulator) -> Accumulator:
        """Return a copy from which the rows of `part` are removed."""
        # Neither accumulator may have pending rows.
        self.check_compatible(part)
        result = ClassAccumulator(self.parameters)
        result.feature_names = self.feature_names
        theirs = _parts_of(part)
        for name in theirs:
            if name not in self.parts and theirs[name].n_rows:
                raise IncompatibleMomentsError(
                    f"cannot remove rows of the class {name!r}: no rows of this class were added; "
                    "subtract only moments that were added"
                )
        for name, own in self.parts.items():
            result.parts[name] = own.without(theirs[name]) if name in theirs else own.copy()
        result.merge_pending()
        return result

    def copy(self) -> ClassAccumulator:
        other = ClassAccumulator(self.parameters)
        for name, part in self.parts.items():
            other.add_part(name, part.copy())
        other.feature_names = self.feature_names
        return other

    def scale(self, factor: float) -> None:
        """Multiply every weight by a factor. All buffers must be empty."""
        for part in self.parts.values():
            part.scale(factor)
        self.state = None  # the total is computed again

    def sort_classes(self, name: VariableName, order: list[ClassName]) -> None:
        """Reorder the classes of a variable as in `order`, in every part."""
        for part in self.parts.values():
            part.sort_classes(name, order)
        self.state = None


def take_labels(
    encoded: Mapping[VariableName, Encoded], index: NDArray[np.intp]
) -> dict[VariableName, Encoded]:
    """Return the rows `index` of encoded columns; the lists of their classes do not change."""
    rows: dict[VariableName, Encoded] = {}
    for name, column in encoded.items():
        if isinstance(column, ClassCodes):
            rows[name] = ClassCodes(column.classes, column.codes[index])
        else:
            present = None if column.present is None else column.present[index]
            rows[name] = Columns(column.columns, column.values[index], present)
    return rows


def _without_empty_classes(column: Encoded) -> Encoded:
    """Return a column whose list of classes holds only those that occur in its rows."""
    if not isinstance(column, ClassCodes):
        return column
    codes = column.codes
    counts = np.bincount(codes[codes >= 0], minlength=len(column.classes))
    kept = np.flatnonzero(counts)
    if len(kept) == len(column.classes):
        return column
    new_codes = np.full(len(counts) + 1, -1, codes.dtype)
    new_codes[kept] = np.arange(len(kept))
    return ClassCodes(tuple(column.classes[i] for i in kept.tolist()), new_codes[codes])


def class_of(part: Accumulator, by: str) -> ClassName | None:
    """Return the class of the variable `by` that all rows of a part have; None without a label."""
    variable = part.variables.get(by)
    if not isinstance(variable, ClassSums):
        return None
    # `sort_classes` gives the part the names of other classes. None of its rows are buffered then,
    # so its own class is the only one with rows.
    return variable.names[int(np.argmax(variable.tensors()["rows"]))]


def _parts_of(other: Accumulator) -> dict[ClassName | None, Accumulator]:
    assert isinstance(other, ClassAccumulator)  # the caller has compared `parameters.by`
    return other.parts


def _sorted(parts: Mapping[ClassName | None, Accumulator]) -> list[ClassName | None]:
    """Return the names of the parts in sorted order; None (rows without a label) is first."""
    return sorted(
        parts, key=lambda name: ("", "") if name is None else ("a", repr(class_key(name)))
    )
