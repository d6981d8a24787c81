"""How much of an erased concept new rows are expected to show, from what an eraser was fitted to.

The derivation stands at :func:`splince_fast.evaluation.advice.held_out_trace`: of a direction with
squared canonical correlation c^2 an eraser fitted to n rows of rank p leaves c^2 m / (c^2 + m),
m = (p - r) / n, with r the rank of the concept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


def adjusted(squares: Float, n: int, rank_x: int) -> tuple[float, ...]:
    """Squared canonical correlations less what chance gives: 1 - (1 - c^2) (n - 1) / (n - p - 1).

    Parameters
    ----------
    squares : (k,) float64
    n : int
        Rows; with at most ``rank_x + 1`` of them the squares stay as they are.
    rank_x : int
    """
    found = np.asarray(squares)
    if n > rank_x + 1:
        found = 1 - (1 - found) * (n - 1) / (n - rank_x - 1)
    return tuple(map(float, np.clip(found, 0.0, 1.0)))


def trace_left(squares: Sequence[float], m: float) -> float:
    """sum c^2 m / (c^2 + m): the expected Pillai trace."""
    return float(sum(c * m / (c + m) for c in squares if c + m > 0))


def expected_r2(
    correlations: Float, n: int, rank_x: int, rank_z: int, noise: float = 1.0
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
    """
    if not rank_z or n <= rank_x + 1:
        return None
    squares = adjusted(correlations**2, n, rank_x)
    return trace_left(squares, noise * max(0, rank_x - rank_z) / n) / rank_z
