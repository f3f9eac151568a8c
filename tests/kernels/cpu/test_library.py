"""Building, loading, switching off, threads and processes."""

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import qtorch
from qtorch.kernels.cpu import build, compiled_library, variants
from tests.kernels.cpu.builds import LAYER, NEEDS_LIBRARY, ROOT, run


def layer() -> torch.nn.Linear:
    made = torch.nn.Linear(256, 128)
    qtorch.quantize_(made, qtorch.int4_weight_only(group_size=32))
    return made


@pytest.mark.slow
def test_threads_and_switches():
    done = run(QTORCH_CPU_KERNELS="0")
    assert "['linear:weight_only_mm', 'weight_only_mm']" in done.stdout
    assert "cpu_weight_only_mm: is switched off by QTORCH_CPU_KERNELS=0" in done.stdout
    assert done.stderr == ""
    # One OpenMP runtime in the process.
    program = LAYER + "\nmaps = open('/proc/self/maps').read()\n"
    program += "print('runtimes', {l.split()[-1] for l in maps.splitlines() if 'gomp' in l or 'iomp' in l})"
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    done = run(program)
    assert done.stdout.rpartition("runtimes")[2].count(".so") == 1


@pytest.mark.slow
def test_not_built(tmp_path):
    """It works, and says so once, at first use."""
    done = run(QTORCH_CPU_LIBRARIES=str(tmp_path), QTORCH_CPU_KERNELS="1", PYTHONWARNINGS="default")
    assert "['linear:weight_only_mm', 'weight_only_mm']" in done.stdout
    assert "is not compiled: python -m qtorch.kernels.cpu" in done.stdout
    assert done.stderr.count("the compiled CPU kernels are not there") == 1
    assert run("import qtorch", QTORCH_CPU_LIBRARIES=str(tmp_path)).stderr == ""


def test_without_a_compiler(monkeypatch, tmp_path):
    """setup.py warns and goes on."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    environment = {**os.environ, "PATH": "", "CXX": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "there is no C++ compiler on the PATH" in done.stderr
    assert list(tmp_path.rglob("*.so")) == []
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "lib").mkdir()
    assert set(build.build(tmp_path / "lib").values()) == {"there is no C++ compiler on the PATH"}
    assert list((tmp_path / "lib").iterdir()) == []


@pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")
def test_a_compiler_that_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -c 1/0")
    assert all("ZeroDivisionError" in error for error in build.build(tmp_path).values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
def test_another_compiler(tmp_path, monkeypatch):
    """Its library needs torch's OpenMP and no other, so that it loads."""
    monkeypatch.setenv("CXX", "clang++")
    assert build.build(tmp_path, extra=["-O0"], names=["portable"]) == {}
    ctypes.CDLL(str(build.library_path("portable", tmp_path)), os.RTLD_NOW)


@pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")
def test_what_this_machine_needs():
    """The best set that it runs and that the compiler knows, and the portable one."""
    sets, compiler = build.instruction_sets(), build.find_compiler()
    known = [name for name in sets if compiled_library.runs_here(name) and build.accepts(compiler, sets[name])]
    assert build.needed() == list(dict.fromkeys([known[-1], "portable"]))


def test_current_libraries_are_not_compiled_again(tmp_path, monkeypatch):
    compiled, lines = [], []
    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_compile", lambda command, source, target: compiled.append(target.name) or "")
    both = [build.library_path(name, tmp_path) for name in ("portable", build.OPERATORS)]
    both[0].write_bytes(b"\x7fELF" + build.fingerprint().encode())
    both[1].write_bytes(b"of other sources")
    assert build.build(tmp_path, names=["portable"], say=lines.append) == {}
    assert compiled == [both[1].name]
    assert lines[-1].startswith("CPU kernels 1 of 1, operators: ")
    assert build.build(tmp_path, extra=["-g"], names=["portable"]) == {}
    assert sorted(compiled[1:]) == sorted(path.name for path in both)


@NEEDS_LIBRARY
def test_libraries_of_other_sources_are_refused(monkeypatch):
    """A checkout that moved on does not call what was built before."""
    loaded = compiled_library.library()
    monkeypatch.setattr(compiled_library, "fingerprint", lambda: "other")
    with pytest.raises(OSError, match="is of other sources"):
        compiled_library.Library(loaded.instruction_set, loaded.path)


def test_calls_from_eight_threads(build):
    model = layer().requires_grad_(False)
    inputs = [torch.randn(rows, 256) for rows in (1, 2, 5, 9, 17, 40, 70, 3)]
    with ThreadPoolExecutor(8) as pool:
        expected = [model(x) for x in inputs]
        for _ in range(5):
            for y, wanted in zip(pool.map(model, inputs * 4), expected * 4, strict=True):
                assert torch.equal(y, wanted)


def test_choices_and_use():
    kinds, both, sizes = ("float32", "bfloat16", "float16", "int8"), (True, False), (1, variants.SMALL + 1)
    keys = {variants.key_of(*key) for key in itertools.product(kinds, both, both, sizes)}
    keys |= {f"{key} copied" for key in keys if not key.startswith("int8")}
    keys |= {variants.key_of("int8", True, True, size, short_groups=True) for size in sizes}
    shipped = variants.read(variants.SHIPPED)
    for name in build.FLAGS["x86_64"]:
        assert keys <= set().union(*shipped[name].values())
    with pytest.raises(ValueError, match="does not run sse9"), compiled_library.use("sse9"):
        pass
    with pytest.raises(ValueError, match="no variant 'guess'"), variants.force("guess"):
        pass
    model, text = layer(), "cpu_weight_only_mm"
    with compiled_library.use(None):
        assert f"not {text}: is switched off" in str(qtorch.explain(model))
    if compiled_library.library() is not None:
        assert f"runs {text}" in str(qtorch.explain(model))


class Embedded(Dataset):
    """Items that are computed by a quantized layer, in the worker."""

    def __init__(self, model: torch.nn.Module, x: torch.Tensor) -> None:
        self.model, self.x = model, x

    def __len__(self) -> int:
        return len(self.x)

    @torch.no_grad()
    def __getitem__(self, i: int) -> torch.Tensor:
        torch.set_num_threads(2)
        return self.model(self.x[i])


@NEEDS_LIBRARY
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_workers():
    """The parent's threads do not exist in a child: to wait for them would be for ever, as torch's own products do."""
    model, x = layer(), torch.randn(6, 40, 256)
    with variants.force("tile"), warnings.catch_warnings():
        expected = model(x).detach()
        warnings.simplefilter("ignore")
        loader = DataLoader(Embedded(model, x), batch_size=3, num_workers=2, multiprocessing_context="fork", timeout=60)
        batches = list(loader)
    torch.testing.assert_close(torch.cat(batches), expected)
