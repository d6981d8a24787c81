"""isotropic: equal class means and covariances by one map, as many dimensions as there can be."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import PolynomialFeatures

import splince_fast as sf

pytestmark = pytest.mark.filterwarnings("ignore::splince_fast.UnseenRowsWarning")

Float = NDArray[np.float64]


def data(n: int = 900, d: int = 7, seed: int = 0) -> tuple[Float, dict[str, Any]]:
    """Two classes of other means and covariances, and a task that is related to both."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 2, n)
    maps = rng.normal(size=(2, d, d))
    X = np.einsum("nij,nj->ni", maps[z], rng.normal(size=(n, d))) + 2 * rng.normal(size=(2, d))[z]
    score = X @ rng.normal(size=d) + rng.normal(size=n)
    y = (score > np.median(score)).astype(int)
    return X, {"z": np.array(["a", "b"])[z], "y": y}


def classes(X: Float, z: Any) -> list[tuple[Float, Float]]:
    return [(X[z == c].mean(0), np.cov(X[z == c].T, ddof=0)) for c in np.unique(z)]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), d=st.integers(1, 9), keep=st.booleans())
def test_classes_are_alike_on_the_fitted_rows(seed: int, d: int, keep: bool) -> None:
    X, labels = data(d=d, seed=seed)
    moments = sf.Moments(by="z").update(X, labels)
    try:
        eraser = sf.isotropic(moments, erase="z", keep="y" if keep else None)
    except sf.InfeasibleError:
        assert keep
        assert sf.isotropic(moments, erase="z").report.isotropic.n_kept == 0
        return
    clean = eraser(X)
    (m0, S0), (m1, S1) = classes(clean, labels["z"])
    (n0, T0), (n1, T1) = classes(X, labels["z"])
    scale = eraser.report.amplification**2
    assert np.linalg.norm(m1 - m0) < 1e-10 * scale * np.linalg.norm(n1 - n0)
    assert np.linalg.norm(S1 - S0) < 1e-10 * scale * np.linalg.norm(T1 - T0)
    changed = float(((clean - X) ** 2).sum() / ((X - X.mean(0)) ** 2).sum())
    assert eraser.report.distortion == pytest.approx(changed, rel=1e-8)
    if keep:
        after = sf.Moments().update(clean, labels)
        gap = after.cross_covariance("y") - moments.cross_covariance("y")
        assert np.linalg.norm(gap) < 1e-10 * scale * np.linalg.norm(moments.cross_covariance("y"))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), d=st.integers(2, 9))
def test_as_many_dimensions_survive_as_the_signature_allows(seed: int, d: int) -> None:
    X, labels = data(d=d, seed=seed)
    eraser = sf.isotropic(sf.Moments(by="z").update(X, labels), erase="z")
    (m0, S0), (m1, S1) = classes(X, labels["z"])
    basis = np.linalg.svd((m1 - m0)[:, None])[0][:, 1:]  # functionals without the means
    values = np.linalg.eigvalsh(basis.T @ (S1 - S0) @ basis)  # the signature is that in any basis
    expected = min(int((values > 0).sum()), int((values < 0).sum()))
    rank = np.linalg.matrix_rank(np.cov(eraser(X).T, ddof=0).reshape(d, d), tol=1e-8)
    assert rank == expected == eraser.report.isotropic.n_kept
    assert eraser.rank == d - expected


