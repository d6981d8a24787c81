"""Columns of labels in any container, as arrays of numbers or lists of class names.

A column is opened as an array, a list, or a series or frame of narwhals, which reads pandas, polars
and Arrow. Libraries are recognised by attributes and are not imported.
"""

from __future__ import annotations

import contextlib
import datetime
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from types import NoneType
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.names import ClassName, listed
from splince_fast._runtime.rows import is_tensor, to_array
from splince_fast.exceptions import InputError, LabelError, NonFiniteError
from splince_fast.labels.encoded import ClassCodes


class Numbers(NamedTuple):
    """Values of one variable, numbers or booleans, before its kind is chosen."""

    values: NDArray[Any]  # dtype object for integers beyond 64 bits, which are classes
    missing: NDArray[np.bool_] | None = None  # mask of the shape of `values`; NaN is missing, too
    columns: tuple[str, ...] | None = None  # column names of a frame
    unknown: bool = False  # all labels are missing objects, and `values` is NaN


SPLIT_ADVICE = (
    "pass a mapping {name: column} (Moments(joint=((name, name),)) makes joint cells of these)"
)
_ADVICE = {
    "time": (
        "holds dates, times or durations; pass a part (such as the year) as integer or string, or "
        "a duration as float"
    ),
    "bytes": "holds bytes; decode them, for example with np.char.decode(values, 'utf-8')",
    "complex": "holds complex numbers; pass the real and the imaginary part as two columns",
    "other": "holds objects that are neither names nor numbers; use str, bool, int or float",
    "void": "has a structured or foreign dtype; pass {field: array[field]}, or cast it to float32",
}
_FAMILY_OF_KIND = {"M": "time", "m": "time", "S": "bytes", "c": "complex", "V": "void"}


def refuse(name: str, reason: str) -> NoReturn:
    """Raise LabelError with the name of the variable and the reason."""
    raise LabelError(f"variable {name!r} {reason}")


# -- containers ----------------------------------------------------------------------------------

# Label by which a ClassLabel of Hugging Face datasets marks a missing one.
MISSING_CLASS = -1


def unmarked(labels: Any, column: Any) -> Any:
    """Return labels of a column, with None for the missing ones of a ClassLabel."""
    if type(getattr(column, "features", None)).__name__ != "ClassLabel":
        return labels
    return [None if label == MISSING_CLASS else label for label in labels]


def variables_of(labels: object, default_name: str) -> Mapping[Any, Any]:
    """Return a mapping from variable names to columns for labels in any container."""
    if isinstance(labels, Mapping):
        return labels
    table: Any = None
    if not isinstance(labels, np.ndarray | Sequence):
        table = _narwhals(labels, default_name)
    if hasattr(table, "columns"):
        return dict(zip(table.columns, table.iter_columns(), strict=True))
    name = getattr(table, "name", None)
    return {default_name if name is None or name == "" else name: labels}


def opened(values: Any, name: str) -> Any:
    """Return a column as an array, a list, or a series or frame of narwhals; codes unchanged."""
    if isinstance(values, np.ndarray | ClassCodes):
        return values
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        return list(unmarked(values, values))
    if hasattr(values, "tocsr"):  # a SciPy sparse matrix, such as from OneHotEncoder
        return values.toarray()
    table = None if is_tensor(values) else _narwhals(values, name)
    if table is not None:
        return table
    for verb in ("collect", "compute"):
        if hasattr(values, verb):
            refuse(name, f"is a lazy {type(values).__name__}; {verb}() it first")
    if hasattr(values, "__array__") and not isinstance(values, np.generic):
        return _as_array(values, name)
    refuse(name, f"is {values!r:.80}, not a column; pass a list or array of one label per row")


def _as_array(values: Any, name: str) -> NDArray[Any]:
    """Convert a tensor or another object with ``__array__``."""
    try:
        return to_array(values, "it")
    except InputError as error:
        raise LabelError(f"variable {name!r}: {error}") from error


