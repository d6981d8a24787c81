"""Data of the tests of the baselines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


def split_rows(
    y: NDArray[Any], z: NDArray[Any], p: float, sizes: tuple[int, int, int], tied: int, seed: int
) -> list[NDArray[np.intp]]:
    """Training, validation and test rows: each cell permuted, its first rows test, and so on."""
    rng = np.random.default_rng(seed)
    k = len(np.unique(z))
    parts: list[list[NDArray[np.intp]]] = [[], [], []]
    for a in (0, 1):
        for b in range(k):
            order = rng.permutation(np.flatnonzero((y == a) & (z == b)))
            share = p / 2 if (a == 1) == (b == tied) else (1 - p) / 2
            share /= 1 if b == tied else k - 1
            ends = np.cumsum(
                [sizes[2] // (2 * k), round(sizes[1] * share), round(sizes[0] * share)]
            )
            for part, start, stop in zip((2, 1, 0), (0, *ends[:2]), ends, strict=True):
                parts[part].append(order[start:stop])
    return [np.concatenate(part) for part in parts]


@cache
def bug_parts(folder: Path) -> Parts:
    """bug_profession_gender at p = .9, seed 0."""
    X = np.load(folder / "X.npy").astype(np.float64)
    y, z = (np.load(folder / f"{name}.npy").astype(np.intp) for name in "yz")
    train, validation, test = split_rows(y, z, 0.9, (4000, 600, 1000), 0, 0)
    X -= X[train].mean(axis=0)
    X /= np.sqrt(X[train].var(axis=0).mean())
    return Parts(X, y, z, train, validation, test)


def figures(parts: Parts, predicted: NDArray[Any]) -> tuple[float, float, float]:
    """Accuracy, worst cell, and rms gap of the true positive rates on the test rows."""
    y, z = parts.y[parts.test], parts.z[parts.test]
    hit = predicted == y
    rates = [[hit[(y == a) & (z == b)].mean() for b in np.unique(z)] for a in (0, 1)]
    gap = np.sqrt(np.mean([(max(r) - min(r)) ** 2 for r in rates]))
    return float(hit.mean()), float(np.min(rates)), float(gap)
