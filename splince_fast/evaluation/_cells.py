"""Cells of labels: columns as integer codes, and accuracies in their cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels import ClassCodes, encode_one

Codes = NDArray[np.intp]

FEW_ROWS = 20  # a cell of fewer rows says little of its accuracy


class Coded(NamedTuple):
    """Class labels: names in order and, per row, the position of its name or -1."""

    names: tuple[Any, ...]
    codes: Codes


def n_labels(values: Any) -> int:
    """Number of entries of a column.

    Raises
    ------
    InputError
        The object has no length.
    """
    try:
        return len(values)
    except TypeError as error:
        raise InputError(f"labels are {type(values).__name__}, not a column of labels") from error


def coded(values: Any, name: str, n: int | None = None) -> Coded:
    """Read a column as classes, whole numbers in floats included.

    Parameters
    ----------
    values : column
        Any container that :mod:`splince_fast.labels` reads.
    name : str
        For messages.
    n : int, optional
        Number of rows it must have.
    """
    rows = n_labels(values) if n is None else n
    encoded = encode_one(values, rows, name=name, kind="classes")
    if not isinstance(encoded, ClassCodes):
        raise LabelError(f"{name} holds quantities; classes are needed here")
    return Coded(encoded.classes, encoded.codes)


def check_classes(name: str, column: Coded) -> None:
    """Refuse a column without two classes.

    Raises
    ------
    LabelError
        One class, which is named, or none.
    """
    seen = np.unique(column.codes[column.codes >= 0])
    if len(seen) < 2:
        found = f"1 class ({column.names[seen[0]]!r})" if len(seen) else "0 classes"
        raise LabelError(f"the {name} has {found} among its rows; at least two are needed")


def common(first: Coded, second: Coded) -> tuple[tuple[Any, ...], Codes, Codes]:
    """Codes of two columns over one list of names; 1, 1.0 and True are one name here."""
    place = {name: i for i, name in enumerate(first.names)}
    for name in second.names:
        place.setdefault(name, len(place))
    table = np.array([place[name] for name in second.names] + [-1], dtype=np.intp)
    return tuple(place), first.codes, table[second.codes]


def joint(columns: Sequence[Coded]) -> Coded:
    """Cells of several columns: names are tuples, all combinations, lexicographic.

    A row that lacks one of its labels has code -1. Only combinations that occur get a name
    where there are more than 10,000 of them.
    """
    if len(columns) == 1:
        return columns[0]
    size = int(np.prod([len(column.names) for column in columns], dtype=np.float64))
    codes = np.zeros(len(columns[0].codes), dtype=np.int64)
    missing = np.zeros(len(codes), dtype=bool)
    for column in columns:
        codes = codes * len(column.names) + column.codes
        missing |= column.codes < 0
    codes[missing] = -1
    if size <= 10_000:
        shapes = [range(len(column.names)) for column in columns]
        grid = np.stack(np.meshgrid(*shapes, indexing="ij"), axis=-1).reshape(-1, len(columns))
        present = np.arange(size)
    else:
        present, inverse = np.unique(codes[~missing], return_inverse=True)
        codes[~missing] = inverse
        rest, parts = present.copy(), []
        for column in reversed(columns):
            parts.append(rest % len(column.names))
            rest //= len(column.names)
        grid = np.stack(parts[::-1], axis=-1)
    names = tuple(
        tuple(column.names[i] for column, i in zip(columns, cell, strict=True))
        for cell in grid.tolist()
    )
    return Coded(names, codes.astype(np.intp))


def group_cells(groups: Any, n: int) -> Coded:
    """Cells of one column of groups, or of a tuple, mapping or frame of columns."""
    if isinstance(groups, tuple) and groups and not np.isscalar(groups[0]):
        columns = {f"groups[{i}]": column for i, column in enumerate(groups)}
    elif isinstance(groups, dict):
        columns = dict(groups)
    elif hasattr(groups, "columns") and hasattr(groups, "shape"):
        columns = {str(name): groups[name] for name in groups.columns}
    else:
        columns = {"groups": groups}
    return joint([coded(column, name, n) for name, column in columns.items()])


def alias(groups: Any, sensitive_features: Any, name: str = "groups") -> Any:
    """The one of two spellings of an argument that was used.

    Raises
    ------
    InputError
        Both were, or neither.
    """
    if (groups is None) == (sensitive_features is None):
        raise InputError(f"pass {name}= (or its alias sensitive_features=), and only one of them")
    return sensitive_features if groups is None else groups


@dataclass(frozen=True, slots=True)
class CellAccuracy:
    """Accuracy in one cell.

    Attributes
    ----------
    cell : object
        Name of the group, a tuple for a product of groups.
    n : int
        Rows.
    accuracy : float
        Share of correct decisions, weighted where weights were given.
    low, high : float
        Wilson interval from the counts.
    """

    cell: Any
    n: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GroupAccuracy:
    """Accuracy per cell of groups.

    Attributes
    ----------
    rows : tuple of CellAccuracy
        Cells with at least one row, in the order of their names.
    missing : tuple
        Cells of the product of the groups that have no row.
    n : int
        Rows in all.
    overall : float
        Accuracy of all rows, weighted where weights were given.
    interval : float
        Level of the Wilson intervals.
    """

    rows: tuple[CellAccuracy, ...]
    missing: tuple[Any, ...]
    n: int
    overall: float
    interval: float

    @property
    def worst(self) -> CellAccuracy:
        """The cell of lowest accuracy; a minimum over noisy cells is biased downwards."""
        return min(self.rows, key=lambda row: row.accuracy)

    @property
    def mean(self) -> float:
        """Unweighted mean over cells."""
        return math.fsum(row.accuracy for row in self.rows) / len(self.rows)

    def weighted(self, by: Mapping[Any, float]) -> float:
        """Mean over cells with given shares, such as those of the training rows.

        Parameters
        ----------
        by : mapping of cell to float
            Shares or counts; cells that have no row here must not carry any.

        Returns
        -------
        float
            sum_g by[g] accuracy_g / sum_g by[g].

        Raises
        ------
        InputError
            A negative or non-finite share, a share for a cell without rows, or no share at all.
        """
        accuracies = {row.cell: row.accuracy for row in self.rows}
        bad = [cell for cell, w in by.items() if not (math.isfinite(w) and w >= 0)]
        if bad:
            raise InputError(f"the share of cell {bad[0]!r} must be a finite number of at least 0")
        absent = [cell for cell, w in by.items() if w > 0 and cell not in accuracies]
        if absent:
            raise InputError(
                f"cell {absent[0]!r} has a share but no row here; the cells are "
                f"{list(accuracies)[:20]}"
            )
        total = math.fsum(by.values())
        if total <= 0:
            raise InputError("the shares add up to 0; pass counts or shares of the cells")
        return math.fsum(accuracies[cell] * w for cell, w in by.items() if w > 0) / total

    def __str__(self) -> str:
        shown = sorted(self.rows, key=lambda row: row.accuracy)[:10]
        lines = [f"accuracy {self.overall:.3f} on {self.n:,} rows, {len(self.rows)} cells"]
        if len(self.rows) > len(shown):
            lines[0] += f" (the {len(shown)} worst)"
        for row in shown:
            few = f"  (fewer than {FEW_ROWS} rows)" if row.n < FEW_ROWS else ""
            lines.append(
                f"  {row.accuracy:.3f} [{row.low:.3f}, {row.high:.3f}]  n = {row.n:<6,} "
                f"{row.cell!r}{few}"
            )
        if self.missing:
            lines.append(f"  without rows: {', '.join(map(repr, self.missing[:10]))}")
        return "\n".join(lines)


class ClassAccuracy(dict[Any, float]):
    """Accuracy per class of the truth, as a dictionary.

    Examples
    --------
    >>> from splince_fast.evaluation import class_accuracy
    >>> class_accuracy([0, 0, 1], [0, 1, 1])
    {0: 0.5, 1: 1.0}
    >>> class_accuracy([0, 0, 1], [0, 1, 1]).mean
    0.75
    """

    @property
    def mean(self) -> float:
        """Unweighted mean over classes: the balanced accuracy."""
        return math.fsum(self.values()) / len(self)
