"""One sweep over a block for sums per class, squares and leverages; and which rows are sampled.

The block is read where it lies and is not copied. Every kernel is serial, and each number comes
from the same operations whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from splince_fast._kernels.accumulate import place
from splince_fast._kernels.jit import kernel, prefetch

# Columns whose share of a row's leverage is one number: threads begin at multiples of it.
STRIPE = 192
# The processor foresees a run of reads, but not from one row to the next where they are shorter
# than a page: such rows are asked for so many rows ahead, a cache line at a time.
_PAGE, _LINE, _AHEAD = 4096, 64, 8


@kernel
def _sum_four(
    rows: Any, a: Any, b: Any, c: Any, d: Any, first: Any, last: Any, origin: Any, scale: Any,
    held: Any, square: Any, w_a: float, w_b: float, w_c: float, w_d: float,
) -> tuple[float, float, float, float]:  # fmt: skip
    """Add four rows to `held` and `square`; returns the share of these columns in their leverages.

    Numbers of rows and columns are unsigned: without wrap-around the compiler can vectorise, and
    needs no views, which would cost half as much as the sums.
    """
    l_a = l_b = l_c = l_d = 0.0
    for j in range(first, last):
        y_a = rows[a, j] - origin[j]
        y_b = rows[b, j] - origin[j]
        y_c = rows[c, j] - origin[j]
        y_d = rows[d, j] - origin[j]
        held[j] += (w_a * y_a + w_b * y_b) + (w_c * y_c + w_d * y_d)
        aa = y_a * y_a
        bb = y_b * y_b
        cc = y_c * y_c
        dd = y_d * y_d
        square[j] += (w_a * aa + w_b * bb) + (w_c * cc + w_d * dd)
        l_a += scale[j] * aa
        l_b += scale[j] * bb
        l_c += scale[j] * cc
        l_d += scale[j] * dd
    return l_a, l_b, l_c, l_d


@kernel
def sweep_block(
    rows: Any,
    index: Any,
    weight: Any,
    shift: Any,
    inverse: Any,
    codes: Any,
    order: Any,
    cell: Any,
    values: Any,
    bounds: Any,
    begin: int,
    end: int,
    first: int,
    last: int,
    sums: Any,
    leverage: Any,
) -> None:
    """Reduce the columns first..last of the segments begin..end of a block, in one sweep.

    Of segment g, the rows i = order[bounds[g]], ..., with y_i = x_i - shift and k classes::

        sums[g, 0]         = sum_i w_i y_i
        sums[g, 1]         = sum_i w_i y_i^2
        sums[g, 2 + c]     = sum_{i: codes[., i] = c} w_i y_i
        sums[g, 2 + k + q] = sum_i values[q, i] y_i
        leverage[s, i]     = sum_{j in stripe s} inverse_j y_ij^2

    The rows of a cell, those of equal codes within a part, are summed four at a time, and their
    sum is added to each of its classes. A segment is a run of whole parts with sums of its own:
    threads that read segments read no line of memory twice, as they would where they share rows.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous
    index : (n,) intp
        The n rows of the block among them, in its order; or empty for all, n = m.
    weight : (n,) float64 > 0, or empty for unit weights
    shift, inverse : (d,) float64
    codes : (v, n) intp below k, sums to add each row to; -1 for none
    order, cell : (n,) intp
        As `sort_by_cell` gives them.
    values : (q, n) float64, already multiplied by the weights
    bounds : (g + 1,) intp
        Where segments begin in the order, from 0 to n; each is of whole parts.
    begin, end : int
        Of the segments.
    first, last : int
        `first` is a multiple of STRIPE, and `last` is one or d.
    sums : (g, 2 + k + q, d) float64, overwritten
    leverage : (d / STRIPE rounded up, n) float64, overwritten
    """
    weighted = weight.shape[0] > 0
    held = np.zeros(last)
    columns = range(np.uintp(first), np.uintp(last))
    behind = sums.shape[1] - values.shape[0]
    line = _LINE // rows.itemsize
    foreseen = rows.shape[1] * rows.itemsize > _PAGE
    w_a = w_b = w_c = w_d = 1.0
    for g in range(begin, end):
        total, squares = sums[g, 0], sums[g, 1]
        sums[g, :, first:last] = 0.0
        start = bounds[g]
        while start < bounds[g + 1]:
            stop = start
            while stop < bounds[g + 1] and cell[stop] == cell[start]:
                stop += 1
            held[first:] = 0.0
            for k in range(start, stop, 4):
                # The last group may repeat its first row with weight 0.
                count = min(4, stop - k)
                i_a = order[k]
                i_b = order[k + 1] if count > 1 else i_a
                i_c = order[k + 2] if count > 2 else i_a
                i_d = order[k + 3] if count > 3 else i_a
                if weighted:
                    w_a, w_b, w_c, w_d = weight[i_a], weight[i_b], weight[i_c], weight[i_d]
                s_b = w_b if count > 1 else 0.0
                s_c = w_c if count > 2 else 0.0
                s_d = w_d if count > 3 else 0.0
                a, b = np.uintp(place(index, i_a)), np.uintp(place(index, i_b))
                c, d = np.uintp(place(index, i_c)), np.uintp(place(index, i_d))
                for left in range(first, last, STRIPE):
                    right = min(last, left + STRIPE)
                    if not foreseen:
                        for i in order[k + _AHEAD : k + _AHEAD + 4]:
                            for j in range(left, right, line):
                                prefetch(rows, place(index, i), j)
                    l_a, l_b, l_c, l_d = _sum_four(
                        rows, a, b, c, d, np.uintp(left), np.uintp(right),
                        shift, inverse, held, squares, w_a, s_b, s_c, s_d,
                    )  # fmt: skip
                    stripe = left // STRIPE
                    leverage[stripe, i_d] = l_d
                    leverage[stripe, i_c] = l_c
                    leverage[stripe, i_b] = l_b
                    leverage[stripe, i_a] = l_a
            for j in columns:
                total[j] += held[j]
            for v in range(codes.shape[0]):
                code = codes[v, order[start]]
                if code >= 0:
                    for j in columns:
                        sums[g, 2 + code, j] += held[j]
            start = stop
        for q in range(values.shape[0]):
            for k in range(bounds[g], bounds[g + 1]):
                share = values[q, k]
                a = np.uintp(place(index, k))
                for j in columns:
                    sums[g, behind + q, j] += share * (rows[a, j] - shift[j])


@kernel
def weigh_classes(codes: Any, weight: Any, weights: Any) -> None:
    """weights[c] = sum_{i: codes[., i] = c} w_i.

    Parameters
    ----------
    codes : (v, n) intp below k, -1 for none
    weight : (n,) float64, or empty for unit weights
    weights : (k,) float64, overwritten
    """
    weights[:] = 0.0
    for v in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            if codes[v, i] >= 0:
                weights[codes[v, i]] += weight[i] if weight.shape[0] > 0 else 1.0


@kernel
def choose_rows(
    leverage: Any, weight: Any, rate: float, key: Any, position: int, chosen: Any, inclusion: Any
) -> int:
    """Poisson sampling with the floor-leverage probability, decided by a hash of the position::

        pi_i = min(1, rate max(1, q_i / mean q)),    q_i = w_i sum_s leverage[s, i]

    Row i is taken if splitmix64(key + position + i) < pi_i 2^64.

    Parameters
    ----------
    leverage : (s, n) float64
    weight : (n,) float64 > 0, or empty for unit weights
    rate : float in (0, 1]
    key : uint64
        Start of the sequence of hashes.
    position : int
        Of the first of these rows in the stream.
    chosen, inclusion : (n,) intp, (n,) float64
        Overwritten up to the number of rows taken: their numbers and probabilities.

    Returns
    -------
    int
        Number of rows taken.
    """
    n = leverage.shape[1]
    size = np.zeros(n)
    for s in range(leverage.shape[0]):
        for i in range(n):
            size[i] += leverage[s, i]
    mean = 0.0
    for i in range(n):
        if weight.shape[0] > 0:
            size[i] *= weight[i]
        mean += size[i]
    mean /= n
    taken = 0
    for i in range(n):
        probability = rate
        if size[i] > mean:
            probability = min(1.0, rate * (size[i] / mean))
        mixed = key + np.uint64(position) + np.uint64(i) + np.uint64(1)
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        # The 53 highest bits are a number in [0, 1) without rounding.
        if np.float64(mixed >> np.uint64(11)) * 2.0**-53 < probability:
            chosen[taken] = i
            inclusion[taken] = probability
            taken += 1
    return taken


@kernel
def add_label_products(codes: Any, values: Any, places: Any, weight: Any, gram: Any) -> None:
    """gram += sum_i w_i f_i f_i^T for the features f of labels: indicators and columns.

    Parameters
    ----------
    codes : (v, n) intp, rows of `gram` where the indicator is 1; -1 for none
    values, places : (q, n) float64, (q,) intp
        Columns, and their rows of `gram`.
    weight : (n,) float64, or empty for unit weights
    gram : (k, k) float64, changed in place
    """
    variables, n = codes.shape
    columns = values.shape[0]
    w = 1.0
    for i in range(n):
        if weight.shape[0] > 0:
            w = weight[i]
        for u in range(variables):
            a = codes[u, i]
            if a < 0:
                continue
            for v in range(variables):
                b = codes[v, i]
                if b >= 0:
                    gram[a, b] += w
            for q in range(columns):
                gram[a, places[q]] += w * values[q, i]
                gram[places[q], a] += w * values[q, i]
        for q in range(columns):
            for r in range(columns):
                gram[places[q], places[r]] += w * values[q, i] * values[r, i]
