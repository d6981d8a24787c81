/* Declarations of the row kernels: compiler macros, argument structs and the function table of an
   instruction set.

   The kernels own no memory, do not call Python and return a status. Each kernel is compiled once
   per instruction set (`level_*.c`) and dtype; the best set is selected at import (`plain.c`). */

#ifndef SPLINCE_KERNELS_H
#define SPLINCE_KERNELS_H

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* SPLINCE_FAST_NO_VECTORS builds without the vector extensions of the compiler. */
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
#define AHEAD 8 /* prefetch distance in rows */
#define GROUP 4 /* number of rows that are summed together */
#define NO_ROW (-1)
#define NO_MEMORY (-2)

typedef ptrdiff_t Index; /* NumPy's intp */

INLINE Index smaller(Index a, Index b) { return a < b ? a : b; }
INLINE Index larger(Index a, Index b) { return a > b ? a : b; }
INLINE Index pieces(Index whole, Index piece) { return (whole + piece - 1) / piece; }

/* A block of rows with labels, and the sums that `centre_columns` (row_kernels.pyx) computes.
   Matrices are C-contiguous. */
typedef struct {
    const void *rows;             /* (m, width): array that contains the rows */
    Index width, n;               /* number of features, number of rows of the block */
    const Index *index;           /* (n,): indices of the rows in the array, or NULL for all */
    const double *weight;         /* (n,) > 0, or NULL for unit weights */
    const double *shift, *offset; /* (width,): rows are x - shift; offset = shift - reference */
    const Index *codes;           /* (variables, n): class codes below `classes`, -1 if missing */
    const Index *order, *cell;    /* (n,): results of `sort_by_cell` for parts of part_rows rows */
    Index variables, classes, part_rows;
    const double *values; /* (columns, n): label columns, multiplied by the weights */
    Index columns;
    const double *rotations; /* (turns, 2): cosines and sines */
    Index turns;
    double *sums; /* (2 + classes + columns, width): output */
} Block;

/* Numbers of begun and finished tasks of a phase; each counter has its own cache line. */
typedef struct {
    _Atomic int64_t begun;
    int64_t apart[7];
    _Atomic int64_t finished;
    int64_t aside[7];
} Phase;

/* Memory for the centred rows of chunks and for the product of these rows. A chunk is stored in
   panels of `lanes` columns, the numbers in a register: column j of row r of a chunk is number
   j / lanes * step + r * lanes + j % lanes of the panels. */
typedef struct {
    void *panels[2];   /* (height, step): panels of even chunks, and of odd chunks */
    Index height;      /* number of panels that contain all columns */
    Index step, chunk; /* numbers per panel; rows per chunk, a multiple of GROUP */
    Index stripe;      /* columns per centring task, a multiple of the lanes */
    /* (height lanes, height lanes): output, Fortran-ordered with a valid lower triangle. */
    void *product;
    Phase *phases; /* (number of chunks + 1): zeros before the first call */
} Gram;

/* Sums of the parts of a block about the shift, and the leverages of the rows. */
typedef struct {
    const Block *block;
    const double *inverse; /* (width,): inverse variances */
    double *sums;          /* (parts, 2 + classes + columns, width): output */
    double *leverage;      /* (width / stripe rounded up, n): output */
    double *near;          /* (parts, 4, pitch): work memory that begins at a cache line */
    Index pitch;
    Index columns; /* columns per task, a multiple of `stripe` */
    Index stripe;  /* columns per partial leverage of a row */
} BlockSums;

/* A matrix in memory; the numbers are aligned. */
typedef struct {
    char *data;
    Index down, across; /* strides in bytes of rows and of columns */
} Matrix;

/* The map x -> x - left^T (right (x - mean) - shift), with packed factors. */
typedef struct {
    Index rank, width;
    const double *measuring;    /* right^T in panels (padded x columns) of `columns` directions */
    const double *removing;     /* -left in panels (rank x features) of two registers of features */
    const double *mean, *shift; /* (padded,), (rank,) */
    Index columns, padded; /* `padded`: width rounded up to two registers, filled with zeros */
} Factors;

typedef struct {
    const Factors *map;
    Matrix rows, out; /* matrices of n rows; may be the same memory */
    Index n;
    int halves;   /* whether the numbers in memory are float16; otherwise the dtype is T */
    int streamed; /* whether to bypass the caches when writing, if possible */
} Erasing;

/* The functions of one instruction set; pairs are for float32 and float64. */
typedef struct {
    const char *name;
    int width[2]; /* numbers in a register */
    int wide;     /* whether products are faster than BLAS: wide registers, fused multiply-add */
    void (*centre_columns[2])(const Block *block, void *out, Index first, Index last, double *held);
    void (*reduce_chunks[2])(const Block *block, const Gram *gram, double *held);
    void (*sample_columns[2])(const Block *block, Index stride, double *shift, double *spread);
    void (*add_lower[2])(double *scatter, Index width, const void *product, Index apart,
                         double sign, const double *vectors, const double *coefficients,
                         Index first, Index last);
    /* `next`, initially 0, counts the tasks that threads share. */
    void (*sum_block[2])(const BlockSums *sums, _Atomic(int64_t) *next);
    /* Size in numbers of the packed factors of a map, and the function that packs the factors. */
    Index (*factors_size)(Index rank, Index width);
    void (*pack_factors)(Factors *map, const double *left, const double *right, const double *mean,
                         const double *shift, double *memory);
    /* Returns the first row with a finite number that overflows float16, NO_ROW or NO_MEMORY. */
    Index (*erase[2])(const Erasing *task);
    int (*squares_finite[2])(Matrix rows, Index n, Index width);
} Level;

extern const Level level_baseline;
#ifdef SPLINCE_X86
extern const Level level_avx2, level_avx512;
#endif

/* Returns the k-th best instruction set that this processor supports; NULL after the last. */
const Level *supported_level(int k);

/* Computes `order` and `cell` of a block; `place` is work memory of n_codes + 2 numbers. */
void sort_by_cell(const Index *codes, Index variables, Index n, Index n_codes, Index part_rows,
                  Index *order, Index *cell, Index *place);

/* Returns when all tasks of a phase are finished. */
void wait_for(Phase *phase, int64_t tasks);

#endif
