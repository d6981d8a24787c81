"""Rayleigh-Ritz: the eraser of the least distortion with a right factor in a given subspace.

The subspace is the column space of V, and S = Cov(x) enters through the exact images S V only. A
feasible map is P = I - left right^T with colsp(left) = colsp(Cov(x, z)), and its distortion is
tr(left^T left right^T S right). If the columns of B are an S-orthonormal basis of the subspace,
whitening by B^T in place of L^+ minimises the distortion over all `right` with columns in the
subspace, and the computed distortion is exact.
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
    """Column space of V with an S-orthonormal basis, from V and S V.

    Parameters
    ----------
    columns, images : (m, d) float64
        V^T and (S V)^T.

    Attributes
    ----------
    basis, basis_images : (m', d) float64
        B^T and (S B)^T, with B^T S B = I.
    """

    def __init__(self, columns: Float, images: Float) -> None:
        gram = columns @ images.T
        sizes = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
        units = np.divide(1.0, sizes, out=np.zeros_like(sizes), where=sizes > 0)
        scaled = (gram + gram.T) / 2 * units * units[:, None]
        values, eigenvectors = np.linalg.eigh(scaled)
        # Combinations of columns with a smaller variance are rounding error.
        kept = values > tolerances.OWN * max(values.max(initial=0.0), 0.0)
        weights = (eigenvectors[:, kept] / np.sqrt(values[kept])).T * units
        self.basis, self.basis_images = weights @ columns, weights @ images

    def residual(self, spans: Float) -> Float:
        """Return the residual (C - S R)^T, (k, d), for R = B B^T C and C^T = `spans`, (k, d).

        R is the Ritz solution of S R = C in the subspace.
        """
        return np.asarray(spans - (spans @ self.basis.T) @ self.basis_images)

    def factor(self, metric: LowRank, like: Factor) -> Factor:
        """Return a factor that whitens by B^T.

        Variances and mean are those of the covariance approximation `metric`, and rounding level,
        smallest eigenvalue and left-out features those of its factor `like`.
        """
        basis = np.ascontiguousarray(self.basis)
        factor = kernels.of_columns(
            basis, metric.variances, metric.mean, smallest=like.smallest,
            constant=tolerances.CONSTANT, left_out=like.left_out,
        )  # fmt: skip
        factor.rounding = like.rounding
        return factor
