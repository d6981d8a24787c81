"""Accumulators of the parts of the rows: folds, or the classes of a variable.

The fold of a row is a hash of its number, or of its group, modulo the number of folds. With `by`,
every class of this variable is a part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.row_kernels import Assignment, Change, add
from splince_fast._runtime.names import listed, sort_key
from splince_fast._runtime.rows import Rows, splitmix64
from splince_fast._solve.options import is_integer
from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, VariableName, class_key
from splince_fast.labels.encoded import observed
from splince_fast.moments.accumulator import Accumulator, merged_variables
from splince_fast.moments.block import Workspace
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.state import not_added
from splince_fast.moments.variables import ClassSums, Variable, encode_column, is_unnamed

Float: TypeAlias = NDArray[np.float64]
Index: TypeAlias = NDArray[np.intp]
Key: TypeAlias = ClassName | None  # class, or None without a label; number of a fold
Part: TypeAlias = "Accumulator | Split"

# Largest number of classes: the memory for each class is a d x d matrix and a block of rows.
MOST_CLASSES = 64
_MOST_FOLDS = 1024


class Split:
    """One part, an accumulator, per class of the variable `by`, or a part per fold."""

    # With `by`, each fold is a split. `groups` is a variable whose classes are not divided among
    # folds. `position` is the number of rows so far, those of weight zero included.

    def __init__(
        self, parameters: Parameters, n_folds: Any = None, groups: Any = None, position: int = 0
    ) -> None:
        self.parameters, self.n_folds, self.groups = parameters, n_folds, groups
        self.position = position
        self.feature_names: tuple[str, ...] | None = None
        self._work = Workspace()  # shared by the parts of all classes
        self._total: Accumulator | None = None
        self.broken = False  # whether a change of the parts failed half-way
        self.parts: dict[Key, Part] = {}
        if n_folds is None:
            return
        if not is_integer(n_folds) or not 2 <= n_folds <= _MOST_FOLDS:
            raise InputError(f"folds is {n_folds!r}; it must be an integer from 2 to {_MOST_FOLDS}")
        if groups is not None and not isinstance(groups, str):
            raise InputError(f"groups is {groups!r}; it must be the name of a variable")
        self.parts = {i: self.new_part() for i in range(int(n_folds))}

    def new_part(self) -> Part:
        if self.n_folds is not None:
            return accumulator_of(self.parameters)
        return Accumulator(replace(self.parameters, by=None), self._work)

    def leaves(self) -> list[Accumulator]:
        return [leaf for part in self.parts.values() for leaf in part.leaves()]

    def prepare(
        self,
        rows: Rows,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        *,
        numbers: NDArray[np.uint64] | None = None,
        in_order: bool = False,
        checked: bool = False,
        index: Index | None = None,
        copy: bool = False,
    ) -> list[Change]:
        # The numbers of the rows in the stream, (n,), give the folds.
        if not checked:
            rows.check()
        if index is None:
            index = np.arange(rows.array.shape[0])
        keys, codes = (
            self._classes_of_rows(encoded, len(index))
            if numbers is None
            else self._folds_of_rows(encoded, numbers)
        )
        labels = {name: column for name, column in encoded.items() if name != self.groups}
        variables = self.variables  # their kinds and types are the same in all parts
        for name in labels.keys() & variables.keys():
            encode_column(variables[name], variables[name].width, labels[name], name)
        chosen = {keys[code]: np.flatnonzero(codes == code) for code in np.unique(codes).tolist()}
        # New parts are in the order of the rows' codes, for reproducible files.
        parts = self.parts | {k: self.new_part() for k in chosen if k not in self.parts}
        changes: list[Change] = []
        is_fold = numbers is not None
        for key, own in chosen.items():
            changes += parts[key].prepare(
                rows, None if weight is None else weight[own],
                {name: _labels_of_rows(z, own, not is_fold) for name, z in labels.items()},
                in_order=in_order or is_fold, checked=True, index=index[own],
                copy=not is_fold,  # classes share the work memory, which has the sums of one block
            )  # fmt: skip
        return [*changes, Assignment(self, {"parts": parts, "_total": None})]

    def _folds_of_rows(
        self, encoded: Mapping[VariableName, Encoded], numbers: NDArray[np.uint64]
    ) -> tuple[Sequence[Key], Index]:
        """Return the keys of the folds, and the index of the key of each row."""
        hashes = splitmix64(numbers)
        if self.groups is not None:
            column = encoded.get(self.groups)
            if not isinstance(column, ClassCodes):
                raise LabelError(
                    f"groups names {self.groups!r}, which is not a class-coded variable of the "
                    "labels; pass the ids of the groups as strings or integers"
                )
            hash_of_class = np.array([*map(_digest, column.classes), 0], np.uint64)
            hashes = np.where(column.codes >= 0, hash_of_class[column.codes], hashes)
        return range(len(self.parts)), (hashes % np.uint64(len(self.parts))).astype(np.intp)

    def _classes_of_rows(
        self, encoded: Mapping[VariableName, Encoded], n: int
    ) -> tuple[Sequence[Key], Index]:
        """Return the keys of the classes, None last, and the index of the key of each row."""
        by = cast(str, self.parameters.by)
        column = encoded.get(by)
        if column is None and encoded and n:
            raise LabelError(
                f"by is {by!r}, which is not among the variables {listed(encoded)}; pass labels of "
                f"{by!r}, with None for rows without one"
            )
        if column is None:
            return (None,), np.zeros(n, np.intp)
        if not isinstance(column, ClassCodes):
            raise LabelError(
                f"by={by!r} names a continuous variable; pass its values as strings or integers, "
                f"or kinds={{{by!r}: 'classes'}}"
            )
        keys = (*column.classes, None)
        present = {keys[code] for code in np.unique(column.codes).tolist()}
        if len((self.parts.keys() | present) - {None}) > MOST_CLASSES:
            raise InputError(
                f"by={by!r} has more than {MOST_CLASSES} classes, and each class needs a d x d "
                "matrix; pass a variable of fewer classes"
            )
        return keys, column.codes

    @property
    def width(self) -> int | None:
        return max((leaf.width or 0 for leaf in self.leaves()), default=0) or None

    @property
    def n_rows(self) -> int:
        return sum(part.n_rows for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        parts = sum(part.nbytes - self._work.nbytes for part in self.parts.values())
        return parts + self._work.nbytes + (0 if self._total is None else self._total.nbytes)

    @property
    def variables(self) -> dict[VariableName, Variable]:
        """A variable of each name, with the kind and names of all parts; the sums may differ."""
        items = [item for leaf in self.leaves() for item in leaf.variables.items()]
        return dict(items) | {name: v for name, v in items if not is_unnamed(v.names)}

    def descriptions(self) -> dict[VariableName, str]:
        texts = {name: variable.description for name, variable in self.variables.items()}
        counts = {name: len(classes) for name, classes in self._class_names().items()}
        return texts | {name: f"{count} classes" for name, count in counts.items()}

    def _class_names(self) -> dict[VariableName, list[ClassName]]:
        """Return the names of the classes of each variable in any part, in sorted order."""
        names: dict[VariableName, dict[object, ClassName]] = {}
        for leaf in self.leaves():
            for name, variable in leaf.variables.items():
                if isinstance(variable, ClassSums):
                    names.setdefault(name, {}).update({class_key(c): c for c in variable.names})
        return {name: sorted(classes.values(), key=sort_key) for name, classes in names.items()}

    def merge_pending(self) -> None:
        for part in self.parts.values():
            part.merge_pending()

    def total(self) -> Part:
        """Return the sum of all parts: of classes in the order of their names."""
        if self._total is not None:  # that of classes is kept until a part changes
            return self._total
        if self.n_folds is not None:
            total, keys = accumulator_of(self.parameters), list(self.parts)
        else:
            total = Accumulator(self.parameters)
            total.feature_names, total.parts = self.feature_names, cast(Any, self.parts)
            keys = sorted(self.parts, key=_order)
        self.merge_pending()
        for key in keys:
            add(cast(Any, total).merged(self.parts[key]))
        if self.n_folds is None:
            self._total = cast(Accumulator, total)
        return total

    def _with_parts(self, parts: dict[Key, Part]) -> Split:
        result = Split(self.parameters, self.n_folds, self.groups, self.position)
        result.feature_names = self.feature_names
        result.put(parts)
        return result

    def put(self, parts: Mapping[Key, Part]) -> None:
        """Set parts, which then share the work memory if they are classes."""
        for key, part in parts.items():
            if self.n_folds is None:
                cast(Accumulator, part)._work = self._work
            self.parts[key] = part

    def merged(self, other: Split) -> list[Change]:
        # Compare the variables of all parts first: either all parts are merged or none.
        ours, theirs = (
            {name: v.empty_like() for name, v in side.variables.items()} for side in (self, other)
        )
        merged_variables(ours, theirs, np.zeros(other.width or 0), 1)
        parts, changes = dict(self.parts), list[Change]()
        for key, part in other.parts.items():
            parts[key] = parts.get(key) or self.new_part()
            changes += cast(Any, parts[key]).merged(part)
        names = self.feature_names or other.feature_names
        sums = {"parts": parts, "_total": None, "feature_names": names}
        return [*changes, Assignment(self, sums)]

    def without(self, other: Split) -> Split:
        for key, theirs in other.parts.items():
            if key not in self.parts and theirs.n_rows:
                raise not_added(
                    f"cannot remove rows of the class {key!r}: no rows of this class were added"
                )
        parts = {k: cast(Any, p).without(other.parts[k]) if k in other.parts else p.copy()
                 for k, p in self.parts.items()}  # fmt: skip
        return self._with_parts(parts)

    def copy(self) -> Split:
        return self._with_parts({key: part.copy() for key, part in self.parts.items()})

    def scale(self, factor: float) -> None:
        for part in self.parts.values():
            part.scale(factor)
        self._total = None

    def sort_classes(self, name: VariableName, order: list[ClassName]) -> None:
        for part in self.parts.values():
            part.sort_classes(name, order)
        self._total = None

    def sort_all_classes(self) -> None:
        """Give all parts the same classes in sorted order, whatever the sizes of the blocks."""
        self.merge_pending()
        for name, classes in self._class_names().items():
            self.sort_classes(name, classes)


def accumulator_of(parameters: Parameters) -> Part:
    return Accumulator(parameters) if parameters.by is None else Split(parameters)


def _labels_of_rows(column: Encoded, index: Index, only_observed: bool) -> Encoded:
    """Return the labels of the rows `index`, with all classes or those of these rows only."""
    if isinstance(column, ClassCodes):
        labels = ClassCodes(column.classes, column.codes[index])
        return observed(labels) if only_observed else labels
    present = None if column.present is None else column.present[index]
    return Columns(column.columns, column.values[index], present)


def _order(key: Key) -> tuple[bool, str]:
    """Return the place of a class in the order of names; rows without a label are first."""
    return key is not None, repr(class_key(key)) if key is not None else ""


def _digest(name: ClassName) -> int:
    digest = hashlib.blake2b(repr(class_key(name)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
