/* Rows reduced to their sums and to the matrix of their products, for one dtype T.

   Each number is the result of the same operations in the same order, whatever stripe of columns
   it is computed with and whichever thread does it. */

/* LOAD and STORE of the first `count` numbers of a register, with zeros in its other lanes. */
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

/* Row i of a block. */
INLINE const T *NAME(row)(const Block *block, Index i) {
    return (const T *)block->rows + (block->index ? block->index[i] : i) * block->width;
}

/* Sums of a class, and of products with a column of values. */
INLINE double *NAME(class_sums)(const Block *block, Index c) {
    return block->sums + (2 + c) * block->width;
}
INLINE double *NAME(products)(const Block *block, Index q) {
    return block->sums + (2 + block->classes + q) * block->width;
}

/* Rows that are reduced at once, and the number of rows among them that are not repeated: where a
   group is not full, its first row takes the place of the others, with factors of 0. */
typedef struct {
    const T *row[GROUP];
    Index i[GROUP]; /* their numbers */
    int count;
} NAME(Group);

/* Rows order[k], order[k + 1], ... below `stop`; rows k, k + 1, ... without an order. */
INLINE NAME(Group) NAME(group)(const Block *block, const Index *order, Index k, Index stop) {
    NAME(Group) group;
    group.count = (int)smaller(stop - k, GROUP);
    for (int g = 0; g < GROUP; g++) {
        const Index at = g < group.count ? k + g : k;
        group.i[g] = order ? order[at] : at;
        group.row[g] = NAME(row)(block, group.i[g]);
    }
    return group;
}

/* Factors of the rows of a group: numbers of theirs, or 1 without numbers. */
INLINE void NAME(factors)(const NAME(Group) *group, const double *numbers, double *w) {
    for (int g = 0; g < GROUP; g++)
        w[g] = g >= group->count ? 0.0 : numbers ? numbers[group->i[g]] : 1.0;
}

/* sum + (w_a a + w_b b) + (w_c c + w_d d). */
INLINE D NAME(with_four)(D sum, const D y[GROUP], const D w[GROUP]) {
    return sum + (multiply_add_f64(w[0], y[0], w[1] * y[1]) +
                  multiply_add_f64(w[2], y[2], w[3] * y[3]));
}

/* --- sums ----------------------------------------------------------------------------------- */

INLINE void NAME(add_register)(const NAME(Group) *group, const double *shift, const D w[GROUP],
                               Index j, Index count, double *sums) {
    const D about = load_some_f64(shift + j, count);
    D y[GROUP];
    UNROLL(4) for (int g = 0; g < GROUP; g++)
        y[g] = NAME(load_some)(group->row[g] + j, count) - about;
    store_some_f64(sums + j, NAME(with_four)(load_some_f64(sums + j, count), y, w), count);
}

/* sums_j += sum_g w_g (row_g,j - shift_j) in the columns first..last. */
static void NAME(add_group)(NAME(Group) group, const double *shift, const double *weight,
                            Index first, Index last, double *sums) {
    D w[GROUP];
    for (int g = 0; g < GROUP; g++) w[g] = all_f64(weight[g]);
    Index j = first;
    for (; j + LANES <= last; j += LANES) NAME(add_register)(&group, shift, w, j, LANES, sums);
    if (j < last) NAME(add_register)(&group, shift, w, j, last - j, sums);
}

/* Adds a row alone to the sums of its classes. */
static void NAME(add_row)(const Block *block, Index i, Index first, Index last) {
    const T *const row = NAME(row)(block, i);
    const double w = block->weight ? block->weight[i] : 1.0;
    for (Index v = 0; v < block->variables; v++) {
        const Index code = block->codes[v * block->n + i];
        if (code < 0) continue;
        double *const sums = NAME(class_sums)(block, code);
        for (Index j = first; j < last; j++)
            sums[j] += w * (row[j] - block->shift[j] + block->offset[j]);
    }
}

/* Sums rows start..stop of the order, those of one cell, and adds the sum to their classes. */
static void NAME(add_cell)(const Block *block, Index start, Index stop, Index first, Index last,
                           double *held) {
    double whole = 0.0, w[GROUP];
    memset(held + first, 0, (size_t)(last - first) * sizeof(double));
    for (Index k = start; k < stop; k += GROUP) {
        const NAME(Group) group = NAME(group)(block, block->order, k, stop);
        NAME(factors)(&group, block->weight, w);
        NAME(add_group)(group, block->shift, w, first, last, held);
        whole += (w[0] + w[1]) + (w[2] + w[3]);
    }
    for (Index v = 0; v < block->variables; v++) {
        const Index code = block->codes[v * block->n + block->order[start]];
        if (code < 0) continue;
        double *const sums = NAME(class_sums)(block, code);
        for (Index j = first; j < last; j++) sums[j] += held[j] + whole * block->offset[j];
    }
}

