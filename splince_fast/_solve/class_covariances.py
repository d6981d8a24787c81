"""Differences between class covariances: their size, estimated from folds, and their shrinkage.

The whitened difference of class c is D_c = W^T (S_c - S_w) W, where S_c is the covariance of the
class, S_w is the pooled covariance and W^T S_w W = I. A covariance has d (d + 1) / 2 free entries.
With few rows, sampling noise therefore biases the squared Frobenius norm |D_c|^2 upwards. The inner
product <D_c', D_c''> of the differences of two folds is unbiased.

The squared difference of the covariances of k classes is dS2 = sum_c |D_c - D|^2 / k, where D is
the mean of the D_c over the classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from splince_fast._solve.class_maps import ClassProblem, Support

Float = NDArray[np.float64]

# Lower bound of the eigenvalues of the whitened class covariances from `with_eigenvalues`.
_MIN_EIGENVALUE = 1e-2


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
        """(d, q): Cov(x, y) over all rows, the sum of its parts within and between classes."""
        p = self.fractions
        within = np.tensordot(p, self.crosses, 1)
        tasks = self.task_means - p @ self.task_means
        return np.asarray(within + (self.means - self.mean).T @ (p[:, None] * tasks))

    def differences(self, support: Support) -> Float:
        """(k, r, r): whitened difference D_c of each class; `support` is the range of S_w."""
        pooled = self.pooled
        return np.stack([support.white(s - pooled) for s in self.covariances])

    def problem(self, support: Support, covariances: Float) -> ClassProblem:
        """Return the input of `class_maps.solve`, with the class `covariances`, (k, d, d)."""
        return ClassProblem(self.fractions, covariances, self.crosses, self.kept, support)


def inner_product(a: Float, b: Float) -> float:
    """Return sum_c <A_c - A, B_c - B> / k, where A and B are the means over the k classes.

    If both arguments hold the whitened differences D_c, the result is dS2. For two classes, dS2 is
    |D_1 - D_0|^2 / 4.
    """
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    return float(np.vdot(a, b)) / len(a)


def unbiased_difference(folds: Sequence[Float]) -> float:
    """Return an unbiased estimate of dS2, the squared difference of the class covariances.

    The estimate is the mean of `inner_product` over the pairs of folds, and can be negative.
    `folds` holds the whitened differences D_c, (k, r, r), of each fold.
    """
    pairs = [inner_product(a, b) for i, a in enumerate(folds) for b in folds[:i]]
    return float(np.mean(pairs))


def intensity(fractions: Float, differences: Float, folds: Sequence[Float]) -> float:
    """Return the shrinkage intensity a in [0, 1], the weight of S_w in a S_w + (1 - a) S_c.

    With 1 - a = sum p_c <D_c', D_c''> / sum p_c |D_c|^2, the shrunk differences (1 - a) D_c have
    the least expected squared distance, weighted by p_c, from those of the population. D' and D''
    are the differences of two folds; the numerator is the mean over the pairs of folds.

    Parameters
    ----------
    fractions : (k,) float64
        Fraction p_c of the weight in each class.
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


class HeldOutEigenvalues(NamedTuple):
    """Eigenvalues of the difference of two class covariances, from held-out folds.

    Attributes
    ----------
    values : (r,) float64
        Estimated eigenvalues of D_1 - D_0, ascending.
    product : float
        Estimate of the inner product <D, F> of the differences D of held-out rows and F, which has
        the eigenvectors of D_1 - D_0 in the fitted rows and the eigenvalues `values`.
    """

    values: Float
    product: float


