/* Sums over the parts of a block. A part is a range of `part_rows` rows; a task is a range of its
   columns. The rows of a cell are summed in groups, and the sum is added to those of its classes,
   one class per variable. */

/* Adds the centred rows of a group to `total`, and their squares to `squares`, in the columns
   first..last. Prefetches `prefetched`. */
INLINE void NAME(add_squares)(const T *const x[GROUP], const T *const prefetched[GROUP],
                              const double w[GROUP], Index first, Index last, const double *shift,
                              double *RESTRICT total, double *RESTRICT squares) {
    enum { STEP = LINE / sizeof(T) };
    Index j = first;
    for (; j + STEP <= last; j += STEP) {
        for (int p = 0; p < GROUP; p++) PREFETCH(prefetched[p] + j);
        UNROLL(8)
        for (Index k = j; k < j + STEP; k += LANES) {
            D centre = get_f64(shift + k);
            D sum = get_f64(total + k), square = get_f64(squares + k);
            UNROLL(4)
            for (int p = 0; p < GROUP; p++) {
                D y = LOAD(x[p] + k) - centre, y_y = y * y;
                sum += w[p] * y;
                square += w[p] * y_y;
            }
            put_f64(total + k, sum);
            put_f64(squares + k, square);
        }
    }
    for (; j < last; j++)
        for (int p = 0; p < GROUP; p++) {
            double y = (double)x[p][j] - shift[j], y_y = y * y;
            total[j] += w[p] * y;
            squares[j] += w[p] * y_y;
        }
}

/* Adds the rows order[start..stop] of a cell to the sums in `work`, in the columns first..last. */
static void NAME(sum_cell)(const BlockSums *s, Index start, Index stop, Index end, Index first,
                           Index last, double *work) {
    const Block *b = s->block;
    for (Index k = start; k < stop; k += GROUP) {
        const NAME(Group) group = NAME(group)(b, b->order, k, stop);
        const T *prefetched[GROUP];
        double w[GROUP];
        NAME(group_coefficients)(&group, b->weight, w);
        for (int p = 0; p < GROUP; p++)
            prefetched[p] = NAME(row)(b, b->order[minimum(k + p + PREFETCH_ROWS, end - 1)]);
        NAME(add_squares)(group.row, prefetched, w, first, last, work, work + s->work_stride,
                          work + 2 * s->work_stride);
    }
}

static void NAME(sum_task)(const BlockSums *s, Index task) {
    const Block *b = s->block;
    Index column_tasks = ceil_div(b->width, s->task_columns);
    Index part = task / column_tasks, d = b->width;
    Index first = task % column_tasks * s->task_columns, last = minimum(first + s->task_columns, d);
    Index begin = part * b->part_rows, end = minimum(begin + b->part_rows, b->n);
    Index n_sums = CLASS_ROWS + b->classes + b->columns;
    size_t bytes = (size_t)(last - first) * sizeof(double);
    double *sums = s->sums + part * n_sums * d, *total = sums + TOTAL_ROW * d;
    for (Index c = 0; c < n_sums; c++) memset(sums + c * d + first, 0, bytes);
    /* The three rows of `work` hold the shift, the sum of a cell and the squares in aligned cache
       lines, because every row of the block uses these arrays. */
    double *work = s->work + part * 3 * s->work_stride, *cell_sum = work + s->work_stride;
    double *squares = work + 2 * s->work_stride;
    memcpy(work + first, b->shift + first, bytes);
    memset(squares + first, 0, bytes);
    for (Index start = begin, stop; start < end; start = stop) {
        for (stop = start + 1; stop < end && b->cell[stop] == b->cell[start];) stop++;
        memset(cell_sum + first, 0, bytes);
        NAME(sum_cell)(s, start, stop, end, first, last, work);
        for (Index j = first; j < last; j++) total[j] += cell_sum[j];
        for (Index v = 0; v < b->variables; v++) {
            Index code = b->codes[v * b->n + b->order[start]];
            double *sum = sums + (CLASS_ROWS + code) * d;
            for (Index j = first; j < last && code >= 0; j++) sum[j] += cell_sum[j];
        }
    }
    memcpy(sums + SQUARES_ROW * d + first, squares + first, bytes);
    for (Index q = 0; q < b->columns; q++) {
        double *sum = sums + (CLASS_ROWS + b->classes + q) * d;
        for (Index i = begin; i < end; i++) {
            const T *x = NAME(row)(b, i);
            double value = b->values[q * b->n + i];
            for (Index j = first; j < last; j++) sum[j] += value * ((double)x[j] - b->shift[j]);
        }
    }
}

static void NAME(sum_block)(const BlockSums *s, _Atomic(int64_t) *next) {
    Index tasks =
        ceil_div(s->block->n, s->block->part_rows) * ceil_div(s->block->width, s->task_columns);
    for (int64_t task; (task = atomic_fetch_add(next, 1)) < tasks;) NAME(sum_task)(s, task);
}
