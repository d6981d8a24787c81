"""The best eraser in a span V, from V and its exact images S V (Rayleigh and Ritz).

A feasible map is P = I - left right^T with colsp(left) = colsp(Cov(x, z)); S matters to
tr(left^T left right^T S right) alone. With B an S-orthonormal basis of V, whitening by B^T in place
of L^+ gives the least of it over all right = B y: never more than any eraser with `right` in V,
and its value is exact.
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
    """Columns V with S V, and the S-orthonormal basis of their span.

    Parameters
    ----------
    columns, images : (m, d) float64
        V^T and (S V)^T.

    Attributes
    ----------
    basis, basis_images : (m', d) float64
        B^T and (S B)^T, B^T S B = I.
    """

    def __init__(self, columns: Float, images: Float) -> None:
        gram = columns @ images.T
        sizes = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
        units = np.divide(1.0, sizes, out=np.zeros_like(sizes), where=sizes > 0)
        scaled = (gram + gram.T) / 2 * units * units[:, None]
        values, turned = np.linalg.eigh(scaled)
        # Combinations of less variance are rounding of their columns.
        kept = values > tolerances.OWN * max(values.max(initial=0.0), 0.0)
        made = (turned[:, kept] / np.sqrt(values[kept])).T * units
        self.basis, self.basis_images = made @ columns, made @ images

    def residual(self, spans: Float) -> Float:
        """C - S R for the solution R = B B^T C of S R = C in the span; C^T = `spans`, (k, d)."""
        return np.asarray(spans - (spans @ self.basis.T) @ self.basis_images)

    def factor(self, metric: LowRank, like: Factor) -> Factor:
        """The factor whose whitening is B^T; `like` is that of the metric."""
        basis = np.ascontiguousarray(self.basis)
        made = kernels.of_columns(
            basis, metric.variances, metric.mean, smallest=like.smallest,
            constant=tolerances.CONSTANT, left_out=like.left_out,
        )  # fmt: skip
        made.rounding = like.rounding
        return made
