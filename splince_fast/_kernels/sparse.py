"""Sums over compressed sparse rows: each costs the entries that are stored, and nothing is dense.

`data`, `indices` and `indptr` are those of a CSR matrix without duplicates; `weight` is (n,) > 0,
or empty for unit weights. Every kernel is compiled by Numba for the host, cached, and serial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with the one set of options that all kernels share."""
    # Reassociation and contraction let sums use SIMD; NaN and infinity keep their meaning.
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": {"reassoc", "contract"},
        "error_model": "numpy",
    }
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache: compile once in each process
        compiled = numba.njit(**options)(function)
    return compiled


@kernel
def sum_rows(
    data: Any, indices: Any, indptr: Any, weight: Any, codes: Any, values: Any, total: Any,
    class_sums: Any, products: Any,
) -> None:  # fmt: skip
    """Add to what is there::

        total += sum_i w_i x_i                 class_sums[c] += sum_{i: codes[., i] = c} w_i x_i
        products[q] += sum_i values[q, i] x_i

    Parameters
    ----------
    codes : (v, n) intp, rows of class_sums to add each row to; -1 for none
    values : (q, n) float64, already multiplied by the weights
    total, class_sums, products : (d,), (c, d), (q, d) float64
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
            share = values[q, i]
            for p in range(indptr[i], indptr[i + 1]):
                products[q, indices[p]] += share * data[p]


@kernel
def sum_squares(
    data: Any, indices: Any, indptr: Any, weight: Any, mean: Any, whole: float, squares: Any
) -> None:
    """squares = sum_i w_i (x_i - mean)^2 with the zeros, that is

        sum_stored w_i (x_ij - mean_j)^2 + (whole - sum_stored w_i) mean_j^2,

    in which nothing cancels. `whole` is the sum of the weights.
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
            squares[j] += max(0.0, whole - stored[j]) * mean[j] * mean[j]


@kernel
def add_images(
    data: Any, indices: Any, indptr: Any, weight: Any, vectors: Any, centre: Any,
    coordinates: Any, total: Any, out: Any,
) -> None:  # fmt: skip
    """out += sum_i w_i x_i t_i^T and total += sum_i w_i t_i, with t_i = V^T x_i - centre.

    Parameters
    ----------
    vectors : (d, m) int8 or float64, V
    centre : (m,) float64
    coordinates : (m,) float64, overwritten
    total, out : (m,), (d, m) float64
    """
    weighted = weight.shape[0] > 0
    m = centre.shape[0]
    for i in range(indptr.shape[0] - 1):
        w = weight[i] if weighted else 1.0
        for c in range(m):
            coordinates[c] = -centre[c]
        for p in range(indptr[i], indptr[i + 1]):
            x = data[p]
            row = vectors[indices[p]]
            for c in range(m):
                coordinates[c] += x * row[c]
        for c in range(m):
            coordinates[c] *= w
            total[c] += coordinates[c]
        for p in range(indptr[i], indptr[i + 1]):
            x = data[p]
            image = out[indices[p]]
            for c in range(m):
                image[c] += x * coordinates[c]
