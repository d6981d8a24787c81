/* Functions without wide registers: the choice of the level, the order of rows by their labels, and
   waiting. */

#define _POSIX_C_SOURCE 199309L /* nanosleep, where the compiler is held to the standard */

#include "kernels.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <time.h>
#endif

/* The instruction sets that this processor and its operating system support. */
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

/* Orders the rows of each part so that those with equal codes, a cell, are neighbours: by one stable
   counting sort per variable, the last code first. Cells are numbered from 0 in the new order. */
void sort_by_cell(const Index *codes, Index variables, Index n, Index n_codes, Index part_rows,
                  Index *order, Index *cell, Index *place) {
    Index number = -1;
    for (Index start = 0; start < n; start += part_rows) {
        const Index stop = smaller(n, start + part_rows);
        for (Index i = start; i < stop; i++) order[i] = i;
        for (Index v = 0; v < variables; v++) {
            const Index *code = codes + v * n;
            memset(place, 0, (size_t)(n_codes + 2) * sizeof(Index));
            for (Index i = start; i < stop; i++) place[code[i] + 2]++;
            place[0] = start; /* counts become places: where the rows of each code begin */
            for (Index c = 0; c <= n_codes; c++) place[c + 1] += place[c];
            for (Index i = start; i < stop; i++) cell[place[code[order[i]] + 1]++] = order[i];
            memcpy(order + start, cell + start, (size_t)(stop - start) * sizeof(Index));
        }
        for (Index i = start; i < stop; i++) {
            int differs = i == start;
            for (Index v = 0; v < variables && !differs; v++)
                differs = codes[v * n + order[i]] != codes[v * n + order[i - 1]];
            cell[i] = number += differs;
        }
    }
}

/* One look at a time, for the sake of the core's other thread. */
static void settle(void) {
#if defined(SPLINCE_X86)
    _mm_pause();
#elif defined(__GNUC__) && defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Gives the processor away for some 0.05 ms: to yield instead can cost a thread its share of time,
   call by call. */
static void sleep_briefly(void) {
#ifdef _WIN32
    Sleep(0);
#else
    const struct timespec nap = {0, 50000};
    nanosleep(&nap, NULL);
#endif
}

void wait_for(Phase *phase, int64_t tasks) {
    /* Some 0.1 ms of looks: then the thread that is waited for has lost its processor. */
    for (int looks = 0; atomic_load(&phase->finished) < tasks; looks++) {
        if (looks < 2000)
            settle();
        else {
            looks = 2000;
            sleep_briefly();
        }
    }
}
