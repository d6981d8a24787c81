"""Projections of known factors, the map in extended precision, and the error of float64.

A row of the result is x - left c with c = right^T (x - mean), all in float64. A sum of d products
errs by at most d eps of the sum of their magnitudes, so the result errs by

    (d + r + 4) eps |left| (|right|^T |x - mean|) + eps |x|,

entry by entry, and then once by half an ulp of its own dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from naive_model import laid_out
from numpy.typing import NDArray
from problems import EPS, Float

import splince_fast as sf

DTYPES = [
    "float64", "float32", "float16", ">f8", ">f4", "longdouble", "int8", "uint16", "int64", "bool",
]  # fmt: skip


LAYOUTS = ["C", "F", "strided", "reversed", "unaligned", "read-only", "broadcast"]


def draw_eraser(rank: int = 1, d: int = 7, mean: float = 3.0, seed: int = 0) -> sf.Projection:
    """An oblique projection with an asymmetric matrix; `right` is dual to `left`."""
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(2, d, rank))
    right = right @ np.linalg.inv(left.T @ right)
    return sf.Projection(left, right, mean * rng.normal(size=d))


def exact(eraser: sf.Projection, rows: NDArray[Any]) -> NDArray[Any]:
    """The map by its definition, in extended precision."""
    left, right, mean = (a.astype(np.longdouble) for a in (eraser.left, eraser.right, eraser.mean))
    x = rows.astype(np.longdouble)
    return np.asarray(x - ((x - mean) @ right) @ left.T)


def bound(eraser: sf.Projection, rows: NDArray[Any], result: NDArray[Any]) -> Float:
    """Largest error of each entry, from the analysis above."""
    x = rows.astype(np.float64)
    left, right = np.abs(eraser.left), np.abs(eraser.right)
    terms = np.abs(x - eraser.mean) @ right
    d, r = left.shape
    own = 0.0 if result.dtype.kind in "iub" else float(np.finfo(result.dtype).eps)
    tiny = float(np.finfo(result.dtype).smallest_subnormal)
    wide = (d + r + 4) * EPS * (terms @ left.T) + 2 * EPS * np.abs(x)
    return np.asarray(wide + own / 2 * np.abs(result.astype(np.float64)) * (1 + 1e-3) + tiny)


def rows_like(dtype: str, n: int, d: int, layout: str = "C", seed: int = 1) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * 20
    x = (x > 0) if dtype == "bool" else np.abs(x) if dtype == "uint16" else x
    if layout == "broadcast":
        return np.broadcast_to(x.astype(dtype)[:1], (n, d))
    return laid_out(x.astype(dtype), layout)


def result_dtype(dtype: str) -> np.dtype[Any]:
    return np.dtype("float64") if np.dtype(dtype).kind in "iub" else np.dtype(dtype)


def layer_dtype(dtype: str) -> np.dtype[Any]:
    return np.result_type(dtype, "f4") if np.dtype(dtype).kind in "iub" else np.dtype(dtype)
