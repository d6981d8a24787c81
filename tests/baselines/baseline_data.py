"""Data of the tests of the baselines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation import spurious_split


@dataclass(frozen=True)
class Drawn:
    """Rows whose means depend on an associated concept and task."""

    X: NDArray[np.float64]
    y: NDArray[np.intp]
    z: NDArray[np.intp]


def draw(n: int = 600, d: int = 8, k: int = 2, seed: int = 0) -> Drawn:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, size=n)
    z = np.where(rng.random(n) < 0.85, y, rng.integers(0, k, size=n))
    X = rng.normal(size=(n, d)) + 2.0 * np.eye(d)[z] + 1.0 * np.eye(d)[k + y] + 5.0
    return Drawn(X, y, z)


@dataclass(frozen=True)
class Parts:
    """Rows scaled as the figures of the data want it, with the parts of one split."""

    X: NDArray[np.float64]
    y: NDArray[np.intp]
    z: NDArray[np.intp]
    train: NDArray[np.intp]
    validation: NDArray[np.intp]
    test: NDArray[np.intp]

    @property
    def fitted(self) -> NDArray[np.intp]:
        return np.concatenate([self.train, self.validation])

    @property
    def mask(self) -> NDArray[np.bool_]:
        return np.arange(len(self.fitted)) >= len(self.train)


@cache
def bug_parts(folder: Path) -> Parts:
    """bug_profession_gender at p = .9, seed 0."""
    X = np.load(folder / "X.npy").astype(np.float64)
    y, z = (np.load(folder / f"{name}.npy").astype(np.intp) for name in "yz")
    split = spurious_split(y, z, p=0.9, sizes=(4000, 600, 1000), aligned_class=0)
    X -= X[split.train].mean(axis=0)
    X /= np.sqrt(X[split.train].var(axis=0).mean())
    return Parts(X, y, z, split.train, split.validation, split.test)


def figures(parts: Parts, predicted: NDArray[Any]) -> tuple[float, float, float]:
    """Accuracy, worst cell, and rms gap of the true positive rates on the test rows."""
    y, z = parts.y[parts.test], parts.z[parts.test]
    hit = predicted == y
    rates = [[hit[(y == a) & (z == b)].mean() for b in np.unique(z)] for a in (0, 1)]
    gap = np.sqrt(np.mean([(max(r) - min(r)) ** 2 for r in rates]))
    return float(hit.mean()), float(np.min(rates)), float(gap)