/* Adds rows start..stop of the order to the sums of their classes. Cells of few rows are not worth
   a sum of their own. */
static void NAME(add_cells)(const Block *block, Index start, Index stop, Index first, Index last,
                            double *held) {
    for (Index end = start; end < stop; start = end) {
        while (end < stop && block->cell[end] == block->cell[start]) end++;
        if (end - start >= GROUP)
            NAME(add_cell)(block, start, end, first, last, held);
        else
            for (Index k = start; k < end; k++) NAME(add_row)(block, block->order[k], first, last);
    }
}

/* Adds a group to the products with columns. */
static void NAME(add_values)(const Block *block, const NAME(Group) *group, Index first,
                             Index last) {
    double w[GROUP];
    for (Index q = 0; q < block->columns; q++) {
        NAME(factors)(group, block->values + q * block->n, w);
        NAME(add_group)(*group, block->shift, w, first, last, NAME(products)(block, q));
    }
}

/* --- centring ------------------------------------------------------------------------------- */

/* Row g of a group becomes own_g y_g + other_g y_h, where h is the other one of its pair. */
typedef struct {
    double w[GROUP], own[GROUP], other[GROUP];
} NAME(Turns);

/* Rows (a, b) of a pair become (a cos t + b sin t, b cos t - a sin t), times sqrt(w). */
INLINE NAME(Turns) NAME(turns)(const Block *block, const NAME(Group) *group, Index head) {
    NAME(Turns) turns;
    NAME(factors)(group, block->weight, turns.w);
    for (int g = 0; g < GROUP; g++) {
        const double *const angle = block->rotations + (head + g) / 2 % block->turns * 2;
        turns.own[g] = angle[0] * sqrt(turns.w[g]);
        turns.other[g] = (g % 2 ? -angle[1] : angle[1]) * sqrt(turns.w[g ^ 1]);
    }
    return turns;
}

INLINE void NAME(centre_register)(const NAME(Group) *group, const double *shift, const D w[GROUP],
                                  const D own[GROUP], const D other[GROUP], Index j, Index count,
                                  double *total, double *peak, T *out, Index apart) {
    const D about = load_some_f64(shift + j, count);
    D y[GROUP];
    UNROLL(4) for (int g = 0; g < GROUP; g++)
        y[g] = NAME(load_some)(group->row[g] + j, count) - about;
    UNROLL(4) for (int g = 0; g < GROUP; g++)
        NAME(store_some)(out + g * apart, multiply_add_f64(own[g], y[g], other[g] * y[g ^ 1]),
                         count);
    store_some_f64(total + j, NAME(with_four)(load_some_f64(total + j, count), y, w), count);
    UNROLL(4) for (int g = 0; g < GROUP; g++) y[g] = size_of_f64(y[g]);
    const D most = larger_f64(larger_f64(y[0], y[1]), larger_f64(y[2], y[3]));
    store_some_f64(peak + j, larger_f64(load_some_f64(peak + j, count), most), count);
}

/* Adds a group to total and peak, and writes its turned rows: column j of row g goes to number
   g * apart + j / WIDTH * step + j % WIDTH of `out`, in a matrix (step = WIDTH) as in panels. */
static void NAME(centre_group)(const Block *block, NAME(Group) group, const NAME(Turns) *turns,
                               Index first, Index last, T *out, Index apart, Index step) {
    D w[GROUP], own[GROUP], other[GROUP];
    for (int g = 0; g < GROUP; g++) {
        w[g] = all_f64(turns->w[g]);
        own[g] = all_f64(turns->own[g]);
        other[g] = all_f64(turns->other[g]);
    }
    const double *const shift = block->shift;
    double *const total = block->sums, *const peak = total + block->width;
    Index j = first;
    for (; j + LANES <= last; j += LANES)
        NAME(centre_register)(&group, shift, w, own, other, j, LANES, total, peak,
                              out + j / WIDTH * step + j % WIDTH, apart);
    if (j < last)
        NAME(centre_register)(&group, shift, w, own, other, j, last - j, total, peak,
                              out + j / WIDTH * step + j % WIDTH, apart);
}

/* Zeros in the columns first..last of all sums. */
static void NAME(clear_sums)(const Block *block, Index first, Index last) {
    for (Index c = 0; c < 2 + block->classes + block->columns; c++)
        memset(block->sums + c * block->width + first, 0, (size_t)(last - first) * sizeof(double));
}

