/* Erasing rows: r(x) = x - left^T (right (x - mean) - shift). */

/* A matrix in memory; its numbers lie at multiples of their size. */
typedef struct {
    char *data;
    Index down, across; /* bytes from a row to the next, and from a number to the next */
} Matrix;

/* The map for rows of `width` features, with factors as the kernels read them. */
typedef struct {
    Index rank, width;
    const double *measuring; /* right^T in panels (width x columns) of `columns` directions */
    const double *removing;  /* -left in panels (rank x panel) of `panel` features */
    const double *mean, *shift;
    Index columns, panel;
} Factors;

typedef struct {
    const Factors *map;
    Matrix rows, out; /* both of n rows; may be the same */
    Index n;
    int halves;   /* the numbers in memory are float16; else T */
    int streamed; /* write past the caches, where that can be */
} Erasing;

#define NO_ROW (-1)
#define NO_MEMORY (-2)

typedef struct {
    /* Numbers that the factors of a map of this rank and width take, and how they are packed. */
    Index (*size)(Index rank, Index width);
    void (*pack)(Factors *map, const double *left, const double *right, const double *mean,
                 const double *shift, double *memory);
    /* By dtype, float32 and float64: the first row with a finite number that float16 cannot hold,
       NO_ROW or NO_MEMORY. */
    Index (*erase[2])(const Erasing *task);
    /* Whether the sum of squares of each row is below 1e298. */
    int (*squares_finite[2])(Matrix rows, Index n, Index width);
} EraseKernels;

#define ERASE_KERNELS                                                            \
    {factors_size, pack_factors, {erase_f32, erase_f64},                         \
     {squares_finite_f32, squares_finite_f64}}
