"""Shrinkage: the intensity of scikit-learn from streamed moments, with the constraints exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import EPS
from sklearn.covariance import oas

import splince_fast as sf
from splince_fast._solve.factor import oas as intensity_of


def problem(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z, y = rng.integers(0, 2, n), rng.integers(0, 2, n)
    X = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + z[:, None] + y[:, None] * np.eye(d)[0]
    return X, z, y


def oas_of(moments: sf.Moments) -> float:
    state = moments._state()
    return intensity_of(state.scatter, state.weight)


def tolerance(n: int, d: int) -> float:
    # Sums over n d terms of fourth powers: their relative error is a few hundred eps sqrt(n d);
    # the intensity is a ratio of such sums.
    return 500 * EPS * (n * d) ** 0.5


@given(
    n=st.integers(4, 300),
    d=st.integers(2, 30),
    cut=st.floats(0, 1),
    seed=st.integers(0, 2**16),
    block_rows=st.sampled_from([1, 7, 64, None]),
)
def test_intensity_equals_scikit_learn(
    n: int, d: int, cut: float, seed: int, block_rows: int | None
) -> None:
    X = problem(n, d, seed)[0]
    k = int(cut * n)
    parts = [sf.Moments(block_rows=block_rows).update(rows) for rows in (X[:k], X[k:])]
    assert oas_of(parts[0] + parts[1]) == pytest.approx(oas(X)[1], abs=tolerance(n, d))


def test_a_weight_of_two_is_the_row_twice() -> None:
    X = problem(60, 5)[0]
    weight = np.where(np.arange(60) < 20, 2.0, 1.0)
    weighted = sf.Moments().update(X, sample_weight=weight)
    twice = np.concatenate([X, X[:20]])
    assert oas_of(weighted) == pytest.approx(oas(twice)[1], abs=tolerance(80, 5))
    assert abs(oas_of(weighted) - oas(X)[1]) > 1e-4  # control


def test_whitened_data_are_shrunk_within_bounds() -> None:
    """White data, where another tool's intensity left [0, 1] and the covariance its cone."""
    rng = np.random.default_rng(0)
    X = np.linalg.qr(rng.normal(size=(500, 10)) - 0.0)[0] * 500**0.5
    X -= X.mean(axis=0)
    assert 0.0 <= oas_of(sf.Moments().update(X)) <= 1.0


def test_isotropic_rows_are_their_own_target() -> None:
    assert oas_of(sf.Moments().update(np.array([[1.0], [-1.0], [1.0], [-1.0]]))) == 1.0
