"""Cases that other tools failed in the field; a docstring says in one line how they failed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from entangled import drawn, gap, normal
from naive_model import state_bytes
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import Moments, SplinceError

Float = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)


@pytest.mark.parametrize("method", [sf.leace, sf.sal, sf.mean_projection])
def test_c1_integers_of_one_dimension_are_classes(method: Any) -> None:
    """Labels 0, 1, 2 in one column were one number: rank 1, and the concept stayed readable."""
    z = np.arange(300) % 3
    X = normal(300, 5) + np.eye(3, 5)[z]
    P = method(Moments().update(X, {"z": z}), erase="z")
    assert P.rank == 2
    assert gap(P(X), z, 3) < 1e-12
    as_number = Moments(kinds={"z": "continuous"}).update(X, {"z": z})
    one = sf.leace(as_number, erase="z")
    assert one.rank == 1
    assert gap(one(X), z, 3) > 0.05, "the control: one number is not the classes"


def test_c31_rounding_left_in_erased_rows_is_below_a_relative_cut() -> None:
    """Least squares without a cut reads the concept off the rounding of erased rows."""
    X, z, _ = drawn(300, 8)
    clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(X)
    centred, target = clean - clean.mean(axis=0), z - z.mean()

    def explained(cut: float) -> float:
        coefficients = np.linalg.lstsq(centred, target, rcond=cut)[0]
        return 1 - float(((target - centred @ coefficients) ** 2).sum() / (target**2).sum())

    assert abs(explained(1e-6)) < 1e-10


def test_c32_a_thousand_million_rows_by_merging() -> None:
    """Counts in float32 stop at 2^24 rows of a class; here they are integers throughout."""
    X, z = normal(1000, 6) + 5, np.arange(1000) % 4
    part = Moments().update(X, {"z": z, "y": X[:, 0] + X[:, 1]})
    total, power, left = Moments(), part, 10**6
    while left:
        if left & 1:
            total = total + power
        power, left = power + power, left >> 1
    assert total.n_rows == 10**9
    assert total.class_counts("z") == dict.fromkeys(range(4), 250_000_000)
    np.testing.assert_allclose(total.mean, part.mean, rtol=1e-14)
    np.testing.assert_allclose(total.covariance(ddof=0), part.covariance(ddof=0), rtol=1e-12)
    a, b = (sf.splince(m, erase="z", keep="y").matrix() for m in (total, part))
    np.testing.assert_allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("axis", ["rows", "features"])
def test_c39_lazy_rows_are_refused_or_give_the_numbers_in_memory(axis: str) -> None:
    """Chunks of unknown size, or along the features, failed with errors from inside."""
    array = pytest.importorskip("dask.array")
    X, z, _ = drawn(200, 6)
    lazy = array.from_array(X, chunks=(50, 6) if axis == "rows" else (200, 3))
    if axis == "rows":
        lazy = lazy[array.from_array(np.ones(200, bool), chunks=50)]  # sizes are unknown now
    try:
        moments = Moments().update(lazy, {"z": z})
    except SplinceError:
        return
    assert state_bytes(moments) == state_bytes(Moments().update(X, {"z": z}))
