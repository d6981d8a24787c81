"""Figures of held-out rows: those of the rows themselves, of folds, chosen shrinkage, warnings.

Both sides are sums over a few hundred rows of terms that eraser and covariance know to 1e-12, so
1e-9 is the tolerance of the agreement.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from problems import Float, ignored, moved, report, sensitive, told
from sklearn.base import clone

import splince_fast as sf
from splince_fast import exceptions as errors
from splince_fast._solve import oblique as factors
from splince_fast._solve.options import INTENSITIES
from splince_fast.exceptions import UnseenRowsWarning
from splince_fast.moments import Folds

Labels = NDArray[Any]


def data(n: int = 900, d: int = 12) -> tuple[Float, Labels, Float]:
    rng = np.random.default_rng(0)
    z = rng.integers(0, 3, n)
    y = rng.normal(size=(n, 2)) + 0.5 * z[:, None]
    x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=(3, d))[z]
    return x + y @ rng.normal(size=(2, d)) + 5.0, z, y


def split_rows(x: NDArray[Any], k: int, **labels: Any) -> list[sf.Moments]:
    return [
        sf.Moments().update(x[i::k], {name: v[i::k] for name, v in labels.items()})
        for i in range(k)
    ]


def shown(eraser: sf.Projection, x: Float, z: Labels, y: Labels) -> list[float]:
    """Distortion, remaining association (by least squares) and kept fraction, from the rows."""
    clean = eraser(x)
    columns = z[:, None] if z.dtype.kind == "f" else np.eye(int(z.max()) + 1)[z][:, 1:]
    u, sizes, _ = np.linalg.svd(clean - clean.mean(axis=0), full_matrices=False)
    v = np.linalg.qr(columns - columns.mean(axis=0))[0]
    trace = np.sum((u[:, sizes > 1e-9 * sizes[0]].T @ v) ** 2) / columns.shape[1]
    units, targets = x.std(axis=0), y.reshape(len(y), -1)
    targets = (targets - targets.mean(axis=0)) / targets.std(axis=0)
    units = np.where(units == 0, 1.0, units)[:, None]
    before, after = ((a - a.mean(axis=0)).T @ targets / units for a in (x, clean))
    kept = 1 - np.linalg.norm(after - before) / np.linalg.norm(before)
    return [moved(clean, x), float(trace), float(kept)]


@ignored("UnseenRowsWarning")
@pytest.mark.parametrize(("k", "shift"), [(2, 0.0), (5, 0.0), (2, 40.0)])
@pytest.mark.parametrize("method", ["splince", "leace", "sal", "mean_projection"])
def test_figures_are_those_of_the_rows(method: str, k: int, shift: float) -> None:
    """The distortion includes the shift of the fold mean, which differs from the fitted mean."""
    x, z, y = data()
    x[np.arange(len(x)) % k == 1] += shift
    keep = "y" if method in ("splince", "sal") else None
    found = sf.cross_report(split_rows(x, k, z=z, y=y), erase="z", keep=keep, method=method)
    assert found.distortion == tuple(fold.distortion for fold in found.folds)
    for i, fold in enumerate(found.folds):
        inside = np.arange(len(x)) % k == i
        rest = sf.Moments().update(x[~inside], {"z": z[~inside], "y": y[~inside]})
        options = {} if keep is None else {"keep": keep}
        eraser, held_out = getattr(sf, method)(rest, erase="z", **options), x[inside]
        change = eraser(held_out) - held_out
        distortion = (change**2).sum(axis=1).mean() / held_out.var(axis=0).sum()
        _, trace, kept = shown(eraser, held_out, z[inside], y[inside])
        assert fold.distortion == pytest.approx(distortion, rel=1e-9)
        offset = (change.mean(axis=0) ** 2).sum() / held_out.var(axis=0).sum()
        assert (offset > 0.3) == (shift > 0)
        fitted = moved(eraser(x[~inside]), x[~inside])
        assert fold.distortion_fitted == pytest.approx(fitted, rel=1e-9)
        assert fold.concept == pytest.approx(trace, rel=1e-9)
        assert fold.kept == (None if keep is None else pytest.approx(kept, rel=1e-9))
        assert fold.chance == pytest.approx((x.shape[1] - 2) / (len(held_out) - 1))
        assert fold.n_rows == len(held_out)
        whitening = np.linalg.inv(np.linalg.cholesky(np.cov(held_out.T)))
        change = np.eye(x.shape[1]) - eraser.matrix()
        norm = np.linalg.norm(whitening @ change @ np.linalg.inv(whitening), 2)
        assert fold.amplification == pytest.approx(max(1.0, norm), rel=1e-9)


REAL = {
    "professions_word2vec": ("z_stereotype", "y_fact"),
    "professions_smollm2": ("z_stereotype", "y_fact"),
    "bug_profession_gender": ("z", "y"),
}


def real_rows(folder: Path) -> list[Any]:
    """Rows, concept and task in a random order."""
    arrays = [np.load(folder / f"{part}.npy") for part in ("X", *REAL[folder.name])]
    order = np.random.default_rng(0).permutation(len(arrays[0]))
    return [array[order] for array in arrays]


# --- do the figures predict? ---------------------------------------------------------------------


def kind_of_rows(kind: str, n: int, d: int = 40) -> tuple[Float, Labels, Labels]:
    """Concept and task in a feature each, and agreeing in 70 % of the rows."""
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, n)
    y = np.where(rng.random(n) < 0.7, z, 1 - z)
    x = rng.standard_t(3, size=(n, d)) if kind == "heavy" else rng.normal(size=(n, d))
    if kind == "rare":  # a quarter fires in 0.1 % of the rows, and is rounding of an encoder else
        k = d // 4
        fires = rng.random((n, k)) < 1e-3
        x[:, :k] = fires * rng.normal(3, 1, size=(n, k)) + 1e-6 * rng.normal(size=(n, k))
    x[:, d // 2] += z
    x[:, d // 2 + 1] += y
    return x, z, y


def assert_predicted(x: Float, z: Labels, y: Labels, shrinkage: Any, figures: int = 3) -> None:
    """Figures of held-out rows lie within the spread over folds, or within 10 % of their mean.

    Half of the rows make five folds, the other half five parts.
    """
    n = len(x) // 2
    folds = split_rows(x[:n], 5, z=z[:n], y=y[:n])
    found, _ = told(sf.cross_report, folds, erase="z", keep="y", shrinkage=shrinkage)
    said = np.array([[f.distortion, f.concept, f.kept] for f in found.folds])[:, :figures]
    parts = [shown(found.eraser, *(a[n + i :: 5] for a in (x, z, y))) for i in range(5)]
    held_out = np.mean(parts, axis=0)[:figures]
    # The trace is of the size of its chance level, so that this counts, too.
    slack = 0.1 * np.abs(held_out)
    slack[1] += 0.2 * found.folds[0].chance
    assert (said.min(axis=0) - slack <= held_out).all(), (said, held_out)
    assert (held_out <= said.max(axis=0) + slack).all(), (said, held_out)
    # Control: the fitted rows' own figure of the trace, which is 0, is no such prediction.
    assert held_out[1] > slack[1]


@pytest.mark.parametrize("shrinkage", [None, "oas"])
@pytest.mark.parametrize(
    "kind", ["gaussian", *(pytest.param(k, marks=pytest.mark.slow) for k in ("heavy", "rare"))]
)
def test_figures_predict_held_out_rows(kind: str, shrinkage: str | None) -> None:
    # The share kept is in units of deviations: features that are dead in a fold have none.
    assert_predicted(*kind_of_rows(kind, 8000), shrinkage, figures=2 if kind == "rare" else 3)


@pytest.mark.parametrize(("kind", "warns"), [("gaussian", False), ("heavy", False), ("rare", True)])
def test_only_features_that_rarely_fire_warn(kind: str, warns: bool) -> None:
    x, z, y = kind_of_rows(kind, 4000)
    frame = pd.DataFrame(x, columns=[f"unit {i}" for i in range(x.shape[1])])
    folds = Folds(2).update(frame, {"z": z, "y": y})
    found, caught = told(sf.cross_report, folds, erase="z", keep="y")
    assert (UnseenRowsWarning in map(type, caught)) == warns
    assert bool(found.warnings) == bool(found.remedies) == warns
    if warns:
        assert set(found.weak_features) <= set(range(10))
        assert (
            f"hardly vary in the fitted rows ('unit {found.weak_features[0]}'" in found.warnings[0]
        )
        assert found.warnings[0] in found.eraser.report.warnings
        promised = dict(found.remedies)["shrinkage='oas'"]
        assert promised < np.mean(found.distortion)
        after, silent = told(sf.cross_report, folds, erase="z", keep="y", shrinkage="oas")
        assert not silent
        assert np.mean(after.distortion) == pytest.approx(promised)
        with pytest.warns(UnseenRowsWarning, match="hardly vary") as seen:
            eraser = sf.splince(folds, erase="z", keep="y")
        assert seen[0].filename == __file__
        assert str(seen[0].message) in report(eraser).warnings


@sensitive
@pytest.mark.parametrize(
    ("name", "shrinkage"),
    [
        ("professions_word2vec", "oas"),
        ("bug_profession_gender", None),
        pytest.param("professions_smollm2", None, marks=pytest.mark.slow),
        pytest.param("professions_smollm2", "oas", marks=pytest.mark.slow),
        pytest.param("bug_profession_gender", "oas", marks=pytest.mark.slow),
    ],
)
def test_figures_predict_held_out_rows_of_real_data(
    real_data: Callable[[str], Path], name: str, shrinkage: str | None
) -> None:
    """For n below d without shrinkage they do not: word2vec says .03, rows .05, and it warns."""
    x, z, y = real_rows(real_data(name))
    assert_predicted(x.astype(np.float64), z, y, shrinkage)


# --- folds, and expected R^2 in held-out rows ----------------------------------------------------


def two_folds(x: Float, **labels: Any) -> Folds:
    return Folds(2).update(x, labels)


def report_of(x: Float, z: Any, fit: Any = sf.leace) -> Any:
    """The report of an eraser of z."""
    return fit(sf.Moments().update(x, {"z": z}), erase="z").report


def test_a_fit_factors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = factors.dense

    def counted(scatter: Float, *args: Any, **options: Any) -> Any:
        made.append(len(scatter))
        return original(scatter, *args, **options)

    monkeypatch.setattr(factors, "dense", counted)
    x, z, y = data(600, 8)
    fitted = sf.SPLINCE().fit(x, y, concept=z)
    assert (made, fitted.report_.held_out) == ([x.shape[1]], None)
    folds = two_folds(x, concept=z, task=y)
    sf.splince(folds, erase="concept", keep="task")  # control: two per fold, and one of all rows
    assert made == [x.shape[1]] * 6


def test_groups_stay_in_one_fold() -> None:
    """Every row occurs twice: without groups, held-out rows are copies of fitted rows."""
    x, z, _ = data(300, 60)
    twice = np.repeat(np.arange(300), 2)
    x, z, eraser = x[twice], z[twice], sf.LEACE(shrinkage="cv")
    apart, together, names, named = (
        clone(eraser).fit(x, **arguments)
        for arguments in (
            {"concept": z},
            {"concept": z, "groups": twice},
            {"concept": z, "groups": [f"id {i}" for i in twice]},
            {"concept": {"groups": z}, "groups": twice},
        )
    )
    assert together.report_.held_out.concept > 1.2 * apart.report_.held_out.concept
    assert names.report_.held_out is not None
    assert "groups" not in names.moments_.variables
    assert list(named.moments_.variables) == ["groups"]
    for estimator, groups, error, text in (
        (eraser, np.linspace(0, 1, 600), errors.LabelError, "groups"),
        (eraser, twice[:5], errors.InputError, "'groups' has 5 labels"),
        (sf.LEACE(), z, errors.InputError, "leave groups out"),  # there are no folds
    ):
        with pytest.raises(error, match=text):
            estimator.fit(x, concept=z, groups=groups)


def test_a_fold_without_the_concept_is_no_error() -> None:
    x, z, _ = data(600, 8)
    z = np.zeros(len(x), int)
    z[0] = 1  # one row, which lies in one of the folds
    x[0] += 5
    report = sf.leace(two_folds(x, concept=z), erase="concept").report
    assert (report.held_out, report.rank) == (None, 1)
    with pytest.raises(errors.ConstantVariableError) as caught:
        sf.LEACE(shrinkage="cv").fit(x, concept=z)
    assert any("folds" in note for note in caught.value.__notes__)


# --- methods take folds, and shrinkage is chosen on them -----------------------------------------


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("method", ["splince", "leace", "sal", "mean_projection"])
def test_methods_take_folds(method: str, count: int) -> None:
    x, z, y = data(600, 8)
    folds = Folds(count).update(x, {"z": z, "y": y})
    keep = {"keep": "y"} if method == "splince" else {}
    found = getattr(sf, method)(folds, erase="z", **keep)
    whole = getattr(sf, method)(folds.total, erase="z", **keep)
    assert np.array_equal(found.left, whole.left)
    assert np.array_equal(found.right, whole.right)
    report, cross = found.report, sf.cross_report(folds, erase="z", method=method, **keep)
    assert report.held_out.distortion == pytest.approx(np.mean(cross.distortion))
    assert "held-out rows" in str(report)
    assert "On held-out rows: changed" in report.explain()
    assert report == cross.eraser.report
    assert len(str(cross).splitlines()) == 2 + count
    assert [fold["n_rows"] for fold in cross.to_dict()["folds"]] == [f.n_rows for f in folds]
    with pytest.raises(errors.UnknownVariableError):
        getattr(sf, method)(folds, erase="no such", **keep)


@ignored("UnseenRowsWarning")
def test_cross_validated_shrinkage_is_the_best_of_those_tried() -> None:
    x, z, _ = kind_of_rows("rare", 2000)
    folds = two_folds(x, concept=z)
    tried = {
        float(np.mean(sf.cross_report(folds, erase="concept", shrinkage=a).distortion)): a
        for a in (*INTENSITIES, "oas")
    }
    same = sf.leace(folds.total, erase="concept", shrinkage=tried[min(tried)])
    for eraser in (
        sf.LEACE(shrinkage="cv").fit(x, concept=z).projection_,
        sf.leace(folds, erase="concept", shrinkage="cv"),
    ):
        assert eraser.report.held_out.distortion == pytest.approx(min(tried), rel=1e-12)
        assert eraser.report.shrinkage == same.report.shrinkage > 0
        np.testing.assert_allclose(eraser.matrix(), same.matrix(), atol=1e-12)
    few = sf.LEACE(shrinkage="cv").fit(x[:60, 10:], concept=z[:60])  # and yet it was asked for
    assert few.report_.held_out is not None


# --- warnings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [20, 100, 399])
def test_few_rows_warn_in_every_entry_point(n: int) -> None:
    rng = np.random.default_rng(0)
    z = np.arange(n) % 2
    x = rng.normal(size=(n, 200))
    moments = sf.Moments().update(x, {"z": z})
    calls: list[Any] = [
        lambda: sf.erase(x, z),
        lambda: sf.leace(moments, erase="z"),
        lambda: sf.leace(moments.factored(), erase="z"),
        lambda: sf.LEACE().fit(x, concept=z),
    ]
    for call in calls:
        with pytest.warns(errors.UnseenRowsWarning, match="rows per dimension of x") as found:
            call()
        assert [entry.filename for entry in found] == [__file__]
    # Control: the remedies, and twice as many rows as dimensions.
    sf.LEACE(shrinkage="oas").fit(x, concept=z)
    sf.SAL().fit(x, concept=z)
    sf.erase(rng.normal(size=(n, 9)), z)


# --- expected R^2 in held-out rows ---------------------------------------------------------------


def formula(x: Any, z: Any) -> float:
    """Sum of c^2 m / (c^2 + m) over the corrected canonical correlations c, over the rank of z."""
    if z.dtype.kind in "iu":  # classes 0, 1, ...
        z = np.eye(z.max() + 1)[z][:, 1:]
    z = z[:, None] if z.ndim == 1 else z
    bases = [np.linalg.qr(v - v.mean(axis=0))[0] for v in (x, z)]
    (n, p), r = x.shape, z.shape[1]
    c2 = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False) ** 2
    c2 = np.clip(c2 - (1 - c2) * p / (n - p - 1), 0, 1)
    m = (p - r) / n
    return float(np.sum(c2 * m / (c2 + m)) / r)


@pytest.mark.parametrize("name", ["z", "age", "both"])
def test_the_expected_trace_is_that_of_the_formula(name: str) -> None:
    rng = np.random.default_rng(0)
    x, z, y = data(600, 8)
    columns = {"z": z, "age": rng.normal(size=len(x)) + x[:, 0], "y": y}
    columns["both"] = rng.normal(size=(len(x), 2)) + x[:, :2]
    moments = sf.Moments().update(x, columns)
    for eraser in (sf.leace(moments, erase=name), sf.splince(moments, erase=name, keep="y")):
        report = eraser.report
        erased, *kept = report.variables
        assert erased.expected == pytest.approx(formula(x, columns[name]), rel=1e-9)
        assert all(v.expected is None for v in kept)
        assert "expected remaining R^2 of" in str(report)
        assert "new rows will show R^2" in report.explain()
    for fit in (sf.sal, partial(sf.leace, shrinkage=0.1)):
        assert report_of(x, columns[name], fit).variables[0].expected is None


def test_a_concept_of_noise_is_reported_as_no_association_beyond_noise() -> None:
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(200, 20)), rng.integers(0, 2, 200)
    for rows, noise in ((x, True), (x + z[:, None], False)):  # control: an association
        report = report_of(rows, z)
        assert (report.variables[0].expected == 0) is noise
        text = report.explain()
        assert ("no association of 'z' beyond noise was measured" in text) is noise
        assert ("new rows will show R^2" in text) is not noise
    # Nothing is left of one feature: the expectation is 0 for that reason.
    one = report_of(x[:, :1] + z[:, None], z)
    assert one.variables[0].expected == 0
    assert "beyond noise" not in one.explain()


def test_of_balanced_classes_the_bound_is_the_figure() -> None:
    rng = np.random.default_rng(0)
    z, quantity = np.arange(400) % 2, rng.normal(size=400)
    x = rng.normal(size=(400, 6)) + z[:, None] + quantity[:, None]
    labels = z, quantity, [*z[:200], *[None] * 200]
    balanced, number, half = (report_of(x, column).variables[0] for column in labels)
    assert (number.expected is None, number.expected_most) == (False, None)
    both = sf.Moments().update(x, {"z": z, "quantity": quantity})
    joint = report(sf.leace(both, erase=["z", "quantity"])).variables[0]
    for variable in (balanced, half, joint):
        assert variable.expected_most == pytest.approx(variable.expected, rel=1e-12)
    assert half.expected > balanced.expected * 1.5  # half of the labels: twice the noise


def test_too_few_rows_expect_nothing() -> None:
    x, z, _ = data(10, 8)
    for n, known in ((9, False), (10, True)):
        assert (report_of(x[:n], z[:n]).variables[0].expected is not None) == known
