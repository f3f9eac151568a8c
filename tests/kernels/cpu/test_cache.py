"""Where compiled kernels are found, and when they are compiled: a checkout without any, processes at once, bad folders.

The compiler is a program that copies the library that is built, so that what it makes is loaded and runs.
"""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import qtorch
from qtorch.kernels.cpu import build, cache, compiled_library
from tests.kernels.cpu.builds import NEEDS_LIBRARY

pytestmark = [NEEDS_LIBRARY, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a POSIX system")]

ROOT = Path(qtorch.__file__).parents[1]

LIBRARIES = len(["of an instruction set", "of the operators"])

COMPILER = """
import pathlib, shutil, sys, time
library, log, arguments = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
if "-c" in arguments:
    with log.open("a") as file:
        file.write("compiled\\n")
    time.sleep(1)
if library == "fails":
    sys.exit("broken" if "-c" in arguments else 0)
if "-o" in arguments:
    shutil.copy(library, arguments[arguments.index("-o") + 1])
"""

# The checkout comes first on the path; other copies of the package are not there, but for those in COPIES.
LAYER = """
import os, sys
copies = os.environ.get("COPIES", "").split()
sys.path[:] = [path for path in sys.path if path in ("", *copies) or not os.path.isdir(path + "/qtorch")]
import torch, qtorch
assert os.path.dirname(os.path.dirname(qtorch.__file__)) == os.getcwd()

def use():
    layer = torch.nn.Linear(64, 64)
    qtorch.quantize_(layer, qtorch.int8_weight_only())
    with qtorch.kernels.record_kernels() as ran:
        layer(torch.randn(3, 64))
    found = qtorch.kernels.cpu.compiled_library.library()
    print(ran[-1].partition(".")[0], found and found.path, flush=True)
"""


class Checkout:
    """A copy of the sources without libraries, a cache, and a compiler."""

    def __init__(self, folder: Path) -> None:
        found = compiled_library.library()
        assert found is not None
        self.instruction_set, self.built = found.instruction_set, found.path
        self.root, self.cache, self.log = folder / "checkout", folder / "cache", folder / "log"
        ignored = shutil.ignore_patterns("lib", "__pycache__")
        shutil.copytree(ROOT / "qtorch", self.root / "qtorch", ignore=ignored)
        self.compiler = folder / "compiler.py"
        self.compiler.write_text(COMPILER)

    def start(self, program: str = LAYER + "use()", makes: Path | str | None = None, **environment: str):
        compiler = f"{sys.executable} {self.compiler} {makes or self.built} {self.log}"
        settings = {"QTORCH_CPU_ISA": self.instruction_set, "XDG_CACHE_HOME": str(self.cache), "CXX": compiler}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("QTORCH_")}
        environment = {**kept, "QTORCH_CPU_BUILD": "1", **settings, **environment}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-c", program], cwd=self.root, env=environment, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *arguments, **environment) -> tuple[str, str]:
        process = self.start(*arguments, **environment)
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        return out, error

    def compiled(self) -> int:
        return self.log.read_text().count("compiled") if self.log.exists() else 0

    def library(self) -> Path:
        return build.library_path(self.instruction_set, self.cache / "qtorch" / cache.folder().name)


@pytest.fixture(params=[pytest.param("checkout", marks=pytest.mark.slow)])
def checkout(tmp_path: Path) -> Checkout:
    """What uses it runs processes, which takes seconds."""
    return Checkout(tmp_path)


def test_an_installed_copy_that_the_checkout_shadows(checkout, tmp_path):
    """Its libraries are taken if they are of the same sources."""
    installed = str(tmp_path / "installed")
    folder = Path(installed, "qtorch", "kernels", "cpu", "lib")
    folder.mkdir(parents=True)
    there = Path(shutil.copy(checkout.built, build.library_path(checkout.instruction_set, folder)))
    out, error = checkout.run(COPIES=installed, PYTHONPATH=installed)
    assert (out.split(), error) == (["cpu_weight_only_mm", str(there)], "")
    assert not checkout.cache.exists()
    assert checkout.compiled() == 0

    # Of other ones: they are not called.
    (checkout.root / "qtorch" / "kernels" / "cpu" / "src" / "more.h").write_text("// new")
    out, error = checkout.run(COPIES=installed, PYTHONPATH=installed, QTORCH_CPU_BUILD="0")
    assert out.split() == ["packed_weight_mm" if "packed" in out else "weight_only_mm", "None"]
    assert "QTORCH_CPU_BUILD=0 forbids" in error


def test_compiled_at_first_use_and_kept(checkout):
    """Not by importing. It is said, in one line; the next process finds the library, and needs no compiler."""
    assert checkout.run("import qtorch, qtorch.kernels.cpu") == ("", "")
    assert not checkout.cache.exists()

    out, error = checkout.run(LAYER + "use()\nuse()")
    assert out.splitlines() == [f"cpu_weight_only_mm {checkout.library()}"] * 2
    assert error.count("\n") == 1
    assert f"compiling the CPU kernels for {checkout.instruction_set} into" in error
    assert checkout.compiled() == LIBRARIES
    folder = checkout.library().parent
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)} == {0o700}
    assert {path.suffix for path in folder.iterdir()} == {".so", ".lock"}

    out, error = checkout.run(CXX="", PATH="")
    assert (out.split(), error) == (["cpu_weight_only_mm", str(checkout.library())], "")


