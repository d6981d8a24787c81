"""The kernels again in plain NumPy: the twins that tests compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

Float = NDArray[np.float64]


def centre_block(
    rows: NDArray[Any],
    weight: Float,
    reference: Float,
    codes: NDArray[np.intp],
    values: Float,
    n_classes: int,
) -> tuple[Float, Float, Float, Float]:
    """Scatter about the block's mean, deviation, class sums and products of a block of rows."""
    centred = rows.astype(np.float64) - reference
    w = weight if weight.size else np.ones(len(rows))
    deviation = w @ centred
    about_mean = centred - deviation / w.sum()
    scatter = (w[:, None] * about_mean).T @ about_mean
    class_sums = np.zeros((n_classes, rows.shape[1]))
    for row_codes in codes:
        for i, code in enumerate(row_codes):
            if code >= 0:
                class_sums[code] += w[i] * centred[i]
    return scatter, deviation, class_sums, values @ centred


def apply_rows(rows: NDArray[Any], left: Float, right: Float, mean: Float, shift: Float) -> Float:
    """rows - ((rows - mean) right^T - shift) left."""
    wide = rows.astype(np.float64)
    return np.asarray(wide - ((wide - mean) @ right.T - shift) @ left)


def oblique_factors(
    covariance: Float, span_z: Float, span_y: Float, *, whitened: bool, tolerance: float = 1e-10
) -> tuple[Float, Float]:
    """(left, right), both (d, r), by pseudo-inverses and complete decompositions.

    The closed form with E = Sz G^+ R^T, R = S^+ Sz - S^+ Sy Cyy^+ Cyz and
    G = Czz - Czy Cyy^+ Cyz; S := I where nothing is whitened.
    """
    inverse = (
        scipy.linalg.pinvh(covariance, rtol=tolerance) if whitened else np.eye(len(covariance))
    )
    czz = span_z.T @ inverse @ span_z
    czy = span_z.T @ inverse @ span_y
    cyy = np.linalg.pinv(span_y.T @ inverse @ span_y, rcond=tolerance, hermitian=True)
    gap = np.linalg.pinv(czz - czy @ cyy @ czy.T, rcond=tolerance, hermitian=True)
    right = inverse @ (span_z - span_y @ cyy @ czy.T)
    return span_z @ gap, right
