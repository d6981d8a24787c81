/* Registers of 16 bytes, which every processor of a platform has, or single numbers where the
   compiler has no vector extensions. */

#include "kernels.h"

#define BYTES 16
#define WIDE 0
#define LEVEL level_baseline
#define LEVEL_NAME "baseline"
#include "level.inc.c"
