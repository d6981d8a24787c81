/* Column sums, sums per class, squares and leverages of a block, in one pass that copies nothing. */

#include <stdatomic.h>

typedef struct {
    const void *rows;     /* (m, d) of the dtype, C-contiguous */
    const Index *index;   /* (n,): the rows of the block among them, or NULL for all, n = m */
    const double *weight; /* (n,) > 0, or NULL for unit weights */
    const double *shift, *inverse; /* (d,) */
    const Index *codes;            /* (variables, n): class sums to add each row to; -1 for none */
    const Index *order, *cell;     /* (n,): as `sort_by_cell` gives them for the segments */
    const double *values;          /* (columns, n), multiplied by the weights */
    double *sums;                  /* (segments, n_sums, d) */
    double *leverage;              /* (d / stripe rounded up, n) */
    double *near; /* (segments, 4, pitch): work memory that begins at a cache line */
    Index n, d, pitch, variables, columns, n_sums;
    Index segment; /* rows of a segment; the last one may have fewer */
    Index width;   /* columns of a task, a multiple of `stripe` */
    Index stripe;  /* columns whose part of a row's leverage is one number */
} Sweep;

typedef struct {
    /* Any number of threads make this call at once, and share the tasks by `next`, 0 before.
       float32, float64. */
    void (*run[2])(const Sweep *, _Atomic(int64_t) *next);
} SweepKernels;

#define SWEEP_KERNELS {{run_sweep_f32, run_sweep_f64}}
