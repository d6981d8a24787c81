"""What a column of labels means: classes or numbers, from any container.

A block of rows comes with labels in some container: a list, an array, a data frame, a tensor.
:func:`encode` reads them into two forms only, so that nothing downstream knows containers:

- :class:`ClassCodes` for strings, booleans, integers and categoricals: names and positions;
- :class:`Columns` for floats and for several columns at once: a ``(n, k)`` float64 matrix.

The name of a class does not depend on the container: NumPy, pandas, polars, Arrow and torch
scalars become Python's ``str``, ``bool`` and ``int``. ``True`` and ``1`` are different classes
although Python calls them equal (:func:`class_key`); a column that mixes them is refused. A
missing label (None, NaN, NA, NaT, null, masked) is never a class. What is returned owns its
memory: the caller may reuse buffers.

Above 400 lines because every container and every refusal has its line here and nowhere else.
"""

from __future__ import annotations

import contextlib
import datetime
import numbers
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from types import NoneType
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import (
    FileFormatError,
    InputError,
    LabelError,
    ManyClassesWarning,
    NonFiniteError,
    SplinceError,
)

ClassName: TypeAlias = str | bool | int | tuple[str | bool | int, ...]
VariableName: TypeAlias = str | tuple[str, ...]

KINDS = ("classes", "continuous")
MANY_CLASSES = 1000


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
    """

    classes: tuple[ClassName, ...]
    codes: NDArray[np.intp]


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
    """

    columns: tuple[str, ...]
    values: NDArray[np.float64]
    present: NDArray[np.bool_] | None


Encoded: TypeAlias = ClassCodes | Columns


def encode(
    labels: Any,
    n_rows: int,
    *,
    kinds: Mapping[str, str] | None = None,
    joint: Sequence[tuple[str, ...]] = (),
    default_name: str = "concept",
) -> dict[VariableName, Encoded]:
    """Read the labels of one block.

    Parameters
    ----------
    labels : None, mapping, frame, or one column
        A mapping from variable names to columns (see :func:`encode_one`); a pandas or polars
        frame or an Arrow table, of which each column is a variable; or a single column, which
        becomes the variable ``default_name`` (a Series that has a name keeps it). None and an
        empty mapping mean that the block has no labels.
    n_rows : int
        Rows of the block; every variable must have as many.
    kinds : mapping, optional
        Variable name to "classes" or "continuous", where the container does not say it.
    joint : sequence of tuples of str
        Class-coded variables whose joint cells are a variable too, named by the tuple. Its
        classes are the tuples of member classes that occur in the block, in the order of the
        members' classes; a row that lacks a member is missing.
    default_name : str
        Name of a single column that has none.

    Returns
    -------
    dict
        Variable name to :class:`ClassCodes` or :class:`Columns`.

    Raises
    ------
    LabelError
        A name is not a string, a name in `kinds` or `joint` is unknown, or a column cannot
        be read as classes or numbers.
    InputError
        A variable does not have `n_rows` labels.
    NonFiniteError
        A number is infinite.
    """
    if labels is None:
        return {}
    variables = labels if type(labels) is dict else _variables(labels, default_name)
    if not variables:
        return {}
    for name in variables:
        if not isinstance(name, str):
            raise LabelError(
                f"the variable name {name!r} is not a string but {type(name).__name__}; "
                "rename the key, column or Series"
            )
    for name in kinds or ():
        if name not in variables:
            raise LabelError(
                f"kinds names {name!r}, which is not among the variables {_listed(variables)}"
            )
    encoded: dict[VariableName, Encoded] = {}
    for name, values in variables.items():
        kind = kinds.get(name) if kinds else None
        encoded[name] = encode_one(values, n_rows, name=name, kind=kind)
    if joint:
        encoded |= _joint_variables(joint, encoded)
    return encoded


