"""Applying an eraser: its matrix, its fixed points, rows of any dtype and layout, composition.

Each within the rounding bound of `erasers.bound`.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from erasers import DTYPES, LAYOUTS, bound, draw_eraser, exact, layer_dtype, result_dtype, rows_like
from hypothesis import given
from hypothesis import strategies as st
from naive_model import laid_out
from problems import EPS

import splince_fast as sf


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_orientation_of_the_matrix_and_the_offset(rank: int) -> None:
    eraser = draw_eraser(rank)
    P = eraser.matrix()
    assert np.linalg.norm(P - P.T) > 0.1
    x = rows_like("float64", 9, 7)
    np.testing.assert_allclose(eraser(x), x @ P.T + eraser.offset, atol=1e-11)
    np.testing.assert_allclose(P, np.eye(7) - eraser.left @ eraser.right.T, atol=1e-14)
    np.testing.assert_allclose(eraser.offset, eraser.mean - P @ eraser.mean, atol=1e-12)
    # Controls: the transpose, the mean as additive constant, no constant.
    for wrong in (x @ P + eraser.offset, x @ P.T + eraser.mean, x @ P.T):
        assert np.abs(eraser(x) - wrong).max() > 0.1


def test_the_mean_stays_and_twice_is_once() -> None:
    eraser = draw_eraser(3)
    mean = eraser.mean[None, :]
    np.testing.assert_allclose(eraser(mean), mean, atol=1e-13)
    x = rows_like("float64", 9, 7)
    np.testing.assert_allclose(eraser(eraser(x)), eraser(x), atol=1e-11)
    assert (eraser.rank, eraser.n_features, eraser.method) == (3, 7, "custom")
    assert eraser.report is None
    assert repr(eraser) == "Projection(custom, 7 features, rank 3 removed)"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 3])
def test_every_dtype_and_layout(rank: int, dtype: str, layout: str) -> None:
    eraser = draw_eraser(rank)
    x = rows_like(dtype, 13, 7, layout)
    before = x.tobytes()
    found = eraser(x)
    assert type(found) is np.ndarray
    assert found.dtype == result_dtype(dtype)
    assert x.tobytes() == before
    # Beyond float64 there are no more digits than the float64 inside has.
    error = np.abs((found.astype(np.longdouble) - exact(eraser, x)).astype(np.float64))
    assert (error <= bound(eraser, x, found)).all()
    if layout not in ("read-only", "broadcast"):
        out = laid_out(np.zeros_like(found), layout)
        assert eraser(x, out=out) is out
        np.testing.assert_array_equal(out, found)
        if x.dtype == found.dtype:
            assert eraser(x, out=x) is x
            np.testing.assert_array_equal(x, found)


@pytest.mark.parametrize("mutant", ["float32 coefficients", "no mean", "transpose"])
def test_control_the_error_bound_tells_wrong_arithmetic(mutant: str) -> None:
    eraser = draw_eraser(2, mean=1e3)
    x = (rows_like("float64", 50, 7) + eraser.mean).astype(np.float32)
    if mutant == "float32 coefficients":
        left, right, mean = (a.astype(np.float32) for a in (eraser.left, eraser.right, eraser.mean))
        wrong = x - (x @ right - mean @ right) @ left.T
    elif mutant == "no mean":
        wrong = (x - (x @ eraser.right) @ eraser.left.T).astype(np.float32)
    else:
        wrong = (x - ((x - eraser.mean) @ eraser.left) @ eraser.right.T).astype(np.float32)
    error = np.abs((wrong.astype(np.longdouble) - exact(eraser, x)).astype(np.float64))
    assert (error > bound(eraser, x, wrong)).any()


@pytest.mark.parametrize("size", [1e6, 1e9, 1e12])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_feature_of_large_mean_costs_the_others_no_digit(
    rank: int, size: float, tmp_path: Path
) -> None:
    """A time stamp or an id among the features; also after a file, a pickle and a composition."""
    rng = np.random.default_rng(0)
    d = 6
    x = rng.normal(size=(50, d))
    x[:, 0] = size + rng.integers(-3, 4, size=50)
    left, right = rng.normal(size=(2, d, rank))
    eraser = sf.Projection(left, right @ np.linalg.inv(left.T @ right), x.mean(axis=0))
    eraser.save(tmp_path / "e")
    again = pickle.loads(pickle.dumps(eraser))
    nothing = sf.Projection(np.zeros((d, 1)), np.zeros((d, 1)), eraser.mean)
    expected = exact(eraser, x).astype(np.float64)
    allowed = bound(eraser, x, x)
    for e in (eraser, sf.Projection.load(tmp_path / "e"), again, eraser @ nothing):
        assert (np.abs(e(x) - expected) <= allowed).all()
    # The control: the mean taken off after the product, as bias.
    late = x - (x @ eraser.right - eraser.mean @ eraser.right) @ eraser.left.T
    assert (np.abs(late - expected) > 4 * allowed)[:, 1:].any()


@given(seed=st.integers(0, 2**20), ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_composition_is_one_after_the_other(seed: int, ranks: tuple[int, int]) -> None:
    first, second = (draw_eraser(r, seed=seed + i) for i, r in enumerate(ranks))
    both = second @ first
    x = rows_like("float64", 9, 7, seed=seed)
    size = np.linalg.norm(first.matrix()) * np.linalg.norm(second.matrix()) * 100
    np.testing.assert_allclose(both(x), second(first(x)), atol=1e3 * EPS * size)
    np.testing.assert_allclose(
        both.matrix(), second.matrix() @ first.matrix(), atol=1e3 * EPS * size
    )
    np.testing.assert_allclose(x @ both.matrix().T + both.offset, both(x), atol=1e3 * EPS * size)
    assert both.method == "custom @ custom"


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int8"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_folding_into_the_next_layer(dtype: str, with_bias: bool) -> None:
    eraser = draw_eraser(2)
    rng = np.random.default_rng(2)
    weight = (8 * rng.normal(size=(4, 7))).astype(dtype)
    bias = (8 * rng.normal(size=4)).astype(dtype) if with_bias else None
    before = weight.copy()
    folded, shift = eraser.fold_into(weight, bias)
    assert folded.dtype == shift.dtype == layer_dtype(dtype)
    assert (folded.shape, shift.shape) == ((4, 7), (4,))
    np.testing.assert_array_equal(weight, before)
    x = rows_like("float64", 6, 7)
    wide = weight.astype(np.float64)
    expected = eraser(x) @ wide.T + (0.0 if bias is None else bias.astype(np.float64))
    # The layer is rounded once to its dtype.
    own = float(np.finfo(folded.dtype).eps)
    size = np.abs(x) @ np.abs(folded.astype(np.float64)).T + np.abs(shift.astype(np.float64))
    found = x @ folded.astype(np.float64).T + shift.astype(np.float64)
    assert (np.abs(found - expected) <= 2 * own * size + 1e-11).all()
    wrong = x @ (wide @ eraser.matrix().T).T
    assert np.abs(found - wrong).max() > 1
