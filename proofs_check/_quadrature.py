"""Gaussian expectations of the logistic loss, by the trapezoidal rule with a proven error bound.

Let f be analytic in |Im t| < c, and let the integral of |f(t + i b)| over t be at most M for
|b| < c. Then the error of the trapezoidal sum with step h is at most 2 M / (exp(2 pi c / h) - 1)
(Trefethen and Weideman, SIAM Review 56, 2014, theorem 5.1). Here f(t) = F(a + w t) phi(t), with phi
the normal density. F is one of two functions, with these bounds in the strip |Im s| <= pi / 2:

    softplus  log(1 + e^s)             |F| <= log 2 + pi / 2 + |Re s|
    curvature e^s / (1 + e^s)^2        |F| <= 1 / 2

The bounds follow from 1 <= |1 + e^s| <= 1 + e^{Re s} and
|e^s / (1 + e^s)^2| <= e^{Re s} / (1 + e^{2 Re s}). So c = pi / (2 w) is allowed. With
|phi(t + i b)| = phi(t) e^{b^2 / 2} and |F| <= B0 + B1 |Re s|,

    M <= e^{c^2 / 2} (B0 + B1 (|a| + w sqrt(2 / pi))).

Cutting the sum at |t| = T adds an error of at most 2 phi(T) ((B0 + B1 |a|) / T + B1 w).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mpmath  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from proofs_check._linalg import Number

DIGITS = 30
"""Digits that the error bounds are driven to; arithmetic carries ten more."""


@dataclass(frozen=True)
class Analytic:
    """Analytic function with a bound B0 + B1 |Re s| in the strip |Im s| <= pi / 2."""

    value: Callable[[Number], Number]
    constant: float
    slope: float


def _softplus(s: Number) -> Number:
    """Return log(1 + e^s) without overflow."""
    return mpmath.log1p(mpmath.exp(-abs(s))) + max(s, mpmath.mpf(0))


def _curvature(s: Number) -> Number:
    """Return e^s / (1 + e^s)^2."""
    small = mpmath.exp(-abs(s))
    return small / (1 + small) ** 2


SOFTPLUS = Analytic(_softplus, 2.3, 1.0)
CURVATURE = Analytic(_curvature, 0.5, 0.0)


@cache
def gaussian_mean(f: Analytic, a: Number, v: Number) -> tuple[Number, Number]:
    """Return E F(a + sqrt(v) g) for a standard normal g, and an error bound.

    Parameters
    ----------
    f
        Function F with its bound in the strip.
    a, v
        Mean and variance of the argument; v > 0.
    """
    with mpmath.workdps(DIGITS + 10):
        a, w = mpmath.mpf(a), mpmath.sqrt(mpmath.mpf(v))
        goal = (DIGITS + 3) * mpmath.log(10)
        cut = mpmath.sqrt(2 * goal)
        c = min(mpmath.pi / (2 * w), cut)
        h = 2 * mpmath.pi * c / (goal + c * c / 2 + mpmath.log(4 + abs(a) + w))
        steps = int(mpmath.ceil(cut / h))
        total = mpmath.fsum(
            f.value(a + w * (k * h)) * mpmath.npdf(k * h) for k in range(-steps, steps + 1)
        )
        end = steps * h
        size = f.constant + f.slope * (abs(a) + w * mpmath.sqrt(2 / mpmath.pi))
        aliasing = 2 * mpmath.exp(c * c / 2) * size / mpmath.expm1(2 * mpmath.pi * c / h)
        tail = 2 * mpmath.npdf(end) * ((f.constant + f.slope * abs(a)) / end + f.slope * w)
        return h * total, aliasing + tail


def plane_mean(
    f: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]], frequency: float
) -> tuple[float, float]:
    """Return E f(g1, g2) for independent standard normal g1 and g2, in float64, and an error bound.

    ``f`` must be analytic for |Im g_i| <= pi / (2 frequency), with absolute value at most
    8 + 4 frequency (|g1| + |g2|). The trapezoidal rule is applied in each variable. The error in
    one variable is at most the bound in the module's docstring, averaged over the other variable.
    """
    c = min(np.pi / (2 * frequency), 8.0)
    h = 2 * np.pi * c / (40.0 + c * c / 2)
    t = np.arange(-np.ceil(9 / h), np.ceil(9 / h) + 1) * h
    weights = h * np.exp(-t * t / 2) / np.sqrt(2 * np.pi)
    value = float(weights @ f(t[:, None], t[None, :]) @ weights)
    size = 8 + 8 * frequency * np.sqrt(2 / np.pi)
    aliasing = 2 * np.exp(c * c / 2) * size / np.expm1(2 * np.pi * c / h)
    density = float(np.exp(-(t[-1] ** 2) / 2) / np.sqrt(2 * np.pi))
    tail = 2 * density * (size / t[-1] + 4 * frequency)
    rounding = 64 * 2.0**-53 * size
    return value, float(2 * (aliasing + tail) + rounding)
