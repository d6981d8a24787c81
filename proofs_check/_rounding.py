"""Tolerances of the library checks: bounds on the rounding error of a float64 eraser.

Let u = 2^-53, and let x have n rows and d features. The relative error of a sum of n products is
about sqrt(n) u (Higham and Mary, SIAM J. Sci. Comput. 41, 2019: below lambda sqrt(n) u with
probability 1 - 2 exp(-lambda^2 / 2); lambda = 4 here). The relative error of a difference x - mean
is u. The error of the mean of a block is u |mean|; to first order it enters S only in products with
a difference of block means, of size std / sqrt(n). By Cauchy-Schwarz, the error of each computed
covariance is

    |Delta S_ij| <= gamma std_i std_j,   gamma = 4 sqrt(n + d) u max(1 + |mean| / (std sqrt(n))).

The d in the root accounts for the backward error of a Cholesky or eigenvalue factorisation of S,
which has the same form. Let kappa = 1 / lambda_min, lambda_min being the smallest non-zero
eigenvalue of the correlation matrix of x, and let z have k columns. In coordinates where S is I,

    |S^{-1/2} Delta S S^{-1/2}|_2 <= delta_S = 2 sqrt(d) gamma kappa,
    |S^{-1/2} Delta Sz|_F         <= delta_z = gamma sqrt(d k kappa) |std_z|_F.

Delta S rotates the whitened subspace of the concept by at most delta_S. Delta Sz rotates it by at
most angle_z = delta_z / sigma_r(A), where sigma_r is the smallest non-zero singular value of
A = S^{-1/2} Sz, and r its rank. The task has angle_y in the same way. Let s be the sine of the
smallest angle between kernel and kept subspace of an oblique projector. Its norm is 1 / s, and it
changes by at most 1 / s^2 times these angles (to first order; a factor 2 covers higher orders). So,
in whitened coordinates,

    |S^{-1/2} (E_float - E) S^{1/2}|_F <= 2 (angle_z + angle_y + 3 delta_S) sqrt(r) / s^2

for SPLINCE. For LEACE, angle_y = 0 and s = 1. SAL does not whiten: its error is at most
4 sqrt(r) gamma |std| |std_z| / sigma_r(Sz).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofs_check._families import Sample
from proofs_check._linalg import Matrix, to_float, trace
from proofs_check._reference import Covariances

UNIT = 2.0**-53


def _smallest(values: NDArray[np.float64], size: int) -> float:
    """Return the smallest value above the rounding error of the largest value."""
    top = float(values.max())
    return float(values[values > top * size * 4 * UNIT].min())


@dataclass(frozen=True)
class Rounding:
    """Condition numbers of one problem, and tolerances derived from them.

    Attributes
    ----------
    gamma
        Relative error bound of one covariance.
    kappa
        1 / smallest non-zero eigenvalue of the correlation matrix.
    cond
        Condition number of S on its support.
    sine
        Sine of the smallest angle between the whitened subspaces of concept and task.
    splince, leace
        Tolerances of the whitened Frobenius error of E.
    sal
        Tolerance of the Frobenius error of E.
    """

    gamma: float
    kappa: float
    cond: float
    sine: float
    splince: float
    leace: float
    sal: float


def rounding(x: NDArray[np.float64], z: NDArray[np.float64], y: NDArray[np.float64]) -> Rounding:
    """Return the tolerances for features (n, d) and coded labels (n, k_z) and (n, k_y)."""
    n, d = x.shape
    mean, std = x.mean(0), x.std(0)
    varying = std > 0
    offset = float(np.max(np.abs(mean[varying]) / std[varying])) / np.sqrt(n)
    gamma = 4 * np.sqrt(n + d) * UNIT * (1 + offset)
    centred = x - mean
    s, scaled = centred.T @ centred / n, centred[:, varying] / std[varying]
    kappa = 1 / _smallest(np.linalg.eigvalsh(scaled.T @ scaled / n), n + d)
    values, vectors = np.linalg.eigh(s)
    positive = values > values.max() * (n + d) * 4 * UNIT
    root = vectors[:, positive] / np.sqrt(values[positive])

    def angle(labels: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """Return the rotation of one whitened subspace by rounding, and its orthonormal basis."""
        centred_labels = labels - labels.mean(0)
        a = root.T @ (centred.T @ centred_labels / n)
        left, sizes, _ = np.linalg.svd(a, full_matrices=False)
        smallest = _smallest(sizes, n + d)
        label_norm = float(np.linalg.norm(labels.std(0)))
        error = gamma * np.sqrt(d * labels.shape[1] * kappa) * label_norm / smallest
        return error, left[:, sizes >= smallest]

    angle_z, q_z = angle(z)
    angle_y, q_y = angle(y)
    residual = q_z - q_y @ (q_y.T @ q_z)
    sine = float(np.linalg.svd(residual, compute_uv=False).min())
    delta_s = 2 * np.sqrt(d) * gamma * kappa
    size = np.sqrt(q_z.shape[1])
    cross = centred.T @ (z - z.mean(0)) / n
    label_norm = float(np.linalg.norm(std) * np.linalg.norm(z.std(0)))
    smallest_cross = _smallest(np.linalg.svd(cross, compute_uv=False), n + d)
    return Rounding(
        gamma=gamma,
        kappa=kappa,
        cond=float(values[positive].max() / values[positive].min()),
        sine=sine,
        splince=2 * size * (angle_z + angle_y + 3 * delta_s) / sine**2,
        leace=2 * size * (angle_z + 3 * delta_s),
        sal=4 * size * gamma * label_norm / smallest_cross,
    )


def whitened_error(c: Covariances, p: Matrix, exact: Matrix) -> float:
    """Return |S^{-1/2} (P - P_exact) S^{1/2}|_F.

    It is exact except for the conversion to float64 and the square root.
    """
    gap = p - exact
    return float(np.sqrt(float(trace(c.s_pinv @ gap @ c.s @ gap.T))))


def tolerances(sample: Sample) -> tuple[float, float, float, float]:
    """Return the tolerances of SPLINCE, LEACE and SAL for one sample, and cond(S)."""
    r = rounding(sample.features, to_float(sample.z), to_float(sample.y))
    return r.splince, r.leace, r.sal, r.cond