def encode_one(values: Any, n_rows: int, *, name: str, kind: str | None = None) -> Encoded:
    """Read one variable of one block.

    Strings, booleans, integers and categoricals are classes; floats (and ``Decimal``, and
    numbers of which some are floats) are continuous. Two dimensions are several continuous
    columns; booleans and integers are taken so only as indicators (all 0 or 1), because class
    numbers are not quantities. One column of two dimensions is read as one dimension.

    Parameters
    ----------
    values : column
        List or other sequence; NumPy array (also masked or of objects); pandas or polars
        Series, index or categorical; Arrow array; torch tensor on any device; SciPy sparse
        matrix; anything with ``__array__``; or a frame, for several columns.
    n_rows : int
        Number of labels that the block needs.
    name : str
        Name of the variable, for messages.
    kind : {"classes", "continuous"}, optional
        Overrules the type: integers or booleans as numbers, floats of whole values as classes.

    Returns
    -------
    ClassCodes or Columns
        Objects that are all missing and of unknown type give a ClassCodes without classes.

    Raises
    ------
    LabelError
        The column cannot be read as classes or numbers.
    InputError
        There are not `n_rows` labels.
    NonFiniteError
        A number is infinite.

    Warns
    -----
    ManyClassesWarning
        An integer column has more than 1,000 distinct values and `kind` does not say "classes".
    """
    if kind is not None and kind not in KINDS:
        raise LabelError(f"variable {name!r} has the unknown kind {kind!r}; choose from {KINDS}")
    data, missing, names, categories, unknown = _read(values, name, kind)
    if len(data) != n_rows:
        _refuse_length(data, n_rows, name)
    if kind == "continuous" and (isinstance(data, list) or categories is not None):
        example = next((v for v in categories or data if v is not None), None)
        _refuse(name, f"cannot be continuous: it holds classes such as {example!r}")
    if categories is not None:
        return ClassCodes(categories, np.array(data, dtype=np.intp))
    if isinstance(data, list):
        encoded = _class_codes_of_list(data)
    else:
        if data.ndim == 2:
            if data.shape[1] != 1:
                if kind == "classes":
                    _refuse(name, "has several columns, so it cannot be classes; " + _SPLIT)
                _check_indicators(data, missing, name, kind)
                return _columns(data, missing, names, name)
            data = data[:, 0]
            missing = None if missing is None else missing[:, 0]
        floats = data.dtype.kind == "f"
        if kind == "continuous" or (kind is None and floats and not unknown):
            return _columns(data, missing, names, name)
        if floats:
            data, missing = _whole_numbers(data, missing, name)
        encoded = _class_codes_of_array(data, missing)
    classes = encoded.classes
    if kind is None and len(classes) > MANY_CLASSES and type(classes[0]) is int:
        warnings.warn(
            f"variable {name!r} holds integers, read as classes, and more than {MANY_CLASSES:,} "
            f"distinct values in one block; if they are quantities, pass kinds={{{name!r}: "
            "'continuous'} or cast them to float; if not, kinds={...: 'classes'} is silent",
            ManyClassesWarning,
            stacklevel=2,
        )
    return encoded


def kind_of(encoded: Encoded) -> Literal["classes", "continuous"]:
    """Say of which kind an encoded variable is."""
    return "classes" if isinstance(encoded, ClassCodes) else "continuous"


def class_key(name: ClassName) -> tuple[Any, ...]:
    """Return a key that tells ``True`` from ``1``, which are one key of a plain dict."""
    if isinstance(name, tuple):
        return tuple((type(part), part) for part in name)
    return type(name), name


def names_to_json(classes: Iterable[ClassName]) -> list[Any]:
    """Turn class names into what JSON can hold; a tuple becomes a list.

    Raises
    ------
    LabelError
        A name is not a str, bool or int, or a tuple of these, or a name occurs twice.
    """
    names = tuple(classes)
    _check_names(names, LabelError)
    return [list(name) if isinstance(name, tuple) else name for name in names]


def names_from_json(obj: Any) -> tuple[ClassName, ...]:
    """Undo :func:`names_to_json`, exactly.

    Raises
    ------
    FileFormatError
        `obj` is not a list of distinct strings, booleans, integers, and lists of these.
    """
    if not isinstance(obj, list):
        raise FileFormatError(f"class names must be a list, not {type(obj).__name__}")
    names = tuple(tuple(item) if isinstance(item, list) else item for item in obj)
    _check_names(names, FileFormatError)
    return names


