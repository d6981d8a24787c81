"""The two forms of an encoded variable: class codes, or columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.names import ClassName


@dataclass(frozen=True, slots=True, eq=False)
class ClassCodes:
    """A class-coded variable in one block.

    Attributes
    ----------
    classes : tuple of str, bool, int or tuple
        Names of the classes that occur in the block, sorted; tuples for joint cells. For a pandas
        categorical or a polars Enum, all declared categories, in the declared order. Empty if every
        label is missing; the variable may then be of either kind.
    codes : ndarray of intp, shape (n,)
        For each row, the index of its class in ``classes``; -1 for a missing label.

    Examples
    --------
    >>> from splince_fast import labels
    >>> codes = labels.encode_one(["no", "yes", None], 3, name="smoker")
    >>> codes.classes, codes.codes.tolist()
    (('no', 'yes'), [0, 1, -1])
    >>> len(codes[:2])
    2
    """

    classes: tuple[ClassName, ...]
    codes: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> ClassCodes:
        """Return the codes of a slice of the rows, with all classes unchanged."""
        return ClassCodes(self.classes, self.codes[rows])


def observed(column: ClassCodes) -> ClassCodes:
    """Return `column` without the declared classes that no row has."""
    codes = column.codes[column.codes >= 0]
    occurring = np.flatnonzero(np.bincount(codes, minlength=len(column.classes)))
    if len(occurring) == len(column.classes):
        return column
    table = np.full(len(column.classes) + 1, -1, dtype=np.intp)
    table[occurring] = np.arange(len(occurring))
    return ClassCodes(tuple(column.classes[code] for code in occurring), table[column.codes])


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A continuous variable in one block.

    Attributes
    ----------
    columns : tuple of str
        Names of the k columns: those of a frame, otherwise "0", "1", ...
    values : ndarray of float64, shape (n, k), C-contiguous
        Finite values; a row with a missing value is 0.0 in all columns.
    present : ndarray of bool, shape (n,), or None
        Mask of the rows with a value in every column; None if no value is missing.

    Examples
    --------
    >>> from splince_fast import labels
    >>> age = labels.encode_one([41.5, float("nan")], 2, name="age")
    >>> age.values.tolist(), age.present.tolist()
    ([[41.5], [0.0]], [True, False])
    """

    columns: tuple[str, ...]
    values: NDArray[np.float64]
    present: NDArray[np.bool_] | None


Encoded: TypeAlias = ClassCodes | Columns


def kind_of(encoded: Encoded) -> Literal["classes", "continuous"]:
    """Return the kind of an encoded variable."""
    return "classes" if isinstance(encoded, ClassCodes) else "continuous"
