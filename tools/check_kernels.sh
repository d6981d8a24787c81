#!/usr/bin/env bash
# Builds the row kernels (splince_fast/_kernels/csrc) with other compilers, for other platforms and
# under sanitizers, and runs tools/check_kernels.c with each build that can run here:
#
#   GCC, Clang; GCC without vector extensions; AddressSanitizer with UndefinedBehaviorSanitizer, and
#   ThreadSanitizer; aarch64 under qemu's user-mode emulation; mingw, which is compiled only.
#
# What is not installed is skipped, and the summary names it. Debian's packages: clang,
# gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user, gcc-mingw-w64-x86-64.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
source=$root/splince_fast/_kernels/csrc
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
units=("$source"/{plain,level_baseline,level_avx2,level_avx512}.c)
flags=(-std=gnu11 -Wall -Wextra -Werror -Wno-psabi -ffp-contract=fast -I"$source")
skipped=()

check() { # NAME RUNNER COMPILER [ARGUMENT ...]; an empty RUNNER runs natively, "none" only compiles
    local name=$1 runner=$2 compiler=$3
    shift 3
    local program
    for program in $compiler ${runner/none/}; do
        if ! command -v "$program" > /dev/null; then
            skipped+=("$name ($program is not installed)")
            return
        fi
    done
    echo "== $name"
    if [ "$runner" = none ]; then
        for unit in "${units[@]}"; do "$compiler" "${flags[@]}" "$@" -c "$unit" -o "$work/unit.o"; done
        echo "compiles"
        return
    fi
    "$compiler" "${flags[@]}" "$@" "$root/tools/check_kernels.c" "${units[@]}" -o "$work/check" \
        -lm -lpthread
    # shellcheck disable=SC2086
    $runner "$work/check"
}

check "GCC" "" gcc -O3
check "GCC, strict C11" none gcc -O3 -std=c11 -pedantic
check "GCC, no vector extensions" "" gcc -O3 -DSPLINCE_FAST_NO_VECTORS
check "Clang" "" clang -O3
check "AddressSanitizer, UndefinedBehaviorSanitizer" "" gcc -O1 -g \
    -fsanitize=address,undefined -fno-sanitize-recover=all
check "ThreadSanitizer" "" gcc -O1 -g -fsanitize=thread
check "aarch64" qemu-aarch64 aarch64-linux-gnu-gcc -O3 -static
check "Windows, mingw" none x86_64-w64-mingw32-gcc -O3
for name in "${skipped[@]}"; do echo "skipped: $name"; done
