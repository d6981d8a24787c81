/* The instruction sets that this processor and its operating system support, best first. */

#include "kernels.h"

const Level *supported_level(int k) {
    const Level *found[3];
    int n = 0;
#ifdef SPLINCE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("fma"))
        found[n++] = &level_avx512;
    /* Clang before 18 cannot ask for F16C, which every processor with AVX2 has. */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        found[n++] = &level_avx2;
#endif
    found[n++] = &level_baseline;
    return k >= 0 && k < n ? found[k] : NULL;
}
