/* Kernels for every processor of the platform, with registers of 16 bytes. If the compiler has no
   vector extensions, a register is a single number. */

#define BYTES 16
#define LEVEL level_baseline
#define LEVEL_NAME "baseline"
#include "level.inc.c"