/* Adds what the offset has in the products with columns. */
static void NAME(add_offset)(const Block *block, Index first, Index last) {
    for (Index q = 0; q < block->columns; q++) {
        const double *const values = block->values + q * block->n;
        double *const sums = NAME(products)(block, q), whole = 0.0;
        for (Index i = 0; i < block->n; i++) whole += values[i];
        for (Index j = first; j < last; j++) sums[j] += whole * block->offset[j];
    }
}

/* Reduces rows begin..stop in the columns first..last; row begin + r is row r of `out`. Calls for
   ranges of rows follow each other from row 0 to row n, and begin at multiples of GROUP.

   The rotation leaves out^T out = sum_i w_i y_i y_i^T as it is, but products of rows that take few
   distinct values are no longer equal, so that their roundings do not all point the same way. A
   part of `part_rows` rows stays in cache between the pass that centres it and that which sums its
   cells. Labels have no influence on `out` and `total`. */
static void NAME(centre)(const Block *block, Index begin, Index stop, Index first, Index last,
                         T *out, Index apart, Index step, double *held) {
    if (begin == 0) NAME(clear_sums)(block, first, last);
    for (Index head = begin; head < stop; head += GROUP) {
        const NAME(Group) group = NAME(group)(block, NULL, head, stop);
        const NAME(Turns) turns = NAME(turns)(block, &group, head);
        NAME(centre_group)(block, group, &turns, first, last, out + (head - begin) * apart, apart,
                           step);
        NAME(add_values)(block, &group, first, last);
        const Index done = head + group.count;
        if (block->variables > 0 && (done % block->part_rows == 0 || done == block->n))
            NAME(add_cells)(block, head / block->part_rows * block->part_rows, done, first, last,
                            held);
    }
    if (stop == block->n) NAME(add_offset)(block, first, last);
}

/* The whole block in the columns first..last, centred to the rows of a matrix (m, width), m being
   n rounded up to a multiple of GROUP. `held` has `width` numbers, overwritten there. */
static void NAME(centre_columns)(const Block *block, void *out, Index first, Index last,
                                 double *held) {
    NAME(centre)(block, 0, block->n, first, last, out, block->width, WIDTH, held);
}

/* --- products ------------------------------------------------------------------------------- */

/* A tile of sums has TILE columns, and up to HEIGHT registers of rows in each: 24 of 32 registers
   of 64 bytes, 12 of 16 of 32 bytes. */
#ifndef HEIGHT
#define HEIGHT 3
#define TILE LANES
/* Tasks into which the columns of a product are cut: enough to keep threads equally busy. */
#define SHARES 24
#endif

/* product[q, h WIDTH + l] = sum_{k < depth} left[h, k, l] right[k, q], or += that, for q < TILE,
   h < height and l < WIDTH. */
INLINE void NAME(tile)(const T *RESTRICT left, const T *RESTRICT right, Index step, Index depth,
                       T *RESTRICT product, Index apart, int add, const int height) {
    V sum[TILE][HEIGHT];
    UNROLL(8) for (int q = 0; q < TILE; q++) {
        UNROLL(3) for (int h = 0; h < height; h++) sum[q][h] = ALL(0);
        /* Of the product, for the end of the loop. */
        PREFETCH(product + q * apart);
        PREFETCH(product + q * apart + height * WIDTH - 1);
    }
    for (Index k = 0; k < depth; k++, left += WIDTH, right += WIDTH) {
        V x[HEIGHT];
        UNROLL(3) for (int h = 0; h < height; h++) x[h] = GET(left + h * step);
        UNROLL(8) for (int q = 0; q < TILE; q++) {
            const V y = ALL(right[q]);
            UNROLL(3) for (int h = 0; h < height; h++) sum[q][h] += x[h] * y;
        }
    }
    UNROLL(8) for (int q = 0; q < TILE; q++)
        UNROLL(3) for (int h = 0; h < height; h++) {
            T *const to = product + q * apart + h * WIDTH;
            PUT(to, add ? GET(to) + sum[q][h] : sum[q][h]);
        }
}

/* Columns first..last of X^T X, in the panels of rows that reach the diagonal. HEIGHT panels stay
   in the first cache while the columns pass. */
static void NAME(multiply)(const Gram *gram, const T *panels, Index depth, Index first, Index last,
                           int add) {
    const Index apart = gram->height * WIDTH;
    for (Index end = (gram->height - 1) % HEIGHT + 1; end <= gram->height; end += HEIGHT)
        for (Index j = first; j < last && j / WIDTH < end; j += TILE) {
            const Index p = larger(end - HEIGHT, j / WIDTH);
            const T *const left = panels + p * gram->step;
            const T *const right = panels + j / WIDTH * gram->step + j % WIDTH;
            T *const to = (T *)gram->product + j * apart + p * WIDTH;
            if (end - p == 3)
                NAME(tile)(left, right, gram->step, depth, to, apart, add, 3);
            else if (end - p == 2)
                NAME(tile)(left, right, gram->step, depth, to, apart, add, 2);
            else
                NAME(tile)(left, right, gram->step, depth, to, apart, add, 1);
        }
}

