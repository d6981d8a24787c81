"""GroupDRO: the optimum, its certificate (`_minimax`), the online solver."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from baseline_data import bug_parts, draw, figures
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from splince_fast import InputError
from splince_fast.baselines import GroupDRO, _minimax
from splince_fast.baselines._linear import CellRows
from splince_fast.baselines._minimax import Minimax


def cell_losses(head: Any, X: Any, y: Any, z: Any, margin: float = 0.0) -> np.ndarray:
    """Mean log-loss of each cell, by its definition."""
    chances = head.predict_proba(X)
    column = np.searchsorted(head.classes_, y)
    each = -np.log(chances[np.arange(len(y)), column])
    cells = sorted({*zip(y.tolist(), z.tolist(), strict=True)})
    rows = [(y == a) & (z == b) for a, b in cells]
    return np.array([each[r].mean() + margin / np.sqrt(r.sum()) for r in rows])


@pytest.mark.parametrize(("k", "classes"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("margin", [0.0, 2.0])
def test_the_gap_is_small_and_bounds_other_heads(k: int, classes: int, margin: float) -> None:
    data = draw(n=500, d=7, k=k, classes=classes, tied=0.7)
    head = GroupDRO(alpha=0.02, margin=margin).fit(data.X, data.y, groups=data.z)
    report = head.report_
    losses = cell_losses(head, data.X, data.y, data.z, margin)
    np.testing.assert_allclose(report.cell_losses, losses, rtol=1e-9)
    assert report.loss == pytest.approx(losses.max() + 0.01 * np.sum(head.coef_**2), rel=1e-9)
    assert 0 <= report.gap <= 1e-3
    assert sum(report.cell_weights) == pytest.approx(1.0)
    # Random heads are no better than the bound allows.
    rng = np.random.default_rng(0)
    best = report.loss
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(60):
            other = GroupDRO()
            other.n_features_in_, other.classes_ = 7, head.classes_
            other.coef_ = head.coef_ + size * rng.normal(size=head.coef_.shape)
            other.intercept_ = head.intercept_ + size * rng.normal(size=head.intercept_.shape)
            found = cell_losses(other, data.X, data.y, data.z, margin).max()
            best = min(best, found + 0.01 * np.sum(other.coef_**2))
    assert best >= report.loss - report.gap


def test_the_optimum_is_that_of_a_general_solver() -> None:
    """The epigraph form, min s + penalty subject to L_g <= s, by SLSQP."""
    data = draw(n=300, d=4)
    head = GroupDRO(alpha=0.05).fit(data.X, data.y, groups=data.z)
    probe = GroupDRO()
    probe.n_features_in_, probe.classes_ = 4, np.array([0, 1])

    def slack(point: np.ndarray) -> np.ndarray:
        probe.coef_, probe.intercept_ = point[None, :4], point[4:5]
        return point[5] - cell_losses(probe, data.X, data.y, data.z)

    def objective(point: np.ndarray) -> float:
        return float(point[5] + 0.025 * point[:4] @ point[:4])

    start = np.array([0.0, 0, 0, 0, 0, 1.0])
    solved = minimize(
        objective, start, method="SLSQP", constraints={"type": "ineq", "fun": slack},
        options={"maxiter": 500, "ftol": 1e-12},
    )  # fmt: skip
    assert solved.fun == pytest.approx(head.report_.loss, abs=1e-3)
    assert solved.fun >= head.report_.loss - head.report_.gap - 1e-6


def test_control_the_certificate_of_a_bad_head_is_large() -> None:
    data = draw(n=300, d=4)
    cells = 2 * data.y + data.z
    rows = CellRows(data.X - data.X.mean(axis=0), data.y, np.ones(300), cells)
    problem = Minimax(rows, 2, alpha=0.05)
    _, gap, _, _ = problem.certificate(problem.zero_head(), 1000.0)
    assert gap > 0.05


@pytest.mark.parametrize("ulps", range(1, 9))
def test_the_gap_is_a_number_where_probabilities_round_up(ulps: int) -> None:
    """Every class is predicted too often by a rounding: nothing is left to mix with."""
    codes = np.arange(40) % 2
    rows = np.random.default_rng(0).normal(size=(40, 2))
    problem = Minimax(CellRows(rows, codes, np.ones(40), codes), 2, alpha=0.1)
    above = np.full((40, 2), np.log(0.5 * (1 + ulps * np.finfo(float).eps)))
    with mock.patch.object(problem, "log_proba", return_value=above):
        _, gap, _, _ = problem.certificate(problem.zero_head(), 4.0)
    assert gap == pytest.approx(problem.certificate(problem.zero_head(), 4.0)[1], rel=1e-13)


def test_weights_are_repetitions_and_offsets_do_not_matter() -> None:
    data = draw(n=300, d=4)
    weight = 1 + np.random.default_rng(1).integers(0, 3, size=300)
    rows = np.repeat(np.arange(300), weight)
    head = GroupDRO(alpha=0.05, tol=1e-6)
    weighted = head.fit(data.X, data.y, groups=data.z, sample_weight=weight).decision_function(
        data.X
    )
    repeated = head.fit(data.X[rows], data.y[rows], groups=data.z[rows]).decision_function(data.X)
    np.testing.assert_allclose(weighted, repeated, atol=0.02)
    shifted = head.fit(data.X[rows] + 1e3, data.y[rows], groups=data.z[rows])
    np.testing.assert_allclose(shifted.decision_function(data.X + 1e3), repeated, atol=0.02)


def test_the_exact_solver_lowers_the_worst_loss_and_beats_the_online_solver() -> None:
    data = draw(n=2000, d=6, tied=0.95)
    options: dict[str, Any] = {"alpha": 0.01, "random_state": 0, "validation_share": 0}
    exact = GroupDRO(**options).fit(data.X, data.y, groups=data.z)
    online = GroupDRO(solver="sgd", **options).fit(data.X, data.y, groups=data.z)
    plain = LogisticRegression(C=1 / (0.01 * 2000)).fit(data.X, data.y)
    worst = [cell_losses(h, data.X, data.y, data.z).max() for h in (exact, online, plain)]
    assert worst[0] < 0.8 * worst[2]
    assert exact.report_.loss <= online.report_.loss + 1e-3
    assert online.report_.loss == pytest.approx(exact.report_.loss, rel=0.15)
    assert online.report_.gap >= exact.report_.gap


def test_the_online_solver_restores_its_best_epoch() -> None:
    data = draw(n=600, d=4)
    mask = np.arange(600) % 5 == 0
    cells = (2 * data.y + data.z)[mask]

    def fit(max_epochs: int, patience: int) -> tuple[GroupDRO, tuple[float, float]]:
        head = GroupDRO(
            alpha=0.01, solver="sgd", step_size=2.0, random_state=0,
            max_epochs=max_epochs, patience=patience,
        ).fit(data.X, data.y, groups=data.z, validation=mask)  # fmt: skip
        hit = head.predict(data.X[mask]) == data.y[mask]
        return head, (min(hit[cells == c].mean() for c in range(4)), hit.mean())

    runs = [fit(epochs, 100) for epochs in range(1, 16)]
    scores = [score for _, score in runs]
    assert scores == sorted(scores)  # further epochs never lose the best one
    assert scores[0] < scores[-1]
    # An epoch is new where it replaces the head; patience counts from the last new one.
    new = [True, *((a[0].coef_ != b[0].coef_).any() for a, b in pairwise(runs))]
    stops = [k for k in range(3, 15) if not any(new[k - 2 : k + 1])]
    assert stops
    patient, _ = fit(15, 3)
    np.testing.assert_array_equal(patient.coef_, runs[stops[0]][0].coef_)


def test_losses_of_any_size_leave_the_cell_weights_of_the_online_solver_finite() -> None:
    """In float64 exp(eta L) is infinite from eta L = 710 on, as it is for rows in large units."""
    data = draw(n=1000)
    options: dict[str, Any] = {"solver": "sgd", "alpha": 1e-9, "eta": 1.0, "max_epochs": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = GroupDRO(**options, random_state=0).fit(1e4 * data.X, data.y, groups=data.z)
    assert np.isfinite(head.coef_).all()
    assert sum(head.report_.cell_weights) == pytest.approx(1)
    assert head.score(1e4 * data.X, data.y) > 0.6
    with pytest.raises(InputError, match="the steps of solver='sgd' diverge at alpha = 1000"):
        GroupDRO(solver="sgd", alpha=1e3, step_size=1.0).fit(data.X, data.y, groups=data.z)


def test_cell_weights_grow_by_the_exponentials_of_their_losses() -> None:
    """One epoch of two steps against the rule as it is written."""
    data = draw(n=40, d=4)
    settings: dict[str, Any] = {"alpha": 0.1, "batch_size": 20, "max_epochs": 1, "eta": 0.7}
    head = GroupDRO(
        solver="sgd", validation_share=0, step_size=0.5, random_state=3, **settings
    ).fit(data.X, data.y, groups=data.z)
    cells, rng = 2 * data.y + data.z, np.random.default_rng(3)
    members = [np.flatnonzero(cells == g) for g in range(4)]
    X = data.X - data.X.mean(axis=0)
    w, b, q = np.zeros(4), 0.0, np.full(4, 0.25)
    for _ in range(2):
        counts = np.bincount(rng.integers(4, size=20), minlength=4)
        drawn = [
            rows[np.floor(rng.random(n) * len(rows)).astype(int)]
            for rows, n in zip(members, counts, strict=True)
        ]
        losses, gradients = np.zeros(4), np.zeros((4, 5))
        for g, rows in enumerate(drawn):
            if len(rows):
                p = 1 / (1 + np.exp(-(X[rows] @ w + b)))
                right = np.where(data.y[rows] == 1, p, 1 - p)
                losses[g] = -np.log(right).mean()
                design = np.column_stack([X[rows], np.ones(len(rows))])
                gradients[g] = (p - data.y[rows]) @ design / len(rows)
        q = q * np.where(counts > 0, np.exp(0.7 * losses), 1.0)
        q /= q.sum()
        step = q @ gradients + 0.1 * np.append(w, 0.0)
        w, b = w - 0.5 * step[:4], b - 0.5 * step[4]
    np.testing.assert_allclose(head.coef_[0], w, rtol=1e-12)
    np.testing.assert_allclose(head.intercept_[0], b - w @ data.X.mean(axis=0), rtol=1e-12)


def test_a_gap_above_the_tolerance_warns() -> None:
    data = draw(n=300, d=4)
    with pytest.warns(ConvergenceWarning, match="duality gap"):
        GroupDRO(alpha=0.05, tol=1e-15).fit(data.X, data.y, groups=data.z)


def test_validation_rows_choose_alpha() -> None:
    data = draw(n=900)
    mask = np.arange(900) % 3 == 0
    tuned = GroupDRO(alpha=(1e-3, 10.0, 1e-1)).fit(data.X, data.y, groups=data.z, validation=mask)
    singles = {
        s: GroupDRO(alpha=s).fit(data.X[~mask], data.y[~mask], groups=data.z[~mask])
        for s in (1e-3, 10.0, 1e-1)
    }

    def score(alpha: float) -> tuple[float, float, float]:
        hit = singles[alpha].predict(data.X[mask]) == data.y[mask]
        cells = (2 * data.y + data.z)[mask]
        return min(hit[cells == c].mean() for c in range(4)), hit.mean(), alpha

    assert tuned.report_.alpha == max(singles, key=score)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"alpha": ()}, "alpha is"),
        ({"alpha": np.array(0.1)}, r"alpha is array\(0.1\)"),
        ({"solver": "admm"}, "solver is 'admm'"),
        ({"margin": -1.0}, "margin is -1.0"),
        ({"eta": 0.0}, "eta is 0.0"),
        ({"max_epochs": 0}, "max_epochs is 0"),
        ({"tol": float("nan")}, "tol is nan"),
    ],
)
def test_bad_parameters_are_refused(options: dict[str, Any], match: str) -> None:
    data = draw(n=100)
    head = GroupDRO(**options)
    with pytest.raises(InputError, match=match):
        head.fit(data.X, data.y, groups=data.z)
    assert not hasattr(head, "n_features_in_")


def test_ctrl_c_leaves_the_classifier_unfitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    data, head = draw(n=100), GroupDRO()
    monkeypatch.setattr(_minimax, "minimize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        head.fit(data.X, data.y, groups=data.z)
    assert not [name for name in vars(head) if name.endswith("_")]


@pytest.mark.slow
def test_figures_on_biographies_by_alpha(real_data: Callable[[str], Path]) -> None:
    bug = bug_parts(real_data("bug_profession_gender"))
    rows, train = bug.fitted, bug.train
    tuned = GroupDRO().fit(bug.X[rows], bug.y[rows], groups=bug.z[rows], validation=bug.mask)
    assert tuned.report_.alpha == 0.1
    for alpha, wanted in {0.1: (0.798, 0.780, 0.037), 0.01: (0.770, 0.708),
                             0.001: (0.733, 0.640)}.items():  # fmt: skip
        head = GroupDRO(alpha=alpha).fit(bug.X[train], bug.y[train], groups=bug.z[train])
        assert head.report_.gap < 5e-4
        predicted = head.predict(bug.X[bug.test])
        np.testing.assert_allclose(figures(bug, predicted)[: len(wanted)], wanted, atol=0.004)
        if alpha == 0.1:
            np.testing.assert_array_equal(tuned.predict(bug.X[bug.test]), predicted)


def test_a_separate_validation_set_equals_a_mask() -> None:
    data = draw(n=600)
    mask = np.arange(600) >= 450
    head = GroupDRO(alpha=(1.0, 0.1))
    whole = head.fit(data.X, data.y, groups=(data.z, data.y), validation=mask).coef_
    extra = (data.X[mask], data.y[mask], np.stack([data.z, data.y], axis=1)[mask])
    parts = head.fit(
        data.X[~mask], data.y[~mask], groups=(data.z[~mask], data.y[~mask]), validation=extra
    ).coef_
    np.testing.assert_array_equal(parts, whole)
