"""Erasing rows in C against the twin in plain NumPy, on every instruction set of this processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from naive_model import U32, U64

from splince_fast._kernels import row_kernels as kernels

Array = np.ndarray[Any, Any]

# Each instruction set in turn.
pytestmark = pytest.mark.usefixtures("level")


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


# --- applying ------------------------------------------------------------------------------------


@given(
    n=st.integers(0, 70),
    d=st.one_of(st.integers(1, 40), st.integers(120, 300), st.integers(1360, 1400)),
    rank=st.integers(0, 20),
    dtype=st.sampled_from([np.float32, np.float64]),
    in_place=st.booleans(),
    streamed=st.booleans(),
    cut=st.floats(0, 1),
    seed=st.integers(0, 999),
)
def test_applying_equals_its_twin(
    n: int, d: int, rank: int, dtype: Any, in_place: bool, streamed: bool, cut: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(n, d)) + 5).astype(dtype)
    left, right = rng.normal(size=(rank, d)), rng.normal(size=(rank, d))
    mean, shift = rng.normal(size=d), rng.normal(size=rank)
    factors = kernels.PackedFactors(left, right, mean, shift)
    wide = rows.astype(np.float64)
    twin = wide - ((wide - mean) @ right.T - shift) @ left
    size = np.abs(wide - mean) @ np.abs(right.T) + np.abs(shift)
    slack = 8 * (d + rank + 4) * U64 * (np.abs(rows) + size @ np.abs(left))
    if dtype == np.float32:
        slack += 2 * U32 * np.abs(twin)
    out = rows if in_place else np.full_like(rows, np.nan)
    stop = round(cut * n)
    for first, last in ((0, stop), (stop, n)):
        assert kernels.apply_rows(factors, rows, out, first, last, streamed) == -1
    assert (np.abs(out - twin) <= slack).all()


def in_table(rows: Array, layout: str) -> tuple[Array, Array]:
    """The same rows in memory of another layout, and that memory, 7 wherever no row lies."""
    n, d = rows.shape
    if layout in ("rows", "columns"):
        table = np.full((n, d), 7, rows.dtype, order="F" if layout == "columns" else "C")
    elif layout == "part of columns":
        table = np.full((n + 5, d + 2), 7, rows.dtype, order="F")
    elif layout == "part of rows":
        table = np.full((n + 5, d + 2), 7, rows.dtype)
    else:
        table = np.full((2 * n + 3, 3 * d), 7, rows.dtype)[::-1, ::-1]
    step = (2, 3) if layout == "every other, backwards" else (1, 1)
    start = 0 if layout in ("rows", "columns") else 1
    places = table[start : start + n * step[0] : step[0], -d * step[1] :: step[1]]
    places[...] = rows
    return places, table


@pytest.mark.parametrize("rank", [1, 3, 17])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    "layout", ["rows", "columns", "part of columns", "part of rows", "every other, backwards"]
)
def test_a_row_has_the_same_bits_in_every_layout(layout: str, dtype: Any, rank: int) -> None:
    """Whatever its neighbours hold, and wherever in a cache line the result begins.

    It is read, or read and written; nothing beside it is written.
    """
    rng = np.random.default_rng(rank)
    for n, d in ((75, 1), (1, 37), (5, 1371), (33, 37), (75, 130)):  # tiles, groups and their rests
        rows = rng.normal(size=(n, d)).astype(dtype)
        spoilt, kept = rows.copy(), np.arange(n) % 7 != 3
        spoilt[~kept] = np.nan
        left, right = rng.normal(size=(2, rank, d)) / d
        mean, shift = rng.normal(size=d), rng.normal(size=rank)
        factors, plain = kernels.PackedFactors(left, right, mean, shift), np.empty_like(rows)
        for i in range(n):
            assert kernels.apply_rows(factors, rows, plain, i, i + 1) == -1
        places, table = in_table(rows, layout)
        beside_nan, _ = in_table(spoilt, layout)
        _, expected = in_table(plain, layout)
        for offset in range(17):
            stop = offset + rows.size
            memory = np.full(stop + 20, 7, dtype)
            found = memory[offset:stop].reshape(n, d)
            for streamed in (False, True):
                kernels.apply_rows(factors, places, found, 0, n, streamed)
                assert found.tobytes() == plain.tobytes()
                kernels.apply_rows(factors, beside_nan, found, 0, n, streamed)
                assert found[kept].tobytes() == plain[kept].tobytes()
                assert np.isnan(found[~kept]).all()
            assert (memory[:offset] == 7).all()
            assert (memory[stop:] == 7).all()
        kernels.apply_rows(factors, places, places, 0, n)
        assert table.tobytes() == expected.tobytes()
    if dtype == np.float64:  # the control: sums over the features in another order have other bits
        turned = (np.ascontiguousarray(a[..., ::-1]) for a in (left, right, mean))
        backwards = kernels.PackedFactors(*turned, shift)
        kernels.apply_rows(backwards, rows[:, ::-1].copy(), found, 0, n)
        assert found[:, ::-1].tobytes() != plain.tobytes()


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_first_row_that_halves_cannot_hold(order: Any) -> None:
    """Of all groups; rows whose infinity was given are no such rows."""
    rows = np.ones((75, 20), np.float16, order=order)
    rows[3, 4], rows[[40, 60, 70]] = np.inf, 60000
    axes = np.ones((1, 20))
    factors = kernels.PackedFactors(-axes / 20, axes, np.zeros(20), np.zeros(1))  # x -> 2 x
    found = np.empty_like(rows)
    assert kernels.apply_rows(factors, rows, found, 0, 75) == 40
    assert np.isposinf(found[[40, 60, 70]]).all()
    assert kernels.apply_rows(factors, rows, found, 41, 75) == 60
    assert kernels.apply_rows(factors, rows, found, 0, 40) == -1


def test_halves_are_widened_as_numpy_does() -> None:
    """x - mean is exactly 0 where the mean is what NumPy makes of the halves."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)][None, :-1]  # an odd number of them
    mean = finite[0].astype(np.float64)
    right = 2.0**60 * (1 + np.arange(mean.size)[None] % 7)
    for place, step in ((0, 0.0), (77, 2.0**-24), (mean.size - 1, 2.0**-24)):
        mean[place] += step  # the controls: one of them is half an ulp of the least half away
        factors = kernels.PackedFactors(-np.ones_like(right), right, mean, np.zeros(1))
        found = np.empty_like(finite)
        row = kernels.apply_rows(factors, finite, found, 0, 1)
        if step:
            assert row == 0
            assert np.isinf(found).all()
        else:
            assert row == -1
            assert found.tobytes() == (finite + np.float16(0.0)).tobytes()
        mean[place] -= step


