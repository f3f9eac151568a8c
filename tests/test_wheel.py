"""The wheel: what is in it, and that it needs no compiler. `make wheel` builds the one that is published.

Compiling takes minutes, so the compiler here is a program that copies the libraries that are built already.
"""

import importlib.util
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._inductor.config  # reads CXX when it is imported: before a fixture sets it  # noqa: F401

from qtorch.kernels.cpu import build, compiled_library
from tests.kernels.cpu.builds import NEEDS_LIBRARY
from tests.refusals import refuses
from tools import wheel

pytestmark = [
    NEEDS_LIBRARY,
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Linux", reason="wheels are built on Linux"),
]

COMPILER = """
import pathlib, shutil, sys
built = dict(line.split("=") for line in sys.argv[1].split(","))
target = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
if target.suffix == ".o":
    target.touch()
else:
    shutil.copy(built[target.name], target)
"""


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    """The libraries that exist, by file name."""
    found = {name: compiled_library.find(name) for name in build.instruction_sets() if compiled_library.runs_here(name)}
    paths = [one.path for one in found.values() if isinstance(one, compiled_library.Library)]
    paths += {build.library_path(build.OPERATORS, path.parent) for path in paths}
    return {path.name: path for path in paths}


@pytest.fixture(scope="module")
def made(built, tmp_path_factory) -> Iterator[tuple[Path, Path]]:
    """The archive of sources, and the wheel built from it."""
    work = tmp_path_factory.mktemp("wheel")
    compiler = work / "compiler.py"
    compiler.write_text(COMPILER)
    known = ",".join(f"{name}={path}" for name, path in built.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", f"{sys.executable} {compiler} {known}")
        sdist = wheel.build_sdist(work, work)
        yield sdist, wheel.build_wheel(sdist, work)


def names(built) -> list[str]:
    return [name.removeprefix("libqtorch_").removesuffix(".so") for name in built]


def test_what_is_in_it_and_the_same_again(made, built, tmp_path):
    _, linux = made
    assert linux.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert wheel.check_contents(linux, names(built), tmp_path) == sum(path.stat().st_size for path in built.values())
    refuses(r"want .*'sse9'", lambda: wheel.check_contents(linux, ["sse9"], tmp_path))
    with zipfile.ZipFile(linux) as archive:
        members = archive.namelist()
    sources = {f"qtorch/kernels/cpu/src/{path.name}" for path in build.SOURCES.iterdir()}
    assert sources <= set(members), "without them the libraries would count as those of other sources"
    assert {member.split("/")[0].partition("-")[0] for member in members} == {"qtorch", "qtorch_autoload.py"}
    # Same sources, same libraries, same bytes.
    sdist, linux = made
    assert wheel.build_wheel(sdist, tmp_path).read_bytes() == linux.read_bytes()


def test_paths_and_compilers(made, built, tmp_path):
    """Installed into a folder that comes first; torch is that of this environment."""
    _, linux = made
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*install, str(linux)], check=True)
    printed = wheel.try_it(sys.executable, tmp_path, PYTHONPATH=str(target))
    assert printed.startswith(f"{target}: with torch ")
    assert printed.strip().endswith(
        f"compiled kernels run for {', '.join(name for name in names(built) if name != build.OPERATORS)}"
    )
    library = "qtorch/kernels/cpu/lib/libqtorch_avx2.so"
    with zipfile.ZipFile(tmp_path / "bad.whl", "w") as archive:
        archive.writestr(library, f"...{wheel.ROOT}/kernels.cpp...")
    refuses("contain the path", lambda: wheel.check_contents(tmp_path / "bad.whl", ["avx2"], tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("auditwheel") is None, reason="auditwheel is not installed")
def test_the_tag_is_true(made, tmp_path):
    _, linux = made
    portable = wheel.make_portable(linux, tmp_path)
    assert portable.name.endswith(f"{wheel.TAG}.whl")
    assert portable.stat().st_size < linux.stat().st_size