def _narwhals(values: object, name: str) -> Any:
    """Wrap a series or frame of any library; return None for other values."""
    import narwhals.stable.v2 as nw
    from narwhals.exceptions import DuplicateError

    module = type(values).__module__.partition(".")[0]
    library: Any = sys.modules.get(module)
    is_index = module == "pandas" and isinstance(
        values, library.Index | library.api.extensions.ExtensionArray
    )
    if is_index:
        values = library.Series(values)
    elif module == "pyarrow" and isinstance(values, library.Array):
        values = library.chunked_array([values])
    elif module == "pyarrow" and isinstance(values, library.RecordBatch):
        values = library.Table.from_batches([values])
    try:
        return nw.from_native(values, eager_only=True, allow_series=True)
    except DuplicateError as error:
        raise LabelError(
            f"the frame of {name!r} has two columns of the same name; rename one of them"
        ) from error
    except TypeError:
        return None


# -- labels and the rows of X --------------------------------------------------------------------


def check_index(X: Any, labels: Any, name: str = "labels", *, of: str = "X") -> None:
    """Raise LabelError if labels or weights have the pandas index of X in another order."""
    # Labels belong to rows by position. A RangeIndex, or an index of other entries, is accepted.
    index: Any = getattr(X, "index", None)
    if not hasattr(index, "symmetric_difference"):
        return
    columns = dict(enumerate(labels)) if isinstance(labels, tuple) else labels
    for key, column in (columns if isinstance(columns, Mapping) else {None: columns}).items():
        other: Any = getattr(column, "index", None)
        has_index = hasattr(other, "symmetric_difference") and type(other).__name__ != "RangeIndex"
        if not has_index or len(index) != len(other) or index.equals(other):
            continue
        if index.is_unique and index.symmetric_difference(other).empty:
            column_name = name if key is None else f"{name}[{key!r}]"
            raise LabelError(
                f"{column_name} has the index of {of} in another order; pass {column_name}"
                f".loc[{of}.index], or {column_name}.to_numpy() if the positions agree"
            )


def map_labels(labels: Any, function: Callable[[Any, str], Any]) -> Any:
    """Return ``function(column, name)`` of each column of labels; `name` is for messages."""
    if labels is None:
        return None
    if isinstance(labels, Mapping):
        return {name: function(column, f"labels[{name!r}]") for name, column in labels.items()}
    return function(labels, "labels")


def take_entries(column: Any, index: NDArray[np.intp], name: str = "labels") -> Any:
    """Return entries of a column, or rows of a frame, by position."""
    column = opened(column, name)
    return [column[i] for i in index.tolist()] if isinstance(column, list) else column[index]


def take_positions(
    column: Any, leading: tuple[int, ...], positions: NDArray[np.intp], name: str
) -> Any:
    """Return the labels at flat `positions` of X, whose shape without features is `leading`."""
    # A column has one label per position, or one per sequence (entry of the first axis).
    n, n_sequences = int(np.prod(leading)), leading[0]
    column = opened(column, name)
    if isinstance(column, list) and column and isinstance(column[0], list | tuple | np.ndarray):
        column = np.array(column, dtype=object)
    shape = tuple(column.shape) if hasattr(column, "shape") else (len(column),)
    if len(leading) > 1 and shape[: len(leading)] == leading:
        column = column if isinstance(column, np.ndarray) else column.to_numpy()
        column = column.reshape(n, *shape[len(leading) :])
    elif shape[:1] == (n_sequences,) and n != n_sequences:
        positions = positions // (n // n_sequences)
    elif shape[:1] != (n,):
        raise InputError(
            f"{name} has shape {shape} for rows of shape {leading}; pass one entry per "
            f"sequence, {(n_sequences,)}, or one per position, {leading}"
        )
    return take_entries(column, positions, name)


# -- arrays, series and frames -------------------------------------------------------------------


def read_column(values: Any, name: str, kind: str | None) -> Numbers | ClassCodes:
    """Read a variable from any container; raise LabelError unless its values are of one kind."""
    column = opened(values, name)
    if isinstance(column, np.ndarray):
        return _read_array(column, name)
    if isinstance(column, list):
        return _read_list(column, name)
    if hasattr(column, "columns"):
        return _read_frame(column, name, kind)
    return _read_series(column, name)


