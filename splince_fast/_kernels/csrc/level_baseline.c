/* Registers of 16 bytes, available on every processor, or single numbers for compilers without
   vector extensions. */

#define BYTES 16
#define LEVEL level_baseline
#define LEVEL_NAME "baseline"
#include "level.inc.c"
