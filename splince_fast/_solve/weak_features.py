"""Features that vary too little to be whitened, and how much an eraser amplifies rounding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import factor as kernels
from splince_fast._solve import tolerances

Float = NDArray[np.float64]


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


def column_norms(left: Float, right: Float) -> Float:
    """(d,): norms of the columns of left^T right, from the factors, (r, d) each, in O(d r^2)."""
    if not len(left):
        return np.zeros(left.shape[1])
    sizes = np.abs(left).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        units = np.where(sizes > 0, left / sizes, 0.0)
        weights = right * sizes
        squares = np.einsum("ij,ij->j", weights, (units @ units.T) @ weights)
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


def sensitivity(left: Float, right: Float, mean: Float, variance: float) -> tuple[float, float]:
    """sqrt E|(P - I) e|^2 over the deviation of x, where e rounds x to float32; and |P - I|_F.

    The entries of e are independent, of deviation eps32 rms(x), with eps32 = 2^-23 and
    rms(x)^2 = E|x|^2 / d. With tr Cov(x) = s^2 the figure is eps32 rms(x) |P - I|_F / s.

    Parameters
    ----------
    left, right : (r, d) float64
    mean : (d,) float64
    variance : float
        tr Cov(x).
    """
    if variance <= 0.0:
        return 0.0, 0.0
    norm, offset = kernels.amplified(left, right, mean, variance)
    found: float = tolerances.EPS32 * norm * ((1.0 + offset) / len(mean)) ** 0.5
    return min(found, float(np.finfo(np.float64).max)), norm