@pytest.mark.parametrize("seed", range(5))
def test_rotated_rows_give_the_rotated_eraser(seed: int) -> None:
    """Eigenvectors, whose signs are arbitrary, do not decide."""
    X, labels = data(seed=seed)
    Q = np.linalg.qr(np.random.default_rng(seed).normal(size=(7, 7)))[0]
    P, rotated = (
        sf.isotropic(sf.Moments(by="z").update(rows, labels), erase="z").matrix()
        for rows in (X, X @ Q)
    )
    np.testing.assert_allclose(rotated, Q.T @ P @ Q, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_signs_of_the_pairs_are_those_of_the_least_change(seed: int) -> None:
    """A naive twin tries all signs."""
    X, labels = data(seed=seed)
    z = labels["z"]
    p = [np.mean(z == c) for c in np.unique(z)]
    (m0, S0), (m1, S1) = classes(X, z)
    values, vectors = np.linalg.eigh(p[0] * S0 + p[1] * S1)
    L, whitener = vectors * np.sqrt(values), vectors / np.sqrt(values)
    apart = whitener.T @ (m1 - m0)
    basis = np.linalg.svd(apart[:, None])[0][:, 1:]
    w, u = np.linalg.eigh(basis.T @ whitener.T @ (S1 - S0) @ whitener @ basis)
    u, count = basis @ u, min(np.sum(w > 0), np.sum(w < 0))
    unpaired = u[:, count : len(w) - count]
    whole = np.cov(X.T, ddof=0)
    changes = []
    for signs in itertools.product((1, -1), repeat=count):
        lost = [apart / np.linalg.norm(apart), *unpaired.T]
        for k, sign in enumerate(signs):
            plus, minus = np.sqrt(w[-1 - k]), np.sqrt(-w[k])
            lost.append((plus * u[:, -1 - k] - sign * minus * u[:, k]) / np.hypot(plus, minus))
        change = L @ np.array(lost).T @ np.array(lost) @ whitener.T
        changes.append(np.trace(change @ whole @ change.T) / np.trace(whole))
    found = sf.isotropic(sf.Moments(by="z").update(X, labels), erase="z").report.distortion
    assert found == pytest.approx(min(changes), rel=1e-9)
    assert max(changes) > 1.01 * min(changes)  # control


def test_no_quadratic_predictor_beats_a_constant_and_after_leace_one_does() -> None:
    X, labels = data(n=3000, d=6, seed=3)
    z = labels["z"]
    moments = sf.Moments(by="z").update(X, labels)
    loss = {}
    constant = -np.mean(np.log([np.mean(z == c) for c in z]))
    for method in (sf.isotropic, sf.leace):
        rows = PolynomialFeatures(2, include_bias=False).fit_transform(
            method(moments, erase="z")(X)
        )
        rows = (rows - rows.mean(0)) / (rows.std(0) + 1e-12)
        probe = LogisticRegression(C=1e3, max_iter=5000).fit(rows, z)
        p = probe.predict_proba(rows)[np.arange(len(z)), (z == probe.classes_[1]).astype(int)]
        loss[method] = constant - float(-np.log(p).mean())
    assert loss[sf.isotropic] < 1e-6  # Proposition of the theory: constant is optimal
    assert loss[sf.leace] > 0.05  # control


def test_neutral_directions_are_kept_and_differ() -> None:
    X, labels = data(d=9, seed=1)
    moments = sf.Moments(by="z").update(X, labels)
    exact, some = (sf.isotropic(moments, erase="z", neutral=v) for v in (0.0, 0.3))
    assert some.report.isotropic.n_kept > exact.report.isotropic.n_kept
    assert exact.report.isotropic.residual < 1e-12 < some.report.isotropic.residual
    assert some.report.distortion < exact.report.distortion
    assert "class covariances" in str(exact.report)
    assert "no quadratic predictor" in exact.report.explain()


def test_constant_and_copied_features_stay_outside() -> None:
    X, labels = data(d=5, seed=2)
    wide = np.hstack([X, X[:, :2], np.ones((len(X), 1))])
    moments = sf.Moments(by="z").update(wide, labels)
    eraser = sf.isotropic(moments, erase="z", keep="y")
    clean = eraser(wide)
    (m0, S0), (m1, S1) = classes(clean, labels["z"])
    assert np.abs(m1 - m0).max() < 1e-9
    assert np.abs(S1 - S0).max() < 1e-8
    assert (clean[:, -1] == 1).all()
    np.testing.assert_allclose(clean[:, :2], clean[:, 5:7], atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    d=st.integers(2, 8),
    kind=st.sampled_from(["copies", "label", "few rows"]),
)
def test_classes_are_alike_where_their_covariances_are_singular(
    seed: int, d: int, kind: str
) -> None:
    """Also where the means differ off the range of S_w: a feature holds the label; few rows."""
    X, labels = data(n=d + 3 if kind == "few rows" else 300, d=d, seed=seed)
    z = labels["z"]
    assume(len(np.unique(z)) == 2)
    if kind == "copies":
        X = np.hstack([X, X @ np.random.default_rng(seed).normal(size=(d, 2))])
    elif kind == "label":
        X = np.hstack([X, (z == "a")[:, None].astype(float)])
    eraser = sf.isotropic(sf.Moments(by="z").update(X, labels), erase="z")
    clean = eraser(X)
    (m0, S0), (m1, S1) = classes(clean, z)
    before = [np.abs(S).max() for _, S in classes(X, z)]
    size = np.abs(X).max()
    # Least eigenvalues of 1e-5 and above: 1e-16 * 1e5, and a factor for sizes.
    assert np.abs(m1 - m0).max() < 1e-9 * size
    assert np.abs(S1 - S0).max() < 1e-8 * max(before)
    report = eraser.report
    assert report.variables[0].residual <= report.variables[0].bound
    assert report.isotropic.residual < 1e-8
    assert report.isotropic.n_kept == np.linalg.matrix_rank(clean - clean.mean(0), tol=1e-7 * size)
    if kind == "label":
        assert report.variables[0].singular_values == pytest.approx([1.0], abs=1e-9)
    changed = np.mean(np.sum((clean - X) ** 2, axis=1)) / X.var(axis=0).sum()
    assert report.distortion == pytest.approx(changed, rel=1e-7)


def test_files_and_bad_input(tmp_path: Any) -> None:
    X, labels = data()
    moments = sf.Moments(by="z").update(X, labels)
    eraser = sf.isotropic(moments, erase="z", keep="y")
    eraser.save(tmp_path / "e")
    again = sf.Projection.load(tmp_path / "e")
    assert np.array_equal(again(X), eraser(X))
    assert again.report == eraser.report
    assert 0 < eraser.report.certificate()["z"] < 1
    folds = sf.Folds(2, by="z").update(X, labels)
    np.testing.assert_allclose(sf.isotropic(folds, erase="z", keep="y")(X), eraser(X), atol=1e-8)
    three = sf.Moments(by="z").update(X, {"z": np.arange(len(X)) % 3})
    with pytest.raises(sf.InputError, match="two classes, and 'z' has 3"):
        sf.isotropic(three, erase="z")
    with pytest.raises(sf.InputError, match=r"sf\.Moments\(by='z'\)"):
        sf.isotropic(sf.Moments().update(X, labels), erase="z")
    for bad in (-0.1, 1.5, "a", None, True):
        with pytest.raises(sf.InputError, match="neutral"):
            sf.isotropic(moments, erase="z", neutral=bad)
    with pytest.raises(sf.LabelError, match="continuous"):
        sf.isotropic(sf.Moments().update(X, {"z": X[:, 0]}), erase="z")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_erasing_twice_is_erasing_once(dtype: str) -> None:
    """Rounding of erased rows is no difference; one of 1e-4 of the deviations is."""
    X, labels = data(n=2000, d=9)
    first = sf.Moments(by="z").update(X.astype(dtype), labels)
    clean = sf.isotropic(first, erase="z")(X.astype(dtype))
    with pytest.warns(sf.NothingErasedWarning):
        again = sf.isotropic(sf.Moments(by="z").update(clean, labels), erase="z")
    assert again.rank == 0
    wide = np.where(labels["z"] == "a", 1.0 + 1e-4, 1.0)[:, None]
    changed = clean.mean(0) + wide * (clean.astype(np.float64) - clean.mean(0))
    moments = sf.Moments(by="z").update(changed.astype(dtype), labels)
    assert sf.isotropic(moments, erase="z").rank > 0


def test_few_rows_warn() -> None:
    X, labels = data(n=60, d=12)
    alike = np.random.default_rng(0).normal(size=X.shape)
    with pytest.warns(sf.UnseenRowsWarning, match="rows in 12 dimensions"):
        sf.isotropic(sf.Moments(by="z").update(alike, labels), erase="z")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sf.isotropic(sf.Moments(by="z").update(*data(n=4000, d=4)), erase="z")
