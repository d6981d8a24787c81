/* Erasure of rows: out = x - left^T (right (x - mean) - shift), in float64, rounded once to T.

   The mean is subtracted first, so that a large mean does not reduce the precision of the other
   features. The result for a row does not depend on the other rows, their layout or alignment. Rows
   that are not contiguous are copied to C order, BATCH rows at a time. For rank 1, one pass over
   the columns writes one or two rows and computes the coefficients of the next; for other ranks,
   products are computed in tiles of ROWS x COLUMNS sums, which stay in registers. */

#ifndef SPLINCE_ERASE
#define SPLINCE_ERASE

#define ROWS LANES
#define COLUMNS (2 * LANES)
/* One matrix product covers BATCH rows and DEPTH features, so that both operands stay in the L1
   cache. A panel of the map is read once per BATCH rows. */
#define BATCH 32
#define DEPTH 64
/* For rank 1, the factors of more features exceed an L1 cache of 32 KiB, and two rows share each
   load. With narrow registers one row at a time is faster, as several stores fill a cache line. */
#define MAX_WIDTH_ONE_ROW (WIDE ? 32768 / 24 : PTRDIFF_MAX)
#define PREFETCH_NUMBERS 6656 /* prefetch distance in numbers, for rank 1 and contiguous rows */
#define PANELS 8 /* number of panels of `left` that ROWS rows use before the next ROWS rows */

INLINE double *align_to_line(void *memory) {
    return (double *)(((uintptr_t)memory + LINE - 1) / LINE * LINE);
}

/* Returns the number of directions in a panel of `right`; rank 1 has no tiles. */
static Index panel_columns_of(Index rank) {
    return rank == 1 ? 1 : rank <= LANES ? LANES : COLUMNS;
}

static Index factors_size(Index rank, Index width) {
    Index panel_columns = panel_columns_of(rank), padded_width = ceil_div(width, COLUMNS) * COLUMNS;
    return (ceil_div(rank, panel_columns) * panel_columns + rank + 1) * padded_width + rank;
}

/* Writes sign * factor, a (depth, width) matrix of any strides, to panels of `panel_columns`
   columns and `panel_rows` rows, padded with zeros. Returns the address after the last panel. */
static double *pack_panels(const double *factor, Index depth, Index width, Index row_stride,
                           Index column_stride, double sign, Index panel_columns, Index panel_rows,
                           double *panels) {
    for (Index first = 0; first < width; first += panel_columns)
        for (Index t = 0; t < panel_rows; t++)
            for (Index q = first; q < first + panel_columns; q++)
                *panels++ = t < depth && q < width
                                ? sign * factor[t * row_stride + q * column_stride]
                                : 0.0;
    return panels;
}

static void pack_factors(Factors *map, const double *left, const double *right, const double *mean,
                         const double *shift, double *memory) {
    Index rank = map->rank, width = map->width;
    map->panel_columns = panel_columns_of(rank);
    map->padded_width = ceil_div(width, COLUMNS) * COLUMNS;
    map->packed_right = memory;
    memory = pack_panels(right, width, rank, 1, width, 1.0, map->panel_columns, map->padded_width,
                         memory);
    map->packed_left = memory;
    memory = pack_panels(left, rank, width, width, 1, -1.0, COLUMNS, rank, memory);
    map->mean = memory;
    memory = pack_panels(mean, width, 1, 1, 0, 1.0, 1, map->padded_width, memory);
    map->shift = memory;
    for (Index r = 0; r < rank; r++) memory[r] = shift[r];
}

/* Queue of cache lines of erased rows that are still to be written by non-temporal stores. */
typedef struct {
    const char *from;
    char *to;
    Index n_lines;
} LineQueue;

INLINE void write_line(LineQueue *queue) {
    stream_line(queue->to, queue->from);
    queue->to += LINE, queue->from += LINE, queue->n_lines--;
}

