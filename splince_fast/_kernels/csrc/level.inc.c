/* The kernels for one instruction set, for both dtypes, and the table of these kernels.

   The file that includes this one defines BYTES (size of a register), LEVEL and LEVEL_NAME. It also
   defines TARGET if not every processor of the platform has the instruction set. */

#include "kernels.h"

#if defined(SPLINCE_X86) || !defined(TARGET)

#ifndef TARGET
#define WIDE 0
#elif defined(__clang__)
#define WIDE 1
EXPANDED_PRAGMA(clang attribute push(__attribute__((target(TARGET))), apply_to = function))
#else
#define WIDE 1
EXPANDED_PRAGMA(GCC target(TARGET))
#endif

#include "simd.h"

#define WIDTH ((int)(sizeof(V) / sizeof(T)))
#define GET(p) NAME(get)(p)
#define PUT(p, x) NAME(put)(p, x)
#define BROADCAST(x) NAME(broadcast)(x)
#define LOAD(p) NAME(widen)(p)
#define STORE(p, x) NAME(narrow)(p, x)
#define STREAM(p, x) NAME(stream)(p, x)

/* The kernels for double come first, because those for float call them: all sums are in double. */
#define T double
#define V D
#define NAME(x) x##_f64
#include "moments.inc.c"
#include "erase.inc.c"
#include "block_sums.inc.c"
#undef T
#undef V
#undef NAME

#define T float
#define V F
#define NAME(x) x##_f32
#include "moments.inc.c"
#include "erase.inc.c"
#include "block_sums.inc.c"

#define PAIR(function) {function##_f32, function##_f64}

const Level LEVEL = {
    .name = LEVEL_NAME,
    .width = {FLOATS, LANES},
    .wide = WIDE,
    .centre_columns = PAIR(centre_columns),
    .reduce_chunks = PAIR(reduce_chunks),
    .sample_columns = PAIR(sample_columns),
    .add_lower = PAIR(add_lower),
    .sum_block = PAIR(sum_block),
    .factors_size = factors_size,
    .pack_factors = pack_factors,
    .erase = PAIR(erase),
    .squares_finite = PAIR(squares_finite),
};

#if WIDE && defined(__clang__)
#pragma clang attribute pop
#endif
#endif
