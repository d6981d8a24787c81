"""Both constraints on the rows themselves: the concept's covariance is gone, the task's is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    EPS,
    METHODS,
    Data,
    assert_erased_in_mean,
    conditions,
    draw_data,
    erase,
    many,
    report,
    sensitive,
    slack,
    within_bounds,
)

import splince_fast as sf

pytestmark = sensitive


@many
@given(
    seed=st.integers(0, 2**20),
    d=st.integers(6, 40),
    kz=st.integers(2, 4),
    kappa=st.sampled_from([1.0, 1e4, 1e8, 1e12]),
    dtype=st.sampled_from([np.float64, np.float32]),
)
@pytest.mark.parametrize("method", METHODS)
def test_covariances_of_erased_rows(
    method: str, seed: int, d: int, kz: int, kappa: float, dtype: Any
) -> None:
    if dtype == np.float32:  # products in float32 tell no more of a covariance
        kappa = min(kappa, 1e4)
    data = draw_data(seed, d=d, kz=kz, kappa=kappa)
    x = data.x.astype(dtype)
    before = sf.Moments().update(x, {"z": data.z, "y": data.y})
    eraser = erase(method, before)
    clean = eraser(x.astype(np.float64))
    after = sf.Moments().update(clean, {"z": data.z, "y": data.y})
    # P is I less a product of duals, oblique by the angle between the whitened spans, so that
    # |P| <= sqrt(kappa) / s; sums over n rows err by gamma of their deviations and offset, and
    # spans of condition q multiply that by q. SAL takes its angles in the features as they come.
    keeps = method in ("splince", "sal that keeps")
    s, sz, sy = Data(x.astype(np.float64), data.z, data.y).covariances()
    metric = s if method in ("splince", "leace") else np.eye(d)
    kappa, q, sine = conditions(metric, sz, sy)
    size = kappa**0.5 / (sine if keeps else 1.0)
    offset = np.abs(x.mean(axis=0)).max() + x.std()
    gamma = 4 * (len(x) + d) ** 0.5 * EPS * offset * size * q
    assert np.abs(before.cross_covariance("z")).max() > 100 * gamma  # the control
    assert np.abs(after.cross_covariance("z")).max() <= gamma
    if keeps:
        kept = after.cross_covariance("y") - before.cross_covariance("y")
        assert np.abs(kept).max() <= gamma * data.y.std()
    assert eraser.rank == kz - 1
    assert within_bounds(report(eraser))


@pytest.mark.parametrize("shrinkage", [0.0, 1e-6, 0.3, 1.0, "oas"])
@pytest.mark.parametrize("n", [400, 15])
def test_constraints_are_exact_under_shrinkage(shrinkage: float | str, n: int) -> None:
    data = draw_data(32, n=n, d=20, kz=3, ky=2)
    moments = sf.Moments().update(data.x, {"z": data.z, "y": data.y})
    eraser = sf.splince(moments, erase="z", keep="y", shrinkage=shrinkage)
    assert_erased_in_mean(eraser(data.x), data.z)
    after = sf.Moments().update(eraser(data.x), {"y": data.y}).cross_covariance("y")
    np.testing.assert_allclose(after, moments.cross_covariance("y"), atol=1e-11)


@given(seed=st.integers(0, 2**20), k=st.integers(1, 4), exponent=st.integers(-20, 20))
@pytest.mark.parametrize("method", ["splince", "sal that keeps"])
def test_explicit_directions_stay_fixed(method: str, seed: int, k: int, exponent: int) -> None:
    data = draw_data(seed, d=9)
    directions = np.random.default_rng(seed).normal(size=(9, k)) * 10.0**exponent
    eraser = erase(method, data.moments(), y=directions)
    still = eraser.matrix() @ directions
    size = np.linalg.norm(eraser.matrix(), 2) ** 2 * np.linalg.cond(directions) * slack(data)
    assert np.linalg.norm(still - directions) <= size * np.linalg.norm(directions)
    assert_erased_in_mean(eraser(data.x) / np.abs(eraser(data.x)).max(), data.z)
