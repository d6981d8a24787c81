/* Sums of rows, and products of centred rows, for one dtype T. Results are bit-identical for every
   split of the columns into ranges and every assignment of tasks to threads. */

/* LOAD and STORE of the first `count` lanes of a register; LOAD sets the other lanes to zero. */
INLINE D NAME(load_some)(const T *p, Index count) {
    if (count == LANES) return LOAD(p);
    T numbers[LANES] = {0};
    memcpy(numbers, p, (size_t)count * sizeof(T));
    return LOAD(numbers);
}
INLINE void NAME(store_some)(T *p, D x, Index count) {
    T numbers[LANES];
    STORE(count == LANES ? p : numbers, x);
    if (count < LANES) memcpy(p, numbers, (size_t)count * sizeof(T));
}

/* Returns row i of a block. */
INLINE const T *NAME(row)(const Block *block, Index i) {
    return (const T *)block->rows + (block->index ? block->index[i] : i) * block->width;
}

/* Return the sums of class c, and the products of the rows with label column q. */
INLINE double *NAME(class_sums)(const Block *block, Index c) {
    return block->sums + (CLASS_ROWS + c) * block->width;
}
INLINE double *NAME(products)(const Block *block, Index q) {
    return block->sums + (CLASS_ROWS + block->classes + q) * block->width;
}

/* GROUP rows that are summed together. If only `count` < GROUP rows remain, the first row also
   takes the other places, where its coefficient is 0. */
typedef struct {
    const T *row[GROUP];
    Index i[GROUP]; /* row numbers */
    int count;
} NAME(Group);

/* Returns the group of the rows order[k], ... up to position stop - 1; `order` NULL is 0, 1, ... */
INLINE NAME(Group) NAME(group)(const Block *block, const Index *order, Index k, Index stop) {
    NAME(Group) group;
    group.count = (int)minimum(stop - k, GROUP);
    for (int g = 0; g < GROUP; g++) {
        const Index position = g < group.count ? k + g : k;
        group.i[g] = order ? order[position] : position;
        group.row[g] = NAME(row)(block, group.i[g]);
    }
    return group;
}

/* Sets w to the coefficients of the rows of a group; all are 1 if `coefficients` is NULL. */
INLINE void NAME(group_coefficients)(const NAME(Group) *group, const double *coefficients,
                                     double *w) {
    for (int g = 0; g < GROUP; g++)
        w[g] = g >= group->count ? 0.0 : coefficients ? coefficients[group->i[g]] : 1.0;
}

/* Returns sum + (w_0 y_0 + w_1 y_1) + (w_2 y_2 + w_3 y_3), in this order of additions. */
INLINE D NAME(add_weighted)(D sum, const D y[GROUP], const D w[GROUP]) {
    return sum + (multiply_add_f64(w[0], y[0], w[1] * y[1]) +
                  multiply_add_f64(w[2], y[2], w[3] * y[3]));
}

/* --- sums ----------------------------------------------------------------------------------- */

INLINE void NAME(add_register)(const NAME(Group) *group, const double *shift, const D w[GROUP],
                               Index j, Index count, double *sums) {
    const D centre = load_some_f64(shift + j, count);
    D y[GROUP];
    UNROLL(4) for (int g = 0; g < GROUP; g++)
        y[g] = NAME(load_some)(group->row[g] + j, count) - centre;
    store_some_f64(sums + j, NAME(add_weighted)(load_some_f64(sums + j, count), y, w), count);
}

/* Adds sum_g weight_g (row_gj - shift_j) over a group to sums_j, for the columns first..last. */
static void NAME(add_group)(NAME(Group) group, const double *shift, const double *weight,
                            Index first, Index last, double *sums) {
    D w[GROUP];
    for (int g = 0; g < GROUP; g++) w[g] = broadcast_f64(weight[g]);
    Index j = first;
    for (; j + LANES <= last; j += LANES) NAME(add_register)(&group, shift, w, j, LANES, sums);
    if (j < last) NAME(add_register)(&group, shift, w, j, last - j, sums);
}