def test_processes_and_threads_at_once(checkout):
    """One compiles, the other waits for it."""
    processes = [checkout.start() for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=300)[0].split() == ["cpu_weight_only_mm", str(checkout.library())]
    assert checkout.compiled() == LIBRARIES
    program = LAYER + "from concurrent.futures import ThreadPoolExecutor\n"
    out, _ = checkout.run(program + "with ThreadPoolExecutor(4) as pool: list(pool.map(lambda _: use(), range(4)))")
    assert out.count(str(checkout.library())) == 4
    assert checkout.compiled() == LIBRARIES


def test_a_forked_child_does_not_compile(checkout):
    out, error = checkout.run(LAYER + "child = os.fork()\nif child: os.waitpid(child, 0)\nelse: use()")
    assert out.split() == ["weight_only_mm", "None"]
    assert "the compiled CPU kernels are not there" in error
    assert checkout.compiled() == 0


@pytest.mark.parametrize("environment, reason", [
    ({"QTORCH_CPU_BUILD": "0"}, "QTORCH_CPU_BUILD=0 forbids"),
    ({"CXX": "", "PATH": ""}, "there is no C++ compiler on the PATH"),
    ({"CXX": "false"}, "false does not know its instructions"),
    ({"XDG_CACHE_HOME": "/dev/null/cache"}, "Not a directory: '/dev/null"),
    ({"makes": "fails"}, "broken"),
])  # fmt: skip
def test_what_cannot_be_compiled_is_said_once(environment, reason, checkout):
    """The kernels made of torch operators run, and it is not tried again."""
    out, error = checkout.run(LAYER + "use()\nuse()", **environment)
    assert out.splitlines() == ["weight_only_mm None"] * 2
    assert error.count("the compiled CPU kernels are not there") == 1
    assert reason in error
    assert checkout.compiled() == (LIBRARIES if environment == {"makes": "fails"} else 0)
    assert not list(checkout.cache.rglob("*.so"))


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """A library in the cache, as compiling leaves it."""
    found = compiled_library.library()
    assert found is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.prepare(cache.folder()) == ""
    path = build.library_path(found.instruction_set, cache.folder())
    shutil.copy(found.path, path)
    path.chmod(0o755)
    return path


def found_in_cache(path: Path) -> tuple[Path | None, str]:
    return cache.find(path.stem.removeprefix("libqtorch_"))


def test_what_others_can_write_is_not_loaded(kept, tmp_path, monkeypatch):
    assert found_in_cache(kept) == (kept, "")
    for path in (kept, kept.parent, kept.parent.parent, tmp_path):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | 0o002)
        assert found_in_cache(kept)[0] is None
        assert f"{path} is not trusted" in found_in_cache(kept)[1]
        path.chmod(mode)
        assert found_in_cache(kept) == (kept, "")
    # As in /tmp: everyone makes files there, and only their owners rename them.
    tmp_path.chmod(0o1777)
    assert found_in_cache(kept) == (kept, "")
    # Of another user.
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "is not trusted: it has to be this user's own" in found_in_cache(kept)[1]


def test_links_and_names(monkeypatch, kept, tmp_path):
    moved = tmp_path / "elsewhere.so"
    kept.rename(moved)
    assert found_in_cache(kept) == (None, "")
    kept.symlink_to(moved)
    assert f"{kept} is not trusted" in found_in_cache(kept)[1]
    assert build.fingerprint() in str(kept)
    monkeypatch.setattr(build, "FLAGS", {"x86_64": {"portable": "-O0"}})
    assert build.fingerprint() not in str(kept), "other flags make other libraries"


@pytest.mark.parametrize("named", ["", "relative/cache"])
def test_the_folder_without_a_setting(named, monkeypatch):
    """A relative path is ignored, as the specification of XDG_CACHE_HOME asks."""
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert cache.folder().is_relative_to(Path.home() / ".cache" / "qtorch")


def test_the_command(checkout):
    """Into the package, or with --user into the cache; the libraries are then found."""
    command = "import sys\nfrom qtorch.kernels.cpu.__main__ import main\nsys.exit(main({}))"
    in_package = build.library_path(checkout.instruction_set, checkout.root / "qtorch" / "kernels" / "cpu" / "lib")
    for options, path in (["--user"], checkout.library()), ([], in_package):
        out, error = checkout.run(command.format([*options, checkout.instruction_set]))
        assert out.splitlines()[-1] == f"{checkout.instruction_set}: {path}"
        assert error == ""
        assert checkout.run(CXX="", PATH="")[0].split() == ["cpu_weight_only_mm", str(path)]
    process = checkout.start(command.format(["sse9"]))
    assert "no instruction set sse9 here; there are" in process.communicate(timeout=300)[1]
    assert process.returncode == 2


def test_a_named_folder_is_the_only_one(kept, monkeypatch, tmp_path):
    monkeypatch.setenv("QTORCH_CPU_LIBRARIES", str(tmp_path))
    monkeypatch.setattr(compiled_library, "LIBRARIES", tmp_path)
    assert compiled_library.installed() == [tmp_path]
    assert compiled_library.find(kept.stem.removeprefix("libqtorch_")) == "it is not built"
