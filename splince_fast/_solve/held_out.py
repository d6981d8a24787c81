"""How much of an erased concept new rows are expected to show, from what an eraser was fitted to.

The derivation stands at :func:`splince_fast.evaluation.advice.held_out_trace`: of a direction with
squared canonical correlation c^2 an eraser fitted to n rows of rank p leaves c^2 m / (c^2 + m),
m = (p - r) / n, with r the rank of the concept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


class Noise(NamedTuple):
    """Sampling noise of the fitted covariance of x with one variable.

    Attributes
    ----------
    n : float
        Weight of the rows that carry the variable.
    columns : int
        Columns of the variable that differ: 1 for two classes.
    ratios : (columns,) float64
        tau / (p - 1) of each column, with tau = tr(S^+ Cov(noise)): 1 where all classes have the
        same covariance, or where the residuals of a continuous variable have the same variance.
    """

    n: float
    columns: int
    ratios: tuple[float, ...]


def class_ratios(fractions: Float, traces: Float, rank_x: int) -> tuple[float, ...]:
    """tau_c / (p - 1) of the indicator of each class c.

    With the fractions q_c of the rows and S_c the covariance of the class,

        tau_c = (1 - q_c) tr(S^+ S_c) + q_c / (1 - q_c) sum_{b != c} q_b tr(S^+ S_b)

    Parameters
    ----------
    fractions, traces : (k,) float64
        q_c and tr(S^+ S_c).
    rank_x : int
        p.
    """
    others = float(fractions @ traces) - fractions * traces
    tau = (1 - fractions) * traces + fractions / (1 - fractions) * others
    return tuple(map(float, tau / max(1, rank_x - 1)))


def certificate(noise: Noise, rank_x: int, delta: float) -> float:
    """Upper bound of R^2 in new rows for a fraction 1 - delta of the fits: q / (1 + q).

    q is the largest over the columns of ratio chi2_{p-1; 1-delta/m} / n, m the number of columns.
    """
    import scipy.stats

    if rank_x < 2:
        return 0.0
    level = 1 - delta / noise.columns
    q = max(noise.ratios) * float(scipy.stats.chi2.ppf(level, rank_x - 1)) / noise.n
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
    found = np.asarray(squares)
    if n > rank_x + 1:
        found = found - (1 - found) * ratio * rank_x / (n - rank_x - 1)
    return tuple(map(float, np.clip(found, 0.0, 1.0)))


def trace_left(squares: Sequence[float], m: float) -> float:
    """sum c^2 m / (c^2 + m): the expected Pillai trace."""
    return float(sum(c * m / (c + m) for c in squares if c + m > 0))


def expected_r2(
    correlations: Float, n: int, rank_x: int, rank_z: int, noise: float = 1.0, ratio: float = 1.0
) -> float | None:
    """The expected trace per direction of the concept; None where n rows say nothing.

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
