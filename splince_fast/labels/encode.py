"""Encoding of variables as class codes or numbers, and of joint cells as class codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type, warn
from splince_fast._runtime.names import ClassName, VariableName, listed
from splince_fast.exceptions import (
    InputError,
    LabelError,
    ManyClassesWarning,
    MissingLabelWarning,
    WholeNumbersWarning,
)
from splince_fast.labels.containers import (
    SPLIT_ADVICE,
    Numbers,
    check_indicators,
    float_copy,
    read_column,
    refuse,
    refuse_infinite,
    variables_of,
    whole_numbers,
)
from splince_fast.labels.encoded import ClassCodes, Columns, Encoded, kind_of

KINDS = ("classes", "continuous")
# More distinct integers than this give a ManyClassesWarning.
MANY_CLASSES = 1000
# At most this many distinct whole-number floats give a WholeNumbersWarning.
FEW_VALUES = 20
# Texts of missing values: str() of those of Python, NumPy and pandas, and an empty field of a file.
_MISSING_AS_TEXT = frozenset(("None", "nan", "NaN", "NaT", "<NA>", ""))


def encode(
    labels: object,
    n_rows: int,
    *,
    kinds: Mapping[str, str] | None = None,
    joint: Sequence[tuple[str, ...]] = (),
    default_name: str = "concept",
) -> dict[VariableName, Encoded]:
    """Encode the labels of one block.

    Parameters
    ----------
    labels : None, mapping, frame, or one column
        Mapping from variable names to columns (see :func:`encode_one`); pandas or polars frame or
        Arrow table, with one variable per column; or a single column. None and an empty mapping
        mean that the block has no labels.
    n_rows : int
        Number of rows of the block, and of labels per variable.
    kinds : mapping, optional
        Kind, "classes" or "continuous", by variable name; by default, the type of the labels
        determines it.
    joint : sequence of tuples of str
        Names of class-coded variables. Each tuple is an additional variable, whose classes are the
        tuples of classes that occur in the block (joint cells), sorted. The joint label of a row is
        missing if one of its labels is.
    default_name : str
        Variable name of a single column that is no Series with a name.

    Returns
    -------
    dict
        :class:`ClassCodes` or :class:`Columns` by variable name.

    Raises
    ------
    LabelError, InputError, NonFiniteError
        As for :func:`encode_one`, or a name is no string, or unknown in `kinds` or `joint`.

    Examples
    --------
    >>> from splince_fast import labels
    >>> block = {"gender": ["f", "m", "f"], "doctor": [1, 0, 0], "age": [41.5, 35.0, 52.25]}
    >>> encoded = labels.encode(block, 3, joint=[("gender", "doctor")])
    >>> encoded["gender"].classes, encoded[("gender", "doctor")].classes
    (('f', 'm'), (('f', 0), ('f', 1), ('m', 0)))
    """
    if labels is None:
        return {}
    variables = labels if type(labels) is dict else variables_of(labels, default_name)
    if not variables:
        return {}
    for name in variables:
        if not isinstance(name, str):
            raise LabelError(
                f"the variable name {name!r} is not a string but {described_type(name)}; "
                "rename the key, column or Series"
            )
    for name in kinds or ():
        if name not in variables:
            raise LabelError(
                f"kinds names {name!r}, which is not among the variables {listed(variables)}"
            )
    encoded: dict[VariableName, Encoded] = {}
    for name, values in variables.items():
        kind = kinds.get(name) if kinds else None
        encoded[name] = _encode(values, n_rows, name, kind, "the block", by_kinds=True)
    if joint:
        encoded |= _joint_variables(joint, encoded)
    return encoded


@overload
def encode_one(
    values: Any, n_rows: int, *, name: str, kind: Literal["classes"], of: str = ...
) -> ClassCodes: ...
@overload
def encode_one(
    values: object, n_rows: int, *, name: str, kind: str | None = None, of: str = ...
) -> Encoded: ...
def encode_one(
    values: object, n_rows: int, *, name: str, kind: str | None = None, of: str = "the block"
) -> Encoded:
    """Encode one variable of one block.

    Strings, booleans, integers and categoricals are classes; floats, ``Decimal`` and mixtures of
    integers and floats are continuous. Values of shape (n, k), k > 1, are k continuous columns,
    whose integers must be indicators (0 or 1), because class numbers are not quantities.

    Parameters
    ----------
    values : column
        Sequence; NumPy array (also masked, or of objects); pandas or polars Series, index or
        categorical; Arrow array; torch tensor; SciPy sparse matrix; any object with ``__array__``;
        a frame, for several columns; or ClassCodes or Columns, which are returned unchanged.
    n_rows : int
        Number of rows of the block.
    name : str
        Name of the variable, for messages.
    kind : {"classes", "continuous"}, optional
        Overrides the type: "continuous" reads integers or booleans as numbers, "classes" reads
        whole-number floats as classes.
    of : str
        Name of the rows, for messages.

    Returns
    -------
    ClassCodes or Columns
        ClassCodes without classes if all labels are missing objects such as None.

    Raises
    ------
    LabelError, InputError, NonFiniteError
        The column cannot be read, does not have `n_rows` labels, or holds an infinite number.

    Warns
    -----
    ManyClassesWarning, MissingLabelWarning, WholeNumbersWarning
        `kind` is None, and an integer column has more than 1,000 distinct values, a class has the
        text of a missing value, such as "nan", as its name, or a float column has 3 to 20 distinct
        values, all whole and repeated.

    Examples
    --------
    >>> from splince_fast import labels
    >>> labels.encode_one([1950, 1980, 1950], 3, name="year", kind="continuous").values.tolist()
    [[1950.0], [1980.0], [1950.0]]
    """
    return _encode(values, n_rows, name, kind, of)


def _encode(
    values: object, n_rows: int, name: str, kind: str | None, of: str, by_kinds: bool = False
) -> Encoded:
    """Encode one variable; messages name `kinds` as remedy if the caller takes this parameter."""
    if kind is not None and kind not in KINDS:
        raise LabelError(
            f"variable {name!r} has the unknown kind {kind!r}; choose from {listed(KINDS)}"
        )
    if isinstance(values, ClassCodes | Columns):
        column: Numbers | ClassCodes | Columns = values
    elif type(values) is np.ndarray and values.ndim == 1 and values.dtype.kind in "biuf":
        column = Numbers(values)
    else:
        column = read_column(values, name, kind)
    rows = column.codes if isinstance(column, ClassCodes) else column.values
    if len(rows) != n_rows:
        hint = "pass one label per row, None or NaN where it is unknown"
        if rows.shape[1:] == (n_rows,):
            hint = f"its shape {rows.shape} looks transposed: pass its .T"
        raise InputError(
            f"variable {name!r} has {len(rows)} labels but {of} has {n_rows} rows; {hint}"
        )
    if not isinstance(column, Numbers):
        if kind not in (None, kind_of(column)):
            example = column.classes[:1] if isinstance(column, ClassCodes) else rows[:1].tolist()
            refuse(name, f"cannot be {kind}: it holds {kind_of(column)} such as {listed(example)}")
        if kind is None and isinstance(column, ClassCodes) and column is not values:
            _warn_of_texts(column.classes, n_rows, name, by_kinds)
        return column
    if rows.ndim == 2 and rows.shape[1] > 1:
        if kind == "classes":
            refuse(name, "has several columns, so it cannot be classes; " + SPLIT_ADVICE)
        check_indicators(column, name, kind)
        return _columns(column, name)
    missing = None if column.missing is None else column.missing.reshape(n_rows)
    column = column._replace(values=rows.reshape(n_rows), missing=missing)
    is_float = rows.dtype.kind == "f"
    if kind == "continuous" or (kind is None and is_float and not column.unknown):
        if rows.dtype.kind == "O":
            refuse(name, f"cannot be continuous: it holds classes such as {column.values[0]}")
        columns = _columns(column, name)
        if kind is None:
            _warn_of_whole_numbers(columns, name, by_kinds)
        return columns
    integers = whole_numbers(column, name) if is_float else (column.values, column.missing)
    distinct, codes = _distinct(*integers)
    if kind is None and len(distinct) > MANY_CLASSES:
        warn(
            f"variable {name!r} holds integers, read as classes, and more than {MANY_CLASSES:,} "
            f"values; for quantities pass {_choice(name, 'continuous', by_kinds)}; "
            f"{_choice(name, 'classes', by_kinds)} silences this warning",
            ManyClassesWarning,
        )
    return ClassCodes(tuple(map(bool, distinct) if rows.dtype.kind == "b" else distinct), codes)


# --- warnings -----------------------------------------------------------------------------------


def _choice(name: str, kind: str, by_kinds: bool) -> str:
    """Return the expression that sets the kind of a variable, for a message."""
    if by_kinds:
        return f"kinds={{{name!r}: {kind!r}}}"
    return f"labels.encode_one(column, len(column), name={name!r}, kind={kind!r})"


def _warn_of_texts(classes: tuple[ClassName, ...], n_rows: int, name: str, by_kinds: bool) -> None:
    """Warn if the name of a class is the text of a missing value, such as "nan"."""
    if len(classes) > max(n_rows, MANY_CLASSES):  # declared classes, too many to look at
        return
    matches = sorted(_MISSING_AS_TEXT.intersection(classes))
    if matches:
        warn(
            f"variable {name!r} has the class {matches[0]!r}, which looks like a missing value in "
            f"text; pass None or NaN for missing labels; {_choice(name, 'classes', by_kinds)} "
            "silences this warning",
            MissingLabelWarning,
        )


def _warn_of_whole_numbers(columns: Columns, name: str, by_kinds: bool) -> None:
    """Warn if floats look like class numbers: few distinct values, all whole and repeated."""
    # pandas converts integers to floats if a label is missing. With two distinct values both
    # readings give the same eraser, because the span of Cov(x, z) is the same. With fewer than 6
    # values, repeated whole numbers may be chance.
    values = columns.values[:, 0] if columns.present is None else columns.values[columns.present, 0]
    if len(values) < 6 or (values[:64] != np.floor(values[:64])).any():  # most quantities
        return
    distinct = np.unique(values)
    are_whole = (distinct == np.floor(distinct)).all() and np.abs(distinct).max() < 2.0**53
    if are_whole and 3 <= len(distinct) <= min(FEW_VALUES, len(values) // 2):
        warn(
            f"variable {name!r} holds floats, read as numbers, {len(distinct)} of them, all whole; "
            "for classes cast them to integers (in pandas 'Int64') or pass "
            f"{_choice(name, 'classes', by_kinds)}, for numbers kind 'continuous' (on the command "
            f"line: --kind {name}=classes)",
            WholeNumbersWarning,
        )


# --- class codes and columns of numbers ---------------------------------------------------------


def _distinct(
    values: NDArray[Any], missing: NDArray[np.bool_] | None = None
) -> tuple[list[int], NDArray[np.intp]]:
    """Return the sorted distinct integers or booleans, and the index of each row's, or -1."""
    n = len(values)
    if missing is not None:
        codes = np.full(n, -1, dtype=np.intp)
        distinct, codes[~missing] = _distinct(values[~missing])
        return distinct, codes
    smallest = values.min() if n else np.int64(0)
    low = int(smallest)
    size = int(values.max()) - low + 1 if n else 0
    if size > 4 * n + 1024 or values.dtype.kind == "O":  # too large for a lookup table
        unique, codes = np.unique(values, return_inverse=True)
        return unique.tolist(), codes
    # Unsigned integers beyond int64 wrap around, as the smallest one does: offsets are exact.
    offsets = np.subtract(values.astype(np.int64), smallest.astype(np.int64), dtype=np.int64)
    offsets = offsets.astype(np.intp, copy=False)
    if size <= 2:
        return list(range(low, low + size)), offsets
    occurs = np.zeros(size, dtype=np.bool_)
    occurs[offsets] = True
    distinct = [low + offset for offset in np.flatnonzero(occurs).tolist()]
    return distinct, (np.cumsum(occurs, dtype=np.intp) - 1)[offsets]