def _read_array(array: NDArray[Any], name: str) -> Numbers | ClassCodes:
    if not 1 <= array.ndim <= 2 or (array.ndim == 2 and array.shape[1] == 0):
        form = "is a scalar" if array.ndim == 0 else f"has the shape {array.shape}"
        refuse(name, f"{form}; pass one label per row, as (n,) or (n, k) with k > 0")
    kind = array.dtype.kind
    missing = None
    if isinstance(array, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(array) if array.mask is not np.ma.nomask else None
        array = np.ma.getdata(array)
    if kind in "biuf":
        return Numbers(np.asarray(array), missing)
    if kind not in "OUT":
        refuse(name, _ADVICE[_FAMILY_OF_KIND[kind]])
    if missing is not None:
        array = array.astype(object)
        array[missing] = None
    return _read_list(array.tolist(), name)


def _read_series(series: Any, name: str) -> Numbers | ClassCodes:
    import narwhals.stable.v2 as nw

    declared = read_declared(series.to_native(), name)
    if declared is not None:
        return declared
    dtype = series.dtype
    if dtype.is_temporal():
        refuse(name, _ADVICE["time"])
    is_128_bit = dtype in (nw.Int128, nw.UInt128)  # NumPy has no integers of 128 bits
    if dtype == nw.Boolean or dtype.is_float() or (dtype.is_integer() and not is_128_bit):
        missing = series.is_null().to_numpy()
        if not missing.any():
            return _read_array(series.to_numpy(), name)
        # NumPy integers and booleans have no missing value: replace nulls, and mark them in a mask.
        return Numbers(series.fill_null(False if dtype == nw.Boolean else 0).to_numpy(), missing)
    return _read_list(series.to_list(), name)


def _read_frame(frame: Any, name: str, kind: str | None) -> Numbers | ClassCodes:
    names = tuple(map(str, frame.columns))
    if not names:
        refuse(name, "is a frame without columns; pass at least one column, or omit the variable")
    columns = [_read_series(series, name) for series in frame.iter_columns()]
    if len(columns) == 1:
        one = columns[0]
        return one if isinstance(one, ClassCodes) else one._replace(columns=names)
    parts = []
    for part, column in zip(names, columns, strict=True):
        if (
            isinstance(column, ClassCodes)
            or column.values.dtype == object
            or column.values.ndim > 1
        ):
            refuse(name, f"is a frame, and its column {part!r} holds classes; {SPLIT_ADVICE}")
        check_indicators(column, f"{name}/{part}", kind)
        parts.append(float_copy(column))
    return Numbers(np.stack(parts, axis=1), columns=names)


def read_declared(values: Any, name: str) -> ClassCodes | None:
    """Read a pandas categorical or polars Enum; return None for other values."""
    # From the native column: polars hashes all categories at each access to the dtype.
    package = type(values).__module__.partition(".")[0]
    if package == "pandas":
        declared: Any = getattr(values, "array", values)
        if type(declared).__name__ != "Categorical":
            return None
        codes = declared.codes
    elif package == "polars":
        declared = getattr(values, "dtype", None)
        if type(declared).__name__ != "Enum":
            return None
        codes = values.to_physical().cast(sys.modules["polars"].Int64).fill_null(-1).to_numpy()
    else:
        return None
    names = _category_names(declared.categories, name)
    return ClassCodes(names, np.array(codes, dtype=np.intp))


# Categories of at most 16 columns, and their names, which all blocks of a column share: libraries
# compare categories faster than Python reads them. The keys are the type and number of categories,
# and the type and value of the last one.
_names_of_categories: dict[tuple[Any, ...], tuple[Any, tuple[ClassName, ...]]] = {}


def _category_names(categories: Any, name: str) -> tuple[ClassName, ...]:
    """Return declared categories as class names, in the declared order."""
    if not len(categories):
        return ()
    last = categories[-1]
    key = type(categories), len(categories), type(last), last
    entry = _names_of_categories.get(key)
    if entry is None or not entry[0].equals(categories):
        if len(_names_of_categories) >= 16:
            _names_of_categories.clear()
        names = _class_names(categories.to_list(), name)
        entry = _names_of_categories[key] = categories, names
    return entry[1]


def _class_names(categories: list[Any], name: str) -> tuple[ClassName, ...]:
    nested = next((category for category in categories if isinstance(category, tuple)), None)
    if nested is not None:
        refuse(name, f"has the category {nested!r:.80}, which cannot name a class; cast it to str")
    column = _read_list(categories, name)
    if isinstance(column, ClassCodes):
        return tuple(column.classes[code] for code in column.codes.tolist())
    is_float = column.values.dtype.kind == "f"
    return tuple((whole_numbers(column, name)[0] if is_float else column.values).tolist())


# -- Python objects ------------------------------------------------------------------------------

# Largest bit length of an integer that names a class: files store class names as text, and Python
# limits the conversion of integers to text (to 4300 digits by default).
_MAX_BITS = 4096
_PLAIN_TYPES = frozenset({str, bool, int, float, NoneType})
# Families of types: the first match counts, because bool and np.timedelta64 are also Integral, and
# integers are also Real.
_FAMILIES: dict[str, tuple[type, ...]] = {
    "missing": (NoneType, type(np.ma.masked)),
    "bool": (bool, np.bool_),
    "str": (str,),
    "bytes": (bytes, bytearray),
    "time": (np.datetime64, np.timedelta64, datetime.date, datetime.time, datetime.timedelta),
    "int": (numbers.Integral,),
    "float": (numbers.Real, Decimal),
    "complex": (numbers.Complex,),
    "other": (object,),
}


def _type_family(cls: type) -> str:
    """Return the family of a type; labels of a variable are of one family, or int and float."""
    if cls.__name__ in ("NAType", "NaTType"):
        return "missing"
    return next(family for family, types in _FAMILIES.items() if issubclass(cls, types))


def _read_list(values: list[Any], name: str) -> Numbers | ClassCodes:
    """Read a list of scalars (one label per row), or a list of rows (several values per row)."""
    types, shape = set(map(type, values)), (len(values),)
    if types == {int}:
        return Numbers(_integers(values, name))
    if types in ({bool}, {float}):
        return Numbers(np.array(values))
    if types in ({str}, {str, NoneType}):
        return _codes_of(values)
    if not types <= _PLAIN_TYPES:
        values = [_as_scalar_or_list(value, name) for value in values]
        width = max((len(v) for v in values if isinstance(v, list | tuple)), default=None)
        if width is not None:  # rows; an entry None is a row of missing values
            table = np.empty(0, dtype=object)
            with contextlib.suppress(ValueError):  # raised for rows of different shapes
                table = np.array([[None] * width if v is None else v for v in values], dtype=object)
            if table.ndim != 2 or width == 0:
                refuse(name, "has rows of different or zero length, or nested rows; pass (n, k)")
            values, shape = table.ravel().tolist(), table.shape
    return _read_objects(values, shape, name)


def _as_scalar_or_list(value: object, name: str) -> object:
    """Convert an entry that is an array or tensor to a scalar or list; return others unchanged."""
    if is_tensor(value):
        value = _as_array(value, name)
    if isinstance(value, np.ndarray) and value is not np.ma.masked:
        return value[()] if value.ndim == 0 else list(value)
    return value


def _read_objects(values: list[Any], shape: tuple[int, ...], name: str) -> Numbers | ClassCodes:
    """Read Python objects by the families of their types, in the C order of an array."""
    family_of = {cls: _type_family(cls) for cls in set(map(type, values))}
    examples: dict[str, Any] = {}  # a value of each family
    missing = np.zeros(len(values), dtype=np.bool_)
    for i, value in enumerate(values):
        family = family_of[type(value)]
        if family == "missing" or (family in ("float", "time") and _is_nan(value)):
            missing[i] = True
        else:
            examples[family] = value
    for family, advice in _ADVICE.items():
        if family in examples:
            refuse(name, f"{advice} (found {examples[family]!r:.80})")
    if not examples:
        return Numbers(np.full(shape, np.nan), unknown=True)
    if len(examples) > 1 and examples.keys() != {"int", "float"}:
        mixture = " and ".join(f"{v!r:.80} ({type(v).__name__})" for v in examples.values())
        refuse(name, f"mixes types that do not agree: {mixture}; cast all labels to one type")
    family = "float" if "float" in examples else next(iter(examples))
    has_columns = shape[1:] not in ((), (1,))
    convert: Any = {"int": int, "float": float, "bool": bool, "str": str.__str__}[family]
    try:
        pairs = zip(values, missing.tolist(), strict=True)
        filled: list[Any] = [None if is_missing else convert(v) for v, is_missing in pairs]
    except OverflowError:
        refuse(name, "holds numbers that are too large for a float")
    if family == "str":
        if has_columns:
            refuse(name, f"has several columns of strings; {SPLIT_ADVICE}")
        return _codes_of(filled)
    filled = [value or 0 for value in filled]
    array = _integers(filled, name) if family == "int" else np.array(filled, convert)
    if has_columns and array.dtype.kind == "O":
        refuse(name, "has several columns of integers beyond 64 bits; cast them to float")
    return Numbers(array.reshape(shape), missing.reshape(shape) if missing.any() else None)


def _codes_of(values: list[str | None]) -> ClassCodes:
    """Encode a list of class names; None is a missing label."""
    classes = tuple(sorted(name for name in set(values) if name is not None))
    code_of_name = {name: code for code, name in enumerate(classes)} | {None: -1}
    codes = np.fromiter(map(code_of_name.__getitem__, values), dtype=np.intp, count=len(values))
    return ClassCodes(classes, codes)


def _is_nan(value: object) -> bool:
    """Return whether a number is NaN, or a time is NaT."""
    # Comparing a signalling Decimal NaN raises an error.
    return value.is_nan() if isinstance(value, Decimal) else bool(value != value)


def _integers(values: list[int], name: str) -> NDArray[Any]:
    """Convert Python integers to an array, of dtype object if a value exceeds int64."""
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        longest = max(value.bit_length() for value in values)
        if longest > _MAX_BITS:
            refuse(name, f"holds an integer of {longest:,} bits; use strings as names of classes")
        return np.array(values, dtype=object)


# -- numbers -------------------------------------------------------------------------------------


def whole_numbers(column: Numbers, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Convert floats that name classes to integers; return these and a mask of missing labels."""
    is_missing = np.isnan(column.values)
    if column.missing is not None:
        is_missing |= column.missing
    values = np.where(is_missing, 0, column.values)
    refuse_infinite(values, name)
    fractional = values[values != np.floor(values)]
    if fractional.size:
        remedy = "bin the values, or cast them to strings"
        refuse(name, f"must hold classes, but holds {fractional[0]}; {remedy}")
    # From 2**(nmant + 1) on, several integers round to the same float.
    limit = 2.0 ** min(np.finfo(values.dtype).nmant + 1, 53)
    if (np.abs(values) >= limit).any():
        remedy = "pass integers or strings"
        refuse(name, f"has floats from {limit:.0f} on, which cannot tell integers apart; {remedy}")
    return values.astype(np.int64), is_missing if is_missing.any() else None


def check_indicators(column: Numbers, name: str, kind: str | None) -> None:
    """Raise LabelError for integers other than 0 and 1, unless `kind` is "continuous"."""
    if column.values.dtype.kind not in "iu" or kind == "continuous":
        return
    invalid = (column.values != 0) & (column.values != 1)
    if column.missing is not None:
        invalid &= ~column.missing
    if invalid.any():
        example = (
            f"integers (such as {column.values[invalid][0]}), which could be classes or numbers"
        )
        refuse(
            name,
            f"has several columns of {example}; for classes, {SPLIT_ADVICE}; for numbers, cast "
            "them to float",
        )


def float_copy(column: Numbers) -> NDArray[np.float64]:
    """Return a C-contiguous float64 copy, with NaN for missing numbers."""
    with np.errstate(over="ignore"):  # `refuse_infinite` later reports an overflowing long double
        copy = np.array(column.values, dtype=np.float64, order="C")
    if column.missing is not None:
        copy[column.missing] = np.nan
    return copy


def refuse_infinite(values: NDArray[np.generic], name: str) -> None:
    """Raise NonFiniteError if values are infinite; the message lists the first rows concerned."""
    infinite = np.isinf(values)
    if infinite.any():
        rows = np.flatnonzero(infinite.reshape(len(values), -1).any(axis=1))
        raise NonFiniteError(
            f"variable {name!r} is infinite in row(s) {listed(rows.tolist())} of the block; pass "
            "NaN where the value is unknown"
        )
