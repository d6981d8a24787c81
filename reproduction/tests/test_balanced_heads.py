"""DFR and GroupDRO (`balanced_heads`) against a general solver and what they are for."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from reproduction.balanced_heads import SHARPNESS, Rows, dfr, group_dro, minimax_head


def draw(n: int = 500, seed: int = 0) -> Rows:
    """A task that the first feature shows, and a concept beside it, alike in 90 % of the rows."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    z = np.where(rng.random(n) < 0.9, y, 1 - y)
    X = rng.normal(size=(n, 3)) + np.outer(y, [1, 0, 0]) + np.outer(z, [0, 2, 0])
    return Rows(X, y, 2 * y + z)


def largest_loss(head: np.ndarray, rows: Rows, alpha: float) -> float:
    losses = np.logaddexp(0, -(2 * rows.y - 1) * (rows.X @ head[:-1] + head[-1]))
    cells = [losses[rows.cells == cell].mean() for cell in range(4)]
    return float(max(cells) + alpha / 2 * head[:-1] @ head[:-1])


@pytest.mark.parametrize("alpha", [0.1, 0.001])
def test_the_minimax_head_is_that_of_a_general_solver(alpha: float) -> None:
    """Minimise t + alpha / 2 |w|^2 subject to L_g <= t for all cells g, by SLSQP."""
    rows = draw()

    def slack(v: np.ndarray) -> np.ndarray:
        losses = np.logaddexp(0, -(2 * rows.y - 1) * (rows.X @ v[:3] + v[3]))
        return v[4] - np.array([losses[rows.cells == cell].mean() for cell in range(4)])

    best = minimize(
        lambda v: v[4] + alpha / 2 * v[:3] @ v[:3], np.array([0, 0, 0, 0, 1.0]), method="SLSQP",
        constraints={"type": "ineq", "fun": slack}, options={"ftol": 1e-12, "maxiter": 500},
    )  # fmt: skip
    found = minimax_head(rows, alpha, np.zeros(4))
    bound = np.log(4) / SHARPNESS[-1]
    assert abs(largest_loss(found, rows, alpha) - best.fun) <= bound + 1e-6
    assert largest_loss(1.1 * found, rows, alpha) > best.fun + bound + 1e-6  # control


def test_balanced_heads_read_less_of_the_concept_than_a_plain_one() -> None:
    train, validation, test = (draw(2000, seed) for seed in range(3))
    plain = LogisticRegression().fit(train.X, train.y)
    worst_of_plain, _ = test.accuracies((plain.coef_[0], float(plain.intercept_[0])))
    for fit in (dfr, group_dro):
        head = fit(train, validation, np.random.default_rng(0))
        assert abs(head[0][1]) < 0.5 * abs(plain.coef_[0, 1])
        assert test.accuracies(head)[0] > worst_of_plain + 0.1
