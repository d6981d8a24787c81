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

/* Turns counts into places: where the numbers of each kind begin, from `start` on. */
static void accumulate(Index *count, Index kinds, Index start) {
    count[0] = start;
    for (Index c = 0; c < kinds; c++) count[c + 1] += count[c];
}

/* Orders rows start..stop by one number of few kinds each, which `cell` holds. Returns the number
   of cells so far, by which `cell` is overwritten. `end` has kinds + 1 numbers. */
static Index sort_few_kinds(Index kinds, Index start, Index stop, Index *order, Index *cell,
                            Index number, Index *end) {
    memset(end, 0, (size_t)(kinds + 1) * sizeof(Index));
    for (Index i = start; i < stop; i++) end[cell[i] + 1]++;
    accumulate(end, kinds, start);
    for (Index i = start; i < stop; i++) order[end[cell[i]]++] = i;
    for (Index c = 0, begun = start; c < kinds; c++) {
        if (end[c] == begun) continue;
        while (begun < end[c]) cell[begun++] = number;
        number++;
    }
    return number;
}

/* Does the same by one stable counting sort per variable. `cell` takes each new order. */
static Index sort_by_variable(const Index *codes, Index variables, Index n, Index n_codes,
                              Index start, Index stop, Index *order, Index *cell, Index number,
                              Index *place) {
    for (Index i = start; i < stop; i++) order[i] = i;
    for (Index v = 0; v < variables; v++) {
        const Index *code = codes + v * n;
        memset(place, 0, (size_t)(n_codes + 2) * sizeof(Index));
        for (Index i = start; i < stop; i++) place[code[i] + 2]++;
        accumulate(place, n_codes + 1, start);
        for (Index i = start; i < stop; i++) cell[place[code[order[i]] + 1]++] = order[i];
        memcpy(order + start, cell + start, (size_t)(stop - start) * sizeof(Index));
    }
    for (Index i = start; i < stop; i++) {
        for (Index v = 0; i > start && v < variables; v++)
            if (codes[v * n + order[i]] != codes[v * n + order[i - 1]]) {
                number++;
                break;
            }
        cell[i] = number;
    }
    return number + 1;
}

/* Orders the rows of each part so that those with equal codes, a cell, are neighbours: stable, by
   the last code first. Cells are numbered from 0 in the new order. O(v n) where the combinations
   of codes are few, else O(v (n + parts n_codes)). */
void sort_by_cell(const Index *codes, Index variables, Index n, Index n_codes, Index part_rows,
                  Index *order, Index *cell, Index *place) {
    Index kinds = 1, number = 0;
    for (Index v = 0; v < variables && kinds <= MOST_CELLS; v++)
        kinds = n_codes < MOST_CELLS ? kinds * (n_codes + 1) : MOST_CELLS + 1;
    for (Index start = 0; start < n; start += part_rows) {
        const Index stop = n - start < part_rows ? n : start + part_rows;
        if (kinds > MOST_CELLS) {
            number = sort_by_variable(codes, variables, n, n_codes, start, stop, order, cell,
                                      number, place);
            continue;
        }
        for (Index i = start; i < stop; i++) cell[i] = 0;
        for (Index v = variables - 1; v >= 0; v--)
            for (Index i = start; i < stop; i++)
                cell[i] = cell[i] * (n_codes + 1) + codes[v * n + i] + 1;
        number = sort_few_kinds(kinds, start, stop, order, cell, number, place);
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
