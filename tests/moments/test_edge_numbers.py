"""Numbers at the edge: extreme scales, one feature, few rows, half precision, byte orders."""

from __future__ import annotations

import numpy as np
import pytest
from entangled import drawn, gap

import splince_fast as sf
from splince_fast import Moments

EPS = float(np.finfo(np.float64).eps)


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
