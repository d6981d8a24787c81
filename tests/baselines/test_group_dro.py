"""GroupDRO: the optimum, its certificate, the online solver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from baseline_data import bug_parts, figures, made
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from splince_fast import InputError
from splince_fast.baselines import GroupDRO, _minimax, group_dro
from splince_fast.baselines._minimax import Coordinates, Minimax


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
def test_the_gap_is_small_and_true(k: int, classes: int, margin: float) -> None:
    data = made(n=500, d=7, k=k, classes=classes, tied=0.7)
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
    data = made(n=300, d=4)
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
    data = made(n=300, d=4)
    cells = 2 * data.y + data.z
    game = Minimax(
        data.X - data.X.mean(axis=0), data.y, cells, np.ones(300), 2, 0.05, 0.0, lambda: None
    )
    _, gap, _, _ = game.certificate(game.zeros(), 1000.0)
    assert gap > 0.05


@pytest.mark.parametrize("ulps", range(1, 9))
def test_the_gap_is_a_number_where_chances_round_up(ulps: int) -> None:
    """Every class is predicted a rounding too often: no distribution is left to mix with."""
    codes = np.arange(40) % 2
    rows = np.random.default_rng(0).normal(size=(40, 2))
    game = Minimax(rows, codes, codes, np.ones(40), 2, 0.1, 0.0, lambda: None)
    above = np.full((40, 2), np.log(0.5 * (1 + ulps * np.finfo(float).eps)))
    with mock.patch.object(game, "log_chances", return_value=above):
        _, gap, _, _ = game.certificate(game.zeros(), 4.0)
    assert gap == pytest.approx(game.certificate(game.zeros(), 4.0)[1], rel=1e-13)


@pytest.mark.parametrize("classes", [2, 3])
def test_gradients_are_differences(classes: int) -> None:
    data = made(n=120, d=5, classes=classes, tied=0.6)
    cells = 2 * data.y + data.z
    weight = np.random.default_rng(0).uniform(0.5, 2, size=120)
    game = Minimax(data.X - 5, data.y, cells, weight, classes, 0.1, 1.0, lambda: None)
    point = np.random.default_rng(1).normal(size=game.zeros().size)
    _, slope = game.smoothed(point, 10.0)
    step = 1e-6
    differences = [
        (game.smoothed(point + step * e, 10.0)[0] - game.smoothed(point - step * e, 10.0)[0])
        / (2 * step)
        for e in np.eye(point.size)
    ]
    np.testing.assert_allclose(slope, differences, atol=1e-7)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("classes", [2, 3])
def test_coordinates_change_no_value_and_make_the_problem_round(
    dense: bool, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_minimax, "_DENSE", 100 if dense else 0)
    data = made(n=400, d=5, classes=classes, tied=0.6)
    X = (data.X - data.X.mean(axis=0)) * np.array([1, 3, 10, 30, 100])
    game = Minimax(X, data.y, 2 * data.y + data.z, np.ones(400), classes, 0.1, 0.0, lambda: None)
    coordinates = Coordinates(game)
    rng = np.random.default_rng(1)
    point = 0.01 * rng.normal(size=game.zeros().size)
    v = coordinates.of(point)
    np.testing.assert_allclose(coordinates.parameters(v), point, rtol=1e-10)
    _, slope = game.smoothed(point, 10.0)
    step = 1e-6 * rng.normal(size=v.size)
    ahead, _ = game.smoothed(coordinates.parameters(v + step), 10.0)
    behind, _ = game.smoothed(coordinates.parameters(v - step), 10.0)
    assert (ahead - behind) / 2 == pytest.approx(float(coordinates.slope(slope) @ step), rel=1e-4)

    def condition(slope_of: Any) -> float:
        """Of the Hessian at 0, by differences, in the weights of the first class."""
        steps = 1e-5 * np.eye(v.size)[:5]
        return float(np.linalg.cond([(slope_of(e) - slope_of(-e))[:5] for e in steps]))

    def plain(u: np.ndarray) -> np.ndarray:
        return game.smoothed(u, 1e-3)[1]

    def changed(u: np.ndarray) -> np.ndarray:
        return coordinates.slope(game.smoothed(coordinates.parameters(u), 1e-3)[1])

    assert condition(plain) > 100  # control
    assert condition(changed) < 4


def test_weights_are_repetitions_and_offsets_do_not_matter() -> None:
    data = made(n=300, d=4)
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


def test_it_lowers_the_worst_loss_and_beats_the_online_solver() -> None:
    data = made(n=2000, d=6, tied=0.95)
    options: dict[str, Any] = {"alpha": 0.01, "random_state": 0, "validation_share": 0}
    exact = GroupDRO(**options).fit(data.X, data.y, groups=data.z)
    online = GroupDRO(solver="sgd", **options).fit(data.X, data.y, groups=data.z)
    plain = LogisticRegression(C=1 / (0.01 * 2000)).fit(data.X, data.y)
    worst = [cell_losses(h, data.X, data.y, data.z).max() for h in (exact, online, plain)]
    assert worst[0] < 0.8 * worst[2]
    assert exact.report_.loss <= online.report_.loss + 1e-3
    assert online.report_.loss == pytest.approx(exact.report_.loss, rel=0.15)
    assert online.report_.gap >= exact.report_.gap


def test_the_online_solver_restores_its_best_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made(n=600, d=4)
    scores = []
    original = GroupDRO._worst_and_mean

    def noted(self: GroupDRO, *args: Any) -> tuple[float, float]:
        scores.append(original(self, *args))
        return scores[-1]

    monkeypatch.setattr(GroupDRO, "_worst_and_mean", noted)
    head = GroupDRO(alpha=0.01, solver="sgd", step_size=2.0, patience=5, random_state=0)
    head.fit(data.X, data.y, groups=data.z)
    epochs, chosen = scores[:-1], scores[-1]
    assert chosen == max(epochs)
    assert len(epochs) == epochs.index(max(epochs)) + 1 + 5  # patience starts anew at each best
    assert epochs[-1] < chosen


def test_a_gap_that_cannot_be_closed_is_told() -> None:
    data = made(n=300, d=4)
    with pytest.warns(ConvergenceWarning, match="duality gap"):
        GroupDRO(alpha=0.05, tol=1e-15).fit(data.X, data.y, groups=data.z)


def test_validation_chooses_the_strength() -> None:
    data = made(n=900)
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
        ({"solver": "admm"}, "solver is 'admm'"),
        ({"margin": -1.0}, "margin is -1.0"),
        ({"eta": 0.0}, "eta is 0.0"),
        ({"max_epochs": 0}, "max_epochs is 0"),
        ({"tol": float("nan")}, "tol is nan"),
    ],
)
def test_bad_parameters_are_refused(options: dict[str, Any], match: str) -> None:
    data = made(n=100)
    head = GroupDRO(**options)
    with pytest.raises(InputError, match=match):
        head.fit(data.X, data.y, groups=data.z)
    assert not hasattr(head, "n_features_in_")


def test_ctrl_c_leaves_the_classifier_unfitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    data, head = made(n=100), GroupDRO()
    monkeypatch.setattr(group_dro, "minimize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        head.fit(data.X, data.y, groups=data.z)
    assert not [name for name in vars(head) if name.endswith("_")]


@pytest.mark.slow
def test_table_a(real_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    bug = bug_parts(real_data("bug_profession_gender"))
    rows, found = bug.fitted, {}
    exact = GroupDRO._exact

    def noted(self: GroupDRO, game: Minimax, alpha: float, start: Any) -> Any:
        packed, report = exact(self, game, alpha, start)
        found[alpha] = (*game.unpack(packed), report)
        return packed, report

    monkeypatch.setattr(GroupDRO, "_exact", noted)
    tuned = GroupDRO(alpha=(0.1, 0.01, 0.001)).fit(
        bug.X[rows], bug.y[rows], groups=bug.z[rows], validation=bug.mask
    )
    assert tuned.report_.alpha == 0.1
    mean = bug.X[bug.train].mean(axis=0)
    for alpha, wanted in {0.1: (0.798, 0.780, 0.037), 0.01: (0.770, 0.708),
                             0.001: (0.733, 0.640)}.items():  # fmt: skip
        coef, intercept, report = found[alpha]
        assert report.gap < 5e-4
        decided = ((bug.X[bug.test] - mean) @ coef[0] + intercept[0] > 0).astype(int)
        np.testing.assert_allclose(figures(bug, decided)[: len(wanted)], wanted, atol=0.004)
    np.testing.assert_array_equal(
        tuned.predict(bug.X[bug.test]),
        ((bug.X[bug.test] - mean) @ found[0.1][0][0] + found[0.1][1][0] > 0).astype(int),
    )


def test_validation_rows_may_come_apart() -> None:
    data = made(n=600)
    mask = np.arange(600) >= 450
    head = GroupDRO(alpha=(1.0, 0.1))
    whole = head.fit(data.X, data.y, groups=(data.z, data.y), validation=mask).coef_
    extra = (data.X[mask], data.y[mask], np.stack([data.z, data.y], axis=1)[mask])
    parts = head.fit(
        data.X[~mask], data.y[~mask], groups=(data.z[~mask], data.y[~mask]), validation=extra
    ).coef_
    np.testing.assert_array_equal(parts, whole)
