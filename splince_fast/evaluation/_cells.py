"""Classes of label columns, and cells: combinations of the classes of several columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels import ClassCodes, ClassName, encode_one
from splince_fast.labels.encoded import observed

Codes = NDArray[np.intp]

FEW_ROWS = 20  # the accuracy in a cell with fewer rows is marked as not reliable
_MAX_PRODUCT = 10_000  # with more combinations of classes, only cells with rows are listed


def class_codes(
    values: object, name: str, n: int | None = None, *, declared: bool = False
) -> ClassCodes:
    """Encode a column as classes; floats with integer values count as integers.

    `n` is the required length; None accepts any length. Categories without rows are left out,
    unless `declared` is set.

    Raises
    ------
    InputError
        The column has no length, or another length than `n`.
    LabelError
        The column is a quantity.
    """
    if n is None:
        if not isinstance(values, Sized):
            raise InputError(f"labels are {type(values).__name__}, not a column of labels")
        n = len(values)
    encoded = encode_one(values, n, name=name, kind="classes")
    return encoded if declared else observed(encoded)


def check_classes(name: str, column: ClassCodes) -> None:
    """Raise LabelError if the rows of a column have fewer than two classes."""
    present = np.unique(column.codes[column.codes >= 0])
    if len(present) < 2:
        text = f"1 class ({column.classes[present[0]]!r})" if len(present) else "0 classes"
        raise LabelError(f"the {name} has {text} among its rows; at least two are needed")


def members(groups: Codes) -> Codes:
    """Give each row without a group (code -1) the code of a new group."""
    ungrouped = groups < 0
    return np.where(ungrouped, groups.max(initial=-1) + np.cumsum(ungrouped), groups)


def common(first: ClassCodes, second: ClassCodes) -> tuple[Codes, Codes]:
    """Codes of two columns in a common list of classes, which starts with the classes of `first`.

    Equal values, such as 1, 1.0 and True, are one class.

    Raises
    ------
    LabelError
        All classes of one column, and no class of the other, are text, so that no row is equal.
    """
    kinds = [{isinstance(name, str) for name in column.classes} for column in (first, second)]
    if kinds in ([{True}, {False}], [{False}, {True}]):
        raise LabelError(
            f"the true labels are such as {first.classes[0]!r} and the predicted ones such as "
            f"{second.classes[0]!r}: text equals no number; convert one of the columns"
        )
    index = {name: i for i, name in enumerate(first.classes)}
    for name in second.classes:
        index.setdefault(name, len(index))
    table = np.array([index[name] for name in second.classes] + [-1], dtype=np.intp)
    return first.codes, table[second.codes]


def joint(columns: Sequence[ClassCodes]) -> ClassCodes:
    """Combine the classes of several columns to cells, named by tuples in lexicographic order.

    All combinations of classes are listed; if there are more than 10,000, only combinations with
    rows. A row that lacks one of the labels has code -1. One column is returned unchanged.
    """
    if len(columns) == 1:
        return columns[0]
    shape = [len(column.classes) for column in columns]
    missing = np.any([column.codes < 0 for column in columns], axis=0)
    codes = np.full(len(missing), -1, dtype=np.int64)
    present = [column.codes[~missing] for column in columns]
    if np.prod(shape, dtype=np.float64) <= _MAX_PRODUCT:
        combinations = np.indices(shape).reshape(len(shape), -1).T
        if not missing.all():
            codes[~missing] = np.ravel_multi_index(tuple(present), shape)
    else:
        combinations, inverse = np.unique(np.stack(present, 1), axis=0, return_inverse=True)
        codes[~missing] = inverse.ravel()
    names: list[Any] = [
        tuple(column.classes[i] for column, i in zip(columns, cell, strict=True))
        for cell in combinations.tolist()
    ]
    return ClassCodes(tuple(names), codes.astype(np.intp))


def texts_of(classes: Sequence[ClassName]) -> tuple[str, ...]:
    """Texts of classes, distinct for distinct classes; the parts of tuples are joined by " · "."""
    for text in (str, repr):  # the name of a class may contain the separator
        texts = tuple(
            " · ".join(map(text, name)) if isinstance(name, tuple) else str(name)
            for name in classes
        )
        if len(set(texts)) == len(texts):
            break
    return texts


def cells_of_groups(groups: object, n: int) -> ClassCodes:
    """Cells of a column of groups, or of a tuple, mapping or frame of columns."""
    if isinstance(groups, Mapping) and not groups:
        raise InputError("groups holds no column; pass at least one")
    columns = columns_of(groups, "groups")
    return joint([class_codes(c, str(name), n, declared=True) for name, c in columns.items()])


def columns_of(values: object, role: str) -> dict[str, Any]:
    """Columns by name, from one column, a mapping, a frame, or a tuple (names "role[0]", ...)."""
    from splince_fast.estimators.base import columns_by_name

    if isinstance(values, tuple) and values and not np.isscalar(values[0]):
        return {f"{role}[{i}]": column for i, column in enumerate(values)}
    return columns_by_name(values, role)
