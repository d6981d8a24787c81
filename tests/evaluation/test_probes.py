"""Probes (`probes.py`): the linear one against scikit-learn, and rows that allow none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from comparisons import run
from sklearn.base import clone
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.model_selection import GroupKFold, StratifiedKFold
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.exceptions import InputError, NonFiniteError


def by_script(model: Any, X: Any, z: Any) -> tuple[float, float]:
    """Accuracy and macro AUC of a classifier in five folds of standardised rows."""
    accuracies, areas = [], []
    for train, held in StratifiedKFold(5, shuffle=True, random_state=0).split(X, z):
        scaler = StandardScaler().fit(X[train])
        twin = clone(model).fit(scaler.transform(X[train]), z[train])
        rows = scaler.transform(X[held])
        scores = getattr(twin, "predict_proba", getattr(twin, "decision_function", None))(rows)
        accuracies.append(np.mean(twin.predict(rows) == z[held]))
        columns = scores[:, 1:] if scores.ndim == 2 and z.max() == 1 else scores
        columns = columns.reshape(len(held), -1).T
        first = 1 if len(columns) == 1 else 0
        areas += [roc_auc_score(z[held] == first + k, s) for k, s in enumerate(columns)]
    return float(np.mean(accuracies)), float(np.mean(areas))


LINEAR = LogisticRegression(C=1 / (0.01 * 480), tol=1e-9, max_iter=5000)  # of 480 training rows


@pytest.mark.parametrize("classes", [2, 3])
def test_probes_have_the_scores_of_a_plain_script(classes: int) -> None:
    """QDA has predict_proba, and SVC decision_function; both find more than the linear probe."""
    rng = np.random.default_rng(0)
    z = rng.integers(0, classes, 600)
    X = rng.normal(size=(600, 2)) * (1 + 2 * z)[:, None] + 0.4 * z[:, None]
    X *= [1.0, 100.0]
    models = {
        "linear": LINEAR,
        "quadratic": QuadraticDiscriminantAnalysis(),
        "kernel": SVC(random_state=0),
    }
    found = ev.leakage(X, z, probes=models | {"linear": "linear"})
    for name, model in models.items():
        accuracy, auc = by_script(model, X, z)
        assert found[name].accuracy == pytest.approx(accuracy, abs=1e-12)
        # Scores of three classes of SVC are compared as softmax probabilities, which may order rows
        # otherwise.
        rough = 0.02 if (name, classes) == ("kernel", 3) else 1e-6
        assert found[name].auc == pytest.approx(auc, abs=rough)
        assert found[name].chance == pytest.approx(np.bincount(z).max() / len(z))
        assert name == "linear" or found[name].accuracy > found["linear"].accuracy + 0.1


def test_groups_keep_twins_in_one_fold() -> None:
    rng = np.random.default_rng(0)
    pairs = np.repeat(np.arange(150), 2)
    z = np.tile([0, 1], 150)
    X = rng.normal(size=(150, 60))[pairs] + 0.01 * rng.normal(size=(300, 60))
    apart = ev.leakage(X, z, probes=("linear",))["linear"].auc
    together = ev.leakage(X, z, probes=("linear",), groups=pairs)["linear"].auc
    assert apart < 0.4  # far below one half, and not folded to its mirror image
    assert abs(together - 0.5) < 0.15


def test_a_probe_of_the_caller_is_a_metric_of_each_concept() -> None:
    rng = np.random.default_rng(0)
    (z, y), w = rng.integers(0, 2, (2, 1200)), rng.integers(0, 3, 1200)
    X = np.c_[rng.normal(size=(1200, 3)) * (1 + 9 * z)[:, None], rng.normal(size=1200) + 2 * w]
    probes = {"linear": "linear", "gauss": QuadraticDiscriminantAnalysis()}
    result = run(X, y, {"a": z, "b": w}, n_seeds=1, erasers=("none", "LEACE"), leakage=probes)
    assert result.mean("gauss_accuracy[a]", eraser="LEACE") > 0.8
    assert result.mean("probe_accuracy[a]", eraser="LEACE") < 0.65
    assert result.mean("probe_accuracy[b]", eraser="none") > 0.5
    assert result.mean("probe_accuracy[b]", eraser="LEACE") < 1 / 3 + 0.12
    assert result.context.probes == ("linear", "gauss")
    assert len(result.context.cells) == 12
    for key, label in (("gauss_accuracy[a]", "gauss acc [a]"), ("probe_auc[b]", "probe AUC [b]")):
        assert result.metric(key).label == label
        assert result.metric(key).lower_is_better is True
        assert result._head_of(key) == ""


def test_a_quantity_is_probed_by_r2_which_may_be_negative() -> None:  # case 15
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 5))
    found = ev.leakage(X, X[:, 0] * 1.5, probes=("linear",))["linear"]
    assert found.r2 > 0.99
    noise = ev.leakage(X, rng.normal(size=200), probes=("linear",))["linear"]
    assert noise.r2 < 0
    assert math.isnan(noise.accuracy)


def test_r2_is_relative_to_the_mean_of_the_training_rows() -> None:
    """Each group has a nearly constant quantity: R2 is high, and r2_score of sklearn is low."""
    rng = np.random.default_rng(0)
    person = np.arange(200) // 40
    age = 10.0 * person + rng.normal(size=200)
    X = np.c_[age + rng.normal(size=200), rng.normal(size=(200, 3))]
    found = ev.leakage(X, age, probes=("linear",), groups=person)["linear"]
    ratios, by_scored_rows = [], []
    folds = GroupKFold(5, shuffle=True, random_state=0)
    for train, held in folds.split(X, groups=person):
        scaler = StandardScaler().fit(X[train])
        model = Ridge(alpha=0.01 * len(train)).fit(scaler.transform(X[train]), age[train])
        y_pred = model.predict(scaler.transform(X[held]))
        error = np.sum((age[held] - y_pred) ** 2)
        ratios.append(1 - error / np.sum((age[held] - age[train].mean()) ** 2))
        by_scored_rows.append(r2_score(age[held], y_pred))
    assert found.r2 == pytest.approx(np.mean(ratios), rel=1e-9)
    assert found.r2 > 0.7 > 0 > np.mean(by_scored_rows)


def test_rows_that_allow_no_probe_give_the_reason() -> None:  # case 3
    X = np.random.default_rng(0).normal(size=(20, 3))
    for z, groups, text in (
        (np.zeros(20, int), None, "1 class"),
        (np.full(20, 0.5), None, "1 class, or value"),
        (np.repeat([0, 1], [17, 3]), None, "3 held-out rows"),
        (X[:, 0], np.arange(20) % 3, "fewer groups than the 5 folds"),
        (np.arange(20) // 10, np.arange(20) // 10, "fewer groups than the 5 folds"),
        (np.arange(20) // 19, np.arange(20), "no fold has all classes"),
    ):
        found = ev.leakage(X, z, groups=groups)
        assert found.probes == ()
        assert text in found.reason
    nine = np.arange(20) < 9
    assert "4 held-out rows" in ev.leakage(X[nine], X[nine, 0]).reason


@pytest.mark.parametrize("constant", [0.5, 0.1])
def test_folds_in_which_a_quantity_is_constant_have_no_r2(constant: float) -> None:
    """One group holds both outliers, so that the others equal the mean of their training rows."""
    quantity = np.full(50, constant)
    quantity[:2] += 1, -1
    X, groups = np.random.default_rng(0).normal(size=(50, 3)), np.arange(50) // 5
    found = ev.leakage(X, quantity, probes=("linear",), groups=groups)["linear"]
    assert abs(found.r2) < 1e-12


def test_rounding_residue_is_no_leakage() -> None:
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, 300)
    X = rng.normal(size=(300, 4))
    X[:, 3] = 1e-14 * z
    assert ev.leakage(X, z, probes=("linear",))["linear"].accuracy < 0.65
    X[:, 3] = z  # control: the same signal above rounding
    assert ev.leakage(X, z, probes=("linear",))["linear"].accuracy > 0.95


def test_equal_rows_are_at_chance_though_their_mean_is_rounded() -> None:
    X, z = np.full((5000, 3), 0.1), np.arange(5000) % 2
    assert X.std(axis=0).max() > 64 * np.finfo(np.float64).eps * 0.1  # that of the mean alone
    found = ev.leakage(X, z, probes={"linear": "linear", "own": SVC()})
    assert [(probe.accuracy, probe.auc) for probe in found.probes] == [(0.5, 0.5)] * 2
    assert ev.leakage(X, z + 0.5, probes=("linear",))["linear"].r2 == 0.0


def test_arguments_that_allow_no_probe_are_refused() -> None:
    """Rows with NaN are not at chance."""
    X, z = np.random.default_rng(0).normal(size=(300, 4)), np.arange(300) % 2
    bad = X.copy()
    bad[17, 3] = np.nan
    for call, error, match in (
        (lambda: ev.leakage(X, z, probes=("svm",)), InputError, "no probe 'svm'"),
        *(
            (lambda seed=seed: ev.leakage(X, z, random_state=seed), InputError, "random_state is")
            for seed in (-1, None, 1 << 32)
        ),
        (lambda: ev.leakage(bad, z), NonFiniteError, "X_fresh contains NaN.*row 17"),
        (lambda: ev.leakage(bad, z + 0.5), NonFiniteError, "X_fresh contains NaN.*row 17"),
    ):
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_rows_of_which_nothing_is_left_are_at_chance(classes: int, offset: float) -> None:
    rng = np.random.default_rng(classes)
    z = rng.integers(0, classes, 400)
    X = rng.normal(size=(400, classes - 1)) + 3 * np.eye(classes)[z][:, 1:] + offset
    clean = sf.leace(sf.Moments().update(X, {"z": z}), erase="z")(X)
    assert clean.std(axis=0).max() < 1e-9  # rounding alone
    for probe in ev.leakage(clean, z, probes={"linear": "linear", "own": SVC()}).probes:
        assert (probe.auc, probe.accuracy) == (0.5, pytest.approx(probe.chance, abs=0.01))
    assert ev.leakage(clean, z * 1.5, probes=("linear",))["linear"].r2 == 0.0
    assert ev.leakage(X - offset, z, probes=("linear",))["linear"].auc > 0.9
    result = run(X, rng.integers(0, 2, 400), z, erasers=("none", "LEACE"), heads=("retrained",))
    assert result.mean("probe_auc", eraser="none") > 0.9
    assert result.mean("probe_auc", eraser="LEACE") == 0.5
