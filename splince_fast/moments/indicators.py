"""Label columns that are indicators: a row holds a single 1 and zeros, or zeros alone.

Their products with x are class sums, and their products with each other are weights of classes,
so that no matrix product is taken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime.arrays import NO_WEIGHT

Float = NDArray[np.float64]
Codes = NDArray[np.intp]

# Rows that are looked at together.
_PART_ROWS = 256


class Indicators:
    """The indicators of a block about a reference point t, and room for their sums.

    Parameters
    ----------
    codes : (n,) intp
        As :func:`indicator_codes` returns them, -1 for a missing label.
    weight : (n,) float64, or None for unit weights
    reference : (k,) float64
    width : int
        Features d of x.

    Attributes
    ----------
    codes : (n,) intp
        Numbers of the classes that occur, in the order of their first rows; -1 where missing.
    n_classes : int
        Number of classes that occur; rows of zeros are one of them.
    """

    def __init__(self, codes: Codes, weight: Float | None, reference: Float, width: int) -> None:
        n, k = len(codes), len(reference)
        self.codes, present, rows = np.empty((3, n), np.intp)
        weights = np.empty(n)
        given = NO_WEIGHT if weight is None else weight
        self.n_classes, _ = row_kernels.count_classes(
            codes, given, k + 1, self.codes, present, rows, weights
        )
        self._reference = reference
        c = self.n_classes
        self._present, self._rows, self._weights = present[:c], rows[:c], weights[:c]
        # The last class has the rows of zeros.
        self._class_rows, self._class_weights = np.zeros(k + 1, np.int64), np.zeros(k + 1)
        self._products = np.zeros((k + 1, width))
        self._total = np.empty(width)

    def label_sums(self) -> tuple[Float, Float]:
        """sum w (z - t), (k,), and sum w (z - t)(z - t)^T, (k, k), which is exactly symmetric."""
        t, counted = self._reference, np.zeros(len(self._reference) + 1)
        counted[self._present] = self._weights
        weights, whole = counted[:-1], float(self._weights.sum())
        half = np.outer(t, weights - 0.5 * whole * t)
        squares = -(half + half.T)
        # A sum of what is not negative, and exactly 0 for a constant column.
        np.fill_diagonal(squares, weights * (1.0 - t) ** 2 + (whole - weights) * t**2)
        return weights - whole * t, squares

    def products(self, class_sums: Float) -> Float:
        """sum w (z - t)(x - r)^T, and sum w (x - r) in the last row; no memory is needed.

        Parameters
        ----------
        class_sums : (n_classes, d) float64
            sum w (x - r) of the rows of each class.
        """
        products, total = self._products, self._total
        np.sum(class_sums, axis=0, out=total)
        np.multiply(self._reference[:, None], total, out=products[:-1])
        np.negative(products[:-1], out=products[:-1])
        row_kernels.add_classes(
            self._class_rows, self._class_weights, products, self._present, self._rows,
            self._weights, class_sums,
        )  # fmt: skip
        products[-1] = total
        return products


def indicator_codes(labels: Float) -> Codes | None:
    """The column that is 1 in each row, k in rows of zeros; None if the labels are anything else.

    Parameters
    ----------
    labels : (n, k) float64, k > 0
    """
    n, k = labels.shape
    codes = np.empty(n, np.intp)
    for start in range(0, n, _PART_ROWS):
        part = labels[start : start + _PART_ROWS]
        marked = part != 0
        column = marked.argmax(axis=1)
        value = np.take_along_axis(part, column[:, None], axis=1)[:, 0]
        ones = value == 1
        if np.count_nonzero(marked) != np.count_nonzero(ones) or (value[~ones] != 0).any():
            return None
        codes[start : start + len(part)] = np.where(ones, column, k)
    return codes
