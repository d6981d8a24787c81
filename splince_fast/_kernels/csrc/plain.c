/* Functions for every instruction set: its selection, sorting of rows, waiting for threads. */

#define _POSIX_C_SOURCE 199309L /* declares nanosleep in strict C modes */

#include "kernels.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <time.h>
#endif

const Level *supported_level(int k) {
    const Level *levels[3];
    int n = 0;
#ifdef SPLINCE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("fma"))
        levels[n++] = &level_avx512;
    /* F16C is not tested: Clang before 18 has no test, and every processor with AVX2 has F16C. */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        levels[n++] = &level_avx2;
#endif
    levels[n++] = &level_baseline;
    return k >= 0 && k < n ? levels[k] : NULL;
}

/* Sorts the rows of each part so that rows with equal codes of all variables, a cell, are adjacent:
   one stable counting sort per variable. Cells are numbered from 0 in the new order. */
void sort_by_cell(const Index *codes, Index variables, Index n, Index n_codes, Index part_rows,
                  Index *order, Index *cell, Index *positions) {
    Index cell_number = -1;
    for (Index start = 0; start < n; start += part_rows) {
        const Index stop = minimum(n, start + part_rows);
        for (Index i = start; i < stop; i++) order[i] = i;
        for (Index v = 0; v < variables; v++) {
            const Index *code = codes + v * n;
            memset(positions, 0, (size_t)(n_codes + 2) * sizeof(Index));
            for (Index i = start; i < stop; i++) positions[code[i] + 2]++;
            positions[0] = start; /* cumulative counts become the positions where the codes begin */
            for (Index c = 0; c <= n_codes; c++) positions[c + 1] += positions[c];
            for (Index i = start; i < stop; i++) cell[positions[code[order[i]] + 1]++] = order[i];
            memcpy(order + start, cell + start, (size_t)(stop - start) * sizeof(Index));
        }
        for (Index i = start; i < stop; i++) {
            int differs = i == start;
            for (Index v = 0; v < variables && !differs; v++)
                differs = codes[v * n + order[i]] != codes[v * n + order[i - 1]];
            cell[i] = cell_number += differs;
        }
    }
}

/* Pauses a spin loop, to free the core for its other hardware thread. */
static void pause_spin(void) {
#if defined(SPLINCE_X86)
    _mm_pause();
#elif defined(__GNUC__) && defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleeps for about 0.05 ms; yields on Windows. Repeated yields can lose time to other threads. */
static void sleep_briefly(void) {
#ifdef _WIN32
    Sleep(0);
#else
    const struct timespec nap = {0, 50000};
    nanosleep(&nap, NULL);
#endif
}

void wait_for(Phase *phase, int64_t tasks) {
    /* After about 0.1 ms of spinning, sleep: the thread that is still working has probably lost its
       processor. */
    for (int polls = 0; atomic_load(&phase->finished) < tasks; polls++) {
        if (polls < 2000)
            pause_spin();
        else {
            polls = 2000;
            sleep_briefly();
        }
    }
}
