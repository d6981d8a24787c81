"""report.certificate: its quantile, its coverage on simulated fits, and the control without by=."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats

import splince_fast as sf


def draw(rng: Any, n: int, d: int, rare: float, wide: float) -> tuple[Any, Any]:
    """Rows with x = z e_1 + noise, whose deviation is `wide` in the class of fraction `rare`."""
    z = (rng.random(n) < rare).astype(int)
    X = rng.normal(size=(n, d)) * np.where(z, wide, 1.0)[:, None]
    X[:, 0] += z
    return X, z


def population_r2(eraser: sf.Projection, d: int, rare: float, wide: float) -> float:
    """R^2 of the best linear predictor of z from erased rows of the population."""
    e = np.eye(d)[0]
    v = rare * (1 - rare)
    S = (rare * wide**2 + 1 - rare) * np.eye(d) + v * np.outer(e, e)
    P = eraser.matrix()
    left = P @ (v * e)
    return float(left @ np.linalg.pinv(P @ S @ P.T, rcond=1e-10, hermitian=True) @ left) / v


def coverage(
    n_fits: int, rare: float, wide: float, by: str | None, method: Any = sf.leace
) -> float:
    """Fraction of fits of 1,000 rows whose certificate at 95 % holds in the population."""
    rng, d, held = np.random.default_rng(0), 8, 0
    for _ in range(n_fits):
        X, z = draw(rng, 1000, d, rare, wide)
        eraser = method(sf.Moments(by=by).update(X, {"z": z}), erase="z")
        held += population_r2(eraser, d, rare, wide) <= eraser.report.certificate(0.05)["z"]
    return held / n_fits


CASES = [(0.5, 1.0), (0.5, 3.0), (0.05, 1.0), (0.05, 3.0)]


@pytest.mark.parametrize(("rare", "wide"), CASES)
@pytest.mark.parametrize("n_fits", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_certificate_covers(rare: float, wide: float, n_fits: int) -> None:
    # Three standard deviations of a fraction of .95 below the nominal level for few fits.
    least = 0.94 if n_fits == 2000 else 0.95 - 3 * (0.95 * 0.05 / n_fits) ** 0.5
    assert coverage(n_fits, rare, wide, "z") >= least


def test_control_without_class_covariances_a_rare_wide_class_is_missed() -> None:
    assert coverage(100, 0.05, 3.0, None) < 0.5


@pytest.mark.parametrize("method", [sf.sal, sf.mean_projection])
def test_bound_holds_for_every_map_of_this_kernel(method: Any) -> None:
    assert coverage(100, 0.5, 1.0, None, method) >= 0.88


def test_bound_is_the_quantile_of_the_section() -> None:
    X, z = draw(np.random.default_rng(1), 500, 6, 0.5, 1.0)
    report = sf.leace(sf.Moments().update(X, {"z": z}), erase="z").report
    for delta in (0.01, 0.05, 0.5):
        q = scipy.stats.chi2.ppf(1 - delta, 5) / 500
        assert report.certificate(delta)["z"] == pytest.approx(q / (1 + q), rel=1e-12)


def test_classes_divide_delta_and_the_widest_counts() -> None:
    rng = np.random.default_rng(2)
    z = rng.integers(0, 4, 2000)
    X = rng.normal(size=(2000, 6)) * (1 + (z == 3))[:, None] + z[:, None]
    report = sf.leace(sf.Moments(by="z").update(X, {"z": z}), erase="z").report
    noise = report.variables[0].noise
    assert noise.columns == 4
    S = np.cov(X.T, ddof=0)
    traces = [np.trace(np.linalg.solve(S, np.cov(X[z == c].T, ddof=0))) for c in range(4)]
    p = np.bincount(z) / 2000
    tau = [
        (1 - p[c]) * traces[c]
        + p[c] / (1 - p[c]) * sum(p[b] * traces[b] for b in range(4) if b != c)
        for c in range(4)
    ]
    np.testing.assert_allclose(noise.ratios, np.array(tau) / 5, rtol=1e-10)
    q = max(tau) / 5 * scipy.stats.chi2.ppf(1 - 0.05 / 4, 5) / 2000
    assert report.certificate()["z"] == pytest.approx(q / (1 + q), rel=1e-10)


def test_expected_r2_is_corrected_for_class_covariances() -> None:
    """Mean over fits of the population R^2: `expected` with by= meets it, without it does not."""
    rng, d, found = np.random.default_rng(3), 8, []
    for _ in range(200):
        X, z = draw(rng, 1000, d, 0.05, 3.0)
        own, plain = (
            sf.leace(sf.Moments(by=by).update(X, {"z": z}), erase="z") for by in ("z", None)
        )
        values = [e.report.variables[0].expected for e in (own, plain)]
        found.append((population_r2(own, d, 0.05, 3.0), *values))
    true, corrected, plain = np.mean(found, axis=0)
    assert abs(corrected / true - 1) < 0.25
    assert plain < 0.7 * true


def test_snapshots_files_and_dictionaries_keep_it(tmp_path: Any) -> None:
    X, z = draw(np.random.default_rng(4), 800, 6, 0.2, 2.0)
    moments = sf.Moments(by="z").update(X, {"z": z})
    eraser = sf.leace(moments.factored(), erase="z")
    expected = sf.leace(moments, erase="z").report.certificate()
    assert eraser.report.certificate() == pytest.approx(expected, rel=1e-10)
    eraser.save(tmp_path / "e")
    assert sf.Projection.load(tmp_path / "e").report.certificate() == eraser.report.certificate()


def test_refusals() -> None:
    X, z = draw(np.random.default_rng(5), 300, 6, 0.5, 1.0)
    moments = sf.Moments().update(X, {"z": z})
    eraser = sf.leace(moments, erase="z")
    for delta in (0, 1, -1, "a", True, float("nan")):
        with pytest.raises(sf.InputError, match="between 0 and 1"):
            eraser.report.certificate(delta)
    for partial in (eraser.scaled(0.5), sf.leace(moments, erase="z", rank_tol=0.1)):
        with pytest.raises(sf.InputError, match="no certificate"):
            partial.report.certificate()