/* Adds row i to the sums of its classes, one class per variable. */
static void NAME(add_row)(const Block *block, Index i, Index first, Index last) {
    const T *const row = NAME(row)(block, i);
    const double w = block->weight ? block->weight[i] : 1.0;
    for (Index v = 0; v < block->variables; v++) {
        const Index code = block->codes[v * block->n + i];
        if (code < 0) continue;
        double *const sums = NAME(class_sums)(block, code);
        for (Index j = first; j < last; j++) sums[j] += w * (row[j] - block->shift[j]);
    }
}

/* Sums the rows order[start..stop] of a cell in `cell_sum`, and adds this to its classes' sums. */
static void NAME(add_cell)(const Block *block, Index start, Index stop, Index first, Index last,
                           double *cell_sum) {
    double w[GROUP];
    memset(cell_sum + first, 0, (size_t)(last - first) * sizeof(double));
    for (Index k = start; k < stop; k += GROUP) {
        const NAME(Group) group = NAME(group)(block, block->order, k, stop);
        NAME(group_coefficients)(&group, block->weight, w);
        NAME(add_group)(group, block->shift, w, first, last, cell_sum);
    }
    for (Index v = 0; v < block->variables; v++) {
        const Index code = block->codes[v * block->n + block->order[start]];
        if (code < 0) continue;
        double *const sums = NAME(class_sums)(block, code);
        for (Index j = first; j < last; j++) sums[j] += cell_sum[j];
    }
}

/* Adds the rows order[start..stop] to the sums of the classes, cell by cell. If a cell has fewer
   than GROUP rows, its rows are added one by one, which is faster than a sum of the cell. */
static void NAME(add_cells)(const Block *block, Index start, Index stop, Index first, Index last,
                            double *cell_sum) {
    for (Index end = start; end < stop; start = end) {
        while (end < stop && block->cell[end] == block->cell[start]) end++;
        if (end - start >= GROUP)
            NAME(add_cell)(block, start, end, first, last, cell_sum);
        else
            for (Index k = start; k < end; k++) NAME(add_row)(block, block->order[k], first, last);
    }
}

/* Adds a group to the products of the rows with the label columns. */
static void NAME(add_label_products)(const Block *block, const NAME(Group) *group, Index first,
                                     Index last) {
    double w[GROUP];
    for (Index q = 0; q < block->columns; q++) {
        NAME(group_coefficients)(group, block->values + q * block->n, w);
        NAME(add_group)(*group, block->shift, w, first, last, NAME(products)(block, q));
    }
}

/* --- centring ------------------------------------------------------------------------------- */

/* Weights and rotation of a group. Row g becomes own_g y_g + other_g y_h, where h = g ^ 1 is the
   other row of the pair of row g. */
typedef struct {
    double w[GROUP], own[GROUP], other[GROUP];
} NAME(Rotation);

/* A pair (a, b) of rows sqrt(w) y becomes (a cos t + b sin t, b cos t - a sin t). */
INLINE NAME(Rotation) NAME(group_rotation)(const Block *block, const NAME(Group) *group,
                                           Index start) {
    NAME(Rotation) rotation;
    NAME(group_coefficients)(group, block->weight, rotation.w);
    for (int g = 0; g < GROUP; g++) {
        const double *const cos_sin = block->rotations + (start + g) / 2 % block->n_rotations * 2;
        rotation.own[g] = cos_sin[0] * sqrt(rotation.w[g]);
        rotation.other[g] = (g % 2 ? -cos_sin[1] : cos_sin[1]) * sqrt(rotation.w[g ^ 1]);
    }
    return rotation;
}

