"""Labels as integer codes: one reading of them for metrics, splits and heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels import ClassCodes, encode_one

Codes = NDArray[np.intp]


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
