"""Covariances per class: their difference, estimated from folds, and two ways to shrink it.

D_c = W^T (S_c - S_w) W, with W^T S_w W = I for the pooled S_w of all rows, is the difference of a
class in white units. A covariance holds d (d + 1) / 2 numbers, and |D_c|^2 of few rows is mostly
sampling noise; the product of two folds has none on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from splince_fast._solve.class_maps import ClassProblem, Support

Float = NDArray[np.float64]

# Least eigenvalue of a class covariance that is made from a shrunk difference, in white units.
_LEAST = 1e-2


@dataclass(frozen=True)
class ClassStatistics:
    """Moments per class of one set of rows.

    Attributes
    ----------
    weights, rows : ndarray of shape (k,)
        Of the classes.
    means : ndarray of shape (k, d)
    covariances : ndarray of shape (k, d, d)
        S_c, ddof = 0.
    crosses : ndarray of shape (k, d, q)
        S_cy.
    task_means : ndarray of shape (k, q)
        Means of what is kept, per class.
    """

    weights: Float
    rows: Float
    means: Float
    covariances: Float
    crosses: Float
    task_means: Float

    @property
    def fractions(self) -> Float:
        """(k,): fractions p_c of the classes."""
        return np.asarray(self.weights / self.weights.sum())

    @property
    def mean(self) -> Float:
        """(d,): of all rows."""
        return np.asarray(self.fractions @ self.means)

    @property
    def variances(self) -> Float:
        """(d,): of the features, over all rows."""
        p = self.fractions
        return np.asarray(np.diagonal(self.pooled) + p @ (self.means - self.mean) ** 2)

    @cached_property
    def pooled(self) -> Float:
        """S_w = sum p_c S_c."""
        return np.asarray(np.tensordot(self.fractions, self.covariances, 1))

    @property
    def kept(self) -> Float:
        """(d, q): Cov(x, y) over all rows, the sum of the parts within and between classes."""
        p = self.fractions
        within = np.tensordot(p, self.crosses, 1)
        tasks = self.task_means - p @ self.task_means
        return np.asarray(within + (self.means - self.mean).T @ (p[:, None] * tasks))

    def differences(self, support: Support) -> Float:
        """(k, r, r): D_c, white by the `support` of all rows."""
        pooled = self.pooled
        return np.stack([support.white(s - pooled) for s in self.covariances])

    def problem(self, support: Support, covariances: Float) -> ClassProblem:
        """The problem with shrunk covariances and the true S_cy."""
        return ClassProblem(self.fractions, covariances, self.crosses, self.kept, support)


def product(a: Float, b: Float) -> float:
    """Sum over classes of <A_c - mean, B_c - mean> / k: |S_1 - S_0|^2 / 4 for two and A = B."""
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    return float(np.vdot(a, b)) / len(a)


def over_folds(folds: Sequence[Float]) -> float:
    """Held-out estimate of dS2: mean of `product` over pairs of folds, possibly negative."""
    pairs = [product(a, b) for i, a in enumerate(folds) for b in folds[:i]]
    return float(np.mean(pairs))


def intensity(fractions: Float, whole: Float, folds: Sequence[Float]) -> float:
    """The fraction a of S_w in a shrunk covariance, within [0, 1].

    1 - a = sum p_c <D_c', D_c''> / sum p_c |D_c|^2 minimises the expected sum
    p_c |(1 - a) D_c - D_c of the population|^2.
    """

    def inner(a: Float, b: Float) -> float:
        return sum(float(p * np.vdot(u, v)) for p, u, v in zip(fractions, a, b, strict=True))

    own = inner(whole, whole)
    if not own:
        return 1.0
    pairs = [inner(a, b) for i, a in enumerate(folds) for b in folds[:i]]
    return float(np.clip(1.0 - float(np.mean(pairs)) / own, 0.0, 1.0))


def left_over(before: float, whole: Float, share: float, values: Float | None) -> float:
    """dS2 that is expected in new rows after erasing, to first order in the differences.

    An eraser that was fitted to shrunk differences E subtracts them from those of new rows, D:
    E|D - E|^2 = |D|^2 - 2 <D, E> + |E|^2, by the product of folds for |D|^2. If E is c times the
    differences of the fitted rows, <D, E> is c |D|^2; if its eigenvalues were fitted to held-out
    products, it is |E|^2.

    Parameters
    ----------
    before : float
        |D|^2.
    whole : ndarray of shape (k, r, r)
        Differences of the fitted rows.
    share : float
        1 - c.
    values : (r,) ndarray or None
        Eigenvalues of E, two classes, where they were fitted.
    """
    if values is not None:
        return before - float(values @ values) / 4.0
    kept = 1.0 - share
    return before * (1.0 - 2.0 * kept) + kept**2 * product(whole, whole)


def shrunk(statistics: ClassStatistics, share: float) -> Float:
    """(k, d, d): a S_w + (1 - a) S_c."""
    if not share:
        return statistics.covariances
    return np.asarray(share * statistics.pooled + (1.0 - share) * statistics.covariances)


def eigenvalues(fractions: Float, folds: Sequence[Float]) -> Float:
    """(r,) ascending eigenvalues of S_1 - S_0 of the population, two classes, in white units.

    Each is u^T D u, D of a fold and u the eigenvector of the same rank of the other folds, averaged
    over folds and made monotone.
    """
    gaps = [fold[1] - fold[0] for fold in folds]
    total = np.sum(gaps, axis=0)
    found = np.zeros(len(total))
    for gap in gaps:
        _, vectors = np.linalg.eigh(total - gap)
        found += np.einsum("ij,ij->j", vectors, gap @ vectors) / len(gaps)
    values = np.asarray(isotonic_regression(found).x)
    # S_1 = S_w + p_0 D and S_0 = S_w - p_1 D stay positive definite.
    room = 1.0 - _LEAST
    return np.clip(values, -room / fractions[0], room / fractions[1])


def with_eigenvalues(statistics: ClassStatistics, support: Support, values: Float) -> Float:
    """(2, d, d): covariances of mean S_w and white difference U diag(values) U^T.

    U are the eigenvectors of the white difference of these rows.
    """
    whole = statistics.differences(support)
    _, vectors = np.linalg.eigh(whole[1] - whole[0])
    pooled, (first, second) = statistics.pooled, statistics.fractions
    sides = pooled @ (support.whitener @ vectors)
    gap = (sides * values) @ sides.T
    return np.stack([pooled - second * gap, pooled + first * gap])
