"""One map per class to equal means and covariances, with the least change: QLEACE.

Class c has the fraction p_c of the weight and the covariance S_c. Features are in units in which
S_w = sum p_c S_c has unit diagonal; S_w is positive definite on the span of the orthonormal
columns U. With U^T S_c U = L_c L_c^T, orthogonal matrices O_c give maps to one covariance:

    A_c = U R G_c U^T,    G_c = O_c L_c^-1,    R = sum p_c L_c O_c^T

This R changes the rows least for the given O_c. With the weights W of the features in the change
and F_c = W U L_c, it is least if each O_c maximises tr(O_c F_c^T B), where B = sum p_c F_c O_c^T is
a root of the Bures barycentre of F_c F_c^T. For two classes, O_0 = I and O_1 maximises
tr(O_1 F_1^T F_0). For more, B and the O_c are computed in turn, which converges to the barycentre
(Alvarez-Esteban et al., 2016).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from splince_fast._solve import tolerances

Float = NDArray[np.float64]

# Relative change at which the root of the barycentre has converged, and limit of the iterations.
# Data need 5 to 13; the maps are feasible after any number.
_CONVERGED, _ITERATIONS = 1e-8, 200
# Whitening a direction in which S_w has a smaller eigenvalue would lose half of the digits. Erasure
# sets rows to their mean in these directions.
_TINY = 1e-8


class Support(NamedTuple):
    """Directions in which x varies within classes."""

    basis: Float  # (d, r): U, eigenvectors of S_w that can be whitened
    values: Float  # (r,): their eigenvalues
    tiny: Float  # (d, t): eigenvectors whose variance exceeds rounding error, but is too small
    smallest: float  # smallest of `values`
    rounding: float  # rounding error of eigenvalues of class covariances, whitened by S_w

    @property
    def rank(self) -> int:
        return len(self.values)

    @property
    def whitener(self) -> Float:
        """W, (d, r), with W^T S_w W = I."""
        return np.asarray(self.basis / np.sqrt(self.values))


def support_of(pooled: Float, roundoff: float) -> Support:
    """Return the support of S_w = `pooled`, (d, d), summed from products of unit `roundoff`."""
    values, vectors = linalg.eigh(pooled, check_finite=False, driver="evd")
    rounding = tolerances.eigenvalue(len(values), roundoff)
    kept, tiny = values > max(rounding, _TINY), (values > rounding) & (values <= _TINY)
    smallest = float(values[kept].min(initial=1.0))
    return Support(vectors[:, kept], values[kept], vectors[:, tiny], smallest, rounding / smallest)


class SingularClassError(ArithmeticError):
    """The covariance of class number `index` is singular on the support of S_w."""

    def __init__(self, index: int) -> None:
        super().__init__(f"class number {index}")
        self.index = index


class ClassMaps(NamedTuple):
    """Maps A_c = U R G_c U^T of the classes, the identity where x does not vary within classes."""

    support: Support
    root: Float  # (r, r): R
    whiteners: list[Float]  # (r, r): G_c, with G_c U^T S_c U G_c^T = I

    @property
    def maps(self) -> Float:
        """A_c, (k, d, d)."""
        basis, removed = self.support.basis, np.hstack([self.support.basis, self.support.tiny])
        rest = np.eye(len(basis)) - removed @ removed.T
        return np.stack([rest + basis @ (self.root @ g) @ basis.T for g in self.whiteners])


def qleace(fractions: Float, covariances: Float, weights: Float, support: Support) -> ClassMaps:
    """Return the maps to one covariance that change the rows, weighted by `weights`, least."""
    whitener, roots = support.whitener, []
    for c, covariance in enumerate(covariances):
        try:
            root = np.linalg.cholesky(whitener.T @ covariance @ whitener)
        except np.linalg.LinAlgError as error:
            raise SingularClassError(c) from error
        if (np.diagonal(root) ** 2 <= support.rounding).any():
            raise SingularClassError(c)
        roots.append(np.sqrt(support.values)[:, None] * root)
    rotations = _rotations(fractions, [weights[:, None] * (support.basis @ r) for r in roots])
    # L_c and O_c in G_c = O_c L_c^-1
    pairs = zip(roots, rotations, strict=True)
    whiteners = [linalg.solve_triangular(r, o.T, lower=True, trans="T").T for r, o in pairs]
    return ClassMaps(support, _mean(fractions, roots, rotations), whiteners)


def _rotations(fractions: Float, factors: list[Float]) -> list[Float]:
    """Return the rotations O_c of the least change, for the factors F_c, (d, r)."""
    rotations = [np.eye(factors[0].shape[1])] * len(factors)
    if len(factors) == 2:
        return [rotations[0], rotation(factors[1].T @ factors[0])]
    root = _mean(fractions, factors, rotations)
    for _ in range(_ITERATIONS):
        rotations = [rotation(factor.T @ root) for factor in factors]
        root, previous = _mean(fractions, factors, rotations), root
        if np.linalg.norm(root - previous) <= _CONVERGED * np.linalg.norm(root):
            break
    return rotations


def _mean(fractions: Float, factors: list[Float], rotations: list[Float]) -> Float:
    """Return sum p_c F_c O_c^T."""
    terms = zip(fractions, factors, rotations, strict=True)
    return np.asarray(sum(p * factor @ turned.T for p, factor, turned in terms))


def rotation(product: Float) -> Float:
    """Return the orthogonal O that maximises tr(O M): the transposed polar factor of M."""
    u, _, vt = linalg.svd(product)
    return np.asarray((u @ vt).T)
