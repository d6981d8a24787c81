/* Declarations of the row kernels. They own no memory and do not call Python. Each is compiled once
   per instruction set (`level_*.c`) and dtype; the best set is selected at import (`plain.c`). */

#ifndef SPLINCE_KERNELS_H
#define SPLINCE_KERNELS_H

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* If SPLINCE_FAST_NO_VECTORS is defined, the vector extensions of the compiler are not used. */
#if defined(__GNUC__) && !defined(SPLINCE_FAST_NO_VECTORS)
#define SPLINCE_VECTORS 1
#if defined(__x86_64__)
#define SPLINCE_X86 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define SPLINCE_NEON 1
#include <arm_neon.h>
#endif
#endif

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline, unused))
#define PREFETCH(address) __builtin_prefetch((address), 0, 2)
#define RESTRICT __restrict__
#else
#define INLINE static inline
#define PREFETCH(address) ((void)(address))
#define RESTRICT
#endif
#define PRAGMA(...) _Pragma(#__VA_ARGS__)
#define EXPANDED_PRAGMA(...) PRAGMA(__VA_ARGS__)
#if defined(__clang__)
#define UNROLL(n) PRAGMA(clang loop unroll_count(n))
#elif defined(__GNUC__)
#define UNROLL(n) PRAGMA(GCC unroll n)
#else
#define UNROLL(n)
#endif

#define LINE 64 /* bytes per cache line */
#define PREFETCH_ROWS 8 /* prefetch distance in rows */
#define GROUP 4 /* number of rows that are summed together */
#define NO_ROW (-1)
#define NO_MEMORY (-2)

typedef ptrdiff_t Index; /* NumPy's intp */

INLINE Index minimum(Index a, Index b) { return a < b ? a : b; }
INLINE Index maximum(Index a, Index b) { return a > b ? a : b; }
INLINE Index ceil_div(Index n, Index size) { return (n + size - 1) / size; }

/* Rows of the sums of a block: the weighted total, the largest magnitudes (of `centre_columns`) or
   the weighted squares (of `sum_block`), the classes from CLASS_ROWS on, and the label columns. */
enum { TOTAL_ROW, PEAK_ROW, SQUARES_ROW = PEAK_ROW, CLASS_ROWS };

/* A block of rows with labels, and the sums of `centre_columns`. Matrices are C-contiguous. */
typedef struct {
    const void *rows;             /* (m, width): array that contains the rows */
    Index width, n;               /* number of features, number of rows of the block */
    const Index *index;           /* (n,): indices of the rows in the array, or NULL for all */
    const double *weight;         /* (n,) > 0, or NULL for unit weights */
    const double *shift;          /* (width,): y = x - shift */
    const Index *codes;           /* (variables, n): class codes below `classes`; -1 if missing */
    const Index *order, *cell;    /* (n,): sorted row numbers, and cells, from `sort_by_cell` */
    Index variables, classes, part_rows;
    const double *values; /* (columns, n): label columns, multiplied by the weights */
    Index columns;
    const double *rotations; /* (n_rotations, 2): cosines and sines; each rotates a pair of rows */
    Index n_rotations;
    double *sums; /* (CLASS_ROWS + classes + columns, width): output of `centre_columns` */
} Block;

/* Begun and finished tasks of a phase of `reduce_chunks`, each number in its own cache line. */
typedef struct {
    _Atomic int64_t begun;
    int64_t begun_padding[7];
    _Atomic int64_t finished;
    int64_t finished_padding[7];
} Phase;

/* Memory for the centred rows of two chunks (ranges of rows), and for the product of the rows. A
   panel has `lanes` columns of a chunk, the numbers of a register: element (r, j) of a chunk is
   number j / lanes * panel_stride + r * lanes + j % lanes of its panels. */
typedef struct {
    void *panels[2];    /* (n_panels, panel_stride) each: panels of the even and the odd chunks */
    Index n_panels;     /* number of panels of a chunk */
    Index panel_stride; /* distance between panels, in numbers */
    Index chunk;        /* number of rows of a chunk, a multiple of GROUP */
    Index stripe;       /* columns per centring task, a multiple of `lanes` */
    /* (n_panels * lanes, n_panels * lanes): output, Fortran-ordered with a valid lower triangle. */
    void *product;
    Phase *phases; /* (number of chunks + 1,): zeros before the first call */
} Gram;

/* Arguments of `sum_block`: sums over the parts of a block about the shift. */
typedef struct {
    const Block *block;
    double *sums; /* (parts, CLASS_ROWS + classes + columns, width): output */
    double *work; /* (parts, 3, work_stride): work memory that begins at a cache line */
    Index work_stride;
    Index task_columns; /* columns per task, a multiple of 16 */
} BlockSums;

/* A matrix of any layout; every number is aligned. */
typedef struct {
    char *data;
    Index row_stride, column_stride; /* distances in bytes between rows, and between columns */
} Matrix;

/* The map x -> x - left^T (right (x - mean) - shift), with packed factors. */
typedef struct {
    Index rank, width;
    const double *packed_right; /* right^T in panels (padded_width x panel_columns) of directions */
    const double *packed_left;  /* -left in panels (rank x two registers) of features */
    const double *mean, *shift; /* (padded_width,), (rank,) */
    Index panel_columns;        /* number of directions in a panel of `packed_right` */
    Index padded_width;         /* width, rounded up to two registers */
} Factors;

/* The functions of one instruction set. A pair holds the versions for float32 and float64. */
typedef struct {
    const char *name;
    int width[2]; /* numbers in a register */
    int wide;     /* wide registers and fused multiply-add: `reduce_chunks` is faster than BLAS */
    void (*centre_columns[2])(const Block *block, void *out, Index first, Index last,
                              double *cell_sum);
    void (*reduce_chunks[2])(const Block *block, const Gram *gram, double *cell_sum);
    void (*sample_columns[2])(const Block *block, Index stride, double *mean, double *squares);
    void (*add_lower[2])(double *scatter, Index width, const void *product, Index product_stride,
                         double sign, const double *vectors, const double *coefficients,
                         Index first, Index last);
    /* The calling threads share the tasks; `next`, initially 0, is the number of the next task. */
    void (*sum_block[2])(const BlockSums *sums, _Atomic(int64_t) *next);
    /* `pack_factors` writes `factors_size` numbers to `memory`. */
    Index (*factors_size)(Index rank, Index width);
    void (*pack_factors)(Factors *map, const double *left, const double *right, const double *mean,
                         const double *shift, double *memory);
    /* Writes n erased rows to `out`, which may be the same memory; both are of dtype T or float16.
       With `streamed`, stores bypass the caches where possible. Returns the index of the first row
       with a finite number that overflows float16; NO_ROW; or NO_MEMORY, if nothing was written. */
    Index (*erase[2])(const Factors *map, Matrix rows, Matrix out, Index n, int is_float16,
                      int streamed);
    int (*squares_finite[2])(Matrix rows, Index n, Index width);
} Level;

extern const Level level_baseline;
#ifdef SPLINCE_X86
extern const Level level_avx2, level_avx512;
#endif

/* Returns the k-th best instruction set that this processor supports; NULL after the last. */
const Level *supported_level(int k);

/* Computes `order` and `cell` of a block, for parts of `part_rows` rows; `positions` is work memory
   of n_codes + 2 numbers. */
void sort_by_cell(const Index *codes, Index variables, Index n, Index n_codes, Index part_rows,
                  Index *order, Index *cell, Index *positions);

/* Waits until all tasks of a phase are finished; `tasks` is the number of tasks. */
void wait_for(Phase *phase, int64_t tasks);

#endif
