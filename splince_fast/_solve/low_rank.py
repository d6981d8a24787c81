"""Approximation of Cov(x) by d (r + 1) numbers: exact variances plus a matrix of rank r.

The diagonal of S = Cov(x), (d, d), and the sketch Y = S O for a matrix O with r columns are stored.
With C = O^T Y and U = Y C^{-1/2} on the range of C, the Nystroem approximation of S is

    M = D + U U^T,    D = diag(S) - diag(U U^T).

D is non-negative, because U U^T <= S. For features in units of their standard deviations, let
e = D / diag(S), and let diag(e)^{-1/2} U = Q s W^T be the singular value decomposition. Then

    M = diag(e)^{1/2} (I + Q s^2 Q^T) diag(e)^{1/2},

and whitening a row by M costs O(d r). Frangella, Tropp and Udell (2023, SIAM J. Matrix Anal.
Appl. 44) analyse such matrices as preconditioners.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import factor as kernels
from splince_fast._kernels.factor import Factor
from splince_fast._solve import tolerances

Float = NDArray[np.float64]

# Number of rows of the (d, r) sign matrix that are converted to float64 at a time.
_STRIPE = 1 << 12


@dataclass(frozen=True, slots=True)
class LowRank:
    """Covariance approximation M = diag(unexplained) + U U^T, used in place of Cov(x)."""

    # (d,): variances, the diagonal of M, and the largest standard deviations of constant features
    variances: Float
    floor: Float
    unexplained: Float  # (d,): diagonal of D: the part of each variance that U U^T does not explain
    vectors: Float  # (d, r): U

    @property
    def rank(self) -> int:
        return int(self.vectors.shape[1])

    def gram(self, rows: Float) -> Float:
        """Return b M b^T, (k, k), for b = `rows`, (k, d)."""
        images = rows @ self.vectors
        return np.asarray((rows * self.unexplained) @ rows.T + images @ images.T)

    def factor(self, intensity: float = 0.0) -> Factor:
        """Return the factor L with L L^T = (1 - a) M + a (tr M / d) I and a = `intensity`."""
        unexplained, variances, vectors = self.unexplained, self.variances, self.vectors
        if intensity:
            ridge = intensity * float(variances.mean())
            unexplained = (1 - intensity) * unexplained + ridge
            variances = (1 - intensity) * variances + ridge
            vectors = vectors * (1 - intensity) ** 0.5
        varies = variances > self.floor**2
        e = np.divide(unexplained, variances, out=np.ones_like(unexplained), where=varies)
        scale = np.where(varies, np.sqrt(np.maximum(unexplained, 0.0)), np.inf)
        scaled = vectors / scale[:, None]
        q, sizes = _orthonormal(scaled)
        return kernels.of_columns(
            q, variances, self.floor, 1.0 / np.sqrt(e), 1.0 / np.sqrt(1.0 + sizes**2) - 1.0,
            smallest=float(e.min()),
        )  # fmt: skip


def nystroem(
    squares: Float, images: Float, signs: NDArray[np.int8], weight: float, floor: Float
) -> LowRank:
    """Return the Nystroem approximation of Cov(x) = S / weight, from diag(S) and the sketch S O."""
    # `squares` is diag(S), and `images` is the sketch S O with the signs O. Features with a
    # standard deviation of at most `floor` count as constant.
    d, r = images.shape
    variances = squares / weight
    varies = variances > floor**2
    core = np.zeros((r, r))
    for start in range(0, d, _STRIPE):
        part = slice(start, start + _STRIPE)
        core += signs[part].T.astype(np.float64) @ images[part]
    values, eigenvectors = np.linalg.eigh((core + core.T) / 2)
    # Eigenvalues of C = O^T Y below this tolerance are rounding error, which is proportional to the
    # largest entry of the sketch Y.
    kept = values > tolerances.eigenvalue(d, tolerances.EPS) * max(values.max(initial=0.0), 0.0)
    vectors = images @ (eigenvectors[:, kept] / np.sqrt(values[kept] * weight))
    vectors[~varies] = 0.0
    explained = np.einsum("ij,ij->i", vectors, vectors)
    minimum = tolerances.MIN_UNEXPLAINED * variances
    # Scale rows of U down where diag(U U^T) exceeds the exact variance by rounding error.
    over = explained > variances
    vectors[over] *= np.sqrt(variances[over] / explained[over])[:, None]
    explained = np.minimum(explained, variances)
    unexplained = np.where(varies, np.maximum(variances - explained, minimum), 0.0)
    return LowRank(variances, floor, unexplained, vectors)


def _orthonormal(columns: Float) -> tuple[Float, Float]:
    """Return left singular vectors, as rows, (r, d), and singular values of `columns`, (d, r)."""
    q, triangle = np.linalg.qr(columns)
    vectors, sizes, _ = np.linalg.svd(triangle)
    return np.ascontiguousarray((q @ vectors).T), sizes
