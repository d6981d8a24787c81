/* A block of rows and the sums that are taken over it; see `moments.inc.c`. */

#include <stdatomic.h>

#define GROUP 4 /* rows that are reduced at once */

/* With y_i = x_i - shift and offset = shift - reference:

       total        = sum_i w_i y_i                     peak = max_i |y_i|
       class_sums_c = sum_{i: codes[., i] = c} w_i (y_i + offset)
       products_q   = sum_i values[q, i] (y_i + offset)

   Matrices are C-contiguous. */
typedef struct {
    const void *rows;             /* (m, width) */
    Index width, n;
    const Index *index;           /* (n,): rows of the block among them, or NULL for all */
    const double *weight;         /* (n,), or NULL for unit weights */
    const double *shift, *offset; /* (width,) */
    const Index *codes;           /* (variables, n) below `classes`, -1 for none */
    const Index *order, *cell;    /* (n,): as `sort_by_cell` gives them for these parts */
    Index variables, classes, part_rows;
    const double *values; /* (columns, n), already multiplied by the weights */
    Index columns;
    const double *rotations; /* (turns, 2): cosines and sines */
    Index turns;
    double *peak, *total, *class_sums, *products; /* overwritten */
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

/* Of float32 and of float64. */
typedef struct {
    void (*centre_columns[2])(const Block *block, void *out, Index first, Index last, double *held);
    void (*reduce_chunks[2])(const Block *block, const Gram *gram, double *held);
    void (*sample_columns[2])(const Block *block, Index stride, double *shift, double *spread);
    void (*add_lower[2])(double *scatter, Index width, const void *product, Index apart,
                         double sign, const double *vectors, const double *coefficients,
                         Index first, Index last);
} MomentsKernels;

#define MOMENTS_KERNELS                           \
    {                                             \
        {centre_columns_f32, centre_columns_f64}, \
        {reduce_chunks_f32, reduce_chunks_f64},   \
        {sample_columns_f32, sample_columns_f64}, \
        {add_lower_f32, add_lower_f64},           \
    }

/* Combinations of codes that are counted at once; `place` has max(MOST_CELLS, n_codes + 1) + 1. */
#define MOST_CELLS 256

void sort_by_cell(const Index *codes, Index variables, Index n, Index n_codes, Index part_rows,
                  Index *order, Index *cell, Index *place);

/* Returns when all tasks of a phase are finished. */
void wait_for(Phase *phase, int64_t tasks);
