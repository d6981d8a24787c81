"""Rows, labels and groups of a data set: reading, checks, class codes, cells, fingerprint."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import sources
from splince_fast._runtime.rows import as_rows
from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, encode, encode_one
from splince_fast.labels.encoded import observed
from splince_fast.sources._npy import open_npy

Rows = NDArray[np.intp]  # row numbers
Codes = NDArray[np.intp]
Matrix = NDArray[Any]  # (n, d) rows of any dtype
Float = NDArray[np.float64]

BLOCK = 1 << 12  # rows per block, in which memory-mapped rows are read
FEW_ROWS = 20  # the accuracy in a cell with fewer test rows is marked as not reliable
_MAX_PRODUCT = 10_000  # above this number of combinations, only cells with rows are listed


def read_rows(X: object) -> Matrix:
    """Read (n, d) rows from an array, frame, tensor, source or .npy file."""
    if isinstance(X, str | os.PathLike):
        if Path(X).suffix != ".npy":
            raise InputError(
                f"{os.fspath(X)!r} is not a .npy file; read others by splince_fast.sources, such "
                "as from_parquet(path, embedding=COLUMN)"
            )
        return as_rows(open_npy(os.fspath(X)))
    if isinstance(X, sources.Source):
        if X.shuffled:
            raise InputError(f"{X.name} shuffles, but labels do not; pass shuffle=False to it")
        arrays = [np.array(as_rows(block.X)) for block in X]
        if not arrays:
            raise InputError(f"{X.name} has no rows")
        return np.concatenate(arrays)
    array = X
    while isinstance(array, np.ndarray):
        # Worker processes would map the file of a copy-on-write map, without the changes.
        if isinstance(array, np.memmap) and array.mode == "c":
            return as_rows(np.array(X))
        array = array.base
    return as_rows(X)


def blocks(X: Matrix) -> Iterator[Matrix]:
    """Yield consecutive blocks of the rows."""
    for start in range(0, len(X), BLOCK):
        yield X[start : start + BLOCK]


def take_rows(X: Matrix, rows: Rows) -> Float:
    """Return a float64 copy of X[rows]."""
    out = np.empty((len(rows), X.shape[1]))
    for start in range(0, len(rows), BLOCK):
        out[start : start + BLOCK] = X[rows[start : start + BLOCK]]
    return out


def has_label(encoded: Encoded) -> NDArray[np.bool_]:
    """Return the mask (n,) of the rows that have a label."""
    if isinstance(encoded, ClassCodes):
        return np.asarray(encoded.codes >= 0)
    return np.ones(len(encoded.values), bool) if encoded.present is None else encoded.present


def values_of(encoded: Encoded) -> NDArray[Any]:
    """Return the class codes (n,), or the values (n, k) of a quantity."""
    return encoded.codes if isinstance(encoded, ClassCodes) else encoded.values


def labels_of(column: Encoded, rows: Rows) -> Encoded:
    """Return the labels of some rows of a column, without classes that do not occur in them."""
    if isinstance(column, Columns):
        present = None if column.present is None else column.present[rows]
        return Columns(column.columns, column.values[rows], present)
    return observed(ClassCodes(column.classes, column.codes[rows]))


def fingerprint(
    X: Matrix, labels: Mapping[str, Encoded], groups: Rows | None, parts: NDArray[np.int8] | None
) -> str:
    """Return a hash of the rows, of the labels with their names, and of the groups and parts."""
    digest = hashlib.sha256(repr((X.shape, X.dtype.str, list(labels))).encode())
    for rows in blocks(X):
        digest.update(np.ascontiguousarray(rows).view(np.uint8).data)
    for encoded in labels.values():
        if isinstance(encoded, ClassCodes):
            digest.update(repr(encoded.classes).encode() + encoded.codes.tobytes())
        else:
            digest.update(encoded.values.tobytes() + has_label(encoded).tobytes())
    for column in (groups, parts):
        digest.update(b"-" if column is None else column.tobytes())
    return digest.hexdigest()[:16]


def class_codes(
    values: object, name: str, n: int | None = None, *, of: str = "X", declared: bool = False
) -> ClassCodes:
    """Encode a column of `n` labels, as many as the argument `of`; drop classes without rows."""
    if n is None and not isinstance(values, Sized):
        raise InputError(f"labels are {type(values).__name__}, not a column of labels")
    n = len(values) if n is None else n  # type: ignore[arg-type]
    encoded = encode_one(values, n, name=name, kind="classes", of=of)
    return encoded if declared else observed(encoded)


def occurring_classes(name: str, column: ClassCodes) -> ClassCodes:
    """Drop classes without rows; raise LabelError if fewer than two classes are left."""
    column = observed(column)
    if len(column.classes) < 2:
        text = f"1 class ({column.classes[0]!r})" if column.classes else "0 classes"
        raise LabelError(f"the {name} has {text} among its rows; at least two are needed")
    return column


def fill_missing_groups(groups: Codes) -> Codes:
    """Return group codes in which each row without a group (code -1) is a new group of one row."""
    ungrouped = groups < 0
    return np.where(ungrouped, groups.max(initial=-1) + np.cumsum(ungrouped), groups)


def common_codes(first: ClassCodes, second: ClassCodes) -> tuple[Codes, Codes]:
    """Return codes of two columns in one list of classes, which starts with those of `first`."""
    kinds = [{isinstance(name, str) for name in column.classes} for column in (first, second)]
    if kinds in ([{True}, {False}], [{False}, {True}]):
        raise LabelError(
            f"true labels such as {first.classes[0]!r} never equal predicted labels such as "
            f"{second.classes[0]!r}, because text equals no number; convert one of the columns"
        )
    index = {name: i for i, name in enumerate(first.classes)}
    for name in second.classes:
        index.setdefault(name, len(index))
    table = np.array([*(index[name] for name in second.classes), -1], dtype=np.intp)
    return first.codes, table[second.codes]


def joint_classes(columns: Sequence[Encoded]) -> ClassCodes | None:
    """Return the cells of several columns as one column; None if one of them is a quantity."""
    by_name = {str(i): column for i, column in enumerate(columns) if isinstance(column, ClassCodes)}
    if len(by_name) < len(columns):
        return None
    if len(columns) == 1:
        return by_name["0"]
    cells = encode(by_name, len(by_name["0"]), joint=[tuple(by_name)])[tuple(by_name)]
    assert isinstance(cells, ClassCodes)
    return cells


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


def cells_of_groups(groups: object, n: int, of: str) -> tuple[ClassCodes, Sequence[ClassName]]:
    """Return the cells of one or several columns of `n` groups, and all combinations of classes."""
    if isinstance(groups, Mapping) and not groups:
        raise InputError("groups has no column; pass at least one")
    columns = [
        class_codes(column, str(name), n, of=of, declared=True)
        for name, column in columns_of(groups, "groups").items()
    ]
    cells = joint_classes(columns)
    assert cells is not None
    classes: list[tuple[Any, ...]] = [column.classes for column in columns]
    if len(columns) == 1 or math.prod(map(len, classes)) > _MAX_PRODUCT:
        return cells, cells.classes
    return cells, list(product(*classes))


def counts_per_code(codes: Codes, correct: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Return each code that occurs, its number of rows, and its number of correct rows."""
    counts = np.bincount(codes[codes >= 0])
    n_correct = np.bincount(codes[correct & (codes >= 0)], minlength=len(counts))
    pairs = zip(counts.tolist(), n_correct.tolist(), strict=True)
    return [(code, n, k) for code, (n, k) in enumerate(pairs) if n]


def columns_of(values: object, name: str) -> dict[str, Any]:
    """Return columns by name, from one column, mapping, frame, or tuple (names "role[0]", ...)."""
    from splince_fast.transformer import columns_by_name

    if isinstance(values, tuple) and values and not np.isscalar(values[0]):
        return {f"{name}[{i}]": column for i, column in enumerate(values)}
    return columns_by_name(values, name)
