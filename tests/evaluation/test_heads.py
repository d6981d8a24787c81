"""Heads (`heads.py`, `logistic.py`) against scikit-learn, which minimises the same objective."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.evaluation import heads, logistic
from splince_fast.exceptions import InputError, LabelError, NonFiniteError, NotEnoughDataError

LADDER = (1.0, 0.1, 0.01, 0.001, 0.0001)


def data(seed: int, n: int = 400, d: int = 12, classes: int = 2) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    z = np.where(rng.random(n) < 0.7, y % 2, rng.integers(0, 2, n))
    X = rng.normal(size=(n, d)) @ rng.normal(size=(d, d))
    X += y[:, None] * rng.normal(size=d) + z[:, None] * rng.normal(size=d)
    X -= X.mean(axis=0)
    return X / X.std(), y, z


def reference(X: Any, y: Any, alpha: float) -> LogisticRegression:
    return LogisticRegression(C=1 / (alpha * len(X)), tol=1e-10, max_iter=10_000).fit(X, y)


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("eraser", ["none", "SAL", "SPLINCE"])
def test_heads_of_all_alphas_equal_those_of_scikit_learn(classes: int, eraser: str) -> None:
    X, y, z = data(classes, classes=classes)
    moments = sf.Moments().update(X, {"y": y, "z": z})
    if eraser != "none":
        keep = {"keep": "y"} if eraser == "SPLINCE" else {}
        made: Any = getattr(sf, eraser.lower())(moments, erase="z", **keep)
        X = made(X)
    fits = logistic.fit(X, y, classes, np.array(LADDER), tol=1e-9)
    assert fits.converged.all()
    for j, alpha in enumerate(LADDER):
        # |g| <= tol bounds the error by tol / alpha in the least curved direction.
        twin = reference(X, y, alpha)
        ours = X @ fits.weights[j].T + fits.intercepts[j]
        theirs = X @ twin.coef_.T + twin.intercept_
        centre = (lambda s: s - s.mean(1, keepdims=True)) if classes > 2 else (lambda s: s)
        assert np.abs(centre(ours) - centre(theirs)).max() < 2e-5 / alpha**0.5
    control = reference(X, y, 0.02)  # another alpha
    assert np.abs(fits.weights[2] - control.coef_).max() > 1e-3


def test_the_diagonal_metric_reaches_the_same_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _ = data(2)
    whole = logistic.fit(X, y, 2, np.array([0.01]), tol=1e-9)
    monkeypatch.setattr(logistic, "_MAX_DENSE_FEATURES", 3)
    fits = logistic.fit(X, y, 2, np.array([0.01]), tol=1e-9)
    assert fits.converged.all()
    assert fits.weights == pytest.approx(whole.weights, abs=1e-6)


def test_separable_classes_are_refused_without_a_penalty_alone() -> None:  # case 5
    X = np.r_[np.linspace(-2, -1, 20), np.linspace(1, 2, 20)][:, None]
    y = np.repeat([0, 1], 20)
    with pytest.raises(InputError, match="separable"):
        ev.fit_head(X, y, alpha=0)
    assert ev.fit_head(X, y, alpha=1e-4).converged
    X, y, _ = data(3)
    y[:80] = 1 - y[:80]
    assert ev.fit_head(X, y, alpha=0).converged  # control: these are not separable


def test_a_head_of_raw_features_predicts_as_one_of_scaled_features() -> None:
    X, y, _ = data(4)
    raw = 7 * X + 3
    head = ev.fit_head(raw, y, alpha=0.01)
    unit = np.sqrt(raw.var(axis=0).mean())
    twin = reference((raw - raw.mean(axis=0)) / unit, y, 0.01)
    assert head.predict_proba(raw)[:, 1] == pytest.approx(
        twin.predict_proba((raw - raw.mean(axis=0)) / unit)[:, 1], abs=1e-5
    )


def test_selection_takes_worst_group_then_accuracy_then_the_larger_alpha() -> None:
    pairs = [(0.5, 0.7), (0.6, 0.7), (0.6, 0.8), (0.6, 0.8)]
    scored = [{"worst_group": worst, "accuracy": accuracy} for worst, accuracy in pairs]
    without_cells = [{"accuracy": accuracy} for accuracy in (0.6, 0.7, 0.8, 0.8)]
    assert heads.select_best(scored, LADDER[:4]) == 2
    assert heads.select_best(without_cells, LADDER[:4]) == 2


def test_a_quantity_gets_a_ridge_head() -> None:  # case 15
    X, _, _ = data(7)
    target = X[:, 0] + 0.1 * np.random.default_rng(0).normal(size=len(X))
    head = ev.fit_head(X, target, alpha=0.1, scale=False)
    twin = Ridge(alpha=0.1 * len(X)).fit(X, target)
    assert head.predict(X) == pytest.approx(twin.predict(X), abs=1e-8)
    with pytest.raises(LabelError, match="quantity"):
        head.predict_proba(X)


def test_rows_labels_and_penalties_without_a_head_are_refused() -> None:
    X, y, _ = data(0)
    head, bad = ev.fit_head(X, y), X.copy()
    bad[7, 2] = np.nan
    nan = (NonFiniteError, r"X contains NaN.*row 7")
    for call, error, match in (
        *((lambda a=a: ev.fit_head(X, y, alpha=a), InputError, "alpha") for a in (-1, np.inf, "a")),
        (lambda: ev.fit_head(X, np.full(400, np.nan)), NotEnoughDataError, "no row has a value"),
        (lambda: ev.fit_head(X, 0 * y), LabelError, "1 class"),
        (lambda: ev.fit_head(np.ones_like(X), y), NotEnoughDataError, "all rows are equal"),
        (lambda: ev.fit_head(bad, y), *nan),
        (lambda: ev.fit_head(bad, X[:, 0]), *nan),
        (lambda: head.predict(bad), *nan),  # NaN > 0 is False: it was the first class
        (lambda: head.predict_proba(bad), *nan),
        (lambda: head.predict(X[:, :2]), InputError, "2 columns, and 12 are expected, as in the r"),
    ):
        with pytest.raises(error, match=match):
            call()


def test_classes_and_rows_without_a_label_change_no_head() -> None:
    X, y, _ = data(0)
    names = np.array(["a", "b"])[y]
    kept = np.arange(400) % 4 != 0
    plain = ev.fit_head(X[kept], names[kept])
    declared = pd.Categorical(np.where(kept, names, None), categories=["a", "b", "neither"])
    found = ev.fit_head(X, declared)
    assert found.classes_ == ("a", "b")
    codes = ev.fit_head(X[kept], y[kept]).predict(X)
    assert np.array_equal(found.predict(X), np.array(["a", "b"])[codes])
    assert np.array_equal(found.coef_, plain.coef_)
    assert not np.array_equal(found.coef_, ev.fit_head(X, names).coef_)  # control
