/* Kernels for AVX-512, with registers of 64 bytes. */

#define BYTES 64
#define LEVEL level_avx512
#define LEVEL_NAME "avx512"
#ifdef __clang__
#define TARGET "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c"
#else
#define TARGET "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c,prefer-vector-width=512"
#endif
#include "level.inc.c"
