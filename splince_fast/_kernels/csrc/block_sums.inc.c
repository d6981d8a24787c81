/* Sums over the parts of a block, and leverages of its rows, for `sum_block` (row_kernels.pyx).

   A part is a range of `part_rows` rows; a task is a range of columns of one part. A cell consists
   of the rows of a part that have equal class codes. Its rows are summed in groups, and the sum of
   the cell is added to the sums of its classes, one class per variable. */

/* Adds the centred rows of a group to `total`, and their squares to `squares`, in the columns
   first..last. Sets `leverage` to the sums over these columns, and prefetches the rows `later`. */
INLINE void NAME(add_squares)(const T *const x[GROUP], const T *const later[GROUP],
                              const double w[GROUP], Index first, Index last, const double *shift,
                              const double *inverse, double *RESTRICT total,
                              double *RESTRICT squares, double leverage[GROUP]) {
    enum { STEP = LINE / sizeof(T) };
    D sums[GROUP] = {all_f64(0), all_f64(0), all_f64(0), all_f64(0)};
    Index j = first;
    for (; j + STEP <= last; j += STEP) {
        for (int p = 0; p < GROUP; p++) PREFETCH(later[p] + j);
        UNROLL(8)
        for (Index k = j; k < j + STEP; k += LANES) {
            D centre = get_f64(shift + k), scale = get_f64(inverse + k);
            D sum = get_f64(total + k), square = get_f64(squares + k);
            UNROLL(4)
            for (int p = 0; p < GROUP; p++) {
                D y = LOAD(x[p] + k) - centre, y_y = y * y;
                sum += w[p] * y;
                square += w[p] * y_y;
                sums[p] += scale * y_y;
            }
            put_f64(total + k, sum);
            put_f64(squares + k, square);
        }
    }
    for (int p = 0; p < GROUP; p++) leverage[p] = sum_of_lanes(sums[p]);
    for (; j < last; j++)
        for (int p = 0; p < GROUP; p++) {
            double y = (double)x[p][j] - shift[j], y_y = y * y;
            total[j] += w[p] * y;
            squares[j] += w[p] * y_y;
            leverage[p] += inverse[j] * y_y;
        }
}

/* Adds the rows order[start..stop] of a cell to the sums in `near`, in the columns first..last, and
   writes the leverages of these rows. */
static void NAME(sum_cell)(const BlockSums *s, Index start, Index stop, Index end, Index first,
                             Index last, double *near) {
    const Block *b = s->block;
    for (Index k = start; k < stop; k += GROUP) {
        const NAME(Group) group = NAME(group)(b, b->order, k, stop);
        const T *later[GROUP];
        double w[GROUP], leverage[GROUP];
        NAME(factors)(&group, b->weight, w);
        for (int p = 0; p < GROUP; p++)
            later[p] = NAME(row)(b, b->order[smaller(k + p + AHEAD, end - 1)]);
        for (Index left = first; left < last; left += s->stripe) {
            Index right = smaller(left + s->stripe, last);
            NAME(add_squares)(group.row, later, w, left, right, near, near + s->pitch,
                              near + 2 * s->pitch, near + 3 * s->pitch, leverage);
            for (int p = 0; p < group.count; p++)
                s->leverage[left / s->stripe * b->n + group.i[p]] = leverage[p];
        }
    }
}

static void NAME(sum_task)(const BlockSums *s, Index task) {
    const Block *b = s->block;
    Index shares = pieces(b->width, s->columns), g = task / shares, d = b->width;
    Index first = task % shares * s->columns, last = smaller(first + s->columns, d);
    Index begin = g * b->part_rows, end = smaller(begin + b->part_rows, b->n);
    Index n_sums = 2 + b->classes + b->columns;
    size_t bytes = (size_t)(last - first) * sizeof(double);
    double *sums = s->sums + g * n_sums * d, *total = sums;
    for (Index c = 0; c < n_sums; c++) memset(sums + c * d + first, 0, bytes);
    /* The four rows of `near` hold the shift, the inverse variances, the sum of a cell and the
       squares in aligned cache lines, because every row of the block uses these arrays. */
    double *near = s->near + g * 4 * s->pitch, *cell_sum = near + 2 * s->pitch;
    memcpy(near + first, b->shift + first, bytes);
    memcpy(near + s->pitch + first, s->inverse + first, bytes);
    memset(near + 3 * s->pitch + first, 0, bytes);
    for (Index start = begin, stop; start < end; start = stop) {
        for (stop = start + 1; stop < end && b->cell[stop] == b->cell[start];) stop++;
        memset(cell_sum + first, 0, bytes);
        NAME(sum_cell)(s, start, stop, end, first, last, near);
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

static void NAME(sum_block)(const BlockSums *s, _Atomic(int64_t) *next) {
    Index tasks = pieces(s->block->n, s->block->part_rows) * pieces(s->block->width, s->columns);
    for (int64_t task; (task = atomic_fetch_add(next, 1)) < tasks;) NAME(sum_task)(s, task);
}
