/* Comparison of the row kernels of every level with naive loops in double precision.

   Tolerances are bounds on rounding errors, operations * epsilon * sum of |terms|, taken from the
   arguments alone. Every array has exactly the numbers that its kernel may touch, so that
   AddressSanitizer reports any other access. Build and run: `check_kernels.sh`. */

#include "kernels.h"

#include <float.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof(*(array))))
#define EPS DBL_EPSILON
#define MAX_ARRAYS 256
#define MAX_SECONDS 600 /* of the whole program: a deadlock fails too */

enum { F32, F64, F16 };
static const char *const dtype_name[] = {"float32", "float64", "float16"};
static const Index size_of[] = {4, 8, 2};
static const double epsilon[] = {FLT_EPSILON, DBL_EPSILON, 0x1p-10};

/* --- mismatches, random numbers, memory ------------------------------------------------------ */

static struct {
    const char *level, *kernel;
    int dtype;
    char sizes[200];
    long comparisons;
} current;

__attribute__((format(printf, 3, 4))) static void begin(const char *kernel, int dtype,
                                                        const char *format, ...) {
    va_list values;
    va_start(values, format);
    current.kernel = kernel;
    current.dtype = dtype;
    vsnprintf(current.sizes, sizeof(current.sizes), format, values);
    va_end(values);
}

__attribute__((format(printf, 1, 2), noreturn)) static void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "%s: %s, %s, %s: ", current.level, current.kernel, dtype_name[current.dtype],
            current.sizes);
    vfprintf(stderr, format, values);
    fprintf(stderr, "\n");
    exit(1);
}

static void check_near(const char *name, Index k, double actual, double expected, double slack) {
    current.comparisons++;
    if (!(fabs(actual - expected) <= slack))
        fail("%s[%td] is %.17g, expected %.17g +- %.3g", name, k, actual, expected, slack);
}

static void check_equal(const char *name, Index k, Index actual, Index expected) {
    current.comparisons++;
    if (actual != expected) fail("%s[%td] is %td, expected %td", name, k, actual, expected);
}

static void check_bits(const char *name, const void *actual, const void *expected, Index bytes) {
    current.comparisons++;
    if (memcmp(actual, expected, (size_t)bytes)) fail("bits of %s differ", name);
}

static uint64_t state;

