"""Compile the C++ kernels, once per instruction set, and the operators that torch's dispatcher calls.

setup.py does so when it installs, ``python -m qtorch.kernels.cpu`` when it is called, and `cache.py` at first use where
neither has. The sources use no header of torch or Python, so one build serves every version of both; this file imports
neither torch nor qtorch.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARIES = Path(os.environ.get("QTORCH_CPU_LIBRARIES") or HERE / "lib")
"""Where installing puts the libraries; QTORCH_CPU_LIBRARIES names another place, for builds with a sanitizer, say, and
then no other is searched."""

SECONDS = 900  # that the compiler may take for a library at most; it needs 10 to 60

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
    "aarch64": {
        "portable": "-march=armv8-a",
        "dotprod": "-march=armv8.2-a+dotprod",
        "i8mm": "-march=armv8.2-a+dotprod+i8mm",
    },
}
"""Compiler flags by machine and instruction set, the best last; other machines have "portable" only."""

# Sums have a fixed order and round as written: the compiler contracts no products and sums on its own.
_COMMON = "-std=c++17 -O3 -fPIC -ffp-contract=off -fvisibility=hidden -fno-exceptions -fno-rtti -Wno-psabi"

# The library beside those of the instruction sets, for the baseline of the machine: it calls one of them.
OPERATORS = "operators"
VARIANT_TABLES = HERE / "variants.json"


def this_machine() -> str:
    """The name of this machine in `FLAGS`, if it is there."""
    return {"AMD64": "x86_64"}.get(platform.machine(), platform.machine())


def instruction_sets(machine: str = "") -> dict[str, str]:
    """Compiler flags by name, for a machine, by default this one."""
    return FLAGS.get(machine or this_machine(), {"portable": ""})


def library_path(instruction_set: str, directory: Path = LIBRARIES) -> Path:
    """Where the library for an instruction set, or `OPERATORS`, is or would be."""
    return directory / f"libqtorch_{instruction_set}.so"


def fingerprint() -> str:
    """Identifies the sources and how they are compiled, so that a library of other ones is never called."""
    digest = hashlib.sha256(repr((_COMMON, FLAGS)).encode())
    for path in (*sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp")), VARIANT_TABLES):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: CXX, or the first on the PATH."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return [found] if found else None


def needed() -> list[str]:
    """The instruction sets that this machine needs: the best of which it has all instructions, and the portable one."""
    known, sets, always = _macros("-march=native"), instruction_sets(), _macros("")
    own = [name for name, flags in sets.items() if (more := _macros(flags) - always) and more <= known]
    return list(dict.fromkeys([*own[-1:], next(iter(sets))]))


def _macros(flags: str) -> set[str]:
    """Names of the macros by which a compiler says what it may use; none if it does not know the flags."""
    command = [*(find_compiler() or ["c++"]), *flags.split(), "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {line.split()[1] for line in done.stdout.splitlines()} if not done.returncode else set()


def is_current(path: Path) -> bool:
    """Whether a library is there, of these sources."""
    return path.is_file() and fingerprint().encode() in path.read_bytes()


def build(
    directory: Path = LIBRARIES,
    extra: Sequence[str] = (),
    names: Collection[str] = (),
    say: Callable[[str], object] = lambda line: None,
    machine: str = "",
) -> dict[str, str]:
    """Compile every library into `directory` that is not there, of these sources.

    Args:
        extra: more compiler flags, such as those of a sanitizer; then all are compiled.
        names: of the instruction sets, in the order in which they are begun; empty for all. The operators always come
            with them.
        say: is told what is being compiled, and how long it took.
        machine: for which the compiler that CXX names compiles, by default this one.

    Returns:
        What went wrong, by instruction set or `OPERATORS`; empty if all is well.
    """
    sets = instruction_sets(machine)
    wanted = {name: sets[name] for name in names or sets if name in sets}
    wanted[OPERATORS] = f"{next(iter(sets.values()))} -fexceptions -frtti"
    if not extra:
        wanted = {name: flags for name, flags in wanted.items() if not is_current(library_path(name, directory))}
    if not wanted:
        return {}
    compiler = find_compiler()
    if compiler is None:
        return dict.fromkeys(wanted, "there is no C++ compiler on the PATH")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return dict.fromkeys(wanted, str(error))
    workers = min(len(wanted), os.cpu_count() or 1) or 1
    say(f"compiling the CPU kernels for {', '.join(wanted)} with {compiler[0]}, {workers} at a time")
    finished: list[str] = []

    def job(name: str, flags: str) -> str:
        start = time.perf_counter()
        command = [*compiler, *_COMMON.split(), *flags.split(), *extra]
        source = "operators.cpp" if name == OPERATORS else "kernels.cpp"
        message = _compile(command, SOURCES / source, library_path(name, directory))
        finished.append(name)
        took = "not built" if message else f"{time.perf_counter() - start:.0f} s"
        say(f"CPU kernels {len(finished)} of {len(wanted)}, {name}: {took}")
        return message

    with ThreadPoolExecutor(workers) as pool:
        jobs = {name: pool.submit(job, name, flags) for name, flags in wanted.items()}
    return {name: message for name, done in jobs.items() if (message := done.result())}


def accepts(compiler: Sequence[str], flags: str) -> bool:
    """Whether the compiler knows the flags of an instruction set; old ones do not know the newest."""
    command = [*compiler, *flags.split(), "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        return not subprocess.run(command, capture_output=True, check=False, timeout=60).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def _compile(command: list[str], source: Path, target: Path) -> str:
    """Empty, or the compiler's message."""
    define = f'-DQTORCH_FINGERPRINT="{fingerprint()}"'
    try:
        with tempfile.TemporaryDirectory(prefix=f"{target.stem}.", suffix=".tmp", dir=target.parent) as folder:
            object_file, library = Path(folder, f"{source.stem}.o"), Path(folder, target.name)
            Path(folder, "variants.inc").write_text(f'R"json({VARIANT_TABLES.read_text()})json"')
            steps = (
                [*command, define, "-I", folder, "-c", str(source), "-o", str(object_file)],
                # Without OpenMP's library, which would bring a second pool of threads beside torch's.
                [*command, "-shared", str(object_file), "-o", str(library)],
            )
            for step in steps:
                done = subprocess.run(step, capture_output=True, text=True, check=False, timeout=SECONDS)
                if done.returncode:
                    return done.stderr.strip() or f"{step[0]} failed"
            # In one step, under a new inode: the old library may be in use, and another process may be writing one.
            os.replace(library, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""
