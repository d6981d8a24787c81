/* Registers of 32 bytes. */

#include "kernels.h"

#ifdef SPLINCE_X86
#define BYTES 32
#define WIDE 1
#define LEVEL level_avx2
#define LEVEL_NAME "avx2"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include "level.inc.c"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
