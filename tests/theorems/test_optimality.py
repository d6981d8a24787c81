"""The public functions against ways to the same answer that share no step with them.

The tolerances are those of `problems`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    EPS,
    Data,
    Float,
    assert_same,
    change,
    conditions,
    draw_data,
    erase,
    least_change,
    many,
    report,
    within_bounds,
)

# --- the paper's explicit formula ----------------------------------------------------------------


def by_subspaces(s: Float, sz: Float, sy: Float) -> Float:
    """P = W^+ V (U^T V)^-1 U^T W, with complete bases as printed; annihilates the kernel of S.

    U spans the complement of colsp(W Sz); V spans colsp(W Sy) and the complement of both. Taken
    within the support of x, where W acts.
    """
    values, vectors = np.linalg.eigh(s)
    kept = values > len(s) * 8 * EPS * values[-1]
    support = vectors[:, kept]
    w = (support / np.sqrt(values[kept])).T  # W in coordinates of the support
    back = support * np.sqrt(values[kept])
    a, b = scipy.linalg.orth(w @ sz, rcond=1e-9), scipy.linalg.orth(w @ sy, rcond=1e-9)
    u = scipy.linalg.null_space(a.T)
    rest = scipy.linalg.null_space(np.concatenate([a, b], axis=1).T)
    v = scipy.linalg.orth(np.concatenate([b, rest], axis=1))
    return np.asarray(back @ v @ np.linalg.solve(u.T @ v, u.T) @ w)


@pytest.mark.parametrize("solver", ["auto", "eigh"])
@pytest.mark.parametrize("n", [25, 39])
def test_dropping_the_null_space_equals_the_formula_as_printed(n: int, solver: str) -> None:
    """With "keep", the map is the same on the data, and the identity off their support."""
    data = draw_data(1, n=n, d=40, kappa=10.0)
    covariances = data.covariances()
    assert np.linalg.matrix_rank(covariances[0]) == n - 1
    keep, drop = (
        erase("splince", data.moments(), null_space=policy, solver=solver).matrix()
        for policy in ("keep", "drop")
    )
    kappa, q, s = conditions(*covariances)
    assert_same(drop, by_subspaces(*covariances), 16 * 40 * EPS * (kappa + q) / s**2)
    centred = data.x - data.x.mean(axis=0)
    np.testing.assert_allclose(centred @ keep.T, centred @ drop.T, atol=1e-12)
    null = scipy.linalg.null_space(centred)
    np.testing.assert_allclose(keep @ null, null, atol=1e-12)
    np.testing.assert_allclose(drop @ null, 0.0, atol=1e-12)


# --- quadratic programming -----------------------------------------------------------------------


def by_quadratic_programming(s: Float, sz: Float, sy: Float, weight: Float) -> Float:
    """argmin tr(M E S E^T) subject to E Sz = Sz and E Sy = 0, for M = `weight`."""
    spans = np.concatenate([sz, sy], axis=1)
    return least_change(s, spans, np.concatenate([sz, 0 * sy], axis=1), weight)


@many
@given(
    seed=st.integers(0, 2**20), d=st.integers(4, 9), kz=st.integers(2, 3),
    method=st.sampled_from(["splince", "leace", "sal that keeps"]), identity=st.booleans(),
    share=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    solver=st.sampled_from(["auto", "cholesky", "eigh"]),
)  # fmt: skip
def test_equals_quadratic_programming_in_any_inner_product(
    seed: int, d: int, kz: int, method: str, identity: bool, share: float, solver: str
) -> None:
    """The inner products are those of Cov(x), of shrunk Cov(x), and, for SAL, of the identity."""
    data = draw_data(seed, d=d, kz=kz, ky=1, kappa=20.0)
    s, sz, sy = data.covariances()
    options: Any = {"shrinkage": share, "solver": solver}
    if method == "sal that keeps":
        share, options = 1.0, {}
    s = (1 - share) * s + share * np.trace(s) / d * np.eye(d)
    root = np.random.default_rng(seed).normal(size=(d, d))
    weight = np.eye(d) if identity else root @ root.T / d + 0.1 * np.eye(d)
    eraser = erase(method, data.moments(), **options)
    expected = by_quadratic_programming(s, sz, sy[:, :0] if method == "leace" else sy, weight)
    kappa, q, sine = conditions(s, sz, sy)
    # The Hessian has the condition of S times that of M, and enters by its normal equations.
    bound = 100 * d * EPS * (kappa * np.linalg.cond(weight) + q**2) / sine**2
    # SAL takes its spans in the features as they come: roundings of Sz over its size.
    bound += 1e3 * EPS * q * data.x.std(axis=0).max() / np.linalg.norm(sz) / sine**2
    assert_same(change(eraser), expected, bound)


def test_control_another_covariance_gives_another_optimum() -> None:
    data = draw_data(0, d=7, ky=1, kappa=20.0)
    s, sz, sy = data.covariances()
    found = change(erase("splince", data.moments()))
    for wrong in (np.eye(7), s @ s, s + 1e-3 * np.trace(s) / 7 * np.eye(7)):
        expected = by_quadratic_programming(wrong, sz, sy, np.eye(7))
        assert np.linalg.norm(found - expected) > 1e-4 * np.linalg.norm(expected)


def test_beats_two_thousand_random_feasible_perturbations() -> None:
    data = draw_data(11, d=8, ky=1)
    s, sz, sy = data.covariances()
    free = scipy.linalg.null_space(np.concatenate([sz, sy], axis=1).T, rcond=1e-9)

    def distortion(e: Float) -> float:
        return float(np.trace(e @ s @ e.T))

    best, wrong = (change(erase(m, data.moments())) for m in ("splince", "sal that keeps"))
    rng = np.random.default_rng(0)
    beaten = {"best": 0, "identity for the covariance": 0}
    for size in 10.0 ** rng.uniform(-6, 1, size=2000):
        other = size * rng.normal(size=(8, free.shape[1])) @ free.T
        # An absolute rounding of the two traces.
        slack = 64 * EPS * distortion(best)
        beaten["best"] += distortion(best + other) < distortion(best) - slack
        beaten["identity for the covariance"] += distortion(wrong + other) < distortion(wrong)
    assert beaten["best"] == 0
    assert beaten["identity for the covariance"] > 100


# --- orthogonal methods --------------------------------------------------------------------------


@many
@given(seed=st.integers(0, 2**20), kz=st.integers(2, 5))
def test_sal_is_the_projection_off_the_left_singular_vectors(seed: int, kz: int) -> None:
    data = draw_data(seed, kz=kz)
    _, sz, _ = data.covariances()
    u, sizes, _ = np.linalg.svd(sz)
    u = u[:, : kz - 1]
    # Roundings of Sz, some 1e-15 of the size of x, over its smallest singular value.
    bound = 100 * EPS * data.x.std(axis=0).max() / sizes[kz - 2]
    sal, mean_projection = (erase(m, data.moments()) for m in ("sal", "mean_projection"))
    assert_same(change(sal), u @ u.T, bound)
    np.testing.assert_array_equal(sal.matrix(), mean_projection.matrix())


# --- float32 data --------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [10.0, 1e4])
def test_float32_rows_cost_distortion_no_more_than_their_products_round(kappa: float) -> None:
    """Products in float32 perturb S by some 1e-7 of its correlations, so E by kappa times that."""
    data = draw_data(6, n=2000, d=20, kappa=kappa)
    data = Data(data.x.astype(np.float32).astype(np.float64), data.z, data.y)
    wide, narrow = (erase("splince", data.moments(dtype)) for dtype in (np.float64, np.float32))
    kappa, _, s = conditions(*data.covariances())
    eps32 = float(np.finfo(np.float32).eps)
    assert_same(change(narrow), change(wide), 20**0.5 * eps32 * kappa / s**2)
    assert within_bounds(report(narrow))
