"""Moments: algebra, precision, scales, forms of input, errors and staging.

What the random walks of test_moments_state_machine.py cannot aim at is tested here by name.

Modules: `moments.accumulator`, `moments.block`, `moments.moments`, `moments.state`,
`moments.stream`, `moments.variables`.
"""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import scipy.sparse
from entangled import drawn, gap, normal
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from naive_model import (
    LAYOUTS,
    TWO_VALUED,
    U64,
    Rows,
    Table,
    block_sizes,
    check,
    fed,
    flushed,
    interrupt_reductions,
    laid_out,
    rows_of,
    scatter_error,
    scatter_of,
    state_bytes,
    summed,
    tables,
    two_valued,
)

import splince_fast as sf
from splince_fast import Moments, SplinceError
from splince_fast._kernels import blas, row_kernels
from splince_fast._runtime import rows as blocking
from splince_fast._runtime.rows import check_values
from splince_fast.exceptions import (
    FileFormatError,
    IncompatibleMomentsError,
    InputError,
    LabelError,
    NonFiniteError,
    NotEnoughDataError,
    UnknownVariableError,
)
from splince_fast.moments import accumulator, variables
from splince_fast.moments import block as reducing
from splince_fast.moments import state as state_module
from splince_fast.moments.variables import ColumnSums

Float = np.ndarray[Any, Any]


# --- the statistics themselves -------------------------------------------------------------------


@given(tables(), block_sizes)
def test_statistics_equal_two_passes_over_the_rows(table: Table, block_rows: int | None) -> None:
    check(fed(table, block_rows=block_rows), table.rows)


@given(tables(), tables(), st.floats(1e-3, 1e3), block_sizes)
def test_scaled_moments_are_those_of_rows_of_scaled_weight(
    table: Table, other: Table, factor: float, block_rows: int | None
) -> None:
    def weighted(rows: Rows) -> Rows:
        return Rows(rows.x, factor * rows.w, rows.labels, rows.narrow)

    moments = flushed(fed(table, block_rows=block_rows))
    before = state_bytes(moments)
    scaled = moments.scaled(factor)
    check(scaled, weighted(table.rows))
    assert state_bytes(moments) == before  # the operand stays
    if other.X.shape[1] == table.X.shape[1]:
        check(scaled + fed(other), weighted(table.rows) + other.rows)


@pytest.mark.parametrize("factor", [1.0, 1e-6])
def test_scaled_moments_scale_the_rounding_bound_of_a_removal(factor: float) -> None:
    """Unscaled, the bound of a removal far from the mean would exceed variances of small weight."""
    rng = np.random.default_rng(0)
    a, b, c = (Moments().update(rng.normal(size=(1000, 5)) + mean) for mean in (0.0, 1e4, 0.0))
    found = (a + b + c - b).scaled(factor) - c.scaled(factor)
    np.testing.assert_allclose(found.covariance(ddof=0), a.covariance(ddof=0), atol=1e-6)


@pytest.mark.parametrize("factor", [0, -1.0, np.nan, np.inf, True, "2"])
def test_a_factor_out_of_range_is_refused(factor: Any) -> None:
    with pytest.raises(InputError, match="positive finite number"):
        Moments().update(np.eye(3)).scaled(factor)


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
    for ddof in (0, 1):
        both = np.cov(np.hstack([X, z[:, None] == [0, 1, 2], y]).T, fweights=weight, ddof=ddof)
        np.testing.assert_allclose(moments.covariance(ddof=ddof), both[:3, :3], rtol=1e-12)
        np.testing.assert_allclose(
            moments.cross_covariance("z", ddof=ddof), both[:3, 3:6], rtol=1e-11, atol=1e-14
        )
        np.testing.assert_allclose(
            moments.cross_covariance("y", ddof=ddof), both[:3, 6:], rtol=1e-11
        )
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
@pytest.mark.parametrize("known", [np.array(["a", "b", "a", "b", "a"]), np.arange(5.0)])
def test_a_block_without_any_label_contradicts_nothing(nothing: Any, known: Any) -> None:
    """A chunk of a CSV file whose labels are all missing reads as a column of NaN."""
    X = normal(5, 2)
    model = Rows.of(X, {"z": known}) + Rows.of(X)
    check(Moments().update(X, {"z": known}).update(X, {"z": nothing}), model)
    check(Moments().update(X, {"z": nothing}).update(X, {"z": known}), model)


def test_classes_are_of_one_type_throughout() -> None:
    """True is not 1, and "1" is neither: two tables from two files must not double the classes."""
    X = normal(4, 2)
    columns: list[Any] = [[True, False] * 2, [1, 0] * 2, ["1", "0"] * 2]
    for first, second in permutations(columns, 2):
        moments = Moments().update(X, {"z": first})
        before = state_bytes(moments)
        with pytest.raises(LabelError):
            moments.update(X, {"z": second})
        assert state_bytes(moments) == before
        with pytest.raises((LabelError, IncompatibleMomentsError)):
            moments + Moments().update(X, {"z": second})


def test_joint_cells_are_a_variable_of_their_own() -> None:
    X = normal(8, 2)
    labels = {"a": ["x", "x", "y", "y", None, "x", "y", "y"], "b": [0, 1, 0, 1, 0, None, 1, 1]}
    moments = Moments(joint=[("a", "b")], block_rows=3).update(X, labels)
    counts = {("x", 0): 1, ("x", 1): 1, ("y", 0): 1, ("y", 1): 3}
    assert moments.class_counts(("a", "b")) == counts
    cells = [
        None if a is None or b is None else (a, b) for a, b in zip(*labels.values(), strict=True)
    ]
    split = moments + Moments(joint=[("a", "b")]).update(X, labels)
    assert split.class_counts(("a", "b")) == {k: 2 * v for k, v in counts.items()}
    members = np.array([cell == ("y", 1) for cell in cells])
    known = np.array([cell is not None for cell in cells])
    truth = np.cov(X[known].T, members[known].astype(float))[:2, 2]
    column = moments.classes(("a", "b")).index(("y", 1))
    found = moments.cross_covariance(("a", "b"))[:, column]
    np.testing.assert_allclose(found, truth, rtol=1e-12)
    with pytest.raises(UnknownVariableError, match="joint="):
        Moments().update(X, labels).cross_covariance(("a", "b"))


