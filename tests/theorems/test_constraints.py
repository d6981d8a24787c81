"""Constraints on the rows, what changes nothing, and the limits of a guarded representation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from entangled import gap
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from problems import (
    EPS,
    METHODS,
    Data,
    assert_erased_in_mean,
    assert_same,
    change,
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
from splince_fast import Moments

pytestmark = sensitive


@given(exponent=st.floats(-12, 12), seed=st.integers(0, 2**20))
@pytest.mark.parametrize("method", METHODS)
def test_units_of_x_do_not_matter(method: str, exponent: float, seed: int) -> None:
    data = draw_data(seed)
    scaled = Data(data.x * 10.0**exponent, data.z, data.y)
    found, expected = (erase(method, d.moments()) for d in (scaled, data))
    # SAL depends on Sz alone: its condition stands in for that of S.
    assert_same(change(found), change(expected), 10 * slack(data))


@given(seed=st.integers(0, 2**20), spread=st.sampled_from([1.0, 6.0, 12.0]))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("method", ["splince", "leace"])
def test_units_of_each_feature_do_not_matter(
    method: str, dtype: Any, seed: int, spread: float
) -> None:
    """Units are powers of two, so that scaling the rows causes no rounding error."""
    data = draw_data(seed)
    x = data.x.astype(dtype)
    exponents = np.random.default_rng(seed).uniform(-spread, spread, size=8) * 3.3
    scale = (2.0 ** np.round(exponents)).astype(dtype)
    labels = {"z": data.z, "y": data.y}
    expected = erase(method, sf.Moments().update(x, labels))
    found = erase(method, sf.Moments().update(x * scale, labels))
    back = change(found) / scale[:, None] * scale
    assert_same(back, change(expected), 1e-3 if dtype == np.float32 else slack(data))


@many
@given(
    seed=st.integers(0, 2**20),
    columns=st.integers(2, 12),
    exponent=st.integers(-100, 100),
    role=st.sampled_from(["z", "y"]),
)
@pytest.mark.parametrize("method", ["splince", "leace", "sal", "sal that keeps"])
def test_recoded_and_redundant_columns_do_not_matter(
    method: str, seed: int, columns: int, exponent: int, role: str
) -> None:
    """Any columns with the same span give the same map: units, offsets, duplicates, surplus."""
    rng = np.random.default_rng(seed)
    data = draw_data(seed, ky=2)
    hot = np.eye(3)[data.z][:, :2]
    codes = {"z": hot, "y": data.y}
    expected = erase(method, sf.Moments().update(data.x, {"z": data.z, "y": data.y}))
    basis = [
        np.linalg.qr(rng.normal(size=(columns, columns)))[0][:, :2],
        np.linalg.qr(rng.normal(size=(2, 2)))[0],
    ]
    mixing = (basis[0] * np.array([1.0, 0.1])) @ basis[1].T * 10.0**exponent
    codes[role] = codes[role] @ mixing.T + rng.normal(size=columns) * 10.0**exponent
    found = erase(method, sf.Moments().update(data.x, codes))
    assert found.rank == expected.rank == 2
    # The recoding has condition 10.
    assert_same(change(found), change(expected), 100 * slack(data))


# --- both constraints on the rows themselves ------------------------------------------------------


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


@given(
    seed=st.integers(0, 2**20),
    k=st.integers(1, 4),
    length=st.integers(-200, 200),
    unit=st.integers(-15, 15),
)
@pytest.mark.parametrize("method", ["splince", "sal that keeps"])
def test_explicit_directions_stay_fixed(
    method: str, seed: int, k: int, length: int, unit: int
) -> None:
    """Of any length, in any units of x."""
    data, directions = draw_data(seed, d=9), np.random.default_rng(seed).normal(size=(9, k))
    scaled = Data(data.x * 10.0**unit, data.z, data.y)
    eraser = erase(method, scaled.moments(), y=directions * 10.0**length)
    still = eraser.matrix() @ directions
    size = np.linalg.norm(eraser.matrix(), 2) ** 2 * np.linalg.cond(directions) * slack(data)
    assert np.linalg.norm(still - directions) <= size * np.linalg.norm(directions)
    plain = erase(method, data.moments(), y=directions)
    assert_same(change(eraser), change(plain), 10 * size)
    assert_erased_in_mean(eraser(scaled.x) / np.abs(eraser(scaled.x)).max(), data.z)


# --- limits: linear and other probes, new rows, shifted rows -------------------------------------


Float = NDArray[np.float64]


def accuracy(X: Float, z: Any) -> float:
    """Share of the rows that least squares (with an intercept) gets right."""
    design = np.column_stack([np.ones(len(X)), X])
    coefficients = np.linalg.lstsq(design, 2.0 * z - 1, rcond=1e-8)[0]
    return float(np.mean((design @ coefficients > 0) == z))


def balanced(n: int = 4000, d: int = 6, seed: int = 0) -> tuple[Float, Any]:
    rng = np.random.default_rng(seed)
    z = np.arange(n) % 2
    X = rng.normal(size=(n, d))
    X[:, 0] += 1.5 * z
    X[:, 1] *= 1 + 2 * z  # another spread in one class
    return X, z


def test_no_linear_probe_beats_a_constant_on_the_fitted_rows() -> None:
    """Least squares and logistic regression find coefficients of zero."""
    from sklearn.linear_model import LogisticRegression

    X, z = balanced()
    clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(X)
    coefficients = np.linalg.lstsq(
        np.column_stack([np.ones(len(X)), clean]), 2.0 * z - 1, rcond=1e-8
    )[0]
    assert np.abs(coefficients).max() < 1e-11
    assert accuracy(X, z) > 0.7, "the control: before erasure it can be read"
    probe = LogisticRegression(C=1e6, tol=1e-10, max_iter=1000)
    assert np.abs(probe.fit(clean, z).coef_).max() < 1e-6
    assert np.abs(probe.fit(X, z).coef_).max() > 1


def test_a_quadratic_probe_still_reads_the_concept() -> None:
    X, z = balanced()
    clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(X)
    assert accuracy(clean**2, z) > 0.65


def test_held_out_rows_keep_a_trace_of_sampling_size() -> None:
    """The gap of held-out means falls with the root of the rows fitted on, and is not zero."""
    new, z_new = balanced(200_000, seed=1)
    gaps = {}
    for n in (400, 40_000):
        X, z = balanced(n, seed=2)
        clean = sf.leace(Moments().update(X, {"z": z}), erase="z")(new)
        gaps[n] = gap(clean, z_new)
        # A mean over n/2 rows of spread at most 3 in each class; six features, five sigma.
        assert 1e-6 < gaps[n] < 5 * 3 * (4 / n) ** 0.5 + 5 * 3 * (4 / 200_000) ** 0.5
    assert gaps[40_000] < gaps[400]


def test_shifted_rows_are_not_guarded() -> None:
    X, z = balanced()
    P = sf.leace(Moments().update(X, {"z": z}), erase="z")
    shifted = X.copy()
    shifted[:, 2] += 2 * z  # a direction that said nothing of z before
    assert accuracy(P(shifted), z) > 0.7
