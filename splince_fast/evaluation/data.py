"""Reading, checks and fingerprint of rows and labels, and the moments of each association level.

Memory-mapped rows are read in blocks. The memory pages of each block are released after use,
because they otherwise count as resident memory of each process that reads the file.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import sources
from splince_fast._runtime.arrays import as_rows, check_values
from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, encode_one
from splince_fast.labels.encoded import observed
from splince_fast.moments import Moments

Rows = NDArray[np.intp]  # row numbers
Codes = NDArray[np.intp]
Matrix = NDArray[Any]  # (n, d) rows of any dtype
Float = NDArray[np.float64]

BLOCK = 1 << 12  # rows per block
# Rows per block if rows are scattered in a file: each of them may map 2 MiB of the file.
_SCATTERED_BLOCK = 1 << 6


def read_rows(X: object) -> Matrix:
    """Read (n, d) rows from an array, frame, tensor, source, .npy file or .parquet file."""
    if isinstance(X, str | os.PathLike):
        path = Path(X)
        if path.suffix == ".npy":
            try:
                return as_rows(np.load(path, mmap_mode="r", allow_pickle=False))
            except (ValueError, EOFError) as error:
                raise InputError(
                    f"{str(path)!r} cannot be read as a .npy array: {error}. The file may be "
                    "truncated, have another format, or contain Python objects"
                ) from error
        if path.suffix != ".parquet":
            raise InputError(f"{str(path)!r} is neither a .npy nor a .parquet file")
        try:
            X = sources.from_parquet(path, embedding="embedding")
        except InputError as error:
            error.add_note(
                "compare reads the column 'embedding'; for another column, pass X="
                f"splince_fast.sources.from_parquet({str(path)!r}, COLUMN)"
            )
            raise
    if isinstance(X, sources.Source):
        arrays = [np.array(as_rows(block.X)) for block in X]
        if not arrays:
            raise InputError(f"{X.name} has no rows")
        return np.concatenate(arrays)
    return as_rows(X)


def check_finite(X: Matrix) -> None:
    """Raise NonFiniteError if the rows, read in blocks, contain NaN or infinity."""
    for _, block in blocks(X):
        try:
            check_values(block, "X")
        except InputError:
            check_values(X, "X")  # its message has row numbers of X, not of the block
            raise


def blocks(X: Matrix) -> Iterator[tuple[int, Matrix]]:
    """Yield consecutive blocks of the rows, as pairs (number of the first row, rows)."""
    for start in range(0, len(X), BLOCK):
        yield start, X[start : start + BLOCK]
        release(X)


def take_rows(X: Matrix, rows: Rows) -> Float:
    """Return a float64 copy of X[rows], read in blocks; a memory map is read in file order."""
    out = np.empty((len(rows), X.shape[1]))
    mapped = _memory_map(X) is not None
    order = np.argsort(rows, kind="stable") if mapped else np.arange(len(rows))
    size = _SCATTERED_BLOCK if mapped else BLOCK
    for start in range(0, len(rows), size):
        block = order[start : start + size]
        out[block] = X[rows[block]]
        release(X)
    return out


def release(X: Matrix) -> None:
    """Release the memory pages of a memory-mapped array; other arrays are unaffected."""
    mapping = _memory_map(X)
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def _memory_map(X: Matrix) -> mmap.mmap | None:
    """Return the memory map of an array if its pages may be released, else None.

    The result is None for an array in memory, for a map in mode "c", which would lose its changes,
    and on systems without ``MADV_DONTNEED``.
    """
    array: object = X
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array.mode == "c":
            return None
        array = array.base
    return array if isinstance(array, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") else None


def has_label(encoded: Encoded) -> NDArray[np.bool_]:
    """Return the mask (n,) of the rows that have a label."""
    if isinstance(encoded, ClassCodes):
        return np.asarray(encoded.codes >= 0)
    return np.ones(len(encoded.values), bool) if encoded.present is None else encoded.present


def labels_of(column: Encoded, rows: Rows) -> Encoded:
    """Return the labels of some rows of a column, without classes that do not occur in them."""
    if isinstance(column, Columns):
        present = None if column.present is None else column.present[rows]
        return Columns(column.columns, column.values[rows], present)
    return observed(ClassCodes(column.classes, column.codes[rows]))


def fingerprint(
    X: Matrix,
    labels: Mapping[str, Encoded],
    groups: Rows | None,
    parts: NDArray[np.int8] | None,
) -> str:
    """Return a hash of the rows, of the labels with their names, and of the groups and parts."""
    digest = hashlib.sha256(repr((X.shape, X.dtype.str, list(labels))).encode())
    for _, rows in blocks(X):
        digest.update(np.ascontiguousarray(rows).view(np.uint8).data)
    for encoded in labels.values():
        if isinstance(encoded, ClassCodes):
            digest.update(repr(encoded.classes).encode() + encoded.codes.tobytes())
        else:
            digest.update(encoded.values.tobytes() + has_label(encoded).tobytes())
    for column in (groups, parts):
        digest.update(b"-" if column is None else column.tobytes())
    return digest.hexdigest()[:16]


def level_moments(
    X: Matrix, labels: Mapping[str, Encoded], row_sets: Sequence[tuple[Rows, Float | None]]
) -> list[Moments]:
    """Return the moments of several sets of rows, such as the training rows of each level.

    `row_sets` holds each set as its row numbers and their positive weights (None for weight 1). The
    sets may overlap, but each row is accumulated at most once: rows whose weights agree in every
    set form a piece, and the moments of a set are the weighted sum of the moments of its pieces.
    """
    merged: list[Moments | None] = [None] * len(row_sets)
    for rows, weights in _pieces(len(X), row_sets):
        piece = Moments()
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            block_labels = {name: labels_of(column, block) for name, column in labels.items()}
            piece.update(take_rows(X, block), block_labels)
        for i in np.flatnonzero(weights).tolist():
            weighted = piece.copy() if weights[i] == 1.0 else piece.scaled(float(weights[i]))
            total = merged[i]
            merged[i] = weighted if total is None else total + weighted
    return [Moments() if moments is None else moments for moments in merged]


def _pieces(n: int, row_sets: Sequence[tuple[Rows, Float | None]]) -> Iterator[tuple[Rows, Float]]:
    """Yield the ascending row numbers of each piece, and the weight of its rows in every set.

    Two rows belong to the same piece if their weights agree in every set. A row outside a set has
    weight 0 in it. Rows outside all sets are left out.
    """
    codes = np.zeros(n, dtype=np.int64)
    table = np.zeros((len(row_sets), n))
    for row_weights, (rows, weights) in zip(table, row_sets, strict=True):
        row_weights[rows] = 1.0 if weights is None else weights
        levels, level_index = np.unique(row_weights, return_inverse=True)
        _, codes = np.unique(codes * len(levels) + level_index, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    firsts = np.searchsorted(codes[order], np.arange(int(codes.max(initial=-1)) + 1))
    for rows in np.split(order, firsts[1:]):
        weights_of_piece = table[:, rows[0]]
        if weights_of_piece.any():
            yield rows, weights_of_piece


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
