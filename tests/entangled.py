"""Rows in which a concept and a task go together, and how far class means lie apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


def normal(n: int, d: int, dtype: Any = np.float64, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(dtype)


def gap(X: Float, z: Any, classes: int = 2) -> float:
    """Largest difference between a class mean and the mean of all rows."""
    return float(max(np.abs(X[z == c].mean(axis=0) - X.mean(axis=0)).max() for c in range(classes)))


def drawn(n: int = 400, d: int = 6, seed: int = 0) -> tuple[Float, Any, Any]:
    """Rows that show a binary concept and a task that goes with it four times out of five."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 2, n)
    y = np.where(rng.random(n) < 0.8, z, 1 - z)
    X = rng.normal(size=(n, d)) @ rng.normal(size=(d, d))
    X[:, 0] += 2 * z
    X[:, 1] += y
    return X, z, y
