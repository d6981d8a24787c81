"""Points of the Fantope {0 <= P <= I, tr P = k} as a low-rank matrix plus a multiple of I.

P = U diag(s) U^T + c (I - U U^T) with orthonormal U (d, r). A gradient step adds a symmetric
matrix of rank at most 2 K, so that its eigenvectors off the span of U and the step are still
those of eigenvalue c: the projection onto the Fantope is exact in (r + 2 K) dimensions.
Eigenvectors whose value is c are dropped from U. From a projection of rank k as the start, c is 0
in all but a few steps and r stays near k; from c = k / d, r is near d in the first steps.
"""

from __future__ import annotations

import numpy as np

from splince_fast.baselines._erasing import orthonormal
from splince_fast.baselines._inputs import Float

_EPS = float(np.finfo(np.float64).eps)


class LowRankFantope:
    """A point of the Fantope, at first the projection onto the span of orthonormal columns."""

    def __init__(self, start: Float) -> None:
        self.d, self.k = start.shape
        self.basis = start
        self.values: Float = np.ones(self.k)
        self.rest = 0.0

    def complement(self, rows: Float) -> Float:
        """(I - P) x for each row x."""
        inside = (rows @ self.basis) * (self.values - self.rest)
        complement = rows - inside @ self.basis.T
        if self.rest:
            complement -= self.rest * rows
        return np.asarray(complement)

    def step(self, first: Float, second: Float, size: float, decay: float) -> None:
        """Replace P by the nearest point to decay P + size (A^T B + B^T A) / 2.

        Parameters
        ----------
        first, second : ndarray of shape (K, d)
            A and B.
        size, decay : float
        """
        added = orthonormal(np.concatenate([first, second]).T, self.basis)
        span = np.concatenate([self.basis, added], axis=1)
        product = (first @ span).T @ (second @ span)
        inner = (0.5 * size) * (product + product.T)
        r = self.basis.shape[1]
        inner[np.arange(r), np.arange(r)] += decay * (self.values - self.rest)
        values, vectors = np.linalg.eigh(inner)
        rest = decay * self.rest
        values = values + rest
        n_rest = self.d - span.shape[1]
        cut = fantope_cut(values, rest, n_rest, self.k)
        values, rest = np.clip(values - cut, 0.0, 1.0), float(np.clip(rest - cut, 0.0, 1.0))
        if not n_rest:
            rest = 0.0
        distinct = np.abs(values - rest) > 64 * _EPS
        self.basis = span @ vectors[:, distinct]
        self.values, self.rest = values[distinct], rest

    def reorthonormalise(self) -> None:
        """Make the basis orthonormal again: rounding errors accumulate over the steps."""
        self.basis = np.linalg.qr(self.basis).Q if self.basis.shape[1] else self.basis

    def truncated(self) -> Float:
        """(d, k) orthonormal basis of the k leading eigenvectors; fewer if P has fewer."""
        order = np.argsort(-self.values, kind="stable")[: self.k]
        return np.linalg.qr(self.basis[:, order]).Q


def fantope_cut(values: Float, rest: float, n_rest: int, k: int) -> float:
    """The t with sum clip(values - t, 0, 1) + n_rest clip(rest - t, 0, 1) = k.

    The sum decreases from above k to 0 and is linear between the points v and v - 1: bisection over
    these points gives the interval of t, and one division gives t.
    """
    levels = np.append(values, rest)
    counts = np.append(np.ones(len(values)), n_rest)

    def total(t: float) -> float:
        return float(counts @ np.clip(levels - t, 0.0, 1.0))

    points = np.sort(np.concatenate([levels, levels - 1.0]))
    low, high = 0, len(points) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if total(points[middle]) >= k:
            low = middle
        else:
            high = middle
    above, below = total(points[low]), total(points[high])
    if above == below:
        return float(points[low])
    fraction = (above - k) / (above - below)
    return float(points[low] + fraction * (points[high] - points[low]))
