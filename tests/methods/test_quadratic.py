"""Quadratic erasure through moments: guarantees, shrinkage, errors and rows of any kind.

Modules: `methods.quadratic`, `_solve.class_maps`.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import splince_fast as sf
from splince_fast.exceptions import (
    ConstantVariableError,
    InfeasibleError,
    InputError,
    LabelError,
    NotEnoughDataError,
    PrecisionWarning,
    UnknownVariableError,
    UnseenRowsWarning,
)


def data(n=1200, d=6, k=2, seed=0):
    """Classes of other means and covariances; a task of three classes, and a number."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, k, n)
    roots = np.eye(d) + 0.4 * rng.normal(size=(k, d, d))
    X = np.einsum("nij,nj->ni", roots[z], rng.normal(size=(n, d))) + np.outer(z, np.ones(d)) + 5
    score = X @ rng.normal(size=d) + rng.normal(size=n)
    y = np.digitize(score, np.quantile(score, [0.3, 0.6])) + (z == 1)
    labels = {"z": np.array(["a", "b", "c"])[z], "y": y, "s": score}
    return X, labels


def moments(X, labels, **parameters):
    return sf.Moments(by="z", **parameters).update(X, labels)


def quiet(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnseenRowsWarning)
        return sf.quadratic(*args, **kwargs)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("keep", [None, "y", "s", ["y", "s"]])
def test_classes_are_alike_and_the_task_is_kept(k, keep):
    X, labels = data(k=k)
    eraser = quiet(moments(X, labels), erase="z", keep=keep)
    clean = eraser(X, labels)
    groups = [clean[labels["z"] == c] for c in np.unique(labels["z"])]
    for part in groups:
        assert np.abs(part.mean(axis=0) - X.mean(axis=0)).max() < 1e-12 * 100
        gap = np.cov(part.T, ddof=0) - np.cov(groups[0].T, ddof=0)
        assert np.abs(gap).max() < 1e-10 * np.abs(np.cov(X.T)).max()
    before, after = (sf.Moments().update(rows, labels) for rows in (X, clean))
    kept = [keep] if isinstance(keep, str) else keep or []
    for name in kept:
        wanted = before.cross_covariance(name)
        assert np.abs(after.cross_covariance(name) - wanted).max() < 1e-10 * np.abs(wanted).max()
    if "y" not in kept:  # control: what is not kept changes
        assert np.abs(after.cross_covariance("y") - before.cross_covariance("y")).max() > 1e-3
    report = eraser.report
    assert all(v.residual < v.bound for v in report.variables)
    assert [v.name for v in report.variables] == ["z", *kept]
    changed = np.sum((clean - X) ** 2) / np.sum((X - X.mean(axis=0)) ** 2)
    assert np.isclose(report.distortion, changed, rtol=1e-9)
    assert np.isclose(report.distortion_leace, sf.leace(before, erase="z").report.distortion)
    deviations = X.std(axis=0)
    scaled = [deviations[:, None] ** -1 * a * deviations for a in eraser.maps]
    assert np.isclose(report.amplification, max(1, *(np.linalg.norm(a, 2) for a in scaled)))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_task_and_means_are_exact_for_any_share(share):
    X, labels = data()
    eraser = quiet(moments(X, labels), erase="z", keep="y", shrinkage=share)
    before, after = (sf.Moments().update(rows, labels) for rows in (X, eraser(X, labels)))
    assert np.allclose(after.cross_covariance("y"), before.cross_covariance("y"), atol=1e-10)
    assert np.abs(after.cross_covariance("z")).max() < 1e-12
    # Class means alone move for the share 1, which changes the rows less.
    alone = quiet(moments(X, labels), erase="z", shrinkage=share)
    means = {c: X[labels["z"] == c].mean(axis=0) for c in "ab"}
    moved = X - np.stack([means[c] for c in labels["z"]]) + X.mean(axis=0)
    assert np.allclose(alone(X, labels), moved, atol=1e-10) == (share == 1.0)
    least = np.sum((moved - X) ** 2) / np.sum((X - X.mean(axis=0)) ** 2)
    assert alone.report.distortion >= least * (1 - 1e-9)


def test_canonical_correlations_are_those_of_splince():
    X, labels = data()
    report = quiet(moments(X, labels), erase="z", keep=["y", "s"]).report
    other = sf.splince(sf.Moments().update(X, labels), erase="z", keep=["y", "s"]).report
    for ours, theirs in zip(report.variables, other.variables, strict=True):
        assert (ours.kind, ours.rank) == (theirs.kind, theirs.rank)
        assert np.allclose(ours.singular_values, theirs.singular_values, atol=1e-9)


