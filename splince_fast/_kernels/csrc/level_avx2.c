/* Kernels for AVX2, with registers of 32 bytes. */

#define BYTES 32
#define LEVEL level_avx2
#define LEVEL_NAME "avx2"
#define TARGET "avx2,fma,f16c"
#include "level.inc.c"
