"""Matrices in the Fantope {0 <= P <= I, tr P = k}, stored as low rank plus a multiple of I.

P = U diag(s) U^T + c (I - U U^T), where U, of shape (d, r), has orthonormal columns. For K
classes, a gradient step adds a symmetric matrix of rank at most 2 K. On the orthogonal complement
of U and of the added matrix, P remains a multiple of the identity, so the projection onto the
Fantope is computed exactly in r + 2 K dimensions. Eigenvectors with eigenvalue c are dropped from
U.

P starts as a projection of rank k: then c is 0 in most steps, and r stays near k. With (k / d) I as
the start, r would be near d in the first steps.
"""

from __future__ import annotations

import numpy as np

from splince_fast.baselines._erasing import orthonormal
from splince_fast.baselines._inputs import Float

_EPS = float(np.finfo(np.float64).eps)


class LowRankFantope:
    """A matrix P in the Fantope, initially the projection onto the span of `start`, (d, k)."""

    def __init__(self, start: Float) -> None:
        self.d, self.k = start.shape
        self.basis = start
        self.values: Float = np.ones(self.k)
        self.rest = 0.0

    def complement(self, rows: Float) -> Float:
        """Return (I - P) x for each row x."""
        inside = (rows @ self.basis) * (self.values - self.rest)
        complement = rows - inside @ self.basis.T
        if self.rest:
            complement -= self.rest * rows
        return np.asarray(complement)

    def step(self, first: Float, second: Float, size: float, decay: float) -> None:
        """Replace P by the point of the Fantope nearest to decay P + size (A^T B + B^T A) / 2.

        Parameters
        ----------
        first, second : ndarray of shape (K, d)
            A and B.
        size, decay : float
            Factors of the added matrix and of P.
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
        """Orthonormalise U again, because rounding errors accumulate over the steps."""
        self.basis = np.linalg.qr(self.basis).Q if self.basis.shape[1] else self.basis

    def truncated(self) -> Float:
        """Return the k columns of U with the largest eigenvalues, or all if U has fewer than k."""
        order = np.argsort(-self.values, kind="stable")[: self.k]
        return np.linalg.qr(self.basis[:, order]).Q


def fantope_cut(values: Float, rest: float, n_rest: int, k: int) -> float:
    """Return the shift t of the eigenvalues that projects a symmetric matrix onto the Fantope.

    The matrix has the eigenvalues `values`, and the eigenvalue `rest` with multiplicity `n_rest`.
    Each eigenvalue v becomes clip(v - t, 0, 1), and t makes the sum of the results equal to k. The
    sum is a decreasing, piecewise linear function of t with breakpoints v and v - 1 for each v.
    Bisection over the breakpoints gives the interval that contains t; linear interpolation gives t.
    """
    levels = np.append(values, rest)
    counts = np.append(np.ones(len(values)), n_rest)

    def total(t: float) -> float:
        return float(counts @ np.clip(levels - t, 0.0, 1.0))

    breakpoints = np.sort(np.concatenate([levels, levels - 1.0]))
    low, high = 0, len(breakpoints) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if total(breakpoints[middle]) >= k:
            low = middle
        else:
            high = middle
    above, below = total(breakpoints[low]), total(breakpoints[high])
    if above == below:
        return float(breakpoints[low])
    fraction = (above - k) / (above - below)
    return float(breakpoints[low] + fraction * (breakpoints[high] - breakpoints[low]))
