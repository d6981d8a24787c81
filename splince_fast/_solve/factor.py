"""Factorisation of a covariance S = L L^T, which may be shrunk, from the scatter matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import factor as kernels
from splince_fast._kernels.factor import Factor
from splince_fast._solve.messages import raise_numerical

Float = NDArray[np.float64]

__all__ = ["Factor", "dense", "oas"]


def dense(
    scatter: Float,
    weight: float,
    floor: Float,
    *,
    max_rank: int,
    tolerance: float,
    intensity: float = 0.0,
    solver: str = "auto",
) -> Factor:
    """Return the factor L of the shrunk covariance, L L^T = (1 - a) S + a (tr S / d) I."""
    # S = scatter / weight; the upper triangle of `scatter`, in Fortran order, is not used. A
    # feature counts as constant if its standard deviation is at most `floor`. `tolerance` is the
    # rounding error of the eigenvalues of S scaled to unit diagonal.
    d = len(floor)
    ridge = intensity * float(np.einsum("ii->", scatter)) / (weight * d) if intensity else 0.0
    factor = kernels.dense(
        scatter,
        floor,
        per_weight=(1.0 - intensity) / weight,
        ridge=ridge,
        max_rank=d if intensity else max_rank,
        tolerance=tolerance,
        force_eigh=solver == "eigh",
        allow_eigh=solver != "cholesky",
    )
    if factor.status != kernels.STATUS_OK:
        raise_numerical(factor.status, solver)
    return factor


def oas(scatter: Float, weight: float) -> float:
    """Return the intensity a in [0, 1] for S = scatter / weight, of which one triangle is read."""
    # Oracle approximating shrinkage (Chen, Wiesel, Eldar and Hero 2010), for S scaled to tr(S) = d,
    # so that the target is I: a = (tr S^2 / d + d) / ((n + 1) |S - I|^2 / d).
    d = len(scatter)
    diagonal = np.einsum("ii->i", scatter)
    scale = float(diagonal.sum()) / d
    if scale == 0.0:
        return 1.0
    squares = sum(float(np.sum((scatter[j + 1 :, j] / scale) ** 2)) for j in range(d))
    frobenius = 2 * squares + float(np.sum((diagonal / scale) ** 2))  # tr(S^2)
    distance = frobenius - d  # |S - I|^2
    if distance <= 0:
        return 1.0
    return min(1.0, (frobenius / d + d) / ((weight + 1) * distance / d))