def expected_difference(
    before: float, differences: Float, intensity: float, eigenvalues: HeldOutEigenvalues | None
) -> float:
    """Return the squared difference of class covariances expected in held-out rows after erasure.

    To first order, an eraser fitted to shrunk differences F subtracts F from the differences D of
    held-out rows. The squared difference dS2 after erasure is |D - F|^2 = |D|^2 - 2 <D, F> + |F|^2,
    with the inner product of :func:`inner_product`. If F is c times the differences of the fitted
    rows, <D, F> = c |D|^2 in expectation. If the eigenvalues of F were estimated on held-out folds,
    <D, F> is an estimate (:class:`HeldOutEigenvalues`).

    Parameters
    ----------
    before : float
        |D|^2, estimated by :func:`unbiased_difference`.
    differences : ndarray of shape (k, r, r)
        D_c of the fitted rows.
    intensity : float
        Shrinkage intensity 1 - c.
    eigenvalues : HeldOutEigenvalues or None
        Eigenvalues of F_1 - F_0 for two classes; None for shrinkage by `intensity`.
    """
    if eigenvalues is not None:
        values = eigenvalues.values
        return before - 2.0 * eigenvalues.product + float(values @ values) / 4.0
    scale = 1.0 - intensity
    return before * (1.0 - 2.0 * scale) + scale**2 * inner_product(differences, differences)


def shrunk(statistics: ClassStatistics, intensity: float) -> Float:
    """Return the shrunk class covariances a S_w + (1 - a) S_c, (k, d, d), with a = `intensity`."""
    if not intensity:
        return statistics.covariances
    return np.asarray(intensity * statistics.pooled + (1.0 - intensity) * statistics.covariances)


def held_out_eigenvalues(fractions: Float, folds: Sequence[Float]) -> HeldOutEigenvalues:
    """Estimate the eigenvalues of D = D_1 - D_0 in the population of two classes.

    Eigenvalue i is the mean of u^T D u over the folds, where D is the difference in the fold and u
    is eigenvector i of the sum of D over the other folds. Isotonic regression makes the estimates
    ascending: it replaces them by the means over blocks of neighbours.

    The inner product <D, F> is estimated to second order in the sampling noise. Let a be the inner
    product of the eigenvalues of two different folds, the mean over the pairs. No error of a fold
    is multiplied by itself in a, but errors of the eigenvectors reduce it: a = |D|^2 - 2 l, with
    the loss l for one of the two folds. The eigenvalues of F have the same loss l. The eigenvectors
    of F come from m folds instead of m - 1, and have the loss (m - 1) l / m. Therefore,
    <D, F> = |D|^2 - (2 m - 1) l / m = a + (|D|^2 - a) / (2 m).

    Parameters
    ----------
    fractions : (2,) float64
        Fraction of the weight in each class.
    folds : sequence of (2, r, r) float64
        Whitened differences of each fold.
    """
    differences = [fold[1] - fold[0] for fold in folds]
    total, m = np.sum(differences, axis=0), len(folds)
    estimates = np.zeros((m, len(total)))
    for estimate, difference in zip(estimates, differences, strict=True):
        _, vectors = np.linalg.eigh(total - difference)
        estimate[:] = np.einsum("ij,ij->j", vectors, difference @ vectors)
    isotonic = isotonic_regression(estimates.mean(axis=0))
    starts, sizes = isotonic.blocks[:-1], np.diff(isotonic.blocks)
    sums = np.add.reduceat(estimates, starts, axis=1) / np.sqrt(sizes)
    total_sum = sums.sum(axis=0)
    between_folds = float(total_sum @ total_sum - np.vdot(sums, sums)) / (4.0 * m * (m - 1))  # a
    product = between_folds + (unbiased_difference(folds) - between_folds) / (2.0 * m)
    # Limited eigenvalues keep S_1 = S_w + p_0 D and S_0 = S_w - p_1 D positive definite.
    limit = 1.0 - _MIN_EIGENVALUE
    values = np.clip(isotonic.x, -limit / fractions[0], limit / fractions[1])
    return HeldOutEigenvalues(values, product)


def with_eigenvalues(statistics: ClassStatistics, support: Support, values: Float) -> Float:
    """Return the covariances of two classes, (2, d, d), with D_1 - D_0 = U diag(values) U^T.

    U holds the eigenvectors of D_1 - D_0 of `statistics`. The weighted mean of the two covariances
    remains S_w.
    """
    differences = statistics.differences(support)
    _, vectors = np.linalg.eigh(differences[1] - differences[0])
    pooled, (p0, p1) = statistics.pooled, statistics.fractions
    columns = pooled @ (support.whitener @ vectors)
    difference = (columns * values) @ columns.T  # S_1 - S_0
    return np.stack([pooled - p1 * difference, pooled + p0 * difference])
