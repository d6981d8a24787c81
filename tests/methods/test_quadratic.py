"""Quadratic erasure through moments: guarantees, least change, shrinkage, refusals, any rows."""

from __future__ import annotations

import numpy as np
import pytest
from problems import EPS, ignored, moved, told, within_bounds

import splince_fast as sf
from splince_fast import exceptions as errors

quietly = ignored("UnseenRowsWarning")


def data(n=1200, d=6, k=2, seed=0):
    """Classes of other means and covariances; a task of three classes, and a number."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, k, n)
    roots = np.eye(d) + 0.4 * rng.normal(size=(k, d, d))
    X = np.einsum("nij,nj->ni", roots[z], rng.normal(size=(n, d))) + np.outer(z, np.ones(d)) + 5
    score = X @ rng.normal(size=d) + rng.normal(size=n)
    y = np.digitize(score, np.quantile(score, [0.3, 0.6])) + (z == 1)
    return X, {"z": np.array(list("abcde"))[z], "y": y, "s": score}


def moments(X, labels, **parameters):
    return sf.Moments(by="z", **parameters).update(X, labels)


def crosses(*rows_and_labels):
    return (sf.Moments().update(rows, labels) for rows, labels in rows_and_labels)


def gap(X, z):
    """Largest difference of class covariances, relative to the largest entry of Cov(x)."""
    covariances = [np.cov(X[z == c].T.astype(float), ddof=0) for c in np.unique(z)]
    return max(np.abs(s - covariances[0]).max() for s in covariances) / np.abs(np.cov(X.T)).max()


@quietly
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("keep", [None, "y", "s", ["y", "s"]])
def test_classes_are_alike_and_the_task_is_kept(k, keep):
    X, labels = data(k=k)
    eraser = sf.quadratic(moments(X, labels), erase="z", keep=keep)
    clean, report = eraser(X, labels), eraser.report
    assert gap(clean, labels["z"]) < 1e-10
    for c in np.unique(labels["z"]):
        assert np.abs(clean[labels["z"] == c].mean(axis=0) - X.mean(axis=0)).max() < 1e-10
    before, after = crosses((X, labels), (clean, labels))
    kept = [keep] if isinstance(keep, str) else keep or []
    for name in ("y", *kept):
        wanted = before.cross_covariance(name)
        change = np.abs(after.cross_covariance(name) - wanted).max()
        # The control: a task that is not kept changes.
        assert change < 1e-10 * np.abs(wanted).max() if name in kept else change > 1e-3
    assert within_bounds(report)
    assert [v.name for v in report.variables] == ["z", *kept]
    assert np.isclose(report.distortion, moved(clean, X), rtol=1e-9)
    assert np.isclose(report.distortion_leace, sf.leace(before, erase="z").report.distortion)
    scale = X.std(axis=0)
    sizes = [np.linalg.norm(a * scale / scale[:, None], 2) for a in eraser.maps]
    assert np.isclose(report.amplification, max(1, *sizes))
    if kept:  # the whole of the variables counts, as it does for SPLINCE
        other = sf.splince(before, erase="z", keep=keep).report
        for ours, theirs in zip(report.variables, other.variables, strict=True):
            assert (ours.kind, ours.rank) == (theirs.kind, theirs.rank)
            assert np.allclose(ours.singular_values, theirs.singular_values, atol=1e-9)


def root(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def transport(a, b):
    """The symmetric T >= 0 with T a T = b."""
    inverse = np.linalg.inv(root(a))
    return inverse @ root(root(a) @ b @ root(a)) @ inverse


@quietly
@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_change_is_that_of_optimal_transport_to_the_barycentre(k, seed):
    """Alvarez-Esteban et al. (2016); other maps to one covariance change the rows more."""
    X, labels = data(d=5, k=k, seed=seed)
    parts = [X[labels["z"] == c] for c in np.unique(labels["z"])]
    p, covariances = [len(v) / len(X) for v in parts], [np.cov(v.T, ddof=0) for v in parts]
    found = sf.quadratic(moments(X, labels), erase="z").maps
    mean = sigma = np.tensordot(p, covariances, 1)
    for _ in range(500):
        step = np.tensordot(p, [transport(sigma, s) for s in covariances], 1)
        sigma = step @ sigma @ step
    twin = np.array([transport(s, sigma) for s in covariances])
    np.testing.assert_allclose(found, twin, rtol=1e-6, atol=1e-6)

    def cost(maps):
        terms = zip(p, maps - np.eye(5), covariances, strict=True)
        return sum(q * np.trace(e @ s @ e.T) for q, e, s in terms)

    other = np.array([transport(s, mean) for s in covariances])  # control
    assert cost(other) > 1.001 * cost(found)


@quietly
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_task_and_means_are_exact_for_any_share(share):
    X, labels = data()
    eraser = sf.quadratic(moments(X, labels), erase="z", keep="y", shrinkage=share)
    before, after = crosses((X, labels), (eraser(X, labels), labels))
    assert np.allclose(after.cross_covariance("y"), before.cross_covariance("y"), atol=1e-10)
    assert np.abs(after.cross_covariance("z")).max() < 1e-12
    # Class means alone move for the share 1, which changes the rows less.
    alone = sf.quadratic(moments(X, labels), erase="z", shrinkage=share)
    means = {c: X[labels["z"] == c].mean(axis=0) for c in "ab"}
    least = X - np.stack([means[c] for c in labels["z"]]) + X.mean(axis=0)
    assert np.allclose(alone(X, labels), least, atol=1e-10) == (share == 1.0)
    assert alone.report.distortion >= moved(least, X) * (1 - 1e-9)


@quietly
@pytest.mark.parametrize("dtype", [int, bool, str])
@pytest.mark.parametrize("kind", ["moments", "folds", "folds of all"])
def test_a_mapping_of_classes_is_the_same(kind, dtype):
    """Classes are NumPy scalars."""
    X, labels = data()
    z, y = (labels["z"] == "b").astype(dtype), labels["y"]
    plain = sf.quadratic(moments(X, {"y": y, "z": z}), erase="z", keep="y")
    make = sf.Moments if kind == "moments" else lambda: sf.Folds(2)
    source = {c: make().update(X[z == c], {"y": y[z == c]}) for c in np.unique(z)}
    if kind == "folds of all":
        source = sf.Folds(2, by="z").update(X, {"y": y, "z": z})
    eraser = sf.quadratic(source, erase="z", keep="y")
    np.testing.assert_allclose(eraser.maps, plain.maps, atol=1e-8)
    np.testing.assert_allclose(eraser(X, z), plain(X, z), atol=1e-7)


@quietly
def test_rows_without_a_label_are_in_no_class_and_weights_count_as_rows():
    X, labels = data(300)
    w = np.random.default_rng(3).integers(0, 4, len(X))
    missing = {**labels, "z": np.where(w == 0, None, labels["z"])}
    weighted = sf.Moments(by="z").update(X, labels, sample_weight=w)
    repeated = moments(np.repeat(X, w, axis=0), {n: np.repeat(v, w) for n, v in labels.items()})
    some = moments(X[w > 0], {n: v[w > 0] for n, v in labels.items()})
    for pair, keep in (((weighted, repeated), "y"), ((moments(X, missing), some), None)):
        one, two = (sf.quadratic(m, erase="z", keep=keep) for m in pair)
        assert np.allclose(one.maps, two.maps, atol=1e-7)
    assert one.report.n_rows == np.count_nonzero(w)


@quietly
def test_a_task_class_that_one_class_never_has():
    X, labels = data()
    labels["y"] = np.where(labels["z"] == "a", np.minimum(labels["y"], 1), labels["y"])
    clean = sf.quadratic(moments(X, labels), erase="z", keep="y")(X, labels)
    before, after = crosses((X, labels), (clean, labels))
    assert np.allclose(after.cross_covariance("y"), before.cross_covariance("y"), atol=1e-9)


@quietly
def test_constant_copied_and_tiny_features_and_float32_rows():
    """Off the support the identity; in directions too small to whiten the mean."""
    X, labels = data()
    tiny = X[:, :1] + 1e-5 * np.random.default_rng(0).normal(size=(len(X), 1))
    X = np.hstack([X, np.full((len(X), 1), 3.0), X[:, 1:2], tiny])
    with pytest.warns(errors.PrecisionWarning, match="rounding errors may undo"):
        eraser = sf.quadratic(moments(X, labels), erase="z")
    clean = eraser(X, labels)
    assert gap(clean, labels["z"]) < 1e-8
    np.testing.assert_allclose(eraser(X + np.eye(9)[6], labels)[:, 6], 4.0)
    off = np.eye(9)[1] - np.eye(9)[7]
    # The eigenvectors of 0 and of 5e-11 mix by eps / 5e-11.
    np.testing.assert_allclose(eraser(X + off, labels), clean + off, atol=1e-4)
    fits = [np.polyfit(v[:, 0], v[:, 8], 1, full=True)[1][0] for v in (clean, X)]
    assert fits[0] < 1e-2 * fits[1]
    narrow = eraser(X.astype(np.float32), labels)
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow[:, :8], clean[:, :8], atol=1e-3)


# -- errors ----------------------------------------------------------------------------------------


def test_few_rows_are_told():
    rng = np.random.default_rng(4)
    labels = {"z": rng.integers(0, 2, 200)}
    with pytest.warns(
        errors.UnseenRowsWarning, match=r"sampling noise leaves .* new rows.*shrinkage="
    ):
        raw = sf.quadratic(moments(rng.normal(size=(200, 20)), labels), erase="z")
    assert len(raw.report.warnings) == 2
    assert not told(sf.quadratic, moments(*data(20000, d=6)), erase="z")[1]  # control: many rows
    few = data(30, d=20)
    with pytest.raises(errors.NotEnoughDataError, match="rank of x, plus 1"):
        sf.quadratic(moments(*few), erase="z")
    shrunk = sf.quadratic(moments(*few), erase="z", shrinkage=0.5)(*few)  # control
    (after,) = crosses((shrunk, few[1]))
    assert np.abs(after.cross_covariance("z")).max() < 1e-9


@pytest.mark.parametrize("size", [1e-60, 1e60, 1e80])
def test_units_of_all_features_do_not_matter(size):
    X, labels = data(n=200)
    found, plain = (
        sf.quadratic(moments(rows, labels), erase="z", keep="s", shrinkage=0.5)
        for rows in (size * X, X)
    )
    np.testing.assert_allclose(found.report.distortion, plain.report.distortion, rtol=1e-6)
    np.testing.assert_allclose(found.maps, plain.maps, atol=1e-8)


@quietly
@pytest.mark.parametrize("factor", [1e-5, 1e-9, 1e-16, 0.0])
def test_amplification_and_singular_classes_are_told(factor):
    """A feature that hardly varies in one class: a warning, or a typed error."""
    X, labels = data()
    X[:, 2] = np.where(labels["z"] == "b", 1 + factor * X[:, 2], X[:, 2])
    if factor == 1e-5:
        with pytest.warns(errors.PrecisionWarning, match=r"up to .* times"):
            eraser = sf.quadratic(moments(X, labels), erase="z")
        assert eraser.report.amplification > 1e4
    else:
        with pytest.raises(errors.NotEnoughDataError, match=r"class 'b'.*constant"):
            sf.quadratic(moments(X, labels), erase="z")


@ignored("SplinceWarning")
def test_bounds_cover_rounded_rows_of_classes_of_unlike_scale() -> None:
    """Rank 1, deviations that differ up to 1e4 times, and means far from 0."""
    residuals = []
    for seed in range(1, 60, 2):
        rng = np.random.default_rng(seed)
        z = rng.integers(0, 2, size=60)
        X = rng.normal(size=(60, 1)) @ rng.normal(size=(1, 2))
        X = X * 10.0 ** rng.uniform(-4, 0, size=(2, 1))[z] + 6 * rng.normal(size=(2, 2))[z]
        (erased,) = sf.quadratic(moments(X, {"z": z}), erase="z").report.variables
        assert erased.residual <= erased.bound
        residuals.append(erased.residual)
    # The control: more than the solve's own rounding.
    assert max(residuals) > 128 * EPS
