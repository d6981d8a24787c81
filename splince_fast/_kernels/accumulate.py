"""A block of rows reduced to its moments, and its scatter added to another, compiled by Numba.

Every kernel is serial; the threads split the work by columns, so that each number comes from the
same operations in the same order whatever their number. Above 400 lines because each kernel
carries its equations, shapes and dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from splince_fast._kernels.jit import kernel
from splince_fast._kernels.registers import REGISTER

# Combinations of codes that are counted at once.
_MOST_CELLS = 256


@kernel
def sort_by_cell(codes: Any, n_codes: int, part_rows: int, order: Any, cell: Any) -> None:
    """Order the rows of each part so that those with equal codes, a cell, are neighbours.

    One stable counting sort of the cells where they are few, O(v n + parts cells), else one per
    variable, O(v (n + parts n_codes)).

    Parameters
    ----------
    codes : (v, n) intp, -1 <= codes < n_codes
    part_rows : int
        Rows of a part; the last one may have fewer.
    order, cell : (n,) intp, overwritten; cells are numbered from 0 in the new order
    """
    variables, n = codes.shape
    kinds = n_codes + 1
    cells = 1
    for _ in range(variables):
        cells = min(cells * kinds, _MOST_CELLS + 1)
    if cells <= _MOST_CELLS:
        _sort_few_cells(codes, kinds, cells, part_rows, order, cell)
        return
    place = np.empty(n_codes + 2, np.intp)
    number = 0
    for start in range(0, n, part_rows):
        stop = min(start + part_rows, n)
        for i in range(start, stop):
            order[i] = i
        for v in range(variables):
            place[:] = 0
            for i in range(start, stop):
                place[codes[v, i] + 2] += 1
            place[0] = start
            for c in range(n_codes + 1):
                place[c + 1] += place[c]
            # `cell` is free until the end: it takes the new order.
            for i in range(start, stop):
                c = codes[v, order[i]] + 1
                cell[place[c]] = order[i]
                place[c] += 1
            order[start:stop] = cell[start:stop]
        for i in range(start, stop):
            if i > start:
                for v in range(variables):
                    if codes[v, order[i]] != codes[v, order[i - 1]]:
                        number += 1
                        break
            cell[i] = number
        number += 1


@kernel
def _sort_few_cells(
    codes: Any, kinds: int, cells: int, part_rows: int, order: Any, cell: Any
) -> None:
    """Do as `sort_by_cell`, where cells = kinds^v have room in a table."""
    variables, n = codes.shape
    # Where the rows of a cell begin in the order; they end there when all are placed.
    end = np.empty(cells + 1, np.intp)
    number = 0
    for start in range(0, n, part_rows):
        stop = min(start + part_rows, n)
        cell[start:stop] = 0
        for v in range(variables - 1, -1, -1):
            for i in range(start, stop):
                cell[i] = cell[i] * kinds + codes[v, i] + 1
        end[:] = 0
        for i in range(start, stop):
            end[np.uintp(cell[i] + 1)] += 1
        end[0] = start
        for c in range(cells):
            end[c + 1] += end[c]
        for i in range(start, stop):
            own = np.uintp(cell[i])
            order[end[own]] = i
            end[own] += 1
        begun = start
        for c in range(cells):
            if end[c] > begun:
                cell[begun : end[c]] = number
                number += 1
                begun = end[c]


@kernel
def size_of(rows: Any, index: Any) -> Any:
    """Rows of a block: those that `index` numbers, or all where it is empty."""
    return index.shape[0] if index.shape[0] > 0 else rows.shape[0]


@kernel
def place(index: Any, i: int) -> Any:
    """Where row i of a block lies among its rows, which `index` numbers unless it is empty."""
    return index[i] if index.shape[0] > 0 else i


@kernel
def sample_columns(
    rows: Any, index: Any, weight: Any, stride: int, shift: Any, spread: Any
) -> None:
    """Mean of every `stride`-th row, and its weighted sum of squares about it, in one pass.

    A column that is constant there gets exactly its value, and a spread of exactly 0.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous
    index : (n,) intp
        The n >= 1 rows of the block among them, in its order; or empty for all, n = m.
    weight : (n,) float64 > 0, or empty for unit weights
    shift, spread : (d,) float64, overwritten
    """
    n, d = size_of(rows, index), rows.shape[1]
    origin = rows[place(index, 0)]
    shift[:] = 0.0
    spread[:] = 0.0
    total = 0.0
    w = 1.0
    for i in range(0, n, stride):
        if weight.shape[0] > 0:
            w = weight[i]
        total += w
        row = rows[place(index, i)]
        for j in range(d):
            y = np.float64(row[j]) - origin[j]
            shift[j] += w * y
            spread[j] += w * y * y
    for j in range(d):
        mean = shift[j] / total
        spread[j] = max(0.0, spread[j] - shift[j] * mean)
        shift[j] = origin[j] + mean


# What `judge_sweep` may find, as bits.
SUSPECT = 1  # NaN, infinity, or squares that may leave the range of float64
FAR = 2  # the shift is too far from the mean: subtracting costs digits
NEEDS_FLOAT64 = 4  # float32 products would overflow or underflow

# Below this no row's sum of squares can reach what the check of values refuses.
_LARGEST_SQUARES = 1e297
# Least deviation, and greatest root of a sum of squares, that float32 holds to full precision.
_LEAST_FLOAT32 = 1e-15
_MOST_FLOAT32 = 1e18


@kernel
def judge_sweep(
    shift: Any, spread: Any, peak: Any, total: Any, whole: float, lightest: float,
    heaviest: float, n: int, excess: float,
) -> int:  # fmt: skip
    """Say, as bits, what a sweep over a block about `shift` has met.

    Parameters
    ----------
    shift, spread, peak, total : (d,) float64
        As `sample_columns` and `centre_block` leave them.
    whole, lightest, heaviest : float
        Sum, least and greatest of the weights of the n rows.
    excess : float
        total^2 may be at most this times `whole` times a lower bound of the sum of squares.
    """
    found = 0
    largest = 0.0
    for j in range(shift.shape[0]):
        size = abs(shift[j]) + peak[j]
        largest += size * size
        if not np.isfinite(total[j]):
            found |= SUSPECT
        square = total[j] * total[j]
        if square > excess * whole * spread[j]:
            # The row of the peak alone has that much about the block's mean.
            tip = max(0.0, peak[j] - abs(total[j]) / whole)
            if square > excess * whole * (lightest * tip * tip):
                found |= FAR
        if peak[j] > 0.0 and peak[j] * np.sqrt(lightest) < _LEAST_FLOAT32:
            found |= NEEDS_FLOAT64
        if peak[j] * np.sqrt(heaviest * n) > _MOST_FLOAT32:
            found |= NEEDS_FLOAT64
    if not largest < _LARGEST_SQUARES:
        found |= SUSPECT
    return found


@kernel
def reference_is_far(
    reference: Any, deviation: Any, weight: float, squares: Any, shift: Any, spread: Any,
    sampled: float, whole: float, far: float, roundings: float,
) -> bool:  # fmt: skip
    """Whether the mean, after a block, would lie `far` deviations from the reference point.

    Parameters
    ----------
    reference, deviation, squares : (d,) float64; weight : float
        Of the state: sum w (x - reference), and sum w (x - mean)^2.
    shift, spread : (d,) float64
        Mean of a sample of the block of weight `sampled`, and its squares about that mean.
    whole : float
        Weight of the block.
    roundings : float
        A distance of this times |reference| is rounding.
    """
    together = weight + whole
    for j in range(reference.shape[0]):
        ahead = shift[j] - reference[j]
        drift = (deviation[j] + whole * ahead) / together
        if abs(drift) <= roundings * abs(reference[j]):
            continue
        gap = ahead - deviation[j] / weight
        spread_of_all = squares[j] + spread[j] * (whole / sampled)
        spread_of_all += weight * whole / together * gap * gap
        if drift * drift * together > far * far * spread_of_all:
            return True
    return False


@kernel
def pack_lower(matrix: Any, packed: Any) -> None:
    """Copy the lower triangle of a (d, d) matrix, column by column, to (d (d + 1) / 2,)."""
    start = 0
    for j in range(matrix.shape[0]):
        column = matrix[j:, j]
        target = packed[start : start + column.shape[0]]
        for i in range(column.shape[0]):
            target[i] = column[i]
        start += column.shape[0]


@kernel
def unpack_lower(packed: Any, matrix: Any) -> None:
    """Undo `pack_lower`; the upper triangle is left alone."""
    start = 0
    for j in range(matrix.shape[0]):
        column = matrix[j:, j]
        source = packed[start : start + column.shape[0]]
        for i in range(column.shape[0]):
            column[i] = source[i]
        start += column.shape[0]


@kernel
def _sum_cells(
    rows: Any, index: Any, weight: Any, origin: Any, away: Any, codes: Any, order: Any, cell: Any,
    start: int, stop: int, first: int, last: int, held: Any, class_sums: Any,
) -> None:  # fmt: skip
    """Add rows start..stop of the order to the sums of their classes.

    The rows of a cell are summed four at a time, and their sum is added to each of its classes;
    cells of fewer rows are not worth a sum of their own.
    """
    width = last - first
    weighted = weight.shape[0] > 0
    w_a = w_b = w_c = w_d = 1.0
    end = start
    while end < stop:
        i = end
        while end < stop and cell[end] == cell[i]:
            end += 1
        if end - i < 4:
            for k in range(i, end):
                row = rows[place(index, order[k]), first:last]
                if weighted:
                    w_a = weight[order[k]]
                for v in range(codes.shape[0]):
                    code = codes[v, order[k]]
                    if code >= 0:
                        sums = class_sums[code, first:last]
                        for j in range(width):
                            sums[j] += w_a * (row[j] - origin[j] + away[j])
            continue
        held[:] = 0.0
        held_weight = 0.0
        for k in range(i, end, 4):
            # The last group may repeat a row with weight 0.
            count = min(4, end - k)
            b, c, d = (
                order[k + min(1, count - 1)],
                order[k + min(2, count - 1)],
                order[k + count - 1],
            )
            row_a = rows[place(index, order[k]), first:last]
            row_b = rows[place(index, b), first:last]
            row_c = rows[place(index, c), first:last]
            row_d = rows[place(index, d), first:last]
            if weighted:
                w_a, w_b, w_c, w_d = weight[order[k]], weight[b], weight[c], weight[d]
            share_b = w_b if count > 1 else 0.0
            share_c = w_c if count > 2 else 0.0
            share_d = w_d if count > 3 else 0.0
            for j in range(width):
                held[j] += (w_a * (row_a[j] - origin[j]) + share_b * (row_b[j] - origin[j])) + (
                    share_c * (row_c[j] - origin[j]) + share_d * (row_d[j] - origin[j])
                )
            held_weight += (w_a + share_b) + (share_c + share_d)
        for v in range(codes.shape[0]):
            code = codes[v, order[i]]
            if code >= 0:
                sums = class_sums[code, first:last]
                for j in range(width):
                    sums[j] += held[j] + held_weight * away[j]


@kernel
def _fill_panels(out: Any, into: int, panels: Any, k: int, first: int, last: int) -> None:
    """Copy four rows of the columns first..last into rows k.. of their panels."""
    lanes = REGISTER // panels.itemsize
    for p in range(first // lanes, (last + lanes - 1) // lanes):
        for r in range(4):
            target = panels[p, k + r]
            source = out[into + r, p * lanes : (p + 1) * lanes]
            for lane in range(lanes):
                target[lane] = source[lane]


@kernel
def centre_block(
    rows: Any,
    index: Any,
    weight: Any,
    shift: Any,
    offset: Any,
    codes: Any,
    order: Any,
    cell: Any,
    values: Any,
    rotations: Any,
    part_rows: int,
    begin: int,
    stop: int,
    first: int,
    last: int,
    out: Any,
    panels: Any,
    peak: Any,
    total: Any,
    class_sums: Any,
    products: Any,
    work: Any,
) -> None:
    """Reduce rows begin..stop of a block, in the columns first..last, in one sweep over memory.

    Calls for ranges of rows follow each other from row 0 to row n.

    With y_i = x_i - shift and offset = shift - reference::

        total         = sum_i w_i y_i                  class_sums[c] = sum_{i: codes[., i] = c}
        products[q]   = sum_i values[q, i] (y_i + offset)              w_i (y_i + offset)

    The rows of `out` are sqrt(w_i) y_i, rotated pairwise: (a, b) becomes
    (a cos t + b sin t, b cos t - a sin t), with an angle of its own for each pair. That leaves
    out^T out = sum_i w_i y_i y_i^T as it is, but products of rows that take few distinct values
    are no longer equal, so that their roundings do not all point the same way.

    A part of `part_rows` rows stays in cache between the pass that rotates its rows and the pass
    that sums its cells. Labels have no influence on `out` and `total`. Rows are read where they
    lie: the bits are those of a contiguous copy of the block.

    Parameters
    ----------
    rows : (m, d) float32 or float64, C-contiguous
    index : (n,) intp
        The n rows of the block among them, in its order; or empty for all, n = m.
    weight : (n,) float64 > 0, or empty for unit weights
    shift, offset : (d,) float64
    codes : (v, n) intp, rows of class_sums to add each row to; -1 for none
    order, cell : (n,) intp
        As `sort_by_cell` gives them for these parts.
    values : (q, n) float64, already multiplied by the weights
    rotations : (m, 2) float64, cosines and sines
    part_rows, begin : multiples of 4
    out : (m, d), dtype of rows
        Row i goes to row i % m; m is n, or the rows of a group, rounded up to a multiple of 4.
    panels : (p, k, lanes) dtype of rows, or (0, 0, 0) for none
        Takes `out` for rows begin..stop, numbered from 0: panels[p, i, l] is column p lanes + l.
        `out` then has zeros behind column d, up to whole panels.
    peak, total, class_sums, products : (d,), (d,), (c, d), (q, d) float64, overwritten;
        peak = max_i |y_i|
    work : (d,) float64, overwritten
    """
    n = size_of(rows, index)
    width = last - first
    weighted = weight.shape[0] > 0
    # Views of the stripe: indices that start at zero are what the compiler can vectorise.
    origin = shift[first:last]
    away = offset[first:last]
    whole = total[first:last]
    largest = peak[first:last]
    if begin == 0:
        whole[:] = 0.0
        largest[:] = 0.0
        class_sums[:, first:last] = 0.0
        products[:, first:last] = 0.0
    held = work[first:last]
    w = np.ones(4)
    shares = np.empty(4)
    group = np.empty(4, np.intp)
    for head in range(begin, stop, 4):
        # The last group may hold fewer rows: then its first one is repeated with weight 0.
        count = min(4, n - head)
        for k in range(4):
            group[k] = head + k if k < count else head
            w[k] = 1.0 if k < count else 0.0
            if weighted:
                w[k] *= weight[group[k]]
        w_a, w_b, w_c, w_d = w[0], w[1], w[2], w[3]
        row_a = rows[place(index, group[0]), first:last]
        row_b = rows[place(index, group[1]), first:last]
        row_c = rows[place(index, group[2]), first:last]
        row_d = rows[place(index, group[3]), first:last]
        into = head % out.shape[0]
        out_a = out[into, first:last]
        out_b = out[into + 1, first:last]
        out_c = out[into + 2, first:last]
        out_d = out[into + 3, first:last]
        t = (head // 2) % rotations.shape[0]
        u = (head // 2 + 1) % rotations.shape[0]
        aa, ba = rotations[t, 0] * np.sqrt(w_a), rotations[t, 1] * np.sqrt(w_a)
        bb, ab = rotations[t, 0] * np.sqrt(w_b), rotations[t, 1] * np.sqrt(w_b)
        cc, dc = rotations[u, 0] * np.sqrt(w_c), rotations[u, 1] * np.sqrt(w_c)
        dd, cd = rotations[u, 0] * np.sqrt(w_d), rotations[u, 1] * np.sqrt(w_d)
        for j in range(width):
            a = row_a[j] - origin[j]
            b = row_b[j] - origin[j]
            c = row_c[j] - origin[j]
            d = row_d[j] - origin[j]
            out_a[j] = aa * a + ab * b
            out_b[j] = bb * b - ba * a
            out_c[j] = cc * c + cd * d
            out_d[j] = dd * d - dc * c
            whole[j] += (w_a * a + w_b * b) + (w_c * c + w_d * d)
            largest[j] = max(largest[j], max(max(abs(a), abs(b)), max(abs(c), abs(d))))
        for q in range(values.shape[0]):
            for k in range(4):
                shares[k] = values[q, group[k]] if k < count else 0.0
            v_a, v_b, v_c, v_d = shares[0], shares[1], shares[2], shares[3]
            sums = products[q, first:last]
            for j in range(width):
                a = row_a[j] - origin[j]
                b = row_b[j] - origin[j]
                c = row_c[j] - origin[j]
                d = row_d[j] - origin[j]
                sums[j] += (v_a * a + v_b * b) + (v_c * c + v_d * d)
        if panels.shape[0] > 0:
            _fill_panels(out, into, panels, head - begin, first, last)
        done = head + count
        if codes.shape[0] > 0 and (done % part_rows == 0 or done == n):
            start = (head // part_rows) * part_rows
            _sum_cells(
                rows, index, weight, origin, away, codes, order, cell, start, done, first, last,
                held, class_sums,
            )  # fmt: skip
    if stop == n:
        for q in range(values.shape[0]):
            share = values[q].sum()
            sums = products[q, first:last]
            for j in range(width):
                sums[j] += share * away[j]


@kernel
def add_lower(
    scatter: Any, product: Any, sign: float, vectors: Any, coefficients: Any, first: int, last: int
) -> None:
    """scatter += sign * product + sum_k coefficients[k] vectors[k] vectors[k]^T, lower triangle.

    One sweep over memory: the merge of two scatters (Chan, Golub and LeVeque 1983) that need not
    be centred about their means. For column t of first..last its mirror d - 1 - t is done too, so
    that equal ranges of 0..(d + 1) // 2 are equal work.

    Parameters
    ----------
    scatter : (d, d) float64, Fortran-ordered
    product : (at least d, d) float32 or float64, Fortran-ordered, or (0, 0) for none
    vectors, coefficients : (2, d), (2,) float64
    """
    d = scatter.shape[0]
    u = vectors[0]
    v = vectors[1]
    for t in range(first, last):
        for j in (t, d - 1 - t):
            a = coefficients[0] * u[j]
            b = coefficients[1] * v[j]
            # Views of the column: indices that start at zero are what the compiler can vectorise.
            column = scatter[j:, j]
            u_below = u[j:]
            v_below = v[j:]
            if product.shape[0] > 0:
                added = product[j:, j]
                for i in range(d - j):
                    column[i] += sign * added[i] + (a * u_below[i] + b * v_below[i])
            else:
                for i in range(d - j):
                    column[i] += a * u_below[i] + b * v_below[i]
            if t == d - 1 - t:
                break


@kernel
def count_classes(
    labels: Any, weight: Any, known: int, codes: Any, present: Any, rows: Any, weights: Any
) -> tuple[int, int]:
    """Number the classes that occur by their first row, and count the rows of each.

    The numbers depend on the rows alone, and not on the order in which the state met the classes.

    Parameters
    ----------
    labels : (n,) intp >= -1
    weight : (n,) float64, or empty for unit weights
    known : int
        Classes that the state has.
    codes : (n,) intp, overwritten
        Number of each row's class, -1 for a missing label.
    present, rows, weights : (c,) intp, intp, float64
        Overwritten up to the number of classes that occur: the class, its rows, their weight.

    Returns
    -------
    int
        Number of classes that occur.
    int
        Number of classes that the state will have.
    """
    k = known
    for i in range(labels.shape[0]):
        k = max(k, labels[i] + 1)
    place = np.full(k, -1, np.intp)
    number = 0
    for i in range(labels.shape[0]):
        c = labels[i]
        if c < 0:
            codes[i] = -1
            continue
        if place[c] < 0:
            place[c] = number
            present[number] = c
            rows[number] = 0
            weights[number] = 0.0
            number += 1
        codes[i] = place[c]
        rows[place[c]] += 1
        if weight.shape[0] > 0:
            weights[place[c]] += weight[i]
    if weight.shape[0] == 0:
        for c in range(number):
            weights[c] = rows[c]
    return number, k


@kernel
def add_classes(
    rows: Any, weights: Any, sums: Any, where: Any, more_rows: Any, more_weights: Any, added: Any
) -> None:
    """Add counts, weights and sums of the classes `where`, which names each at most once.

    Parameters
    ----------
    rows, weights, sums : (k,) int64, (k,) float64, (k, d) float64, changed in place
    where, more_rows, more_weights, added : (c,) intp, (c,) intp, (c,) float64, (c, d) float64
    """
    for i in range(where.shape[0]):
        rows[where[i]] += more_rows[i]
        weights[where[i]] += more_weights[i]
        target = sums[where[i]]
        source = added[i]
        for j in range(source.shape[0]):
            target[j] += source[j]