static void write_lines(LineQueue *queue) {
    while (queue->n_lines > 0) write_line(queue);
}

/* Copies the partial cache lines at both ends of `size` bytes; returns the queue of the others. */
static LineQueue queue_copy(const char *from, Index size, char *to) {
    Index head = minimum((Index)(-(uintptr_t)to % LINE), size), tail = (size - head) % LINE;
    memcpy(to, from, (size_t)head);
    memcpy(to + size - tail, from + size - tail, (size_t)tail);
    return (LineQueue){from + head, to + head, (size - head) / LINE};
}

/* Returns the first of n rows with a finite number that overflows float16, or NO_ROW. */
static Index first_overflow(const float *rows, Index n, Index width) {
    Index vector_end = width - width % FLOATS;
    for (Index i = 0; i < n; i++, rows += width) {
        FBits overflows = bits_of_f32(broadcast_f32(0.0f));
        for (Index j = 0; j < vector_end; j += FLOATS)
            overflows |= overflows_float16(get_f32(rows + j));
        for (Index j = vector_end; j < width; j++)
            overflows |= overflows_float16(broadcast_f32(rows[j]));
        uint32_t bits[FLOATS], any = 0;
        memcpy(bits, &overflows, sizeof(bits));
        for (int k = 0; k < FLOATS; k++) any |= bits[k];
        if (any) return i;
    }
    return NO_ROW;
}

#endif

/* --- rank 1 ---------------------------------------------------------------------------------- */

/* Arguments of a pass that computes the coefficients of the rows x and erases the rows y. */
typedef struct {
    const T *x, *y; /* sums += (x - mean) right, and out = y + c left; `left` is stored negated */
    T *out;
    const double *mean, *right, *left;
    Index row_stride, out_stride; /* row strides in numbers, of x and y and of out */
    Index prefetch_bytes;         /* prefetch distance from x in bytes */
} NAME(Pass);

/* Processes two registers of columns from column j on, or the last `count` columns. With `compute`,
   adds to the sums of the rows x; with `write`, writes the erased rows y. All loads precede the
   stores: a load waits for an earlier store if the addresses differ by a multiple of 4096. The last
   columns use registers too, so that products are rounded alike. */
INLINE void NAME(pass_columns)(NAME(Pass) pass, Index j, Index count, const D *c, D (*sums)[2],
                               int rows, int compute, int write, int streamed) {
    const int is_full = count == COLUMNS;
    D results[2][2];
    UNROLL(2)
    for (int q = 0; q < 2; q++) {
        const Index k = j + q * LANES;
        const Index n_lanes = is_full ? LANES : minimum(LANES, maximum(0, count - q * LANES));
        UNROLL(2)
        for (int p = 0; p < rows; p++) {
            if (compute) {
                D x = NAME(load_some)(pass.x + p * pass.row_stride + k, n_lanes) -
                      get_f64(pass.mean + k);
                sums[p][q] = multiply_add_f64(x, get_f64(pass.right + k), sums[p][q]);
            }
            if (write)
                results[p][q] =
                    multiply_add_f64(c[p], get_f64(pass.left + k),
                                     NAME(load_some)(pass.y + p * pass.row_stride + k, n_lanes));
        }
    }
    UNROLL(2)
    for (int p = 0; p < rows; p++) {
        for (int k = 0; compute && is_full && k < COLUMNS * (int)sizeof(T); k += LINE)
            PREFETCH((const char *)(pass.x + p * pass.row_stride + j) + pass.prefetch_bytes + k);
        T edge[COLUMNS], *out = pass.out + p * pass.out_stride + j;
        UNROLL(2)
        for (int q = 0; write && q < 2; q++) {
            if (is_full && streamed)
                STREAM(out + q * LANES, results[p][q]);
            else
                STORE((is_full ? out : edge) + q * LANES, results[p][q]);
        }
        if (write && !is_full && streamed)
            stream(out, edge, (int)count * (int)sizeof(T));
        else if (write && !is_full)
            memcpy(out, edge, (size_t)count * sizeof(T));
    }
}

