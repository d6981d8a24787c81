"""Labels: the same meaning from every container, and no silent misreading."""

from __future__ import annotations

import datetime
import enum
import json
import math
from collections import UserDict
from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from processes import script

from splince_fast.exceptions import (
    FileFormatError,
    InputError,
    LabelError,
    ManyClassesWarning,
    MissingLabelWarning,
    NonFiniteError,
    WholeNumbersWarning,
)
from splince_fast.labels import (
    ClassCodes,
    Columns,
    Encoded,
    class_key,
    encode,
    encode_one,
    kind_of,
    names_array,
    names_from_json,
    names_to_json,
)

fast = settings(max_examples=40, deadline=None)


def decoded(encoded: Encoded) -> list[Any]:
    """Name of each row's class, None where missing: independent of the order of the classes."""
    assert isinstance(encoded, ClassCodes)
    assert encoded.codes.dtype == np.intp
    assert encoded.codes.ndim == 1
    assert all(-1 <= code < len(encoded.classes) for code in encoded.codes)
    assert len({class_key(name) for name in encoded.classes}) == len(encoded.classes)
    return [None if code < 0 else encoded.classes[code] for code in encoded.codes]


def typed(values: list[Any]) -> list[tuple[type, Any]]:
    """Values with their types, so that True == 1 does not pass for the same."""
    return [(type(value), value) for value in values]


def numbers_of(encoded: Encoded) -> np.ndarray:
    """Values of a continuous variable with NaN in the rows that are missing."""
    assert isinstance(encoded, Columns)
    values, present = encoded.values, encoded.present
    assert values.dtype == np.float64
    assert values.flags.c_contiguous
    assert values.shape[1] == len(encoded.columns)
    assert np.isfinite(values).all()
    if present is None:
        return values
    assert present.dtype == np.bool_
    assert not present.all()
    assert not values[~present].any()
    return np.where(present[:, None], values, np.nan)


def arrow(*args: Any, **kwargs: Any) -> Any:
    import pyarrow

    return pyarrow.array(*args, **kwargs)


def series(*args: Any, **kwargs: Any) -> Any:
    import pandas

    return pandas.Series(*args, **kwargs)


def polar(values: Any, dtype: str | None = None) -> Any:
    import polars

    return polars.Series(values, dtype=dtype and getattr(polars, dtype))


def polar_enum(values: list[str | None]) -> Any:
    import polars

    return polars.Series(values, dtype=polars.Enum(sorted({v for v in values if v is not None})))


def chunked(values: list[Any], **kwargs: Any) -> Any:
    import pyarrow

    half = len(values) // 2
    parts = [pyarrow.array(part, **kwargs) for part in (values[:half], values[half:])]
    return pyarrow.chunked_array(parts)


def dictionary(values: list[Any], type_: str) -> Any:
    import pyarrow

    kind = getattr(pyarrow, type_)()
    half = len(values) // 2
    parts = [pyarrow.array(p, kind).dictionary_encode() for p in (values[:half], values[half:])]
    return pyarrow.chunked_array(parts)


def objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def masked(values: list[Any], fill: Any, dtype: Any) -> np.ma.MaskedArray:
    """`fill` lies below the mask, where nobody should look."""
    data = np.array([fill if v is None else v for v in values], dtype=dtype)
    return np.ma.MaskedArray(data, mask=[v is None for v in values])


def with_nan(values: list[Any]) -> list[Any]:
    return [math.nan if v is None else v for v in values]


def with_na(values: list[Any]) -> list[Any]:
    import pandas

    return [(pandas.NA, pandas.NaT)[i % 2] if v is None else v for i, v in enumerate(values)]


def containers(table: dict[str, Any]) -> list[Any]:
    """Parameters, skipped where the library of the container is not installed."""
    libraries = {"pandas": "pandas", "polars": "polars", "arrow": "pyarrow"}
    params = []
    for name, make in table.items():
        library = libraries.get(name.split()[0])
        absent = library is not None and find_spec(library) is None
        skip = pytest.mark.skipif(absent, reason=f"no {library}")
        params.append(
            pytest.param(*(make if isinstance(make, tuple) else (make,)), id=name, marks=skip)
        )
    return params


class Tensor:
    """What a GPU tensor of bfloat16 answers: only detached, on the host, as float32."""

    def __init__(self, array: np.ndarray, done: tuple[str, ...] = ()) -> None:
        self.array, self.done = array, done
        self.dtype = "torch.bfloat16" if array.dtype == np.float16 else f"torch.{array.dtype}"

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("cannot convert a device tensor; use .cpu() first")

    def detach(self) -> Tensor:
        return Tensor(self.array, ("detach",))

    def cpu(self) -> Tensor:
        return Tensor(self.array, (*self.done, "cpu"))

    def float(self) -> Tensor:
        return Tensor(self.array.astype(np.float32), (*self.done, "float"))

    def numpy(self) -> np.ndarray:
        if self.array.dtype == np.float16 and self.done != ("detach", "cpu", "float"):
            raise TypeError("Got unsupported ScalarType BFloat16")
        assert self.done[:2] == ("detach", "cpu")
        return self.array


# --- the same classes from every container -----------------------------------------------------

