"""Conversion of lists, arrays, series, frames, Arrow data and tensors to raw columns.

Containers are recognised by their attributes, without importing the library of a container;
pandas, polars and Arrow data are read through narwhals.
"""

from __future__ import annotations

import contextlib
import datetime
import numbers
import sys
import weakref
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from types import NoneType
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type
from splince_fast._runtime.rows import is_tensor, torch_to_numpy
from splince_fast.exceptions import InputError, LabelError, NonFiniteError
from splince_fast.labels.names import ClassName, listed


class Raw(NamedTuple):
    """A variable read from its container, not yet encoded.

    `data` is an array of numbers or booleans, or a list of class names. With `categories`, `data`
    is an array of category codes. A missing class name is None, and a missing category code is -1.
    A missing number is NaN, or is marked in the mask `missing`, which has the shape of `data`.
    `columns` are the column names of a frame. If `unknown`, all labels are missing objects of
    unknown type, and `data` is NaN.
    """

    data: NDArray[Any] | list[Any]
    missing: NDArray[np.bool_] | None = None
    columns: tuple[str, ...] | None = None
    categories: tuple[ClassName, ...] | None = None
    unknown: bool = False


SPLIT_ADVICE = (
    "give each column a name of its own in a mapping {name: column} (of these, "
    "Moments(joint=((name, name),)) makes joint cells)"
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


def refuse(name: str, reason: str) -> NoReturn:
    """Raise LabelError with the name of the variable and the reason."""
    raise LabelError(f"variable {name!r} {reason}")


def refuse_length(
    data: NDArray[np.generic] | list[Any], n_rows: int, name: str, of: str
) -> NoReturn:
    """Raise InputError for a column whose length is not the number of rows of `of`."""
    hint = "pass one label per row, None or NaN where it is unknown"
    if isinstance(data, np.ndarray) and data.ndim == 2 and data.shape[1] == n_rows:
        hint = f"its shape {data.shape} looks transposed: pass its .T"
    raise InputError(f"variable {name!r} has {len(data)} labels but {of} has {n_rows} rows; {hint}")


def variables_of(labels: object, default_name: str) -> Mapping[Any, Any]:
    """Return a mapping from variable names to columns for labels in any container."""
    if isinstance(labels, Mapping):
        return labels
    if isinstance(labels, np.ndarray | Sequence):
        return {default_name: labels}
    table = _as_narwhals(labels, default_name)
    if table is None:
        return {default_name: labels}
    if hasattr(table, "columns"):
        return dict(zip(table.columns, table.iter_columns(), strict=True))
    return {default_name if table.name is None or table.name == "" else table.name: table}


def read_column(values: Any, name: str, kind: str | None) -> Raw:
    """Read a variable from any container; raise LabelError unless its values are of one kind."""
    if isinstance(values, np.ndarray):
        return _read_array(values, name)
    declared = read_declared(values, name)
    if declared is not None:
        return declared
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        labels = list(values)
        return _read_sequence(with_missing(labels) if is_class_label(values) else labels, name)
    if isinstance(values, Mapping | Set):
        refuse(name, f"is {described_type(values)}, which has no rows; pass a list or an array")
    if is_tensor(values):
        return _read_array(_as_array(values, name), name)
    if hasattr(values, "tocsr"):  # a SciPy sparse matrix, such as from OneHotEncoder
        return _read_array(values.toarray(), name)
    table = _as_narwhals(values, name)
    if table is not None:
        is_frame = hasattr(table, "columns")
        return _read_frame(table, name, kind) if is_frame else _read_series(table, name)
    for verb in ("collect", "compute"):
        if hasattr(values, verb):
            refuse(name, f"is a lazy {type(values).__name__}; {verb}() it first")
    if hasattr(values, "__array__") and not isinstance(values, np.generic):
        return _read_array(_as_array(values, name), name)
    refuse(name, f"is {values!r:.80}, not a column; pass a list or array of one label per row")


# Label by which a ClassLabel of Hugging Face datasets marks a missing one.
MISSING_CLASS = -1


def is_class_label(values: Any) -> bool:
    """Return whether values are a column of a Hugging Face dataset with a ClassLabel."""
    return type(getattr(values, "features", None)).__name__ == "ClassLabel"


def with_missing(labels: list[Any]) -> list[Any]:
    """Return labels of a ClassLabel with None for missing ones."""
    return [None if label == MISSING_CLASS else label for label in labels]


def _as_array(values: Any, name: str) -> NDArray[Any]:
    """Convert a tensor or another object with ``__array__`` to a NumPy array."""
    try:
        return torch_to_numpy(values) if is_tensor(values) else np.asarray(values)
    except InputError as error:
        raise LabelError(f"variable {name!r}: {error}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise LabelError(
            f"variable {name!r}: {described_type(values)} did not give a NumPy array ({error}); "
            "convert it first"
        ) from error


def _as_narwhals(values: object, name: str) -> Any:
    """Wrap a series or frame of any library in narwhals; return None for other values."""
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
            f"the frame of {name!r} has two columns of the same name; rename one of them"
        ) from error
    except TypeError:
        return None


