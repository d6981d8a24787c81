"""A metric of d (r + 1) numbers: exact variances, and a covariance of rank r from its images.

Of S only diag(S) and Y = S O are known, O of r columns. With C = O^T Y and U = Y C^{-1/2} on the
support of C the metric is M = D + U U^T, D = diag(S) - diag(U U^T) (Nystroem; D >= 0 since
U U^T <= S). Then, in units of the deviations, e = D / diag(S) and diag(e)^{-1/2} U = Q s W^T,

    M = diag(e)^{1/2} (I + Q s^2 Q^T) diag(e)^{1/2}

is whitened in O(d r). As the preconditioner of a linear system such a matrix is analysed by
Frangella, Tropp and Udell (2023, SIAM J. Matrix Anal. Appl. 44).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import factor as kernels
from splince_fast._kernels.factor import Factor
from splince_fast._solve import tolerances

Float = NDArray[np.float64]

# Rows of (d, r) matrices per step.
_STRIPE = 1 << 12


@dataclass(frozen=True, slots=True)
class LowRank:
    """M = diag(own) + U U^T in the place of Cov(x).

    Attributes
    ----------
    variances, mean : ndarray of shape (d,)
        Of the features; `variances` is the diagonal of M.
    own : ndarray of shape (d,)
        D.
    vectors : ndarray of shape (d, r)
        U.
    """

    variances: Float
    mean: Float
    own: Float
    vectors: Float

    @property
    def rank(self) -> int:
        """Columns of U."""
        return int(self.vectors.shape[1])

    def gram(self, rows: Float) -> Float:
        """b M b^T for b = `rows`, (k, d)."""
        inside = rows @ self.vectors
        return np.asarray((rows * self.own) @ rows.T + inside @ inside.T)

    def factor(
        self, share: float = 0.0, left_out: NDArray[np.intp] = kernels.NONE_LEFT_OUT
    ) -> Factor:
        """L with L L^T = (1 - a) M + a (tr M / d) I, a = `share`; features may be left out."""
        own, variances, vectors = self.own, self.variances, self.vectors
        if share:
            ridge = share * float(variances.mean())
            own, variances = (1 - share) * own + ridge, (1 - share) * variances + ridge
            vectors = vectors * (1 - share) ** 0.5
        varies = _varies(variances, self.mean)
        varies[left_out] = False
        e = np.divide(own, variances, out=np.ones_like(own), where=varies)
        scale = np.where(varies, np.sqrt(np.maximum(own, 0.0)), np.inf)
        scaled = vectors / scale[:, None]
        q, sizes = _orthonormal(scaled)
        return kernels.of_columns(
            q, variances, self.mean, 1.0 / np.sqrt(e), 1.0 / np.sqrt(1.0 + sizes**2) - 1.0,
            smallest=float(e.min()), constant=tolerances.CONSTANT, left_out=left_out,
        )  # fmt: skip


def nystroem(
    squares: Float, images: Float, signs: NDArray[np.int8], weight: float, mean: Float
) -> LowRank:
    """The metric from the diagonal of a scatter and its products with random signs.

    Parameters
    ----------
    squares : (d,) float64
        diag(S).
    images : (d, r) float64
        S O.
    signs : (d, r) int8
        O.
    weight : float
        Cov(x) = S / weight.
    mean : (d,) float64
        Says which features vary by rounding alone.
    """
    d, r = images.shape
    variances = squares / weight
    varies = _varies(variances, mean)
    core = np.zeros((r, r))
    for start in range(0, d, _STRIPE):
        part = slice(start, start + _STRIPE)
        core += signs[part].T.astype(np.float64) @ images[part]
    values, turned = np.linalg.eigh((core + core.T) / 2)
    # The rounding of Y is relative to its largest entry; smaller singular values of C are noise.
    kept = values > tolerances.eigenvalue(d, tolerances.EPS) * max(values.max(initial=0.0), 0.0)
    vectors = images @ (turned[:, kept] / np.sqrt(values[kept] * weight))
    vectors[~varies] = 0.0
    explained = np.einsum("ij,ij->i", vectors, vectors)
    least = tolerances.OWN * variances
    # The variances are exact: a row of U that exceeds its variance by rounding is scaled down.
    over = explained > variances
    vectors[over] *= np.sqrt(variances[over] / explained[over])[:, None]
    explained = np.minimum(explained, variances)
    own = np.where(varies, np.maximum(variances - explained, least), 0.0)
    return LowRank(variances, mean, own, vectors)


def _varies(variances: Float, mean: Float) -> NDArray[np.bool_]:
    """Mask of the features that vary by more than rounding, as in `factor.dense`."""
    return np.asarray((variances > (tolerances.CONSTANT * np.abs(mean)) ** 2) & (variances > 0))


def _orthonormal(columns: Float) -> tuple[Float, Float]:
    """Q^T, (r, d), and the singular values of (d, r)."""
    q, triangle = np.linalg.qr(columns)
    turned, sizes, _ = np.linalg.svd(triangle)
    return np.ascontiguousarray((q @ turned).T), sizes