def test_kinds_decide_how_integers_are_read() -> None:
    X, age = normal(30, 2), np.arange(30)
    moments = Moments(kinds={"age": "continuous"}).update(X, {"age": age})
    check(moments, Rows.of(X, {"age": age.astype(float)}))
    with pytest.raises(InputError, match="kinds has"):
        Moments(kinds={"age": "whatever"})


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


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 64, 500, 4096])
@pytest.mark.parametrize("layout", TWO_VALUED)
def test_columns_of_two_values_are_as_exact_as_others(layout: str, size: int) -> None:
    """Equal products round alike: turning pairs of rows keeps their roundings from adding up."""
    X = two_valued(8192, layout)
    # 4096 roundings of a sum that grows from 0, by half a unit 2^-23 at most each: if all point one
    # way 1e-4, at random sqrt(4096 / 3) 2^-23 / sqrt(12) = 1.3e-6; below 1e-6, as BLAS adds up some
    # hundred rows at a time.
    assert scatter_error(Moments(block_rows=size).update(X), X) <= 1e-6
    by_value = X[np.argsort(X[:, 0], kind="stable")]
    assert scatter_error(Moments(block_rows=size).update(by_value), by_value) <= 1e-6


RARE: dict[str, Callable[[np.random.Generator, int], Float]] = {
    "one row of 4096": lambda rng, n: np.arange(n)[:, None] % 4096 == 7,
    "five rows of 4096": lambda rng, n: np.arange(n)[:, None] % 4096 < 5,
    "one row in a thousand": lambda rng, n: rng.random((n, 12)) < 1e-3,
    "one row in a hundred, first": lambda rng, n: np.arange(n)[:, None] % 4096 < 41,
    "an outlier": lambda rng, n: (
        rng.normal(size=(n, 12)) * np.where(np.arange(n) % 4096, 1, 3e3)[:, None]
    ),
    "heavy tails": lambda rng, n: rng.lognormal(sigma=3, size=(n, 12)),
    "no variance": lambda rng, n: rng.standard_cauchy((n, 12)),
}


@pytest.mark.parametrize("case", RARE)
def test_a_few_rows_may_hold_most_of_the_squares(case: str) -> None:
    """The others are then added to a sum in whose float32 they hardly show: no turning helps."""
    X = RARE[case](np.random.default_rng(0), 12_288) * np.linspace(0.5, 1.0, 13)[:-1]
    X = X.astype(np.float32)
    # Some hundred products of less than half a unit each are lost or doubled: 400 * 2^-24 = 2e-5 at
    # worst, if BLAS adds up as many rows at a time.
    assert scatter_error(Moments().update(X), X) <= 1e-5


