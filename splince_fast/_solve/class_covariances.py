"""Differences between class covariances: estimates from folds, and two methods of shrinkage.

The whitened difference of class c is D_c = W^T (S_c - S_w) W, where S_w is the pooled covariance of
all rows and W^T S_w W = I. A covariance has d (d + 1) / 2 free entries, so with few rows sampling
noise biases |D_c|^2 upwards. The inner product of the D_c of two folds is unbiased.

The size of the differences is dS2 = sum_c |D_c - mean|^2 / k over the k classes, where mean is that
of the D_c. :func:`product` computes it from two equal arguments.
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

# Lower bound for the eigenvalues of whitened class covariances that are made by `with_eigenvalues`.
_LEAST = 1e-2


@dataclass(frozen=True)
class ClassStatistics:
    """Moments of each class over one set of rows.

    Attributes
    ----------
    weights, rows : ndarray of shape (k,)
        Weight sum and number of rows of each class.
    means : ndarray of shape (k, d)
        Mean of x in each class.
    covariances : ndarray of shape (k, d, d)
        Covariance S_c of x in each class, ddof = 0.
    crosses : ndarray of shape (k, d, q)
        Cross-covariance S_cy of x and the kept label columns y in each class.
    task_means : ndarray of shape (k, q)
        Mean of y in each class.
    """

    weights: Float
    rows: Float
    means: Float
    covariances: Float
    crosses: Float
    task_means: Float

    @property
    def fractions(self) -> Float:
        """(k,): fraction p_c of the weight in each class."""
        return np.asarray(self.weights / self.weights.sum())

    @property
    def mean(self) -> Float:
        """(d,): mean of x over all rows."""
        return np.asarray(self.fractions @ self.means)

    @property
    def variances(self) -> Float:
        """(d,): variances of the features over all rows."""
        p = self.fractions
        return np.asarray(np.diagonal(self.pooled) + p @ (self.means - self.mean) ** 2)

    @cached_property
    def pooled(self) -> Float:
        """(d, d): pooled covariance S_w = sum p_c S_c."""
        return np.asarray(np.tensordot(self.fractions, self.covariances, 1))

    @property
    def kept(self) -> Float:
        """(d, q): Cov(x, y) over all rows, within plus between classes."""
        p = self.fractions
        within = np.tensordot(p, self.crosses, 1)
        tasks = self.task_means - p @ self.task_means
        return np.asarray(within + (self.means - self.mean).T @ (p[:, None] * tasks))

    def differences(self, support: Support) -> Float:
        """(k, r, r): D_c of each class, whitened by the `support` of all rows."""
        pooled = self.pooled
        return np.stack([support.white(s - pooled) for s in self.covariances])

    def problem(self, support: Support, covariances: Float) -> ClassProblem:
        """Return the problem with shrunk `covariances`, (k, d, d), and the unshrunk S_cy."""
        return ClassProblem(self.fractions, covariances, self.crosses, self.kept, support)


def product(a: Float, b: Float) -> float:
    """Return sum_c <A_c - mean, B_c - mean> / k; |A_1 - A_0|^2 / 4 for A = B and two classes."""
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    return float(np.vdot(a, b)) / len(a)


def over_folds(folds: Sequence[Float]) -> float:
    """Return the held-out estimate of dS2: the mean of `product` over pairs of folds.

    The estimate can be negative.
    """
    pairs = [product(a, b) for i, a in enumerate(folds) for b in folds[:i]]
    return float(np.mean(pairs))


def intensity(fractions: Float, differences: Float, folds: Sequence[Float]) -> float:
    """Return the shrinkage intensity a in [0, 1], the weight of S_w in a S_w + (1 - a) S_c.

    1 - a = sum p_c <D_c', D_c''> / sum p_c |D_c|^2, where D' and D'' are differences of two folds,
    minimises the expectation of sum p_c |(1 - a) D_c - D_c of the population|^2.

    Parameters
    ----------
    fractions : (k,) float64
        p_c.
    differences : (k, r, r) float64
        D_c of all rows.
    folds : sequence of (k, r, r) float64
        D_c of each fold.
    """

    def inner(a: Float, b: Float) -> float:
        return sum(float(p * np.vdot(u, v)) for p, u, v in zip(fractions, a, b, strict=True))

    size = inner(differences, differences)
    if not size:
        return 1.0
    pairs = [inner(a, b) for i, a in enumerate(folds) for b in folds[:i]]
    return float(np.clip(1.0 - float(np.mean(pairs)) / size, 0.0, 1.0))


def left_over(before: float, differences: Float, intensity: float, values: Float | None) -> float:
    """Return the dS2 expected in held-out rows after erasure, to first order in the differences.

    An eraser fitted to shrunk differences E subtracts E from the differences D of held-out rows,
    which leaves E|D - E|^2 = |D|^2 - 2 <D, E> + |E|^2. If E is c times the differences of the
    fitted rows, <D, E> = c |D|^2. If the eigenvalues of E were fitted to held-out products,
    <D, E> = |E|^2.

    Parameters
    ----------
    before : float
        |D|^2, estimated by :func:`over_folds`.
    differences : ndarray of shape (k, r, r)
        D_c of the fitted rows.
    intensity : float
        Shrinkage intensity 1 - c.
    values : (r,) ndarray or None
        Fitted eigenvalues of the difference of two classes; None for shrinkage by `intensity`.
    """
    if values is not None:
        return before - float(values @ values) / 4.0
    kept = 1.0 - intensity
    return before * (1.0 - 2.0 * kept) + kept**2 * product(differences, differences)


def shrunk(statistics: ClassStatistics, intensity: float) -> Float:
    """Return the shrunk class covariances a S_w + (1 - a) S_c, (k, d, d), with a = `intensity`."""
    if not intensity:
        return statistics.covariances
    return np.asarray(intensity * statistics.pooled + (1.0 - intensity) * statistics.covariances)


def eigenvalues(fractions: Float, folds: Sequence[Float]) -> Float:
    """Estimate the eigenvalues of D = D_1 - D_0 of the population, two classes; (r,), ascending.

    Eigenvalue i is the mean over folds of u^T D u, with D of the fold and u eigenvector i of the
    sum of the other folds. Isotonic regression makes the estimates ascending.
    """
    differences = [fold[1] - fold[0] for fold in folds]
    total = np.sum(differences, axis=0)
    means = np.zeros(len(total))
    for difference in differences:
        _, vectors = np.linalg.eigh(total - difference)
        means += np.einsum("ij,ij->j", vectors, difference @ vectors) / len(differences)
    values = np.asarray(isotonic_regression(means).x)
    # These limits keep S_1 = S_w + p_0 D and S_0 = S_w - p_1 D positive definite.
    limit = 1.0 - _LEAST
    return np.clip(values, -limit / fractions[0], limit / fractions[1])


def with_eigenvalues(statistics: ClassStatistics, support: Support, values: Float) -> Float:
    """Return covariances of two classes, (2, d, d), with D_1 - D_0 = U diag(values) U^T.

    Their weighted mean is S_w, and U holds the eigenvectors of D_1 - D_0 of `statistics`.
    """
    differences = statistics.differences(support)
    _, vectors = np.linalg.eigh(differences[1] - differences[0])
    pooled, (p0, p1) = statistics.pooled, statistics.fractions
    sides = pooled @ (support.whitener @ vectors)
    difference = (sides * values) @ sides.T  # S_1 - S_0
    return np.stack([pooled - p1 * difference, pooled + p0 * difference])