/* Processes all columns. c holds the coefficients of the rows y, and receives those of x. */
INLINE void NAME(pass_rows)(const Factors *map, NAME(Pass) pass, double *c, int rows, int compute,
                            int write, int streamed) {
    const Index width = map->width, tile_end = width - width % COLUMNS;
    D factors[2], sums[2][2];
    for (int p = 0; p < rows; p++) {
        factors[p] = broadcast_f64(write ? c[p] : 0.0);
        sums[p][0] = sums[p][1] = broadcast_f64(0.0);
    }
    for (Index j = 0; j < tile_end; j += COLUMNS)
        NAME(pass_columns)(pass, j, COLUMNS, factors, sums, rows, compute, write, streamed);
    if (tile_end < width)
        NAME(pass_columns)(pass, tile_end, width - tile_end, factors, sums, rows, compute, write,
                           streamed);
    for (int p = 0; p < rows && compute; p++)
        c[p] = sum_of_lanes(sums[p][0] + sums[p][1]) - map->shift[0];
}

/* Erases n rows from `pass` on, `rows` rows per pass; n is a multiple of `rows`. */
INLINE void NAME(erase_groups)(const Factors *map, NAME(Pass) pass, Index n, int rows,
                               int streamed) {
    double c[2];
    if (!n) return;
    NAME(pass_rows)(map, pass, c, rows, 1, 0, 0);
    for (; n > rows; n -= rows) {
        pass.x += rows * pass.row_stride;
        NAME(pass_rows)(map, pass, c, rows, 1, 1, streamed);
        pass.y = pass.x, pass.out += rows * pass.out_stride;
    }
    NAME(pass_rows)(map, pass, c, rows, 0, 1, streamed);
}

INLINE void NAME(erase_rank_one)(const Factors *map, const T *rows, Index row_stride, Index n,
                                 T *out, Index out_stride, int streamed) {
    const int rows_per_pass = map->width > MAX_WIDTH_ONE_ROW ? 2 : 1;
    const Index grouped_rows = n - n % rows_per_pass;
    const Index pass_bytes = rows_per_pass * row_stride * (Index)sizeof(T);
    NAME(Pass) pass = {rows, rows, out, map->mean, map->packed_right, map->packed_left,
                       row_stride, out_stride, 0};
    /* The prefetched address differs from the stored address by 2048 modulo 4096. With a difference
       of 0, loads would wait for stores. */
    const Index prefetch_bytes = PREFETCH_NUMBERS * (Index)sizeof(T);
    const Index distance = (Index)((uintptr_t)rows - (uintptr_t)out) + pass_bytes + prefetch_bytes;
    pass.prefetch_bytes = row_stride == map->width ? prefetch_bytes + (2048 - distance) % 4096
                                                   : PREFETCH_ROWS * pass_bytes;
    if (rows_per_pass == 1)
        NAME(erase_groups)(map, pass, grouped_rows, 1, streamed);
    else
        NAME(erase_groups)(map, pass, grouped_rows, 2, streamed);
    pass.x = pass.y = rows + grouped_rows * row_stride, pass.out = out + grouped_rows * out_stride;
    NAME(erase_groups)(map, pass, n - grouped_rows, 1, streamed);
}

/* --- other ranks ----------------------------------------------------------------------------- */

/* Computes sums[p][q] = sum_t a[p][t] b[t][q], t < depth, for `height` rows of a and `registers`
   registers of columns of b. With `write_queued`, queued cache lines are written in between, on
   average sizeof(T) ROWS bytes per step. */