# --- scales --------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [5, 300, 700])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-12, 1.0, 1e12, 1e19, 1e25, 1e37])
def test_float32_of_any_scale(scale: float, d: int) -> None:
    """Squares leave the range of float32 at both ends; widths above 256 have parts of few rows."""
    X = (normal(1200, d) * scale).astype(np.float32)
    moments = Moments().update(X, {"z": np.arange(1200) % 3})
    some = X[:, :: max(1, d // 4)]
    assert scatter_error(Moments().update(some), some) <= 1e-6
    found = moments.covariance(ddof=0)[:: max(1, d // 4), :: max(1, d // 4)]
    truth = scatter_of(some) / 1200
    root = np.sqrt(np.diag(truth))
    assert np.max(np.abs(found - truth) / np.outer(root, root)) <= 1e-6


def test_columns_of_unlike_scales() -> None:
    X = (normal(3000, 8) * np.logspace(-37, 37, 8)).astype(np.float32)
    assert scatter_error(Moments().update(X), X) <= 1e-6
    blocks = [X[:1000], X[1000:2000] * np.float32(1e-3), X[2000:]]
    moments = Moments(block_rows=1000)
    for block in blocks:
        moments.update(block)
    assert scatter_error(moments, np.concatenate(blocks)) <= 1e-6


@pytest.mark.parametrize("value", [5e-324, 1e-310, 1e-300, 1e-200])
def test_squares_that_underflow_are_zero_and_silent(value: float) -> None:
    X = normal(50, 2) * value
    moments = Moments().update(X, {"z": np.arange(50) % 2})
    assert (moments.covariance() == 0).all()
    assert np.isfinite(moments.cross_covariance("z")).all()
    tiny = np.array([[1e-45], [0.0], [1.17e-38], [-1e-42]], np.float32)
    check(Moments().update(tiny), Rows.of(tiny))


@pytest.mark.parametrize("scale", [1e149, 1e150, 1e152, 1e153, 3e153, 5e153, 8e153])
def test_large_float64_is_either_right_or_refused(scale: float) -> None:
    X = normal(4096, 3) * scale
    try:
        moments = Moments().update(X)
    except InputError:
        return
    covariance = moments.covariance(ddof=0)
    assert np.isfinite(covariance).all()
    np.testing.assert_allclose(covariance / scale / scale, scatter_of(X / scale) / 4096, rtol=1e-9)


@pytest.mark.parametrize(
    "weight", [5e-324, 1e-310, 1e-300, 1e-60, 1e-49, 1e-45, 1e-30, 1e30, 1e49, 1e300, 1e308]
)
@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_weights_are_either_right_or_refused(
    weight: float, scale: float, dtype: Any
) -> None:
    """A covariance does not depend on the unit of the weights."""
    X, z = (scale * normal(40, 3)).astype(dtype), np.arange(40) % 2
    y = normal(40, 1, seed=4)
    moments = Moments().update(X, {"z": [0] * 40})
    before = state_bytes(moments)
    try:
        Moments().update(X, {"z": z, "y": y}, sample_weight=np.full(40, weight))
    except InputError:
        with pytest.raises(InputError):
            moments.update(X, {"z": z}, sample_weight=np.full(40, weight))
        assert state_bytes(moments) == before
        return
    found = Moments().update(X, {"z": z, "y": y}, sample_weight=np.full(40, weight))
    plain = Moments().update(X, {"z": z, "y": y})
    root = np.sqrt(np.diag(plain.covariance(ddof=0)))
    difference = found.covariance(ddof=0) - plain.covariance(ddof=0)
    assert np.max(np.abs(difference) / np.outer(root, root)) <= 2e-6
    assert np.max(np.abs(found.mean - plain.mean) / root) <= 2e-6
    for name in ("z", "y"):
        ours, theirs = found.cross_covariance(name, ddof=0), plain.cross_covariance(name, ddof=0)
        assert np.max(np.abs(ours - theirs) / root[:, None]) <= 2e-6


@pytest.mark.parametrize("value", [1e155, 1e200, 1.7e308])
def test_continuous_labels_whose_squares_overflow_are_refused(value: float) -> None:
    moments = Moments().update(normal(5, 2), {"y": np.arange(5.0)})
    before = state_bytes(moments)
    for block in (moments, Moments()):
        with pytest.raises((InputError, LabelError)):
            block.update(normal(5, 2), {"y": np.array([0, 1, -value, value, 0])}).covariance()
    assert state_bytes(moments) == before


def test_float32_products_of_very_long_blocks_stay_finite() -> None:
    """Each number is within the range of float32, and so is each square, but not their sum."""
    X = np.where(np.arange(4_000_000) % 2 == 0, 9.9e15, -9.9e15).astype(np.float32)[:, None]
    moments = Moments(block_rows=len(X)).update(X)
    np.testing.assert_allclose(moments.covariance(ddof=0), float(X[0, 0]) ** 2, rtol=1e-5)


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 2, 17, 300])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_one_to_five_rows_of_any_width(n: int, d: int, dtype: Any) -> None:
    X = normal(n, d, dtype) + dtype(1e3)
    labels = {"z": [0] * n, "y": np.ones(n)}
    moments = Moments().update(X, labels)
    check(moments, Rows.of(X, labels))
    if n == 1:
        assert (moments.covariance(ddof=0) == 0).all()
        with pytest.raises(NotEnoughDataError, match="ddof"):
            moments.covariance()
        with pytest.raises(NotEnoughDataError, match="ddof"):
            moments.cross_covariance("z")


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
    """Exactly zero: it is not told from a column that hardly varies by any threshold.

    Also where another column misleads the sample of rows and asks for a second pass.
    """
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
    with pytest.raises(InputError):
        moments.update(np.empty((0, 2)))
    for columnless in (np.empty((0, 0)), np.empty((3, 0))):
        with pytest.raises(InputError, match="column"):
            moments.update(columnless)


def test_ten_thousand_classes_and_classes_of_one_row() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(12_000, 4)).astype(np.float32)
    z = np.concatenate([rng.permutation(10_000), rng.integers(0, 10_000, 2000)])
    moments = Moments(kinds={"z": "classes"})
    for i in range(0, len(X), 1500):
        moments.update(X[i : i + 1500], {"z": z[i : i + 1500]})
    assert len(moments.classes("z")) == 10_000
    counts = np.bincount(z)
    assert moments.class_counts("z") == dict(enumerate(counts))
    sums = np.zeros((10_000, 4))
    np.add.at(sums, z, X.astype(np.float64))
    mean = X.astype(np.float64).mean(axis=0)
    truth = ((sums - counts[:, None] * mean) / (len(X) - 1)).T
    order = np.array(moments.classes("z"))
    np.testing.assert_allclose(moments.cross_covariance("z"), truth[:, order], atol=1e-14)


# --- forms of X ----------------------------------------------------------------------------------

FORMS = ["float16", "float32", "float64", ">f2", ">f4", ">f8", "int8", "uint8", ">i4", "int64",
         "uint64", "bool"]  # fmt: skip


@pytest.mark.parametrize("layout", [*LAYOUTS, "unaligned"])
@pytest.mark.parametrize("dtype", FORMS)
def test_dtype_and_layout_of_memory_do_not_matter(dtype: str, layout: str) -> None:
    base = rows_of(np.random.default_rng(1), 70, 5, dtype, 3.0)
    X = laid_out(base, layout)
    if layout == "unaligned" and base.dtype.itemsize > 1:
        assert not X.flags.aligned
    reference = Moments(block_rows=16).update(base)
    moments = Moments(block_rows=16).update(X)
    check(moments, Rows.of(base))
    assert state_bytes(flushed(moments)) == state_bytes(flushed(reference))


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


def test_bfloat16_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    X = normal(50, 3).astype(ml_dtypes.bfloat16)
    check(Moments(block_rows=8).update(X), Rows.of(X.astype(np.float32)))
    X[3, 1] = np.nan
    with pytest.raises(NonFiniteError, match="row"):
        Moments().update(X)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    X = normal(50, 3, np.float32)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.tensor(X).to(dtype).requires_grad_()
        z = torch.arange(50) % 2
        rows = Rows.of(tensor.detach().to(torch.float64).numpy(), {"z": z.numpy()})
        rows.narrow = dtype != torch.float64
        check(Moments().update(tensor, {"z": z}), rows)
    for bad in (torch.eye(3).to_sparse(), torch.zeros((2, 3), device="meta"),
                torch.zeros((2, 3), dtype=torch.float8_e4m3fn)):  # fmt: skip
        with pytest.raises(InputError, match="gives no NumPy array"):
            Moments().update(bad)


def test_a_column_of_vectors_is_a_matrix() -> None:
    """As data frames, Arrow tables and lists of arrays hold embeddings."""
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    pa = pytest.importorskip("pyarrow")
    X = normal(20, 3)
    flat = pa.array(X.ravel())
    expected = Moments().update(X)
    for column in (
        pd.Series(list(X)),
        pd.Series(X.tolist()),
        pl.Series(X.tolist()),
        pl.Series(X.tolist(), dtype=pl.Array(pl.Float64, 3)),
        pa.array(X.tolist()),
        pa.chunked_array([pa.array(X[:7].tolist()), pa.array(X[7:].tolist())]),
        pa.FixedSizeListArray.from_arrays(flat, 3),
    ):
        assert state_bytes(Moments().update(column)) == state_bytes(expected), type(column)
    for bad in (pd.Series([[1.0, 2.0], [1.0]]), pd.Series([[1.0], None]), pd.Series(["ab", "cd"])):
        with pytest.raises(InputError, match=r"cannot be stacked|must be 2-D"):
            Moments().update(bad)


@pytest.mark.parametrize("X", [[["02139"], ["10115"]], [["1", 2.0], ["3", 4.0]]])
def test_text_of_digits_is_no_number(X: Any) -> None:
    pd = pytest.importorskip("pandas")
    for rows in (np.array(X, object), pd.DataFrame(X), pd.DataFrame(X, dtype=object)):
        with pytest.raises(InputError, match="holds text"):
            Moments().update(rows)


def test_a_masked_array_without_a_mask_is_read() -> None:
    check(Moments().update(np.ma.array(normal(6, 2))), Rows.of(normal(6, 2)))


def test_the_matrix_that_sparse_todense_gives() -> None:
    scipy_sparse = pytest.importorskip("scipy.sparse")
    X = normal(7, 3)
    with pytest.raises(InputError, match="toarray"):
        Moments().update(scipy_sparse.csr_matrix(X))
    dense = scipy_sparse.csr_matrix(X).todense()
    check(Moments().update(dense), Rows.of(X))


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
    # Each doubling rounds once.
    np.testing.assert_allclose(moments.covariance(ddof=0), once.covariance(ddof=0), rtol=1e-12)
    for name in labels:
        np.testing.assert_allclose(
            moments.cross_covariance(name, ddof=0), once.cross_covariance(name, ddof=0),
            rtol=1e-12, atol=1e-15,
        )  # fmt: skip
    moments.update(X, labels)
    assert moments.n_rows == 7 * 2**57 + 7
    assert moments.class_counts("z")["c"] == 3 * 2**57 + 3
    restored = pickle.loads(pickle.dumps(moments)) + once
    assert restored.n_rows == 7 * 2**57 + 14
    assert restored.class_counts("z")["a"] == 2 * 2**57 + 4


# --- errors --------------------------------------------------------------------------------------


def bad(value: float, row: int = 2) -> Float:
    X = normal(6, 2)
    X[row, 1] = value
    return X


ERRORS: dict[str, tuple[Any, dict[str, Any], type[SplinceError], str]] = {
    "NaN": (bad(np.nan), {}, NonFiniteError, r"1 of 6 rows \(row 2\)"),
    "infinity": (bad(np.inf, 5), {}, NonFiniteError, "row 5"),
    "many rows of NaN": (
        np.full((1000, 2), np.nan), {}, NonFiniteError,
        r"1000 of 1000 rows \(rows 0, 1, 2, 3, 4, \.\.\.\)",
    ),
    **{
        f"squares of {value} overflow": (
            bad(value), {"labels": {"z": [5] * 6}}, InputError, "rescale"
        )
        for value in (1e155, 1e200, 1.7e308)
    },
    "float16 saturated": (bad(np.inf).astype("f2"), {}, NonFiniteError, "65504"),
    "F-ordered NaN": (np.asfortranarray(bad(np.nan)), {}, NonFiniteError, "row 2"),
    "long double beyond float64": (
        np.full((2, 2), np.longdouble("1e400")) if np.finfo(np.longdouble).max > 1e400
        else np.full((2, 2), np.inf), {}, InputError, ".",
    ),
    "integer beyond float64": (np.array([[10**400, 1]], object), {}, InputError, "."),
    "list of integers beyond float64": ([[10**400, 1]], {}, InputError, "."),
    "None among objects": (np.array([[None, 1.0]], object), {}, InputError, "."),
    "one axis": (np.ones(4), {}, InputError, r"X\[None, :\]"),
    "no axis": (np.float64(3), {}, InputError, "2-D"),
    "leading dimensions without features": (np.ones((2, 2, 0)), {}, InputError, "columns"),
    "ragged": ([[1, 2], [3]], {}, InputError, "unequal length"),
    "complex": (np.ones((2, 2)) * 1j, {}, InputError, "imaginary"),
    "text": (np.array([["a", "b"]]), {}, InputError, "dtype"),
    "dates": (np.ones((2, 2), "M8[s]"), {}, InputError, "dtype"),
    "structured": (np.ones((2, 2), [("a", float)]), {}, InputError, "dtype"),
    "nothing": (None, {}, InputError, "."),
    "mapping": ({"a": [1, 2]}, {}, InputError, "."),
    "labels too short": (normal(6, 2), {"labels": {"z": [1]}}, InputError, "6 rows"),
    "mask of numbers": (np.ones((2, 2, 2)), {"mask": [[0, 2], [1, 1]]}, InputError, "1 and 0"),
    "mask of text": (normal(4, 2), {"mask": ["a", "b", "a", "b"]}, InputError, "1 and 0"),
    "masked rows": (np.ma.array(normal(6, 2), mask=np.eye(6, 2)), {}, InputError, "mask"),
    "masked weights": (
        normal(6, 2), {"sample_weight": np.ma.array(np.ones(6), mask=np.eye(6)[0])}, InputError,
        "mask",
    ),
    "weights too short": (normal(6, 2), {"sample_weight": [1]}, InputError, "one weight per row"),
    "weights of two axes": (normal(2, 2), {"sample_weight": [[1], [1]]}, InputError, "shape"),
    "weights of text": (normal(2, 2), {"sample_weight": ["a", "b"]}, InputError, "numbers"),
    "weights complex": (normal(2, 2), {"sample_weight": np.ones(2) * 1j}, InputError, "."),
    "weights beyond float64": (normal(2, 2), {"sample_weight": [10**400, 1]}, InputError, "."),
    "weights negative": (normal(2, 2), {"sample_weight": [1, -1e-9]}, InputError, "non-negative"),
    "weights NaN": (normal(2, 2), {"sample_weight": [1, np.nan]}, InputError, "finite"),
    "weights None": (normal(2, 2), {"sample_weight": [1, None]}, InputError, "."),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_typed_tell_why_and_change_nothing(case: str) -> None:
    X, arguments, kind, text = ERRORS[case]
    started = Moments(block_rows=3).update(normal(4, 2), {"z": [0, 1, 0, 1]})
    for moments in (Moments(), started):
        before = state_bytes(moments)
        with pytest.raises(kind, match=text) as caught:
            moments.update(X, **arguments)
        assert len(str(caught.value)) > 30
        assert state_bytes(moments) == before
        assert moments.n_features == (None if moments is not started else 2)
    known = Rows.of(normal(4, 2), {"z": [0, 1, 0, 1]})
    check(started.update(normal(3, 2)), known + Rows.of(normal(3, 2)))


def test_more_rows_wait_than_a_block_of_a_wider_dtype_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "BLOCK_BYTES", 1 << 12)  # 128 rows of 8 float32, 64 of float64
    X = normal(100, 8)
    moments = Moments().update(X[:99].astype(np.float32)).update(X[99:])
    np.testing.assert_allclose(moments.mean, X.mean(axis=0), atol=1e-7)


def test_a_blank_column_says_nothing_of_names() -> None:
    X = normal(8, 3)
    moments = Moments(kinds={"t": "continuous"}).update(X, {"t": X[:, :2]})
    moments.update(X, {"t": np.full(8, np.nan)})
    assert moments.n_rows == 16
    np.testing.assert_allclose(
        moments.cross_covariance("t", ddof=0), np.cov(X.T, ddof=0)[:, :2], atol=1e-12
    )


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


@pytest.mark.parametrize("weight", [None, np.array([0.0, 1.0, 1.0, 1.0])])
def test_arrow_labels_of_rows_without_weight(weight: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    moments = Moments().update(
        normal(4, 3), {"z": pa.array(["a", "b", "a", "b"])}, sample_weight=weight
    )
    assert moments.class_counts("z") == ({"a": 2, "b": 2} if weight is None else {"a": 1, "b": 2})


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


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("before", "after"), [("f4", "f8"), ("f8", "f4"), ("f8", "f8")])
def test_a_refused_block_leaves_no_trace_in_what_follows(
    before: str, after: str, value: float
) -> None:
    """Neither work buffers of its dtype nor names of its columns."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    X, y = normal(16, 3), normal(16, 2)
    moments = Moments(block_rows=16).update(X.astype(before), {"y": y})
    kept, undisturbed = state_bytes(moments), moments.copy()
    spoilt = X.astype(after)
    spoilt[3, 1] = value
    with pytest.raises(NonFiniteError):
        moments.update(spoilt, {"y": pandas.DataFrame(y, columns=["age", "height"])})
    assert state_bytes(moments) == kept
    for state in (moments, undisturbed):
        state.update(2 * X.astype(before), {"y": pandas.DataFrame(y, columns=["a", "b"])})
    assert state_bytes(moments) == state_bytes(undisturbed)


def test_readers_of_empty_moments() -> None:
    moments = Moments()
    assert (moments.n_rows, moments.n_features, moments.weight) == (0, None, 0.0)
    assert moments.variables == {}
    assert "empty" in repr(moments)
    with pytest.raises(NotEnoughDataError, match="update"):
        moments.mean  # noqa: B018
    with pytest.raises(NotEnoughDataError, match="update"):
        moments.covariance()
    with pytest.raises(UnknownVariableError, match="none"):
        moments.cross_covariance("z")


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    moments = Moments().update(normal(3, 2), {"gender": [0, 1, 0], "age": np.arange(3.0)})
    for read in (moments.cross_covariance, moments.classes, moments.class_counts):
        with pytest.raises(UnknownVariableError, match="'gender', 'age'"):
            read("sex")
    for read in (moments.classes, moments.class_counts):
        with pytest.raises(LabelError, match="continuous"):
            read("age")


@pytest.mark.parametrize("block_rows", [0, -1, 2.5, "8", True, [4], 10**25])
def test_block_rows_must_be_a_positive_integer(block_rows: Any) -> None:
    with pytest.raises(InputError, match="block_rows"):
        Moments(block_rows=block_rows)


def test_repr_says_what_is_inside() -> None:
    moments = Moments().update(normal(1200, 3), {"z": np.arange(1200) % 4, "y": normal(1200, 2)})
    assert "1,200 rows" in repr(moments)
    assert "3 features" in repr(moments)
    assert "'z': 4 classes" in repr(moments)
    assert "'y': continuous (2 columns)" in repr(moments)
    assert moments.nbytes >= 3 * 3 * 8


# --- faults in the middle of an update -----------------------------------------------------------


class Boom(Exception):
    pass


def failing(function: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
    """The function, but its call number `at` raises."""
    calls = iter(range(10**9))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise error
        return function(*args, **kwargs)

    return call


def labelled(n: int, seed: int, dtype: Any = np.float32) -> tuple[Float, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3)).astype(dtype)
    return X, {"z": rng.integers(0, 3, n), "y": rng.normal(size=n)}


@pytest.mark.parametrize("waiting", [0, 5])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("kernel", ["reduce_chunks", "centre_columns", "syrk_f32_out"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
def test_a_kernel_that_raises_leaves_an_update_of_many_blocks_absent(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, kernel: str, at: int, waiting: int
) -> None:  # fmt: skip
    first, second = labelled(waiting, 1), labelled(60, 2)
    moments = Moments(block_rows=8)
    module = blas if kernel == "syrk_f32_out" else row_kernels
    monkeypatch.setattr(row_kernels, "wide", lambda: kernel == "reduce_chunks")
    before = state_bytes(moments.update(*first))
    with monkeypatch.context() as patch:
        patch.setattr(module, kernel, failing(getattr(module, kernel), at, error))
        with pytest.raises(type(error)):
            moments.update(*second)
    assert state_bytes(moments) == before
    check(moments.update(*second), Rows.of(*first) + Rows.of(*second))


def test_an_addition_that_fails_is_told_by_every_later_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not by a wrong number. Only BLAS can fail so late, where it adds float64 products itself."""
    X, labels = labelled(8, 1, np.float64)
    del labels["y"]  # its products are computed beforehand, by the same function
    monkeypatch.setattr(row_kernels, "wide", lambda: False)
    moments = Moments(block_rows=8).update(X, labels)
    moments.save(tmp_path / "checkpoint")
    with monkeypatch.context() as patch:
        patch.setattr(blas, "syrk_f64_into", failing(blas.syrk_f64_into, 0, MemoryError()))
        with pytest.raises(MemoryError):
            moments.update(X, labels)
    calls: list[Callable[[], Any]] = [
        lambda: moments.update(X, labels), lambda: moments.update(X[:1], labels={"z": [0]}),
        lambda: moments.mean, lambda: moments.n_rows, lambda: moments.weight, moments.covariance,
        moments.copy, lambda: moments.classes("z"), lambda: moments + Moments(),
        lambda: repr(moments), lambda: moments - moments, lambda: Moments() + moments,
        lambda: pickle.dumps(moments), lambda: moments.save(tmp_path / "other"),
        moments.factored, lambda: moments.variables, lambda: moments.n_features,
        lambda: moments.nbytes,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(SplinceError, match="accumulate again, or load the checkpoint"):
            call()
    check(Moments.load(tmp_path / "checkpoint"), Rows.of(X, labels))


class FaultyNumpy:
    """NumPy whose n-th allocation fails."""

    ALLOCATING = frozenset(
        ["append", "arange", "array", "asarray", "ascontiguousarray", "asfortranarray", "bincount",
         "concatenate", "cumsum", "diff", "empty", "flatnonzero", "full", "ones", "outer", "sqrt",
         "stack", "where", "zeros"]
    )  # fmt: skip

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        return self._wrapped(value) if name in self.ALLOCATING else value

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                raise MemoryError("injected")
            return function(*args, **kwargs)

        return call


def faults(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> Iterator[int]:
    """Let every allocation of `act` fail in turn, until it succeeds."""

    for at in range(500):
        faulty = FaultyNumpy(at)
        with monkeypatch.context() as patch:
            for module in FAULTY:
                patch.setattr(module, "np", faulty)
            try:
                act()
            except MemoryError:
                pass
            else:
                assert at > 1, "no fault was injected"
                return
        yield at
    pytest.fail("still failing after 500 allocations")


FAULTY = accumulator, reducing, state_module, variables
FAULTS = {
    # block size, rows before, rows of the update that fails
    "first update waits": (8, 0, 3),
    "first update is one block": (8, 0, 8),
    "update waits": (8, 9, 3),
    "update fills the block": (8, 5, 3),
    "update is one block": (8, 16, 8),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weight", [None, 7.0])
@pytest.mark.parametrize("case", FAULTS)
def test_memory_that_runs_out_leaves_the_state_as_it_was(
    monkeypatch: pytest.MonkeyPatch, case: str, weight: float | None, dtype: Any
) -> None:
    """Every allocation of an update of at most one block fails in turn."""
    size, n_before, n = FAULTS[case]
    first, second = labelled(n_before, 1, dtype), labelled(n, 2, dtype)
    second[1]["new"] = ["u"] * n
    second[1]["z"] = np.full(n, 9)
    weights = None if weight is None else np.full(n, weight)
    model = Rows.of(*first) + Rows.of(*second, weights)
    current = [Moments(block_rows=size).update(*first)]
    before = state_bytes(current[0])
    for at in faults(monkeypatch, lambda: current[0].update(*second, sample_weight=weights)):
        moments = current[0]
        assert state_bytes(moments) == before, f"allocation {at}"
        # Codes and weights that were written beyond the buffered rows are overwritten.
        other = labelled(4, 3)
        check(moments.update(*other), Rows.of(*first) + Rows.of(*other))
        current[:] = [Moments(block_rows=size).update(*first)]
    check(current[0], model)


def test_memory_that_runs_out_while_a_dtype_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    X64, X32 = normal(12, 3), normal(9, 3, np.float32, seed=1)
    start = Moments(block_rows=4).update(X64)
    current, undisturbed = [start.copy()], state_bytes(start.copy().update(X64))
    for _ in faults(monkeypatch, lambda: current[0].update(X32[:1])):
        # float64 rows are not multiplied in the buffer that was meant for float32.
        assert state_bytes(current[0].update(X64)) == undisturbed
        check(current[0].update(X32), Rows.of(X64) + Rows.of(X64) + Rows.of(X32))
        current[:] = [start.copy()]


def test_merging_that_runs_out_of_memory_changes_neither_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = labelled(10, 1), labelled(7, 2)
    second[1]["z"] = np.full(7, 5)
    a, b = Moments(block_rows=4).update(*first), Moments(block_rows=4).update(*second)

    def act() -> None:
        nonlocal a
        a += b

    for _ in faults(monkeypatch, act):
        check(a, Rows.of(*first))
        check(b, Rows.of(*second))
    check(a, Rows.of(*first) + Rows.of(*second))


@pytest.mark.parametrize("at", [1, 3, 5])
def test_control_c_leaves_an_update_whole_or_absent(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    X, labels = labelled(43, 1)
    more = X[:4], {k: v[:4] for k, v in labels.items()}
    moments = Moments(block_rows=8).update(*more)
    before, handler = state_bytes(moments), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_reductions(patch, at)
        with pytest.raises(KeyboardInterrupt):
            moments.update(X, labels)
    assert signal.getsignal(signal.SIGINT) is handler
    assert state_bytes(moments) == before
    moments.update(X, labels)
    interrupt_reductions(monkeypatch, 1)  # of the rows that wait, by a read
    with pytest.raises(KeyboardInterrupt):
        moments.covariance()
    check(moments, Rows.of(*more) + Rows.of(X, labels))


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
@pytest.mark.parametrize("kind", ["full", "diag"])
def test_rows_of_two_dtypes_keep_the_digits_of_each(first: Any, second: Any, kind: Any) -> None:
    """Rows wait together in the wider dtype: the digits of neither are cut."""
    parts = [normal(30, 4, seed=i).astype(t) for i, t in enumerate((first, second))]
    rows = np.concatenate([part.astype(np.float64) for part in parts])
    z = np.arange(60) % 3
    moments = Moments(covariance_type=kind)
    for i, part in enumerate(parts):
        moments.update(part, {"z": z[30 * i : 30 * i + 30]})
    one_by_one = Moments(covariance_type=kind)
    for i in range(60):
        one_by_one.update(parts[i // 30][i % 30 : i % 30 + 1], {"z": z[i : i + 1]})
    centred = rows - rows.mean(axis=0)
    cross = centred.T @ (np.eye(3)[z] - np.eye(3)[z].mean(axis=0)) / 60
    for found in (moments, one_by_one):
        # Sums of 60 rows in float64, whatever they came in; float32 would cost 1e-8.
        np.testing.assert_allclose(found.mean, rows.mean(axis=0), atol=1e-14)
        np.testing.assert_allclose(found.cross_covariance("z", ddof=0), cross, atol=1e-14)


def test_every_reader_sees_the_rows_that_wait() -> None:
    X = normal(5, 2)
    labels: dict[str, Any] = {"z": list("abaab"), "y": np.arange(5.0)}
    readers: dict[str, Callable[[Moments], Any]] = {
        "weight": lambda m: m.weight,
        "n_rows": lambda m: m.n_rows,
        "mean": lambda m: m.mean,
        "covariance": lambda m: m.covariance(),
        "cross": lambda m: m.cross_covariance("z"),
        "cross of columns": lambda m: m.cross_covariance("y"),
        "counts": lambda m: list(m.class_counts("z").values()),
        "sum": lambda m: (m + Moments()).covariance(),
    }
    for name, read in readers.items():
        staged = Moments(block_rows=100).update(X[:4], {k: v[:4] for k, v in labels.items()})
        staged.update(X[4:], {k: v[4:] for k, v in labels.items()})
        direct = Moments(block_rows=1).update(X, labels)
        np.testing.assert_allclose(read(staged), read(direct), rtol=1e-12, err_msg=name)


# --- whole sources -------------------------------------------------------------------------------


def blocks_of(n: int = 10) -> list[tuple[Float, dict[str, Any]]]:
    return [labelled(13 + i, i) for i in range(n)]


def test_from_blocks_is_the_loop_of_updates() -> None:
    blocks = blocks_of()
    whole = Moments.from_blocks(blocks, block_rows=32)
    by_hand = Moments(block_rows=32)
    for block in blocks:
        by_hand.update(*block)
    assert state_bytes(whole) == state_bytes(by_hand)


@pytest.mark.parametrize("stop", range(0, 10, 3))
def test_a_run_that_was_interrupted_resumes_to_the_same_bytes(tmp_path: Path, stop: int) -> None:
    checkpoint = tmp_path / "run.moments"

    class Blocks:
        """A list that can break off."""

        def __init__(self, stop: int | None) -> None:
            self.stop = stop

        def __iter__(self) -> Iterator[Any]:
            for i, block in enumerate(blocks_of()):
                if i == self.stop:
                    raise Boom
                yield block

    with pytest.raises(Boom):
        Moments.from_blocks(
            Blocks(stop), checkpoint=checkpoint, checkpoint_seconds=0, block_rows=32
        )
    resumed = Moments.from_blocks(Blocks(None), checkpoint=checkpoint, block_rows=32)
    assert state_bytes(resumed) == state_bytes(Moments.from_blocks(Blocks(None), block_rows=32))
    # Finished: nothing is read twice.
    again = Moments.from_blocks(Blocks(None), checkpoint=checkpoint, block_rows=32)
    assert state_bytes(again) == state_bytes(resumed)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.moments"
    Moments.from_blocks(blocks_of(), checkpoint=checkpoint)
    kept = checkpoint.read_bytes()
    for arguments in ({"block_rows": 7}, {"kinds": {"z": "classes"}}, {"joint": [("z", "w")]}):
        with pytest.raises(FileFormatError, match="delete the checkpoint"):
            Moments.from_blocks(blocks_of(), checkpoint=checkpoint, **arguments)
    with pytest.raises(FileFormatError, match="delete the checkpoint"):
        Moments.from_blocks(tuple(blocks_of()), checkpoint=checkpoint)
    Moments().update(*blocks_of()[0]).save(checkpoint)  # a state, but of no stream
    with pytest.raises(FileFormatError):
        Moments.from_blocks(blocks_of(), checkpoint=checkpoint)
    checkpoint.write_bytes(kept[:-3])
    with pytest.raises(FileFormatError):
        Moments.from_blocks(blocks_of(), checkpoint=checkpoint)


# --- many label columns, such as indicators -------------------------------------------------------

N, D, K = 1300, 40, 12
INDICATORS = ("every row", "rows of zeros", "missing rows")


def indicators(case: str, n: int = N, k: int = K) -> Float:
    """Indicators of classes, of which the last has no rows and the first has many."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, k - 1, n) * rng.integers(0, 2, n)
    Z: Float = np.eye(k)[codes]
    if case == "rows of zeros":  # a first dummy that was dropped
        Z[:, 0] = 0.0
    if case == "missing rows":
        Z[::7] = np.nan
    return Z


@pytest.mark.parametrize("case", INDICATORS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_indicators_equal_two_passes_over_the_rows(case: str, weighted: bool, dtype: Any) -> None:
    """Columns of indicators, of float32 rows too, keep the digits that class codes keep."""
    Z, X = indicators(case), normal(N, D, dtype, seed=1)
    weight = np.random.default_rng(3).random(N) + 0.2 if weighted else None
    given = [tuple(map(float, row)) if not np.isnan(row[0]) else None for row in Z]
    w = np.ones(N) if weight is None else weight
    rows = Rows(X.astype(np.float64), w, {"z": given}, narrow=dtype is np.float32)
    moments = Moments(block_rows=300).update(X, {"z": Z}, sample_weight=weight)
    check(moments, rows)
    first, second = (
        Moments(block_rows=300).update(
            X[cut], {"z": Z[cut]}, sample_weight=None if weight is None else weight[cut]
        )
        for cut in (slice(801), slice(801, None))
    )
    check(first + second, rows)
    check(moments - second, rows.take(slice(801)), rows)


def test_constant_columns_have_no_deviation() -> None:
    Z = np.zeros((N, K))
    Z[:, 4] = 1.0
    weight = np.random.default_rng(0).random(N) + 1e-3
    X = normal(N, D, seed=1).astype(np.float32)
    moments = Moments().update(X[:700], {"z": Z[:700]}, sample_weight=weight[:700])
    moments.update(X[700:], {"z": Z[700:]}, sample_weight=weight[700:])
    assert moments.mean.shape == (D,)  # merges the rows that wait
    sums = cast(ColumnSums, moments._accumulator.variables["z"])
    for name in ("z_sum", "squares", "products"):
        assert (getattr(sums, name) == 0.0).all(), name
    assert (sums.deviations() == 0.0).all()


def test_a_stretch_of_missing_labels_fills_a_block(tmp_path: Path) -> None:
    X, Z = normal(90, 5), np.eye(9)[np.arange(90) % 9]
    Z[30:60] = np.nan
    moments = Moments(block_rows=30).update(X, {"z": Z})
    given = [None if np.isnan(row[0]) else tuple(map(float, row)) for row in Z]
    check(moments, Rows(X, np.ones(90), {"z": given}))
    moments.save(tmp_path / "m.safetensors")
    assert state_bytes(Moments.load(tmp_path / "m.safetensors")) == state_bytes(moments)


def test_erasers_are_those_of_class_codes() -> None:
    Z, X = indicators("every row"), normal(N, D, seed=1)
    codes = Z.argmax(axis=1)
    X[:, 0] += codes
    by_columns = sf.leace(Moments().update(X, {"z": Z}), erase="z").matrix()
    by_codes = sf.leace(Moments().update(X, {"z": codes}), erase="z").matrix()
    # Both solve the same problem of condition below 1e3.
    assert np.abs(by_columns - by_codes).max() <= 1e3 * 8 * N * U64
    assert np.abs(by_codes - np.eye(D)).max() > 0.1


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
    X[::3, 1] = 0.0
    negative = X.copy()
    negative[::3, 1] = -0.0
    a, b = (Moments().update(x, {"z": z}) for x in (X, negative))
    np.testing.assert_array_equal(a.covariance(), b.covariance())
    np.testing.assert_array_equal(sf.leace(a, erase="z").matrix(), sf.leace(b, erase="z").matrix())
    scores = Moments().update(X, {"s": np.where(z, 0.0, -0.0)})
    with pytest.raises(sf.exceptions.ConstantVariableError):
        sf.leace(scores, erase="s")
    assert Moments(kinds={"s": "classes"}).update(X, {"s": np.where(z, 0.0, -0.0)}).classes(
        "s"
    ) == (0,)


def test_buffered_float32_rows_are_widened_by_full_and_by_sparse_blocks() -> None:
    """Work memory is reserved for each dtype, also after a copy, which has none."""
    rng = np.random.default_rng(0)
    narrow, wide = rng.normal(size=(6, 5)).astype(np.float32), rng.normal(size=(20, 5))
    for parameters, more in (
        ({}, wide), ({"covariance_type": "diag"}, wide),
        ({"covariance_type": "diag"}, scipy.sparse.csr_matrix(wide)),
    ):  # fmt: skip
        moments = Moments(block_rows=8, **parameters).update(narrow).copy()
        moments.update(more)
        assert moments.n_rows == 26
        mean = np.concatenate([narrow, wide]).mean(axis=0)
        np.testing.assert_allclose(moments.mean, mean, rtol=0, atol=1e-15)
    # More float32 rows fit in a block than float64 rows.
    d = 4096
    moments = Moments().update(rng.standard_normal((3000, d), dtype=np.float32)).copy()
    assert moments.update(rng.normal(size=(5, d))).n_rows == 3005