/* Centres a stripe of chunk t into its panels, with zeros behind the last column. */
static void NAME(centre_stripe)(const Block *block, const Gram *gram, Index t, Index first,
                                double *held) {
    const Index begin = t * gram->chunk, stop = smaller(begin + gram->chunk, block->n);
    const Index width = block->width, last = smaller(first + gram->stripe, width);
    T *const panels = gram->panels[t % 2];
    NAME(centre)(block, begin, stop, first, last, panels, WIDTH, gram->step, held);
    if (last == width && width % WIDTH)
        for (Index r = 0; r < gram->chunk; r++)
            memset(panels + width / WIDTH * gram->step + r * WIDTH + width % WIDTH, 0,
                   (size_t)(WIDTH - width % WIDTH) * sizeof(T));
}

/* The sums of `centre_columns`, and product = out^T out without `out`.

   Any number of threads make this call at once, with the same arguments but for `held`, and share
   its tasks: in phase t stripes of chunk t are centred, and columns of the product of chunk t - 1
   are taken. A task that was begun is finished: nobody waits for a thread that has not come. */
static void NAME(reduce_chunks)(const Block *block, const Gram *gram, double *held) {
    const Index chunk = gram->chunk, chunks = pieces(block->n, chunk), width = block->width;
    const Index stripes = pieces(width, gram->stripe);
    const Index share = pieces(width, SHARES * TILE) * TILE, shares = pieces(width, share);
    for (Index t = 0; t <= chunks; t++) {
        Phase *const phase = gram->phases + t;
        const Index centring = t < chunks ? stripes : 0;
        const Index tasks = centring + (t > 0 ? shares : 0);
        const Index rest = smaller(block->n - (t - 1) * chunk, chunk);
        const Index depth = pieces(rest, GROUP) * GROUP;
        for (Index task; (task = (Index)atomic_fetch_add(&phase->begun, 1)) < tasks;) {
            if (task < centring) {
                NAME(centre_stripe)(block, gram, t, task * gram->stripe, held);
            } else {
                const Index first = (task - centring) * share;
                NAME(multiply)(gram, gram->panels[(t - 1) % 2], depth, first,
                               smaller(first + share, width), t > 1);
            }
            atomic_fetch_add(&phase->finished, 1);
        }
        wait_for(phase, tasks);
    }
}

/* --- the shift, and the state --------------------------------------------------------------- */

/* Of the block the rows, the index and the weight are used; there is a row. */
static void NAME(sample_columns)(const Block *block, Index stride, double *shift, double *spread) {
    const Index width = block->width;
    const T *const origin = NAME(row)(block, 0);
    double total = 0.0;
    memset(shift, 0, (size_t)width * sizeof(double));
    memset(spread, 0, (size_t)width * sizeof(double));
    for (Index i = 0; i < block->n; i += stride) {
        const double w = block->weight ? block->weight[i] : 1.0;
        const T *const row = NAME(row)(block, i);
        total += w;
        for (Index j = 0; j < width; j++) {
            const double y = (double)row[j] - (double)origin[j];
            shift[j] += w * y;
            spread[j] += w * y * y;
        }
    }
    for (Index j = 0; j < width; j++) {
        const double mean = shift[j] / total, rest = spread[j] - shift[j] * mean;
        spread[j] = rest > 0.0 ? rest : 0.0;
        shift[j] = origin[j] + mean;
    }
}

/* The merge of two scatters (Chan, Golub and LeVeque 1983) that need not be centred about their
   means; `apart` numbers lie between two columns of the product, which may be NULL for none. */
static void NAME(add_lower)(double *scatter, Index width, const void *product, Index apart,
                            double sign, const double *vectors, const double *coefficients,
                            Index first, Index last) {
    const double *const u = vectors, *const v = vectors + width;
    for (Index t = first; t < last; t++)
        for (Index mirror = 0; mirror < (t == width - 1 - t ? 1 : 2); mirror++) {
            const Index j = mirror ? width - 1 - t : t;
            const double a = coefficients[0] * u[j], b = coefficients[1] * v[j];
            double *const column = scatter + j * width;
            const T *const added = product ? (const T *)product + j * apart : NULL;
            if (added)
                for (Index i = j; i < width; i++)
                    column[i] += sign * added[i] + (a * u[i] + b * v[i]);
            else
                for (Index i = j; i < width; i++) column[i] += a * u[i] + b * v[i];
        }
}
