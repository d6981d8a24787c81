"""Moments: precision, scales, shapes, forms of input, bad numbers and staging."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse
from entangled import drawn, gap, normal
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from naive_model import (
    STATES,
    Rows,
    Table,
    block_sizes,
    check,
    flushed,
    made,
    rows_for,
    scatter_error,
    scatter_of,
    state_bytes,
    summed,
    tables,
)
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import Moments
from splince_fast._runtime import rows as blocking
from splince_fast._runtime.rows import check_values
from splince_fast.exceptions import (
    ConstantVariableError,
    IncompatibleMomentsError,
    InputError,
    LabelError,
    NonFiniteError,
    NotEnoughDataError,
    UnknownVariableError,
)
from splince_fast.moments import block
from splince_fast.moments import state as state_module

Float = np.ndarray[Any, Any]


def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


# --- the statistics themselves -------------------------------------------------------------------


@pytest.mark.parametrize("state", [state for state in STATES if "folds" not in state])
@given(tables(), block_sizes)
def test_statistics_equal_two_passes_over_the_rows(
    state: str, table: Table, block_rows: int | None
) -> None:
    """Variances and cross-covariances are of all rows, also if some are sampled."""
    assume(state != "classes" or "text" in table.labels)
    by = {"by": "text"} if state == "classes" else {}
    moments = made(state, block_rows=block_rows, **by)
    rows = rows_for(state, table.X)
    check(moments.update(rows, table.labels or None, sample_weight=table.weight), table.rows)


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(-1e6, 1e6, width=32),
    ),
    block_sizes,
)
def test_statistics_equal_two_passes_for_any_numbers(X: Float, block_rows: int | None) -> None:
    """Ties, zeros, negative zeros, denormals, constant columns: hypothesis likes them all."""
    check(Moments(block_rows=block_rows).update(X), Rows.of(X))


def test_normalisation_follows_numpy() -> None:
    X, z = normal(50, 3), np.arange(50) % 3
    y = normal(50, 2, seed=1)
    weight = np.arange(1, 51)
    moments = Moments().update(X, {"z": z, "y": y}, sample_weight=weight)
    np.testing.assert_allclose(moments.mean, np.average(X, axis=0, weights=weight), rtol=1e-12)
    readers: list[tuple[Callable[..., Any], slice]] = [
        (moments.covariance, slice(3)),
        (partial(moments.cross_covariance, "z"), slice(3, 6)),
        (partial(moments.cross_covariance, "y"), slice(6, None)),
    ]
    for ddof in (0, 1):
        both = np.cov(np.hstack([X, z[:, None] == [0, 1, 2], y]).T, fweights=weight, ddof=ddof)
        for read, columns in readers:
            np.testing.assert_allclose(read(ddof=ddof), both[:3, columns], rtol=1e-11, atol=1e-14)
    assert moments.classes("z") == (0, 1, 2)
    assert moments.class_counts("z") == {0: 17, 1: 17, 2: 16}
    assert moments.variables == {"z": "classes", "y": "continuous"}
    assert (moments.n_rows, moments.n_features, moments.weight) == (50, 3, 1275.0)


def test_readers_return_what_the_caller_may_change() -> None:
    moments = Moments().update(normal(20, 3), {"z": np.arange(20) % 2})
    before = state_bytes(moments.copy() + Moments())
    for array in (moments.mean, moments.covariance(), moments.cross_covariance("z")):
        array[...] = np.nan
    moments.class_counts("z").clear()
    moments.variables.clear()
    assert state_bytes(moments) == before


# --- labels within the stream --------------------------------------------------------------------


@pytest.mark.parametrize(
    "nothing", [[None] * 5, np.full(5, np.nan), np.full(5, None), [float("nan")] * 5]
)
@pytest.mark.parametrize("known", [np.array(list("ababa")), np.arange(5.0), normal(5, 2)])
def test_a_block_without_any_label_contradicts_nothing(nothing: Any, known: Any) -> None:
    """A chunk of a CSV file whose labels are all missing reads as a column of NaN."""
    X = normal(5, 2)
    model = Rows.of(X, {"z": known}) + Rows.of(X)
    check(Moments().update(X, {"z": known}).update(X, {"z": nothing}), model)
    check(Moments().update(X, {"z": nothing}).update(X, {"z": known}), model)


def test_joint_cells_are_a_variable_and_kinds_decide_how_integers_are_read() -> None:
    X, age = normal(8, 2), np.arange(8)
    labels = {"a": ["x", "x", "y", "y", None, "x", "y", "y"], "b": [0, 1, 0, 1, 0, None, 1, 1]}
    cells = [None if None in cell else cell for cell in zip(*labels.values(), strict=True)]
    model = Rows.of(X, {**labels, ("a", "b"): cells, "age": age.astype(float)})

    def fed(block_rows: int) -> Moments:
        options: Any = {"joint": [("a", "b")], "kinds": {"age": "continuous"}}
        return Moments(**options, block_rows=block_rows).update(X, {**labels, "age": age})

    check(fed(3), model)
    check(fed(3) + fed(64), model + model)
    with pytest.raises(UnknownVariableError, match="joint="):
        Moments().update(X, labels).cross_covariance(("a", "b"))


# --- precision -----------------------------------------------------------------------------------


def hard_rows(dtype: Any, offset: float, order: str, n: int = 6000, d: int = 6) -> Float:
    rng = np.random.default_rng(5)
    factors = rng.normal(size=(n, 2)) @ rng.normal(size=(2, d))
    X = (rng.normal(size=(n, d)) + factors) * np.logspace(-2, 2, d)
    X += offset * X.std(axis=0)
    if order == "sorted":
        X = X[np.argsort(X[:, 0])]
    return X.astype(dtype)


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (np.float64, 1e-12)])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 7, 100, 4096])
def test_covariance_is_exact_whatever_offset_order_and_block(
    dtype: Any, bound: float, offset: float, order: str, size: int
) -> None:
    X = hard_rows(dtype, offset, order)
    blocks = Moments(block_rows=size).update(X)
    assert scatter_error(blocks, X) <= bound
    if size > 1:
        updates = Moments()
        for i in range(0, len(X), size):
            updates.update(X[i : i + size])
        assert scatter_error(updates, X) <= bound
        merged = summed(Moments().update(X[i : i + 997]) for i in range(0, len(X), 997))
        assert scatter_error(merged, X) <= bound


def test_the_naive_formula_fails_the_same_tolerance() -> None:
    """The control: E[xy] - E[x] E[y] in float32 loses everything to the offset."""
    X = hard_rows(np.float32, 1e4, "shuffled")
    n = np.float32(len(X))
    naive = X.T @ X / n - np.outer(X.mean(axis=0), X.mean(axis=0))
    truth = scatter_of(X) / len(X)
    root = np.sqrt(np.diag(truth))
    assert np.max(np.abs(naive - truth) / np.outer(root, root)) > 1e-3


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cross_covariance_is_exact_at_an_offset(dtype: Any, order: str) -> None:
    X = hard_rows(dtype, 1e4, order)
    rng = np.random.default_rng(1)
    z = (X[:, 0] > np.median(X[:, 0])).astype(int) + 2 * (rng.random(len(X)) < 1e-3)
    y = 1e6 + 1e-2 * X[:, 1].astype(np.float64) + rng.normal(size=len(X))
    moments = Moments(block_rows=500)
    for i in range(0, len(X), 777):
        moments.update(X[i : i + 777], {"z": z[i : i + 777], "y": y[i : i + 777]})
    x = X.astype(np.longdouble)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    for name, columns in (("z", z[:, None] == np.array(moments.classes("z"))), ("y", y[:, None])):
        c = columns.astype(np.longdouble)
        c = c - c.mean(axis=0)
        truth = x.T @ c / len(X)
        found = (
            moments.cross_covariance(name, ddof=0) / X.astype(np.longdouble).std(axis=0)[:, None]
        )
        # Products of labels are float64 whatever X is; 1e4 sd of offset cost four digits of 16.
        assert np.max(np.abs(found - truth) / c.std(axis=0)) <= 1e-12


# Columns of two values each: their equal products round alike, and turning pairs of rows keeps
# these roundings from adding up. 4096 roundings of a sum that grows from 0, by half a unit 2^-23 at
# most each: if all point one way 1e-4, at random sqrt(4096 / 3) 2^-23 / sqrt(12) = 1.3e-6; below
# 1e-6, as BLAS adds up some hundred rows at a time.
TWO_VALUED: dict[str, Callable[[np.random.Generator, Any], Float]] = {
    "alternating": lambda rng, row: row % 2 == 0,
    "one in ten": lambda rng, row: row % 10 == 0,
    "random": lambda rng, row: rng.random(row.shape) < 0.3,
    "unlike": lambda rng, row: rng.random((len(row), 12)) < 0.5,
}
# Few rows hold most of the squares: the others are added to a sum in whose float32 they hardly
# show, and no turning helps. Some hundred products of less than half a unit each are lost or
# doubled: 400 * 2^-24 = 2e-5 at worst, if BLAS adds up as many rows at a time.
RARE: dict[str, Callable[[np.random.Generator, Any], Float]] = {
    "one row of 4096": lambda rng, row: row % 4096 == 7,
    "five rows of 4096": lambda rng, row: row % 4096 < 5,
    "one row in a thousand": lambda rng, row: rng.random((len(row), 12)) < 1e-3,
    "one row in a hundred, first": lambda rng, row: row % 4096 < 41,
    "an outlier": lambda rng, row: rng.normal(size=(len(row), 12)) * np.where(row % 4096, 1, 3e3),
    "heavy tails": lambda rng, row: rng.lognormal(sigma=3, size=(len(row), 12)),
    "no variance": lambda rng, row: rng.standard_cauchy((len(row), 12)),
}


def float32_rows(case: str, n: int = 12_288) -> NDArray[np.float32]:
    X = (TWO_VALUED | RARE)[case](np.random.default_rng(0), np.arange(n)[:, None])
    return np.float32(X * np.linspace(0.5, 1.0, 13)[:-1])


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 64, 500, 4096])
@pytest.mark.parametrize("case", TWO_VALUED | RARE)
def test_columns_of_few_values_are_as_exact_as_others(case: str, size: int) -> None:
    X = float32_rows(case)
    for rows in (X, X[np.argsort(X[:, 0], kind="stable")]):
        error = scatter_error(Moments(block_rows=size).update(rows), rows)
        assert error <= (1e-6 if case in TWO_VALUED else 1e-5)


@pytest.mark.parametrize("case", TWO_VALUED)
def test_turning_breaks_the_bias_of_equal_products(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The control: without it the roundings of equal float32 products add up."""
    monkeypatch.setattr(block, "_ROTATIONS", np.array([[1.0, 0.0]]))
    X = float32_rows(case, 4096)
    assert scatter_error(Moments().update(X), X) > 1e-6


