#!/usr/bin/env bash
# The tests of the CPU kernels, compiled with the address and undefined-behaviour sanitizers:
#
#   bash tests/kernels/cpu/sanitize.sh [python] [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
python=${1:-python}
[ $# -eq 0 ] || shift

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"$python" - "$directory" <<'PYTHON'
import runpy, sys
from pathlib import Path

flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
errors = runpy.run_path("qtorch/kernels/cpu/build.py")["build"](Path(sys.argv[1]), flags)
sys.exit("\n".join(errors.values()) or 0)
PYTHON

# Python itself is not instrumented: the runtime comes first, and leaks are Python's own.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0 QTORCH_CPU_LIBRARIES="$directory"
"$python" -m pytest -n 0 -q tests/kernels/cpu -k "not compil and not Gradient" "$@"
