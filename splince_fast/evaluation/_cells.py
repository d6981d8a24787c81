"""Class codes of label columns, and cells, the combinations of classes of several columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels import ClassCodes, ClassName, encode_one
from splince_fast.labels.encoded import observed

Codes = NDArray[np.intp]

FEW_ROWS = 20  # the accuracy in a cell with fewer test rows is marked as not reliable
_MAX_PRODUCT = 10_000  # above this number of combinations, only cells with rows are listed


def class_codes(
    values: object, name: str, n: int | None = None, *, of: str = "X", declared: bool = False
) -> ClassCodes:
    """Encode a label column as class codes; floats with integer values count as integers.

    `n` is the required length, that of the argument `of`; None accepts any length. Declared
    categories without rows, as of a pandas categorical, are dropped unless `declared` is True.

    Raises
    ------
    InputError
        The column has no length, or another length than `n`.
    LabelError
        The column holds a quantity instead of classes.
    """
    if n is None:
        if not isinstance(values, Sized):
            raise InputError(f"labels are {type(values).__name__}, not a column of labels")
        n = len(values)
    encoded = encode_one(values, n, name=name, kind="classes", of=of)
    return encoded if declared else observed(encoded)


def check_classes(name: str, column: ClassCodes) -> None:
    """Raise LabelError if fewer than two classes occur in the rows of a column."""
    present = np.unique(column.codes[column.codes >= 0])
    if len(present) < 2:
        text = f"1 class ({column.classes[present[0]]!r})" if len(present) else "0 classes"
        raise LabelError(f"the {name} has {text} among its rows; at least two are needed")


def fill_missing_groups(groups: Codes) -> Codes:
    """Return group codes in which each row without a group (code -1) is a new group of one row."""
    ungrouped = groups < 0
    return np.where(ungrouped, groups.max(initial=-1) + np.cumsum(ungrouped), groups)


def common_codes(first: ClassCodes, second: ClassCodes) -> tuple[Codes, Codes]:
    """Return the codes of two columns in one list of classes, which starts with those of `first`.

    Equal values, such as 1, 1.0 and True, are one class.

    Raises
    ------
    LabelError
        The classes of one column are all text, and no class of the other column is text.
    """
    kinds = [{isinstance(name, str) for name in column.classes} for column in (first, second)]
    if kinds in ([{True}, {False}], [{False}, {True}]):
        raise LabelError(
            f"true labels such as {first.classes[0]!r} never equal predicted labels such as "
            f"{second.classes[0]!r}, because text equals no number; convert one of the columns"
        )
    index = {name: i for i, name in enumerate(first.classes)}
    for name in second.classes:
        index.setdefault(name, len(index))
    table = np.array([index[name] for name in second.classes] + [-1], dtype=np.intp)
    return first.codes, table[second.codes]


def joint_classes(columns: Sequence[ClassCodes]) -> ClassCodes:
    """Return the cells (joint classes) of several columns as one column.

    The names of the cells are tuples of classes in lexicographic order. All combinations of classes
    are listed; if there are more than 10,000, only those with rows. A row that lacks any of the
    labels has code -1. A single column is returned unchanged.
    """
    if len(columns) == 1:
        return columns[0]
    shape = [len(column.classes) for column in columns]
    missing = np.any([column.codes < 0 for column in columns], axis=0)
    codes = np.full(len(missing), -1, dtype=np.int64)
    labelled = [column.codes[~missing] for column in columns]
    if np.prod(shape, dtype=np.float64) <= _MAX_PRODUCT:
        combinations = np.indices(shape).reshape(len(shape), -1).T
        if not missing.all():
            codes[~missing] = np.ravel_multi_index(tuple(labelled), shape)
    else:
        combinations, inverse = np.unique(np.stack(labelled, 1), axis=0, return_inverse=True)
        codes[~missing] = inverse.ravel()
    names: list[Any] = [
        tuple(column.classes[i] for column, i in zip(columns, cell, strict=True))
        for cell in combinations.tolist()
    ]
    return ClassCodes(tuple(names), codes.astype(np.intp))


def texts_of(classes: Sequence[ClassName]) -> tuple[str, ...]:
    """Return distinct texts for distinct classes; the parts of a tuple are joined by " · "."""
    for convert in (str, repr):  # str may give equal texts, as for "a · b" and ("a", "b")
        texts = tuple(
            " · ".join(map(convert, name)) if isinstance(name, tuple) else str(name)
            for name in classes
        )
        if len(set(texts)) == len(texts):
            break
    return texts


def cells_of_groups(groups: object, n: int, of: str) -> ClassCodes:
    """Return the cells of `groups`, one or several columns of `n` entries, as the argument `of`."""
    if isinstance(groups, Mapping) and not groups:
        raise InputError("groups has no column; pass at least one")
    columns = columns_of(groups, "groups")
    return joint_classes(
        [class_codes(c, str(name), n, of=of, declared=True) for name, c in columns.items()]
    )


def columns_of(values: object, name: str) -> dict[str, Any]:
    """Return columns by name, from one column, mapping, frame, or tuple (names "role[0]", ...)."""
    from splince_fast.estimators.base import columns_by_name

    if isinstance(values, tuple) and values and not np.isscalar(values[0]):
        return {f"{name}[{i}]": column for i, column in enumerate(values)}
    return columns_by_name(values, name)