OPTIONAL_INTS = {
    "list": list,
    "tuple": tuple,
    "list of NumPy scalars": lambda v: [None if x is None else np.int16(x) for x in v],
    "list of arrays": lambda v: [None if x is None else np.array(x) for x in v],
    "list with NaN": with_nan,
    "list of rows": lambda v: [[x] for x in v],
    "list of masked": lambda v: [np.ma.masked if x is None else x for x in v],
    "objects": objects,
    "objects with NaN": lambda v: objects(with_nan(v)),
    "objects, one column": lambda v: objects(v).reshape(-1, 1),
    **{
        f"masked {dtype}": lambda v, dtype=dtype: masked(v, 99, dtype)
        for dtype in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
    },
    "masked, one column": lambda v: masked(v, 99, "i8").reshape(-1, 1),
    "masked objects": lambda v: masked(v, "under the mask", object),
    "pandas list with NA": with_na,
    "pandas Int64": lambda v: series(v, dtype="Int64"),
    "pandas UInt8": lambda v: series(v, dtype="UInt8"),
    "pandas object": lambda v: series(v, dtype=object),
    "pandas category": lambda v: series(v, dtype=object).astype("category"),
    "pandas array": lambda v: series(v, dtype="Int64").array,
    "pandas frame": lambda v: series(v, dtype="Int64").to_frame("column"),
    "arrow array": lambda v: arrow(v, "int32"),
    "arrow chunks": lambda v: chunked(v, type="uint16"),
    "arrow dictionary": lambda v: dictionary(v, "int64"),
    "polars Int64": lambda v: polar(v, "Int64"),
    "polars UInt8": lambda v: polar(v, "UInt8"),
    "polars Int128": lambda v: polar(v, "Int128"),
    "tensors in a list": lambda v: [None if x is None else Tensor(np.array(x)) for x in v],
}
OPTIONAL_STRINGS = {
    "list": list,
    "list of NumPy scalars": lambda v: [None if x is None else np.str_(x) for x in v],
    "list with NaN": with_nan,
    "objects": objects,
    "objects with NaN": lambda v: objects(with_nan(v)),
    "masked": lambda v: masked(v, "under the mask", str),
    "StringDType": lambda v: np.array(v, dtype=np.dtypes.StringDType(na_object=None)),
    "pandas list with NA": with_na,
    "pandas str": lambda v: series(v, dtype="str"),
    "pandas string": lambda v: series(v, dtype="string"),
    "pandas object": lambda v: series(v, dtype=object),
    "pandas category": lambda v: series(v, dtype=object).astype("category"),
    "pandas Categorical": lambda v: series(v, dtype=object).astype("category").array,
    "pandas index": lambda v: series(0, index=objects(v)).index,
    "arrow string": lambda v: arrow(v, "string"),
    "arrow large_string chunks": lambda v: chunked(v, type="large_string"),
    "arrow dictionary": lambda v: dictionary(v, "string"),
    "polars String": lambda v: polar(v, "String"),
    "polars Categorical": lambda v: polar(v, "Categorical"),
    "polars Enum": polar_enum,
}
OPTIONAL_BOOLS = {
    "list": list,
    "list of NumPy scalars": lambda v: [None if x is None else np.bool_(x) for x in v],
    "list with NaN": with_nan,
    "objects": objects,
    "masked": lambda v: masked(v, True, bool),
    "pandas boolean": lambda v: series(v, dtype="boolean"),
    "pandas object": lambda v: series(v, dtype=object),
    "pandas category": lambda v: series(v, dtype=object).astype("category"),
    "arrow": lambda v: chunked(v, type="bool"),
    "polars": lambda v: polar(v, "Boolean"),
}