@pytest.mark.parametrize("dtype", [int, bool, str])
@pytest.mark.parametrize("kind", ["moments", "folds", "folds of all"])
def test_a_mapping_of_classes_is_the_same(kind, dtype, tmp_path):
    """Classes are NumPy scalars."""
    X, labels = data()
    z = (labels["z"] == "b").astype(dtype)
    labels = {"y": labels["y"], "z": z}
    plain = quiet(moments(X, labels), erase="z", keep="y")
    if kind == "folds of all":
        source = sf.Folds(2, by="z").update(X, labels)
    else:
        source = {
            c: (sf.Folds(2) if kind == "folds" else sf.Moments()).update(
                X[z == c], {"y": labels["y"][z == c]}
            )
            for c in np.unique(z)
        }
    eraser = quiet(source, erase="z", keep="y")
    np.testing.assert_allclose(eraser.maps, plain.maps, atol=1e-8)
    eraser.save(tmp_path / "e")
    np.testing.assert_array_equal(sf.load_eraser(tmp_path / "e")(X, z), eraser(X, z))
    if kind == "moments":
        floats = {float(i): part for i, part in enumerate(source.values())}
        with pytest.raises(LabelError, match="cannot name a class"):
            sf.quadratic(floats, erase="z")


def test_rows_without_a_label_of_the_concept_are_in_no_class():
    X, labels = data()
    some = {**labels, "z": np.where(np.arange(len(X)) < 100, None, labels["z"])}
    found = quiet(moments(X, some), erase="z")
    rest = quiet(moments(X[100:], {n: v[100:] for n, v in labels.items()}), erase="z")
    assert np.allclose(found.maps, rest.maps, atol=1e-9)
    assert found.report.n_rows == len(X) - 100


def test_a_task_class_that_one_class_never_has():
    X, labels = data()
    labels["y"] = np.where(labels["z"] == "a", np.minimum(labels["y"], 1), labels["y"])
    clean = quiet(moments(X, labels), erase="z", keep="y")(X, labels)
    before, after = (sf.Moments().update(rows, labels) for rows in (X, clean))
    assert np.allclose(after.cross_covariance("y"), before.cross_covariance("y"), atol=1e-9)


def test_weights_count_as_rows():
    X, labels = data(300)
    w = np.random.default_rng(3).integers(1, 4, len(X))
    weighted = sf.Moments(by="z").update(X, labels, sample_weight=w)
    repeated = moments(np.repeat(X, w, axis=0), {n: np.repeat(v, w) for n, v in labels.items()})
    one, two = (quiet(m, erase="z", keep="y") for m in (weighted, repeated))
    assert np.allclose(one.maps, two.maps, atol=1e-7)


def test_a_feature_that_does_not_vary_stays_and_float32_rows_are_erased():
    X, labels = data()
    X = np.hstack([X, np.full((len(X), 1), 3.0), X[:, :1]])
    eraser = quiet(moments(X, labels), erase="z", keep="y")
    clean = eraser(X.astype(np.float32), labels)
    assert clean.dtype == np.float32
    assert np.allclose(clean[:, 6], 3.0)
    assert np.allclose(clean[:, 7], clean[:, 0], atol=1e-4)
    new = X + np.eye(8)[6]
    assert np.allclose(eraser(new, labels)[:, 6], 4.0)
    parts = [clean[labels["z"] == c].astype(float) for c in "ab"]
    gap = np.cov(parts[0].T) - np.cov(parts[1].T)
    assert np.abs(gap).max() < 0.02 * np.abs(np.cov(X.T)).max()


# -- errors ----------------------------------------------------------------------------------------