INLINE void NAME(sum_products)(D (*sums)[2], const double *a, Index row_stride, const double *b,
                               Index depth, int height, int registers, int write_queued,
                               LineQueue *queue) {
    UNROLL(8)
    for (int p = 0; p < height; p++) {
        UNROLL(2)
        for (int q = 0; q < registers; q++) sums[p][q] = broadcast_f64(0.0);
    }
    for (Index t = 0; t < depth; t++, b += registers * LANES) {
        if (write_queued && t % (LINE / (Index)(sizeof(T) * ROWS)) == 0 && queue->n_lines > 0)
            write_line(queue);
        D factors[2];
        UNROLL(2)
        for (int q = 0; q < registers; q++) factors[q] = get_f64(b + q * LANES);
        UNROLL(8)
        for (int p = 0; p < height; p++) {
            D number = broadcast_f64(a[p * row_stride + t]);
            UNROLL(2)
            for (int q = 0; q < registers; q++) sums[p][q] += number * factors[q];
        }
    }
}

/* Computes coefficients[p][q] += sum_t centred[p][t] panel[t][q]. */
INLINE void NAME(add_to_coefficients)(const double *centred, const double *panel, Index depth,
                                      double *coefficients, Index row_length, int height,
                                      int registers, LineQueue *queue) {
    D sums[ROWS][2];
    if (queue->n_lines > 0)
        NAME(sum_products)(sums, centred, DEPTH, panel, depth, height, registers, 1, queue);
    else
        NAME(sum_products)(sums, centred, DEPTH, panel, depth, height, registers, 0, NULL);
    UNROLL(8)
    for (int p = 0; p < height; p++) {
        UNROLL(2)
        for (int q = 0; q < registers; q++) {
            double *target = coefficients + p * row_length + q * LANES;
            put_f64(target, get_f64(target) + sums[p][q]);
        }
    }
}

/* Computes out[p][q] = x[p][q] + sum_r coefficients[p][r] panel[r][q]. */
INLINE void NAME(write_tile)(const double *coefficients, Index row_length, const double *panel,
                             Index rank, const T *x, Index row_stride, T *out, Index out_stride,
                             int height) {
    D sums[ROWS][2];
    NAME(sum_products)(sums, coefficients, row_length, panel, rank, height, 2, 0, NULL);
    UNROLL(8)
    for (int p = 0; p < height; p++) {
        UNROLL(2)
        for (int q = 0; q < 2; q++) sums[p][q] += LOAD(x + p * row_stride + q * LANES);
    }
    UNROLL(8)
    for (int p = 0; p < height; p++) {
        UNROLL(2)
        for (int q = 0; q < 2; q++) STORE(out + p * out_stride + q * LANES, sums[p][q]);
    }
}

/* Computes centred[i][j] = rows[i][first + j] - mean[first + j], j < depth. */
static void NAME(centre_part)(const T *rows, Index row_stride, Index n, const double *mean,
                              Index first, Index depth, double *centred) {
    Index vector_end = depth - depth % LANES;
    rows += first, mean += first;
    for (Index i = 0; i < n; i++, rows += row_stride, centred += DEPTH) {
        for (Index j = 0; j < vector_end; j += LANES)
            put_f64(centred + j, LOAD(rows + j) - get_f64(mean + j));
        for (Index j = vector_end; j < depth; j++) centred[j] = rows[j] - mean[j];
    }
}

/* Computes coefficients = (rows - mean) right^T - shift, in rows of full panels. */
INLINE void NAME(compute_coefficients)(const Factors *map, const T *rows, Index row_stride, Index n,
                                       double *centred, double *coefficients, Index row_length,
                                       int registers, LineQueue *queue) {
    for (Index i = 0; i < n; i++)
        for (Index r = 0; r < row_length; r++)
            coefficients[i * row_length + r] = r < map->rank ? -map->shift[r] : 0.0;
    Index panel_columns = registers * LANES;
    for (Index first = 0; first < map->width; first += DEPTH) {
        Index depth = minimum(DEPTH, map->width - first);
        NAME(centre_part)(rows, row_stride, n, map->mean, first, depth, centred);
        for (Index r = 0; r < row_length; r += panel_columns) {
            const double *panel = map->packed_right + r * map->padded_width + first * panel_columns;
            Index i = 0;
            for (; i + ROWS <= n; i += ROWS)
                NAME(add_to_coefficients)(centred + i * DEPTH, panel, depth,
                                          coefficients + i * row_length + r, row_length, ROWS,
                                          registers, queue);
            for (; i < n; i++)
                NAME(add_to_coefficients)(centred + i * DEPTH, panel, depth,
                                          coefficients + i * row_length + r, row_length, 1,
                                          registers, queue);
        }
    }
}

