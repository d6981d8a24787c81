/* Erasure of rows: out = x - left^T (right (x - mean) - shift), in float64, rounded once to T.

   The mean is subtracted first, so that a feature with a large mean does not reduce the precision
   of the other features. The result for a row does not depend on the other rows, the memory layout
   or the alignment. Rows that are not contiguous are copied to C order, BATCH rows at a time.

   For rank 1, rows are processed one or two at a time: one pass over the columns writes the current
   rows and computes the coefficients of the next rows. For other ranks, the products with the
   factors are computed in tiles of ROWS x COLUMNS sums, which stay in registers. */

#ifndef SPLINCE_ERASE
#define SPLINCE_ERASE

#define ROWS LANES
#define COLUMNS (2 * LANES)
/* One matrix product covers BATCH rows and DEPTH features, so that both operands stay in the L1
   cache. A panel of the map is read once per BATCH rows. */
#define BATCH 32
#define DEPTH 64
/* For rank 1, two rows are processed together if there are more features than SHARED: the factors,
   24 bytes per feature, then exceed an L1 cache of 32 KiB, and two rows share each load. With
   narrow registers one row at a time is faster, because several stores fill one cache line. */
#define SHARED (WIDE ? 32768 / 24 : PTRDIFF_MAX)
#define FAR 6656 /* prefetch distance in numbers, for rank 1 and contiguous rows */
#define PANELS 8 /* number of panels of `left` that ROWS rows use before the next ROWS rows */

INLINE double *aligned(void *memory) {
    return (double *)(((uintptr_t)memory + LINE - 1) / LINE * LINE);
}

/* Returns the number of directions in a panel of `right`: the width of a tile of sums, or 1 for
   rank 1, which has no tiles. */
static Index directions(Index rank) { return rank == 1 ? 1 : rank <= LANES ? LANES : COLUMNS; }

static Index factors_size(Index rank, Index width) {
    Index columns = directions(rank), padded = pieces(width, COLUMNS) * COLUMNS;
    return (pieces(rank, columns) * columns + rank + 1) * padded + rank;
}

/* Writes sign * factor, a (depth, width) matrix with element (t, q) at factor[t * down + q *
   across], to `panels`. A panel has `columns` columns and `padded` rows, and is padded with zeros.
   Returns the address after the last panel. */
static double *pack_panels(const double *factor, Index depth, Index width, Index down, Index across,
                           double sign, Index columns, Index padded, double *panels) {
    for (Index first = 0; first < width; first += columns)
        for (Index t = 0; t < padded; t++)
            for (Index q = first; q < first + columns; q++)
                *panels++ = t < depth && q < width ? sign * factor[t * down + q * across] : 0.0;
    return panels;
}

static void pack_factors(Factors *map, const double *left, const double *right, const double *mean,
                         const double *shift, double *memory) {
    Index rank = map->rank, width = map->width;
    map->columns = directions(rank);
    map->padded = pieces(width, COLUMNS) * COLUMNS;
    map->measuring = memory;
    memory = pack_panels(right, width, rank, 1, width, 1.0, map->columns, map->padded, memory);
    map->removing = memory;
    memory = pack_panels(left, rank, width, width, 1, -1.0, COLUMNS, rank, memory);
    map->mean = memory;
    memory = pack_panels(mean, width, 1, 1, 0, 1.0, 1, map->padded, memory);
    map->shift = memory;
    for (Index r = 0; r < rank; r++) memory[r] = shift[r];
}

/* Queue of cache lines of erased rows that are still to be written by non-temporal stores. */
typedef struct {
    const char *from;
    char *line;
    Index lines;
} Waiting;

INLINE void write_line(Waiting *waiting) {
    stream_line(waiting->line, waiting->from);
    waiting->line += LINE, waiting->from += LINE, waiting->lines--;
}

static void write_lines(Waiting *waiting) {
    while (waiting->lines > 0) write_line(waiting);
}

/* Begins to copy `size` bytes to `place`: copies the partial cache lines at both ends, and returns
   the queue of the full cache lines between them. */
