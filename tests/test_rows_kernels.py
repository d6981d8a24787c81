"""Row kernels and BLAS verbs against their twins in plain NumPy, number by number."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conftest import U32, U64
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from splince_fast import _state
from splince_fast._kernels import blas, reference
from splince_fast._kernels import rows as kernels

Array = np.ndarray[Any, Any]


def reduced(
    rows: Array, weight: Array, origin: Array, codes: Array, n_codes: int, values: Array,
    part_rows: int, bounds: list[int],
) -> dict[str, Array]:  # fmt: skip
    """Call the centring kernel on stripes of columns; outputs begin as NaN."""
    n, d = rows.shape
    starts = np.arange(0, n, part_rows)
    unit = np.ones(n) if not weight.size else weight
    parts = np.add.reduceat(unit, starts)
    out = {
        "centred": np.full((n + len(starts), d), np.nan, rows.dtype),
        "peak": np.full(d, np.nan),
        "deviation": np.full(d, np.nan),
        "class_sums": np.full((n_codes, d), np.nan),
        "products": np.full((len(values), d), np.nan),
    }
    for first, last in pairwise(bounds):
        kernels.centre_block(
            rows, weight, np.sqrt(weight), origin, codes, values, part_rows, parts, first, last,
            *out.values(),
        )  # fmt: skip
    return out


class Block:
    """A random block, with everything the kernel takes."""

    def __init__(
        self, n: int, d: int, dtype: Any = np.float64, *, weighted: bool = False,
        variables: int = 0, classes: int = 3, columns: int = 0, offset: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.rows = (rng.normal(size=(n, d)) + offset).astype(dtype)
        self.weight = rng.uniform(0.1, 3, n) if weighted else np.empty(0)
        self.origin = self.rows[: min(n, 5)].astype(np.float64).mean(axis=0)
        self.codes = rng.integers(-1, classes, (variables, n)).astype(np.intp)
        self.codes += np.arange(variables)[:, None] * classes * (self.codes >= 0)
        self.n_codes = variables * classes
        self.values = rng.normal(size=(columns, n)) * (rng.random((columns, n)) < 0.8)

    def reduced(self, part_rows: int, bounds: list[int] | None = None) -> dict[str, Array]:
        return reduced(
            self.rows, self.weight, self.origin, self.codes, self.n_codes, self.values, part_rows,
            bounds or [0, self.rows.shape[1]],
        )  # fmt: skip

    def check(self, part_rows: int) -> None:
        """Against the twin, to N u sum |terms|."""
        found = self.reduced(part_rows)
        rows = self.rows.astype(np.float64)
        twin = reference.centre_block(
            self.rows, self.weight, self.origin, self.codes, self.values, self.n_codes
        )
        scatter, deviation, class_sums, products = twin
        n, (_, d) = len(rows) + 8, rows.shape
        w = self.weight if self.weight.size else np.ones(len(rows))
        size = np.abs(rows - self.origin).max(axis=0) + U64 * np.abs(rows).max(axis=0)
        slack = 8 * n * U64 * w.sum() * size
        assert (np.abs(found["deviation"] - deviation) <= slack).all()
        assert (np.abs(found["class_sums"] - class_sums) <= slack).all()
        shares = np.abs(self.values).sum(axis=1, keepdims=True)
        assert (np.abs(found["products"] - products) <= 8 * n * U64 * shares * size).all()
        centred = found["centred"].astype(np.float64)
        u = U32 if self.rows.dtype == np.float32 else U64
        bound = 8 * (u + n * U64) * w.sum() * np.outer(size, size)
        assert (np.abs(centred.T @ centred - scatter) <= bound).all()
        largest = np.abs(centred).max(axis=0)
        np.testing.assert_allclose(found["peak"], largest, rtol=4 * u, atol=1e-45)
        assert centred.shape == (len(rows) + -(-len(rows) // part_rows), d)


# --- centring ------------------------------------------------------------------------------------


@given(
    n=st.integers(1, 70),
    d=st.integers(1, 40),
    dtype=st.sampled_from([np.float32, np.float64]),
    weighted=st.booleans(),
    variables=st.integers(0, 3),
    columns=st.integers(0, 3),
    part_rows=st.sampled_from([1, 2, 7, 64, 512]),
    offset=st.sampled_from([0.0, 1.0, 1e4]),
    seed=st.integers(0, 999),
)
def test_centring_equals_its_twin(
    n: int, d: int, dtype: Any, weighted: bool, variables: int, columns: int, part_rows: int,
    offset: float, seed: int,
) -> None:  # fmt: skip
    Block(
        n, d, dtype, weighted=weighted, variables=variables, columns=columns, offset=offset,
        seed=seed,
    ).check(part_rows)  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "d"), [(4096, 33), (1025, 130), (513, 1), (1, 700)])
def test_centring_at_the_sizes_it_is_used(n: int, d: int, dtype: Any, weighted: bool) -> None:
    block = Block(n, d, dtype, weighted=weighted, variables=2, classes=40, columns=2, offset=10.0)
    block.check(_state.rows_per_part(d, np.dtype(dtype)))


@given(
    cuts=st.lists(st.integers(0, 97), max_size=6),
    dtype=st.sampled_from([np.float32, np.float64]),
    weighted=st.booleans(),
)
def test_stripes_of_columns_give_the_same_bytes(
    cuts: list[int], dtype: Any, weighted: bool
) -> None:
    """However columns are dealt to threads: each number comes from the same operations."""
    block = Block(90, 97, dtype, weighted=weighted, variables=2, columns=2, offset=3.0)
    whole = block.reduced(32)
    striped = block.reduced(32, sorted({0, 97, *cuts}))
    for name, array in whole.items():
        assert array.tobytes() == striped[name].tobytes(), name


def test_rows_that_may_not_be_written() -> None:
    block = Block(40, 9, np.float32, variables=1, columns=1)
    for array in (block.rows, block.origin, block.codes, block.values):
        array.flags.writeable = False
    block.check(16)


def test_the_twin_is_not_the_kernel() -> None:
    """A control: the comparison sees a lost row, a lost class and a wrong weight."""
    block = Block(50, 4, weighted=True, variables=1, columns=1)
    for spoil in ("rows", "codes", "values", "weight"):
        spoilt = Block(50, 4, weighted=True, variables=1, columns=1)
        found = block.reduced(16)
        if spoil == "rows":
            spoilt.rows = spoilt.rows.copy()
            spoilt.rows[17] = 0
        elif spoil == "codes":
            spoilt.codes[:, 3] = -1 if spoilt.codes[0, 3] >= 0 else 0
        elif spoil == "values":
            spoilt.values[:, 3] += 1
        else:
            spoilt.weight[3] *= 1.5
        other = spoilt.reduced(16)
        assert any(not np.allclose(found[k], other[k], rtol=1e-9) for k in found), spoil


# --- reducing a block: the choice of precision ---------------------------------------------------


@pytest.mark.parametrize("d", [1, 31, 300, 600, 1100])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e20])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_block_reduces_in_the_precision_that_holds_it(
    d: int, scale: float, weighted: bool
) -> None:
    """Parts are shorter for wide float64 rows: the buffer has to have room for their means."""
    n = 700
    block = Block(n, d, weighted=weighted, variables=1, columns=1)
    rows = (block.rows * scale).astype(np.float32)
    origin = rows[:5].astype(np.float64).mean(axis=0)
    buffer = np.full((_state.buffer_rows(n, d, rows.dtype), d), np.nan, np.float32)
    found = _state.reduce_block(
        rows, block.weight, origin, block.codes, block.n_codes, block.values, buffer
    )
    assert found.centred.dtype == (np.float32 if scale == 1.0 else np.float64)
    centred = found.centred[:, :40].astype(np.float64) / scale
    twin = reference.centre_block(
        (rows[:, :40] / np.float64(scale)), block.weight, origin[:40] / scale, block.codes,
        block.values, block.n_codes,
    )  # fmt: skip
    root = np.sqrt(np.diag(twin[0]))
    assert np.max(np.abs(centred.T @ centred - twin[0]) / np.outer(root, root)) <= 1e-6
    np.testing.assert_allclose(found.class_sums[:, :40] / scale, twin[2], atol=1e-9)
    np.testing.assert_allclose(found.products[:, :40] / scale, twin[3], atol=1e-9)


@given(st.integers(1, 5000), st.sampled_from([np.float32, np.float64]), st.integers(1, 9000))
def test_a_buffer_has_room_for_rows_and_the_means_of_their_parts(
    width: int, dtype: Any, n: int
) -> None:
    dtype = np.dtype(dtype)
    part = _state.rows_per_part(width, dtype)
    assert 64 <= part <= 512
    assert _state.buffer_rows(n, width, dtype) == n + int(np.ceil(n / part))


# --- finding what cannot be used -----------------------------------------------------------------


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=20),
        elements=st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1e-45, 1.0])),
    )
)
def test_finite_squares_are_recognised(X: Array) -> None:
    with np.errstate(all="ignore"):
        sums = (X.astype(np.float64) ** 2).sum(axis=1)
    for i in range(len(X)):
        assert kernels.squares_finite(X, i, i + 1) == np.isfinite(sums[i])
    assert kernels.squares_finite(X, 0, len(X)) == np.isfinite(sums).all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 1.5e154, -1e300])
@pytest.mark.parametrize("d", [1, 2, 15, 16, 17, 64, 1000])
def test_one_bad_number_is_found_wherever_it_is(d: int, value: float) -> None:
    X = np.ones((3, d))
    for j in {0, d // 2, d - 1}:
        X[1, j] = value
        assert not kernels.squares_finite(X, 0, 3)
        assert kernels.squares_finite(X, 0, 1)
        assert kernels.squares_finite(X, 2, 3)
        X[1, j] = 1
    assert kernels.squares_finite(X, 0, 3)
    assert kernels.squares_finite(np.full((2, 3), 3e38, np.float32), 0, 2)


# --- applying ------------------------------------------------------------------------------------


@given(
    n=st.integers(0, 30),
    d=st.integers(1, 60),
    rank=st.integers(0, 7),
    dtype=st.sampled_from([np.float32, np.float64]),
    in_place=st.booleans(),
    cut=st.floats(0, 1),
    seed=st.integers(0, 999),
)
def test_applying_equals_its_twin(
    n: int, d: int, rank: int, dtype: Any, in_place: bool, cut: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(n, d)) + 5).astype(dtype)
    left, right = rng.normal(size=(rank, d)), rng.normal(size=(rank, d))
    bias = rng.normal(size=rank)
    twin = reference.apply_rows(rows, left, right, bias)
    size = np.abs(rows.astype(np.float64)) @ np.abs(right.T) + np.abs(bias)
    slack = 8 * (d + rank + 4) * U64 * (np.abs(rows) + size @ np.abs(left))
    if dtype == np.float32:
        slack += 2 * U32 * np.abs(twin)
    out = rows if in_place else np.full_like(rows, np.nan)
    stop = round(cut * n)
    for first, last in ((0, stop), (stop, n)):
        kernels.apply_rows(rows, left, right, bias, first, last, out)
    assert (np.abs(out - twin) <= slack).all()


# --- BLAS verbs ----------------------------------------------------------------------------------

WIDTHS = [1, 2, 3, 17, 64, 65, 130, 200]


def symmetric(d: int, seed: int = 0) -> Array:
    square = np.random.default_rng(seed).normal(size=(d, d))
    return np.asfortranarray(square + square.T)


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("n", [0, 1, 7, 300])
def test_products_of_rows(n: int, d: int) -> None:
    rows = np.random.default_rng(d).normal(size=(n, d))
    scatter = symmetric(d)
    upper = np.triu(scatter, 1)
    expected = np.tril(scatter + rows.T @ rows)
    slack = 4 * (n + 2) * U64 * (np.abs(scatter) + np.abs(rows).T @ np.abs(rows))
    blas.syrk_f64_into(rows, scatter)
    assert (np.abs(np.tril(scatter) - expected) <= slack).all()
    np.testing.assert_array_equal(np.triu(scatter, 1), upper)  # never touched
    narrow = rows.astype(np.float32)
    product = np.full((d, d), 7, np.float32, order="F")
    blas.syrk_f32_out(narrow, product)
    if n:
        size = np.abs(narrow).T @ np.abs(narrow)
        twin = narrow.astype(np.float64).T @ narrow.astype(np.float64)
        assert (np.abs(np.tril(product - twin)) <= 4 * (n + 2) * U32 * size).all()
        assert (product[np.triu_indices(d, 1)] == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("d", WIDTHS)
def test_adding_what_was_multiplied(d: int, sign: float, dtype: Any) -> None:
    scatter, product = symmetric(d), np.asfortranarray(symmetric(d, 1), dtype=dtype)
    gap, coefficient = np.random.default_rng(2).normal(size=d), 0.37
    expected = scatter + sign * product.astype(np.float64) + coefficient * np.outer(gap, gap)
    whole, pieces = scatter.copy(order="F"), scatter.copy(order="F")
    half = (d + 1) // 2
    blas.add_lower(whole, product, sign, gap, coefficient, 0, half)
    slack = 8 * U64 * (np.abs(scatter) + np.abs(product) + np.abs(np.outer(gap, gap)))
    assert (np.abs(np.tril(whole - expected)) <= slack).all()
    np.testing.assert_array_equal(np.triu(whole, 1), np.triu(scatter, 1))
    for first, last in ((0, half // 3), (half // 3, half - 1), (max(half - 1, half // 3), half)):
        if first <= last:
            blas.add_lower(pieces, product, sign, gap, coefficient, first, last)
    if half > 1:
        assert pieces.tobytes() == whole.tobytes()


@pytest.mark.parametrize("d", WIDTHS)
def test_rank_one_and_mirror(d: int) -> None:
    scatter = symmetric(d)
    v = np.random.default_rng(3).normal(size=d)
    expected = scatter - 2.5 * np.outer(v, v)
    blas.rank_one_lower(scatter, v, -2.5)
    np.testing.assert_allclose(np.tril(scatter), np.tril(expected), rtol=1e-14, atol=1e-14)
    scatter[np.triu_indices(d, 1)] = np.nan
    lower = np.tril(scatter).copy()
    blas.mirror_lower(scatter)
    np.testing.assert_array_equal(scatter, scatter.T)
    np.testing.assert_array_equal(np.tril(scatter), lower)


@pytest.mark.parametrize(
    ("rows", "square"),
    [
        (np.ones((3, 2), np.float32), np.zeros((2, 2), order="F")),
        (np.ones((3, 2)), np.zeros((2, 2), np.float32, order="F")),
        (np.asfortranarray(np.ones((3, 2))), np.zeros((2, 2), order="F")),
        (np.ones((3, 2)), np.zeros((2, 2))),
    ],
    ids=["rows too narrow", "scatter too narrow", "rows in F order", "scatter in C order"],
)
def test_verbs_refuse_another_dtype_or_order(rows: Array, square: Array) -> None:
    with pytest.raises((ValueError, TypeError)):
        blas.syrk_f64_into(rows, square)


def test_a_provider_must_bring_every_routine() -> None:
    """No call may ever mix two libraries: an incomplete table changes nothing."""
    rows = np.random.default_rng(0).normal(size=(20, 6))
    before, after = np.zeros((6, 6), order="F"), np.zeros((6, 6), order="F")
    blas.syrk_f64_into(rows, before)
    with pytest.raises(KeyError):
        blas.use_routines({"dsyrk": 1, "ssyrk": 1, "dgemm": 1})
    blas.syrk_f64_into(rows, after)
    assert before.tobytes() == after.tobytes()


# --- one decorator owns the options --------------------------------------------------------------


def test_every_kernel_is_compiled_and_releases_the_interpreter() -> None:
    compiled = [v for v in vars(kernels).values() if hasattr(v, "py_func")]
    compiled += [
        c for v in vars(kernels).values() for c in _closed_over(v) if hasattr(c, "py_func")
    ]
    assert len(compiled) >= 3
    for kernel in compiled:
        assert kernel.targetoptions["nogil"]
        assert "nnan" not in kernel.targetoptions["fastmath"]
        assert "ninf" not in kernel.targetoptions["fastmath"]


def _closed_over(value: Any) -> list[Any]:
    """What the guards of conftest.py wrap."""
    return (
        list(inspect.getclosurevars(value).nonlocals.values()) if inspect.isfunction(value) else []
    )


def test_the_cache_may_be_unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only installation without a home directory compiles once in each process."""
    import numba

    original = numba.njit

    def no_cache(*arguments: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return original(*arguments, **options)

    monkeypatch.setattr(numba, "njit", no_cache)

    def double(x: float) -> float:
        return 2 * x

    assert kernels._kernel(double)(4.0) == 8.0