def _check_names(names: tuple[Any, ...], error: type[SplinceError]) -> None:
    """Refuse what is no class name, and a name that occurs twice."""
    keys = set()
    for name in names:
        parts = name if isinstance(name, tuple) else (name,)
        if not parts or any(type(part) not in (str, bool, int) for part in parts):
            raise error(
                f"{name!r} cannot name a class; names are str, bool or int, or non-empty tuples "
                "of these"
            )
        keys.add(class_key(name))
    if len(keys) < len(names):
        raise error(f"a class name occurs twice among {_listed(names)}")


# --- from a container to one raw column --------------------------------------------------------


class _Raw(NamedTuple):
    """A column out of its container: numbers in an array, names in a list with None for missing.

    `unknown` marks an all-missing column of objects (all NaN); with `categories`, `data` is
    codes into them. `missing` has the shape of `data`; NaN in a float array is missing besides.
    """

    data: NDArray[Any] | list[Any]
    missing: NDArray[np.bool_] | None = None
    columns: tuple[str, ...] | None = None
    categories: tuple[ClassName, ...] | None = None
    unknown: bool = False


_SPLIT = (
    "give each column a name of its own in a mapping {name: column} (joint=((name, name),) "
    "makes joint cells)"
)
_TIME = (
    "holds dates, times or durations, which are neither classes nor numbers; pass a part as "
    "integer or string (such as the year) for classes, or a duration as float for a number"
)
_BYTES = "holds bytes; decode them, for example with np.char.decode(values, 'utf-8')"
_COMPLEX = "holds complex numbers; pass the real and the imaginary part as two columns"
_DTYPE_ADVICE = {
    "M": _TIME,
    "m": _TIME,
    "S": _BYTES,
    "c": _COMPLEX,
    "V": "has a structured or foreign dtype; pass {field: array[field]}, or cast it to float32",
}
_OBJECT_ADVICE = {
    "time": _TIME,
    "bytes": _BYTES,
    "complex": _COMPLEX,
    "other": "holds objects that are neither names nor numbers; use str, bool, int or float",
}


def _refuse(name: str, what: str) -> NoReturn:
    """Raise the LabelError that a variable calls for."""
    raise LabelError(f"variable {name!r} {what}")


def _refuse_length(data: NDArray[Any] | list[Any], n_rows: int, name: str) -> NoReturn:
    """Raise the InputError of a column that has another length than its block."""
    hint = "pass one label per row, None or NaN where it is unknown"
    if isinstance(data, np.ndarray) and data.ndim == 2 and data.shape[1] == n_rows:
        hint = f"its shape {data.shape} looks transposed: pass its .T"
    raise InputError(
        f"variable {name!r} has {len(data)} labels but the block has {n_rows} rows; {hint}"
    )