INLINE void NAME(centre_register)(const NAME(Group) *group, const double *shift, const D w[GROUP],
                                  const D own[GROUP], const D other[GROUP], Index j, Index count,
                                  double *total, double *peak, T *out, Index row_stride) {
    const D centre = load_some_f64(shift + j, count);
    D y[GROUP];
    UNROLL(4) for (int g = 0; g < GROUP; g++)
        y[g] = NAME(load_some)(group->row[g] + j, count) - centre;
    UNROLL(4) for (int g = 0; g < GROUP; g++)
        NAME(store_some)(out + g * row_stride, multiply_add_f64(own[g], y[g], other[g] * y[g ^ 1]),
                         count);
    store_some_f64(total + j, NAME(add_weighted)(load_some_f64(total + j, count), y, w), count);
    UNROLL(4) for (int g = 0; g < GROUP; g++) y[g] = abs_f64(y[g]);
    const D largest = maximum_f64(maximum_f64(y[0], y[1]), maximum_f64(y[2], y[3]));
    store_some_f64(peak + j, maximum_f64(load_some_f64(peak + j, count), largest), count);
}

/* Adds a group to the total and to the maxima of |y|, and writes the rotated rows to `out`, which
   is a C-ordered matrix (panel_stride = WIDTH) or panels. Element (g, j) is number
   g * row_stride + j / WIDTH * panel_stride + j % WIDTH of `out`. */
static void NAME(centre_group)(const Block *block, NAME(Group) group,
                               const NAME(Rotation) *rotation, Index first, Index last, T *out,
                               Index row_stride, Index panel_stride) {
    D w[GROUP], own[GROUP], other[GROUP];
    for (int g = 0; g < GROUP; g++) {
        w[g] = broadcast_f64(rotation->w[g]);
        own[g] = broadcast_f64(rotation->own[g]);
        other[g] = broadcast_f64(rotation->other[g]);
    }
    const double *const shift = block->shift;
    double *const total = block->sums + TOTAL_ROW * block->width;
    double *const peak = block->sums + PEAK_ROW * block->width;
    Index j = first;
    for (; j + LANES <= last; j += LANES)
        NAME(centre_register)(&group, shift, w, own, other, j, LANES, total, peak,
                              out + j / WIDTH * panel_stride + j % WIDTH, row_stride);
    if (j < last)
        NAME(centre_register)(&group, shift, w, own, other, j, last - j, total, peak,
                              out + j / WIDTH * panel_stride + j % WIDTH, row_stride);
}

/* Sets the columns first..last of all sums to zero. */
static void NAME(clear_sums)(const Block *block, Index first, Index last) {
    for (Index c = 0; c < CLASS_ROWS + block->classes + block->columns; c++)
        memset(block->sums + c * block->width + first, 0, (size_t)(last - first) * sizeof(double));
}

/* Adds the rows begin..stop to all sums, and writes the centred, weighted and rotated rows to
   `out`, in the columns first..last; row begin + r becomes row r of `out`. Successive calls cover
   the rows from 0 to n in order, and begin at multiples of GROUP. Without the rotation, rows with
   few distinct values would have equal products, whose rounding errors add up instead of
   cancelling. A part is summed by cells while its rows are in cache. */
static void NAME(centre)(const Block *block, Index begin, Index stop, Index first, Index last,
                         T *out, Index row_stride, Index panel_stride, double *cell_sum) {
    if (begin == 0) NAME(clear_sums)(block, first, last);
    for (Index start = begin; start < stop; start += GROUP) {
        const NAME(Group) group = NAME(group)(block, NULL, start, stop);
        const NAME(Rotation) rotation = NAME(group_rotation)(block, &group, start);
        NAME(centre_group)(block, group, &rotation, first, last, out + (start - begin) * row_stride,
                           row_stride, panel_stride);
        NAME(add_label_products)(block, &group, first, last);
        const Index end = start + group.count;
        if (block->variables > 0 && (end % block->part_rows == 0 || end == block->n))
            NAME(add_cells)(block, start / block->part_rows * block->part_rows, end, first, last,
                            cell_sum);
    }
}

/* Sums and centres the block in the columns first..last; `cell_sum` holds `width` numbers. */
static void NAME(centre_columns)(const Block *block, void *out, Index first, Index last,
                                 double *cell_sum) {
    NAME(centre)(block, 0, block->n, first, last, out, block->width, WIDTH, cell_sum);
}

/* --- products ------------------------------------------------------------------------------- */

