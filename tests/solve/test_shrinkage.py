"""Shrinkage: the intensities of scikit-learn from streamed moments, with the constraints exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    EPS,
    draw_data,
    erase,
)
from sklearn.covariance import ledoit_wolf, oas

import splince_fast as sf
from splince_fast._solve.shrinkage import intensity
from splince_fast.moments.state import State

ESTIMATORS = {"oas": oas, "ledoit-wolf": ledoit_wolf}


def problem(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    z, y = rng.integers(0, 2, n), rng.integers(0, 2, n)
    X = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + z[:, None] + y[:, None] * np.eye(d)[0]
    return X, z, y


def _shrinkage(state: State, policy: str) -> float:
    quartic = None
    if state.fourth is not None:
        quartic = state.fourth.centred(state.weight, state.deviation, state.scatter)
    return intensity(policy, state.scatter, state.weight, quartic)


def tolerance(n: int, d: int) -> float:
    # Sums over n d terms of fourth powers, centred with offsets of a few deviations: their
    # relative error is a few hundred eps sqrt(n d); the intensity is a ratio of such sums.
    return 500 * EPS * (n * d) ** 0.5


@given(
    n=st.integers(4, 300),
    d=st.integers(2, 30),
    cut=st.floats(0, 1),
    seed=st.integers(0, 2**16),
    block_rows=st.sampled_from([1, 7, 64, None]),
)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_intensity_equals_scikit_learn(
    name: str, n: int, d: int, cut: float, seed: int, block_rows: int | None
) -> None:
    X = problem(n, d, seed)[0]
    k = int(cut * n)
    parts = [
        sf.Moments(ledoit_wolf=True, block_rows=block_rows).update(rows) for rows in (X[:k], X[k:])
    ]
    found = _shrinkage((parts[0] + parts[1])._state(), name)
    assert found == pytest.approx(ESTIMATORS[name](X)[1], abs=tolerance(n, d))


def test_removing_a_part_undoes_its_merge() -> None:
    X = problem(400, 12)[0]
    part = sf.Moments(ledoit_wolf=True).update(X[300:])
    rest = sf.Moments(ledoit_wolf=True).update(X) - part
    assert _shrinkage(rest._state(), "ledoit-wolf") == pytest.approx(
        ledoit_wolf(X[:300])[1], abs=tolerance(400, 12)
    )


def test_a_weight_of_two_is_the_row_twice() -> None:
    X = problem(60, 5)[0]
    weight = np.where(np.arange(60) < 20, 2.0, 1.0)
    weighted = sf.Moments(ledoit_wolf=True).update(X, sample_weight=weight)
    twice = np.concatenate([X, X[:20]])
    assert _shrinkage(weighted._state(), "ledoit-wolf") == pytest.approx(
        ledoit_wolf(twice)[1], abs=tolerance(80, 5)
    )


def test_control_a_dropped_cross_term_is_caught() -> None:
    """Without the cubic sums, moving the reference point gives another intensity."""
    X = np.sort(problem(600, 6)[0], axis=0)  # sorted: the first rows are far from the mean
    moments = sf.Moments(ledoit_wolf=True).update(X)
    state = moments._state()
    right = _shrinkage(state, "ledoit-wolf")
    assert state.fourth is not None
    state.fourth.cubic[:] = 0.0
    assert abs(_shrinkage(state, "ledoit-wolf") - right) > 1e3 * tolerance(600, 6)


@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 1.0, "oas", "ledoit-wolf"])
@pytest.mark.parametrize("n", [300, 12])
def test_constraints_are_exact_under_any_shrinkage(shrinkage: float | str, n: int) -> None:
    X, z, y = problem(n, 20)
    moments = sf.Moments(ledoit_wolf=True).update(X, {"z": z, "y": y})
    eraser = sf.splince(moments, erase="z", keep="y", shrinkage=shrinkage)
    assert eraser.report is not None
    for variable in eraser.report.variables:
        assert variable.residual <= variable.bound


def test_whitened_data_are_shrunk_within_bounds() -> None:
    """White data, where another tool's intensity left [0, 1] and the covariance its cone."""
    rng = np.random.default_rng(0)
    X = np.linalg.qr(rng.normal(size=(500, 10)) - 0.0)[0] * 500**0.5
    X -= X.mean(axis=0)
    moments = sf.Moments(ledoit_wolf=True).update(X)
    for name in ESTIMATORS:
        assert 0.0 <= _shrinkage(moments._state(), name) <= 1.0


def test_ledoit_wolf_without_fourth_moments_says_what_to_do() -> None:
    X, z, _ = problem(50, 4)
    moments = sf.Moments().update(X, {"z": z})
    with pytest.raises(sf.InputError, match="ledoit_wolf=True"):
        sf.leace(moments, erase="z", shrinkage="ledoit-wolf")


def test_moments_with_and_without_fourth_moments_do_not_mix() -> None:
    X = problem(50, 4)[0]
    with pytest.raises(sf.IncompatibleMomentsError, match="ledoit_wolf"):
        sf.Moments(ledoit_wolf=True).update(X) + sf.Moments().update(X)


def test_fourth_moments_survive_a_file(tmp_path: Path) -> None:
    X = problem(50, 4)[0]
    moments = sf.Moments(ledoit_wolf=True).update(X)
    moments.save(tmp_path / "m.moments")
    loaded = sf.Moments.load(tmp_path / "m.moments")
    found, expected = (_shrinkage(m._state(), "ledoit-wolf") for m in (loaded, moments))
    assert found == expected


def test_no_shrinkage_is_shrinkage_by_nothing() -> None:
    data = draw_data(33)
    moments = data.moments()
    np.testing.assert_array_equal(
        erase("splince", moments, shrinkage=0.0).matrix(), erase("splince", moments).matrix()
    )


@pytest.mark.parametrize("policy", ESTIMATORS)
def test_what_is_isotropic_is_its_own_target(policy: str) -> None:
    moments = sf.Moments(ledoit_wolf=True).update(np.array([[1.0], [-1.0], [1.0], [-1.0]]))
    assert _shrinkage(moments._state(), policy) == 1.0
