"""Factorisation of a covariance S = L L^T, from the scatter matrix.

==================  =======================================================================
`identity`          L = I, for methods that do not whiten (SAL, mean projection)
`dense`, cholesky   S has full rank at its rounding level
`dense`, eigh       S is rank deficient, or the caller requests an eigendecomposition
`of_columns`        S is diagonal, or known on the span of a few columns (`methods.refine`)
==================  =======================================================================
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import factor as kernels
from splince_fast._kernels.factor import Factor
from splince_fast._solve import tolerances
from splince_fast._solve.messages import raise_numerical

Float = NDArray[np.float64]

__all__ = ["Factor", "dense", "identity", "weak_features"]


def identity(squares: Float, weight: float) -> Factor:
    """Return the factor of the identity matrix, for methods that do not whiten."""
    # `squares`, (d,), is the diagonal of the scatter matrix.
    return kernels.identity(squares.copy(), 1.0 / weight)


def dense(
    scatter: Float,
    weight: float,
    mean: Float,
    *,
    max_rank: int,
    tolerance: float,
    intensity: float = 0.0,
    solver: str = "auto",
    memory: Float | None = None,
    left_out: NDArray[np.intp] = kernels.NO_FEATURES,
) -> Factor:
    """Return the factor L of the shrunk covariance, L L^T = (1 - a) S + a (tr S / d) I."""
    # S = scatter / weight; the upper triangle of `scatter`, in Fortran order, is not used. A
    # feature counts as constant if its standard deviation is below the rounding error of its mean.
    # `tolerance` is the rounding error of the eigenvalues of S scaled to unit diagonal. The factor
    # is stored in `memory`, if it is passed.
    d = len(mean)
    ridge = intensity * float(np.einsum("ii->", scatter)) / (weight * d) if intensity else 0.0
    factor = kernels.dense(
        scatter,
        mean,
        np.empty(d * d) if memory is None else memory,
        per_weight=(1.0 - intensity) / weight,
        ridge=ridge,
        max_rank=d if intensity else max_rank,
        tolerance=tolerance,
        constant=tolerances.CONSTANT,
        force_eigh=solver == "eigh",
        allow_eigh=solver != "cholesky",
        left_out=left_out,
    )
    if factor.status != kernels.STATUS_OK:
        raise_numerical(factor.status, solver)
    return factor


def weak_features(
    variances: Float, mean: Float, min_scale: float | str, roundoff: float, shrinkage: float
) -> NDArray[np.intp]:
    """Return the features that vary too little to be whitened, in ascending order."""
    # `min_scale` is relative to the root mean square standard deviation. "auto" is `MIN_SCALE`; for
    # products less precise than float64, the standard deviation must also reach `roundoff` times
    # |mean|. With shrinkage, which bounds the variances from below, "auto" whitens all features.
    automatic = isinstance(min_scale, str)
    if not min_scale or (automatic and shrinkage):
        return np.asarray(kernels.NO_FEATURES)
    scale = tolerances.MIN_SCALE if isinstance(min_scale, str) else float(min_scale)
    relative = roundoff if automatic and roundoff > tolerances.EPS else 0.0
    if not kernels.count_weak(variances, mean, scale, relative):
        return np.asarray(kernels.NO_FEATURES)
    weak = (variances < scale * (scale * variances.mean())) | (variances < (relative * mean) ** 2)
    return np.flatnonzero(weak & (variances > (tolerances.CONSTANT * mean) ** 2))
