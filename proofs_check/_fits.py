"""Linear heads: least squares and ridge in exact arithmetic, logistic and softmax to 40 digits.

A certificate bounds the distance between a computed logistic or softmax head w and the minimiser of
its loss f. Along any direction v, |f'''| <= R |v| f''. For logistic heads R = max |x_i|, since
|sigma''| <= sigma'. For softmax heads R = sqrt(2) max |x_i|, since a third cumulant is at most the
range times the variance. Hence f''(w + t v) >= exp(-R t |v|) f''(w). Let H = f''(w), let
nu = |f'(w)|_{H^-1} be the Newton decrement, and let |v|_H = 1, so that |v| <= lambda_min(H)^{-1/2}.
Then the slope of f at distance t from w in direction v is at least

    -nu + (1 - exp(-rho t)) / rho,    rho = R / sqrt(lambda_min(H)),

which is positive for t = 2 nu if nu rho <= 1/2. In this case a minimiser exists, is unique, and has
a distance of at most 2 nu from w in the norm of H. The error of the score of x is then at most
2 nu |x|_{H^-1}.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import mpmath  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from proofs_check._linalg import (
    Matrix,
    Number,
    column_basis,
    eye,
    inverse,
    pinv,
    rational,
    solve,
    to_float,
)

DIGITS = 40


def with_ones(x: Matrix) -> Matrix:
    """Return [x, 1], the rows with a column of ones."""
    ones = np.empty((len(x), 1), dtype=object)
    ones[...] = rational([[1]])[0, 0]
    return np.hstack([x, ones])


def least_squares(features: Matrix, y: Matrix) -> Matrix:
    """Return the exact minimum-norm least-squares coefficients."""
    return pinv(features) @ y


def ridge(features: Matrix, y: Matrix, penalty: Matrix) -> Matrix:
    """Return the minimiser w of |y - F w|^2 + w^T penalty w, where F is ``features``."""
    return inverse(features.T @ features + penalty) @ features.T @ y


def ridge_unpenalised_intercept(features: Matrix, y: Matrix) -> Matrix:
    """Return ridge coefficients with penalty 1/100; the last one, the intercept, has none."""
    penalty = eye(features.shape[1]) / 100
    penalty[-1, -1] = 0 * penalty[-1, -1]
    return ridge(features, y, penalty)


def range_coordinates(p: Matrix) -> Matrix:
    """Return a matrix V whose columns are a basis of range(P).

    A head theta = V eta on Px is the head P^T V eta on x.
    """
    return column_basis(p)


@dataclass(frozen=True)
class Certified:
    """Scores of t test rows, (t, classes - 1), and a bound on the error for each row."""

    scores: Matrix
    error: list[Number]


def _gradient_and_hessian(f: Matrix, y: Matrix, w: Matrix, ridge: float) -> tuple[Matrix, Matrix]:
    """Return gradient and Hessian of the softmax loss with respect to the stacked columns of w.

    Class 0 is the reference class, whose score is 0.
    """
    scores = f @ w
    k, classes = w.shape
    probabilities = np.empty(scores.shape, dtype=object)
    for i, row in enumerate(scores):
        exponentials = [mpmath.exp(s) for s in row]
        total = 1 + mpmath.fsum(exponentials)
        probabilities[i] = [value / total for value in exponentials]
    ridge_weights = np.full((k, 1), ridge)
    ridge_weights[-1] = 0
    gradient = (f.T @ (probabilities - y) + ridge_weights * w).T.reshape(-1, 1)
    hessian = np.empty((k * classes, k * classes), dtype=object)
    for a in range(classes):
        for b in range(classes):
            curvature = probabilities[:, a] * ((1 if a == b else 0) - probabilities[:, b])
            hessian[a * k : (a + 1) * k, b * k : (b + 1) * k] = f.T @ (curvature[:, None] * f)
    hessian = hessian + np.diag(np.tile(ridge_weights.ravel(), classes))
    return gradient, hessian


def _float_start(f: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return softmax coefficients in float64, from damped Newton steps."""
    w = np.zeros((f.shape[1], y.shape[1]))
    for _ in range(60):
        exponentials = np.exp(f @ w)
        p = exponentials / (1 + exponentials.sum(1, keepdims=True))
        gradient = (f.T @ (p - y)).T.ravel()
        blocks = [
            [f.T @ ((p[:, a] * (float(a == b) - p[:, b]))[:, None] * f) for b in range(y.shape[1])]
            for a in range(y.shape[1])
        ]
        step = np.linalg.solve(np.block(blocks), gradient)
        w -= (step / max(1.0, float(np.abs(step).max()))).reshape(y.shape[1], -1).T
        if np.abs(step).max() < 1e-12:
            break
    return w


def softmax(features: Matrix, y: Matrix, test: Matrix, *, ridge: float = 0.0) -> Certified:
    """Fit a softmax head by maximum likelihood to 40 digits, with a certificate.

    Parameters
    ----------
    features, test
        Training rows, (n, k), and test rows, (t, k), of mpf numbers; the last column is 1. The
        caller sets the precision by ``mpmath.workdps``.
    y
        Class indicators (n, classes - 1) without the reference class.
    ridge
        The penalty is ridge / 2 times the sum of squared coefficients, without the intercepts. The
        certificate is still valid, as the third derivative of the penalty is 0.

    Raises
    ------
    ValueError
        The certificate fails: the classes are separable or the columns linearly dependent.
    """
    w = np.vectorize(mpmath.mpf, otypes=[object])(_float_start(to_float(features), to_float(y)))
    for _ in range(30):  # a few Newton steps from the float64 start suffice
        gradient, hessian = _gradient_and_hessian(features, y, w, ridge)
        inverse_hessian = inverse(hessian)
        decrement = mpmath.sqrt((gradient.T @ inverse_hessian @ gradient)[0, 0])
        if decrement < mpmath.mpf(10) ** (5 - DIGITS):
            break
        w = w - (inverse_hessian @ gradient).reshape(w.shape[1], -1).T
    radius = mpmath.sqrt(2 * max(sum(v * v for v in row) for row in features))
    rho = radius * mpmath.sqrt(sum(inverse_hessian[i, i] for i in range(len(inverse_hessian))))
    if not decrement * rho <= mpmath.mpf(1) / 2:
        raise ValueError(
            "no minimiser could be certified; the classes may be separable or the columns dependent"
        )
    k = features.shape[1]
    blocks = [inverse_hessian[a * k : (a + 1) * k, a * k : (a + 1) * k] for a in range(w.shape[1])]
    error = [2 * decrement * mpmath.sqrt(max((row @ b @ row) for b in blocks)) for row in test]
    return Certified(test @ w, error)


def widest_margin(rows: Matrix, metric: Matrix) -> Matrix | None:
    """Return the exact minimiser of w^T metric w under the constraints rows @ w >= 1.

    All sets of active constraints are tried. Returns None if the constraints have no solution.
    """
    n, k = rows.shape
    best, least_cost = None, None
    for size in range(1, k + 1):
        for active in combinations(range(n), size):
            f = rows[list(active)]
            metric_inverse_rows = solve(metric, f.T)
            try:
                w = metric_inverse_rows @ solve(
                    f @ metric_inverse_rows, rational(np.ones((size, 1), dtype=int))
                )
            except ValueError:
                continue
            if all(v >= 1 for v in (rows @ w).flat):
                cost = (w.T @ metric @ w)[0, 0]
                if least_cost is None or cost < least_cost:
                    best, least_cost = w, cost
    return best
