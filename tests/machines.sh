#!/usr/bin/env bash
# The tests that compute, on processors that this one can stand for: torch, oneDNN, MKL and qtorch are told to use fewer
# instructions, and one or two threads. What fails here and passes in `make test` has a bound that depends on the machine.
#
#   bash tests/machines.sh [python] [arguments of pytest, in place of the folders]
#
# MACHINES names those to try, by default all; those whose instructions this processor lacks are left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- tests/kernels tests/dtypes tests/training tests/primitives tests/test_*recipes.py \
    tests/test_every_recipe.py tests/test_convolutions.py tests/kv_cache

# Name, threads, ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, QTORCH_CPU_ISA, MKL_CBWR.
table="
sse     1 default SSE41            portable    COMPATIBLE
avx2    2 avx2    AVX2             avx2        AVX2
alder   1 avx2    AVX2_VNNI        avx2_vnni   AVX2
skylake 2 avx512  AVX512_CORE      avx512      AVX512
cascade 1 avx512  AVX512_CORE_VNNI avx512_vnni AVX512
cooper  2 avx512  AVX512_CORE_BF16 avx512_vnni AVX512
amx     2 avx512  DEFAULT          amx         AUTO
"
known=$(awk 'NF { print $1 }' <<<"$table")
failed=()
# Graphs that torch.compile keeps are not told apart by these settings.
graphs=$(mktemp -d)
trap 'rm -rf "$graphs"' EXIT
for machine in ${MACHINES:-$known}; do
    read -r _ threads aten onednn isa mkl < <(grep "^$machine " <<<"$table") || { echo "no $machine in" $known; exit 2; }
    "$python" -c 'import sys; from qtorch.kernels.cpu.compiled_library import runs_here; sys.exit(not runs_here(sys.argv[1]))' "$isa" ||
        { echo "== $machine: left out, this processor does not have $isa"; continue; }
    settings=(TORCHINDUCTOR_CACHE_DIR="$graphs/$machine" OMP_NUM_THREADS="$threads" ATEN_CPU_CAPABILITY="$aten" ONEDNN_MAX_CPU_ISA="$onednn" QTORCH_CPU_ISA="$isa" MKL_CBWR="$mkl")
    echo "== $machine: ${settings[*]}"
    env "${settings[@]}" "$python" -m pytest -n 0 -q -m "not slow or matrix" -p no:cacheprovider "$@" || failed+=("$machine")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