def refused(kind):
    """Moments that do not do, with the arguments."""
    rows = {"few": 30}.get(kind, 200)
    X, labels = data(rows, d={"few": 20, "one dimension": 1}.get(kind, 6))
    score, z = labels["s"], labels["z"]
    arguments = {"erase": "z"}
    if kind == "constant":
        X[z == "b", 2] = 1.0
    if kind == "one dimension":  # one combination can be kept, y has two
        labels["y"] = np.digitize(score, np.quantile(score, [0.3, 0.6]))
    if kind == "unlabelled":
        labels["s"] = np.where(np.arange(rows) < 7, np.nan, score)
    labels["same"] = (z == "a").astype(int)
    keep = {"one dimension": "y", "unlabelled": "s", "function": "same", "unknown": "nothing"}
    if kind in keep:
        arguments["keep"] = keep[kind]
    if kind in ("number", "other variable"):
        arguments["erase"] = "s" if kind == "number" else "y"
    one = sf.Moments().update(X, labels)

    def parts(**parameters):
        return {c: sf.Moments(**parameters).update(X[z == c]) for c in "ab"}

    sources = {
        "without by": one, "number": one, "diag": parts(covariance_type="diag"),
        "sample": parts(subsample=0.5), "no moments": 3, "no moments inside": {"a": 3},
        "snapshot inside": {"a": one, "b": one.factored()}, "snapshot": one.factored(),
        "one class": {"a": one}, "an empty class": {"a": one, "b": sf.Moments()},
    }  # fmt: skip
    return sources.get(kind) if kind in sources else moments(X, labels), arguments


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("without by", InputError, r"sf\.Moments\(by='z'\)"),
        ("other variable", InputError, r"those of 'z'.*by='y'"),
        ("number", LabelError, "bin it"),
        ("diag", InputError, "covariance_type='diag' or subsample="),
        ("sample", InputError, "covariance_type='diag' or subsample="),
        ("no moments", InputError, r"moments is an int; pass Moments\(by='z'\)"),
        ("no moments inside", InputError, "a mapping must hold"),
        ("snapshot inside", InputError, "a mapping must hold"),
        ("snapshot", InputError, r"pass Moments\(by='z'\)"),
        ("one class", ConstantVariableError, "1 class"),
        ("an empty class", ConstantVariableError, "1 class"),
        ("unknown", UnknownVariableError, "'nothing'"),
        ("unlabelled", InputError, "7 of 200 rows"),
        ("function", InfeasibleError, r"\[same = \d\]"),
        ("one dimension", InfeasibleError, r"sf\.oracle"),
        ("few", NotEnoughDataError, "rank of x, plus 1"),
        ("constant", NotEnoughDataError, r"class 'b'.*constant"),
    ],
)
def test_problems_without_an_eraser_are_refused(kind, error, text):
    source, arguments = refused(kind)
    with pytest.raises(error, match=text):
        sf.quadratic(source, **arguments)
    if kind == "few":  # control: shrinkage makes the class covariances regular
        X, labels = data(30, d=20)
        clean = quiet(moments(X, labels), erase="z", shrinkage=0.5)(X, labels)
        gap = clean[labels["z"] == "a"].mean(axis=0) - clean[labels["z"] == "b"].mean(axis=0)
        assert np.abs(gap).max() < 1e-9
    if kind == "one dimension":  # control
        report = quiet(source, erase="z", keep="s").report
        assert all(v.residual < v.bound for v in report.variables)


@pytest.mark.parametrize(
    "wrong",
    [{"shrinkage": 2}, {"shrinkage": "oas"}, {"shrinkage": "cv"}, {"erase": ["z", "y"]},
     {"erase": ("z", "y")}, {"erase": 3}, {"keep": np.eye(6)}, {"keep": []}],
)  # fmt: skip
def test_parameters_out_of_range(wrong):
    with pytest.raises(InputError):
        sf.quadratic(moments(*data(200)), **{"erase": "z", **wrong})


def test_few_rows_are_told():
    rng = np.random.default_rng(4)
    labels = {"z": rng.integers(0, 2, 200)}
    with pytest.warns(UnseenRowsWarning, match=r"sampling noise leaves .* new rows.*shrinkage="):
        raw = sf.quadratic(moments(rng.normal(size=(200, 20)), labels), erase="z")
    assert len(raw.report.warnings) == 2
    with warnings.catch_warnings():  # control: many rows
        warnings.simplefilter("error")
        sf.quadratic(moments(*data(20000, d=6)), erase="z")


@pytest.mark.parametrize("size", [1e-60, 1e60, 1e80])
def test_units_of_all_features_do_not_matter(size):
    X, labels = data(n=200)
    found, plain = (
        sf.quadratic(moments(rows, labels), erase="z", keep="s", shrinkage=0.5)
        for rows in (size * X, X)
    )
    np.testing.assert_allclose(found.report.distortion, plain.report.distortion, rtol=1e-6)
    np.testing.assert_allclose(found.maps, plain.maps, atol=1e-8)


def test_amplification_and_singular_classes_are_told():
    """A feature that hardly varies in one class: a warning, or a typed error."""
    X, labels = data()
    inside = labels["z"] == "b"
    for factor in (1e-5, 1e-9, 1e-16):
        rows = X.copy()
        rows[inside, 2] = 1 + factor * X[inside, 2]
        if factor == 1e-5:
            with pytest.warns(PrecisionWarning, match=r"up to .* times"):
                eraser = quiet(moments(rows, labels), erase="z")
            assert eraser.report.amplification > 1e4
        else:
            with pytest.raises(NotEnoughDataError, match=r"class 'b'"):
                quiet(moments(rows, labels), erase="z")


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.SplinceWarning")
def test_bounds_cover_rounded_rows_of_classes_of_unlike_scale() -> None:
    """Rank 1, deviations that differ up to 1e4 times, and means far from 0."""
    residuals = []
    for seed in range(1, 60, 2):
        rng = np.random.default_rng(seed)
        z = rng.integers(0, 2, size=60)
        X = rng.normal(size=(60, 1)) @ rng.normal(size=(1, 2))
        X = X * 10.0 ** rng.uniform(-4, 0, size=(2, 1))[z] + 6 * rng.normal(size=(2, 2))[z]
        report = sf.quadratic(moments(X, {"z": z}), erase="z").report
        (erased,) = report.variables
        assert erased.residual <= erased.bound
        residuals.append(erased.residual)
    assert max(residuals) > 128 * np.finfo(float).eps, (
        "the control: more than the solve's own rounding"
    )
