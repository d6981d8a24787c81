"""Synthetic problems: rows with class labels of a concept and of an associated task."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from splince_fast import Moments

Array = NDArray[Any]
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Problem:
    """Rows X, (n, d), with integer classes of the concept, z (n,), and of the task, y (n,)."""

    X: Array
    z: Array
    y: Array

    @property
    def labels(self) -> dict[str, Array]:
        return {"z": self.z, "y": self.y}

    def moments(self) -> Moments:
        """Accumulate the moments of all rows, with concept and task labels as classes."""
        return Moments(kinds=dict.fromkeys(self.labels, "classes")).update(self.X, self.labels)


def problem(
    n: int, d: int, dtype: DTypeLike = "float32", *, classes: int = 2, offset: float = 0.0,
    seed: int = 0,
) -> Problem:  # fmt: skip
    """Draw Gaussian rows with features of different scales, shifted by concept and task class.

    The task equals the concept with probability 0.7, else it is a random class. The mean of every
    feature is moved by `offset` standard deviations of its noise.
    """
    rng = np.random.default_rng(seed)
    z = rng.integers(0, classes, n)
    z[:classes] = np.arange(classes)  # each class occurs at least once
    y = np.where(rng.random(n) < 0.7, z, rng.integers(0, classes, n))
    scale = np.geomspace(1.0, 0.1, d)
    shift_z, shift_y = (scale * rng.normal(size=(classes, d)) for _ in range(2))
    X = np.empty((n, d), dtype)
    step = max(1, _CHUNK_ELEMENTS // d)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        noise = rng.standard_normal((len(z[rows]), d), np.float32) * scale
        X[rows] = noise + (0.5 * shift_z[z[rows]] + 0.5 * shift_y[y[rows]] + offset * scale)
    return Problem(X, z, y)


# `problem` with a cache. Jobs share the results and must not change them.
cached_problem = lru_cache(maxsize=2)(problem)


def split_rows(size: int, X: Any, **labels: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Split rows and labels into views of `size` consecutive rows."""
    slices = [slice(start, start + size) for start in range(0, len(X), size)]
    return [(X[rows], {name: values[rows] for name, values in labels.items()}) for rows in slices]


def write_rows(n: int, d: int) -> Path:
    """Write n float32 rows, 16 copies of n / 16 rows, to a .npy file; return its path.

    The file stays in the page cache.
    """
    path = scratch() / f"{n} x {d}.npy"
    if not path.exists():
        rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(n, d))
        rows.reshape(16, n // 16, d)[:] = problem(n // 16, d).X
        rows.flush()
    return path


@cache
def scratch() -> Path:
    """Return a temporary folder that is removed when the process exits."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
