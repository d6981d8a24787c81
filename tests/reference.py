"""The kernels again in plain NumPy: the twins that tests compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
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
