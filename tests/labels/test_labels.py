"""Labels: the same meaning from every container, and no silent misreading."""

from __future__ import annotations

import datetime
import enum
import json
import math
import warnings
from collections import UserDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse
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
    SplinceError,
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
few = settings(max_examples=20, deadline=None)  # of each container
NAN, INF = math.nan, math.inf


def decoded(encoded: Encoded) -> list[Any]:
    """Name of each row's class, None where missing: independent of the order of the classes."""
    assert isinstance(encoded, ClassCodes)
    assert encoded.codes.dtype == np.intp
    assert encoded.codes.ndim == 1
    assert all(-1 <= code < len(encoded.classes) for code in encoded.codes)
    assert len({class_key(name) for name in encoded.classes}) == len(encoded.classes)
    return [None if code < 0 else encoded.classes[code] for code in encoded.codes]


def typed(values: Any) -> list[tuple[type, Any]]:
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


def each(table: dict[str, Any]) -> Any:
    """Parametrisation by the entries of a table."""
    return pytest.mark.parametrize("case", table.values(), ids=table)


# --- containers ---------------------------------------------------------------------------------


def series(dtype: Any) -> Callable[[Any], Any]:
    return lambda values: pd.Series(values, dtype=dtype)


def polar(dtype: Any = None) -> Callable[[Any], Any]:
    return lambda values: pl.Series(values, dtype=dtype)


def polar_enum(values: list[str | None]) -> Any:
    return pl.Series(values, dtype=pl.Enum(sorted({v for v in values if v is not None})))