def _listed(names: Iterable[Any]) -> str:
    """Name at most twenty choices."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")


def _variables(labels: Any, default_name: str) -> Mapping[Any, Any]:
    """Split labels into columns by variable name."""
    if isinstance(labels, Mapping):
        return labels
    if isinstance(labels, np.ndarray | Sequence):
        return {default_name: labels}
    table = _tabular(labels, default_name)
    if table is None:
        return {default_name: labels}
    if hasattr(table, "columns"):
        return dict(zip(table.columns, table.iter_columns(), strict=True))
    return {default_name if table.name is None or table.name == "" else table.name: table}


def _read(values: Any, name: str, kind: str | None) -> _Raw:
    """Read any container."""
    if isinstance(values, np.ndarray):
        return _read_array(values, name)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        return _read_sequence(list(values), name)
    if isinstance(values, Mapping | Set):
        _refuse(name, f"is a {type(values).__name__}, which has no rows; pass a list or an array")
    if hasattr(values, "detach"):
        return _read_array(_host_array(values, name), name)
    if hasattr(values, "tocsr"):  # a SciPy sparse matrix, as scikit-learn's OneHotEncoder gives
        return _read_array(values.toarray(), name)
    table = _tabular(values, name)
    if table is not None:
        is_frame = hasattr(table, "columns")
        return _read_frame(table, name, kind) if is_frame else _read_series(table, name)
    for verb in ("collect", "compute"):
        if hasattr(values, verb):
            _refuse(name, f"is a lazy {type(values).__name__}; {verb}() it first")
    if hasattr(values, "__array__") and not isinstance(values, np.generic):
        try:
            array = np.asarray(values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise LabelError(
                f"variable {name!r}: {type(values).__name__} did not give a NumPy array "
                f"({error}); convert it first"
            ) from error
        return _read_array(array, name)
    _refuse(name, f"is {values!r:.80}, not a column; pass a list or array of one label per row")


def _host_array(tensor: Any, name: str) -> NDArray[Any]:
    """Bring a tensor into host memory; bfloat16, which NumPy lacks, becomes float32."""
    try:
        tensor = tensor.detach().cpu()
        try:
            return np.asarray(tensor.numpy())
        except TypeError:
            return np.asarray(tensor.float().numpy())
    except (TypeError, RuntimeError) as error:
        raise LabelError(
            f"variable {name!r}: the tensor gives no NumPy array ({error}); pass a dense one that "
            "holds values"
        ) from error


def _tabular(values: Any, name: str) -> Any:
    """Wrap a series or frame of any library, imported by the caller, in narwhals; else None."""
    module = type(values).__module__.partition(".")[0]
    library: Any = sys.modules.get(module)
    if module == "pandas" and isinstance(
        values, library.Index | library.api.extensions.ExtensionArray
    ):
        values = library.Series(values)
    elif module == "pyarrow" and isinstance(values, library.Array):
        values = library.chunked_array([values])
    elif module == "pyarrow" and isinstance(values, library.RecordBatch):
        values = library.Table.from_batches([values])
    import narwhals.stable.v2 as nw
    from narwhals.exceptions import DuplicateError

    try:
        return nw.from_native(values, eager_only=True, allow_series=True)
    except DuplicateError as error:
        raise LabelError(
            f"the frame of {name!r} has two columns of one name; rename one"
        ) from error
    except TypeError:
        return None


def _read_series(series: Any, name: str) -> _Raw:
    """Read a narwhals Series."""
    import narwhals.stable.v2 as nw

    dtype = series.dtype
    if dtype.is_temporal():
        _refuse(name, _TIME)
    wide = dtype in (nw.Int128, nw.UInt128)  # NumPy has none
    if dtype == nw.Boolean or dtype.is_float() or (dtype.is_integer() and not wide):
        missing = series.is_null().to_numpy()
        if not missing.any():
            return _read_array(series.to_numpy(), name)
        # filled first: a NumPy array of integers or booleans has no room for a null
        filled = series.fill_null(False if dtype == nw.Boolean else 0)
        return _Raw(filled.to_numpy(), missing)
    if dtype in (nw.Categorical, nw.Enum):
        native = series.to_native()
        if series.implementation.is_pandas_like() and hasattr(native, "cat"):
            codes = native.cat.codes.to_numpy()
            return _Raw(codes, categories=_category_names(native.cat.categories.tolist(), name))
        if series.implementation.is_pyarrow():  # a dictionary encodes, it declares nothing
            return _read_series(_tabular(native.cast(native.type.value_type), name), name)
        if dtype == nw.Enum:
            position: dict[Any, int] = {c: i for i, c in enumerate(dtype.categories)}
            position[None] = -1
            codes = np.array([position[value] for value in series.to_list()], dtype=np.intp)
            return _Raw(codes, categories=tuple(dtype.categories))
    return _read_sequence(series.to_list(), name)


def _category_names(categories: list[Any], name: str) -> tuple[ClassName, ...]:
    """Turn the declared categories into class names, in their order."""
    raw = _read_sequence(categories, name)
    if isinstance(raw.data, list):
        return tuple(raw.data)
    if raw.data.dtype.kind == "f":
        return tuple(_whole_numbers(raw.data, None, name)[0].tolist())
    return tuple(raw.data.tolist())


def _read_frame(frame: Any, name: str, kind: str | None) -> _Raw:
    """Read a frame as the columns of one variable."""
    columns = tuple(str(column) for column in frame.columns)
    if not columns:
        _refuse(name, "is a frame without columns; pass at least one, or leave the variable out")
    raws = [_read_series(series, name) for series in frame.iter_columns()]
    if len(raws) == 1:
        return raws[0]._replace(columns=columns)
    parts = []
    for column, raw in zip(columns, raws, strict=True):
        if isinstance(raw.data, list) or raw.categories is not None:
            _refuse(name, f"is a frame, and its column {column!r} holds classes; {_SPLIT}")
        _check_indicators(raw.data, raw.missing, f"{name}/{column}", kind)
        parts.append(_float_copy(raw.data, raw.missing))
    return _Raw(np.stack(parts, axis=1), columns=columns)


def _read_array(array: NDArray[Any], name: str) -> _Raw:
    """Read a NumPy array by its dtype."""
    if not 1 <= array.ndim <= 2 or (array.ndim == 2 and array.shape[1] == 0):
        what = "is a scalar" if array.ndim == 0 else f"has the shape {array.shape}"
        _refuse(name, f"{what}; pass one label per row, as (n,) or (n, k) with k > 0")
    kind = array.dtype.kind
    missing = None
    if isinstance(array, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(array) if array.mask is not np.ma.nomask else None
        array = np.ma.getdata(array)
    if kind in "biuf":
        return _Raw(np.asarray(array), missing)
    if kind not in "OUT":
        _refuse(name, _DTYPE_ADVICE[kind])
    if missing is not None:
        array = array.astype(object)
        array[missing] = None
    return _read_sequence(array.tolist(), name)


_PLAIN = frozenset({str, bool, int, float, NoneType})


def _read_sequence(values: list[Any], name: str) -> _Raw:
    """Read a list of scalars, or of rows."""
    types = set(map(type, values))
    if types == {int}:
        return _Raw(_integers(values))
    if types == {bool} or types == {float}:
        return _Raw(np.array(values))
    if types == {str} or types == {str, NoneType}:
        return _Raw(values)
    if not types <= _PLAIN:
        values = [_unpacked(value, name) for value in values]
        if any(isinstance(value, list | tuple) for value in values):
            return _read_rows(values, name)
    return _read_objects(values, (len(values),), name)


def _unpacked(value: Any, name: str) -> Any:
    """Turn an entry that is an array or a tensor into a scalar or a list."""
    if hasattr(value, "detach"):
        value = _host_array(value, name)
    if isinstance(value, np.ndarray) and value is not np.ma.masked:
        return value[()] if value.ndim == 0 else list(value)
    return value


def _read_rows(values: list[Any], name: str) -> _Raw:
    """Read a list of rows; None among them is a row of missing entries."""
    width = max(len(value) for value in values if isinstance(value, list | tuple))
    table = np.empty(0, dtype=object)
    with contextlib.suppress(ValueError):  # raised by rows of arrays of unlike shapes
        table = np.array([[None] * width if v is None else v for v in values], dtype=object)
    if table.ndim != 2 or width == 0:
        _refuse(name, "has rows of unlike or zero length, or rows within rows; make them (n, k)")
    return _read_objects(table.ravel().tolist(), table.shape, name)


def _read_objects(values: list[Any], shape: tuple[int, ...], name: str) -> _Raw:
    """Read Python objects by their types; `values` are the entries of `shape`, row by row."""
    groups = {kind: _group(kind) for kind in set(map(type, values))}
    nothing = {kind for kind, group in groups.items() if group == "missing"}
    maybe_nan = {kind for kind, group in groups.items() if group in ("float", "time")}
    absent = [
        type(value) in nothing or (type(value) in maybe_nan and value != value) for value in values
    ]
    example = {
        groups[type(v)]: v for v, is_absent in zip(values, absent, strict=True) if not is_absent
    }
    found = set(example)
    missing = np.array(absent, dtype=np.bool_).reshape(shape) if any(absent) else None
    for group, advice in _OBJECT_ADVICE.items():
        if group in found:
            _refuse(name, f"{advice} (found {example[group]!r:.80})")
    if not found:
        return _Raw(np.full(shape, np.nan), unknown=True)
    if not (len(found) == 1 or found == {"int", "float"}):
        mixture = " and ".join(f"{v!r:.80} ({type(v).__name__})" for v in example.values())
        _refuse(name, f"mixes types that cannot be told to agree: {mixture}; cast it to one type")
    if "str" in found:
        if shape[1:] not in ((), (1,)):
            _refuse(name, f"has several columns of strings; {_SPLIT}")
        pairs = zip(values, absent, strict=True)
        return _Raw([None if is_absent else str.__str__(value) for value, is_absent in pairs])
    filled = [0 if is_absent else v for v, is_absent in zip(values, absent, strict=True)]
    if "float" in found:
        try:
            floats = np.array([float(value) for value in filled])
        except OverflowError:
            _refuse(name, "holds numbers that are too large for a float")
        return _Raw(floats.reshape(shape), missing)
    if "bool" in found:
        return _Raw(np.array(filled, dtype=np.bool_).reshape(shape), missing)
    integers = _integers([int(value) for value in filled])
    if isinstance(integers, np.ndarray):
        return _Raw(integers.reshape(shape), missing)
    if shape[1:] not in ((), (1,)):
        _refuse(name, "has several columns of integers beyond 64 bits; cast them to float")
    return _Raw([None if is_absent else v for v, is_absent in zip(integers, absent, strict=True)])


def _integers(values: list[int]) -> NDArray[np.int64] | list[int]:
    """Make an array of Python integers, or leave them where 64 bits do not hold them."""
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        return values


def _group(kind: type) -> str:
    """Say to which group of entries a type belongs."""
    if kind is NoneType or kind is type(np.ma.masked) or kind.__name__ in ("NAType", "NaTType"):
        return "missing"
    times = (np.datetime64, np.timedelta64, datetime.date, datetime.time, datetime.timedelta)
    # The order matters: bool is an int, np.timedelta64 an integer, and every int a Real.
    for group, types in (
        ("bool", (bool, np.bool_)),
        ("str", (str,)),
        ("bytes", (bytes, bytearray)),
        ("time", times),
        ("int", (numbers.Integral,)),
        ("float", (numbers.Real, Decimal)),
        ("complex", (numbers.Complex,)),
    ):
        if issubclass(kind, types):
            return group
    return "other"


def _whole_numbers(
    values: NDArray[Any], missing: NDArray[np.bool_] | None, name: str
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Turn floats that are to be classes into integers; NaN is missing."""
    absent = np.isnan(values) if missing is None else np.isnan(values) | missing
    values = np.where(absent, 0, values)
    _check_finite(values, name)
    broken = values != np.floor(values)
    if broken.any():
        _refuse(
            name,
            f"is to be classes but holds {values[broken][0]}, which is no whole number; cast it "
            "to strings to make each value a class, or bin it",
        )
    # From 2**(bits of the fraction) on, neighbouring integers, and so classes, share one float.
    limit = 2.0 ** min(np.finfo(values.dtype).nmant + 1, 53)
    if (np.abs(values) >= limit).any():
        _refuse(
            name,
            f"is to be classes but holds values from {limit:.0f} on, where {values.dtype} cannot "
            "tell integers apart; keep them as integers or strings",
        )
    return values.astype(np.int64), absent if absent.any() else None


