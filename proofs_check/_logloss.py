"""Excess log-loss of a head on erased Gaussian features, as one-dimensional integrals.

Model: x ~ N(mu, S), score s = a + beta^T (x - mu), loss A(t) - y t of a score t, E[y | x] = A'(s),
and A'' >= 0 (logistic: A(s) = log(1 + e^s)). Let l(w) = E A(a + sqrt(w) u) and
k(w) = E A''(a + sqrt(w) u) with u standard normal, and v = beta^T S beta. Stein's lemma gives
Sy = k(v) S beta. An effective head phi, with score a + phi^T (x - mu), has the excess loss

    Delta(phi) = l(phi^T S phi) - l(v) - (phi^T S beta - v) k(v),        l' = k / 2.

LEACE maps beta to phi_L with phi_L^T S phi_L = phi_L^T S beta = (1 - rho) v. SPLINCE maps beta to
phi_L / (1 - rho).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mpmath  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from proofs_check._linalg import Matrix, Number, mpf, rational, to_float
from proofs_check._quadrature import CURVATURE, SOFTPLUS, gaussian_mean, plane_mean

Reading = Callable[[Matrix, Matrix], Matrix]


Integral = Callable[[Number, Number], tuple[Number, Number]]
"""Function of (a, v) that returns a value and its error bound."""


@dataclass(frozen=True)
class CanonicalLoss:
    """Canonical loss with its functions l (``expected_loss``) and k (``curvature``).

    Both are functions of (a, v) that return a value and its error bound.
    """

    name: str
    expected_loss: Integral
    curvature: Integral


def _closed_form(
    f: Callable[[Number, Number], Number],
) -> Callable[[Number, Number], tuple[Number, Number]]:
    """Return a function that gives ``f`` and a bound on its rounding error at 40 digits."""

    def value(a: Number, v: Number) -> tuple[Number, Number]:
        out = f(mpmath.mpf(a), mpmath.mpf(v))
        return out, abs(out) * mpmath.mpf(10) ** -35

    return value


LOGISTIC = CanonicalLoss(
    "logistic",
    lambda a, v: gaussian_mean(SOFTPLUS, a, v),
    lambda a, v: gaussian_mean(CURVATURE, a, v),
)
POISSON = CanonicalLoss(
    "Poisson",
    _closed_form(lambda a, v: mpmath.exp(a + v / 2)),
    _closed_form(lambda a, v: mpmath.exp(a + v / 2)),
)
GAUSSIAN = CanonicalLoss(
    "Gaussian", _closed_form(lambda a, v: (a * a + v) / 2), _closed_form(lambda a, v: mpmath.mpf(1))
)
DIFFERENCE = CanonicalLoss(
    "difference of Poissons",
    _closed_form(lambda a, v: mpmath.cosh(a) * mpmath.exp(v / 2)),
    _closed_form(lambda a, v: mpmath.cosh(a) * mpmath.exp(v / 2)),
)
LOSSES = (LOGISTIC, POISSON, GAUSSIAN, DIFFERENCE)


def excess_loss(
    loss: CanonicalLoss, a: Number, beta: Matrix, phi: Matrix, s: Matrix
) -> tuple[Number, Number]:
    """Return the excess loss Delta(phi) and its error bound."""
    v = mpf((beta.T @ s @ beta)[0, 0])
    variance, covariance = mpf((phi.T @ s @ phi)[0, 0]), mpf((phi.T @ s @ beta)[0, 0])
    curvature, curvature_error = loss.curvature(a, v)
    base, base_error = loss.expected_loss(a, v)
    expected, expected_error = (
        loss.expected_loss(a, variance)
        if variance
        else loss.expected_loss(a, mpmath.mpf(10) ** -60)
    )
    return (
        expected - base - (covariance - v) * curvature,
        base_error + expected_error + abs(covariance - v) * curvature_error + mpmath.mpf(10) ** -32,
    )


def leace_excess_loss(f: CanonicalLoss, a: Number, v: Number, rho: Number) -> tuple[Number, Number]:
    """Return Delta of LEACE, l((1 - rho) v) - l(v) + rho v k(v), and its error bound."""
    low, low_error = f.expected_loss(a, (1 - rho) * v)
    base, base_error = f.expected_loss(a, v)
    curvature, curvature_error = f.curvature(a, v)
    return low - base + rho * v * curvature, low_error + base_error + rho * v * curvature_error


def splince_excess_loss(
    f: CanonicalLoss, a: Number, v: Number, rho: Number
) -> tuple[Number, Number]:
    """Return Delta of SPLINCE, l(v / (1 - rho)) - l(v), and its error bound."""
    high, high_error = f.expected_loss(a, v / (1 - rho))
    base, base_error = f.expected_loss(a, v)
    return high - base, high_error + base_error


ExcessFormula = Callable[[CanonicalLoss, Number, Number, Number], tuple[Number, Number]]

CORRELATED = rational([[1, "4/5"], ["4/5", 1]])
"""The covariance of the counterexample to the literal statement."""


def excess_loss_by_plane(a: float, beta: Matrix, phi: Matrix, s: Matrix) -> tuple[float, float]:
    """Return Delta(phi) of the logistic loss for d = 2 from its definition, and its error bound.

    The definition is E[A(t) - A'(s) t] - E[A(s) - A'(s) s] with the score t of phi, over x = K g
    with S = K K^T. Stein's lemma is not used. Let w be the largest coefficient of a g_i in a score.
    For |Im g_i| <= pi / (4 w), both scores have |Im| <= pi / 2, |A'| is at most 1, and each of the
    four terms is at most log 2 + pi + |score|. The integrand is therefore below
    8 + 4 (2 w) (|g_1| + |g_2|) for |a| <= 1.
    """
    root = np.linalg.cholesky(to_float(s))
    beta_root, phi_root = (root.T @ to_float(v)[:, 0] for v in (beta, phi))
    frequency = 2 * float(max(np.abs(beta_root).max(), np.abs(phi_root).max(), 0.5))

    def integrand(g1: NDArray[np.float64], g2: NDArray[np.float64]) -> NDArray[np.float64]:
        true_score, score = (
            a + beta_root[0] * g1 + beta_root[1] * g2,
            a + phi_root[0] * g1 + phi_root[1] * g2,
        )
        rate = 0.5 * (1 + np.tanh(true_score / 2))
        return np.asarray(
            np.logaddexp(0, score) - np.logaddexp(0, true_score) - rate * (score - true_score)
        )

    return plane_mean(integrand, frequency)