def halves(values: list[Any]) -> list[list[Any]]:
    return [values[: len(values) // 2], values[len(values) // 2 :]]


def chunked(kind: str) -> Callable[[Any], Any]:
    return lambda values: pa.chunked_array([pa.array(part, kind) for part in halves(values)])


def dictionary(kind: str) -> Callable[[Any], Any]:
    return lambda values: pa.chunked_array(
        [pa.array(part, kind).dictionary_encode() for part in halves(values)]
    )


def objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def masked(fill: Any, dtype: Any) -> Callable[[Any], Any]:
    """`fill` lies below the mask, where nobody should look."""
    return lambda values: np.ma.MaskedArray(
        np.array([fill if v is None else v for v in values], dtype=dtype),
        mask=[v is None for v in values],
    )


def without_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: [None if v is None else convert(v) for v in values]


def with_nan(values: list[Any]) -> list[Any]:
    return [NAN if v is None else v for v in values]


def with_na(values: list[Any]) -> list[Any]:
    return [(pd.NA, pd.NaT)[i % 2] if v is None else v for i, v in enumerate(values)]


def category(values: list[Any]) -> Any:
    return pd.Series(values, dtype=object).astype("category")


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


class Foreign:
    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.array([2, 1])


class Cupy:
    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


class Sparse(Tensor):
    def detach(self) -> Tensor:
        raise RuntimeError("no storage")


def optional(
    scalar: Any, fill: Any, pandas: list[Any], arrow: list[Any], polars: list[Any]
) -> dict[str, Callable[[Any], Any]]:
    """Containers of values of one type, of which some are missing; `fill` lies below a mask."""
    return {
        "list": list,
        "list with NaN": with_nan,
        "list with NA": with_na,
        "list of NumPy scalars": without_none(scalar),
        "objects": objects,
        "objects with NaN": lambda v: objects(with_nan(v)),
        "masked": masked(fill, scalar),
        "pandas category": category,
        **{f"pandas {dtype}": series(dtype) for dtype in ("object", *pandas)},
        **{f"arrow {kind}": chunked(kind) for kind in arrow},
        **{f"arrow dictionary of {kind}": dictionary(kind) for kind in arrow},
        **{f"polars {dtype}": polar(dtype) for dtype in polars},
    }


OPTIONAL_INTS = optional(np.int16, 99, ["Int64"], ["uint16", "int64"], [pl.Int64, pl.Int128]) | {
    "tuple": tuple,
    "list of arrays": without_none(np.array),
    "list of rows": lambda v: [[x] for x in v],
    "list of masked": lambda v: [np.ma.masked if x is None else x for x in v],
    "list of tensors": without_none(lambda x: Tensor(np.array(x))),
    "objects, one column": lambda v: objects(v).reshape(-1, 1),
    "masked u8": masked(99, "u8"),
    "masked, one column": lambda v: masked(99, "i8")(v).reshape(-1, 1),
    "masked objects": masked("under the mask", object),
    "pandas array": lambda v: pd.Series(v, dtype="Int64").array,
    "pandas frame": lambda v: pd.Series(v, dtype="Int64").to_frame("column"),
    "arrow array": lambda v: pa.array(v, "int32"),
}
STRINGS = ["string", "large_string"]
OPTIONAL_STRINGS = optional(
    np.str_, "under the mask", ["str", "string"], STRINGS, [pl.String, pl.Categorical]
) | {
    "StringDType": lambda v: np.array(v, dtype=np.dtypes.StringDType(na_object=None)),
    "pandas Categorical": lambda v: category(v).array,
    "pandas index": lambda v: pd.Series(0, index=objects(v)).index,
    "polars Enum": polar_enum,
}
OPTIONAL_BOOLS = optional(np.bool_, True, ["boolean"], ["bool"], [pl.Boolean])
OPTIONAL_FLOATS = {
    "list": list,
    "list with NaN": with_nan,
    "list of NumPy scalars": without_none(np.float32),
    "list of Decimal": lambda v: [Decimal("NaN") if x is None else Decimal(x) for x in v],
    "list of Fraction": without_none(Fraction),
    "objects": objects,
    **{
        f"array {dtype}": lambda v, dtype=dtype: np.array(with_nan(v), dtype)
        for dtype in ("f2", "f4", "f8", "longdouble", ">f8")
    },
    "one column": lambda v: np.array(with_nan(v)).reshape(-1, 1),
    "masked": masked(np.inf, float),
    "tensor": lambda v: Tensor(np.array(with_nan(v), np.float32)),
    "tensor of bfloat16": lambda v: Tensor(np.array(with_nan(v), np.float16)),
    "pandas float64": series("float64"),
    "pandas Float64": series("Float64"),
    "pandas object": series(object),
    "arrow float32": chunked("float32"),
    "arrow decimal": lambda v: pa.array(without_none(Decimal)(v)),
    "polars Float32": polar(pl.Float32),
    "polars with NaN": lambda v: pl.Series(with_nan(v), dtype=pl.Float64),
    "polars decimal": lambda v: pl.Series(without_none(Decimal)(v)),
}


def some(elements: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Columns with missing entries and at least one that is present."""
    return st.lists(st.none() | elements, min_size=1, max_size=30).filter(
        lambda values: any(v is not None for v in values)
    )


TEXTS = st.text("ab é\u4e2d", max_size=3) | st.sampled_from(["nan", "None", ""])
CLASSES = {
    f"{name}, {container}": (make, elements)
    for name, makers, elements in (
        ("integer", OPTIONAL_INTS, st.integers(0, 100)),
        ("string", OPTIONAL_STRINGS, TEXTS),
        ("boolean", OPTIONAL_BOOLS, st.booleans()),
    )
    for container, make in makers.items()
}


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.MissingLabelWarning")
@each(CLASSES)
@few
@given(data=st.data())
def test_values_are_the_same_classes_in_every_container(case: Any, data: st.DataObject) -> None:
    make, elements = case
    values = data.draw(some(elements))
    encoded = encode_one(make(values), len(values), name="z")
    assert typed(decoded(encoded)) == typed(values)
    assert list(encoded.classes) == sorted({v for v in values if v is not None})


@each(OPTIONAL_FLOATS)
@few
@given(values=some(st.integers(-400, 400).map(lambda v: v / 8)))
def test_floats_are_continuous_in_every_container(case: Any, values: list[Any]) -> None:
    encoded = encode_one(case(values), len(values), name="z")
    assert kind_of(encoded) == "continuous"
    assert encoded.columns == ("0",)
    # eighths below 50 are exact in every one of these types, so equality is exact
    np.testing.assert_array_equal(numbers_of(encoded)[:, 0], np.array(values, dtype=float))


@fast
@example(dtype="u8", start=2**63 + 5, steps=[4, 0, 4], ends=False)
@given(
    dtype=st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]),
    start=st.integers(-(2**63), 2**64),
    steps=st.lists(st.integers(0, 40), min_size=1),
    ends=st.booleans(),
)
def test_integers_anywhere_in_the_range_of_their_dtype(
    dtype: str, start: int, steps: list[int], ends: bool
) -> None:
    """With either end of the range, where a difference or a cast would wrap around."""
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    first = min(max(start, low), high - 40)
    values = [first + step for step in steps] + [high, low, high - 1, low + 1] * ends
    for column in (values, np.array(values, dtype)):
        encoded = encode_one(column, len(values), name="z")
        assert typed(decoded(encoded)) == typed(values)
        assert list(encoded.classes) == sorted(set(values))


@fast
@given(
    values=hnp.arrays(
        np.float32,
        st.tuples(st.integers(0, 12), st.integers(2, 4)),
        elements=st.sampled_from([0.0, -1.5, 2.25, NAN]),
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


# --- columns and their meaning --------------------------------------------------------------------


class Shouted(str):
    def __str__(self) -> str:
        return self.upper()


class Size(enum.IntEnum):
    BIG = 3


TABLE = np.arange(24).reshape(6, 4) % 3
NEAR, FAR = 2.0**24 - 1, 2.0**24  # the last integer whose successor float32 tells apart
ENUM = pl.Series(["b", None], dtype=pl.Enum(["c", "b"]))
ORDERED = pd.Categorical(["b", None, "b"], categories=["c", "b", "a"], ordered=True)
# column, kind -> name of the class of each row
CLASSES_OF: dict[str, tuple[Any, str | None, list[Any]]] = {
    **{
        f"view {i}": (column, None, column.ravel().tolist())
        for i, column in enumerate((TABLE[:, 1], TABLE[::-2, 0], TABLE.T[2], TABLE[:, :1]))
    },
    "big-endian, unsigned": (np.array([2**63 + 1, 2**63 + 2], ">u8"), None, [2**63 + 1, 2**63 + 2]),
    "range": (range(3), None, [0, 1, 2]),
    "beyond 64 bits": ([2**70, None, -1, 2**70], None, [2**70, None, -1, 2**70]),
    "300 digits": ([10**300, 1], None, [10**300, 1]),
    "__array__": (Foreign(), None, [2, 1]),
    "subclass of str": ([Shouted("red"), "red"], None, ["red", "red"]),
    "subclass of int": ([Size.BIG, 3], None, [3, 3]),
    "no float but NaN": ([0, 2, NAN], None, [0, 2, None]),
    **{
        f"whole {np.dtype(dtype)}": (
            np.array([3.0, -0.0, np.nan, 3.0], dtype), "classes", [3, 0, None, 3],
        )
        for dtype in ("f2", "f4", "f8", object)
    },
    "whole, masked": (
        np.ma.MaskedArray([3.0, 0.5, np.inf, np.nan], mask=[0, 1, 1, 0]), "classes",
        [3, None, None, None],
    ),
    "large float32": (np.array([NEAR], "f4"), "classes", [int(NEAR)]),
    "large float64": (np.array([FAR]), "classes", [int(FAR)]),
    "categories of floats": (pd.Categorical([2.0, None]), None, [2, None]),
    "no category": (pd.Categorical([None]), None, [None]),
    "frame of one column": (pd.DataFrame({"g": ["f"]}), None, ["f"]),
    "declared": (ORDERED, None, ["b", None, "b"]),
    "declared, series": (pd.Series(ORDERED), None, ["b", None, "b"]),
    "declared, index": (pd.CategoricalIndex(ORDERED), None, ["b", None, "b"]),
    "declared, polars": (ENUM, None, ["b", None]),
    "dictionary with a class that no row has": (
        pa.DictionaryArray.from_arrays([1, None, 1, 2], ["unused", "used", None]), None,
        ["used", None, "used", None],
    ),
}  # fmt: skip
# The declared classes, in the declared order, also those that no row has.
DECLARED = {
    "declared": ("c", "b", "a"), "declared, series": ("c", "b", "a"),
    "declared, index": ("c", "b", "a"), "declared, polars": ("c", "b"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES_OF)
def test_classes_of_a_column(name: str) -> None:
    column, kind, expected = CLASSES_OF[name]
    encoded = encode_one(column, len(expected), name="z", kind=kind)
    assert typed(decoded(encoded)) == typed(expected)
    observed = tuple(sorted({value for value in expected if value is not None}))
    assert typed(encoded.classes) == typed(DECLARED.get(name, observed))


ONE_HOT = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0]])
ROWS = [[0.5, 1.5], None, [2.5, 3.5]]
# column, kind -> values, NaN in rows without one
NUMBERS_OF: dict[str, tuple[Any, str | None, Any]] = {
    "some are floats": ([0, 0.5, 1, None], None, [[0], [0.5], [1], [NAN]]),
    **{
        f"one-hot {i}": (table, None, ONE_HOT)
        for i, table in enumerate((
            ONE_HOT, ONE_HOT.astype(bool), ONE_HOT.astype("u1"), ONE_HOT.astype(object),
            scipy.sparse.csr_array(ONE_HOT), ONE_HOT.tolist(),
        ))
    },
    "indicators, masked": (
        np.ma.MaskedArray([[1, 0], [7, 1]], mask=[[0, 0], [1, 0]]), None, [[1, 0], [NAN, NAN]],
    ),
    "integers": ([1, 2, None], "continuous", [[1], [2], [NAN]]),
    "booleans": ([True, False, None], "continuous", [[1], [0], [NAN]]),
    "decimals": ([Decimal(1), 2.5, None], "continuous", [[1], [2.5], [NAN]]),
    "signalling NaN": ([Decimal("sNaN"), Decimal("1.5")], None, [[NAN], [1.5]]),
    "rows, some missing": (ROWS, None, [[0.5, 1.5], [NAN, NAN], [2.5, 3.5]]),
    "series of rows": (pl.Series(ROWS), None, [[0.5, 1.5], [NAN, NAN], [2.5, 3.5]]),
    "integers in columns": (np.array([[3, 7], [1, 2]]), "continuous", [[3, 7], [1, 2]]),
    "frame of indicators": (pd.get_dummies(pd.Series(["a", "b"])), None, np.eye(2)),
}  # fmt: skip


@each(NUMBERS_OF)
def test_numbers_of_a_column(case: Any) -> None:
    column, kind, expected = case
    encoded = encode({"z": column}, len(expected), kinds={"z": kind} if kind else None)["z"]
    np.testing.assert_array_equal(numbers_of(encoded), np.array(expected, float))


def test_control_what_numpy_and_python_would_merge() -> None:
    assert np.array([2**63, -1]).dtype.kind == "f"
    assert np.float32(FAR + 1) == np.float32(FAR)
    assert len(dict.fromkeys([True, 1])) == 1
    assert class_key(True) != class_key(1)
    assert class_key((True, "a")) != class_key((1, "a"))
    assert class_key("a") != class_key(("a",))
    assert class_key((0, 1)) == class_key((0, 1))


def test_blocks_without_rows() -> None:
    for column in (np.zeros(0, int), np.zeros(0, bool), np.zeros(0, str), [], objects([])):
        encoded = encode_one(column, 0, name="z")
        assert (encoded.classes, encoded.codes.shape) == ((), (0,))
    for column, k in ((np.zeros(0), 1), (np.zeros((0, 3)), 3)):
        encoded = encode_one(column, 0, name="z")
        assert (encoded.values.shape, encoded.present) == ((0, k), None)


def test_torch_tensors(torch: Any) -> None:
    assert typed(decoded(encode_one(torch.tensor([3, 1]), 2, name="z"))) == typed([3, 1])
    assert typed(decoded(encode_one(torch.tensor([True]), 1, name="z"))) == typed([True])
    column = torch.tensor([[0.5, 2.0], [NAN, 1.0]], requires_grad=True)
    for tensor in (column, column.bfloat16(), column.half(), list(column)):
        np.testing.assert_array_equal(
            numbers_of(encode_one(tensor, 2, name="z")), [[0.5, 2], [NAN] * 2]
        )
    assert decoded(encode_one([torch.tensor(2), torch.tensor(1)], 2, name="z")) == [2, 1]
    for tensor in (torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(LabelError, match="gives no NumPy array"):
            encode_one(tensor, 2, name="z")


# --- missing ------------------------------------------------------------------------------------

NONE = [None, None]
ALL_MISSING = {
    "list": NONE,
    "objects": objects([NAN, None]),
    "not a time": [np.datetime64("NaT"), np.timedelta64("NaT", "s")],
    "masked": masked("a", object)(NONE),
    "masked integers": masked(7, "i8")(NONE),
    "masked booleans": masked(7, "bool")(NONE),
    "pandas": pd.Series(NONE, dtype=object),
    "list with NA": with_na(NONE),
    "arrow": pa.array(NONE),
    "polars": pl.Series(NONE),
}
ALL_NAN = {
    "list": [NAN] * 2,
    "array": np.full(2, np.nan),
    "one column": np.full((2, 1), np.nan),
    "pandas": pd.Series(NONE, dtype="Float32"),
    "arrow": pa.array(NONE, "float64"),
    "polars": pl.Series(NONE, dtype=pl.Float64),
}


@each(ALL_MISSING)
def test_a_column_of_classes_or_of_unknown_type_that_is_all_missing(case: Any) -> None:
    for kind in (None, "classes"):
        assert decoded(encode_one(case, 2, name="z", kind=kind)) == NONE
    assert np.isnan(numbers_of(encode_one(case, 2, name="z", kind="continuous"))).all()


@each(ALL_NAN)
def test_a_column_of_floats_that_is_all_missing_stays_continuous(case: Any) -> None:
    assert np.isnan(numbers_of(encode_one(case, 2, name="z"))).all()


# --- warnings -----------------------------------------------------------------------------------

AGES = np.arange(1001)
# columns -> category of the warning, and a pattern of its text; the remedies silence it
TOLD: dict[str, tuple[list[Any], type[Warning], str]] = {
    "many integers": (
        [AGES, AGES.tolist(), AGES[:, None], AGES * 10**9, [*AGES, 2**70]], ManyClassesWarning,
        r"kind='continuous'\).*kind='classes'\) silences",
    ),
    **{
        f"missing as text, {text!r}": (
            [[*"ab", text], np.array([*"ab", text]), pd.Categorical([*"ab", text]),
             pl.Series([*"ab", text])],
            MissingLabelWarning, r"name='z', kind='classes'\) silences",
        )
        for text in ("nan", "None", "<NA>", "NaT", "")
    },
    "whole floats of few values": (  # a missing label makes pandas turn classes into floats
        [np.array([0.0, 1, 2, 3] * 5 + [np.nan]), [0.0, 1.0, 2.0, None] * 5,
         np.float32([-1, 0, 1] * 4), np.array([[5.0], [7.0], [9.0]] * 4)],
        WholeNumbersWarning, r"variable 'z'.*'Int64'.*name='z', kind='classes'.*--kind",
    ),
}  # fmt: skip
SILENT = {
    "a thousand integers": AGES[:1000],
    "many names": AGES.astype(str),
    "classes of common data sets": ["none", "na", "unknown", "male "],
    **{f"missing {value}": pd.Series(["a", "b", value]) for value in (None, NAN, pd.NA)},
    "two whole numbers": np.array([0.0, 1.0] * 9),  # the span of a number is that of two classes
    "each value once": np.arange(30.0),
    "not all whole": np.array([0.0, 1.0, 2.5] * 9),
    "beyond whole numbers": np.array([1e300, 2e300, 3e300] * 9),
    "too few rows to tell": np.array([0.0, 1.0, 2.0]),
    "all missing": np.full(9, np.nan),
}


@each(TOLD)
def test_columns_that_are_probably_meant_otherwise_warn(case: Any) -> None:
    columns, category, text = case
    for column in columns:
        n = len(column)
        with pytest.warns(category, match=text):
            encoded = encode_one(column, n, name="z")
        assert isinstance(encoded, Columns if category is WholeNumbersWarning else ClassCodes)
        with pytest.warns(category, match="kinds={'z': "):
            encode({"z": column}, n)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert isinstance(encode_one(column, n, name="z", kind="classes"), ClassCodes)
            if isinstance(column, np.ndarray) and column.dtype.kind in "if":
                assert isinstance(encode_one(column, n, name="z", kind="continuous"), Columns)


@each(SILENT)
def test_control_other_columns_are_silent(case: Any) -> None:
    encode_one(case, len(case), name="z")  # a warning would be an error


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int8", "bool", "Int64", "boolean", object])
def test_categories_that_are_numbers_have_names_of_python(dtype: Any) -> None:
    names = [True, False] if dtype in ("bool", "boolean") else [7, 3, 120]
    if dtype == "uint64":
        names[1] = 2**64 - 1
    column = pd.Categorical(names[1:], categories=pd.Index(names, dtype=dtype))
    encoded = encode_one(column, len(names) - 1, name="z")
    assert typed(encoded.classes) == typed(names)
    assert decoded(encoded) == names[1:]


@pytest.mark.parametrize("declare", [pl.Enum, pd.CategoricalDtype])
def test_categories_alike_in_number_and_in_the_last_keep_their_own_names(declare: Any) -> None:
    """Names are kept between blocks by these two: equal ones are shared, others never."""
    library = pl if declare is pl.Enum else pd
    read: dict[str, Any] = {}
    for first in ("a", "b"):
        for _ in range(2):
            column = library.Series([first, None, "z"], dtype=declare([first, "z"]))
            encoded = encode_one(column, 3, name="v")
            assert encoded.classes == (first, "z")
            assert encoded.codes.tolist() == [0, -1, 1]
            assert read.setdefault(first, encoded.classes) is encoded.classes
    for names in ([True, False], [1, 0]):  # equal in Python
        column = pd.Categorical(names[:1], categories=pd.Index(names, dtype=object))
        assert typed(encode_one(column, 1, name="v").classes) == typed(names)
    assert encode_one(library.Series([], dtype=declare([])), 0, name="v").classes == ()


# --- refusals -----------------------------------------------------------------------------------

LIST_COLUMN = pd.DataFrame({"a": [[1.0, 2.0], [3.0, 4.0]], "b": [0.5, 1.5]})
# column -> part of the message; the block has two rows
NO_COLUMN: list[tuple[Any, str]] = [
    ("male", "'male', not a column"),
    (b"male", "not a column"),
    (None, "None, not a column"),
    (np.int64(3), "not a column"),
    (np.array(3), "is a scalar"),
    ({"a": [1, 2]}, r"is \{'a': \[1, 2\]\}, not a column"),
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
    ([datetime.date(2020, 1, 1), None], r"the year.*datetime\.date\(2020"),
    ([datetime.timedelta(1), None], "duration as float"),
    ([np.array(5, "M8[ns]"), np.array(6, "M8[ns]")], "the year"),
    ([np.timedelta64(1, "s"), 2], "the year"),
    (pd.Series(pd.to_datetime(["2020-01-01"] * 2)), "the year"),
    (np.zeros(2, dtype=[("a", int)]), "array\\[field\\]"),
    ([object(), 1], "neither names nor numbers"),
    (pd.cut(pd.Series([1.0, 2.0]), 2), "neither names nor numbers"),
    ([("a", "b"), ("c", "d")], "several columns of strings.*joint="),
    ([10**400, 0.5], "too large for a float"),
    ([10**5000, 1], "use strings as names"),
    ([[2**70, 1], [3, 4]], "beyond 64 bits"),
    (pd.Categorical([2.5, 3.5]), "bin the values, or cast them to str"),
    (pd.Categorical(["a", 1]), "mixes types"),
    (pd.Categorical([(1, 2), (1, 3)]), r"category \(1, 2\), which cannot name a class"),
    (LIST_COLUMN, "is a frame, and its column 'a' holds classes"),
    (pd.DataFrame(index=[0, 1]), "frame without columns"),
    (pl.LazyFrame({"a": [1, 2]}), r"lazy LazyFrame; collect\(\) it first"),
    (Cupy(), "cannot be read as an array: Implicit"),
    (Sparse(np.zeros(2)), r"gives no NumPy array .*no storage"),
    *((column, "could be classes or numbers") for column in (
        np.array([[3, 7], [1, 2]], "uint8"), np.array([[3, 7], [1, 2]], "uint64"),
        np.array([[3, 7], [1, 2]]), pd.DataFrame([[3, 7], [1, 2]]),
        pd.DataFrame([[3, 7], [1, 2]], dtype="UInt8"), pl.DataFrame({"a": [3, 1], "b": [7, 2]}),
    )),
]  # fmt: skip
MIXTURES = [
    ([True, 2], r"2 \(int\)"),
    ([1, np.True_], r"1 \(int\) and .*True"),
    (["a", 0.5], r"'a' \(str\) and 0\.5 \(float\)"),
    (["a", 1, None], r"1 \(int\)"),
    ([True, 0.5], r"True \(bool\)"),
    ([["a", 1], ["b", 2]], r"'b' \(str\)"),
]
SMALL = {"a": [1], "b": ["u"], "x": [0.5]}
TWICE = pd.DataFrame([[1, 2]], columns=["a", "a"])
# arguments of `encode` -> error and part of its message
REFUSED: list[tuple[Any, int, dict[str, Any], type[SplinceError], str]] = [
    *(({"z": column}, 2, {}, LabelError, f"variable 'z.*{text}") for column, text in NO_COLUMN),
    *(
        ({"z": column}, len(values), {}, LabelError,
         f"'z' mixes types.*{text}.*cast all labels to one type")
        for values, text in MIXTURES
        for column in (values, *([] if isinstance(values[0], list) else [objects(values)]))
    ),
    *(
        ({"z": column}, n, {}, InputError, f"'z' has {len(column)} labels but the block has {n} r")
        for column, n in (
            ([1, 2, 3], 4), (np.zeros(3), 2), (np.array(["a"] * 3), 1), (np.zeros((3, 2)), 4),
            ([], 1),
        )
    ),
    ({"z": np.zeros((1, 3))}, 3, {}, InputError, r"\(1, 3\) looks transposed"),
    *(
        ({"z": column}, 2, {"kinds": {"z": kind}}, LabelError, text)
        for column, kind, text in (
            ([1.0, 0.5], "classes", r"must hold classes, but holds 0\.5; bin"),
            (np.eye(2), "classes", "several columns, so it cannot be classes"),
            (np.full(2, FAR, "f4"), "classes", "cannot tell integers apart"),
            (np.full(2, -FAR, "f4"), "classes", "cannot tell integers apart"),
            (np.full(2, 2.0**53), "classes", "cannot tell integers apart"),
            (["a", None], "continuous", "cannot be continuous: it holds classes such as 'a'"),
            (np.array(["a", "b"]), "continuous", "continuous: it holds classes such as 'a'"),
            ([2**70, None], "continuous", "cannot be continuous: it holds classes such as 1180"),
            (pd.Categorical([2, 2]), "continuous", "continuous: it holds classes such as 2"),
            ([1, 2], "class", r"unknown kind 'class'.*from 'classes', 'continuous'"),
        )
    ),
    ({"gender": [1], "age": [2.0]}, 1, {"kinds": {"gendr": "classes"}}, LabelError,
     r"kinds names 'gendr'.*'gender', 'age'"),
    *(
        ({name: [0] for name in names}, 1, {}, LabelError, "variable name .* is not a string")
        for names in ((1,), ("a", 2), (None,), (("a", "b"),))
    ),
    (pd.Series([1], name=0), 1, {}, LabelError, "variable name 0 is not a string"),
    (pd.Series([1], name=1), 1, {}, LabelError, "variable name 1 is not a string"),
    (pd.DataFrame([[1, 2]]), 1, {}, LabelError, "variable name 0 is not a string"),
    (pl.LazyFrame({"a": [1]}), 1, {}, LabelError, r"lazy LazyFrame; collect\(\) it first"),
    (TWICE, 1, {}, LabelError, "two columns of the same name"),
    ({"z": TWICE}, 1, {}, LabelError, "two columns of the same name"),
    *(
        (SMALL, 1, {"joint": joint}, LabelError, text)
        for joint, text in (
            (("a", "b"), r"not a tuple of two or more.*joint=\(\("),
            ((("a",),), "not a tuple of two or more"),
            ((("a", "a"),), "two or more different"),
            ((("a", "q"),), "'q', which is not among the variables 'a', 'b', 'x'"),
            ((("a", "x"),), "'x' is continuous and has no joint cells"),
        )
    ),
    *(
        ({"z": make([1.0, INF, -INF])}, 3, {"kinds": {"z": kind} if kind else None},
         NonFiniteError, r"'z' is infinite in row\(s\) 1, 2 of")
        for make in (list, np.array, lambda v: np.array(v, "f2"), objects)
        for kind in (None, "classes", "continuous")
    ),
    ({"z": np.full((50, 2), np.inf)}, 50, {}, NonFiniteError, "19 and 30 more of the block"),
]  # fmt: skip


@pytest.mark.parametrize(("labels", "n", "options", "error", "text"), REFUSED)
def test_labels_that_cannot_be_read_are_refused_with_advice(
    labels: Any, n: int, options: Any, error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        encode(labels, n, **options)


@pytest.mark.skipif(
    np.finfo(np.longdouble).max == np.finfo(float).max, reason="long double is double"
)
def test_a_long_double_out_of_the_range_of_float64_is_infinite() -> None:
    with pytest.raises(NonFiniteError, match=r"row\(s\) 0 of"):
        encode_one(np.array([np.longdouble("1e4000")]), 1, name="z")


# --- mappings, frames, single columns -------------------------------------------------------------


def test_names_of_variables() -> None:
    assert encode(None, 3) == encode({}, 3) == encode(pd.DataFrame(index=[0]), 1) == {}
    encoded = encode(UserDict({"b": [1], "a": ["x"], "c": np.zeros((1, 2))}), 1)
    assert list(encoded) == ["b", "a", "c"]
    assert [kind_of(e) for e in encoded.values()] == ["classes", "classes", "continuous"]
    for column in ([1, 2], Tensor(np.array([1, 2])), pd.Series([1, 2]), pl.Series([1, 2]),
                   pa.array([1, 2]), Foreign()):  # fmt: skip
        assert list(encode(column, 2)) == ["concept"]
        assert list(encode(column, 2, default_name="z")) == ["z"]
    assert list(encode(pd.Series([1, 2], name="age"), 2)) == ["age"]
    assert list(encode(pl.Series("age", [1, 2]), 2)) == ["age"]


COLUMNS = {"g": ["f", None, "m"], "age": [30.5, 20.0, None], "n": [1, 2, 1]}
FRAMES: dict[str, Callable[[Any], Any]] = {
    "pandas": pd.DataFrame,
    "polars": pl.DataFrame,
    "arrow": pa.table,
    "arrow batch": lambda columns: pa.table(columns).to_batches()[0],
}


@each(FRAMES)
def test_columns_of_a_frame(case: Any) -> None:
    """Each is a variable; within a mapping, all are columns of one variable."""
    encoded = encode(case(COLUMNS), 3, joint=[("g", "n")])
    assert list(encoded) == ["g", "age", "n", ("g", "n")]
    assert decoded(encoded["g"]) == ["f", None, "m"]
    np.testing.assert_array_equal(numbers_of(encoded["age"])[:, 0], [30.5, 20, np.nan])
    assert typed(decoded(encoded["n"])) == typed([1, 2, 1])
    assert decoded(encoded["g", "n"]) == [("f", 1), None, ("m", 1)]
    with pytest.raises(LabelError, match="column 'g' holds classes"):
        encode({"z": case(COLUMNS)}, 3)
    numeric = case({name: COLUMNS[name] for name in ("age", "n")})
    with pytest.raises(LabelError, match=r"'z/n' has several columns of integers \(such as 2\)"):
        encode({"z": numeric}, 3)
    assert encode({"z": case({"years": [0.5]})}, 1)["z"].columns == ("years",)
    one = encode({"z": numeric}, 3, kinds={"z": "continuous"})["z"]
    assert one.columns == ("age", "n")
    np.testing.assert_array_equal(numbers_of(one), [[30.5, 1], [20.0, 2], [np.nan, np.nan]])


# --- memory and imports -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column",
    [
        np.array([0, 1, 2]), np.array([0.5, np.nan, 2.5]), np.array([True, False, True]),
        np.ones((3, 2)), np.ma.MaskedArray([1.0, 2.0, 3.0], mask=[True, False, False]),
        np.ma.MaskedArray(np.array(list("abc"), dtype=object), mask=[True, False, False]),
        pd.Categorical(["a", None, "a"]),
    ],
)  # fmt: skip
def test_results_own_their_memory_and_inputs_stay_as_they_were(column: Any) -> None:
    """A caller who fills one buffer again for each block must not change earlier blocks."""
    data = column.codes if isinstance(column, pd.Categorical) else np.ma.getdata(column)
    given = data.copy()
    encoded = encode_one(column, 3, name="z")
    result = encoded.codes if isinstance(encoded, ClassCodes) else encoded.values
    assert not np.shares_memory(result, data)
    result[...] = 7
    np.testing.assert_array_equal(data, given)


def test_importing_and_reading_arrays_loads_no_frame_library() -> None:
    code = (
        "import sys, numpy as np; from splince_fast.labels import encode;"
        "encode({'a': [1], 'b': np.array(['x']), 'c': np.zeros((1, 2))}, 1);"
        "print([m for m in ('narwhals', 'pandas', 'polars', 'pyarrow', 'torch', 'sklearn',"
        " 'numba') if m in sys.modules])"
    )
    assert script(code) == "[]\n"


def test_encoded_columns_are_passed_on_and_sliced() -> None:
    codes = encode_one(["b", None, "a", "b"], 4, name="z")
    age = encode_one([41.5, NAN], 2, name="age")
    assert isinstance(codes, ClassCodes)
    assert len(codes) == 4
    part = codes[1:3]
    assert part.classes == ("a", "b")
    np.testing.assert_array_equal(part.codes, [-1, 0])
    for encoded, n, other in ((codes, 4, "continuous"), (age, 2, "classes")):
        for kind in (None, kind_of(encoded)):
            assert encode_one(encoded, n, name="z", kind=kind) is encoded
        with pytest.raises(InputError, match=f"{n} labels but the block has 3 rows"):
            encode_one(encoded, 3, name="z")
        with pytest.raises(LabelError, match=f"cannot be {other}: it holds {kind_of(encoded)}"):
            encode_one(encoded, n, name="z", kind=other)


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
        assert all(typed(c) == typed(t) for c, t in zip(cells, naive, strict=True) if c)
        assert list(encoded[names].classes) == sorted({cell for cell in naive if cell})


def test_joint_cells_beyond_what_an_integer_numbers() -> None:
    # 8 variables of 1,000 classes make 10**24 possible cells
    rng = np.random.default_rng(0)
    names = tuple("abcdefgh")
    columns = {name: rng.permutation(1000) for name in names}
    encoded = encode(columns, 1000, joint=(names,))
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    assert decoded(encoded[names]) == list(rows)


def test_joint_cells_of_a_declared_but_absent_category_are_not_observed() -> None:
    gender = pd.Categorical(["f", "m"], categories=["x", "m", "f"])
    encoded = encode({"g": gender, "n": [1, 1]}, 2, joint=(("g", "n"),))
    assert encoded["g", "n"].classes == (("m", 1), ("f", 1))
    nothing = encode({"g": NONE, "n": [1, 1]}, 2, joint=(("g", "n"),))
    assert nothing["g", "n"].classes == ()
    assert nothing["g", "n"].codes.tolist() == [-1, -1]


# --- names in files -----------------------------------------------------------------------------

scalars = st.text(max_size=5) | st.booleans() | st.integers()


@fast
@example(names=[10**300, 1])
@given(names=st.lists(scalars | st.lists(scalars, min_size=1).map(tuple), unique_by=class_key))
def test_names_survive_json_exactly(names: list[Any]) -> None:
    back = names_from_json(json.loads(json.dumps(names_to_json(tuple(names)))))
    assert [class_key(name) for name in back] == [class_key(name) for name in names]
    assert [type(name) for name in back] == [type(name) for name in names]


@pytest.mark.parametrize("names", [
    [1.0], [None], [b"a"], [[1, [2]]], [[]], [{}], ["a", "a"], [[1], [1]], [True, True],
    [np.int64(1)], [np.str_("a")], "a", {"a": 1}, None, 3,
])  # fmt: skip
def test_names_that_json_cannot_give_back_are_refused(names: Any) -> None:
    with pytest.raises(FileFormatError, match="name"):
        names_from_json(names)
    if isinstance(names, list):
        with pytest.raises(LabelError, match="name"):
            names_to_json([tuple(n) if isinstance(n, list) else n for n in names])


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