def test_a_far_column_of_one_part_alone_keeps_its_digits() -> None:
    rng = np.random.default_rng(0)
    X, t = rng.normal(size=(90, 4)), 1e9 + rng.normal(size=40)
    labelled = Moments().update(X[50:], {"t": t})
    for bare in (Moments().update(X[:50]), labelled - labelled):
        found = (bare + labelled).cross_covariance("t")
        np.testing.assert_allclose(found, labelled.cross_covariance("t"), atol=1e-12)


@pytest.mark.parametrize("first", [1, 500])
@pytest.mark.parametrize(("size", "weight"), [(1e8, 1e-16), (1e12, 1e-24), (1e15, 1e-32)])
def test_a_light_row_far_away_costs_no_digits(size: float, weight: float, first: int) -> None:
    """The reference point is weighted, and follows the mean when it has gone far."""
    rng = np.random.default_rng(0)
    X, z = rng.normal(size=(500, 4)), rng.integers(0, 2, 500)
    X += z[:, None]
    w = np.ones(500)
    X[0], w[0] = size, weight
    moments = Moments()
    for part in (slice(0, first), slice(first, None)):
        moments.update(X[part], {"z": z[part]}, sample_weight=w[part])
    wide, heavy = X.astype(np.longdouble), w.astype(np.longdouble)
    indicator = (z[:, None] == moments.classes("z")).astype(np.longdouble)
    centred = indicator - (heavy @ indicator) / heavy.sum()
    truth = (wide - (heavy @ wide) / heavy.sum()).T @ (heavy[:, None] * centred) / heavy.sum()
    # w x of the light row is at most 1e-8 of that of the others: only their rounding is left.
    assert np.abs(moments.cross_covariance("z", ddof=0) - truth).max() < 1e-13


