"""Figures of held-out rows: methods of folds, shrinkage chosen on them, warnings, expectations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from problems import Float, ignored
from sklearn.base import clone

import splince_fast as sf
from splince_fast import exceptions as errors
from splince_fast._runtime.rows import splitmix64
from splince_fast._solve import factor as factors
from splince_fast._solve.options import INTENSITIES
from splince_fast.moments import Folds


def data(n: int = 600, d: int = 8, seed: int = 0) -> tuple[Float, NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 3, n)
    y = np.where(rng.random(n) < 0.7, z % 2, rng.integers(0, 2, n))
    x = rng.normal(size=(n, d)) + rng.normal(size=(3, d))[z] + rng.normal(size=(2, d))[y]
    return x, y, z


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
    x, y, z = data()
    fitted = sf.SPLINCE().fit(x, y, concept=z)
    assert (made, fitted.report_.held_out) == ([x.shape[1]], None)
    folds = two_folds(x, concept=z, task=y)
    sf.splince(folds, erase="concept", keep="task")  # control: two per fold, and one of all rows
    assert made == [x.shape[1]] * 6


def test_groups_stay_in_one_fold() -> None:
    """Rows that come twice: unless twins stay together, no row of a fold is new to the other."""
    x, _, z = data(300, 60)
    twice = np.repeat(np.arange(300), 2)
    x, z, eraser = x[twice], z[twice], sf.LEACE(shrinkage="cv")
    apart, together, names, named = (
        clone(eraser).fit(x, **arguments)
        for arguments in (
            {"concept": z}, {"concept": z, "groups": twice},
            {"concept": z, "groups": [f"id {i}" for i in twice]},
            {"concept": {"groups": z}, "groups": twice},
        )
    )  # fmt: skip
    assert together.report_.held_out.concept > 1.2 * apart.report_.held_out.concept
    assert names.report_.held_out is not None
    assert "groups" not in names.moments_.variables
    assert list(named.moments_.variables) == ["groups"]
    for estimator, groups, error, text in (
        (eraser, np.linspace(0, 1, 600), errors.LabelError, "groups"),
        (eraser, twice[:5], errors.InputError, "groups has 5 rows"),
        (sf.LEACE(), z, errors.InputError, "leave groups out"),  # there are no folds
    ):
        with pytest.raises(error, match=text):
            estimator.fit(x, concept=z, groups=groups)


def test_a_fold_without_the_concept_is_no_error() -> None:
    x, _, z = data()
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
    x, y, z = data()
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
    assert sf.Report.from_dict(report.to_dict()) == report == cross.eraser.report
    assert len(str(cross).splitlines()) == 2 + count
    assert [fold["n_rows"] for fold in cross.to_dict()["folds"]] == [f.n_rows for f in folds]
    with pytest.raises(errors.UnknownVariableError):
        getattr(sf, method)(folds, erase="no such", **keep)


def weak(n: int = 600, d: int = 30) -> tuple[Float, NDArray[Any]]:
    """Features that fire in one row of each fold, and are noise of the encoder elsewhere."""
    rng = np.random.default_rng(1)
    z = rng.integers(0, 2, n)
    x = rng.normal(size=(n, d)) + 0.3 * z[:, None]
    x[:, :3] = 1e-4 * rng.normal(size=(n, 3)) + 3e-5 * z[:, None]
    fold = splitmix64(np.arange(n, dtype=np.uint64)) % np.uint64(2)
    x[np.flatnonzero(fold == 0)[0], 0] = x[np.flatnonzero(fold == 1)[0], 1] = 20.0
    return x, z


@ignored("UnseenRowsWarning")
def test_cross_validated_shrinkage_is_the_best_of_those_tried() -> None:
    x, z = weak()
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


def test_cross_validated_shrinkage_needs_folds() -> None:
    x, _, z = data(60)
    moments = sf.Moments().update(x, {"z": z})
    for call in (
        lambda: sf.leace(moments, erase="z", shrinkage="cv"),
        lambda: moments.factored("cv"),
        lambda: sf.LEACE(shrinkage="cv").partial_fit(x, concept=z),
        lambda: sf.LEACE.from_moments(moments, erase="z", shrinkage="cv"),
    ):
        with pytest.raises(errors.InputError, match="chosen on folds"):
            call()
    fitted = sf.LEACE(shrinkage="cv").fit(x, concept=z)  # few rows, and yet it was asked for
    assert fitted.report_.held_out is not None


# --- warnings ------------------------------------------------------------------------------------


def test_weak_features_are_named() -> None:
    x, z = weak()
    frame = pd.DataFrame(x, columns=[f"unit {i}" for i in range(x.shape[1])])
    source = [(frame[:300], {"z": z[:300]}), (frame[300:], {"z": z[300:]})]
    named, numbered = sf.Moments.from_blocks(source, folds=2), two_folds(x, z=z)
    for call, folds, names in (
        (sf.leace, named, "'unit 0', 'unit 1'"), (sf.cross_report, named, "'unit 0', 'unit 1'"),
        (sf.leace, numbered, "0, 1"),
    ):  # fmt: skip
        with pytest.warns(errors.UnseenRowsWarning, match=rf"hardly vary .*\({names}\)") as found:
            result: Any = call(folds, erase="z")
        assert found[0].filename == __file__
        assert str(found[0].message) in getattr(result, "eraser", result).report.warnings


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


# --- what is expected of new rows ----------------------------------------------------------------


@pytest.mark.parametrize(("d", "n", "c"), [(50, 200, 0.5), (50, 1000, 0.5), (100, 400, 0.15)])
def test_the_expected_trace_is_that_of_a_simulation(d: int, n: int, c: float) -> None:
    rng = np.random.default_rng(1)
    left, said = [], []
    for _ in range(60):  # rows of unit covariance, of which one direction has correlation c with z
        z, X = rng.normal(size=n), rng.normal(size=(n, d))
        X[:, 0] = c * z + np.sqrt(1 - c * c) * X[:, 0]
        moments = sf.Moments().update(X, {"z": z})
        b = moments.cross_covariance("z")[:, 0]
        left.append(c * c * (1 - b[0] ** 2 / (b @ b)))
        said.append(sf.leace(moments, erase="z").report.variables[0].expected)
    m = (d - 1) / n
    formula = c * c * m / (c * c + m)
    # Terms of order 1 / p and 1 / (n c^2) are left out, and the mean has its own error.
    slack = formula * (2 / d + 1 / (n * c * c)) + 3 * np.std(left) / 60**0.5
    assert abs(np.mean(left) - formula) < slack
    assert abs(np.mean(said) - formula) < slack + 3 * np.std(said) / 60**0.5
    assert abs(np.mean(left) - 2 * formula) > slack  # control


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
    x, y, z = data()
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
        assert sf.Report.from_dict(report.to_dict()) == report
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
    assert "beyond noise" not in report_of(x[:, :1] + z[:, None], z).explain()


def test_of_balanced_classes_the_bound_is_the_figure() -> None:
    rng = np.random.default_rng(0)
    z, quantity = np.arange(400) % 2, rng.normal(size=400)
    x = rng.normal(size=(400, 6)) + z[:, None] + quantity[:, None]
    labels = z, quantity, [*z[:200], *[None] * 200]
    balanced, number, half = (report_of(x, column).variables[0] for column in labels)
    assert (number.expected is None, number.expected_most) == (False, None)
    for variable in (balanced, half):
        assert variable.expected_most == pytest.approx(variable.expected, rel=1e-12)
    assert half.expected > balanced.expected * 1.5  # half of the labels: twice the noise


def test_too_few_rows_expect_nothing() -> None:
    x, _, z = data(10, 8)
    for n, known in ((9, False), (10, True)):
        assert (report_of(x[:n], z[:n]).variables[0].expected is not None) == known