static Waiting lines_of(const char *from, Index size, char *place) {
    Index head = smaller((Index)(-(uintptr_t)place % LINE), size), tail = (size - head) % LINE;
    memcpy(place, from, (size_t)head);
    memcpy(place + size - tail, from + size - tail, (size_t)tail);
    return (Waiting){from + head, place + head, (size - head) / LINE};
}

/* Returns the index of the first of n rows with a finite number that overflows float16; NO_ROW if
   no row has one. */
static Index lost_row(const float *rows, Index n, Index width) {
    Index whole = width - width % FLOATS;
    for (Index i = 0; i < n; i++, rows += width) {
        FBits lost = bits_of_f32(all_f32(0.0f));
        for (Index j = 0; j < whole; j += FLOATS) lost |= lost_in_halves(get_f32(rows + j));
        for (Index j = whole; j < width; j++) lost |= lost_in_halves(all_f32(rows[j]));
        uint32_t bits[FLOATS], any = 0;
        memcpy(bits, &lost, sizeof(bits));
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
    Index down, below; /* row strides in numbers: `down` of x and y, `below` of out */
    Index ahead;       /* prefetch distance from x in bytes */
} NAME(Place);

/* Processes two registers of columns from column j on, or the last `count` columns, of `rows` rows.
   With `measures`, adds to the sums of the rows x; with `writes`, writes the erased rows y.

   All loads precede the stores, because a load waits for an earlier store if the addresses differ
   by a multiple of 4096. The last columns use registers too, so that products are rounded alike. */
INLINE void NAME(pass_columns)(NAME(Place) at, Index j, Index count, const D *c, D (*sums)[2],
                               int rows, int measures, int writes, int streamed) {
    const int whole = count == COLUMNS;
    D found[2][2];
    UNROLL(2)
    for (int q = 0; q < 2; q++) {
        const Index k = j + q * LANES;
        const Index some = whole ? LANES : smaller(LANES, larger(0, count - q * LANES));
        UNROLL(2)
        for (int p = 0; p < rows; p++) {
            if (measures) {
                D x = NAME(load_some)(at.x + p * at.down + k, some) - get_f64(at.mean + k);
                sums[p][q] = multiply_add_f64(x, get_f64(at.right + k), sums[p][q]);
            }
            if (writes)
                found[p][q] = multiply_add_f64(c[p], get_f64(at.left + k),
                                               NAME(load_some)(at.y + p * at.down + k, some));
        }
    }
    UNROLL(2)
    for (int p = 0; p < rows; p++) {
        for (int k = 0; measures && whole && k < COLUMNS * (int)sizeof(T); k += LINE)
            PREFETCH((const char *)(at.x + p * at.down + j) + at.ahead + k);
        T edge[COLUMNS], *out = at.out + p * at.below + j;
        UNROLL(2)
        for (int q = 0; writes && q < 2; q++) {
            if (whole && streamed)
                STREAM(out + q * LANES, found[p][q]);
            else
                STORE((whole ? out : edge) + q * LANES, found[p][q]);
        }
        if (writes && !whole && streamed)
            stream(out, edge, (int)count * (int)sizeof(T));
        else if (writes && !whole)
            memcpy(out, edge, (size_t)count * sizeof(T));
    }
}

/* Processes all columns. With `writes`, c holds the coefficients of the rows y; with `measures`,
   c is set to the coefficients of the rows x, sums - shift. */
INLINE void NAME(pass_rows)(const Factors *map, NAME(Place) at, double *c, int rows, int measures,
                            int writes, int streamed) {
    const Index width = map->width, whole = width - width % COLUMNS;
    D factors[2], sums[2][2];
    for (int p = 0; p < rows; p++) {
        factors[p] = all_f64(writes ? c[p] : 0.0);
        sums[p][0] = sums[p][1] = all_f64(0.0);
    }
    for (Index j = 0; j < whole; j += COLUMNS)
        NAME(pass_columns)(at, j, COLUMNS, factors, sums, rows, measures, writes, streamed);
    if (whole < width)
        NAME(pass_columns)(at, whole, width - whole, factors, sums, rows, measures, writes,
                           streamed);
    for (int p = 0; p < rows && measures; p++)
        c[p] = sum_of_lanes(sums[p][0] + sums[p][1]) - map->shift[0];
}

/* Erases n rows from `at` on, `rows` rows per pass; n is a multiple of `rows`. A pass stores the
   current rows while it computes the sums of the next rows. */
INLINE void NAME(erase_groups)(const Factors *map, NAME(Place) at, Index n, int rows,
                               int streamed) {
    double c[2];
    if (!n) return;
    NAME(pass_rows)(map, at, c, rows, 1, 0, 0);
    for (; n > rows; n -= rows) {
        at.x += rows * at.down;
        NAME(pass_rows)(map, at, c, rows, 1, 1, streamed);
        at.y = at.x, at.out += rows * at.below;
    }
    NAME(pass_rows)(map, at, c, rows, 0, 1, streamed);
}

INLINE void NAME(erase_by_rows)(const Factors *map, const T *rows, Index down, Index n, T *out,
                                Index below, int streamed) {
    const int together = map->width > SHARED ? 2 : 1;
    const Index first = n - n % together, step = together * down * (Index)sizeof(T);
    NAME(Place) at = {rows, rows, out, map->mean, map->measuring, map->removing, down, below, 0};
    /* The prefetched address differs from the stored address by 2048 modulo 4096. With a difference
       of 0, loads would wait for stores. */
    const Index far = FAR * (Index)sizeof(T);
    const Index apart = (Index)((uintptr_t)rows - (uintptr_t)out) + step + far;
    at.ahead = down == map->width ? far + (2048 - apart) % 4096 : AHEAD * step;
    if (together == 1)
        NAME(erase_groups)(map, at, first, 1, streamed);
    else
        NAME(erase_groups)(map, at, first, 2, streamed);
    at.x = at.y = rows + first * down, at.out = out + first * below;
    NAME(erase_groups)(map, at, n - first, 1, streamed);
}

/* --- other ranks ----------------------------------------------------------------------------- */

/* Computes sums[p][q] = sum_t a[p][t] b[t][q], t < depth, for `height` rows of a and `registers`
   registers of columns of b.

   With `writes`, queued cache lines are written between the steps of the loop over t, on average
   sizeof(T) ROWS bytes per step. */
INLINE void NAME(sum_products)(D (*sums)[2], const double *a, Index down, const double *b, Index depth,
                           int height, int registers, int writes, Waiting *waiting) {
    UNROLL(8)
    for (int p = 0; p < height; p++) {
        UNROLL(2)
        for (int q = 0; q < registers; q++) sums[p][q] = all_f64(0.0);
    }
    for (Index t = 0; t < depth; t++, b += registers * LANES) {
        if (writes && t % (LINE / (Index)(sizeof(T) * ROWS)) == 0 && waiting->lines > 0)
            write_line(waiting);
        D factors[2];
        UNROLL(2)
        for (int q = 0; q < registers; q++) factors[q] = get_f64(b + q * LANES);
        UNROLL(8)
        for (int p = 0; p < height; p++) {
            D number = all_f64(a[p * down + t]);
            UNROLL(2)
            for (int q = 0; q < registers; q++) sums[p][q] += number * factors[q];
        }
    }
}

/* Computes coefficients[p][q] += sum_t centred[p][t] panel[t][q]. */
INLINE void NAME(add_to_coefficients)(const double *centred, const double *panel, Index depth,
                                      double *coefficients, Index room, int height, int registers,
                                      Waiting *waiting) {
    D sums[ROWS][2];
    if (waiting->lines > 0)
        NAME(sum_products)(sums, centred, DEPTH, panel, depth, height, registers, 1, waiting);
    else
        NAME(sum_products)(sums, centred, DEPTH, panel, depth, height, registers, 0, NULL);
    UNROLL(8)
    for (int p = 0; p < height; p++) {
        UNROLL(2)
        for (int q = 0; q < registers; q++) {
            double *place = coefficients + p * room + q * LANES;
            put_f64(place, get_f64(place) + sums[p][q]);
        }
    }
}

/* Computes out[p][q] = x[p][q] + sum_r coefficients[p][r] panel[r][q]. */
INLINE void NAME(write_tile)(const double *coefficients, Index room, const double *panel,
                             Index rank, const T *x, Index down, T *out, Index below, int height) {
    D sums[ROWS][2];
    NAME(sum_products)(sums, coefficients, room, panel, rank, height, 2, 0, NULL);
    UNROLL(8)
    for (int p = 0; p < height; p++) {
        UNROLL(2)
        for (int q = 0; q < 2; q++) sums[p][q] += LOAD(x + p * down + q * LANES);
    }
    UNROLL(8)
    for (int p = 0; p < height; p++) {
        UNROLL(2)
        for (int q = 0; q < 2; q++) STORE(out + p * below + q * LANES, sums[p][q]);
    }
}

/* Computes centred[i][j] = rows[i][first + j] - mean[first + j], j < depth. */
static void NAME(centre_part)(const T *rows, Index down, Index n, const double *mean, Index first,
                         Index depth, double *centred) {
    Index whole = depth - depth % LANES;
    rows += first, mean += first;
    for (Index i = 0; i < n; i++, rows += down, centred += DEPTH) {
        for (Index j = 0; j < whole; j += LANES)
            put_f64(centred + j, LOAD(rows + j) - get_f64(mean + j));
        for (Index j = whole; j < depth; j++) centred[j] = rows[j] - mean[j];
    }
}

/* Computes coefficients = (rows - mean) right^T - shift. A row of `coefficients` has `room`
   numbers, the rank rounded up to full panels. */
INLINE void NAME(measure)(const Factors *map, const T *rows, Index down, Index n, double *centred,
                          double *coefficients, Index room, int registers, Waiting *waiting) {
    for (Index i = 0; i < n; i++)
        for (Index r = 0; r < room; r++)
            coefficients[i * room + r] = r < map->rank ? -map->shift[r] : 0.0;
    Index columns = registers * LANES;
    for (Index first = 0; first < map->width; first += DEPTH) {
        Index depth = smaller(DEPTH, map->width - first);
        NAME(centre_part)(rows, down, n, map->mean, first, depth, centred);
        for (Index r = 0; r < room; r += columns) {
            const double *panel = map->measuring + r * map->padded + first * columns;
            Index i = 0;
            for (; i + ROWS <= n; i += ROWS)
                NAME(add_to_coefficients)(centred + i * DEPTH, panel, depth,
                                          coefficients + i * room + r, room, ROWS, registers,
                                          waiting);
            for (; i < n; i++)
                NAME(add_to_coefficients)(centred + i * DEPTH, panel, depth,
                                          coefficients + i * room + r, room, 1, registers,
                                          waiting);
        }
    }
}

/* Computes out = rows - coefficients left for the last features, which are fewer than COLUMNS. */
static void NAME(remove_rest)(const Factors *map, const T *rows, Index down, Index n,
                              const double *coefficients, Index room, T *out, Index below) {
    Index first = map->width - map->width % COLUMNS, rest = map->width - first;
    for (Index i = 0; i < n && rest > 0; i++) {
        T edge[COLUMNS] = {0};
        for (Index j = 0; j < rest; j++) edge[j] = rows[i * down + first + j];
        NAME(write_tile)(coefficients + i * room, room, map->removing + first * map->rank,
                         map->rank, edge, 0, edge, 0, 1);
        for (Index j = 0; j < rest; j++) out[i * below + first + j] = edge[j];
    }
}

/* Computes out = rows - coefficients left for n rows, and prefetches the next `following` rows. */
static void NAME(remove)(const Factors *map, const T *rows, Index down, Index n, Index following,
                         const double *coefficients, Index room, T *out, Index below) {
    Index rank = map->rank, whole = map->width - map->width % COLUMNS;
    for (Index first = 0; first < whole; first += PANELS * COLUMNS) {
        Index last = smaller(first + PANELS * COLUMNS, whole), i = 0;
        for (; i + ROWS <= n; i += ROWS)
            for (Index j = first; j < last; j += COLUMNS) {
                const T *x = rows + i * down + j;
                for (Index p = 0; p < ROWS && i + p < following; p++)
                    for (Index q = 0; q < COLUMNS; q += LINE / (Index)sizeof(T))
                        PREFETCH(x + (n + p) * down + q);
                NAME(write_tile)(coefficients + i * room, room, map->removing + j * rank, rank, x,
                                 down, out + i * below + j, below, ROWS);
            }
        for (; i < n; i++)
            for (Index j = first; j < last; j += COLUMNS)
                NAME(write_tile)(coefficients + i * room, room, map->removing + j * rank, rank,
                                 rows + i * down + j, 0, out + i * below + j, 0, 1);
    }
    NAME(remove_rest)(map, rows, down, n, coefficients, room, out, below);
}

/* --- copies in C order ----------------------------------------------------------------------- */

/* Returns the address of element (i, j) of a matrix. */
INLINE char *NAME(place)(Matrix matrix, Index i, Index j) {
    return matrix.data + i * matrix.down + j * matrix.across;
}

/* Copies the number at `place` to `copy`; with `back`, copies `copy` to `place`. */
INLINE void NAME(move_one)(char *place, T *copy, int halves, int back) {
    uint16_t half[BYTES / 2] = {0};
    T number[WIDTH] = {0};
    if (!halves && back) {
        *(T *)place = *copy;
    } else if (!halves) {
        *copy = *(const T *)place;
    } else if (back) {
        *number = *copy;
        NAME(write)((char *)half, GET(number), 1);
        *(uint16_t *)place = *half;
    } else {
        *half = *(const uint16_t *)place;
        PUT(number, NAME(read)((const char *)half, 1));
        *copy = *number;
    }
}

/* Copies an (n, width) matrix of any layout to `copy`, which is C-ordered; with `back`, copies
   `copy` to the matrix. If the columns of the matrix are contiguous, tiles are transposed. */
INLINE void NAME(move)(Matrix matrix, Index n, Index width, T *copy, int halves, int back) {
    const Index size = halves ? 2 : (Index)sizeof(T);
    const int tiled = matrix.down == size && matrix.across != size;
    const Index tall = tiled ? n - n % WIDTH : n;
    const Index wide = tiled || matrix.across == size ? width - width % WIDTH : 0;
    for (Index j = 0; tiled && j < wide; j += WIDTH)
        for (Index i = 0; i < tall; i += WIDTH) {
            V tile[WIDTH];
            UNROLL(16)
            for (int q = 0; q < WIDTH; q++)
                tile[q] = back ? GET(copy + (i + q) * width + j)
                               : NAME(read)(NAME(place)(matrix, i, j + q), halves);
            NAME(transpose)(tile);
            UNROLL(16)
            for (int q = 0; q < WIDTH; q++)
                if (back)
                    NAME(write)(NAME(place)(matrix, i, j + q), tile[q], halves);
                else
                    PUT(copy + (i + q) * width + j, tile[q]);
        }
    for (Index i = 0; i < n; i++, copy += width) {
        for (Index j = 0; !tiled && j < wide; j += WIDTH)
            if (back)
                NAME(write)(NAME(place)(matrix, i, j), GET(copy + j), halves);
            else
                PUT(copy + j, NAME(read)(NAME(place)(matrix, i, j), halves));
        for (Index j = i < tall ? wide : 0; j < width; j++)
            NAME(move_one)(NAME(place)(matrix, i, j), copy + j, halves, back);
    }
}

static void NAME(move_rows)(Matrix matrix, Index n, Index width, T *copy, int halves, int back) {
    if (halves && back)
        NAME(move)(matrix, n, width, copy, 1, 1);
    else if (halves)
        NAME(move)(matrix, n, width, copy, 1, 0);
    else if (back)
        NAME(move)(matrix, n, width, copy, 0, 1);
    else
        NAME(move)(matrix, n, width, copy, 0, 0);
}

/* --- entry points ---------------------------------------------------------------------------- */

static Index NAME(erase)(const Erasing *task) {
    const Factors *map = task->map;
    const Index rank = map->rank, width = map->width, n = task->n, size = sizeof(T);
    const int halves = task->halves, by_rows = rank == 1;
    Matrix rows = task->rows, out = task->out;
    /* Contiguous rows are read and written without a copy. */
    const int given = !halves && (rows.across == size || width == 1) && rows.down % size == 0;
    const int written = !halves && (out.across == size || width == 1) && out.down % size == 0;
    const int solid = written && (out.down == width * size || n == 1);
    const int streamed = task->streamed && solid && rows.data != out.data;
    const int apart = !written || (streamed && !(by_rows && ((uintptr_t)out.data |
                                                             (size_t)(width * size)) % STREAMED == 0));
    const Index group = by_rows && given && !apart ? n : smaller(n, BATCH);
    const Index room = by_rows ? 0 : pieces(rank, map->columns) * map->columns;
    if (n == 0) return NO_ROW;

    /* All memory is allocated before the first write, so that a failure leaves `out` unchanged. */
    const Index tiles = by_rows ? 0 : group, copied = group * pieces(width * size, LINE) * LINE;
    const Index bytes = tiles * (DEPTH + room) * (Index)sizeof(double) + (!given + apart) * copied;
    char *memory = bytes ? malloc((size_t)(bytes + 2 * LINE)) : NULL;
    if (bytes && !memory) return NO_MEMORY;
    double *centred = aligned(memory), *coefficients = centred + tiles * DEPTH;
    T *copies = (T *)aligned(coefficients + tiles * room);
    T *results = (T *)((char *)copies + (given ? 0 : copied));

    Waiting waiting = {0};
    Index lost = NO_ROW;
    for (Index first = 0; first < n; first += group) {
        const Index count = smaller(group, n - first);
        const Index following = given ? smaller(group, n - first - count) : 0;
        const Index down = given ? rows.down / size : width;
        const Index below = apart ? width : out.down / size;
        const T *block = given ? (const T *)rows.data : copies;
        T *target = apart ? results : (T *)out.data;
        if (!given) NAME(move_rows)(rows, count, width, copies, halves, 0);
        if (by_rows) {
            write_lines(&waiting);
            if (streamed && !apart)
                NAME(erase_by_rows)(map, block, down, count, target, below, 1);
            else
                NAME(erase_by_rows)(map, block, down, count, target, below, 0);
        } else {
            if (map->columns == LANES)
                NAME(measure)(map, block, down, count, centred, coefficients, room, 1, &waiting);
            else
                NAME(measure)(map, block, down, count, centred, coefficients, room, 2, &waiting);
            write_lines(&waiting);
            NAME(remove)(map, block, down, count, following, coefficients, room, target, below);
        }
        if (halves && lost == NO_ROW) {
            lost = lost_row((const float *)target, count, width);
            if (lost != NO_ROW) lost += first;
        }
        if (!written)
            NAME(move_rows)(out, count, width, target, halves, 1);
        else if (apart)
            waiting = lines_of((const char *)target, count * width * size, out.data);
        rows.data += count * rows.down, out.data += count * out.down;
    }
    if (streamed) {
        write_lines(&waiting);
        settle();
    }
    free(memory);
    return lost;
}

/* Returns whether the sum of squares of every row is below 1e298, which is false for NaN. Each row
   is contiguous. The bound leaves a margin for sums over many rows. */
static int NAME(squares_finite)(Matrix rows, Index n, Index width) {
    const Index whole = width - width % (4 * LANES);
    for (Index i = 0; i < n; i++, rows.data += rows.down) {
        const T *x = (const T *)rows.data;
        D sums[4] = {all_f64(0.0), all_f64(0.0), all_f64(0.0), all_f64(0.0)};
        for (Index j = 0; j < whole; j += 4 * LANES) {
            UNROLL(4)
            for (int q = 0; q < 4; q++) {
                D number = LOAD(x + j + q * LANES);
                sums[q] += number * number;
            }
        }
        double total = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
        for (Index j = whole; j < width; j++) total += (double)x[j] * x[j];
        if (!(total < 1e298)) return 0;
    }
    return 1;
}