# --- scales --------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [5, 700])
@pytest.mark.parametrize("exponent", [-30, -20, -12, 0, 12, 18, 19, 25, 37, "unlike"])
def test_float32_of_any_scale(exponent: Any, d: int) -> None:
    """Squares, or their sum alone, leave the range; widths above 256 have parts of few rows."""
    scale = np.logspace(-37, 37, d) if exponent == "unlike" else 10.0**exponent
    X = (normal(1200, d) * scale).astype(np.float32)
    later = X.copy()
    later[400:800] *= np.float32(1e-3)
    labels, some = {"z": np.arange(1200) % 3}, slice(None, None, max(1, d // 4))
    for rows, size in ((X, None), (later, 400)):
        found = Moments(block_rows=size).update(rows, labels).covariance(ddof=0)[some, some]
        truth = scatter_of(rows[:, some]) / 1200
        root = np.sqrt(np.diag(truth))
        assert np.max(np.abs(found - truth) / np.outer(root, root)) <= 1e-6


@pytest.mark.parametrize("value", [5e-324, 1e-310, 1e-300, 1e-200])
def test_squares_that_underflow_are_zero_and_silent(value: float) -> None:
    X = normal(50, 2) * value
    moments = Moments().update(X, {"z": np.arange(50) % 2})
    assert (moments.covariance() == 0).all()
    assert np.isfinite(moments.cross_covariance("z")).all()
    tiny = np.array([[1e-45], [0.0], [1.17e-38], [-1e-42]], np.float32)
    check(Moments().update(tiny), Rows.of(tiny))


WEIGHTS = [5e-324, 1e-310, 1e-300, 1e-60, 1e-49, 1e-45, 1e-30, 1e30, 1e49, 1e300, 1e308]


@pytest.mark.parametrize(
    ("scale", "weight"),
    [*product((1e-10, 1.0, 1e5), WEIGHTS), *product((1e148, 1e149, 1e153), [1.0])],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_scales_and_weights_are_either_right_or_refused(
    weight: float, scale: float, dtype: Any
) -> None:
    """A covariance does not depend on the unit of the weights, and scales with the rows."""
    X, weights = normal(4096, 3, dtype), np.full(4096, weight)
    labels = {"z": np.arange(4096) % 2, "y": normal(4096, 1, seed=4)}
    plain = flushed(Moments().update(X, labels))
    before = state_bytes(plain)
    with np.errstate(over="ignore"):
        scaled = (scale * X.astype(np.float64)).astype(dtype)
    try:
        found = Moments().update(scaled, labels, sample_weight=weights)
    except InputError:
        with pytest.raises(InputError):
            plain.update(scaled, labels, sample_weight=weights)
        assert state_bytes(plain) == before
        return
    root = np.sqrt(np.diag(plain.covariance(ddof=0)))
    difference = found.covariance(ddof=0) / scale / scale - plain.covariance(ddof=0)
    assert np.max(np.abs(difference) / np.outer(root, root)) <= 2e-6
    assert np.max(np.abs(found.mean / scale - plain.mean) / root) <= 2e-6
    for name in labels:
        ours, theirs = found.cross_covariance(name, ddof=0), plain.cross_covariance(name, ddof=0)
        assert np.max(np.abs(ours / scale - theirs) / root[:, None]) <= 2e-6


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 17, 300])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_one_to_five_rows_of_any_width(n: int, d: int) -> None:
    X, labels = normal(n, d, np.float32) + np.float32(1e3), {"z": [0] * n, "y": np.ones(n)}
    moments = Moments().update(X, labels)
    check(moments, Rows.of(X, labels))
    for read in (moments.covariance, partial(moments.cross_covariance, "z")) if n == 1 else ():
        assert not read(ddof=0).any()
        with pytest.raises(NotEnoughDataError, match="ddof"):
            read()


@given(
    value=st.one_of(
        st.floats(-(2.0**120), 2.0**120, width=32).map(np.float32),
        st.floats(-1e140, 1e140).map(np.float64),
    ),
    n=st.integers(1, 300),
    block_rows=block_sizes,
    weighted=st.booleans(),
    misled=st.booleans(),
    part=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_a_constant_column_of_any_value_has_variance_zero(
    value: Any, n: int, block_rows: int | None, weighted: bool, misled: bool, part: int, seed: int
) -> None:
    """Exactly zero, also where another column misleads the sample and asks for a second pass."""
    X, z = np.full((n, 3), value), np.arange(n) % 7
    X[:, 1] = y = np.random.default_rng(seed).normal(size=n)
    if misled:
        X[:, 1] = np.arange(n) % int(np.ceil(n**0.5 / 4)) == 1
    weight = np.linspace(0.1, 3, n) if weighted else np.ones(n)

    def fed(rows: slice) -> Moments:
        labels = {"z": z[rows], "y": y[rows]}
        return Moments(block_rows=block_rows).update(X[rows], labels, sample_weight=weight[rows])

    moments, merged = fed(slice(n)), summed(fed(slice(i, i + part)) for i in range(0, n, part))
    for state in (moments, merged):
        assert (state.mean[[0, 2]] == value).all()
        assert (state.covariance(ddof=0)[[0, 2]] == 0).all()
        for name in "zy":
            assert (state.cross_covariance(name, ddof=0)[[0, 2]] == 0).all()


def test_blocks_without_rows_change_nothing() -> None:
    moments = Moments()
    for empty in (np.empty((0, 3)), np.empty((0, 3), np.float32), np.empty((0, 5), int)):
        moments.update(empty, {"z": [], "y": np.empty((0, 2))}, sample_weight=[])
        assert state_bytes(moments) == state_bytes(Moments())
    moments.update(normal(4, 3), {"z": [0, 1, 0, 1]})
    before = state_bytes(moments)
    moments.update(np.empty((0, 3)), {"z": np.empty(0, int)})
    assert state_bytes(moments) == before


@pytest.mark.parametrize("masked", [False, True])
def test_leading_dimensions_are_rows(masked: bool) -> None:
    rng = np.random.default_rng(0)
    X, mask = rng.normal(size=(4, 7, 3)), rng.random((4, 7)) < 0.6
    per_sequence, per_token = np.array(list("abca")), rng.integers(0, 3, (4, 7))
    score, weight = rng.normal(size=4), rng.uniform(0.5, 2, 4)
    if masked:
        X[~mask], per_token[~mask] = np.nan, -100
    chosen = mask if masked else np.ones((4, 7), bool)
    sequence = np.repeat(np.arange(4), 7)[chosen.ravel()]
    labels = {"s": per_sequence, "t": per_token, "score": score, "list": per_token.tolist()}
    found = Moments().update(X, labels, sample_weight=weight, mask=mask if masked else None)
    flat = {
        "s": per_sequence[sequence], "t": per_token[chosen], "score": score[sequence],
        "list": per_token[chosen],
    }  # fmt: skip
    expected = Moments().update(X[chosen], flat, sample_weight=weight[sequence])
    assert state_bytes(found) == state_bytes(expected)
    with pytest.raises(InputError, match="sequence"):
        Moments().update(X, {"s": [1, 2, 3]})
    with pytest.raises(InputError, match="mask has shape"):
        Moments().update(X, mask=mask[:2])


# --- forms of X ----------------------------------------------------------------------------------


def test_the_input_is_left_alone_and_not_kept() -> None:
    X, weight = normal(10, 2), np.full(10, 2.0)
    y, z = np.arange(10.0), np.arange(10)
    kept = [a.copy() for a in (X, weight, y, z)]
    moments = Moments().update(X, {"y": y, "z": z}, sample_weight=weight)
    model = Rows.of(X, {"y": y, "z": z}, weight)
    for array, copied in zip((X, weight, y, z), kept, strict=True):
        np.testing.assert_array_equal(array, copied)
        array[...] = 99
    check(moments, model)


# Rows in other forms, as data frames, Arrow tables and lists of arrays hold embeddings.
ROWS: dict[str, Callable[[Float], Any]] = {
    "masked array without a mask": np.ma.array,
    "matrix of a sparse one": lambda X: scipy.sparse.csr_matrix(X).todense(),
    "tensor with a gradient": lambda X: torch().tensor(X).requires_grad_(),
    "series of arrays": lambda X: pd.Series(list(X)),
    "series of lists": lambda X: pd.Series(X.tolist()),
    "polars lists": lambda X: pl.Series(X.tolist()),
    "polars arrays": lambda X: pl.Series(X.tolist(), dtype=pl.Array(pl.Float64, 3)),
    "Arrow lists": lambda X: pa.array(X.tolist()),
    "Arrow chunks": lambda X: pa.chunked_array(
        [pa.array(X[:7].tolist()), pa.array(X[7:].tolist())]
    ),
    "Arrow arrays": lambda X: pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 3),
}


NO_ROWS: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse tensor": (lambda: torch().eye(3).to_sparse(), "gives no NumPy array"),
    "tensor without memory": (lambda: torch().zeros(2, 3, device="meta"), "gives no NumPy array"),
    "tensor of eight bits": (
        lambda: torch().zeros((2, 3), dtype=torch().float8_e4m3fn), "gives no NumPy array",
    ),
    "vectors of two lengths": (lambda: pd.Series([[1.0, 2.0], [1.0]]), "cannot be stacked"),
    "a missing vector": (lambda: pd.Series([[1.0], None]), "cannot be stacked|must be 2-D"),
    "series of text": (lambda: pd.Series(["ab", "cd"]), "cannot be stacked"),
    "digits": (lambda: np.array([["02139"], ["10115"]], object), "holds text"),
    "a frame of digits": (lambda: pd.DataFrame([["1", 2.0], ["3", 4.0]]), "holds text"),
    "objects of digits": (
        lambda: pd.DataFrame([["1", 2.0], ["3", 4.0]], dtype=object), "holds text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ROWS)
def test_rows_of_any_form_are_read(form: str) -> None:
    X = normal(20, 3)
    assert state_bytes(Moments().update(ROWS[form](X))) == state_bytes(Moments().update(X))


@pytest.mark.parametrize("form", NO_ROWS)
def test_what_is_no_matrix_of_numbers_is_refused(form: str) -> None:
    make, text = NO_ROWS[form]
    with pytest.raises(InputError, match=text):
        Moments().update(make())


def test_numbers_of_sixteen_bits_of_other_libraries_are_read() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    narrow = normal(50, 3).astype(ml_dtypes.bfloat16)
    numbers = narrow.astype(np.float32)
    for rows in (narrow, torch().tensor(numbers).to(torch().bfloat16)):
        check(Moments(block_rows=8).update(rows), Rows.of(numbers))
    narrow[3, 1] = np.nan
    with pytest.raises(NonFiniteError, match="row"):
        Moments().update(narrow)


# --- counts --------------------------------------------------------------------------------------


def test_counts_beyond_two_to_the_31_and_weights_beyond_two_to_the_53() -> None:
    X = normal(7, 3)
    labels = {"z": list("aabbccc"), "y": np.arange(7.0)}
    moments = Moments().update(X, labels)
    for _ in range(57):
        moments = moments + moments
    assert moments.n_rows == 7 * 2**57
    assert moments.weight == 7.0 * 2**57
    assert moments.class_counts("z") == {"a": 2 * 2**57, "b": 2 * 2**57, "c": 3 * 2**57}
    once = Moments().update(X, labels)
    np.testing.assert_allclose(moments.mean, once.mean, rtol=1e-13)
    moments.update(X, labels)
    assert moments.n_rows == 7 * 2**57 + 7
    assert moments.class_counts("z")["c"] == 3 * 2**57 + 3
    restored = pickle.loads(pickle.dumps(moments)) + once
    assert restored.n_rows == 7 * 2**57 + 14
    assert restored.class_counts("z")["a"] == 2 * 2**57 + 4


# --- errors --------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**16),
    n=st.integers(1, 300),
    offset=st.sampled_from([0.0, 1.0, 1e6]),
    dtype=st.sampled_from(["float32", "float64"]),
    options=st.sampled_from([{}, {"covariance_type": "diag"}, {"by": "z"}]),
    weighted=st.booleans(),
)
def test_only_moments_of_the_same_rows_remove_all_rows(
    seed: int, n: int, offset: float, dtype: str, options: dict[str, Any], weighted: bool
) -> None:
    rng = np.random.default_rng(seed)
    X = (rng.normal(size=(n, 4)) * 10.0 ** rng.integers(-3, 3, 4) + offset).astype(dtype)
    z = np.arange(n) % 2
    weight = rng.uniform(0.1, 3, n) if weighted else np.ones(n)

    def accumulated(X: Any, weight: Any) -> Moments:
        """Return the moments of the rows, added in a random number of parts."""
        moments = Moments(**options)
        for rows in np.array_split(np.arange(n), rng.integers(1, 5)):
            moments += Moments(**options).update(
                X[rows], {"z": z[rows]}, sample_weight=weight[rows]
            )
        return moments

    whole = accumulated(X, weight)
    assert (whole - accumulated(X, weight)).n_rows == 0
    # The controls: as many rows, and as many of each class, but other weights or other values.
    other = X.copy()
    other[0] += 1e-3 * np.abs(X).max(axis=0) + 1
    for part in (accumulated(X, 1.001 * weight), accumulated(other, weight)):
        before = whole.mean.copy()
        with pytest.raises(IncompatibleMomentsError, match="number of all rows"):
            whole - part
        assert (whole.mean == before).all()


def test_unit_roundoff_is_reset_where_all_float32_rows_are_removed() -> None:
    moments = Moments().update(normal(9, 3).astype(np.float32))
    assert moments._state().second.unit_roundoff > state_module.EPS64
    moments = (moments - moments).update(normal(9, 3))
    assert moments._state().second.unit_roundoff == state_module.EPS64


BAD_NUMBERS = [np.nan, -np.nan, np.inf, -np.inf, 1e200, -1.4e154, 1e149, 3e148]
share = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize("value", BAD_NUMBERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(
    size=st.integers(1, 70),
    blocks=st.sampled_from([1, 1, 2]),
    d=st.integers(1, 40),
    weighted=st.booleans(),
    places=st.lists(st.tuples(share, share), min_size=1, max_size=3),
    seed=st.integers(0, 999),
)
def test_bad_numbers_anywhere_in_a_block_are_refused_before_any_change(
    dtype: Any, value: float, size: int, blocks: int, d: int, weighted: bool,
    places: list[tuple[float, float]], seed: int,
) -> None:  # fmt: skip
    """A whole block is checked while it is reduced: as if it had been checked before."""
    n, rng = size * blocks, np.random.default_rng(seed)
    X = rng.normal(size=(n, d)).astype(dtype)
    y = rng.normal(size=(n, 2))
    moments = Moments(block_rows=size).update(X, {"z": np.arange(n) % 2, "y": y})
    with np.errstate(over="ignore"):
        for i, j in places:
            X[int(i * n), int(j * d)] = value
    try:
        check_values(X)
    except InputError as error:
        expected = error
    else:
        # Too large for the reduction to say yes, and yet no row's squares are too large.
        assert moments.update(X).n_rows == 2 * n
        return
    before = state_bytes(moments)
    labels = {"z": np.arange(n) % 3, "new": ["a"] * n, "y": -y, "newer": y}
    weight = rng.uniform(0.1, 3, n) if weighted else None
    with pytest.raises(type(expected)) as caught:
        moments.update(X, labels, sample_weight=weight)
    assert str(caught.value) == str(expected)
    assert state_bytes(moments) == before


def test_readers_say_what_is_missing_or_unknown() -> None:
    empty = Moments()
    assert (empty.n_rows, empty.n_features, empty.weight, empty.variables) == (0, None, 0.0, {})
    assert "empty" in repr(empty)
    labels = {"gender": np.arange(1200) % 4, "age": normal(1200, 2)}
    some = Moments().update(normal(1200, 3), labels)
    for text in (
        "1,200 rows",
        "3 features",
        "'gender': 4 classes",
        "'age': continuous (2 columns)",
    ):
        assert text in repr(some)
    assert some.nbytes >= 3 * 3 * 8
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: empty.mean, NotEnoughDataError, "update"),
        (empty.covariance, NotEnoughDataError, "update"),
        (partial(empty.cross_covariance, "z"), UnknownVariableError, "none"),
        (partial(some.cross_covariance, "sex"), UnknownVariableError, "'gender', 'age'"),
        (lambda: some.by_class, InputError, r"Moments\(by=NAME\)"),
        (partial(Moments, subsample="auto"), InputError, "above 0 and at most 1"),  # of no source
        *(
            (partial(some.scaled, factor), InputError, "positive finite number")
            for factor in (0, -1.0, np.nan, np.inf, True, "2")
        ),
    ]
    for read in (some.classes, some.class_counts):
        calls.append((partial(read, "sex"), UnknownVariableError, "'gender', 'age'"))
        calls.append((partial(read, "age"), LabelError, "continuous"))
    for call, error, text in calls:
        with pytest.raises(error, match=text):
            call()


