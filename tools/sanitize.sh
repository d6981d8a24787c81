#!/usr/bin/env bash
# Builds the extensions with AddressSanitizer and UndefinedBehaviorSanitizer in a temporary copy and runs
# the tests of the kernels under them. Linux with GCC.
#
#   tools/sanitize.sh [arguments for pytest]
#
# PYTHON names the interpreter (default: python), in whose environment the test extra and Cython are
# installed. Python, NumPy and BLAS themselves are not instrumented: what is seen is what our own code
# reads and writes. Leaks are not looked for, because the interpreter keeps memory on purpose.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${PYTHON:-python}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cp -r "$root/splince_fast" "$root/tests" "$root/setup.py" "$root/pyproject.toml" "$root/README.md" "$work"
find "$work" \( -name '*.so' -o -path '*/_kernels/*.c' ! -path '*/csrc/*' \) -delete
cd "$work"
SPLINCE_DEBUG=1 SPLINCE_SANITIZE=address,undefined "$python" setup.py -q build_ext --inplace

libraries="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so)"
export LD_PRELOAD="$libraries"
export ASAN_OPTIONS="detect_leaks=0:halt_on_error=1:abort_on_error=1:handle_segv=0:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
export PYTHONPATH="$work" PYTHONMALLOC=malloc OPENBLAS_NUM_THREADS=1
# A sanitizer writes to the file descriptor of stderr, which pytest must not capture.
run=("$python" -m pytest -q -p no:cacheprovider --capture=sys)

# Controls: both sanitizers must stop a test and show why, or the tests below show nothing.
cat > control.c <<'C'
#include <stdlib.h>
#include <string.h>
int beyond(void) { volatile char *p = malloc(8); int x = p[8]; free((void *)p); return x; }
void *null(void *p, size_t n) { char a[1] = {0}; return memcpy(p, a, n); }
C
LD_PRELOAD='' gcc -shared -fPIC -fsanitize=address,undefined -g -o control.so control.c
cat > test_control.py <<'PYTHON'
import ctypes
def test_beyond(): ctypes.CDLL("./control.so").beyond()
def test_null(): ctypes.CDLL("./control.so").null(None, 0)
PYTHON
for finding in beyond:heap-buffer-overflow null:"null pointer"; do
    if "${run[@]}" -k "${finding%%:*}" test_control.py > control.log 2>&1; then
        echo "the sanitizers do not stop a test: ${finding%%:*}" >&2
        exit 1
    fi
    grep -q "${finding#*:}" control.log
done

if [ $# -eq 0 ]; then
    set -- tests/solve/test_kernel_entries.py tests/solve/test_solve_kernel.py \
        tests/moments/test_rows_kernels.py tests/moments/test_erase_kernels.py
fi
"${run[@]}" "$@"