/* Computes out = rows - coefficients left for the last features, which are fewer than COLUMNS. */
static void NAME(erase_last_columns)(const Factors *map, const T *rows, Index row_stride, Index n,
                                     const double *coefficients, Index row_length, T *out,
                                     Index out_stride) {
    Index first = map->width - map->width % COLUMNS, count = map->width - first;
    for (Index i = 0; i < n && count > 0; i++) {
        T edge[COLUMNS] = {0};
        for (Index j = 0; j < count; j++) edge[j] = rows[i * row_stride + first + j];
        NAME(write_tile)(coefficients + i * row_length, row_length,
                         map->packed_left + first * map->rank, map->rank, edge, 0, edge, 0, 1);
        for (Index j = 0; j < count; j++) out[i * out_stride + first + j] = edge[j];
    }
}

/* Computes out = rows - coefficients left for n rows, and prefetches the next n_prefetched rows. */
static void NAME(erase_tiles)(const Factors *map, const T *rows, Index row_stride, Index n,
                              Index n_prefetched, const double *coefficients, Index row_length,
                              T *out, Index out_stride) {
    Index rank = map->rank, tile_end = map->width - map->width % COLUMNS;
    for (Index first = 0; first < tile_end; first += PANELS * COLUMNS) {
        Index last = minimum(first + PANELS * COLUMNS, tile_end), i = 0;
        for (; i + ROWS <= n; i += ROWS)
            for (Index j = first; j < last; j += COLUMNS) {
                const T *x = rows + i * row_stride + j;
                for (Index p = 0; p < ROWS && i + p < n_prefetched; p++)
                    for (Index q = 0; q < COLUMNS; q += LINE / (Index)sizeof(T))
                        PREFETCH(x + (n + p) * row_stride + q);
                NAME(write_tile)(coefficients + i * row_length, row_length,
                                 map->packed_left + j * rank, rank, x, row_stride,
                                 out + i * out_stride + j, out_stride, ROWS);
            }
        for (; i < n; i++)
            for (Index j = first; j < last; j += COLUMNS)
                NAME(write_tile)(coefficients + i * row_length, row_length,
                                 map->packed_left + j * rank, rank, rows + i * row_stride + j, 0,
                                 out + i * out_stride + j, 0, 1);
    }
    NAME(erase_last_columns)(map, rows, row_stride, n, coefficients, row_length, out, out_stride);
}

/* --- copies in C order ----------------------------------------------------------------------- */

/* Returns the address of element (i, j) of a matrix. */
INLINE char *NAME(element)(Matrix matrix, Index i, Index j) {
    return matrix.data + i * matrix.row_stride + j * matrix.column_stride;
}

/* Copies the number at `element` to `copy`; with `to_matrix`, copies `copy` to `element`. */
INLINE void NAME(copy_element)(char *element, T *copy, int is_float16, int to_matrix) {
    uint16_t half[BYTES / 2] = {0};
    T number[WIDTH] = {0};
    if (!is_float16 && to_matrix) {
        *(T *)element = *copy;
    } else if (!is_float16) {
        *copy = *(const T *)element;
    } else if (to_matrix) {
        *number = *copy;
        NAME(write)((char *)half, GET(number), 1);
        *(uint16_t *)element = *half;
    } else {
        *half = *(const uint16_t *)element;
        PUT(number, NAME(read)((const char *)half, 1));
        *copy = *number;
    }
}