def _columns(column: Numbers, name: str) -> Columns:
    values = float_copy(column)
    if values.ndim == 1:
        values = values[:, None]
    present = None
    if not np.isfinite(values).all():
        refuse_infinite(values, name)
        missing_rows: NDArray[np.bool_] = np.asarray(np.isnan(values).any(axis=1))
        values[missing_rows] = 0.0
        present = ~missing_rows
    return Columns(column.columns or tuple(map(str, range(values.shape[1]))), values, present)


# --- joint cells --------------------------------------------------------------------------------


def _joint_variables(
    joint: Sequence[tuple[str, ...]], encoded: Mapping[VariableName, Encoded]
) -> dict[VariableName, Encoded]:
    """Encode the joint cells of each tuple of variables; the tuple is the key of the result."""
    cells: dict[VariableName, Encoded] = {}
    for names in joint:
        if isinstance(names, str) or len(set(names)) != len(names) or len(names) < 2:
            raise LabelError(
                f"joint holds {names!r}, which is not a tuple of two or more different names; "
                "write joint=(('gender', 'race'),), with a tuple for each joint variable"
            )
        members = []
        for name in names:
            member = encoded.get(name)
            if member is None:
                raise LabelError(
                    f"joint names {name!r}, which is not among the variables {listed(encoded)}"
                )
            if not isinstance(member, ClassCodes):
                refuse(name, "is continuous and has no joint cells; bin it into classes first")
            members.append(member)
        cells[tuple(names)] = _joint_cells(members)
    return cells


def _joint_cells(members: Sequence[ClassCodes]) -> ClassCodes:
    """Encode the observed joint cells of several variables."""
    # Variables are combined one by one, with codes for observed cells only: no code overflows.
    codes = members[0].codes
    cells: list[tuple[Any, ...]] = [(name,) for name in members[0].classes]
    for member in members[1:]:
        n_classes = len(member.classes)
        missing = (codes < 0) | (member.codes < 0)
        distinct, codes = _distinct(codes * n_classes + member.codes, missing)
        cells = [(*cells[cell // n_classes], member.classes[cell % n_classes]) for cell in distinct]
    return ClassCodes(tuple(cells), codes)
