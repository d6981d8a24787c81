"""A hash of row numbers, which assigns rows to folds and samples independently of blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def splitmix64(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each number with the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
