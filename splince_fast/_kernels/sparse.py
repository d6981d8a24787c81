"""Sums over sparse rows in compressed format (CSR), in time proportional to the stored entries.

`data`, `indices` and `indptr` are the arrays of a CSR matrix without duplicate entries; `weight` is
(n,) > 0, or empty for unit weights. Numba compiles every kernel for the host and caches the code.
Kernels run on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numba
import numpy as np


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with the options of all kernels."""
    # Reassociation and contraction allow SIMD instructions; other flags would break NaN.
    flags = {"reassoc", "contract"}
    jit: Any = partial(numba.njit, nogil=True, fastmath=flags, error_model="numpy")
    try:
        return cast(Callable[..., Any], jit(cache=True)(function))
    except RuntimeError:  # no writable folder for the cache: compile in every process
        return cast(Callable[..., Any], jit()(function))


@kernel
def sum_rows(
    data: Any, indices: Any, indptr: Any, weight: Any, codes: Any, values: Any, total: Any,
    class_sums: Any, products: Any,
) -> None:  # fmt: skip
    """Add the sum of the rows, the sums per class and the products with label columns to outputs.

    With w_i the weight of row x_i::

        total += sum_i w_i x_i                 class_sums[c] += sum_{i: codes[., i] = c} w_i x_i
        products[q] += sum_i values[q, i] x_i

    `codes`, (v, n), are indices into `class_sums`, -1 for a missing label; `values`, (q, n), are
    label columns, multiplied by the weights.
    """
    weighted = weight.shape[0] > 0
    for i in range(indptr.shape[0] - 1):
        w = weight[i] if weighted else 1.0
        for p in range(indptr[i], indptr[i + 1]):
            total[indices[p]] += w * data[p]
        for v in range(codes.shape[0]):
            code = codes[v, i]
            if code >= 0:
                for p in range(indptr[i], indptr[i + 1]):
                    class_sums[code, indices[p]] += w * data[p]
        for q in range(values.shape[0]):
            value = values[q, i]
            for p in range(indptr[i], indptr[i + 1]):
                products[q, indices[p]] += value * data[p]


@kernel
def sum_squares(
    data: Any, indices: Any, indptr: Any, weight: Any, mean: Any, weight_sum: float, squares: Any
) -> None:
    """Compute the weighted sum of squares about `mean` of each column, `squares` (d,).

    Over the rows i that store an entry of column j, the result is::

        squares[j] = sum_i w_i (x_ij - mean_j)^2 + (weight_sum - sum_i w_i) mean_j^2

    The second term belongs to the implicit zeros, for the sum `weight_sum` of all weights.
    """
    weighted = weight.shape[0] > 0
    n = indptr.shape[0] - 1
    stored = np.zeros(squares.shape[0])
    count = np.zeros(squares.shape[0], np.int64)
    squares[:] = 0.0
    for i in range(n):
        w = weight[i] if weighted else 1.0
        for p in range(indptr[i], indptr[i + 1]):
            j = indices[p]
            gap = data[p] - mean[j]
            squares[j] += w * gap * gap
            stored[j] += w
            count[j] += 1
    for j in range(squares.shape[0]):
        if count[j] < n:
            squares[j] += max(0.0, weight_sum - stored[j]) * mean[j] * mean[j]
