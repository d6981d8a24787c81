/* Registers of 64 bytes. */

#include "kernels.h"

#ifdef SPLINCE_X86
#define BYTES 64
#define WIDE 1
#define LEVEL level_avx512
#define LEVEL_NAME "avx512"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target( \
    "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c,prefer-vector-width=512")
#endif
#include "level.inc.c"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