static uint64_t splitmix(void) {
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

static Index pick(Index low, Index high) {
    return low + (Index)(splitmix() % (uint64_t)(high - low + 1));
}

static double uniform(double low, double high) {
    return low + (high - low) * (double)(splitmix() >> 11) * 0x1p-53;
}

static void *bases[MAX_ARRAYS];
static int arrays;

/* `count` numbers, all bits set: NaN, or -1. Every other array begins beside a cache line. */
static void *array_of(Index count, Index size) {
    const Index skip = pick(0, 1) * size;
    void *base = NULL;
    if (arrays == MAX_ARRAYS || posix_memalign(&base, LINE, (size_t)(count * size + skip)))
        fail("no memory");
    memset(base, 0xFF, (size_t)(count * size + skip));
    bases[arrays++] = base;
    return (char *)base + skip;
}
#define NEW(T, count) ((T *)array_of(count, sizeof(T)))

static void release(void) {
    while (arrays > 0) free(bases[--arrays]);
}

static double *random_array(Index count, double low, double high) {
    double *numbers = NEW(double, count);
    for (Index k = 0; k < count; k++) numbers[k] = uniform(low, high);
    return numbers;
}

static double value_of_half(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    double size = ldexp(exponent ? fraction + 1024 : fraction, (exponent ? exponent : 1) - 25);
    if (exponent == 31) size = fraction ? NAN : INFINITY;
    return half >> 15 ? -size : size;
}

/* Rounding to float16, to nearest, ties to even. */
static uint16_t half_of(double x) {
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    int exponent;
    if (isnan(x)) return 0x7E00;
    if (fabs(x) >= 65520) return sign | 0x7C00;
    frexp(x, &exponent);
    const int ulp = x != 0 && exponent > -13 ? exponent - 11 : -24;
    return sign | (uint16_t)((ulp + 24) * 1024 + (int)nearbyint(ldexp(fabs(x), -ulp)));
}

static double get(const void *at, int dtype) {
    return dtype == F32 ? *(const float *)at : dtype == F64 ? *(const double *)at
                                                            : value_of_half(*(const uint16_t *)at);
}

static void set(void *at, int dtype, double x) {
    if (dtype == F32)
        *(float *)at = (float)x;
    else if (dtype == F64)
        *(double *)at = x;
    else
        *(uint16_t *)at = half_of(x);
}

/* --- threads --------------------------------------------------------------------------------- */

typedef struct {
    const Level *level;
    int dtype;
    const Block *block; /* and its Gram, or block sums and their counter */
    const Gram *gram;
    const BlockSums *block_sums;
    _Atomic(int64_t) *next;
    pthread_barrier_t start;
} Call;

static void *call_kernel(void *argument) {
    Call *s = argument;
    pthread_barrier_wait(&s->start);
    if (s->block_sums) {
        s->level->sum_block[s->dtype](s->block_sums, s->next);
        return NULL;
    }
    double *cell_sum = malloc((size_t)s->block->width * sizeof(double));
    if (!cell_sum) abort();
    s->level->reduce_chunks[s->dtype](s->block, s->gram, cell_sum);
    free(cell_sum);
    return NULL;
}

static void call_in_threads(Call *s, int threads) {
    pthread_t others[8];
    pthread_barrier_init(&s->start, NULL, (unsigned)threads);
    for (int k = 1; k < threads; k++)
        if (pthread_create(&others[k], NULL, call_kernel, s)) fail("no thread");
    call_kernel(s);
    for (int k = 1; k < threads; k++) pthread_join(others[k], NULL);
    pthread_barrier_destroy(&s->start);
}

static Phase watched;
static int last_task_done;

static void *finish_late(void *unused) {
    const struct timespec nap = {0, 5000000};
    for (int task = 0; task < 3; task++) {
        nanosleep(&nap, NULL);
        last_task_done = task == 2;
        atomic_fetch_add(&watched.finished, 1);
    }
    return unused;
}

static void check_wait_for(void) {
    pthread_t other;
    begin("wait_for", F64, "3 tasks");
    memset(&watched, 0, sizeof(watched));
    wait_for(&watched, 0);
    if (pthread_create(&other, NULL, finish_late, NULL)) fail("no thread");
    wait_for(&watched, 3);
    check_equal("last task done", 0, last_task_done, 1);
    wait_for(&watched, 2);
    pthread_join(other, NULL);
}

/* --- labelled rows --------------------------------------------------------------------------- */

/* Order of rows a and b of one part: by the last code first, then by their number. */
static int comes_before(const Index *codes, Index variables, Index n, Index a, Index b) {
    for (Index v = variables - 1; v >= 0; v--)
        if (codes[v * n + a] != codes[v * n + b]) return codes[v * n + a] < codes[v * n + b];
    return a < b;
}

static void check_sort(Index n, Index variables, Index n_codes, Index part) {
    Index *codes = NEW(Index, variables * n), *order = NEW(Index, n), *cell = NEW(Index, n);
    Index *positions = NEW(Index, n_codes + 2);
    Index *expected = NEW(Index, n), number = -1;
    begin("sort_by_cell", F64, "n %td, variables %td, n_codes %td, part_rows %td", n, variables,
          n_codes, part);
    for (Index k = 0; k < variables * n; k++)
        codes[k] = pick(-1, (pick(0, 1) ? n_codes : n_codes / 9) - 1);
    sort_by_cell(codes, variables, n, n_codes, part, order, cell, positions);
    for (Index i = 0, k; i < n; i++) { /* insertion into the rows of the part so far */
        for (k = i; k > i / part * part; k--) {
            if (!comes_before(codes, variables, n, i, expected[k - 1])) break;
            expected[k] = expected[k - 1];
        }
        expected[k] = i;
    }
    for (Index i = 0; i < n; i++) {
        int differs = i % part == 0;
        for (Index v = 0; v < variables && !differs; v++)
            differs = codes[v * n + expected[i]] != codes[v * n + expected[i - 1]];
        number += differs;
        check_equal("order", i, order[i], expected[i]);
        check_equal("cell", i, cell[i], number);
    }
    release();
}

/* A random block of rows with labels, and y = rows - shift. */
typedef struct {
    int dtype;
    Index n, width, variables, classes, columns, part;
    char *rows;
    Index *index, *codes, *order, *cell;
    double *weight, *shift, *values, *y, *rotations;
    Index n_rotations;
    char sizes[128];
} Data;

static double number_of(const Data *d, Index i, Index j) {
    const Index row = d->index ? d->index[i] : i;
    return get(d->rows + (row * d->width + j) * size_of[d->dtype], d->dtype);
}

static Data random_data(int dtype, Index n, Index width, Index part) {
    Data d = {.dtype = dtype, .n = n, .width = width, .part = part};
    const Index m = pick(0, 1) ? n + pick(0, 5) : n;
    const double centre = pick(0, 1) ? 10 : 0;
    d.variables = pick(0, 3), d.classes = pick(0, 1) ? pick(1, 3) : 20, d.columns = pick(0, 2);
    d.rows = array_of(m * width, size_of[dtype]);
    for (Index k = 0; k < m * width; k++)
        set(d.rows + k * size_of[dtype], dtype, centre + uniform(-2, 2));
    if (m > n || pick(0, 1)) {
        d.index = NEW(Index, n);
        for (Index i = 0; i < n; i++) d.index[i] = pick(0, m - 1);
    }
    d.weight = pick(0, 1) ? random_array(n, 0.1, 3) : NULL;
    d.shift = random_array(width, centre - 1, centre + 1);
    d.codes = NEW(Index, d.variables * n);
    for (Index k = 0; k < d.variables * n; k++) d.codes[k] = pick(-1, d.classes - 1);
    d.order = NEW(Index, n), d.cell = NEW(Index, n);
    Index *positions = NEW(Index, d.classes + 2);
    sort_by_cell(d.codes, d.variables, n, d.classes, part, d.order, d.cell, positions);
    d.values = random_array(d.columns * n, -2, 2);
    d.y = NEW(double, n * width);
    for (Index i = 0; i < n; i++)
        for (Index j = 0; j < width; j++) d.y[i * width + j] = number_of(&d, i, j) - d.shift[j];
    d.n_rotations = pick(1, 5);
    d.rotations = NEW(double, 2 * d.n_rotations);
    for (Index t = 0; t < d.n_rotations; t++) {
        const double angle = uniform(-4, 4);
        d.rotations[2 * t] = cos(angle), d.rotations[2 * t + 1] = sin(angle);
    }
    snprintf(d.sizes, sizeof(d.sizes), "n %td, width %td, part %td, variables %td, classes %td, "
             "columns %td, index %d, weight %d", n, width, part, d.variables, d.classes, d.columns,
             !!d.index, !!d.weight);
    return d;
}

/* found_j = sum_i factor_i y_ij, or factor_i y_ij^2, over rows first..last. */
static void check_sums(const char *name, const double *actual, const Data *d, Index first,
                       Index last, const double *factor, int squared) {
    for (Index j = 0; j < d->width; j++) {
        double sum = 0, size = 0;
        for (Index i = first; i < last; i++) {
            const double y = d->y[i * d->width + j];
            sum += factor[i] * (squared ? y * y : y);
            size += fabs(factor[i]) * (squared ? y * y : fabs(y));
        }
        check_near(name, j, actual[j], sum, (double)(2 * (last - first) + 32) * EPS * size);
    }
}

static void check_labelled(const Data *d, Index first, Index last, const double *sums) {
    const double *const class_sums = sums + CLASS_ROWS * d->width;
    const double *const products = class_sums + d->classes * d->width;
    double *factor = NEW(double, d->n);
    for (Index i = 0; i < d->n; i++) factor[i] = d->weight ? d->weight[i] : 1;
    check_sums("total", sums + TOTAL_ROW * d->width, d, first, last, factor, 0);
    for (Index c = 0; c < d->classes; c++) {
        for (Index i = 0; i < d->n; i++) {
            factor[i] = 0;
            for (Index v = 0; v < d->variables; v++)
                if (d->codes[v * d->n + i] == c) factor[i] += d->weight ? d->weight[i] : 1;
        }
        check_sums("class_sums", class_sums + c * d->width, d, first, last, factor, 0);
    }
    for (Index q = 0; q < d->columns; q++)
        check_sums("products", products + q * d->width, d, first, last, d->values + q * d->n, 0);
}

/* --- moments --------------------------------------------------------------------------------- */

/* Its peaks would exceed those of its rows, were they not overwritten. */
static Block block_of(const Data *d) {
    return (Block){d->rows, d->width, d->n, d->index, d->weight, d->shift, d->codes,
                   d->order, d->cell, d->variables, d->classes, d->part, d->values, d->columns,
                   d->rotations, d->n_rotations,
                   random_array((CLASS_ROWS + d->classes + d->columns) * d->width, 1e3, 1e4)};
}

static void check_same_sums(const Block *a, const Block *b) {
    const Index n_sums = CLASS_ROWS + a->classes + a->columns;
    check_bits("sums", a->sums, b->sums, n_sums * a->width * (Index)sizeof(double));
}

/* Rows times the roots of their weights, rotated in pairs, and the sums of |terms|. */
static void rotate_rows(const Data *d, Index padded, double *rotated, double *terms) {
    for (Index i = 0; i < padded; i++)
        for (Index j = 0; j < d->width; j++) {
            const Index h = i ^ 1;
            const double *angle = d->rotations + i / 2 % d->n_rotations * 2;
            double own = i < d->n ? angle[0] * d->y[i * d->width + j] : 0;
            double other = h < d->n ? angle[1] * d->y[h * d->width + j] : 0;
            if (d->weight && i < d->n) own *= sqrt(d->weight[i]);
            if (d->weight && h < d->n) other *= sqrt(d->weight[h]);
            rotated[i * d->width + j] = i % 2 ? own - other : own + other;
            terms[i * d->width + j] = fabs(own) + fabs(other);
        }
}

static void check_centred(const Level *level, const Data *d, const Block *expected, Index padded,
                          const double *rotated, const double *terms) {
    const Index n = d->n, width = d->width, size = size_of[d->dtype], cut = pick(0, width);
    const Block striped = block_of(d);
    char *out = array_of(padded * width, size), *same = array_of(padded * width, size);
    double *cell_sum = NEW(double, width);
    begin("centre_columns", d->dtype, "%s, rotations %td, stripes 0 %td", d->sizes, d->n_rotations,
          cut);
    level->centre_columns[d->dtype](expected, out, 0, width, cell_sum);
    for (Index j = 0; j < width; j++) {
        double peak = 0;
        for (Index i = 0; i < n; i++) peak = fmax(peak, fabs(d->y[i * width + j]));
        check_near("peak", j, expected->sums[PEAK_ROW * width + j], peak, 0);
    }
    for (Index k = 0; k < padded * width; k++)
        check_near("out", k, get(out + k * size, d->dtype), rotated[k],
                   8 * (EPS + epsilon[d->dtype]) * terms[k]);
    check_labelled(d, 0, n, expected->sums);
    level->centre_columns[d->dtype](&striped, same, 0, cut, cell_sum);
    level->centre_columns[d->dtype](&striped, same, cut, width, cell_sum);
    check_same_sums(&striped, expected);
    check_bits("out", same, out, padded * width * size);
}

static void check_reduced(const Level *level, const Data *d, const Block *expected, Index padded,
                          const double *rotated, const double *terms) {
    const Index n = d->n, width = d->width, size = size_of[d->dtype];
    const Index lanes = level->width[d->dtype], n_panels = (width + lanes - 1) / lanes;
    const Index chunk = GROUP * pick(1, 10), chunks = (n + chunk - 1) / chunk;
    const Index stripe = lanes * pick(1, 3), panel_stride = chunk * lanes + pick(0, 1) * 5;
    const Index product_stride = n_panels * lanes, bytes = product_stride * product_stride * size;
    char *products[4];
    for (int threads = 1; threads <= 3; threads++) {
        const Block block = block_of(d);
        void *const even = array_of(n_panels * panel_stride, size);
        void *const odd = array_of(n_panels * panel_stride, size);
        void *const product = array_of(product_stride * product_stride, size);
        Gram gram = {{even, odd}, n_panels, panel_stride, chunk, stripe, product,
                     NEW(Phase, chunks + 1)};
        Call call = {.level = level, .dtype = d->dtype, .block = &block, .gram = &gram};
        begin("reduce_chunks", d->dtype, "%s, chunk %td, stripe %td, panel_stride %td, threads %d",
              d->sizes, chunk, stripe, panel_stride, threads);
        products[threads] = gram.product;
        memset(gram.phases, 0, (size_t)(chunks + 1) * sizeof(Phase));
        call_in_threads(&call, threads);
        check_same_sums(&block, expected);
        check_bits("product", products[threads], products[1], bytes);
    }
    for (Index j = 0; j < width; j++)
        for (Index i = j; i < width; i++) {
            double sum = 0, magnitude = 0;
            for (Index k = 0; k < padded * width; k += width) {
                sum += rotated[k + i] * rotated[k + j];
                magnitude += terms[k + i] * terms[k + j];
            }
            const Index at = j * product_stride + i;
            check_near("product", at, get(products[1] + at * size, d->dtype), sum,
                       (double)(2 * n + 32) * (EPS + epsilon[d->dtype]) * magnitude);
        }
}

static void check_blocks(const Level *level, int dtype, Index n, Index width) {
    const Data d = random_data(dtype, n, width, GROUP * (pick(0, 1) ? pick(1, 4) : 32));
    const Index padded = (n + GROUP - 1) / GROUP * GROUP;
    double *rotated = NEW(double, padded * width), *terms = NEW(double, padded * width);
    const Block block = block_of(&d);
    rotate_rows(&d, padded, rotated, terms);
    check_centred(level, &d, &block, padded, rotated, terms);
    check_reduced(level, &d, &block, padded, rotated, terms);
    release();
}

/* Mean and squares of every stride-th row; the first column is constant. */
static void check_sample(const Level *level, int dtype, Index n, Index width) {
    const Data d = random_data(dtype, n, width, GROUP);
    const Index stride = pick(1, n + 1);
    for (Index i = 0; i < n; i++)
        set(d.rows + (d.index ? d.index[i] : i) * width * size_of[dtype], dtype, 0.1);
    const Block block = block_of(&d);
    double *sample_mean = NEW(double, width), *sample_squares = NEW(double, width);
    begin("sample_columns", dtype, "%s, stride %td", d.sizes, stride);
    level->sample_columns[dtype](&block, stride, sample_mean, sample_squares);
    for (Index j = 0; j < width; j++) {
        const double origin = number_of(&d, 0, j);
        double weight_sum = 0, sum = 0, squares = 0, largest = 0;
        for (Index i = 0; i < n; i += stride) {
            const double w = d.weight ? d.weight[i] : 1, y = number_of(&d, i, j) - origin;
            weight_sum += w, sum += w * y, largest = fmax(largest, fabs(y));
        }
        for (Index i = 0; i < n; i += stride) {
            const double w = d.weight ? d.weight[i] : 1, y = number_of(&d, i, j) - origin;
            squares += w * (y - sum / weight_sum) * (y - sum / weight_sum);
        }
        const double slack = 4 * (double)(n / stride + 9) * EPS * largest;
        const double mean = origin + sum / weight_sum;
        check_near("mean", j, sample_mean[j], mean, j ? slack + EPS * fabs(mean) : 0);
        check_near("squares", j, sample_squares[j], squares, slack * weight_sum * largest);
    }
    release();
}

static void check_add_lower(const Level *level, int dtype, Index width, Index product_stride,
                            int has_product) {
    const Index size = size_of[dtype], half = (width + 1) / 2, cut = pick(0, half);
    double *scatter = random_array(width * width, -2, 2), *before = NEW(double, width * width);
    const double *vectors = random_array(2 * width, -2, 2), *by = random_array(2, -2, 2);
    const double sign = pick(0, 1) ? 1 : -1;
    char *product = array_of(product_stride * product_stride, size);
    for (Index k = 0; k < product_stride * product_stride; k++)
        set(product + k * size, dtype, uniform(-2, 2));
    memcpy(before, scatter, (size_t)(width * width) * sizeof(double));
    begin("add_lower", dtype, "width %td, product_stride %td, product %d, ranges 0 %td %td", width,
          product_stride, has_product, cut, half);
    for (int part = 0; part < 2; part++)
        level->add_lower[dtype](scatter, width, has_product ? product : NULL, product_stride, sign,
                                vectors, by, part ? cut : 0, part ? half : cut);
    for (Index j = 0; j < width; j++)
        for (Index i = 0; i < width; i++) {
            const double x =
                has_product ? sign * get(product + (j * product_stride + i) * size, dtype) : 0;
            const double a = by[0] * vectors[i] * vectors[j], old = before[j * width + i];
            const double b = by[1] * vectors[width + i] * vectors[width + j];
            const double slack = 8 * EPS * (fabs(old) + fabs(x) + fabs(a) + fabs(b));
            check_near("scatter", j * width + i, scatter[j * width + i],
                       i < j ? old : old + x + a + b, i < j ? 0 : slack);
        }
    release();
}

/* --- erase ----------------------------------------------------------------------------------- */

enum { BY_ROWS, BY_COLUMNS, PART_OF_ROWS, PART_OF_COLUMNS, BACKWARDS, LAYOUTS };

/* A matrix in a layout, and the `count` numbers of memory around it. */
typedef struct {
    Matrix matrix;
    char *begin;
    Index n, width, count;
    int dtype;
} Table;

static Table table_of(int dtype, Index n, Index width, int layout) {
    const Index column_strides[] = {1, n, 1, n + 5, -3};
    const Index row_strides[] = {width, 1, width + 3, 1, -6 * width - 1};
    const Index size = size_of[dtype], before = layout == BY_ROWS ? pick(0, 16) : 0;
    const Index extent =
        (n - 1) * labs(row_strides[layout]) + (width - 1) * labs(column_strides[layout]);
    Table t = {{NULL, row_strides[layout] * size, column_strides[layout] * size}, NULL, n, width,
               before + extent + 1, dtype};
    t.begin = array_of(t.count, size);
    t.matrix.data = t.begin + (before + (layout == BACKWARDS ? extent : 0)) * size;
    return t;
}

static char *element(const Table *t, Index i, Index j) {
    return t->matrix.data + i * t->matrix.row_stride + j * t->matrix.column_stride;
}

/* The numbers of `expected` in its rows, and all other memory as `table_of` left it. */
static void check_table(const Table *actual, const Table *expected) {
    const Index size = size_of[actual->dtype];
    char *copy = NEW(char, actual->count * size);
    memset(copy, 0xFF, (size_t)(actual->count * size));
    for (Index i = 0; i < actual->n; i++)
        for (Index j = 0; j < actual->width; j++)
            memcpy(copy + (element(actual, i, j) - actual->begin), element(expected, i, j),
                   (size_t)size);
    check_bits("out, or numbers beside it,", actual->begin, copy, actual->count * size);
}

static Table copy_of(const Table *from, int layout) {
    const Table to = table_of(from->dtype, from->n, from->width, layout);
    for (Index i = 0; i < from->n; i++)
        for (Index j = 0; j < from->width; j++)
            memcpy(element(&to, i, j), element(from, i, j), (size_t)size_of[from->dtype]);
    return to;
}

static Factors packed(const Level *level, Index rank, Index width, const double *left,
                      const double *right, const double *mean, const double *shift) {
    Factors map = {.rank = rank, .width = width};
    double *memory = NEW(double, level->factors_size(rank, width));
    level->pack_factors(&map, left, right, mean, shift, memory);
    return map;
}

static void erase(const Level *level, const Factors *map, const Table *rows, const Table *out,
                  Index n, int streamed, Index overflow_row) {
    const int is_float16 = rows->dtype == F16;
    const Index found = level->erase[rows->dtype == F64](map, rows->matrix, out->matrix, n,
                                                         is_float16, streamed);
    check_equal("row that overflows float16", 0, found, overflow_row);
}

static void check_erase(const Level *level, int dtype, Index rank, Index n, Index width) {
    double *left = random_array(rank * width, -2, 2), *mean = random_array(width, -1, 1);
    double *right = random_array(rank * width, -2 / sqrt((double)width), 2 / sqrt((double)width));
    double *shift = random_array(rank, -1, 1);
    const Factors map = packed(level, rank, width, left, right, mean, shift);
    const Table rows = table_of(dtype, n, width, BY_ROWS), out = table_of(dtype, n, width, BY_ROWS);
    begin("erase", dtype, "rank %td, n %td, width %td", rank, n, width);
    for (Index k = 0; k < n * width; k++)
        set(rows.matrix.data + k * size_of[dtype], dtype, 1 + uniform(-2, 2));
    erase(level, &map, &rows, &out, n, 0, NO_ROW);
    double *sums = NEW(double, rank), *sizes = NEW(double, rank);
    for (Index i = 0; i < n; i++) {
        for (Index r = 0; r < rank; r++) {
            sums[r] = -shift[r], sizes[r] = fabs(shift[r]);
            for (Index j = 0; j < width; j++) {
                const double y = get(element(&rows, i, j), dtype) - mean[j];
                sums[r] += right[r * width + j] * y;
                sizes[r] += fabs(right[r * width + j] * y);
            }
        }
        for (Index j = 0; j < width; j++) {
            double x = get(element(&rows, i, j), dtype), size = fabs(x);
            for (Index r = 0; r < rank; r++) {
                x -= left[r * width + j] * sums[r];
                size += fabs(left[r * width + j]) * sizes[r];
            }
            /* float16: rounded by way of float32; 2^-24 is its least number. */
            check_near("out", i * width + j, get(element(&out, i, j), dtype), x,
                       (double)(width + rank + 8) * EPS * size +
                           (dtype == F64 ? 0 : 0.51 * epsilon[dtype] * fabs(x)) +
                           (dtype == F16 ? 0.51 * 0x1p-24 : 0));
        }
    }

    const Table alone = table_of(dtype, n, width, BY_ROWS);
    for (Index i = 0; i < n; i++) {
        Table row = rows, to = alone;
        row.matrix.data = element(&rows, i, 0), to.matrix.data = element(&alone, i, 0);
        erase(level, &map, &row, &to, 1, (int)pick(0, 1), NO_ROW);
    }
    check_table(&alone, &out);
    for (int trial = 0; trial < 6; trial++) {
        const int from = trial ? (int)pick(0, LAYOUTS - 1) : BY_ROWS, streamed = trial % 2 == 0;
        const int into = trial ? (int)pick(0, LAYOUTS - 1) : BY_ROWS, in_place = trial > 3;
        const Table source = copy_of(&rows, from), before = source;
        const Table to = in_place ? source : table_of(dtype, n, width, into);
        begin("erase", dtype, "rank %td, n %td, width %td, layouts %d to %d, in place %d, "
              "streamed %d", rank, n, width, from, into, in_place, streamed);
        erase(level, &map, &source, &to, n, streamed, NO_ROW);
        check_table(&to, &out);
        if (!in_place) check_table(&before, &rows);
    }
    release();
}

/* All halves, which rank 0 leaves as they are; ties between halves and numbers near them, which
   rank 1 or 2 makes of zeros; and the limit of float16, in few columns. */
static void check_halves(const Level *level, Index rank, Index width) {
    double *mean = random_array(width, 0, 0), *right = random_array(rank * width, 0, 0);
    double *left = random_array(rank * width, 0, 0), *shift = random_array(rank, -1, -1);
    const Table rows = table_of(F16, 1, width, BY_ROWS), out = table_of(F16, 1, width, BY_ROWS);
    int overflow = 0;
    begin("erase", F16, "rounding, rank %td, width %td", rank, width);
    for (Index j = 0; j < width; j++) {
        *(uint16_t *)element(&rows, 0, j) = rank ? 0 : (uint16_t)j;
        if (!rank) continue;
        const uint16_t half = (uint16_t)pick(0, 0x7BFF), next = (uint16_t)(half + 1);
        const double upper = next == 0x7C00 ? 65536 : value_of_half(next);
        const double tie = (value_of_half(half) + upper) / 2 * (pick(0, 1) ? 1 : -1);
        left[j] = pick(0, 1) ? tie : (double)(float)(tie * uniform(0.9, 1.1));
        if (j % 5 == 4) left[j] = j % 2 ? nextafterf((float)tie, 0) : nextafterf((float)tie, 1e9f);
        if (width < 40) left[j] = width % 2 ? 65520 : nextafterf(65520, 0);
        overflow |= fabs(left[j]) >= 65520;
    }
    const Factors map = packed(level, rank, width, left, right, mean, shift);
    erase(level, &map, &rows, &out, 1, 0, overflow ? 0 : NO_ROW);
    for (Index j = 0; j < width; j++) {
        const double actual = get(element(&out, 0, j), F16);
        const double exact = rank ? -left[j] : value_of_half((uint16_t)j);
        const double expected = value_of_half(half_of(exact));
        if (isfinite(expected))
            check_near("half", j, actual, expected, 0);
        else
            check_equal("NaN or infinity", j,
                        isnan(expected) ? !!isnan(actual) : actual == expected, 1);
    }
    release();
}

/* The map x -> 2 x of rank 1 (or 2, with a zero direction): 60000 overflows, infinity does not. */
static void check_overflow_row(const Level *level, Index rank, Index width, int layout) {
    double *mean = random_array(width, 0, 0), *shift = random_array(rank, 0, 0);
    double *right = random_array(rank * width, 0, 0), *left = random_array(rank * width, 0, 0);
    for (Index j = 0; j < width; j++) left[j] = -1, right[j] = 1 / (double)width;
    const Factors map = packed(level, rank, width, left, right, mean, shift);
    const Index n = 75, overflow_rows[] = {40, 60};
    Table rows = table_of(F16, n, width, layout), out = table_of(F16, n, width, BY_ROWS);
    begin("erase", F16, "overflow, rank %td, n %td, width %td, layout %d", rank, n, width, layout);
    for (Index i = 0; i < n; i++)
        for (Index j = 0; j < width; j++)
            set(element(&rows, i, j), F16, i == 3 ? INFINITY : i == 40 || i >= 60 ? 60000 : 1);
    erase(level, &map, &rows, &out, n, 0, overflow_rows[0]);
    for (Index i = 0; i < n; i++)
        check_equal("finite", i, !!isfinite(get(element(&out, i, width - 1), F16)),
                    i != 3 && i != 40 && i < 60);
    erase(level, &map, &rows, &out, 40, 1, NO_ROW);
    rows.matrix.data += 41 * rows.matrix.row_stride;
    erase(level, &map, &rows, &out, n - 41, 0, overflow_rows[1] - 41);
    release();
}

/* Numbers spread over a row, and their sum of squares against 1e298; NaN lies between rows. */
static void check_squares(const Level *level, int dtype, Index n, Index width) {
    static const double numbers[] = {1,    0.99e149, 1.01e149,  -1.01e149, 0.8e149,
                                     NAN,  INFINITY, -INFINITY, -1e300};
    const int finite[] = {1, 1, 0, 0, width == 1, 0, 0, 0, 0}; /* 0.8e149 occurs twice */
    const Table t = table_of(dtype, n, width, pick(0, 1) ? PART_OF_ROWS : BY_ROWS);
    for (int k = 0; k < COUNT(numbers); k++)
        for (int position = 0; position < 3; position++) {
            const double x = numbers[k];
            const Index row = pick(0, n - 1);
            const Index at = position ? position == 1 ? width / 2 : width - 1 : 0;
            if (dtype == F32 && isfinite(x) && fabs(x) > FLT_MAX) continue;
            begin("squares_finite", dtype, "n %td, width %td, %g at (%td, %td)", n, width, x, row,
                  at);
            for (Index i = 0; i < n; i++)
                for (Index j = 0; j < width; j++)
                    set(element(&t, i, j), dtype, dtype == F32 ? FLT_MAX : 1);
            set(element(&t, row, at), dtype, x);
            if (x == 0.8e149) set(element(&t, row, at ? 0 : width - 1), dtype, x);
            int (*const squares_finite)(Matrix, Index, Index) = level->squares_finite[dtype];
            check_equal("finite", 0, squares_finite(t.matrix, n, width), finite[k]);
            check_equal("finite above", 0, squares_finite(t.matrix, row, width), 1);
        }
    release();
}

/* --- block sums ------------------------------------------------------------------------------ */

static void check_block_sums(const Level *level, int dtype, Index n, Index width) {
    const Data d = random_data(dtype, n, width, pick(0, 1) ? pick(1, n) : n);
    const Index task = 16 * pick(1, 6), pitch = width + pick(0, 9);
    const Index segments = (n + d.part - 1) / d.part, n_sums = CLASS_ROWS + d.classes + d.columns;
    const Index numbers = segments * n_sums * width;
    double *factor = NEW(double, n);
    const Block block = block_of(&d);
    BlockSums runs[2];
    begin("sum_block", dtype, "%s, columns of a task %td, pitch %td", d.sizes, task, pitch);
    for (int k = 0; k < 2; k++) {
        _Atomic(int64_t) next = 0;
        runs[k] = (BlockSums){&block, NEW(double, numbers), NEW(double, segments * 3 * pitch),
                              pitch, task};
        Call call = {.level = level, .dtype = dtype, .block_sums = &runs[k], .next = &next};
        call_in_threads(&call, k ? 3 : 1);
    }
    check_bits("sums", runs[1].sums, runs[0].sums, numbers * (Index)sizeof(double));
    for (Index i = 0; i < n; i++) factor[i] = d.weight ? d.weight[i] : 1;
    for (Index g = 0; g < segments; g++) {
        const Index first = g * d.part, last = n - first < d.part ? n : first + d.part;
        const double *sums = runs[0].sums + g * n_sums * width;
        check_sums("squares", sums + SQUARES_ROW * width, &d, first, last, factor, 1);
        check_labelled(&d, first, last, sums);
    }
    release();
}

/* --- the whole ------------------------------------------------------------------------------- */

static void print_grouped(long number) {
    if (number >= 1000) print_grouped(number / 1000);
    printf(number >= 1000 ? ",%03ld" : "%ld", number % 1000);
}

static void report(void) {
    printf("%s: ", current.level);
    print_grouped(current.comparisons);
    printf(" comparisons\n");
    fflush(stdout);
    current.comparisons = 0;
}

static void check_level(const Level *level) {
    static const Index ns[] = {1, 2, 3, 4, 7, 33, 70};
    static const Index widths[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 49, 65, 130};
    static const Index ranks[] = {0, 1, 2, 5, 17};
    for (int dtype = F32; dtype <= F16; dtype++)
        for (int a = 0; a < COUNT(ns); a++)
            for (int b = 0; b < COUNT(widths); b++) {
                const Index n = ns[a], width = widths[b];
                for (int r = 0; r < COUNT(ranks); r++)
                    check_erase(level, dtype, ranks[r], n, width);
                if (dtype == F16) continue;
                check_blocks(level, dtype, n, width);
                check_sample(level, dtype, n, width);
                check_block_sums(level, dtype, n, width);
                check_squares(level, dtype, n, width);
                if (n < 3) check_add_lower(level, dtype, width, width + (n - 1) * pick(1, 9), 1);
                if (n == 3) check_add_lower(level, dtype, width, 0, 0);
            }
    for (int dtype = F32; dtype <= F64; dtype++) { /* several tasks per product, many chunks */
        check_blocks(level, dtype, 203, 100);
        check_blocks(level, dtype, 37, 211);
    }
    for (int dtype = F32; dtype <= F16; dtype++) check_erase(level, dtype, 3, 41, 300);
    check_halves(level, 0, 1 << 16);
    for (Index rank = 1; rank <= 2; rank++) {
        for (Index width = 1; width < 40; width += width % 2 ? 1 : 15)
            check_halves(level, rank, width);
        check_halves(level, rank, 4003);
        for (int layout = 0; layout < LAYOUTS; layout++)
            check_overflow_row(level, rank, 20, layout);
    }
}

int main(void) {
    static const Index sorts[][4] = { /* n, variables, n_codes, part_rows */
        {9, 0, 0, 16},    {1, 1, 1, 1},     {5, 1, 0, 4},      {203, 1, 3, 50},   {203, 2, 15, 64},
        {203, 1, 255, 7}, {203, 1, 256, 7}, {203, 1, 1000, 7}, {203, 3, 12, 203}, {60, 5, 20, 11},
    };
    alarm(MAX_SECONDS);
    current.level = "every level";
    for (int k = 0; k < COUNT(sorts); k++)
        check_sort(sorts[k][0], sorts[k][1], sorts[k][2], sorts[k][3]);
    check_wait_for();
    report();
    for (int k = 0; supported_level(k); k++) {
        state = 1;
        current.level = supported_level(k)->name;
        check_level(supported_level(k));
        report();
    }
    return 0;
}