def some(elements: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Columns with missing entries and at least one that is present."""
    return st.lists(st.none() | elements, min_size=1, max_size=30).filter(
        lambda values: any(v is not None for v in values)
    )


CLASSES = {
    "integer": (OPTIONAL_INTS, st.integers(0, 100)),
    "string": (
        OPTIONAL_STRINGS,
        st.text("ab é\u4e2d", max_size=3) | st.sampled_from(["nan", "None", ""]),
    ),
    "boolean": (OPTIONAL_BOOLS, st.booleans()),
}


@pytest.mark.filterwarnings("ignore::splince_fast.MissingLabelWarning")
@pytest.mark.parametrize(
    ("make", "elements"),
    containers(
        {f"{c} {name}": (make, e) for name, (t, e) in CLASSES.items() for c, make in t.items()}
    ),
)
@fast
@given(data=st.data())
def test_values_are_the_same_classes_in_every_container(
    make: Any, elements: Any, data: st.DataObject
) -> None:
    values = data.draw(some(elements))
    encoded = encode_one(make(values), len(values), name="z")
    assert typed(decoded(encoded)) == typed(values)
    assert list(encoded.classes) == sorted({v for v in values if v is not None})


@fast
@given(
    values=st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]).flatmap(
        lambda dtype: hnp.arrays(dtype, st.integers(0, 40))
    ),
    offset=st.sampled_from([0, 1]),
)
def test_integer_arrays_over_the_whole_range_of_their_dtype(
    values: np.ndarray, offset: int
) -> None:
    # either end of the range, where a difference or a cast would wrap around
    limits = np.iinfo(values.dtype)
    ends = [limits.min + offset, limits.min, limits.max - offset, limits.max]
    extreme = np.array(ends, dtype=values.dtype)
    for column in (values, extreme, np.append(values, extreme)):
        encoded = encode_one(column, len(column), name="z")
        assert typed(decoded(encoded)) == typed(column.tolist())
        assert list(encoded.classes) == sorted(set(column.tolist()))


@fast
@example(start=2**63 + 5, steps=[4, 0, 4])
@given(start=st.integers(-(2**63), 2**64 - 100), steps=st.lists(st.integers(0, 90), min_size=2))
def test_integers_close_together_anywhere(start: int, steps: list[int]) -> None:
    values = [start + step for step in steps]
    encoded = encode_one(values, len(values), name="z")
    assert typed(decoded(encoded)) == typed(values)
    if start >= 0:
        column = np.array(values, dtype=np.uint64)
        assert typed(decoded(encode_one(column, len(values), name="z"))) == typed(values)


def test_integers_beyond_64_bits_are_classes_too() -> None:
    values = [2**70, None, -1, 2**70]
    assert np.array([2**63, -1]).dtype.kind == "f"  # control: NumPy would merge neighbours
    assert decoded(encode_one(values, 4, name="z")) == values
    with pytest.raises(LabelError, match="beyond 64 bits"):
        encode_one([[2**70, 1], [3, 4]], 2, name="z")


def test_views_and_strides() -> None:
    table = np.arange(24).reshape(6, 4) % 3
    for column in (table[:, 1], table[::-2, 0], table.T[2], table[:, :1]):
        assert decoded(encode_one(column, len(column), name="z")) == column.ravel().tolist()
    for dtype, values in ((">i4", [1, 2]), (">u8", [2**63 + 1, 2**63 + 2])):
        assert decoded(encode_one(np.array(values, dtype), 2, name="z")) == values
    assert decoded(encode_one(range(3), 3, name="z")) == [0, 1, 2]


def test_anything_that_gives_an_array() -> None:
    class Foreign:
        def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
            return np.array([2, 1])

    assert decoded(encode({"z": Foreign()}, 2)["z"]) == [2, 1]
    assert decoded(encode(Foreign(), 2)["concept"]) == [2, 1]


def test_subclasses_of_str_and_int_become_plain() -> None:
    class Shouted(str):
        def __str__(self) -> str:
            return self.upper()

    class Size(enum.IntEnum):
        BIG = 3

    assert typed(decoded(encode_one([Shouted("red"), "red"], 2, name="z"))) == typed(["red"] * 2)
    assert typed(decoded(encode_one([Size.BIG, 3], 2, name="z"))) == typed([3, 3])


# --- continuous variables -----------------------------------------------------------------------

OPTIONAL_FLOATS = {
    "list": list,
    "list with NaN": with_nan,
    "list of NumPy scalars": lambda v: [None if x is None else np.float32(x) for x in v],
    "list of Decimal": lambda v: [Decimal("NaN") if x is None else Decimal(x) for x in v],
    "list of Fraction": lambda v: [None if x is None else Fraction(x) for x in v],
    "list of rows": lambda v: [[x] for x in v],
    "objects": objects,
    **{
        f"array {dtype}": lambda v, dtype=dtype: np.array(with_nan(v), dtype)
        for dtype in ("f2", "f4", "f8", "longdouble", ">f8")
    },
    "one column": lambda v: np.array(with_nan(v)).reshape(-1, 1),
    "masked": lambda v: masked(v, np.inf, float),
    "tensor": lambda v: Tensor(np.array(with_nan(v), np.float32)),
    "tensor of bfloat16": lambda v: Tensor(np.array(with_nan(v), np.float16)),
    "pandas float64": lambda v: series(v, dtype="float64"),
    "pandas Float64": lambda v: series(v, dtype="Float64"),
    "pandas Float32": lambda v: series(v, dtype="Float32"),
    "pandas object": lambda v: series(v, dtype=object),
    "arrow float32": lambda v: chunked(v, type="float32"),
    "arrow decimal": lambda v: arrow([None if x is None else Decimal(x) for x in v]),
    "polars Float32": lambda v: polar(v, "Float32"),
    "polars with NaN": lambda v: polar(with_nan(v), "Float64"),
    "polars decimal": lambda v: polar([None if x is None else Decimal(x) for x in v]),
}


@pytest.mark.parametrize("make", containers(OPTIONAL_FLOATS))
@fast
@given(values=some(st.integers(-400, 400).map(lambda v: v / 8)))
def test_floats_are_continuous_in_every_container(make: Any, values: list[Any]) -> None:
    encoded = encode_one(make(values), len(values), name="z")
    assert kind_of(encoded) == "continuous"
    assert encoded.columns == ("0",)
    # eighths below 50 are exact in every one of these types, so equality is exact
    np.testing.assert_array_equal(numbers_of(encoded)[:, 0], np.array(values, dtype=float))


def test_numbers_of_which_some_are_floats_are_continuous() -> None:
    np.testing.assert_array_equal(
        numbers_of(encode_one([0, 0.5, 1, None], 4, name="z"))[:, 0], [0, 0.5, 1, np.nan]
    )
    assert decoded(encode_one([0, 2, math.nan], 3, name="z")) == [0, 2, None]  # no float in it


@fast
@given(
    values=hnp.arrays(
        np.float32,
        st.tuples(st.integers(0, 12), st.integers(2, 4)),
        elements=st.sampled_from([0.0, -1.5, 2.25, math.nan]),
    )
)
def test_several_float_columns(values: np.ndarray) -> None:
    n, k = values.shape
    twin = values.astype(float)
    twin[np.isnan(twin).any(axis=1)] = np.nan
    given_as = [values, np.asfortranarray(values), np.ma.masked_invalid(values), Tensor(values)]
    if n:
        given_as.append([[None if math.isnan(x) else float(x) for x in row] for row in values])
        given_as.append([np.array(row) for row in values])
        given_as.append([tuple(map(float, row)) for row in values])
    for container in given_as:
        encoded = encode_one(container, n, name="z")
        assert encoded.columns == tuple(str(j) for j in range(k))
        np.testing.assert_array_equal(numbers_of(encoded), twin)


def test_one_hot_and_multi_label_columns_are_indicators() -> None:
    table = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0]])
    sparse = pytest.importorskip("scipy.sparse")
    as_objects = objects([*table.ravel()]).reshape(3, 3)
    arrays = (table, table.astype(bool), table.astype("u1"), as_objects, sparse.csr_array(table))
    for container in (*arrays, table.tolist()):
        encoded = encode_one(container, 3, name="z")
        np.testing.assert_array_equal(numbers_of(encoded), table)
    hidden = np.ma.MaskedArray([[1, 0], [7, 1]], mask=[[0, 0], [1, 0]])
    np.testing.assert_array_equal(
        numbers_of(encode_one(hidden, 2, name="z")), [[1, 0], [np.nan, np.nan]]
    )


@pytest.mark.parametrize("make", [list, np.array, lambda v: np.array(v, "f2"), objects])
@pytest.mark.parametrize("kind", [None, "classes", "continuous"])
def test_infinite_values_are_refused_by_row(make: Any, kind: str | None) -> None:
    with pytest.raises(NonFiniteError, match=r"'z' is infinite in row\(s\) 1, 2 of"):
        encode_one(make([1.0, math.inf, -math.inf]), 3, name="z", kind=kind)


def test_infinite_values_from_a_long_double_and_in_many_rows() -> None:
    if np.finfo(np.longdouble).max > np.finfo(float).max:
        with pytest.raises(NonFiniteError, match=r"row\(s\) 0 of"):
            encode_one(np.array([np.longdouble("1e4000")]), 1, name="z")
    with pytest.raises(NonFiniteError, match="19 and 30 more of the block"):
        encode_one(np.full((50, 2), np.inf), 50, name="z")


# --- kinds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[1, 2, None], [True, False, None], [Decimal(1), 2.5, None]])
def test_numbers_can_be_said_to_be_continuous(values: list[Any]) -> None:
    encoded = encode({"z": values}, 3, kinds={"z": "continuous"})["z"]
    np.testing.assert_array_equal(numbers_of(encoded)[:, 0], np.array(values, dtype=float))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", object])
def test_whole_floats_can_be_said_to_be_classes(dtype: Any) -> None:
    column = np.array([3.0, -0.0, np.nan, 3.0], dtype=dtype)
    encoded = encode_one(column, 4, name="z", kind="classes")
    assert typed(decoded(encoded)) == typed([3, 0, None, 3])
    hidden = np.ma.MaskedArray([3.0, 0.5, np.inf, np.nan], mask=[0, 1, 1, 0])
    assert decoded(encode_one(hidden, 4, name="z", kind="classes")) == [3, None, None, None]


def test_floats_too_large_to_tell_integers_apart_are_no_classes() -> None:
    near, far = 2.0**24 - 1, 2.0**24
    assert np.float32(far + 1) == np.float32(far)  # control: two identifiers, one float32
    assert decoded(encode_one(np.array([near], "f4"), 1, name="z", kind="classes")) == [int(near)]
    assert decoded(encode_one(np.array([far]), 1, name="z", kind="classes")) == [int(far)]
    for column in (np.array([far], "f4"), np.array([-far], "f4"), np.array([2.0**53])):
        with pytest.raises(LabelError, match="cannot tell integers apart"):
            encode_one(column, 1, name="z", kind="classes")


@pytest.mark.parametrize(
    ("values", "kind", "match"),
    [
        ([1.0, 0.5], "classes", r"must hold classes, but holds 0\.5; bin"),
        (np.eye(2), "classes", "several columns, so it cannot be classes"),
        (["a", None], "continuous", "cannot be continuous: it holds classes such as"),
        (np.array(["a", "b"]), "continuous", "cannot be continuous: it holds classes such as"),
        ([2**70, None], "continuous", "cannot be continuous: it holds classes such as"),
        ([1, 2], "class", r"unknown kind 'class'.*from 'classes', 'continuous'"),
    ],
)
def test_kinds_that_values_cannot_have(values: Any, kind: str, match: str) -> None:
    with pytest.raises(LabelError, match=match):
        encode({"z": values}, 2, kinds={"z": kind})
    with pytest.raises(LabelError, match=r"kinds names 'gendr'.*'gender', 'age'"):
        encode({"gender": [1], "age": [2.0]}, 1, kinds={"gendr": kind})


def test_many_integers_warn_with_the_way_out() -> None:
    values = np.arange(1001)
    for column in (values, values.tolist(), values[:, None], values * 10**9, [*values, 2**70]):
        with pytest.warns(ManyClassesWarning, match=r"kinds=\{'age': 'continuous'\}"):
            encode({"age": column}, len(column))
    # none of these warns
    encode({"age": values[:1000]}, 1000)
    encode({"age": values}, 1001, kinds={"age": "classes"})
    encode({"age": values}, 1001, kinds={"age": "continuous"})
    encode({"name": values.astype(str)}, 1001)


# --- missing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["nan", "None", "<NA>", "NaT", ""])
def test_a_missing_value_that_was_converted_to_text_warns(text: str) -> None:
    import pandas as pd
    import polars as pl

    values = ["a", "b", text]
    for column in (values, np.array(values), pd.Categorical(values), pl.Series(values)):
        with pytest.warns(MissingLabelWarning, match=r"name='z', kind='classes'\) silences"):
            assert len(encode_one(column, 3, name="z").classes) == 3
        encode_one(column, 3, name="z", kind="classes")
    encode({"z": ["none", "na", "unknown", "male "]}, 4)  # names of classes in common data sets
    for missing in (None, math.nan, pd.NA):  # control: missing values are no classes
        assert len(encode_one(pd.Series(["a", "b", missing]), 3, name="z").classes) == 2


ALL_MISSING = {
    "list": lambda: [None, None],
    "objects": lambda: objects([math.nan, None]),
    "not a time": lambda: [np.datetime64("NaT"), np.timedelta64("NaT", "s")],
    "masked": lambda: masked([None, None], "a", object),
    "masked integers": lambda: masked([None, None], 7, "i8"),
    "masked booleans": lambda: masked([None, None], 7, "bool"),
    "pandas": lambda: series([None, None], dtype=object),
    "pandas list": lambda: with_na([None, None]),
    "arrow": lambda: arrow([None, None]),
    "polars": lambda: polar([None, None]),
}
ALL_NAN = {
    "list": lambda: [math.nan] * 2,
    "array": lambda: np.full(2, np.nan),
    "one column": lambda: np.full((2, 1), np.nan),
    "pandas": lambda: series([None, None], dtype="Float32"),
    "arrow": lambda: arrow([None, None], "float64"),
    "polars": lambda: polar([None, None], "Float64"),
}


@pytest.mark.parametrize("make", containers(ALL_MISSING))
def test_a_column_of_classes_or_of_unknown_type_that_is_all_missing(make: Any) -> None:
    for kind in (None, "classes"):
        encoded = encode_one(make(), 2, name="z", kind=kind)
        assert encoded.classes == ()
        assert decoded(encoded) == [None, None]
    assert np.isnan(numbers_of(encode_one(make(), 2, name="z", kind="continuous"))).all()


@pytest.mark.parametrize("make", containers(ALL_NAN))
def test_a_column_of_floats_that_is_all_missing_stays_continuous(make: Any) -> None:
    assert np.isnan(numbers_of(encode_one(make(), 2, name="z"))).all()


def test_blocks_without_rows() -> None:
    for column in (np.zeros(0, int), np.zeros(0, bool), np.zeros(0, str), [], objects([])):
        encoded = encode_one(column, 0, name="z")
        assert (encoded.classes, encoded.codes.shape) == ((), (0,))
    for column, k in ((np.zeros(0), 1), (np.zeros((0, 3)), 3)):
        encoded = encode_one(column, 0, name="z")
        assert (encoded.values.shape, encoded.present) == ((0, k), None)


# --- categoricals -------------------------------------------------------------------------------


def test_declared_categories_are_classes_even_if_absent(pd: Any, pl: Any) -> None:
    column = pd.Categorical(["b", None, "b"], categories=["c", "b", "a"], ordered=True)
    for container in (column, pd.Series(column), pd.CategoricalIndex(column)):
        encoded = encode_one(container, 3, name="z")
        assert encoded.classes == ("c", "b", "a")
        assert decoded(encoded) == ["b", None, "b"]
    encoded = encode_one(pl.Series(["b", None], dtype=pl.Enum(["c", "b"])), 2, name="z")
    assert encoded.classes == ("c", "b")
    assert decoded(encoded) == ["b", None]


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int8", "bool", "Int64", "boolean", object])
def test_categories_that_are_numbers_have_names_of_python(dtype: Any, pd: Any) -> None:
    names = [True, False] if dtype in ("bool", "boolean") else [7, 3, 120]
    if dtype == "uint64":
        names[1] = 2**64 - 1
    column = pd.Categorical(names[1:], categories=pd.Index(names, dtype=dtype))
    encoded = encode_one(column, len(names) - 1, name="z")
    assert typed(encoded.classes) == typed(names)
    assert decoded(encoded) == names[1:]


def test_categories_of_another_column_do_not_leak(pl: Any) -> None:
    first = pl.Series(["a", "b"], dtype=pl.Categorical)
    second = pl.Series(["c"], dtype=pl.Categorical)  # shares the string cache with the first
    assert encode_one(first, 2, name="z").classes == ("a", "b")
    assert encode_one(second, 1, name="z").classes == ("c",)


def test_categories_that_are_numbers_or_nothing(pd: Any) -> None:
    assert encode_one(pd.Categorical([2.0, None]), 2, name="z").classes == (2,)
    assert typed(encode_one(pd.Categorical([True]), 1, name="z").classes) == typed([True])
    assert encode_one(pd.Categorical([None]), 1, name="z").classes == ()
    with pytest.raises(LabelError, match="bin the values, or cast them to str"):
        encode_one(pd.Categorical([2.5]), 1, name="z")
    with pytest.raises(LabelError, match="neither names nor numbers"):
        encode_one(pd.cut(pd.Series([1.0, 2.0]), 2), 2, name="z")
    with pytest.raises(LabelError, match="cannot be continuous: it holds classes such as 2"):
        encode_one(pd.Categorical([2]), 1, name="z", kind="continuous")
    with pytest.raises(LabelError, match="mixes types"):
        encode_one(pd.Categorical(["a", 1]), 2, name="z")


def test_an_arrow_dictionary_encodes_and_declares_nothing(pa: Any) -> None:
    column = pa.DictionaryArray.from_arrays([1, None, 1, 2], ["unused", "used", None])
    encoded = encode_one(column, 4, name="z")
    assert encoded.classes == ("used",)
    assert decoded(encoded) == ["used", None, "used", None]


# --- booleans beside integers ---------------------------------------------------------------------


def test_true_and_one_are_different_classes() -> None:
    assert len(dict.fromkeys([True, 1])) == 1  # control: a plain dict merges them
    assert class_key(True) != class_key(1)
    assert class_key((True, "a")) != class_key((1, "a"))
    assert class_key("a") != class_key(("a",))
    assert class_key((0, 1)) == class_key((0, 1))
    assert typed(encode_one([True, False], 2, name="z").classes) == typed([False, True])
    assert typed(encode_one([1, 0], 2, name="z").classes) == typed([0, 1])


MIXTURES = [
    ([True, 2], r"2 \(int\)"),
    ([1, np.True_], r"1 \(int\) and .*True"),
    (["a", 0.5], r"'a' \(str\) and 0\.5 \(float\)"),
    (["a", 1, None], r"1 \(int\)"),
    ([True, 0.5], r"True \(bool\)"),
    ([["a", 1], ["b", 2]], r"'b' \(str\)"),
]


@pytest.mark.parametrize(("values", "match"), MIXTURES)
def test_mixed_types_are_refused_with_an_example_of_both(values: list[Any], match: str) -> None:
    with pytest.raises(LabelError, match=f"'z' mixes types.*{match}.*cast all labels to one type"):
        encode_one(values, len(values), name="z")
    if not isinstance(values[0], list):
        with pytest.raises(LabelError, match=match):
            encode_one(objects(values), len(values), name="z")


# --- refusals -----------------------------------------------------------------------------------

REFUSED = [
    ("male", "'male', not a column"),
    (b"male", "not a column"),
    (3, "3, not a column"),
    (None, "None, not a column"),
    (np.int64(3), "not a column"),
    (np.array(3), "is a scalar"),
    (object(), "not a column"),
    (iter([1, 2]), "not a column"),
    ({"a": [1, 2]}, "is a dict, which has no rows"),
    ({1, 2}, "is a set, which has no rows"),
    (np.zeros((2, 0)), r"has the shape \(2, 0\)"),
    (np.zeros((2, 2, 2)), r"has the shape \(2, 2, 2\)"),
    ([[], []], "rows of different or zero length"),
    ([[1, 2], [3]], "rows of different or zero length"),
    ([np.zeros((2, 2)), np.zeros((2, 3))], "neither names nor numbers"),
    ([[np.zeros((2, 2))], [np.zeros((2, 3))]], "rows of different or zero length"),
    ([[[1.0]], [[2.0]]], "nested rows"),
    (np.array([[1, 2], [[3], 4]], dtype=object), "neither names nor numbers"),
    ([b"a", "b"], r"bytes; decode.*b'a'"),
    (np.array([b"a", b"b"]), r"bytes; decode"),
    (np.array([1j, 2j]), "real and the imaginary part"),
    ([1j, 2.0], "real and the imaginary part"),
    (np.array(["2020-01-01"] * 2, "M8[ns]"), "the year"),
    (np.array([1, 2], "m8[s]"), "the year"),
    (np.ma.MaskedArray(np.array([1, 2], "M8[s]"), mask=[1, 0]), "the year"),
    ([datetime.date(2020, 1, 1), None], r"the year.*datetime\.date\(2020"),
    ([datetime.timedelta(1), None], "duration as float"),
    ([np.array(5, "M8[ns]"), np.array(6, "M8[ns]")], "the year"),
    ([np.timedelta64(1, "s"), 2], "the year"),
    (np.zeros(2, dtype=[("a", int)]), "array\\[field\\]"),
    ([object(), 1], "neither names nor numbers"),
    ([{"a": 1}, {"a": 2}], "neither names nor numbers"),
    (np.array([["a", "b"], ["c", "d"]]), "several columns of strings.*joint="),
    ([("a", "b"), ("c", "d")], "several columns of strings.*joint="),
    ([10**400, 0.5], "too large for a float"),
]


@pytest.mark.parametrize(("values", "match"), REFUSED)
def test_what_is_no_column_is_refused_with_advice(values: Any, match: str) -> None:
    with pytest.raises(LabelError, match=f"variable 'z' .*{match}"):
        encode({"z": values}, 2)


def test_device_arrays_that_give_no_numpy_array_are_refused() -> None:
    class Cupy:
        def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
            raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    class Sparse(Tensor):
        def detach(self) -> Tensor:
            raise RuntimeError("no storage")

    with pytest.raises(LabelError, match=r"Cupy did not give a NumPy array .*Implicit"):
        encode_one(Cupy(), 2, name="z")
    with pytest.raises(LabelError, match=r"gives no NumPy array .*no storage"):
        encode_one(Sparse(np.zeros(2)), 2, name="z")


@pytest.mark.parametrize(
    ("values", "n"),
    [([1, 2, 3], 4), (np.zeros(3), 2), (np.array(["a"] * 3), 1), (np.zeros((3, 2)), 4), ([], 1)],
)
def test_wrong_lengths_are_refused_with_both_lengths(values: Any, n: int) -> None:
    with pytest.raises(InputError, match=f"'z' has {len(values)} labels but the block has {n} row"):
        encode({"z": values}, n)
    with pytest.raises(InputError, match=r"\(1, 3\) looks transposed"):
        encode_one(np.zeros((1, 3)), 3, name="z")


# --- mappings, frames, single columns -------------------------------------------------------------


def test_no_labels() -> None:
    assert encode(None, 3) == {}
    assert encode({}, 3) == {}


def test_a_mapping_keeps_its_order_and_its_kinds() -> None:
    encoded = encode(UserDict({"b": [1], "a": ["x"], "c": np.zeros((1, 2))}), 1)
    assert list(encoded) == ["b", "a", "c"]
    assert [kind_of(e) for e in encoded.values()] == ["classes", "classes", "continuous"]


@pytest.mark.parametrize("names", [(1,), ("a", 2), (None,), (("a", "b"),)])
def test_variable_names_must_be_strings(names: tuple[Any, ...]) -> None:
    with pytest.raises(LabelError, match=r"variable name .* is not a string"):
        encode({name: [0] for name in names}, 1)


def test_single_columns_take_the_default_name_or_their_own(pd: Any, pl: Any) -> None:
    assert list(encode([1, 2], 2)) == ["concept"]
    assert list(encode(np.zeros((2, 3)), 2, default_name="z")) == ["z"]
    assert list(encode(Tensor(np.array([1, 2])), 2)) == ["concept"]
    assert list(encode(pd.Series([1, 2]), 2)) == ["concept"]
    assert list(encode(pd.Series([1, 2], name="age"), 2)) == ["age"]
    assert list(encode(pl.Series([1, 2]), 2)) == ["concept"]
    assert list(encode(pl.Series("age", [1, 2]), 2)) == ["age"]
    assert list(encode(arrow([1, 2]), 2)) == ["concept"]
    for name in (0, 1):
        with pytest.raises(LabelError, match=f"variable name {name} is not a string"):
            encode(pd.Series([1, 2], name=name), 2)


def frames() -> list[Any]:
    columns = {"g": ["f", None, "m"], "age": [30.5, 20.0, None], "n": [1, 2, 1]}

    def frame(library: str, attribute: str, names: str) -> Any:
        return getattr(__import__(library), attribute)({n: columns[n] for n in names.split()})

    return containers(
        {
            "pandas": lambda names: frame("pandas", "DataFrame", names),
            "polars": lambda names: frame("polars", "DataFrame", names),
            "arrow": lambda names: frame("pyarrow", "table", names),
            "arrow batch": lambda names: frame("pyarrow", "table", names).to_batches()[0],
        }
    )


@pytest.mark.parametrize("make", frames())
def test_each_column_of_a_frame_is_a_variable(make: Any) -> None:
    encoded = encode(make("g age n"), 3, joint=[("g", "n")])
    assert list(encoded) == ["g", "age", "n", ("g", "n")]
    assert decoded(encoded["g"]) == ["f", None, "m"]
    np.testing.assert_array_equal(numbers_of(encoded["age"])[:, 0], [30.5, 20, np.nan])
    assert typed(decoded(encoded["n"])) == typed([1, 2, 1])
    assert decoded(encoded["g", "n"]) == [("f", 1), None, ("m", 1)]


@pytest.mark.parametrize("make", frames())
def test_a_frame_inside_a_mapping_is_several_columns(make: Any) -> None:
    with pytest.raises(LabelError, match="column 'g' holds classes"):
        encode({"z": make("g age n")}, 3)
    numeric = make("age n")
    with pytest.raises(LabelError, match=r"'z/n' has several columns of integers \(such as 2\)"):
        encode({"z": numeric}, 3)
    encoded = encode({"z": numeric}, 3, kinds={"z": "continuous"})["z"]
    assert encoded.columns == ("age", "n")
    np.testing.assert_array_equal(numbers_of(encoded), [[30.5, 1], [20.0, 2], [np.nan, np.nan]])


def test_frames_of_indicators_of_one_column_and_of_none(pd: Any) -> None:
    dummies = pd.get_dummies(pd.Series(["a", "b", "a"]))
    encoded = encode({"z": dummies}, 3)["z"]
    assert encoded.columns == ("a", "b")
    np.testing.assert_array_equal(numbers_of(encoded), [[1, 0], [0, 1], [1, 0]])
    assert encode({"z": pd.DataFrame({"years": [0.5]})}, 1)["z"].columns == ("years",)
    assert decoded(encode({"z": pd.DataFrame({"g": ["f"]})}, 1)["z"]) == ["f"]
    assert encode(pd.DataFrame(index=[0]), 1) == {}
    with pytest.raises(LabelError, match="frame without columns"):
        encode({"z": pd.DataFrame(index=[0])}, 1)


def test_frames_that_are_no_labels(pd: Any, pl: Any) -> None:
    twice = pd.DataFrame([[1, 2]], columns=["a", "a"])
    for labels in (twice, {"z": twice}):
        with pytest.raises(LabelError, match="two columns of the same name"):
            encode(labels, 1)
    with pytest.raises(LabelError, match="variable name 0 is not a string"):
        encode(pd.DataFrame([[1, 2]]), 1)
    for labels in (pl.LazyFrame({"a": [1]}), {"z": pl.LazyFrame({"a": [1]})}):
        with pytest.raises(LabelError, match=r"lazy LazyFrame; collect\(\) it first"):
            encode(labels, 1)
    for column in (pd.Series(pd.to_datetime(["2020-01-01"])), pl.Series([datetime.date.today()])):
        with pytest.raises(LabelError, match="the year"):
            encode(column, 1)
    with pytest.raises(LabelError, match="bytes; decode"):
        encode(pl.Series([b"a"]), 1)


def test_lists_of_which_some_are_missing_are_several_columns(pl: Any) -> None:
    rows = [[0.5, 1.5], None, [2.5, 3.5]]
    for column in (rows, pl.Series(rows)):
        np.testing.assert_array_equal(
            numbers_of(encode_one(column, 3, name="z")), [[0.5, 1.5], [np.nan] * 2, [2.5, 3.5]]
        )


def test_torch_tensors(torch: Any) -> None:
    assert typed(decoded(encode_one(torch.tensor([3, 1]), 2, name="z"))) == typed([3, 1])
    assert typed(decoded(encode_one(torch.tensor([True]), 1, name="z"))) == typed([True])
    column = torch.tensor([[0.5, 2.0], [math.nan, 1.0]], requires_grad=True)
    for tensor in (column, column.bfloat16(), column.half(), list(column)):
        np.testing.assert_array_equal(
            numbers_of(encode_one(tensor, 2, name="z")), [[0.5, 2], [np.nan] * 2]
        )
    assert decoded(encode_one([torch.tensor(2), torch.tensor(1)], 2, name="z")) == [2, 1]
    for tensor in (torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(LabelError, match="gives no NumPy array"):
            encode_one(tensor, 2, name="z")


# --- memory and imports -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column",
    [
        np.array([0, 1, 2]),
        np.array([0.5, 1.5, 2.5]),
        np.ones((3, 2)),
        np.array([True, False, True]),
    ],
)
def test_results_own_their_memory(column: np.ndarray) -> None:
    # a caller who fills one buffer again for each block must not change earlier blocks
    encoded = encode_one(column, 3, name="z")
    result = encoded.codes if isinstance(encoded, ClassCodes) else encoded.values
    assert not np.shares_memory(result, column)
    before = result.copy()
    column[...] = 7
    np.testing.assert_array_equal(result, before)


def test_categorical_codes_own_their_memory_and_inputs_stay_as_they_were(pd: Any) -> None:
    column = pd.Categorical(["a", None])
    encode_one(column, 2, name="z").codes[:] = 0
    assert column.codes.tolist() == [0, -1]
    values = np.array([1.0, np.nan])
    table = np.ma.MaskedArray([1.0, 2.0], mask=[True, False])
    names = np.ma.MaskedArray(np.array(["a", "b"], dtype=object), mask=[True, False])
    for column_ in (values, table, names):
        encode_one(column_, 2, name="z")
    assert np.isnan(values[1])
    assert table.data.tolist() == [1.0, 2.0]
    assert names.data.tolist() == ["a", "b"]


def test_importing_and_reading_arrays_loads_no_frame_library() -> None:
    code = (
        "import sys, numpy as np; from splince_fast.labels import encode;"
        "encode({'a': [1], 'b': np.array(['x']), 'c': np.zeros((1, 2))}, 1);"
        "print([m for m in ('narwhals', 'pandas', 'polars', 'pyarrow', 'torch', 'sklearn',"
        " 'numba') if m in sys.modules])"
    )
    assert script(code) == "[]\n"


# --- joint cells --------------------------------------------------------------------------------


@fast
@given(
    rows=st.lists(
        st.tuples(
            st.none() | st.sampled_from("fm"),
            st.none() | st.booleans(),
            st.none() | st.integers(-2, 2),
        ),
        max_size=30,
    )
)
def test_joint_cells_equal_the_naive_ones(rows: list[tuple[Any, ...]]) -> None:
    columns = {name: [row[i] for row in rows] for i, name in enumerate("abc")}
    joint = (("a", "b"), ("c", "a", "b"), ("b", "c"))
    encoded = encode(columns, len(rows), joint=joint)
    assert list(encoded) == ["a", "b", "c", *joint]
    for names in joint:
        naive = [
            None if None in cell else cell
            for cell in zip(*(columns[name] for name in names), strict=True)
        ]
        cells = decoded(encoded[names])
        assert cells == naive
        assert all(typed(list(c)) == typed(list(t)) for c, t in zip(cells, naive, strict=True) if c)
        assert list(encoded[names].classes) == sorted({cell for cell in naive if cell})


def test_joint_cells_beyond_what_an_integer_numbers() -> None:
    # 8 variables of 1,000 classes make 10**24 possible cells
    rng = np.random.default_rng(0)
    names = tuple("abcdefgh")
    columns = {name: rng.permutation(1000) for name in names}
    with np.errstate(over="ignore"):  # control: the product formula wraps around
        assert np.prod(np.full(8, 1000, dtype=np.int64)) != 1000**8
    encoded = encode(columns, 1000, joint=(names,))
    assert decoded(encoded[names]) == list(
        zip(*(c.tolist() for c in columns.values()), strict=True)
    )


def test_joint_cells_of_a_declared_but_absent_category_are_not_observed(pd: Any) -> None:
    gender = pd.Categorical(["f", "m"], categories=["x", "m", "f"])
    encoded = encode({"g": gender, "n": [1, 1]}, 2, joint=(("g", "n"),))
    assert encoded["g", "n"].classes == (("m", 1), ("f", 1))
    nothing = encode({"g": [None, None], "n": [1, 1]}, 2, joint=(("g", "n"),))
    assert nothing["g", "n"].classes == ()
    assert nothing["g", "n"].codes.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("joint", "match"),
    [
        (("a", "b"), r"not a tuple of two or more.*joint=\(\("),
        ((("a",),), "not a tuple of two or more"),
        ((("a", "a"),), "two or more different"),
        ((("a", "q"),), "'q', which is not among the variables 'a', 'b', 'x'"),
        ((("a", "x"),), "'x' is continuous and has no joint cells"),
    ],
)
def test_joint_must_name_class_coded_variables(joint: Any, match: str) -> None:
    with pytest.raises(LabelError, match=match):
        encode({"a": [1], "b": ["u"], "x": [0.5]}, 1, joint=joint)


# --- names in files -----------------------------------------------------------------------------

scalars = st.text(max_size=5) | st.booleans() | st.integers()


@fast
@given(names=st.lists(scalars | st.lists(scalars, min_size=1).map(tuple), unique_by=class_key))
def test_names_survive_json_exactly(names: list[Any]) -> None:
    back = names_from_json(json.loads(json.dumps(names_to_json(tuple(names)))))
    assert [class_key(name) for name in back] == [class_key(name) for name in names]
    assert [type(name) for name in back] == [type(name) for name in names]


@pytest.mark.parametrize("obj", ["a", {"a": 1}, None, 3, [1.0], [None], [[1, [2]]], [[]], [{}],
                                 ["a", "a"], [[1], [1]], [True, True]])  # fmt: skip
def test_malformed_names_are_refused(obj: Any) -> None:
    with pytest.raises(FileFormatError, match="name"):
        names_from_json(obj)


@pytest.mark.parametrize(
    "names",
    [(1.5,), (None,), (b"a",), (np.int64(1),), (np.str_("a"),), ((1, (2,)),), ((),), ("a", "a")],
)
def test_names_that_json_cannot_give_back_are_not_written(names: Any) -> None:
    with pytest.raises(LabelError, match="name"):
        names_to_json(names)


# --- classes that come as floats, and other traps ------------------------------------------------


@pytest.mark.parametrize(
    "column",
    [
        np.array([0.0, 1, 2, 3] * 5 + [np.nan]),
        [0.0, 1.0, 2.0, None] * 5,
        np.float32([-1, 0, 1] * 4),
        np.array([[5.0], [7.0], [9.0]] * 4),
    ],
)
def test_whole_floats_of_few_values_warn(column: Any) -> None:
    """One missing label makes pandas turn classes into floats, erased as one number."""
    with pytest.warns(
        WholeNumbersWarning, match=r"variable 'z'.*'Int64'.*name='z', kind='classes'.*--kind"
    ):
        found = encode_one(column, len(column), name="z")
    assert isinstance(found, Columns)
    assert isinstance(encode_one(column, len(column), name="z", kind="classes"), ClassCodes)
    assert isinstance(encode_one(column, len(column), name="z", kind="continuous"), Columns)


@pytest.mark.parametrize(
    "column",
    [
        np.array([0.0, 1.0] * 9),  # two values: the span of a number is that of two classes
        np.arange(30.0),  # each value once: a quantity
        np.array([0.0, 1.0, 2.5] * 9),
        np.array([1e300, 2e300, 3e300] * 9),
        np.array([0.0, 1.0, 2.0]),  # too few rows to tell
        np.full(9, np.nan),
    ],
)
def test_control_other_floats_are_silent(column: Any) -> None:
    encode_one(column, len(column), name="z")  # a warning would be an error


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "int64"])
def test_several_columns_of_integers_are_no_quantities(dtype: str, pd: Any, pl: Any) -> None:
    """Unsigned ones no more than signed ones."""
    table = np.array([[3, 7], [1, 2]], dtype)
    with pytest.raises(LabelError, match="could be classes or numbers"):
        encode_one(table, 2, name="z")
    frames = [
        pd.DataFrame(table, columns=["a", "b"]),
        pl.DataFrame(table, schema=["a", "b"]),
    ]
    if dtype == "uint8":
        frames.append(frames[0].astype("UInt8"))
    for frame in frames:
        with pytest.raises(LabelError, match="could be classes or numbers"):
            encode_one(frame, 2, name="z")
    assert isinstance(encode_one(table, 2, name="z", kind="continuous"), Columns)


def test_names_that_are_none(pd: Any) -> None:
    with pytest.raises(LabelError, match=r"category \(1, 2\), which cannot name a class"):
        encode_one(pd.Categorical([(1, 2), (1, 3)]), 2, name="z")
    with pytest.raises(LabelError, match="use strings as names"):
        encode_one([10**5000, 1], 2, name="z")
    found = encode_one([10**300, 1], 2, name="z")
    assert isinstance(found, ClassCodes)
    assert names_from_json(json.loads(json.dumps(names_to_json(found.classes)))) == found.classes
    signalling = encode_one([Decimal("sNaN"), Decimal("1.5")], 2, name="z")
    assert isinstance(signalling, Columns)
    np.testing.assert_array_equal(signalling.present, [False, True])


def test_codes_are_taken_as_they_are_and_by_rows() -> None:
    codes = encode_one(["b", None, "a", "b"], 4, name="z")
    assert isinstance(codes, ClassCodes)
    assert encode_one(codes, 4, name="z") is codes
    assert len(codes) == 4
    part = codes[1:3]
    assert part.classes == ("a", "b")
    np.testing.assert_array_equal(part.codes, [-1, 0])
    with pytest.raises(InputError, match="4 labels but the block has 3 rows"):
        encode_one(codes, 3, name="z")
    with pytest.raises(LabelError, match="cannot be continuous: it holds classes such as 'a'"):
        encode_one(codes, 4, name="z", kind="continuous")


def test_enums_alike_in_number_and_last_category_keep_their_own_names(pl: Any) -> None:
    """Names are kept between blocks by these two: equal ones are shared, others never."""
    read = {}
    for first in ("a", "b"):
        dtype = pl.Enum([first, "z"])
        for _ in range(2):
            column = pl.Series([first, None, "z"], dtype=dtype)
            encoded = encode_one(column, 3, name="v")
            assert encoded.classes == (first, "z")
            assert encoded.codes.tolist() == [0, -1, 1]
            assert read.setdefault(first, encoded.classes) is encoded.classes
    assert encode_one(pl.Series([], dtype=pl.Enum([])), 0, name="v").classes == ()


def test_what_is_encoded_is_passed_on() -> None:
    age = encode_one([41.5, float("nan")], 2, name="age")
    assert encode_one(age, 2, name="age") is age
    assert encode_one(age, 2, name="age", kind="continuous") is age
    with pytest.raises(LabelError, match="cannot be classes"):
        encode_one(age, 2, name="age", kind="classes")
    with pytest.raises(InputError, match="2 labels"):
        encode_one(age, 3, name="age")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("f", "m"), "U"), ((0, 1), "i"), ((False, True), "b"), (("a", "a\0"), "O"),
        ((2**63 - 1, 2**63), "O"), ((("f", 0), ("f", 1)), "O"), ((True, 1), "O"), ((), "O"),
    ],
)  # fmt: skip
def test_an_array_of_names_holds_the_names(names: Any, kind: str) -> None:
    array = names_array(names)
    assert array.dtype.kind == kind
    assert tuple(array.tolist()) == names
    assert list(map(type, array.tolist())) == list(map(type, names))