def _check_indicators(
    values: NDArray[Any], missing: NDArray[np.bool_] | None, name: str, kind: str | None
) -> None:
    """Refuse integers in several columns unless each is 0 or 1, or they are said to be numbers."""
    if values.dtype.kind not in "iu" or kind == "continuous":
        return
    other = (values != 0) & (values != 1)
    if missing is not None:
        other &= ~missing
    if other.any():
        _refuse(
            name,
            f"has several columns of integers (such as {values[other][0]}), which could be "
            f"classes or numbers; for classes, {_SPLIT}; for numbers, cast them to float or pass "
            "kinds={...: 'continuous'}",
        )


def _float_copy(values: NDArray[Any], missing: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """Copy numbers into float64, C-contiguous, with NaN where they are missing."""
    with np.errstate(over="ignore"):  # a long double may become infinite, which is refused later
        copy = np.array(values, dtype=np.float64, order="C")
    if missing is not None:
        copy[missing] = np.nan
    return copy


def _check_finite(values: NDArray[Any], name: str) -> None:
    """Refuse infinite values, naming the first rows that hold them."""
    infinite = np.isinf(values)
    if infinite.any():
        rows = np.flatnonzero(infinite.reshape(len(values), -1).any(axis=1))
        raise NonFiniteError(
            f"variable {name!r} is infinite in row(s) {_listed(rows.tolist())} of the block; often "
            "a logarithm or division by zero made it so: repair it, or use NaN where the value "
            "is unknown"
        )


# --- from a raw column to codes or numbers ------------------------------------------------------


def _class_codes_of_list(values: list[Any]) -> ClassCodes:
    """Give each name of a list its position; None is missing."""
    present = dict.fromkeys(values)
    present.pop(None, None)
    classes = tuple(sorted(present))
    position: dict[Any, int] = {name: index for index, name in enumerate(classes)}
    position[None] = -1
    codes = np.fromiter(map(position.__getitem__, values), dtype=np.intp, count=len(values))
    return ClassCodes(classes, codes)


def _class_codes_of_array(values: NDArray[Any], missing: NDArray[np.bool_] | None) -> ClassCodes:
    """Give each integer or boolean its position among the sorted distinct values."""
    if missing is None:
        distinct, codes = _distinct(values)
    else:
        distinct, codes = _distinct_present(values, ~missing)
    if values.dtype.kind == "b":
        return ClassCodes(tuple(map(bool, distinct)), codes)
    return ClassCodes(tuple(distinct), codes)


def _distinct_present(
    values: NDArray[Any], present: NDArray[np.bool_]
) -> tuple[list[int], NDArray[np.intp]]:
    """Do as `_distinct` for the rows that are present; -1 elsewhere."""
    codes = np.full(len(values), -1, dtype=np.intp)
    distinct, codes[present] = _distinct(values[present])
    return distinct, codes


def _distinct(values: NDArray[Any]) -> tuple[list[int], NDArray[np.intp]]:
    """Return the sorted distinct values of integers or booleans, and the position of each row."""
    n = len(values)
    if n <= 1:
        return values.tolist(), np.zeros(n, dtype=np.intp)
    low, high = int(values.min()), int(values.max())
    if high - low > 4 * n + 1024:  # too sparse for a table
        distinct, codes = np.unique(values, return_inverse=True)
        return distinct.tolist(), codes
    if values.dtype == np.uint64:  # may exceed int64, so the subtraction goes first
        offsets = (values - np.uint64(low)).astype(np.intp)
    else:
        offsets = values.astype(np.intp)
        offsets -= low
    seen = np.zeros(high - low + 1, dtype=np.bool_)
    seen[offsets] = True
    if seen.all():
        return list(range(low, high + 1)), offsets
    table = np.cumsum(seen, dtype=np.intp) - 1
    return [low + offset for offset in np.flatnonzero(seen).tolist()], table[offsets]


def _columns(
    data: NDArray[Any],
    missing: NDArray[np.bool_] | None,
    names: tuple[str, ...] | None,
    name: str,
) -> Columns:
    """Make the columns of a continuous variable."""
    values = _float_copy(data, missing)
    if values.ndim == 1:
        values = values.reshape(-1, 1)
    present = None
    if not np.isfinite(values).all():
        _check_finite(values, name)
        absent: NDArray[np.bool_] = np.asarray(np.isnan(values).any(axis=1))
        values[absent] = 0.0
        present = ~absent
    if names is None:
        names = ("0",) if values.shape[1] == 1 else tuple(map(str, range(values.shape[1])))
    return Columns(names, values, present)


# --- joint cells --------------------------------------------------------------------------------


def _joint_variables(
    joint: Sequence[tuple[str, ...]], encoded: Mapping[VariableName, Encoded]
) -> dict[VariableName, Encoded]:
    """Encode the joint cells of each tuple of variables."""
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
                    f"joint names {name!r}, which is not among the variables {_listed(encoded)}"
                )
            if not isinstance(member, ClassCodes):
                _refuse(name, "is continuous and has no joint cells; bin it into classes first")
            members.append(member)
        cells[tuple(names)] = _joint_cells(members)
    return cells


def _joint_cells(members: Sequence[ClassCodes]) -> ClassCodes:
    """Number the observed cells, member by member, so that no product of sizes can overflow."""
    codes = members[0].codes
    cells: list[tuple[Any, ...]] = [(name,) for name in members[0].classes]
    for member in members[1:]:
        width = len(member.classes)
        present = (codes >= 0) & (member.codes >= 0)
        observed, codes = _distinct_present(codes * width + member.codes, present)
        cells = [(*cells[cell // width], member.classes[cell % width]) for cell in observed]
    return ClassCodes(tuple(cells), codes)
