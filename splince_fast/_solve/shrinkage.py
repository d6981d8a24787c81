"""The intensity a of the shrinkage (1 - a) S + a (tr S / d) I of a covariance S, (d, d)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError

Float = NDArray[np.float64]


def intensity(
    policy: float | str | None, scatter: Float, weight: float, quartic: float | None
) -> float:
    """Return the shrinkage intensity a in [0, 1].

    In both formulas, S is scaled to a mean eigenvalue of 1, and n is the weight sum. "oas" is the
    oracle approximating shrinkage of Chen, Wiesel, Eldar and Hero (2010),
    a = (tr S^2 / d + d) / ((n + 1) |S - I|^2 / d). "ledoit-wolf" is
    a = (sum |x - mean|^4 / n - tr S^2) / (n |S - I|^2) (Ledoit and Wolf 2004).

    Parameters
    ----------
    policy : None, float, "oas", "ledoit-wolf" or "cv"
        Rule for the intensity, or the intensity itself; None is 0.
    scatter : (d, d) float64, Fortran order, lower triangle
        weight * S.
    weight : float
        Weight sum n of the rows.
    quartic : float or None
        sum w |x - mean|^4; None if fourth moments were not accumulated.

    Raises
    ------
    InputError
        The policy is "cv", which requires folds, or it is "ledoit-wolf" and `quartic` is None.
    """
    if policy is None:
        return 0.0
    if not isinstance(policy, str):
        return float(policy)
    if policy == "cv":
        raise InputError(
            "shrinkage='cv' is chosen on folds: pass those of Moments.from_blocks(source, folds=2) "
            "to the method, or fit an estimator to all rows at once"
        )
    # Scale S to tr(S) = d, so that the target is the identity.
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
    if policy == "oas":
        return min(1.0, (frobenius / d + d) / ((weight + 1) * distance / d))
    if quartic is None:
        raise InputError(
            "shrinkage='ledoit-wolf' needs fourth moments, which were not accumulated; make the "
            "moments with Moments(ledoit_wolf=True), or use 'oas', which needs none"
        )
    noise = (quartic / (scale / weight) ** 2 / weight - frobenius) / weight
    return float(np.clip(noise / distance, 0.0, 1.0))