def _read_series(series: Any, name: str) -> Raw:
    import narwhals.stable.v2 as nw

    declared = read_declared(series.to_native(), name)
    if declared is not None:
        return declared
    dtype = series.dtype
    if dtype.is_temporal():
        refuse(name, _TIME)
    is_128_bit = dtype in (nw.Int128, nw.UInt128)  # NumPy has no integers of 128 bits
    if dtype == nw.Boolean or dtype.is_float() or (dtype.is_integer() and not is_128_bit):
        missing = series.is_null().to_numpy()
        if not missing.any():
            return _read_array(series.to_numpy(), name)
        # NumPy integers and booleans have no missing value: replace nulls, and mark them in a mask.
        filled = series.fill_null(False if dtype == nw.Boolean else 0)
        return Raw(filled.to_numpy(), missing)
    if dtype in (nw.Categorical, nw.Enum) and series.implementation.is_pyarrow():
        native = series.to_native()  # an Arrow dictionary is only an encoding, not declared classes
        return _read_series(_as_narwhals(native.cast(native.type.value_type), name), name)
    return _read_sequence(series.to_list(), name)


def read_declared(values: Any, name: str) -> Raw | None:
    """Read the codes of a pandas categorical or polars Enum; return None for other values."""
    # Without narwhals, which hashes all categories at each access to the dtype of an Enum.
    package = type(values).__module__.partition(".")[0]
    if package == "pandas":
        array = getattr(values, "array", values)
        if type(array).__name__ == "Categorical":
            return Raw(array.codes, categories=_categorical_classes(array.categories, name))
    elif package == "polars":
        dtype: Any = getattr(
            values, "dtype", None
        )  # once, because polars hashes all categories of it
        if type(dtype).__name__ == "Enum":
            codes = values.to_physical().cast(sys.modules["polars"].Int64).fill_null(-1)
            return Raw(codes.to_numpy(), categories=_enum_classes(dtype.categories))
    return None


# Cache of the class names of polars Enums. The key is the number of categories and the last
# category; the value is the Series of categories and the class names. polars returns a new Series
# at each access, and comparing two Series is faster than converting one Series to class names. A
# full cache is cleared.
_names_of_enum: dict[tuple[int, str], tuple[Any, tuple[ClassName, ...]]] = {}
_MAX_ENUMS = 16


def _enum_classes(categories: Any) -> tuple[ClassName, ...]:
    """Return the class names of a polars Enum; Enums with equal categories share a cached tuple."""
    if not len(categories):
        return ()
    key = len(categories), categories[-1]
    entry = _names_of_enum.get(key)
    if entry is None or not entry[0].equals(categories):
        if len(_names_of_enum) >= _MAX_ENUMS:
            _names_of_enum.clear()
        entry = _names_of_enum[key] = categories, tuple(categories.to_list())
    return entry[1]


