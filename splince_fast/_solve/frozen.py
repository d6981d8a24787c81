"""The strength of SPLINCE that minimises the squared error of a frozen linear head."""

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
    """Return the strength b in [0, 1] that minimises the squared error of theta^T P_b x.

    P_b = P_L + b X H^+ K^T is SPLINCE of strength b, with Sy = Cov(x, y), P_L the LEACE map,
    X = Sy - P_L Sy, K = S^+ (Sy - X) and H = K^T Sy. With a = P_L^T theta and
    g = (theta^T X / H) K, the score is a^T x + b g^T x. Its squared error,
    Var(a^T x + b g^T x) - 2 Cov(a^T x + b g^T x, y) plus a constant, is smallest at

        b = (g^T Sy - a^T S g) / (g^T S g).

    If the factor is that of a shrunk or approximate covariance, P_L and K are computed from that
    covariance. The formula of b still needs S = Cov(x), and b remains optimal. If S itself is
    factored, b = (H - v + q) / q with v = theta^T Sy and q = theta^T X.

    Parameters
    ----------
    factor : Factor
        Factor of S = Cov(x), of a shrunk S or of an approximation.
    gram : callable
        Function that returns V S V^T, (k, k), for rows V, (k, d).
    span_z : (kz, d) float64
        Rows that span the columns of Cov(x, z), for the erased variables z.
    cross : (d,) float64
        Sy = Cov(x, y).
    theta : (d,) float64
        Coefficients of the head.

    Returns
    -------
    float
        Strength b; 0 if the score theta^T P_b x does not depend on b.
    """
    d = len(theta)
    if factor.n_noise:
        factor = factor.admit(np.concatenate([span_z, cross[None]]))
    u, sizes, _ = np.linalg.svd(factor.whiten(span_z), full_matrices=False)
    cut = tolerances.relative(d, "auto") * sizes.max(initial=0.0)
    used = sizes > max(tolerances.noise(d, factor.smallest), cut)
    left = np.ascontiguousarray((u[:, used] / sizes[used]).T @ span_z)
    right = factor.solve(left)
    removed = left.T @ (right @ cross)  # X, the part of Sy that LEACE removes
    # K = S^+ (Sy - X)
    score = factor.solve(np.ascontiguousarray((cross - removed)[None]))[0]
    explained, q = float(score @ cross), float(theta @ removed)  # H = K^T Sy
    noise = 16.0 * d * tolerances.EPS
    if explained <= 0.0 or abs(q) <= noise * float(np.abs(theta) @ np.abs(removed)):
        return 0.0
    a, g = theta - right.T @ (left @ theta), (q / explained) * score
    (_, mixed), (_, square) = gram(np.stack([a, g]))
    return float(np.clip((g @ cross - mixed) / square, 0.0, 1.0)) if square > 0 else 0.0
