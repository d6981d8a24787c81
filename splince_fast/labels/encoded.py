"""The two forms of an encoded variable: codes of classes, or columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast.labels.names import ClassName


@dataclass(frozen=True, slots=True, eq=False)
class ClassCodes:
    """A class-coded variable in one block.

    Attributes
    ----------
    classes : tuple of str, bool, int or tuple
        Names of the classes: those present in the block, sorted; for a pandas categorical or
        a polars Enum all that it declares, in its order. Tuples name joint cells. Empty if
        every label is missing; this alone says nothing about the kind of the variable.
    codes : ndarray of intp, shape (n,)
        Position in ``classes`` of each row's class; -1 where the label is missing.

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
        """Some of the rows; the classes stay those of all."""
        return ClassCodes(self.classes, self.codes[rows])


def observed(column: ClassCodes) -> ClassCodes:
    """The column with only the classes that occur in it: a categorical may declare more."""
    seen = np.unique(column.codes[column.codes >= 0])
    if len(seen) == len(column.classes):
        return column
    table = np.full(len(column.classes) + 1, -1, dtype=np.intp)
    table[seen] = np.arange(len(seen))
    return ClassCodes(tuple(column.classes[code] for code in seen), table[column.codes])


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A continuous variable in one block.

    Attributes
    ----------
    columns : tuple of str
        Names of the k columns: a frame's own, otherwise "0", "1", ...
    values : ndarray of float64, shape (n, k), C-contiguous
        Finite; 0.0 throughout in rows that are missing.
    present : ndarray of bool, shape (n,), or None
        Rows that have a value in every column; None if all do.

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
    """Return the kind of an encoded variable.

    Examples
    --------
    >>> from splince_fast import labels
    >>> labels.kind_of(labels.encode_one([0.5, 1.5], 2, name="score"))
    'continuous'
    """
    return "classes" if isinstance(encoded, ClassCodes) else "continuous"
