"""The strength of SPLINCE at which a frozen head has the least squared error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve import tolerances
from splince_fast._solve.factor import Factor

Float = NDArray[np.float64]


def best_strength(
    factor: Factor, gram: Callable[[Float], Float], span_z: Float, cross: Float, theta: Float
) -> float:
    """The b in [0, 1] of least squared error of theta^T P_b x, where P_b = P_L + b X H^+ K^T.

    With g = (theta^T X / H) K, the score of y that b adds, and a = P_L^T theta the error is, but
    for a constant, Var(a^T x + b g^T x) - 2 Cov(a^T x + b g^T x, y): least at
    b = (g^T Sy - a^T S g) / (g^T S g), whatever matrix is factored. For S itself this is
    (H - v + q) / q, v = theta^T Sy, q = theta^T X.

    Parameters
    ----------
    factor : Factor
    gram : callable
        b S b^T for rows b.
    span_z : (kz, d) float64
        Of what is erased.
    cross : (d,) float64
        Sy.
    theta : (d,) float64

    Returns
    -------
    float
        0 where the score does not depend on b.
    """
    d = len(theta)
    if factor.n_noise:
        factor = factor.admit(np.concatenate([span_z, cross[None]]))
    u, sizes, _ = np.linalg.svd(factor.whiten(span_z), full_matrices=False)
    cut = tolerances.relative(d, "auto") * sizes.max(initial=0.0)
    kept = sizes > max(tolerances.noise(d, factor.smallest), cut)
    left = np.ascontiguousarray((u[:, kept] / sizes[kept]).T @ span_z)
    right = factor.solve(left)
    lost = left.T @ (right @ cross)  # X = the part of Sy that LEACE removes
    score = factor.solve(np.ascontiguousarray((cross - lost)[None]))[0]  # K = S^+ (Sy - X)
    explained, q = float(score @ cross), float(theta @ lost)  # H = K^T Sy
    noise = 16.0 * d * tolerances.EPS
    if explained <= 0.0 or abs(q) <= noise * float(np.abs(theta) @ np.abs(lost)):
        return 0.0
    a, g = theta - right.T @ (left @ theta), (q / explained) * score
    (_, mixed), (_, square) = gram(np.stack([a, g]))
    return float(np.clip((g @ cross - mixed) / square, 0.0, 1.0)) if square > 0 else 0.0
