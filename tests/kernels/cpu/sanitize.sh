#!/usr/bin/env bash
# The tests of the CPU kernels, compiled with the address and undefined-behaviour sanitizers, one instruction set after
# the other:
#
#   bash tests/kernels/cpu/sanitize.sh [python] [arguments of pytest]
#
# SANITIZE_SETS names those to try, by default all that this machine runs; each may take SANITIZE_SECONDS, by default 1200.
# For the last one bf16 is the default dtype of the process once more, unless SANITIZE_ONCE is set, by which only each third
# test of the matrix of numbers runs too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
python=${1:-python}
[ $# -eq 0 ] || shift

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
sets=${SANITIZE_SETS:-$("$python" -c 'from qtorch.kernels.cpu.compiled_library import instruction_sets, runs_here
print(*filter(runs_here, instruction_sets()))')}
# shellcheck disable=SC2086
"$python" - "$directory/all" $sets <<'PYTHON'
import runpy, sys
from pathlib import Path

flags = ["-g", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
flags.append("-fno-sanitize=signed-integer-overflow")  # lanes of a vector that nothing reads may overflow
errors = runpy.run_path("qtorch/kernels/cpu/build.py")["build"](Path(sys.argv[1]), flags, sys.argv[2:])
sys.exit("\n".join(errors.values()) or 0)
PYTHON

# Python itself is not instrumented: the runtime comes first, and leaks are Python's own. Nothing is captured, for pytest
# would swallow the last words of a process.
# The C++ library too, or its exceptions would be thrown before the runtime has seen it.
runtime="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so)"
chosen="$directory/tests"
collect() {
    "$python" -m pytest -n 0 -q --collect-only -p no:cacheprovider \
        tests/kernels/cpu/test_conv.py tests/kernels/cpu/test_prepared_calls.py tests/kernels/cpu/test_embedding.py tests/kernels/cpu/test_experts_mm.py \
        tests/kernels/cpu/test_operands.py tests/kernels/cpu/test_kv_attention.py \
        tests/kernels/cpu/test_adam.py tests/kernels/cpu/test_operators.py \
        tests/kernels/cpu/test_linear.py tests/kernels/cpu/test_values.py tests/kernels/test_block_sparse_mm.py tests/test_fuse_convolutions.py \
        -m "$1" -k "not compil and not gradient and not well_formed" | grep ::
}
collect "not slow" > "$chosen"
collect matrix | awk -v step="${SANITIZE_ONCE:+3}" 'NR % (step ? step : 1) == 0' >> "$chosen"
of_kernels() {
    timeout "${SANITIZE_SECONDS:-1200}" env LD_PRELOAD="$runtime" QTORCH_CPU_LIBRARIES="$directory/$1" \
        ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
        "$python" -m pytest -n 0 -q -s -r f -p no:cacheprovider --durations=0 --durations-min=60 "@$chosen" "${@:2}"
}

failed=0
for set in $sets; do
    mkdir "$directory/$set"
    mv "$directory/all/libqtorch_$set.so" "$directory/$set"
    cp "$directory/all/libqtorch_operators.so" "$directory/$set"
    echo "== $set"
    of_kernels "$set" "$@" || { failed=1; echo "== $set failed"; }
    # Damaged pickles, and inner tensors that move: the cases run in processes of their own, which inherit the runtime.
    timeout "${SANITIZE_SECONDS:-1200}" env LD_PRELOAD="$runtime" QTORCH_CPU_LIBRARIES="$directory/$set" \
        ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
        "$python" -m pytest -n 0 -q -s -r f -p no:cacheprovider \
        tests/attack/test_damage.py -k "not dying and not checkpoint and not reader and not files" "$@" || { failed=1; echo "== $set failed"; }
done
[ -z "${SANITIZE_ONCE:-}" ] || exit $failed
echo "== $set, with another default dtype"
QTORCH_TEST_DEFAULT_DTYPE=bfloat16 of_kernels "$set" "$@" || { failed=1; echo "== $set with another default dtype failed"; }
exit $failed
