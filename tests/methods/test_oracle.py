"""oracle: constraints, least change against a quadratic programme, feasibility, the report."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Float, ignored, least_change, moved
from problems import covariance as cov

import splince_fast as sf
from splince_fast.exceptions import InfeasibleError, PrecisionWarning

Rows = tuple[Float, dict[str, Any]]


def data(n: int = 600, d: int = 7, classes: int = 3, seed: int = 0, tasks: int = 2) -> Rows:
    rng = np.random.default_rng(seed)
    z = rng.integers(0, classes, n)
    y = np.where(rng.random(n) < 0.6, z % tasks, rng.integers(0, tasks, n))
    means, effects = rng.normal(size=(classes, d)), rng.normal(size=(tasks, d))
    X = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + means[z] + effects[y]
    return X, {"z": np.array(list("abcdef"))[z], "y": y}


def assert_erased_and_kept(
    clean: Float, X: Float, z: Any, y: Any = None, rel: float = 1e-10
) -> None:
    before = np.linalg.norm(cov(X, z))
    assert np.linalg.norm(cov(clean, z)) < 1e-10 * before
    assert before > 0.01  # control
    if y is not None:
        kept = cov(X, y)
        assert np.linalg.norm(cov(clean, y) - kept) < rel * np.linalg.norm(kept)


def programme(X: Float, z: Any, y: Any) -> float:
    """Least tr(E Cov(w) E^T), w = (x, z), E Cov(w, z) = Sz, E Cov(w, y) = 0."""
    Z = (np.asarray(z)[:, None] == np.unique(z)[:-1]).astype(float)
    W = np.hstack([X, Z])
    S = np.cov(W.T, ddof=0)
    C = np.hstack([cov(W, z), np.zeros((W.shape[1], 0)) if y is None else cov(W, y)])
    target = np.hstack([cov(X, z), np.zeros((X.shape[1], 0 if y is None else cov(X, y).shape[1]))])
    E = least_change(S, C, target, np.eye(len(target)))
    return float(np.trace(E @ S @ E.T))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), classes=st.integers(2, 4), keep=st.booleans())
def test_constraints_and_least_change(seed: int, classes: int, keep: bool) -> None:
    X, labels = data(classes=classes, seed=seed)
    moments = sf.Moments().update(X, labels)
    eraser = sf.oracle(moments, erase="z", keep="y" if keep else None)
    clean = eraser(X, {"z": labels["z"]})
    assert_erased_and_kept(clean, X, labels["z"], labels["y"] if keep else None)
    changed = moved(clean, X)
    expected = programme(X, labels["z"], labels["y"] if keep else None)
    assert changed * X.var(axis=0).sum() == pytest.approx(expected, rel=1e-8)
    assert eraser.report.distortion == pytest.approx(changed, rel=1e-8)
    # Order of the changes; the control is an eraser without labels.
    plain = sf.splince(moments, erase="z", keep="y") if keep else sf.leace(moments, erase="z")
    assert changed < plain.report.distortion


@pytest.mark.parametrize("made", [{}, {"by": "z"}, {"block_rows": 50}])
def test_merged_and_factored_moments_know_the_same(made: Any) -> None:
    X, labels = data()

    def part(rows: slice, shift: float = 0.0) -> sf.Moments:
        return sf.Moments(**made).update(X[rows] + shift, {k: v[rows] for k, v in labels.items()})

    extra = part(slice(50), 3.0)
    total = part(slice(0, None, 2)) + extra + part(slice(1, None, 2)) - extra
    expected = sf.oracle(sf.Moments().update(X, labels), erase="z", keep="y")(X, labels)
    for moments in (total, total.factored(), total.scaled(3)):
        found = sf.oracle(moments, erase="z", keep="y")(X, labels)
        np.testing.assert_allclose(found, expected, atol=1e-9)


def scored(offset: float, d: int = 7) -> Rows:
    """Rows with a number, which one feature shows, and that feature itself."""
    X, labels = data(d=d)
    score = X[:, 0] + np.random.default_rng(1).normal(size=len(X)) + offset
    return X, labels | {"score": score, "feature": X[:, 1]}


def few(copies: bool) -> Rows:
    X, labels = data(n=20, d=30, classes=2)
    return (np.hstack([X[:, :5], X[:, :2], np.zeros((20, 1))]) if copies else X), labels


CONSTRAINED: dict[str, tuple[Rows, dict[str, Any], Any, Any]] = {
    # rows with labels, parameters of the moments, erase, keep
    "sampled covariance": (data(3000), {"subsample": 0.3}, "z", "y"),
    "variances": (data(), {"joint": [("z", "y")], "covariance_type": "diag"}, "z", "y"),
    "several concepts": (data(), {}, ["z", "y"], None),
    "fewer rows than features": (few(copies=False), {"by": "z"}, "z", "y"),
    "copies and a constant": (few(copies=True), {"by": "z"}, "z", "y"),
    "a number as task": (scored(100.0), {}, "z", "score"),
    "a number as concept": (scored(100.0), {}, "score", None),
    "numbers as both": (scored(100.0), {}, "score", "feature"),
    "a number at 1e4 deviations": (scored(1e4), {"by": "z"}, "z", "score"),
    "a number at 1e8 deviations": (scored(1e8), {"by": "z"}, "z", "score"),
}


@ignored("LabelFeatureWarning")
@pytest.mark.parametrize("case", CONSTRAINED)
def test_constraints_hold_for_rows_and_labels_of_any_kind(case: str) -> None:
    (X, labels), parameters, erase, keep = CONSTRAINED[case]
    names = [erase] if isinstance(erase, str) else erase
    used = {name: labels[name] for name in [*names, *([keep] if keep else [])]}
    moments = sf.Moments(**parameters).update(X, used)
    clean = sf.oracle(moments, erase=erase, keep=keep, missing="raise")(X, used)
    for name in names:
        assert_erased_and_kept(clean, X, used[name])
    if keep:
        rel = 1e-12 if "deviations" in case else 1e-10
        assert_erased_and_kept(clean, X, used[names[0]], used[keep], rel)


def test_relation_within_classes_is_kept_without_keep() -> None:
    """o-LEACE moves whole classes; o-SPLINCE does not, where something is to be given back."""
    X, labels = data()
    moments = sf.Moments().update(X, labels)
    for keep, same in ((None, True), ("y", False)):
        clean = sf.oracle(moments, erase="z", keep=keep)(X, labels)
        parts = [[a[labels["z"] == c] for a in (clean, X, labels["y"])] for c in "abc"]
        gaps = [np.abs(cov(after, y) - cov(before, y)).max() for after, before, y in parts]
        assert (max(gaps) < 1e-10) == same


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_strength_moves_between_the_two(strength: float) -> None:
    """The residual is what is lost: the largest over the features, each in its own deviation."""
    X, labels = data(classes=2)
    X = X * 3.0 ** np.arange(X.shape[1])
    moments = sf.Moments().update(X, labels)
    eraser = sf.oracle(moments, erase="z", keep="y", strength=strength)
    clean, none = eraser(X, labels), sf.oracle(moments, erase="z")(X, labels)
    units = X.std(0)[:, None]
    found, least, before = (cov(rows, labels["y"]) / units for rows in (clean, none, X))
    np.testing.assert_allclose(found, (1 - strength) * least + strength * before, atol=1e-10)
    assert np.allclose(clean, none, atol=1e-10) == (strength == 0.0)
    kept = eraser.report.variables[1]
    lost = np.abs(found - before).max() / np.abs(before).max()
    assert kept.residual == pytest.approx(lost, rel=1e-9, abs=1e-10)
    assert (kept.residual <= kept.bound) == (strength == 1.0)
    if strength < 1.0:
        assert "covariance that o-LEACE removes is restored" in eraser.report.explain()


@pytest.mark.parametrize("family", ["free", "through z alone", "function of z", "same span"])
def test_feasibility_is_decided_by_the_kernels(family: str) -> None:
    """O1: feasible iff the kernel of Cov(x, y | z) is in that of Cov(x, y); ranks are exact."""
    for seed in range(125):
        rng = np.random.default_rng(seed)
        n, d = 24, 4
        z, y = rng.integers(0, 2, n), rng.integers(0, 2, n)
        if family == "function of z":
            y = z.copy()
        X = rng.integers(-3, 4, (n, d)) + 2 * z[:, None]
        if family == "through z alone":  # both values of y have the same rows within each class
            z = np.repeat([0, 1], 12)
            y = np.array([0] * 8 + [1] * 4 + [0] * 4 + [1] * 8)
            base = rng.integers(-3, 4, (4, d))
            X = np.vstack([base] * 6) + 5 * z[:, None]
        if family == "same span":
            X = X + 2 * np.outer(y, np.ones(d, int))
        if len(set(z)) < 2 or len(set(y)) < 2:
            continue
        total = X.T @ (n * y - y.sum())  # n^2 Cov(x, y), in integers
        within, counts = np.zeros(d, int), np.bincount(z)  # Cov(x, y | z) times integers
        for c in (0, 1):
            own = z == c
            part = X[own].T @ (counts[c] * y[own] - y[own].sum())
            within = within + part * counts[1 - c]
        rows = X.astype(float)
        moments = sf.Moments().update(rows, {"z": z, "y": y})
        if not total.any() or within.any():
            clean = sf.oracle(moments, erase="z", keep="y")(rows, {"z": z})
            assert np.abs(cov(clean, z)).max() < 1e-9
            np.testing.assert_allclose(cov(clean, y), cov(rows, y), atol=1e-8)
        else:
            with pytest.raises(InfeasibleError, match="oracle cannot restore"):
                sf.oracle(moments, erase="z", keep="y")


def same_span(n: int = 400) -> tuple[Float, dict[str, Any]]:
    """Cov(x, z) and Cov(x, y) span one space: only the first feature covaries with either."""
    rng = np.random.default_rng(1)
    z = rng.integers(0, 2, n)
    y = np.where(rng.random(n) < 0.8, z, 1 - z)
    X = rng.normal(size=(n, 3))
    Z = np.column_stack([np.ones(n), z, y])
    X[:, 1:] -= Z @ np.linalg.lstsq(Z, X[:, 1:], rcond=None)[0]
    X[:, 0] += z + 0.5 * y
    return X, {"z": z, "y": y}


def test_report_states_the_price_of_one_column() -> None:
    """D_oS = D_oL / (1 - rho_o), rho_o = corr^2 / R^2(y | x, z); and D_oL <= D_oS <= D_S."""
    X, labels = data(classes=2)
    moments = sf.Moments(by="z").update(X, labels)
    report = sf.oracle(moments, erase="z", keep="y").report
    z, y = labels["z"] == "a", labels["y"]
    design = np.column_stack([np.ones(len(X)), X, z])
    fitted_y = design @ np.linalg.lstsq(design, y, rcond=None)[0]
    rho = np.corrcoef(z, y)[0, 1] ** 2 / (fitted_y.var() / y.var())
    assert report.oracle.rho == pytest.approx(rho, rel=1e-9)
    assert report.distortion == pytest.approx(report.oracle.distortion_leace / (1 - rho), rel=1e-9)
    alone = sf.oracle(moments, erase="z").report
    assert alone.distortion == alone.oracle.distortion_leace == report.oracle.distortion_leace
    assert alone.oracle.rho is None
    leace = sf.leace(moments, erase="z").report.distortion
    splince = sf.splince(moments, erase="z", keep="y").report.distortion
    assert alone.distortion < leace < splince
    assert alone.distortion < report.distortion < splince
    assert "o-LEACE" in str(report)
    shrunk = sf.oracle(moments.factored(shrinkage=0.5), erase="z", keep="y")
    assert shrunk.report.shrinkage == shrunk.fallback.report.shrinkage == 0.5
    assert shrunk.report.oracle.rho is None
    variances = sf.Moments(joint=[("z", "y")], covariance_type="diag").update(X, labels)
    assert sf.oracle(variances, erase="z", keep="y").report.distortion is None


@pytest.mark.parametrize(
    "options", [{}, {"keep": "y"}, *({"keep": "y", "strength": b} for b in (0.0, 0.5, 1.0))]
)
def test_fallback_is_the_eraser_without_labels_to_the_bit(options: dict[str, Any]) -> None:
    """It reuses the factor; rows without a label get as much of the task back."""
    X, labels = data()
    moments = sf.Moments(by="z").update(X, labels)
    plain = (sf.splince if options else sf.leace)(moments, erase="z", **options)
    for source in (moments, moments.factored()):
        fallback = sf.oracle(source, erase="z", **options).fallback
        assert fallback is not None
        np.testing.assert_array_equal(fallback.matrix(), plain.matrix())
        assert fallback.report == plain.report


def test_missing_labels_guard_if_they_are_missing_given_the_concept() -> None:
    X, labels = data()
    eraser = sf.oracle(sf.Moments(by="z").update(X, labels), erase="z", keep="y")
    z = labels["z"].astype(object)
    full, named = np.concatenate([X, X]), np.concatenate([z, z])  # with and without its label
    both = eraser(full, {"z": np.concatenate([z, np.where(z == "a", None, z)])})
    size = np.linalg.norm(cov(X, labels["z"]))
    assert np.linalg.norm(cov(both, named.astype(str))) < 1e-10 * size
    # Control: missing where a feature is large.
    hidden = np.where((z == "a") & (X[:, 0] > np.median(X[z == "a", 0])), None, z)
    assert np.linalg.norm(cov(eraser(X, {"z": hidden}), labels["z"])) > 1e-3 * size


def test_one_span_is_feasible_with_labels_and_names_the_way_out() -> None:
    X, labels = same_span()
    moments = sf.Moments(by="z").update(X, labels)
    with pytest.raises(InfeasibleError, match="missing='raise'"):
        sf.oracle(moments, erase="z", keep="y")
    clean = sf.oracle(moments, erase="z", keep="y", missing="raise")(X, labels)
    np.testing.assert_allclose(cov(clean, labels["y"]), cov(X, labels["y"]), atol=1e-12)
    with pytest.raises(InfeasibleError, match=r"combination .*1 - rho_o = "):
        sf.oracle(
            sf.Moments(by="z").update(X, {"z": labels["z"], "y": labels["z"]}),
            erase="z",
            keep="y",
            missing="raise",
        )


@pytest.mark.parametrize("noise", [1e-4, 0.0])
def test_features_that_nearly_hold_the_labels_are_warned_of(noise: float) -> None:
    """An exact copy of a label does not vary at fixed labels, and causes no warning."""
    X, labels = data(classes=2)
    feature = (labels["z"] == "a") + noise * np.random.default_rng(0).normal(size=len(X))
    rows = np.column_stack([X, feature])
    moments = sf.Moments(by="z").update(rows, labels)
    with pytest.warns(PrecisionWarning, match=r"1 / \(1 - c\^2\) is") if noise else nullcontext():
        eraser = sf.oracle(moments, erase="z", keep="y", missing="raise")
    assert_erased_and_kept(eraser(rows, labels), rows, labels["z"], labels["y"])


@pytest.mark.parametrize("made", [{"by": "z"}, {"joint": [("z", "y")]}])
def test_classes_that_are_declared_and_never_seen(made: dict[str, Any]) -> None:
    pd = pytest.importorskip("pandas")
    X, labels = data()
    plain = sf.oracle(sf.Moments(**made).update(X, labels), erase="z", keep="y")
    y = np.array(["no", "yes"])[labels["y"]]
    frame = pd.DataFrame(
        {
            "z": pd.Categorical(labels["z"], ["q", "c", "b", "a"]),
            "y": pd.Categorical(y, ["maybe", "yes", "no", "other"]),
        }
    )
    eraser = sf.oracle(sf.Moments(**made).update(X, frame), erase="z", keep="y")
    np.testing.assert_allclose(eraser(X, frame[["z"]]), plain(X, labels), atol=1e-10)
