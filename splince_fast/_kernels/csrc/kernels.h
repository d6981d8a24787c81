/* Common declarations of the row kernels: the compiler, the structs of arguments and
   the table of functions of an instruction set.

   The kernels own no memory, call nothing of Python's and return a status. Each is compiled once
   per instruction set (`level_*.c`) and dtype; the best set is chosen at import (`choose.c`). */

#ifndef SPLINCE_KERNELS_H
#define SPLINCE_KERNELS_H

#include <math.h>
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
#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define UNROLL(n) PRAGMA(clang loop unroll_count(n))
#elif defined(__GNUC__)
#define UNROLL(n) PRAGMA(GCC unroll n)
#else
#define UNROLL(n)
#endif

#define LINE 64 /* bytes of a cache line */
#define AHEAD 8 /* rows that are prefetched */

typedef ptrdiff_t Index; /* NumPy's intp */

#include "moments.h"
#include "erase.h"
#include "sweep.h"

/* The functions of one instruction set. */
typedef struct {
    const char *name;
    int width[2]; /* numbers of a register: float32, float64 */
    int wide;     /* whether a tile of products beats BLAS: wide registers and fused products */
    MomentsKernels moments;
    EraseKernels erase;
    SweepKernels sweep;
} Level;

extern const Level level_baseline;
#ifdef SPLINCE_X86
extern const Level level_avx2, level_avx512;
#endif

/* The best level of this processor first. `k`-th of them, or NULL behind the last. */
const Level *supported_level(int k);

#endif
