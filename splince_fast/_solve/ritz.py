"""Rayleigh-Ritz: the eraser of the least distortion among those with a right factor in a subspace.

The subspace is the column space of V. Of S = Cov(x), only the exact products S V are used. A map is
feasible if P = I - left right^T with colsp(left) = colsp(Cov(x, z)); its distortion is
tr(left^T left right^T S right). Let the columns of B span the subspace, with B^T S B = I. Whitening
by B^T in place of L^+, with S = L L^T, minimises the distortion over all `right` with columns in
the subspace, and the computed distortion is exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import factor as kernels
from splince_fast._kernels.factor import Factor
from splince_fast._solve import tolerances
from splince_fast._solve.low_rank import LowRank

Float = NDArray[np.float64]


class Subspace:
    """Column space of V with an S-orthonormal basis B, computed from V and S V."""

    def __init__(self, columns: Float, images: Float) -> None:
        # `columns` and `images` are V^T and (S V)^T, (m, d); the attributes `basis` and
        # `basis_images` are B^T and (S B)^T, with B^T S B = I.
        gram = columns @ images.T
        sizes = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
        units = np.divide(1.0, sizes, out=np.zeros_like(sizes), where=sizes > 0)
        scaled = (gram + gram.T) / 2 * units * units[:, None]
        values, eigenvectors = np.linalg.eigh(scaled)
        # Combinations of columns with a variance below this fraction of the largest are rounding
        # error.
        kept = values > tolerances.MIN_UNEXPLAINED * max(values.max(initial=0.0), 0.0)
        weights = (eigenvectors[:, kept] / np.sqrt(values[kept])).T * units
        self.basis, self.basis_images = weights @ columns, weights @ images

    def residual(self, spans: Float) -> Float:
        """Return the residual (C - S R)^T, (k, d), where R = B B^T C and C^T = `spans`, (k, d)."""
        # R is the Rayleigh-Ritz solution of S R = C in the subspace.
        return np.asarray(spans - (spans @ self.basis.T) @ self.basis_images)

    def factor(self, metric: LowRank, like: Factor) -> Factor:
        """Return a factor that whitens by B^T."""
        # The variances and their floor come from `metric`, an approximation of Cov(x). The rounding
        # level and the smallest eigenvalue come from `like`, its factor.
        basis = np.ascontiguousarray(self.basis)
        factor = kernels.of_columns(basis, metric.variances, metric.floor, smallest=like.smallest)
        factor.rounding = like.rounding
        return factor
