/* Registers of 16 bytes, which every processor of a platform has, or single numbers where the
   compiler has no vector extensions. */

#define BYTES 16
#define LEVEL level_baseline
#define LEVEL_NAME "baseline"
#include "level.inc.c"
