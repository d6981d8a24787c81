"""Limits of a guarded representation: linear and other probes, new rows, shifted rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from entangled import gap
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import Moments

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