_NESTED_TYPES = (tuple, list, Mapping, Set)

# Cache of the class names of pandas categoricals. The key is the id of the Index of categories; the
# value is a weak reference to the Index, and the class names.
_names_of_index: dict[int, tuple[weakref.ref[Any], tuple[ClassName, ...]]] = {}


def _categorical_classes(index: Any, name: str) -> tuple[ClassName, ...]:
    """Return the class names of an Index of categories, which slices of a column share."""
    key = id(index)
    entry = _names_of_index.get(key)
    if entry is None or entry[0]() is not index:
        if isinstance(index.dtype, np.dtype) and index.dtype.kind in "biu":
            names: tuple[ClassName, ...] = tuple(index.tolist())
        else:
            names = _category_names(index.tolist(), name)
        reference = weakref.ref(index, lambda _: _names_of_index.pop(key, None))
        entry = _names_of_index[key] = reference, names
    return entry[1]


def _category_names(categories: list[Any], name: str) -> tuple[ClassName, ...]:
    """Convert declared categories to class names, in the declared order."""
    nested_types = [cls for cls in set(map(type, categories)) if issubclass(cls, _NESTED_TYPES)]
    if nested_types:
        example = next(category for category in categories if type(category) in nested_types)
        refuse(
            name,
            f"has the category {example!r:.80}, which cannot name a class; cast it to a string "
            "(Moments(joint=((name, name),)) makes joint classes of two variables)",
        )
    raw = _read_sequence(categories, name)
    if isinstance(raw.data, list):
        return tuple(raw.data)
    if raw.data.dtype.kind == "f":
        return tuple(whole_numbers(raw.data, None, name)[0].tolist())
    return tuple(raw.data.tolist())


def _read_frame(frame: Any, name: str, kind: str | None) -> Raw:
    columns = tuple(str(column) for column in frame.columns)
    if not columns:
        refuse(name, "is a frame without columns; pass at least one column, or omit the variable")
    raws = [_read_series(series, name) for series in frame.iter_columns()]
    if len(raws) == 1:
        return raws[0]._replace(columns=columns)
    parts = []
    for column, raw in zip(columns, raws, strict=True):
        if isinstance(raw.data, list) or raw.categories is not None:
            refuse(name, f"is a frame, and its column {column!r} holds classes; {SPLIT_ADVICE}")
        check_indicators(raw.data, raw.missing, f"{name}/{column}", kind)
        parts.append(float_copy(raw.data, raw.missing))
    return Raw(np.stack(parts, axis=1), columns=columns)


