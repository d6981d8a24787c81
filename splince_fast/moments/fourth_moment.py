"""The fourth moment that Ledoit-Wolf shrinkage needs: sum w |x - mean|^4, streamed and merged.

With u = x - r for the reference point r of the state, s = |u|^2 and e = mean - r::

    |x - mean|^4 = (s - 2 u.e + |e|^2)^2

so that sum w s^2 and sum w s u, beside the scatter, are enough: O(d) more state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.moments.block import rows_of

Float = NDArray[np.float64]

_CHUNK = 1 << 18


@dataclass(slots=True)
class FourthMoment:
    """sum w |u|^4 and sum w |u|^2 u, of u = x - reference."""

    quartic: float
    cubic: Float  # (d,)

    @classmethod
    def empty(cls, width: int) -> FourthMoment:
        return cls(0.0, np.zeros(width))

    def copy(self) -> FourthMoment:
        return FourthMoment(self.quartic, self.cubic.copy())

    def scaled(self, factor: float) -> FourthMoment:
        """The same sums with every weight times a factor."""
        return FourthMoment(factor * self.quartic, factor * self.cubic)

    def add_rows(
        self, rows: NDArray[Any], weight: Float | None, reference: Float,
        index: NDArray[np.intp] | None = None,
    ) -> None:  # fmt: skip
        """Add a block of rows; `weight` is None for unit weights, and `index` for all rows."""
        step = max(1, _CHUNK // rows.shape[1])
        for start in range(0, len(rows) if index is None else len(index), step):
            deviations = rows_of(rows, index, start, start + step) - reference
            squares = np.einsum("ij,ij->i", deviations, deviations)
            weighted = squares if weight is None else weight[start : start + step] * squares
            self.quartic += float(weighted @ squares)
            self.cubic += weighted @ deviations

    def moved(self, step: Float, weight: float, deviation: Float, scatter: Float) -> FourthMoment:
        """The same sums about the reference point r - step.

        Parameters
        ----------
        deviation, scatter : (d,), (d, d)
            sum w u, and the lower triangle of the scatter about the mean, of the same rows.
        """
        along = _second_moment_times(scatter, deviation, weight, step)
        square = float(step @ step)
        total = float(np.einsum("ii->", scatter)) + float(deviation @ deviation) / weight
        drift = float(deviation @ step)
        quartic = (
            self.quartic
            + 4 * float(step @ along)
            + weight * square**2
            + 4 * float(self.cubic @ step)
            + 2 * square * total
            + 4 * square * drift
        )
        cubic = (
            self.cubic
            + 2 * along
            + square * deviation
            + (total + 2 * drift + weight * square) * step
        )
        return FourthMoment(quartic, cubic)

    def centred(self, weight: float, deviation: Float, scatter: Float) -> float:
        """sum w |x - mean|^4."""
        mean = deviation / weight
        return max(0.0, self.moved(-mean, weight, deviation, scatter).quartic)


def _second_moment_times(scatter: Float, deviation: Float, weight: float, v: Float) -> Float:
    """(sum w u u^T) v, from the lower triangle of the scatter about the mean."""
    import scipy.linalg.blas

    product = scipy.linalg.blas.dsymv(1.0, scatter, v, lower=1)
    return np.asarray(product + deviation * (float(deviation @ v) / weight))