/* Copies an (n, width) matrix of any layout to `copy`, in C order; with `to_matrix`, the reverse.
   If the columns of the matrix are contiguous, tiles are transposed. */
INLINE void NAME(copy_matrix)(Matrix matrix, Index n, Index width, T *copy, int is_float16,
                              int to_matrix) {
    const Index itemsize = is_float16 ? 2 : (Index)sizeof(T);
    const int tiled = matrix.row_stride == itemsize && matrix.column_stride != itemsize;
    const Index tiled_rows = tiled ? n - n % WIDTH : n;
    const Index vector_end = tiled || matrix.column_stride == itemsize ? width - width % WIDTH : 0;
    for (Index j = 0; tiled && j < vector_end; j += WIDTH)
        for (Index i = 0; i < tiled_rows; i += WIDTH) {
            V tile[WIDTH];
            UNROLL(16)
            for (int q = 0; q < WIDTH; q++)
                tile[q] = to_matrix ? GET(copy + (i + q) * width + j)
                                    : NAME(read)(NAME(element)(matrix, i, j + q), is_float16);
            NAME(transpose)(tile);
            UNROLL(16)
            for (int q = 0; q < WIDTH; q++)
                if (to_matrix)
                    NAME(write)(NAME(element)(matrix, i, j + q), tile[q], is_float16);
                else
                    PUT(copy + (i + q) * width + j, tile[q]);
        }
    for (Index i = 0; i < n; i++, copy += width) {
        for (Index j = 0; !tiled && j < vector_end; j += WIDTH)
            if (to_matrix)
                NAME(write)(NAME(element)(matrix, i, j), GET(copy + j), is_float16);
            else
                PUT(copy + j, NAME(read)(NAME(element)(matrix, i, j), is_float16));
        for (Index j = i < tiled_rows ? vector_end : 0; j < width; j++)
            NAME(copy_element)(NAME(element)(matrix, i, j), copy + j, is_float16, to_matrix);
    }
}

static void NAME(copy_rows)(Matrix matrix, Index n, Index width, T *copy, int is_float16,
                            int to_matrix) {
    if (is_float16 && to_matrix)
        NAME(copy_matrix)(matrix, n, width, copy, 1, 1);
    else if (is_float16)
        NAME(copy_matrix)(matrix, n, width, copy, 1, 0);
    else if (to_matrix)
        NAME(copy_matrix)(matrix, n, width, copy, 0, 1);
    else
        NAME(copy_matrix)(matrix, n, width, copy, 0, 0);
}

/* --- entry points ---------------------------------------------------------------------------- */

