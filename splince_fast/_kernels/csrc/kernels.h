/* Common declarations of the row kernels: the compiler, the structs of arguments and
   the table of functions of an instruction set.

   The kernels own no memory, call nothing of Python's and return a status. Each is compiled once
   per instruction set (`level_*.c`) and dtype; the best set is chosen at import (`plain.c`). */

#ifndef SPLINCE_KERNELS_H
#define SPLINCE_KERNELS_H

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* SPLINCE_FAST_NO_VECTORS: build as with a compiler that has no vector extensions. */
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

#define LINE 64 /* bytes of a cache line */
#define AHEAD 8 /* rows that are prefetched */
#define GROUP 4 /* rows that are reduced at once */
#define NO_ROW (-1)
#define NO_MEMORY (-2)

typedef ptrdiff_t Index; /* NumPy's intp */

INLINE Index smaller(Index a, Index b) { return a < b ? a : b; }
INLINE Index larger(Index a, Index b) { return a > b ? a : b; }
INLINE Index pieces(Index whole, Index piece) { return (whole + piece - 1) / piece; }

/* A block of rows with labels, and the sums that `centre_columns` (row_kernels.pyx) takes over it.
   Matrices are C-contiguous. */
typedef struct {
    const void *rows;             /* (m, width) */
    Index width, n;
    const Index *index;           /* (n,): rows of the block among them, or NULL for all */
    const double *weight;         /* (n,) > 0, or NULL for unit weights */
    const double *shift, *offset; /* (width,) */
    const Index *codes;           /* (variables, n) below `classes`, -1 for none */
    const Index *order, *cell;    /* (n,): as `sort_by_cell` gives them for these parts */
    Index variables, classes, part_rows;
    const double *values; /* (columns, n), already multiplied by the weights */
    Index columns;
    const double *rotations; /* (turns, 2): cosines and sines */
    Index turns;
    double *sums; /* (2 + classes + columns, width), overwritten */
} Block;

/* Tasks of a phase, in cache lines of their own. */
typedef struct {
    _Atomic int64_t begun;
    int64_t apart[7];
    _Atomic int64_t finished;
    int64_t aside[7];
} Phase;

/* Memory in which chunks of a block are centred and multiplied. Column j of row r of a chunk is
   number j / lanes * step + r * lanes + j % lanes of its panels; a register has `lanes` numbers. */
typedef struct {
    void *panels[2];   /* (height, step): those of even and of odd chunks */
    Index height;      /* panels: enough for all columns */
    Index step, chunk; /* numbers of a panel; rows of a chunk, a multiple of GROUP */
    Index stripe;      /* columns of a task of centring, a multiple of the lanes */
    /* (height lanes, height lanes), read as Fortran-ordered: its lower triangle counts. */
    void *product;
    Phase *phases; /* one more than there are chunks; zeros before the first call */
} Gram;

/* Sums of the parts of a block, without its offset, and the leverages of its rows. */
typedef struct {
    const Block *block;
    const double *inverse; /* (width,) */
    double *sums;          /* (parts, 2 + classes + columns, width) */
    double *leverage;      /* (width / stripe rounded up, n) */
    double *near;          /* (parts, 4, pitch): work memory that begins at a cache line */
    Index pitch;
    Index columns; /* of a task, a multiple of `stripe` */
    Index stripe;  /* columns whose part of a row's leverage is one number */
} BlockSums;

/* A matrix in memory; its numbers lie at multiples of their size. */
typedef struct {
    char *data;
    Index down, across; /* bytes from a row to the next, and from a number to the next */
} Matrix;

/* r(x) = x - left^T (right (x - mean) - shift), with factors as the kernels read them. */
typedef struct {
    Index rank, width;
    const double *measuring;    /* right^T in panels (padded x columns) of `columns` directions */
    const double *removing;     /* -left in panels (rank x features) of two registers of features */
    const double *mean, *shift; /* (padded,), (rank,) */
    Index columns, padded; /* `padded` is the width with zeros behind it, two registers at a time */
} Factors;

typedef struct {
    const Factors *map;
    Matrix rows, out; /* both of n rows; may be the same */
    Index n;
    int halves;   /* the numbers in memory are float16; else T */
    int streamed; /* write past the caches, where that can be */
} Erasing;

/* The functions of one instruction set; pairs are of float32 and float64. */
typedef struct {
    const char *name;
    int width[2]; /* numbers of a register */
    int wide;     /* whether a tile of products beats BLAS: wide registers and fused products */
    void (*centre_columns[2])(const Block *block, void *out, Index first, Index last, double *held);
    void (*reduce_chunks[2])(const Block *block, const Gram *gram, double *held);
    void (*sample_columns[2])(const Block *block, Index stride, double *shift, double *spread);
    void (*add_lower[2])(double *scatter, Index width, const void *product, Index apart,
                         double sign, const double *vectors, const double *coefficients,
                         Index first, Index last);
    /* Threads share the tasks by `next`, 0 before. */
    void (*sum_block[2])(const BlockSums *sums, _Atomic(int64_t) *next);
    /* Numbers that the factors of a map of this rank and width take, and how they are packed. */
    Index (*factors_size)(Index rank, Index width);
    void (*pack_factors)(Factors *map, const double *left, const double *right, const double *mean,
                         const double *shift, double *memory);
    /* The first row with a finite number that float16 cannot hold, NO_ROW or NO_MEMORY. */
    Index (*erase[2])(const Erasing *task);
    int (*squares_finite[2])(Matrix rows, Index n, Index width);
} Level;

extern const Level level_baseline;
#ifdef SPLINCE_X86
extern const Level level_avx2, level_avx512;
#endif

/* The best level of this processor first. `k`-th of them, or NULL behind the last. */
const Level *supported_level(int k);

/* `place` has n_codes + 2 numbers. */
void sort_by_cell(const Index *codes, Index variables, Index n, Index n_codes, Index part_rows,
                  Index *order, Index *cell, Index *place);

/* Returns when all tasks of a phase are finished. */
void wait_for(Phase *phase, int64_t tasks);

#endif