/* A tile of a product has TILE columns of up to HEIGHT registers each. A tile takes 24 of the 32
   registers of 64 bytes, or 12 of the 16 registers of 32 bytes. */
#ifndef HEIGHT
#define HEIGHT 3
#define TILE LANES
/* Number of tasks into which the columns of a product are divided, to balance the threads. */
#define MAX_COLUMN_TASKS 24
#endif

/* Computes product[q, h WIDTH + l] = sum_{k < depth} left[h, k, l] right[k, q] for q < TILE,
   h < height and l < WIDTH; with `add`, adds the sums to `product` instead. */
INLINE void NAME(tile)(const T *RESTRICT left, const T *RESTRICT right, Index panel_stride,
                       Index depth, T *RESTRICT product, Index product_stride, int add,
                       const int height) {
    V sum[TILE][HEIGHT];
    UNROLL(8) for (int q = 0; q < TILE; q++) {
        UNROLL(3) for (int h = 0; h < height; h++) sum[q][h] = BROADCAST(0);
        /* Prefetch the product, which is written after the loop. */
        PREFETCH(product + q * product_stride);
        PREFETCH(product + q * product_stride + height * WIDTH - 1);
    }
    for (Index k = 0; k < depth; k++, left += WIDTH, right += WIDTH) {
        V x[HEIGHT];
        UNROLL(3) for (int h = 0; h < height; h++) x[h] = GET(left + h * panel_stride);
        UNROLL(8) for (int q = 0; q < TILE; q++) {
            const V y = BROADCAST(right[q]);
            UNROLL(3) for (int h = 0; h < height; h++) sum[q][h] += x[h] * y;
        }
    }
    UNROLL(8) for (int q = 0; q < TILE; q++)
        UNROLL(3) for (int h = 0; h < height; h++) {
            T *const to = product + q * product_stride + h * WIDTH;
            PUT(to, add ? GET(to) + sum[q][h] : sum[q][h]);
        }
}

/* Computes the columns first..last of X^T X, where `panels` holds the chunk X, in the row panels on
   or below the diagonal. HEIGHT panels stay in the L1 cache during the loop over columns. */
static void NAME(multiply)(const Gram *gram, const T *panels, Index depth, Index first, Index last,
                           int add) {
    const Index product_stride = gram->n_panels * WIDTH;
    for (Index end = (gram->n_panels - 1) % HEIGHT + 1; end <= gram->n_panels; end += HEIGHT)
        for (Index j = first; j < last && j / WIDTH < end; j += TILE) {
            const Index p = maximum(end - HEIGHT, j / WIDTH);
            const T *const left = panels + p * gram->panel_stride;
            const T *const right = panels + j / WIDTH * gram->panel_stride + j % WIDTH;
            T *const to = (T *)gram->product + j * product_stride + p * WIDTH;
            if (end - p == 3)
                NAME(tile)(left, right, gram->panel_stride, depth, to, product_stride, add, 3);
            else if (end - p == 2)
                NAME(tile)(left, right, gram->panel_stride, depth, to, product_stride, add, 2);
            else
                NAME(tile)(left, right, gram->panel_stride, depth, to, product_stride, add, 1);
        }
}

/* Writes the panels of the stripe of chunk t from column `first` on, with zeros after the last. */
static void NAME(centre_stripe)(const Block *block, const Gram *gram, Index t, Index first,
                                double *cell_sum) {
    const Index begin = t * gram->chunk, stop = minimum(begin + gram->chunk, block->n);
    const Index width = block->width, last = minimum(first + gram->stripe, width);
    T *const panels = gram->panels[t % 2];
    NAME(centre)(block, begin, stop, first, last, panels, WIDTH, gram->panel_stride, cell_sum);
    if (last == width && width % WIDTH)
        for (Index r = 0; r < gram->chunk; r++)
            memset(panels + width / WIDTH * gram->panel_stride + r * WIDTH + width % WIDTH, 0,
                   (size_t)(WIDTH - width % WIDTH) * sizeof(T));
}

