"""Expected association of an erased concept with held-out rows, from moments of the fitted rows.

Let c^2 be the squared canonical correlation of x with a direction of the concept. After erasure by
an eraser fitted to n rows, the expectation of c^2 in held-out rows is c^2 m / (c^2 + m), where
m = (p - r) / n, p is the rank of x and r is the rank of the concept.

Derivation: in coordinates with Cov(x) = I and Cov(z) = I, the singular values of B = Cov(x, z) are
the canonical correlations. The kernel of every eraser is span(B'), B' = B + E with the sampling
error E, so that the best linear prediction of z from P x explains |(I - Pi') B|^2, whatever P, with
the projector Pi' on span(B'). The entries of E orthogonal to B have variance 1 / n if the noise in
x does not depend on z, and |B'|^2 = c^2 + m up to O(c / sqrt(n)). Hence
E |(I - Pi') B|^2 = sum c^2 m / (c^2 + m) (1 + O(1 / p) + O(1 / (n c^2))).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Noise:
    """Sampling noise of the fitted covariance of x with one variable."""

    # x is whitened, and each label column has unit standard deviation. t is the squared norm of the
    # sampling error of the covariance of x with one column, orthogonal to the span of the variable.
    # With tau the expectation of n t, n t / tau is distributed as chi-squared divided by its
    # degrees of freedom, or as F if tau is an estimate.

    n: float  # weight sum of the labelled rows
    # noise variance per direction of the variable, divided by its value under equal class
    # covariances (for a continuous variable, under residuals of constant variance)
    ratio: float
    taus: tuple[float, ...]  # tau of each label column; two classes have one column
    degrees: tuple[float, ...]  # degrees of freedom of each column
    # denominator degrees of freedom, if tau was estimated from the class covariances; else empty
    denominators: tuple[float, ...] = ()

    @property
    def by_class(self) -> bool:
        """Whether the noise was estimated from the class covariances."""
        return bool(self.denominators)


def equal_noise(n: float, columns: int, rank_x: int) -> Noise:
    """Return the noise under equal class covariances: chi-squared with p - 1 degrees of freedom."""
    # `columns` is the number of classes, but 1 for two classes; for a continuous variable, it is
    # the number of its columns.
    degrees = (float(max(0, rank_x - 1)),) * columns
    return Noise(n, 1.0, degrees, degrees)


def class_noise(
    weights: Float,
    traces: Float,
    squares: Float,
    rank_x: int,
    rank_z: int,
    probes: int | None = None,
) -> Noise:
    """Return the noise of class indicators under unequal class covariances S_c."""
    # Let A_c = Q L^+ S_c L^{+T} Q, where L L^T = Cov(x) and Q is the projection orthogonal to the r
    # whitened directions of the variable; `traces` are tr(A_c) and `squares` |A_c|^2. With q_c the
    # fraction of class c, the noise of its indicator has the covariance W / n, W = sum_b v_b A_b,
    # v_c = 1 - q_c, and v_b = q_c q_b / (1 - q_c) for b != c; tau = tr W. The squared norm is taken
    # as chi-squared with tau^2 / |W|^2 degrees of freedom (Satterthwaite), with the upper bound
    # sum_b v_b |A_b| for |W|, which is attained if all S_c are proportional.
    n = float(weights.sum())
    q, df, dimensions = weights / n, np.maximum(weights - 1, 0.0), max(1, rank_x - rank_z)
    # The rows of a class contribute to Cov(x): their mean leverage h = tr(A_c) / n is replaced by
    # h / (1 - h), times 1 - p / n, which has no effect on equal covariances. Each trace is limited
    # to (p - r) / q_c, because q_c S_c <= Cov(x).
    leverage = np.minimum(traces / n, 1 - 1 / n)
    factors = (1 - rank_x / n) / (1 - leverage) * weights / np.maximum(df, 1.0)
    capped = np.where(df > 0, np.minimum(factors * traces, dimensions / q), dimensions / q)
    scale = np.divide(capped, traces, out=np.ones_like(capped), where=traces > 0)
    # The sample value of |A_c|^2 exceeds the population value by tr(A_c)^2 / (n_c - 1) on average.
    excess = np.divide(capped**2, df, out=np.full_like(capped, np.inf), where=df > 0)
    norms = np.sqrt(np.maximum(squares * scale**2 - excess, capped**2 / dimensions))
    mixing = np.outer(q / (1 - q), q)
    np.fill_diagonal(mixing, 1 - q)
    if len(weights) == 2:
        mixing = mixing[:1]
    taus = mixing @ capped
    if not taus.any():  # the rows are constant within each class
        return replace(equal_noise(n, len(taus), 0), ratio=0.0)
    degrees = (taus / (mixing @ norms)) ** 2
    # Relative variance of tau: of the class covariances (Welch), of the indicator, with variance
    # q_c (1 - q_c), and of traces that were estimated from m random directions.
    variances = 2 * mixing**2 @ (norms**2 / np.maximum(df, 1.0)) / taus**2
    variances += ((1 - 2 * q) ** 2 / (n * q * (1 - q)))[: len(mixing)]
    if probes is not None:
        variances += 2 / (probes * degrees)
    ratio = float((1 - q) @ capped) / (max(1, rank_z) * dimensions)
    return Noise(n, ratio, *(tuple(map(float, v)) for v in (taus, degrees, 2 / variances)))


def certificate(noise: Noise, delta: float) -> float:
    """Return q / (1 + q), an upper bound of R^2 in held-out rows with probability 1 - delta."""
    # The probability is over the fits. q is the largest (1 - delta / m) quantile of t over the m
    # label columns (:class:`Noise`).
    from scipy.special import chdtri, fdtri

    taus, degrees = np.array(noise.taus), np.array(noise.degrees)
    if not (taus > 0).all():
        return 0.0
    level = float(delta) / len(taus)
    if noise.denominators:
        quantiles = fdtri(degrees, noise.denominators, 1 - level)
    else:
        quantiles = chdtri(degrees, level) / degrees
    q = float(np.max(taus * quantiles)) / noise.n
    return q / (1 + q)


def adjusted(squares: Float, n: int, rank_x: int, ratio: float = 1.0) -> Float:
    """Return bias-corrected squared correlations, c^2 - (1 - c^2) ratio p / (n - p - 1)."""
    # With at most p + 1 rows the squares are not corrected.
    bias = ratio * rank_x / (n - rank_x - 1) if n > rank_x + 1 else 0.0
    return np.clip(squares - (1 - squares) * bias, 0.0, 1.0)


def expected_r2(
    correlations: Float, n: int, rank_x: int, rank_z: int, noise: float = 1.0, ratio: float = 1.0
) -> float | None:
    """Return the expected Pillai trace in erased held-out rows divided by r; None if n <= p + 1."""
    # The trace is the sum of c^2 m / (c^2 + m). `noise` is the noise variance of the
    # cross-covariances that the eraser was fitted to, and `ratio` that of `correlations`, divided
    # by the value under equal class covariances.
    if not rank_z or n <= rank_x + 1:
        return None
    c, m = adjusted(correlations**2, n, rank_x, ratio), noise * max(0, rank_x - rank_z) / n
    return float(np.sum(c[c > 0] * m / (c[c > 0] + m))) / rank_z
