"""Encoding of variables as class codes or numbers, and of joint cells as class codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type, warn
from splince_fast.exceptions import (
    LabelError,
    ManyClassesWarning,
    MissingLabelWarning,
    WholeNumbersWarning,
)
from splince_fast.labels.containers import (
    SPLIT_ADVICE,
    check_indicators,
    float_copy,
    read_column,
    refuse,
    refuse_infinite,
    refuse_length,
    variables_of,
    whole_numbers,
)
from splince_fast.labels.encoded import ClassCodes, Columns, Encoded
from splince_fast.labels.names import VariableName, listed

KINDS = ("classes", "continuous")
# An integer column with more than this many distinct values gives a ManyClassesWarning.
MANY_CLASSES = 1000
# A column of whole-number floats with at most this many distinct values gives a
# WholeNumbersWarning.
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
        A mapping from variable names to columns (see :func:`encode_one`); a pandas or polars
        frame or an Arrow table, with one variable per column; or a single column. A Series with
        a name becomes the variable of this name; any other single column becomes the variable
        ``default_name``. None and an empty mapping mean that the block has no labels.
    n_rows : int
        Number of rows of the block, and of labels per variable.
    kinds : mapping, optional
        Kind, "classes" or "continuous", by variable name. By default the type of the labels
        determines the kind.
    joint : sequence of tuples of str
        Tuples of names of class-coded variables. Each tuple becomes the name of an additional
        variable, whose classes are the joint cells: the tuples of classes, one of each named
        variable, that occur in the block. They are sorted by the class order of the first
        variable, then of the second, and so on. The joint label of a row is missing if the
        label of one of the variables is missing.
    default_name : str
        Variable name of a single column that has no name.

    Returns
    -------
    dict
        :class:`ClassCodes` or :class:`Columns` by variable name.

    Raises
    ------
    LabelError
        A name is not a string, a name in `kinds` or `joint` is unknown, or a column cannot
        be read as classes or numbers.
    InputError
        A variable does not have `n_rows` labels.
    NonFiniteError
        A number is infinite.

    Examples
    --------
    >>> from splince_fast import labels
    >>> block = {"gender": ["f", "m", "f"], "doctor": [1, 0, 0], "age": [41.5, 35.0, 52.25]}
    >>> encoded = labels.encode(block, 3, joint=[("gender", "doctor")])
    >>> encoded["gender"].classes, encoded["age"].values.shape
    (('f', 'm'), (3, 1))
    >>> encoded[("gender", "doctor")].classes
    (('f', 0), ('f', 1), ('m', 0))
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
    integers and floats are continuous. Values of shape (n, 1) are read as (n,). Values of shape
    (n, k), k > 1, are k continuous columns. In these columns, integers must be indicators (0 or 1)
    unless `kind` is "continuous", because class numbers are not quantities.

    Parameters
    ----------
    values : column
        List or other sequence; NumPy array (also masked, or of objects); pandas or polars
        Series, index or categorical; Arrow array; torch tensor on any device; SciPy sparse
        matrix; any object with ``__array__``; a frame, for several columns; or ClassCodes, a
        slice of ClassCodes, or Columns, which are returned unchanged.
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
        Class codes or numbers. If the type of the labels is unknown, because all labels are
        missing objects such as None, ClassCodes without classes.

    Raises
    ------
    LabelError
        The column cannot be read as classes or numbers.
    InputError
        The number of labels is not `n_rows`.
    NonFiniteError
        A number is infinite.

    Warns
    -----
    ManyClassesWarning
        An integer column has more than 1,000 distinct values, and `kind` is None.
    MissingLabelWarning
        The name of a class is the text of a missing value, such as "nan", and `kind` is None.
    WholeNumbersWarning
        A float column has 3 to 20 distinct values, all whole and repeated, and `kind` is None.

    Examples
    --------
    >>> from splince_fast import labels
    >>> labels.encode_one([1950, 1980, 1950], 3, name="year").classes
    (1950, 1980)
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
    if isinstance(values, ClassCodes):
        if len(values) != n_rows:
            refuse_length(values.codes, n_rows, name, of)
        if kind == "continuous":
            refuse(name, "cannot be continuous: it is encoded as classes")
        return values
    if isinstance(values, Columns):
        if len(values.values) != n_rows:
            refuse_length(values.values, n_rows, name, of)
        if kind == "classes":
            refuse(name, "cannot be classes: it is encoded as numbers")
        return values
    data, missing, names, categories, unknown = read_column(values, name, kind)
    if len(data) != n_rows:
        refuse_length(data, n_rows, name, of)
    if kind == "continuous" and (isinstance(data, list) or categories is not None):
        example = next((v for v in categories or data if v is not None), None)
        refuse(name, f"cannot be continuous: it holds classes such as {example!r}")
    if categories is not None:
        if kind is None and len(categories) <= MANY_CLASSES:
            _warn_of_missing_as_text(categories, name, by_kinds)
        return ClassCodes(categories, np.array(data, dtype=np.intp))
    if isinstance(data, list):
        encoded = _class_codes_of_list(data)
        if kind is None:
            _warn_of_missing_as_text(encoded.classes, name, by_kinds)
    else:
        if data.ndim == 2:
            if data.shape[1] != 1:
                if kind == "classes":
                    refuse(name, "has several columns, so it cannot be classes; " + SPLIT_ADVICE)
                check_indicators(data, missing, name, kind)
                return _columns(data, missing, names, name)
            data = data[:, 0]
            missing = None if missing is None else missing[:, 0]
        floats = data.dtype.kind == "f"
        if kind == "continuous" or (kind is None and floats and not unknown):
            columns = _columns(data, missing, names, name)
            if kind is None:
                _warn_of_whole_numbers(columns, name, by_kinds)
            return columns
        if floats:
            data, missing = whole_numbers(data, missing, name)
        distinct, codes = _distinct(data, missing)
        encoded = ClassCodes(tuple(map(bool, distinct) if data.dtype == bool else distinct), codes)
    classes = encoded.classes
    if kind is None and len(classes) > MANY_CLASSES and type(classes[0]) is int:
        warn(
            f"variable {name!r} holds integers, read as classes, and more than {MANY_CLASSES:,} "
            f"distinct values in one block; if they are quantities, pass "
            f"{_choice(name, 'continuous', by_kinds)} or cast them to float; if not, "
            f"{_choice(name, 'classes', by_kinds)} silences this warning",
            ManyClassesWarning,
        )
    return encoded


def _choice(name: str, kind: str, by_kinds: bool) -> str:
    """Return the expression that sets the kind of a variable, for a message."""
    if by_kinds:
        return f"kinds={{{name!r}: {kind!r}}}"
    return f"labels.encode_one(column, len(column), name={name!r}, kind={kind!r})"


def _warn_of_missing_as_text(classes: Sequence[object], name: str, by_kinds: bool) -> None:
    """Warn if the name of a class is the text of a missing value, such as "nan"."""
    matches = sorted(_MISSING_AS_TEXT.intersection(classes))
    if matches:
        warn(
            f"variable {name!r} has the class {matches[0]!r}, which looks like a missing value "
            "that was converted to text. Pass None or NaN for missing labels; if it is a class, "
            f"{_choice(name, 'classes', by_kinds)} silences this warning (on the command line: "
            f"--kind {name}=classes)",
            MissingLabelWarning,
        )


def _warn_of_whole_numbers(columns: Columns, name: str, by_kinds: bool) -> None:
    """Warn if floats look like class numbers: few distinct values, all whole and repeated.

    pandas converts a column of integers to floats if a label is missing. Class numbers are then
    read as quantities. With two distinct values both readings give the same eraser, because the
    span of Cov(x, z) is the same.
    """
    values = columns.values[:, 0] if columns.present is None else columns.values[columns.present, 0]
    # The first 64 values suffice to recognise most quantities by a value that is not whole. With
    # fewer than 6 values, repeated whole numbers may be chance.
    if len(values) < 6 or (values[:64] != np.floor(values[:64])).any():
        return
    if np.abs(values).max() >= 2.0**53 or (values != np.floor(values)).any():
        return
    distinct = np.unique(values)
    if not 3 <= len(distinct) <= min(FEW_VALUES, len(values) // 2):
        return
    examples = ", ".join(f"{value:.0f}" for value in distinct[:4])
    warn(
        f"variable {name!r} holds floats, read as numbers, although they take only "
        f"{len(distinct)} values, all whole ({examples}{', ...' if len(distinct) > 4 else ''}): "
        "classes become floats where a label is missing. If these are classes, cast them to "
        f"integers (in pandas 'Int64') or pass {_choice(name, 'classes', by_kinds)}; if these are "
        f"quantities, {_choice(name, 'continuous', by_kinds)} silences this warning (on the "
        f"command line: --kind {name}=classes or --kind {name}=continuous)",
        WholeNumbersWarning,
    )


# --- class codes and columns of numbers ---------------------------------------------------------


def _class_codes_of_list(values: list[Any]) -> ClassCodes:
    """Encode a list of class names; None is a missing label."""
    distinct_names = dict.fromkeys(values)
    distinct_names.pop(None, None)
    classes = tuple(sorted(distinct_names))
    code_of_name: dict[Any, int] = {name: index for index, name in enumerate(classes)}
    code_of_name[None] = -1
    codes = np.fromiter(map(code_of_name.__getitem__, values), dtype=np.intp, count=len(values))
    return ClassCodes(classes, codes)


def _distinct(
    values: NDArray[Any], missing: NDArray[np.bool_] | None = None
) -> tuple[list[int], NDArray[np.intp]]:
    """Return the sorted distinct integers or booleans, and the index of each row's, or -1."""
    n = len(values)
    if missing is not None:
        codes = np.full(n, -1, dtype=np.intp)
        distinct, codes[~missing] = _distinct(values[~missing])
        return distinct, codes
    if n <= 1:
        return values.tolist(), np.zeros(n, dtype=np.intp)
    low, high = int(values.min()), int(values.max())
    if high - low > 4 * n + 1024:  # a lookup table of this range would be too large
        unique, codes = np.unique(values, return_inverse=True)
        return unique.tolist(), codes
    if values.dtype.kind == "u":  # uint64 may exceed the range of intp before `low` is subtracted
        offsets = (values - np.uint64(low)).astype(np.intp)
    else:
        offsets = values.astype(np.intp)
        offsets -= low
    if high - low > 1:
        occurs = np.zeros(high - low + 1, dtype=np.bool_)
        occurs[offsets] = True
    if high - low <= 1 or occurs.all():
        return list(range(low, high + 1)), offsets
    table = np.cumsum(occurs, dtype=np.intp) - 1
    return [low + offset for offset in np.flatnonzero(occurs).tolist()], table[offsets]


def _columns(
    data: NDArray[np.generic],
    missing: NDArray[np.bool_] | None,
    names: tuple[str, ...] | None,
    name: str,
) -> Columns:
    values = float_copy(data, missing)
    if values.ndim == 1:
        values = values.reshape(-1, 1)
    present = None
    if not np.isfinite(values).all():
        refuse_infinite(values, name)
        missing_rows: NDArray[np.bool_] = np.asarray(np.isnan(values).any(axis=1))
        values[missing_rows] = 0.0
        present = ~missing_rows
    if names is None:
        names = ("0",) if values.shape[1] == 1 else tuple(map(str, range(values.shape[1])))
    return Columns(names, values, present)


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
