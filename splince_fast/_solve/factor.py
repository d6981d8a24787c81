"""From a scatter to its factor: which matrix is factored, by which solver, to which tolerance.

==================  =======================================================================
`identity`          nothing is whitened: L = I (SAL, mean projection)
`dense`, cholesky   S of full rank at its rounding level
`dense`, eigh       elsewhere, or where the caller asks for it
`LowRank.factor`    a diagonal and a matrix of low rank (:mod:`splince_fast._solve.low_rank`)
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
    """L = I; the diagonal of the scatter, (d,), gives the units of x."""
    return kernels.identity(squares.copy(), 1.0 / weight)


def dense(
    scatter: Float,
    weight: float,
    mean: Float,
    *,
    max_rank: int,
    tolerance: float,
    share: float = 0.0,
    solver: str = "auto",
    memory: Float | None = None,
    left_out: NDArray[np.intp] = kernels.NONE_LEFT_OUT,
) -> Factor:
    """L with L L^T = (1 - a) S + a (tr S / d) I, S = scatter / weight.

    Parameters
    ----------
    scatter : (d, d) float64, Fortran order, lower triangle; read only
    weight : float
    mean : (d,) float64
        Says which features vary by rounding alone.
    max_rank : int
        Bound of the rank of S by the number of its rows.
    tolerance : float
        Noise of the eigenvalues of S scaled to unit diagonal (`tolerances.eigenvalue`).
    share : float
        Share a of the isotropic target.
    solver : {"auto", "cholesky", "eigh"}
    memory : (at least d * d) float64, optional
        Work memory that the factor lives in; else it owns new memory.
    left_out : (n,) intp
        Features that vary and are not whitened, in ascending order.

    Raises
    ------
    SplinceError
        The decomposition failed, or S is rank deficient where Cholesky was asked for.
    """
    d = len(mean)
    ridge = share * float(np.einsum("ii->", scatter)) / (weight * d) if share else 0.0
    made = kernels.dense(
        scatter,
        mean,
        np.empty(d * d) if memory is None else memory,
        per_weight=(1.0 - share) / weight,
        ridge=ridge,
        max_rank=d if share else max_rank,
        tolerance=tolerance,
        constant=tolerances.CONSTANT,
        force_eigh=solver == "eigh",
        allow_eigh=solver != "cholesky",
        left_out=left_out,
    )
    if made.status != kernels.STATUS_OK:
        raise_numerical(made.status, solver)
    return made


def weak_features(
    variances: Float, mean: Float, min_scale: float | str, roundoff: float, share: float
) -> NDArray[np.intp]:
    """Features that are left out of the whitening, in ascending order; constant ones aside.

    Parameters
    ----------
    variances, mean : (d,) float64
    min_scale : float or "auto"
        Least deviation relative to the root mean square deviation. "auto" is `MIN_SCALE`, and
        `roundoff` times the magnitude of each feature; it leaves out none where the covariance is
        shrunk, which bounds the deviations from below.
    roundoff : float
        Unit roundoff of the products that the covariance was summed from.
    share : float
        Intensity of the shrinkage.
    """
    automatic = isinstance(min_scale, str)
    if not min_scale or (automatic and share):
        return np.asarray(kernels.NONE_LEFT_OUT)
    least = tolerances.MIN_SCALE if isinstance(min_scale, str) else float(min_scale)
    own = roundoff if automatic and roundoff > tolerances.EPS else 0.0
    if not kernels.count_weak(variances, mean, least, own):
        return np.asarray(kernels.NONE_LEFT_OUT)
    weak = (variances < least * (least * variances.mean())) | (variances < (own * mean) ** 2)
    return np.flatnonzero(weak & (variances > (tolerances.CONSTANT * mean) ** 2))