static Index NAME(erase)(const Factors *map, Matrix rows, Matrix out, Index n, int is_float16,
                         int streamed) {
    const Index rank = map->rank, width = map->width, itemsize = sizeof(T);
    const int rank_one = rank == 1;
    /* Contiguous rows are read and written without a copy. */
    const int rows_contiguous = !is_float16 && (rows.column_stride == itemsize || width == 1) &&
                                rows.row_stride % itemsize == 0;
    const int out_contiguous = !is_float16 && (out.column_stride == itemsize || width == 1) &&
                               out.row_stride % itemsize == 0;
    const int out_dense = out_contiguous && (out.row_stride == width * itemsize || n == 1);
    streamed = streamed && out_dense && rows.data != out.data;
    const int buffered =
        !out_contiguous ||
        (streamed &&
         !(rank_one && ((uintptr_t)out.data | (size_t)(width * itemsize)) % STREAM_ALIGNMENT == 0));
    const Index batch = rank_one && rows_contiguous && !buffered ? n : minimum(n, BATCH);
    const Index row_length = rank_one ? 0 : ceil_div(rank, map->panel_columns) * map->panel_columns;
    if (n == 0) return NO_ROW;

    /* All memory is allocated before the first write, so that a failure leaves `out` unchanged. */
    const Index tile_rows = rank_one ? 0 : batch;
    const Index copy_bytes = batch * ceil_div(width * itemsize, LINE) * LINE;
    const Index bytes = tile_rows * (DEPTH + row_length) * (Index)sizeof(double) +
                        (!rows_contiguous + buffered) * copy_bytes;
    char *memory = bytes ? malloc((size_t)(bytes + 2 * LINE)) : NULL;
    if (bytes && !memory) return NO_MEMORY;
    double *centred = align_to_line(memory), *coefficients = centred + tile_rows * DEPTH;
    T *copies = (T *)align_to_line(coefficients + tile_rows * row_length);
    T *results = (T *)((char *)copies + (rows_contiguous ? 0 : copy_bytes));

    LineQueue queue = {0};
    Index overflow_row = NO_ROW;
    for (Index first = 0; first < n; first += batch) {
        const Index count = minimum(batch, n - first);
        const Index n_prefetched = rows_contiguous ? minimum(batch, n - first - count) : 0;
        const Index row_stride = rows_contiguous ? rows.row_stride / itemsize : width;
        const Index out_stride = buffered ? width : out.row_stride / itemsize;
        const T *source = rows_contiguous ? (const T *)rows.data : copies;
        T *target = buffered ? results : (T *)out.data;
        if (!rows_contiguous) NAME(copy_rows)(rows, count, width, copies, is_float16, 0);
        if (rank_one) {
            write_lines(&queue);
            if (streamed && !buffered)
                NAME(erase_rank_one)(map, source, row_stride, count, target, out_stride, 1);
            else
                NAME(erase_rank_one)(map, source, row_stride, count, target, out_stride, 0);
        } else {
            if (map->panel_columns == LANES)
                NAME(compute_coefficients)(map, source, row_stride, count, centred, coefficients,
                                           row_length, 1, &queue);
            else
                NAME(compute_coefficients)(map, source, row_stride, count, centred, coefficients,
                                           row_length, 2, &queue);
            write_lines(&queue);
            NAME(erase_tiles)(map, source, row_stride, count, n_prefetched, coefficients,
                              row_length, target, out_stride);
        }
        if (is_float16 && overflow_row == NO_ROW) {
            overflow_row = first_overflow((const float *)target, count, width);
            if (overflow_row != NO_ROW) overflow_row += first;
        }
        if (!out_contiguous)
            NAME(copy_rows)(out, count, width, target, is_float16, 1);
        else if (buffered)
            queue = queue_copy((const char *)target, count * width * itemsize, out.data);
        rows.data += count * rows.row_stride, out.data += count * out.row_stride;
    }
    if (streamed) {
        write_lines(&queue);
        store_fence();
    }
    free(memory);
    return overflow_row;
}

/* Returns whether the sum of squares of every row is below 1e298, which is false for NaN. Each row
   is contiguous. The bound leaves a margin for sums over many rows. */
static int NAME(squares_finite)(Matrix rows, Index n, Index width) {
    const Index vector_end = width - width % (4 * LANES);
    for (Index i = 0; i < n; i++, rows.data += rows.row_stride) {
        const T *x = (const T *)rows.data;
        D sums[4] = {broadcast_f64(0.0), broadcast_f64(0.0), broadcast_f64(0.0),
                     broadcast_f64(0.0)};
        for (Index j = 0; j < vector_end; j += 4 * LANES) {
            UNROLL(4)
            for (int q = 0; q < 4; q++) {
                D number = LOAD(x + j + q * LANES);
                sums[q] += number * number;
            }
        }
        double total = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
        for (Index j = vector_end; j < width; j++) total += (double)x[j] * x[j];
        if (!(total < 1e298)) return 0;
    }
    return 1;
}
