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
    const T *rows = s->rows;
    for (Index k = start; k < stop; k += 4) {
        const T *x[4], *later[4];
        Index i[4];
        double w[4], leverage[4];
        for (int p = 0; p < 4; p++) { /* behind the last row: the first one with weight 0 */
            int present = k + p < stop;
            i[p] = s->order[present ? k + p : k];
            w[p] = present ? (s->weight ? s->weight[i[p]] : 1.0) : 0.0;
            Index ahead = s->order[k + p + AHEAD < end ? k + p + AHEAD : end - 1];
            x[p] = rows + (s->index ? s->index[i[p]] : i[p]) * s->d;
            later[p] = rows + (s->index ? s->index[ahead] : ahead) * s->d;
        }
        for (Index left = first; left < last; left += s->stripe) {
            Index right = left + s->stripe < last ? left + s->stripe : last;
            NAME(add_four)(x, later, w, left, right, near, near + s->pitch, near + 2 * s->pitch,
                           near + 3 * s->pitch, leverage);
            for (int p = 3; p >= 0; p--) s->leverage[left / s->stripe * s->n + i[p]] = leverage[p];
        }
    }
}

static void NAME(sweep_task)(const Sweep *s, Index task) {
    Index pieces = (s->d + s->width - 1) / s->width, g = task / pieces, d = s->d;
    Index first = task % pieces * s->width, last = first + s->width < d ? first + s->width : d;
    Index begin = g * s->segment, end = begin + s->segment < s->n ? begin + s->segment : s->n;
    size_t bytes = (size_t)(last - first) * sizeof(double);
    double *sums = s->sums + g * s->n_sums * d, *total = sums;
    const T *rows = s->rows;
    for (Index c = 0; c < s->n_sums; c++) memset(sums + c * d + first, 0, bytes);
    /* Arrays that every row reads or writes lie in whole cache lines: the shift, the inverse,
       the sum of a cell, and the squares. */
    double *near = s->near + g * 4 * s->pitch, *cell_sum = near + 2 * s->pitch;
    memcpy(near + first, s->shift + first, bytes);
    memcpy(near + s->pitch + first, s->inverse + first, bytes);
    memset(near + 3 * s->pitch + first, 0, bytes);
    for (Index start = begin, stop; start < end; start = stop) {
        for (stop = start + 1; stop < end && s->cell[stop] == s->cell[start];) stop++;
        memset(cell_sum + first, 0, bytes);
        NAME(sweep_cell)(s, start, stop, end, first, last, near);
        for (Index j = first; j < last; j++) total[j] += cell_sum[j];
        for (Index v = 0; v < s->variables; v++) {
            Index code = s->codes[v * s->n + s->order[start]];
            double *sum = sums + (2 + code) * d;
            for (Index j = first; j < last && code >= 0; j++) sum[j] += cell_sum[j];
        }
    }
    memcpy(sums + d + first, near + 3 * s->pitch + first, bytes);
    for (Index q = 0; q < s->columns; q++) {
        double *sum = sums + (s->n_sums - s->columns + q) * d;
        for (Index i = begin; i < end; i++) {
            const T *x = rows + (s->index ? s->index[i] : i) * d;
            double value = s->values[q * s->n + i];
            for (Index j = first; j < last; j++) sum[j] += value * ((double)x[j] - s->shift[j]);
        }
    }
}

static void NAME(run_sweep)(const Sweep *s, _Atomic(int64_t) *next) {
    Index segments = (s->n + s->segment - 1) / s->segment;
    Index tasks = segments * ((s->d + s->width - 1) / s->width);
    for (int64_t task; (task = atomic_fetch_add(next, 1)) < tasks;) NAME(sweep_task)(s, task);
}
