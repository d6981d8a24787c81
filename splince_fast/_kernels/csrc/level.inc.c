/* All kernels for one instruction set: the templates for both dtypes, and the table of them. */

#include "simd.h"

#define WIDTH ((int)(sizeof(V) / sizeof(T)))

#define T float
#define V F
#define NAME(x) x##_f32
#define LOAD(p) widen_f32(p)
#define STORE(p, x) narrow_f32(p, x)
#define STREAM(p, x) stream_f32(p, x)
#define GET(p) get_f32(p)
#define PUT(p, x) put_f32(p, x)
#define ALL(x) all_f32(x)
#include "moments.inc.c"
#include "erase.inc.c"
#include "sweep.inc.c"
#undef T
#undef V
#undef NAME
#undef LOAD
#undef STORE
#undef STREAM
#undef GET
#undef PUT
#undef ALL

#define T double
#define V D
#define NAME(x) x##_f64
#define LOAD(p) get_f64(p)
#define STORE(p, x) put_f64(p, x)
#define STREAM(p, x) stream_f64(p, x)
#define GET(p) get_f64(p)
#define PUT(p, x) put_f64(p, x)
#define ALL(x) all_f64(x)
#include "moments.inc.c"
#include "erase.inc.c"
#include "sweep.inc.c"

const Level LEVEL = {
    LEVEL_NAME, {sizeof(F) / sizeof(float), LANES}, WIDE, MOMENTS_KERNELS, ERASE_KERNELS, SWEEP_KERNELS,
};
