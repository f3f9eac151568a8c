"""Compile the C++ kernels, once per instruction set: ``python -m qtorch.kernels.cpu``.

setup.py does the same when it installs. The sources use no header of torch or Python, so one build serves every version
of both; this file imports neither torch nor qtorch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARIES = Path(os.environ.get("QTORCH_CPU_LIBRARIES") or HERE / "lib")
"""Where compiled libraries lie; QTORCH_CPU_LIBRARIES names another place, for builds with a sanitizer, say."""

_AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mbmi2"
FLAGS = {
    "x86_64": {
        "portable": "-msse4.2",
        "avx2": "-mavx2 -mfma -mf16c -mbmi2",
        "avx2_vnni": "-mavx2 -mfma -mf16c -mbmi2 -mavxvnni",
        "avx512": _AVX512,
        "avx512_vnni": f"{_AVX512} -mavx512vnni",
        "amx": f"{_AVX512} -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16",
    },
}
"""Compiler flags by machine and instruction set, the best last; other machines have "portable" only."""

# Sums have a fixed order and round as written: the compiler contracts no products and sums on its own.
_COMMON = "-std=c++17 -O3 -fPIC -ffp-contract=off -fvisibility=hidden -fno-exceptions -fno-rtti -Wno-psabi"


def instruction_sets() -> dict[str, str]:
    """Compiler flags by name, for this machine."""
    machine = {"AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    return FLAGS.get(machine, {"portable": ""})


def library_path(instruction_set: str, directory: Path = LIBRARIES) -> Path:
    """Where the library for an instruction set is, or would be."""
    return directory / f"libqtorch_{instruction_set}.so"


def fingerprint() -> str:
    """Identifies the sources, so that a library of other ones is never called."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: CXX, or the first on the PATH."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return [found] if found else None


def build(directory: Path = LIBRARIES, extra: Sequence[str] = (), names: Collection[str] = ()) -> dict[str, str]:
    """Compile every library into `directory`.

    Args:
        extra: more compiler flags, such as those of a sanitizer.
        names: of the instruction sets; empty for all.

    Returns:
        What went wrong, by instruction set; empty if all is well.
    """
    compiler = find_compiler()
    if compiler is None:
        return dict.fromkeys(instruction_sets(), "there is no C++ compiler on the PATH")
    directory.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {}
        for name, flags in instruction_sets().items():
            if names and name not in names:
                continue
            command = [*compiler, *_COMMON.split(), *flags.split(), *extra]
            jobs[name] = pool.submit(_compile, command, library_path(name, directory))
    return {name: error for name, job in jobs.items() if (error := job.result())}


def _compile(command: list[str], target: Path) -> str:
    """Empty, or the compiler's message."""
    object_file, library = (target.with_suffix(f".{os.getpid()}.{kind}") for kind in ("o", "tmp"))
    define = f'-DQTORCH_FINGERPRINT="{fingerprint()}"'
    steps = (
        [*command, "-fopenmp", define, "-c", str(SOURCES / "kernels.cpp"), "-o", str(object_file)],
        # Linked without -fopenmp, which would bring a second pool of threads beside torch's.
        [*command, "-shared", str(object_file), "-o", str(library)],
    )
    try:
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode:
                return done.stderr.strip() or f"{step[0]} failed"
        # In one step, under a new inode: the old library may be in use.
        os.replace(library, target)
    except OSError as error:
        return str(error)
    finally:
        object_file.unlink(missing_ok=True)
        library.unlink(missing_ok=True)
    return ""


def main() -> int:
    """Build, and say what came of it."""
    errors = build()
    for name in instruction_sets():
        sys.stdout.write(f"{name}: {errors.get(name, library_path(name))}\n")
    return bool(errors)
