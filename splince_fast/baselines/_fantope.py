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

from splince_fast.baselines._erasing import orthonormal_basis
from splince_fast.baselines._inputs import Float

_EPS = float(np.finfo(np.float64).eps)


class LowRankFantope:
    """A matrix P in the Fantope, initially the projection onto the span of `start`, (d, k)."""

    def __init__(self, start: Float) -> None:
        self.d, self.k = start.shape
        self.basis = start
        self.eigenvalues: Float = np.ones(self.k)
        self.c = 0.0  # eigenvalue of P on the orthogonal complement of U

    def erase(self, rows: Float) -> Float:
        """Return (I - P) x for each row x."""
        coordinates = (rows @ self.basis) * (self.eigenvalues - self.c)
        erased = rows - coordinates @ self.basis.T
        if self.c:
            erased -= self.c * rows
        return np.asarray(erased)

    def step(self, first: Float, second: Float, step_size: float, decay: float) -> None:
        """Replace P by the point of the Fantope nearest to decay P + t (A^T B + B^T A) / 2.

        Parameters
        ----------
        first, second : ndarray of shape (K, d)
            A and B.
        step_size, decay : float
            Factors: t of the added matrix, and of P.
        """
        new_directions = orthonormal_basis(np.concatenate([first, second]).T, self.basis)
        span = np.concatenate([self.basis, new_directions], axis=1)
        product = (first @ span).T @ (second @ span)
        reduced = (0.5 * step_size) * (product + product.T)
        r = self.basis.shape[1]
        reduced[np.arange(r), np.arange(r)] += decay * (self.eigenvalues - self.c)
        eigenvalues, eigenvectors = np.linalg.eigh(reduced)
        c = decay * self.c
        eigenvalues = eigenvalues + c
        multiplicity = self.d - span.shape[1]
        shift = fantope_shift(eigenvalues, c, multiplicity, self.k)
        eigenvalues, c = np.clip(eigenvalues - shift, 0.0, 1.0), float(np.clip(c - shift, 0.0, 1.0))
        if not multiplicity:
            c = 0.0
        distinct = np.abs(eigenvalues - c) > 64 * _EPS
        self.basis = span @ eigenvectors[:, distinct]
        self.eigenvalues, self.c = eigenvalues[distinct], c

    def reorthonormalise(self) -> None:
        """Orthonormalise U again, because rounding errors accumulate over the steps."""
        self.basis = np.linalg.qr(self.basis).Q if self.basis.shape[1] else self.basis

    def leading_eigenvectors(self) -> Float:
        """Return the k columns of U with the largest eigenvalues, or all if U has fewer than k."""
        order = np.argsort(-self.eigenvalues, kind="stable")[: self.k]
        return np.linalg.qr(self.basis[:, order]).Q


def fantope_shift(eigenvalues: Float, c: float, multiplicity: int, k: int) -> float:
    """Return the shift t of the eigenvalues that projects a symmetric matrix onto the Fantope.

    The matrix has the eigenvalues `eigenvalues`, and the eigenvalue c `multiplicity` times.
    Each eigenvalue v becomes clip(v - t, 0, 1), and t makes the sum of the results equal to k. The
    sum is a decreasing, piecewise linear function of t with breakpoints v and v - 1 for each v.
    Bisection over the breakpoints gives the interval that contains t; linear interpolation gives t.
    """
    values = np.append(eigenvalues, c)
    multiplicities = np.append(np.ones(len(eigenvalues)), multiplicity)

    def total(t: float) -> float:
        return float(multiplicities @ np.clip(values - t, 0.0, 1.0))

    breakpoints = np.sort(np.concatenate([values, values - 1.0]))
    low, high = 0, len(breakpoints) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if total(breakpoints[middle]) >= k:
            low = middle
        else:
            high = middle
    sum_low, sum_high = total(breakpoints[low]), total(breakpoints[high])
    if sum_low == sum_high:
        return float(breakpoints[low])
    fraction = (sum_low - k) / (sum_low - sum_high)
    return float(breakpoints[low] + fraction * (breakpoints[high] - breakpoints[low]))
