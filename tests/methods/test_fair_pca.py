"""Fair PCA: the constraint, the largest variance, class covariances, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st
from problems import Float, covariance

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.exceptions import InputError


def problem(seed: int, d: int = 8, classes: int = 3, n: int = 400) -> tuple[Float, Any]:
    """Rows whose leading principal components differ between classes."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, classes, n)
    mix = rng.normal(size=(d, d)) * 2.0 ** -np.arange(d)
    return (rng.normal(size=(n, d)) + 3 * rng.normal(size=(classes, d))[z]) @ mix, z


def moments_of(x: Float, z: Any, **options: Any) -> sf.Moments:
    return sf.Moments(**options).update(x, {"z": z})


def variance(rows: Float) -> float:
    return float(np.var(rows, axis=0).sum())


@given(seed=st.integers(0, 2**20), count=st.integers(1, 6))
def test_components_have_no_covariance_and_the_largest_variance(seed: int, count: int) -> None:
    x, z = problem(seed)
    eraser = sf.fair_pca(moments_of(x, z), erase="z", n_components=count)
    P, clean = eraser.matrix(), eraser(x)
    np.testing.assert_allclose(P @ P, P, atol=1e-12)
    np.testing.assert_allclose(P, P.T, atol=1e-12)
    assert np.trace(P) == pytest.approx(count)
    assert np.linalg.norm(covariance(clean, z)) <= 1e-12 * np.linalg.norm(covariance(x, z))
    # The same by SciPy: no component of the complement has more variance.
    basis = scipy.linalg.null_space(covariance(x, z).T)
    top = scipy.linalg.eigh(basis.T @ np.cov(x.T, ddof=0) @ basis)[0][::-1][:count]
    assert variance(clean) == pytest.approx(top.sum(), rel=1e-10)
    others = np.linalg.qr(np.random.default_rng(seed).normal(size=(basis.shape[1], count)))[0]
    assert variance(x @ basis @ others) <= variance(clean) * (1 + 1e-10)
    # Control: the principal components without the constraint covary with z.
    leading = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)[2][:count]
    assert np.linalg.norm(covariance(x @ leading.T, z)) > 1e-6 * np.linalg.norm(covariance(x, z))
    assert eraser.report.distortion == pytest.approx(variance(clean - x) / variance(x), rel=1e-9)


def test_all_components_are_sal_and_a_fraction_takes_the_fewest() -> None:
    x, z = problem(0)
    moments = moments_of(x, z)
    whole, sal = sf.fair_pca(moments, erase="z", n_components=6), sf.sal(moments, erase="z")
    np.testing.assert_allclose(whole.matrix(), sal.matrix(), atol=1e-12)
    left = variance(sal(x))
    for fraction in (0.5, 0.9, 0.99):
        eraser = sf.fair_pca(moments, erase="z", n_components=fraction)
        count = 8 - eraser.rank
        assert variance(eraser(x)) >= fraction * left
        if count > 1:
            fewer = sf.fair_pca(moments, erase="z", n_components=count - 1)
            assert variance(fewer(x)) < fraction * left
    kept = sf.fair_pca(moments.factored(), erase="z", n_components=3)
    expected = sf.fair_pca(moments, erase="z", n_components=3)
    np.testing.assert_allclose(kept.matrix(), expected.matrix(), atol=1e-10)


@pytest.mark.parametrize("classes", [2, 3])
def test_candidates_have_the_least_differences_of_class_covariances(classes: int) -> None:
    x, z = problem(1, classes=classes)
    x *= np.where(z == 0, 3.0, 1.0)[:, None] ** (np.arange(8) < 4)  # in half of the features
    moments = moments_of(x, z, by="z")

    def difference(eraser: sf.Projection) -> float:
        P = eraser.matrix()
        found = [P @ np.cov(x[z == c].T, ddof=0) @ P.T for c in range(classes)]
        return float(sum(np.linalg.norm(c - found[0]) for c in found))

    free = sf.fair_pca(moments, erase="z", n_components=2)
    equal = sf.fair_pca(moments, erase="z", n_components=2, n_candidates=3)
    assert difference(equal) < 0.5 * difference(free)
    assert np.linalg.norm(covariance(equal(x), z)) <= 1e-12 * np.linalg.norm(covariance(x, z))
    assert variance(equal(x)) < variance(free(x))
    if classes == 2:  # the candidates of the paper, by |eigenvalues| of C_0 - C_1
        basis = scipy.linalg.null_space(covariance(x, z).T)
        c0, c1 = (np.cov(x[z == c].T, ddof=0) for c in (0, 1))
        values, vectors = np.linalg.eigh(basis.T @ (c0 - c1) @ basis)
        span = basis @ vectors[:, np.argsort(np.abs(values))[:3]]
        U = span @ np.linalg.eigh(span.T @ np.cov(x.T, ddof=0) @ span)[1][:, -2:]
        np.testing.assert_allclose(equal.matrix(), U @ U.T, atol=1e-8)


def test_a_fraction_of_nearly_one_takes_all_components_and_constant_rows_have_one() -> None:
    for seed in range(30):  # rounding decides whether the components explain this fraction
        x, z = problem(seed, d=30, classes=2, n=50)
        moments = moments_of(np.random.default_rng(seed).normal(size=x.shape), z)
        assert sf.fair_pca(moments, erase="z", n_components=1 - 2**-53).rank == 1
    constant = np.ones((50, 3)) * [[1, 2, 3]]
    with pytest.warns(sf.SplinceWarning, match="are constant"), np.errstate(all="raise"):
        assert sf.fair_pca(moments_of(constant, z), erase="z").rank == 2
    with pytest.raises(InputError, match="no component is left"):
        sf.fair_pca(moments_of(x[:, :1], z), erase="z")


def test_compare_and_files_take_fair_pca(tmp_path: Any) -> None:
    x, z = problem(2, classes=2, n=600)
    y = (np.random.default_rng(0).random(600) < 0.5).astype(int)
    result = ev.compare(
        x, task=y, concept=z, erasers=("none", "fair_pca"), heads=("retrained",), n_seeds=1,
        alphas=(0.1,), progress=False,
    )  # fmt: skip
    none, fair = (result.mean("probe_accuracy", eraser=name) for name in ("none", "FairPCA"))
    assert fair < none
    eraser = sf.erase(x, z, method="fair_pca", n_components=3)[1]
    eraser.save(tmp_path / "eraser.safetensors")
    loaded: Any = sf.load_eraser(tmp_path / "eraser.safetensors")
    assert loaded.method == "FairPCA"
    assert loaded(x).tobytes() == eraser(x).tobytes()


@pytest.mark.parametrize(
    ("options", "of_moments", "message"),
    [
        ({"n_components": 0}, {}, "n_components is 0"),
        ({"n_components": 1.0}, {}, "a fraction of the variance"),
        ({"n_components": 7}, {}, "an integer from 1 to 6: 2 of 8"),
        ({"n_components": 3, "n_candidates": 2}, {"by": "z"}, "n_candidates is 2.* from 3 to 6"),
        ({"n_candidates": 3}, {}, "pass moments made with by="),
        ({"n_components": 2}, {"covariance_type": "diag"}, "needs the covariance of x"),
    ],
)
def test_refusals(options: Any, of_moments: Any, message: str) -> None:
    x, z = problem(0)
    with pytest.raises(InputError, match=message):
        sf.fair_pca(moments_of(x, z, **of_moments), erase="z", **options)
