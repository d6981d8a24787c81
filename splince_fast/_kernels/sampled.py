"""One sweep over a block for sums per class, squares and leverages; and which rows are sampled.

The block is read where it lies and is not copied. Every kernel is serial, and each number comes
from the same operations whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from splince_fast._kernels.accumulate import place, sort_by_cell
from splince_fast._kernels.gram import look, take
from splince_fast._kernels.jit import kernel
from splince_fast._kernels.registers import aligned
from splince_fast._kernels.tiles import add_four

# Columns whose share of a row's leverage is one number: threads begin at multiples of it.
STRIPE = 192
# The processor does not foresee which row is next: it is asked for so many rows ahead.
_AHEAD = 8


@kernel
def sweep_block(
    rows: Any, index: Any, weight: Any, shift: Any, inverse: Any, codes: Any, values: Any,
    stripe: int, bounds: Any, cell_row: Any, cell_weight: Any, sums: Any, leverage: Any,
    counters: Any,
) -> None:  # fmt: skip
    """Reduce a block, whose rows are cut into segments with sums of their own, in one sweep.

    Of the rows i of segment g, with y_i = x_i - shift and k classes::

        sums[g, 0]         = sum_i w_i y_i
        sums[g, 1]         = sum_i w_i y_i^2
        sums[g, 2 + c]     = sum_{i: codes[., i] = c} w_i y_i
        sums[g, 2 + k + q] = sum_i values[q, i] y_i
        leverage[s, i]     = sum_{j in stripe s} inverse_j y_ij^2

    The rows of a cell, those of equal codes, are summed four at a time, and their sum is added to
    each of its classes.

    Any number of threads make this call at once, with the same arguments. Each takes the next task
    until none is left: some columns of a segment. Where these are all, no two threads read a line
    of memory, as they would where they share rows. `join_segments` has to follow; beside the last
    task its work is begun here.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous
    index : (n,) intp
        The n rows of the block among them, in its order; or empty for all, n = m.
    weight : (n,) float64 > 0, or empty for unit weights
    shift, inverse : (d,) float64
    codes : (v, n) intp below k, sums to add each row to; -1 for none
    values : (q, n) float64, already multiplied by the weights
    stripe : int
        Columns of a task, a multiple of STRIPE; at least d where there are several segments.
    bounds : (segments + 1,) intp
        Where they begin, and n.
    cell_row, cell_weight : (n,) intp, (n,) float64, overwritten
        A row of each cell of a segment, and the weight of the cell, from the beginning of the
        segment on; a weight of 0 behind them.
    sums : (segments, 2 + k + q, d) float64, overwritten
    leverage : (d / STRIPE rounded up, n) float64, overwritten
    counters : (segments + 1, 16) int64, zeros
        Tasks that were begun, those that are finished, and segments whose sums are in those of the
        first; whether segment g is finished, in row g + 1.
    """
    d, segments = rows.shape[1], sums.shape[0]
    stripes = (d + stripe - 1) // stripe
    near = aligned(4, d)  # it goes with every row, and is read fastest in whole lines of memory
    near[0], near[1] = shift, inverse
    task = take(counters, 0, 0)
    while task < segments * stripes:
        g, first = task // stripes, task % stripes * stripe
        _sweep_segment(
            rows, index, weight, near, codes, values, bounds[g], bounds[g + 1], first,
            min(d, first + stripe), cell_row, cell_weight, sums[g], leverage,
        )  # fmt: skip
        take(counters, g + 1, 0)
        if take(counters, 0, 1) == segments - 2:  # by one thread alone
            _add_segments(sums, counters)
        task = take(counters, 0, 0)


@kernel
def _add_segments(sums: Any, counters: Any) -> None:
    """Add the sums of finished segments to those of the first, in their order, up to a gap."""
    first = sums[0].reshape(-1)
    g = max(1, counters[0, 2])
    while g < sums.shape[0] and look(counters, 1, 0) and look(counters, g + 1, 0):
        added = sums[g].reshape(-1)
        for j in range(first.shape[0]):
            first[j] += added[j]
        g += 1
    counters[0, 2] = g


@kernel
def join_segments(bounds: Any, cell_row: Any, cell_weight: Any, sums: Any, counters: Any) -> int:
    """Make one of the segments, when every thread has left `sweep_block`; the same arguments.

    Returns
    -------
    int
        Number of cells, of all segments; they come first in `cell_row` and `cell_weight`.
    """
    _add_segments(sums, counters)
    cells = 0
    for g in range(len(bounds) - 1):
        k = bounds[g]
        while k < bounds[g + 1] and cell_weight[k] > 0.0:
            cell_row[cells], cell_weight[cells] = cell_row[k], cell_weight[k]
            cells += 1
            k += 1
    return cells


@kernel
def _sweep_segment(
    rows: Any, index: Any, weight: Any, near: Any, codes: Any, values: Any, begin: int, end: int,
    first: int, last: int, cell_row: Any, cell_weight: Any, sums: Any, leverage: Any,
) -> None:  # fmt: skip
    """Do a task of `sweep_block`: the columns first..last of the rows begin..end of a block.

    `near` is (4, d) float64: the shift, the inverse, and two rows that are overwritten.
    """
    shift, inverse, held, squares = near[0], near[1], near[2], near[3]
    weighted = weight.shape[0] > 0
    columns = range(np.uintp(first), np.uintp(last))
    behind = sums.shape[0] - values.shape[0]
    order, cell = np.empty(end - begin, np.intp), np.empty(end - begin, np.intp)
    sort_by_cell(codes[:, begin:end], behind - 2, end - begin, order, cell)
    order += begin
    cells = begin
    w_a = w_b = w_c = w_d = 1.0
    sums[:, first:last] = squares[first:last] = 0.0
    start = 0
    while start < len(order):
        stop = start
        whole = 0.0
        while stop < len(order) and cell[stop] == cell[start]:
            whole += weight[order[stop]] if weighted else 1.0
            stop += 1
        if first == 0:
            cell_row[cells], cell_weight[cells] = order[start], whole
            cells += 1
        held[first:last] = 0.0
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
            ahead = (
                place(index, order[min(k + _AHEAD, len(order) - 1)]),
                place(index, order[min(k + _AHEAD + 1, len(order) - 1)]),
                place(index, order[min(k + _AHEAD + 2, len(order) - 1)]),
                place(index, order[min(k + _AHEAD + 3, len(order) - 1)]),
            )
            at = place(index, i_a), place(index, i_b), place(index, i_c), place(index, i_d)
            for left in range(first, last, STRIPE):
                l_a, l_b, l_c, l_d = add_four(
                    rows, at, ahead, left, min(last, left + STRIPE), shift, inverse, held, squares,
                    (w_a, s_b, s_c, s_d),
                )  # fmt: skip
                stripe = left // STRIPE
                leverage[stripe, i_d] = l_d
                leverage[stripe, i_c] = l_c
                leverage[stripe, i_b] = l_b
                leverage[stripe, i_a] = l_a
        for j in columns:
            sums[0, j] += held[j]
        for v in range(codes.shape[0]):
            code = codes[v, order[start]]
            if code >= 0:
                for j in columns:
                    sums[2 + code, j] += held[j]
        start = stop
    sums[1, first:last] = squares[first:last]
    if first == 0 and cells < end:
        cell_weight[cells] = 0.0
    for q in range(values.shape[0]):
        for k in range(begin, end):
            share = values[q, k]
            a = np.uintp(place(index, k))
            for j in columns:
                sums[behind + q, j] += share * (rows[a, j] - shift[j])


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
def invert_variances(
    reference: Any, deviation: Any, squares: Any, weight: float, roundings: float, least: float,
    inverse: Any,
) -> None:  # fmt: skip
    """inverse_j = 1 / max(v_j, (roundings mean_j)^2, least max v), with v = squares / weight.

    All are 0 where max v is 0.

    Parameters
    ----------
    reference, deviation, squares : (d,) float64; weight > 0
        Of a state: sum w (x - reference), and sum w (x - mean)^2.
    inverse : (d,) float64, overwritten
    """
    largest = 0.0
    for j in range(squares.shape[0]):
        largest = max(largest, squares[j] / weight)
    for j in range(squares.shape[0]):
        rounding = (roundings * (reference[j] + deviation[j] / weight)) ** 2
        variance = max(max(squares[j] / weight, rounding), least * largest)
        inverse[j] = 1.0 / variance if largest > 0.0 else 0.0


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