# --- staging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_row_at_a_time_costs_no_quadratic_work(dtype: Any) -> None:
    """A row that waits takes less than a tenth of the time of one that is merged by itself."""
    X, z = normal(24, 3072, dtype), np.arange(24) % 2
    seconds = {}
    for block_rows in (64, 1):
        moments, elapsed = Moments(block_rows=block_rows), []
        for i in range(24):
            start = time.perf_counter()
            moments.update(X[i : i + 1], {"z": z[i : i + 1]})
            elapsed.append(time.perf_counter() - start)
        seconds[block_rows] = np.median(elapsed)
        np.testing.assert_allclose(moments.mean, X.astype(np.float64).mean(axis=0), atol=1e-12)
    assert seconds[64] < seconds[1] / 10


@pytest.mark.parametrize("first", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("second", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kind", ["full", "diag", "sparse"])
def test_rows_of_two_dtypes_keep_the_digits_of_each(
    monkeypatch: pytest.MonkeyPatch, first: Any, second: Any, kind: str
) -> None:
    """Rows wait together in the wider dtype, and its work memory is reserved, also after a copy."""
    parts = [normal(30, 4, seed=i).astype(t) for i, t in enumerate((first, second))]
    X = np.concatenate([part.astype(np.float64) for part in parts])
    z = np.arange(60) % 3
    centred = X - X.mean(axis=0)
    cross = centred.T @ (np.eye(3)[z] - np.eye(3)[z].mean(axis=0)) / 60
    monkeypatch.setattr(blocking, "BLOCK_BYTES", 16 * 4 * 4)  # 32 rows of float32, or 16 of float64
    for size, step in ((None, 30), (8, 30), (8, 7), (100, 1)):
        moments = Moments(covariance_type="full" if kind == "full" else "diag", block_rows=size)
        for number, part in enumerate(parts):
            for i in range(0, 30, step):
                rows: Any = part[i : i + step]
                if kind == "sparse" and number:
                    rows = scipy.sparse.csr_matrix(rows.astype(np.float64))
                labels = {"z": z[30 * number :][i : i + step]}
                moments = moments.copy() if i % 2 else moments
                moments.update(rows, {"z": labels["z"][: rows.shape[0]]})
        # Sums of 60 rows in float64, whatever they came in; float32 would cost 1e-8.
        np.testing.assert_allclose(moments.mean, X.mean(axis=0), atol=1e-14)
        np.testing.assert_allclose(moments.cross_covariance("z", ddof=0), cross, atol=1e-14)


READERS: list[Callable[[Moments], Any]] = [
    lambda m: m.weight,
    lambda m: m.n_rows,
    lambda m: m.mean,
    lambda m: m.covariance(),
    lambda m: m.cross_covariance("z"),
    lambda m: m.cross_covariance("y"),
    lambda m: m.classes("z"),
    lambda m: list(m.class_counts("z").values()),
    lambda m: (m + Moments()).covariance(),
]


@pytest.mark.parametrize("read", READERS)
def test_every_reader_sees_the_rows_that_wait(read: Callable[[Moments], Any]) -> None:
    given = normal(5, 2), {"z": np.array(list("abaab")), "y": np.arange(5.0)}
    waiting, merged = (Moments(block_rows=100).update(*given) for _ in range(2))
    np.testing.assert_array_equal(read(waiting), read(flushed(merged)))


# --- many label columns, such as indicators -------------------------------------------------------

N, D, K = 1300, 40, 12


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_indicators_equal_two_passes_over_the_rows(
    missing: bool, weighted: bool, dtype: Any
) -> None:
    """Some classes have no rows, one has many, and a constant column has no covariance."""
    rng = np.random.default_rng(5)
    Z, X = np.eye(K)[rng.integers(0, K - 2, N) * rng.integers(0, 2, N) + 1], normal(N, D, dtype)
    Z[:, -1] = 1.0
    if missing:
        Z[::7] = np.nan
    weight = rng.random(N) + 0.2 if weighted else None
    moments = Moments(block_rows=300).update(X, {"z": Z}, sample_weight=weight)
    check(moments, Rows.of(X, {"z": Z}, weight))
    assert (moments.cross_covariance("z")[:, [0, -1]] == 0.0).all()


# --- numbers at the edge --------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-150, -100, 100, 140])
def test_scales_near_the_ends_of_float64(exponent: int) -> None:
    """Either the eraser of the same data in other units, or an error that says so."""
    X, z, y = drawn(200, 4)
    expected = sf.splince(Moments().update(X, {"z": z, "y": y}), erase="z", keep="y")
    moments = Moments().update(X * 10.0**exponent, {"z": z, "y": y})
    P = sf.splince(moments, erase="z", keep="y")
    assert P.rank == expected.rank
    np.testing.assert_allclose(P.matrix(), expected.matrix(), atol=1e-9)


def test_half_precision_leaves_its_own_rounding() -> None:
    """The result is rounded to the dtype of the rows: its residue is of that size."""
    X, z, _ = drawn(2000)
    P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    size = np.abs(X).max()
    for dtype in (np.float16, np.float32, np.float64):
        rounded = P(X.astype(dtype)).astype(np.float64)
        # Rounding of the rows and of the result, each at most half an ulp of the largest entry.
        assert gap(rounded, z) < 4 * np.linalg.norm(P.matrix(), 2) * size * np.finfo(dtype).eps
    assert gap(P(X.astype(np.float16)).astype(np.float64), z) > 1e-7, "float16 shows none at all"


def test_negative_zero_is_zero() -> None:
    X, z, _ = drawn(60, 3)
    labels = {"z": z, "s": np.where(z, 0.0, -0.0)}
    X[::3, 1] = 0.0
    a, b = (Moments(kinds={"s": "classes"}).update(x, labels) for x in (X, np.where(X, X, -0.0)))
    np.testing.assert_array_equal(a.covariance(), b.covariance())
    assert a.classes("s") == (0,)
    with pytest.raises(ConstantVariableError):
        sf.leace(Moments().update(X, {"s": labels["s"]}), erase="s")