def rounded(values: Array) -> tuple[Array, bool]:
    """float32 values as float16: -0 - (-values) (0 - -1); whether one of them is lost."""
    nothing = np.zeros(values.size)
    with np.errstate(invalid="ignore"):  # NaN that signal
        left = -values.astype(np.float64)[None]
    factors = kernels.PackedFactors(left, nothing[None], nothing, -np.ones(1))
    found = np.empty((1, values.size), np.float16)
    given = np.full_like(found, -0.0)
    return found[0], kernels.apply_rows(factors, given, found, 0, 1) == 0


def test_halves_are_rounded_as_numpy_does() -> None:
    """All halves, all midpoints between two of them and their neighbours, and random bits."""
    wide = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(wide[np.isfinite(wide)])
    middle = finite[:-1] + (finite[1:] - finite[:-1]) / 2
    near = np.concatenate([finite, middle, np.float32([65519.996, 65520, 65536, 3e38])])
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    infinite = np.float32(np.inf)
    values = np.concatenate(
        [wide, near, -near, np.nextafter(near, infinite), np.nextafter(near, -infinite), bits]
    )
    found, any_lost = rounded(values)
    assert any_lost
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(found, expected)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(np.signbit(found)[number], np.signbit(expected)[number])
    lost = np.isfinite(values) & np.isinf(expected)
    assert not rounded(values[~lost])[1]
    for value in (values[lost].min(), values[lost].max(), np.abs(values[lost]).min()):
        for size in (1, 40):
            assert rounded(np.full(size, value))[1]


def test_factors_outlive_their_arrays_and_their_level(level: str) -> None:
    n, d = 5, 6
    arrays = np.ones((2, d)), np.ones((2, d)), np.zeros(d), np.zeros(2)
    factors = kernels.PackedFactors(*arrays)
    for array in arrays:
        array[:] = np.nan
    rows, found = np.ones((2, n, d))
    for other in kernels.levels():
        kernels.use_level(other)
        kernels.apply_rows(factors, rows, found, 0, n)
        assert (found == 1 - 2 * d).all()
    kernels.use_level(level)