def _read_array(array: NDArray[Any], name: str) -> Raw:
    if not 1 <= array.ndim <= 2 or (array.ndim == 2 and array.shape[1] == 0):
        form = "is a scalar" if array.ndim == 0 else f"has the shape {array.shape}"
        refuse(name, f"{form}; pass one label per row, as (n,) or (n, k) with k > 0")
    kind = array.dtype.kind
    missing = None
    if isinstance(array, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(array) if array.mask is not np.ma.nomask else None
        array = np.ma.getdata(array)
    if kind in "biuf":
        return Raw(np.asarray(array), missing)
    if kind not in "OUT":
        refuse(name, _DTYPE_ADVICE[kind])
    if missing is not None:
        array = array.astype(object)
        array[missing] = None
    return _read_sequence(array.tolist(), name)


# Largest bit length of an integer that names a class: files store class names as text, and Python
# limits the conversion of integers to text (to 4300 digits by default).
_MAX_BITS = 4096
_PLAIN_TYPES = frozenset({str, bool, int, float, NoneType})


def _read_sequence(values: list[Any], name: str) -> Raw:
    """Read a list of scalars (one label per row), or a list of rows (several values per row)."""
    types = set(map(type, values))
    if types == {int}:
        return Raw(_integers(values, name))
    if types == {bool} or types == {float}:
        return Raw(np.array(values))
    if types == {str} or types == {str, NoneType}:
        return Raw(values)
    if not types <= _PLAIN_TYPES:
        values = [_as_scalar_or_list(value, name) for value in values]
        if any(isinstance(value, list | tuple) for value in values):
            return _read_rows(values, name)
    return _read_objects(values, (len(values),), name)


def _as_scalar_or_list(value: object, name: str) -> object:
    """Convert an entry that is an array or tensor to a scalar or list; return others unchanged."""
    if is_tensor(value):
        value = _as_array(value, name)
    if isinstance(value, np.ndarray) and value is not np.ma.masked:
        return value[()] if value.ndim == 0 else list(value)
    return value


def _read_rows(values: list[Any], name: str) -> Raw:
    """Read a list of rows; an entry None is a row of missing values."""
    width = max(len(value) for value in values if isinstance(value, list | tuple))
    table = np.empty(0, dtype=object)
    with contextlib.suppress(ValueError):  # raised for rows of different shapes
        table = np.array([[None] * width if v is None else v for v in values], dtype=object)
    if table.ndim != 2 or width == 0:
        refuse(name, "has rows of different or zero length, or nested rows; pass shape (n, k)")
    return _read_objects(table.ravel().tolist(), table.shape, name)


def _read_objects(values: list[Any], shape: tuple[int, ...], name: str) -> Raw:
    """Read Python objects by their types; `values` are the entries of an array in C order."""
    family_of_type = {cls: _type_family(cls) for cls in set(map(type, values))}
    missing_types = {cls for cls, family in family_of_type.items() if family == "missing"}
    nan_types = {cls for cls, family in family_of_type.items() if family in ("float", "time")}
    missing_flags = [
        type(value) in missing_types or (type(value) in nan_types and _is_nan(value))
        for value in values
    ]
    example = {
        family_of_type[type(v)]: v
        for v, is_missing in zip(values, missing_flags, strict=True)
        if not is_missing
    }
    value_families = set(example)
    missing = np.array(missing_flags, dtype=np.bool_).reshape(shape) if any(missing_flags) else None
    for family, advice in _OBJECT_ADVICE.items():
        if family in value_families:
            refuse(name, f"{advice} (found {example[family]!r:.80})")
    if not value_families:
        return Raw(np.full(shape, np.nan), unknown=True)
    if not (len(value_families) == 1 or value_families == {"int", "float"}):
        mixture = " and ".join(f"{v!r:.80} ({type(v).__name__})" for v in example.values())
        refuse(name, f"mixes types that do not agree: {mixture}; cast all labels to one type")
    if "str" in value_families:
        if shape[1:] not in ((), (1,)):
            refuse(name, f"has several columns of strings; {SPLIT_ADVICE}")
        pairs = zip(values, missing_flags, strict=True)
        return Raw([None if is_missing else str.__str__(value) for value, is_missing in pairs])
    filled = [0 if is_missing else v for v, is_missing in zip(values, missing_flags, strict=True)]
    if "float" in value_families:
        try:
            floats = np.array([float(value) for value in filled])
        except OverflowError:
            refuse(name, "holds numbers that are too large for a float")
        return Raw(floats.reshape(shape), missing)
    if "bool" in value_families:
        return Raw(np.array(filled, dtype=np.bool_).reshape(shape), missing)
    integers = _integers([int(value) for value in filled], name)
    if isinstance(integers, np.ndarray):
        return Raw(integers.reshape(shape), missing)
    if shape[1:] not in ((), (1,)):
        refuse(name, "has several columns of integers beyond 64 bits; cast them to float")
    return Raw(
        [None if is_missing else v for v, is_missing in zip(integers, missing_flags, strict=True)]
    )


def _is_nan(value: object) -> bool:
    """Return whether a number is NaN, or a time is NaT."""
    # Comparing a signalling Decimal NaN raises an error.
    return value.is_nan() if isinstance(value, Decimal) else bool(value != value)


def _integers(values: list[int], name: str) -> NDArray[np.int64] | list[int]:
    """Convert Python integers to an array, or return the list if a value exceeds int64."""
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        longest = max(value.bit_length() for value in values)
        if longest > _MAX_BITS:
            refuse(name, f"holds an integer of {longest:,} bits; use strings as names of classes")
        return values


def _type_family(cls: type) -> str:
    """Return the family of a type; labels of a variable are of one family, or int and float."""
    if cls is NoneType or cls is type(np.ma.masked) or cls.__name__ in ("NAType", "NaTType"):
        return "missing"
    times = (np.datetime64, np.timedelta64, datetime.date, datetime.time, datetime.timedelta)
    # The first match counts: bool and np.timedelta64 are also Integral, and integers are also Real.
    for family, types in (
        ("bool", (bool, np.bool_)),
        ("str", (str,)),
        ("bytes", (bytes, bytearray)),
        ("time", times),
        ("int", (numbers.Integral,)),
        ("float", (numbers.Real, Decimal)),
        ("complex", (numbers.Complex,)),
    ):
        if issubclass(cls, types):
            return family
    return "other"


def whole_numbers(
    values: NDArray[Any], missing: NDArray[np.bool_] | None, name: str
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Convert floats that name classes to integers; return these and a mask of missing labels."""
    is_missing = np.isnan(values) if missing is None else np.isnan(values) | missing
    values = np.where(is_missing, 0, values)
    refuse_infinite(values, name)
    fractional = values != np.floor(values)
    if fractional.any():
        refuse(
            name,
            f"must hold classes, but holds {values[fractional][0]}; bin the values, or cast them "
            "to strings",
        )
    # From 2**(nmant + 1) on, several integers round to the same float.
    limit = 2.0 ** min(np.finfo(values.dtype).nmant + 1, 53)
    if (np.abs(values) >= limit).any():
        refuse(
            name,
            f"must hold classes, but holds values from {limit:.0f} on, where {values.dtype} cannot "
            "tell integers apart; pass integers or strings",
        )
    return values.astype(np.int64), is_missing if is_missing.any() else None


def check_indicators(
    values: NDArray[np.generic], missing: NDArray[np.bool_] | None, name: str, kind: str | None
) -> None:
    """Raise LabelError for integers other than 0 and 1, unless `kind` is "continuous"."""
    if values.dtype.kind not in "iu" or kind == "continuous":
        return
    invalid = (values != 0) & (values != 1)
    if missing is not None:
        invalid &= ~missing
    if invalid.any():
        refuse(
            name,
            f"has several columns of integers (such as {values[invalid][0]}), which could be "
            f"classes or numbers; for classes, {SPLIT_ADVICE}; for numbers, cast them to float",
        )


def float_copy(values: NDArray[Any], missing: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """Return a C-contiguous float64 copy, with NaN for missing numbers."""
    with np.errstate(over="ignore"):  # `refuse_infinite` later reports an overflowing long double
        copy = np.array(values, dtype=np.float64, order="C")
    if missing is not None:
        copy[missing] = np.nan
    return copy


def refuse_infinite(values: NDArray[np.generic], name: str) -> None:
    """Raise NonFiniteError if values are infinite; the message lists the first rows concerned."""
    infinite = np.isinf(values)
    if infinite.any():
        rows = np.flatnonzero(infinite.reshape(len(values), -1).any(axis=1))
        raise NonFiniteError(
            f"variable {name!r} is infinite in row(s) {listed(rows.tolist())} of the block; a "
            "common cause is a logarithm or a division by zero. Correct the values, or pass NaN "
            "where the value is unknown"
        )
