"""The intensity a of the shrinkage (1 - a) S + a (tr S / d) I of a covariance S, (d, d)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import InputError

Float = NDArray[np.float64]


def intensity(policy: float | str, scatter: Float, weight: float) -> float:
    """Return a in [0, 1] for n S, (d, d) with a valid lower triangle, and the weight sum n."""
    if not isinstance(policy, str):
        return float(policy)
    if policy == "cv":
        raise InputError(
            "shrinkage='cv' is chosen on folds: pass those of Moments.from_blocks(source, folds=2) "
            "to the method, or fit an estimator to all rows at once"
        )
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
