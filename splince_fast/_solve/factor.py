"""Factorisation of a covariance S = L L^T, from the scatter matrix.

==================  =======================================================================
`identity`          L = I, for methods that do not whiten (SAL, mean projection)
`dense`, cholesky   S has full rank at its rounding level
`dense`, eigh       S is rank deficient, or the caller requests an eigendecomposition
`diagonal`          S is diagonal (``covariance_type="diag"``)
`of_columns`        S is known on the span of a few columns (`methods.refine`)
==================  =======================================================================
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import factor as kernels
from splince_fast._kernels.factor import Factor, diagonal
from splince_fast._solve.messages import raise_numerical

Float = NDArray[np.float64]

__all__ = ["Factor", "dense", "diagonal", "identity"]


def identity(squares: Float, weight: float) -> Factor:
    """Return the factor of the identity matrix, for methods that do not whiten."""
    # `squares`, (d,), is the diagonal of the scatter matrix.
    return kernels.identity(squares.copy(), 1.0 / weight)


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
