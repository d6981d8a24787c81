/* One task of a sweep: some columns of the rows of a segment. With y_i = x_i - shift:

       sums[g, 0]         = sum_i w_i y_i
       sums[g, 1]         = sum_i w_i y_i^2
       sums[g, 2 + c]     = sum_{i: codes[., i] = c} w_i y_i
       sums[g, 2 + k + q] = sum_i values[q, i] y_i
       leverage[s, i]     = sum_{j in stripe s} inverse_j y_ij^2

   The rows of a cell, those of equal codes, are summed four at a time, and their sum is added to
   each of its classes. */

/* Add four rows of the columns first..last to `total` and `squares`, and prefetch four others.
   Writes the part of these columns in the leverages of the four. */
INLINE void NAME(add_four)(const T *const x[4], const T *const later[4], const double w[4],
                           Index first, Index last, const double *shift, const double *inverse,
                           double *RESTRICT total, double *RESTRICT squares, double leverage[4]) {
    enum { STEP = LINE / sizeof(T) };
    D sums[4] = {all_f64(0), all_f64(0), all_f64(0), all_f64(0)};
    Index j = first;
    for (; j + STEP <= last; j += STEP) {
        for (int p = 0; p < 4; p++) PREFETCH(later[p] + j);
        UNROLL(8)
        for (Index k = j; k < j + STEP; k += LANES) {
            D centre = get_f64(shift + k), scale = get_f64(inverse + k);
            D sum = get_f64(total + k), square = get_f64(squares + k);
            UNROLL(4)
            for (int p = 0; p < 4; p++) {
                D y = LOAD(x[p] + k) - centre, y_y = y * y;
                sum += w[p] * y;
                square += w[p] * y_y;
                sums[p] += scale * y_y;
            }
            put_f64(total + k, sum);
            put_f64(squares + k, square);
        }
    }
    for (int p = 0; p < 4; p++) leverage[p] = sum_of_lanes(sums[p]);
    for (; j < last; j++)
        for (int p = 0; p < 4; p++) {
            double y = (double)x[p][j] - shift[j], y_y = y * y;
            total[j] += w[p] * y;
            squares[j] += w[p] * y_y;
            leverage[p] += inverse[j] * y_y;
        }
}

/* Add the rows order[start..stop], in the columns first..last, to the sums in `near`. */
static void NAME(sweep_cell)(const Sweep *s, Index start, Index stop, Index end, Index first,
                             Index last, double *near) {
    const Block *b = s->block;
    for (Index k = start; k < stop; k += 4) {
        const T *x[4], *later[4];
        Index i[4];
        double w[4], leverage[4];
        for (int p = 0; p < 4; p++) { /* behind the last row: the first one with weight 0 */
            int present = k + p < stop;
            i[p] = b->order[present ? k + p : k];
            w[p] = present ? (b->weight ? b->weight[i[p]] : 1.0) : 0.0;
            x[p] = NAME(row)(b, i[p]);
            later[p] = NAME(row)(b, b->order[smaller(k + p + AHEAD, end - 1)]);
        }
        for (Index left = first; left < last; left += s->stripe) {
            Index right = smaller(left + s->stripe, last);
            NAME(add_four)(x, later, w, left, right, near, near + s->pitch, near + 2 * s->pitch,
                           near + 3 * s->pitch, leverage);
            for (int p = 3; p >= 0; p--) s->leverage[left / s->stripe * b->n + i[p]] = leverage[p];
        }
    }
}

static void NAME(sweep_task)(const Sweep *s, Index task) {
    const Block *b = s->block;
    Index shares = pieces(b->width, s->columns), g = task / shares, d = b->width;
    Index first = task % shares * s->columns, last = smaller(first + s->columns, d);
    Index begin = g * b->part_rows, end = smaller(begin + b->part_rows, b->n);
    Index n_sums = 2 + b->classes + b->columns;
    size_t bytes = (size_t)(last - first) * sizeof(double);
    double *sums = s->sums + g * n_sums * d, *total = sums;
    for (Index c = 0; c < n_sums; c++) memset(sums + c * d + first, 0, bytes);
    /* Arrays that every row reads or writes lie in whole cache lines: the shift, the inverse,
       the sum of a cell, and the squares. */
    double *near = s->near + g * 4 * s->pitch, *cell_sum = near + 2 * s->pitch;
    memcpy(near + first, b->shift + first, bytes);
    memcpy(near + s->pitch + first, s->inverse + first, bytes);
    memset(near + 3 * s->pitch + first, 0, bytes);
    for (Index start = begin, stop; start < end; start = stop) {
        for (stop = start + 1; stop < end && b->cell[stop] == b->cell[start];) stop++;
        memset(cell_sum + first, 0, bytes);
        NAME(sweep_cell)(s, start, stop, end, first, last, near);
        for (Index j = first; j < last; j++) total[j] += cell_sum[j];
        for (Index v = 0; v < b->variables; v++) {
            Index code = b->codes[v * b->n + b->order[start]];
            double *sum = sums + (2 + code) * d;
            for (Index j = first; j < last && code >= 0; j++) sum[j] += cell_sum[j];
        }
    }
    memcpy(sums + d + first, near + 3 * s->pitch + first, bytes);
    for (Index q = 0; q < b->columns; q++) {
        double *sum = sums + (2 + b->classes + q) * d;
        for (Index i = begin; i < end; i++) {
            const T *x = NAME(row)(b, i);
            double value = b->values[q * b->n + i];
            for (Index j = first; j < last; j++) sum[j] += value * ((double)x[j] - b->shift[j]);
        }
    }
}

static void NAME(run_sweep)(const Sweep *s, _Atomic(int64_t) *next) {
    Index tasks = pieces(s->block->n, s->block->part_rows) * pieces(s->block->width, s->columns);
    for (int64_t task; (task = atomic_fetch_add(next, 1)) < tasks;) NAME(sweep_task)(s, task);
}
