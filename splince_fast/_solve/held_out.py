"""How much of an erased concept new rows are expected to show, from what an eraser was fitted to.

The derivation stands at :func:`splince_fast.evaluation.advice.held_out_trace`: of a direction with
squared canonical correlation c^2 an eraser fitted to n rows of rank p leaves c^2 m / (c^2 + m),
m = (p - r) / n, with r the rank of the concept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Noise:
    """Sampling noise of the fitted covariance of x with one variable.

    Attributes
    ----------
    n : float
        Weight of the rows that carry the variable.
    ratio : float
        Noise per direction of the variable, in units of that where all classes have the same
        covariance, or where the residuals of a continuous variable have the same variance.
    taus, degrees : tuple of float
        Of each column: n t / tau is distributed as chi-squared over its degrees of freedom, t the
        squared length of the noise across the variable in white coordinates and in units of the
        deviation of the column. Two classes have one column.
    denominators : tuple of float
        Where tau was estimated from the covariances of the classes, the degrees of freedom of that
        estimate: F in place of chi-squared. Empty where these are taken as equal.
    """

    n: float
    ratio: float
    taus: tuple[float, ...]
    degrees: tuple[float, ...]
    denominators: tuple[float, ...] = ()

    @property
    def by_class(self) -> bool:
        """Whether it rests on the covariances of the classes."""
        return bool(self.denominators)


def equal_noise(n: float, columns: int, rank_x: int) -> Noise:
    """The noise where all classes have the same covariance: chi-squared of p - 1 degrees.

    Parameters
    ----------
    n : float
    columns : int
        Classes, or columns of a continuous variable.
    rank_x : int
        p.
    """
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
    """The noise of classes of any covariances S_c, from their spectra.

    A_c = Q L^+ S_c L^{+T} Q, with L L^T = Cov(x) and Q the projection across the r whitened
    directions of the variable. The noise of the indicator of class c is W = sum v_b A_b, with
    v_c = 1 - q_c and v_b = q_c q_b / (1 - q_c), q the fractions of the rows: tau = tr W. It is
    matched by chi-squared of tau^2 / |W|^2 degrees (Satterthwaite), where |W| is at most
    sum v_b |A_b|, and equal to it where the covariances are of one shape.

    What is estimated:

    - A_c: the rows of a class lengthen their own axes in Cov(x), so that their mean leverage
      h = tr(A_c) / n goes over to h / (1 - h); the factor 1 - p / n leaves equal covariances as
      they are. As q_c S_c <= Cov(x), no trace exceeds p / q_c.
    - tau, of relative variance sum 2 v_b^2 |A_b|^2 / (n_b - 1) / tau^2 (Welch), and q (1 - q), of
      (1 - 2 q)^2 / (n q (1 - q)); traces of m random directions have 2 |W|^2 / m / tau^2.

    Parameters
    ----------
    weights : (k,) float64
        Of the rows of each class; n is their sum.
    traces, squares : (k,) float64
        tr(A_c) and |A_c|^2, ddof = 0.
    rank_x, rank_z : int
        p, below n - 1, and r.
    probes : int or None
        Random directions that traces and squares were estimated from; None where they are exact.
    """
    n = float(weights.sum())
    q, others = weights / n, np.maximum(weights - 1, 0.0)  # degrees of freedom of S_c
    shape = max(1, rank_x - rank_z)
    leverage = np.minimum(traces / n, 1 - 1 / n)
    factors = (1 - rank_x / n) / (1 - leverage) * weights / np.maximum(others, 1.0)
    most = np.where(others > 0, np.minimum(factors * traces, shape / q), shape / q)
    scale = np.divide(most, traces, out=np.ones_like(most), where=traces > 0)
    # |A_c|^2 of a sample exceeds that of the population by tr(A_c)^2 / (n_c - 1).
    excess = np.divide(most**2, others, out=np.full_like(most, np.inf), where=others > 0)
    norms = np.sqrt(np.maximum(squares * scale**2 - excess, most**2 / shape))
    mixed = np.outer(q / (1 - q), q)
    np.fill_diagonal(mixed, 1 - q)
    if len(weights) == 2:
        mixed = mixed[:1]
    taus = mixed @ most
    variances = 2 * mixed**2 @ (norms**2 / np.maximum(others, 1.0)) / taus**2
    degrees = (taus / (mixed @ norms)) ** 2
    if probes is not None:
        variances += 2 / (probes * degrees)
    variances += ((1 - 2 * q) ** 2 / (n * q * (1 - q)))[: len(mixed)]
    return Noise(
        n,
        float((1 - q) @ most) / (max(1, rank_z) * shape),
        tuple(map(float, taus)),
        tuple(map(float, degrees)),
        tuple(map(float, 2 / variances)),
    )


def certificate(noise: Noise, delta: float) -> float:
    """Upper bound of R^2 in new rows for a fraction 1 - delta of the fits: q / (1 + q).

    q is the largest quantile of t over the columns, each at 1 - delta / m, m their number.
    """
    from scipy.special import chdtri, fdtri

    taus, degrees = np.array(noise.taus), np.array(noise.degrees)
    if not (taus > 0).all():
        return 0.0
    level = delta / len(taus)
    if noise.denominators:
        quantiles = fdtri(degrees, noise.denominators, 1 - level)
    else:
        quantiles = chdtri(degrees, level) / degrees
    q = float(np.max(taus * quantiles)) / noise.n
    return q / (1 + q)


def adjusted(squares: Float, n: int, rank_x: int, ratio: float = 1.0) -> tuple[float, ...]:
    """Squared canonical correlations less their bias: c^2 - (1 - c^2) ratio p / (n - p - 1).

    Parameters
    ----------
    squares : (k,) float64
    n : int
        Rows; with at most ``rank_x + 1`` of them the squares stay as they are.
    rank_x : int
    ratio : float
        Of the noise, as in :class:`Noise`.
    """
    unbiased = np.asarray(squares)
    if n > rank_x + 1:
        unbiased = unbiased - (1 - unbiased) * ratio * rank_x / (n - rank_x - 1)
    return tuple(map(float, np.clip(unbiased, 0.0, 1.0)))


def trace_left(squares: Sequence[float], m: float) -> float:
    """Expected Pillai trace in erased new rows: sum c^2 m / (c^2 + m), m = (p - r) / n."""
    return float(sum(c * m / (c + m) for c in squares if c + m > 0))


def expected_r2(
    correlations: Float, n: int, rank_x: int, rank_z: int, noise: float = 1.0, ratio: float = 1.0
) -> float | None:
    """The expected Pillai trace per direction of the concept; None with at most p + 1 rows.

    Parameters
    ----------
    correlations : (k,) float64
        Canonical correlations in the sample.
    n, rank_x, rank_z : int
    noise : float
        Of the fitted cross-covariances, in units of that where all classes have the same
        covariance.
    ratio : float
        The noise in the correlations, in the same units.
    """
    if not rank_z or n <= rank_x + 1:
        return None
    squares = adjusted(correlations**2, n, rank_x, ratio)
    return trace_left(squares, noise * max(0, rank_x - rank_z) / n) / rank_z