/* Computes the sums of `centre_columns`, and product = out^T out without storing `out`. Threads
   that call the function with the same arguments, except `cell_sum`, share the tasks. In phase t,
   some tasks centre stripes of chunk t, and others compute columns of the product of chunk t - 1.
   Every task is begun before a thread waits, and each thread finishes the tasks that it begins. */
static void NAME(reduce_chunks)(const Block *block, const Gram *gram, double *cell_sum) {
    const Index chunk = gram->chunk, chunks = ceil_div(block->n, chunk), width = block->width;
    const Index stripes = ceil_div(width, gram->stripe);
    const Index task_columns = ceil_div(width, MAX_COLUMN_TASKS * TILE) * TILE;
    const Index product_tasks = ceil_div(width, task_columns);
    for (Index t = 0; t <= chunks; t++) {
        Phase *const phase = gram->phases + t;
        const Index centring_tasks = t < chunks ? stripes : 0;
        const Index tasks = centring_tasks + (t > 0 ? product_tasks : 0);
        const Index chunk_rows = minimum(block->n - (t - 1) * chunk, chunk);
        const Index depth = ceil_div(chunk_rows, GROUP) * GROUP;
        for (Index task; (task = (Index)atomic_fetch_add(&phase->begun, 1)) < tasks;) {
            if (task < centring_tasks) {
                NAME(centre_stripe)(block, gram, t, task * gram->stripe, cell_sum);
            } else {
                const Index first = (task - centring_tasks) * task_columns;
                NAME(multiply)(gram, gram->panels[(t - 1) % 2], depth, first,
                               minimum(first + task_columns, width), t > 1);
            }
            atomic_fetch_add(&phase->finished, 1);
        }
        wait_for(phase, tasks);
    }
}

/* --- samples and scatter matrices ----------------------------------------------------------- */

/* Computes the weighted mean of a sample, every `stride`-th row, and the sum of squares about the
   mean. Uses only the rows, index and weights of the block, which has at least one row. */
static void NAME(sample_columns)(const Block *block, Index stride, double *mean, double *squares) {
    const Index width = block->width;
    const T *const origin = NAME(row)(block, 0);
    double weight_sum = 0.0;
    memset(mean, 0, (size_t)width * sizeof(double));
    memset(squares, 0, (size_t)width * sizeof(double));
    for (Index i = 0; i < block->n; i += stride) {
        const double w = block->weight ? block->weight[i] : 1.0;
        const T *const row = NAME(row)(block, i);
        weight_sum += w;
        for (Index j = 0; j < width; j++) {
            const double y = (double)row[j] - (double)origin[j];
            mean[j] += w * y;
            squares[j] += w * y * y;
        }
    }
    for (Index j = 0; j < width; j++) {
        const double deviation = mean[j] / weight_sum, square = squares[j] - mean[j] * deviation;
        squares[j] = square > 0.0 ? square : 0.0;
        mean[j] = origin[j] + deviation;
    }
}

/* Adds sign * product + coefficients[0] u u^T + coefficients[1] v v^T, with the vectors u and v, to
   the columns t and width - 1 - t of the lower triangle of `scatter`, for t in first..last: this
   merges scatter matrices about any points (Chan, Golub and LeVeque 1983). `product` is NULL or
   Fortran-ordered with `product_stride` numbers per column. */
static void NAME(add_lower)(double *scatter, Index width, const void *product, Index product_stride,
                            double sign, const double *vectors, const double *coefficients,
                            Index first, Index last) {
    const double *const u = vectors, *const v = vectors + width;
    for (Index t = first; t < last; t++)
        for (Index mirror = 0; mirror < (t == width - 1 - t ? 1 : 2); mirror++) {
            const Index j = mirror ? width - 1 - t : t;
            const double a = coefficients[0] * u[j], b = coefficients[1] * v[j];
            double *const column = scatter + j * width;
            const T *const added = product ? (const T *)product + j * product_stride : NULL;
            if (added)
                for (Index i = j; i < width; i++)
                    column[i] += sign * added[i] + (a * u[i] + b * v[i]);
            else
                for (Index i = j; i < width; i++) column[i] += a * u[i] + b * v[i];
        }
}
