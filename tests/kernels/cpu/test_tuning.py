"""`tune_cpu`: a measured table that is saved for this user and used, and who is told to make one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import qtorch
from qtorch.kernels.cpu import compiled_library, tuning, variants

compiled = pytest.mark.skipif(compiled_library.library() is None, reason="nothing is compiled")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Set up first, so that tables are read again when nothing is patched any more."""
    yield
    variants.forget()


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user without tables; the folder of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("QTORCH_CPU_CHOICES", raising=False)
    monkeypatch.setattr(variants, "_loaded", {})
    variants.forget()
    return tmp_path


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement of seconds."""
    monkeypatch.setattr(tuning, "SIZES", {"small": 256, "large": 1152})
    monkeypatch.setattr(tuning, "ROWS", {"small": (1, 40), "large": (1,)})
    monkeypatch.setattr(tuning, "COPIES", {"small": 1, "large": 1})
    monkeypatch.setattr(tuning, "ROUNDS", 1)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, nothing_known: Path) -> str:
    """A processor on which nothing was measured."""
    monkeypatch.setattr(variants, "processor_kind", lambda: "Acme family 7 with roadrunner")
    return variants.processor_kind()


def layer() -> nn.Linear:
    made = nn.Linear(64, 64)
    qtorch.quantize_(made, qtorch.int8_weight_only())
    return made


@compiled
@pytest.mark.usefixtures("short")
def test_it_is_measured_saved_and_used(elsewhere: str) -> None:
    name = compiled_library.library().instruction_set
    assert "qtorch.tune_cpu()" in variants.advice()
    table = qtorch.tune_cpu()
    kinds = ("int8", *(f"{d}{copied}" for d in ("float32", "bfloat16", "float16") for copied in ("", " copied")))
    assert len(table) == 2 * 2 * 2 * len(kinds) + len(tuning.SIZES)  # of short groups
    assert all(steps[-1][0] is None for steps in table.values())
    key = variants.key_of(torch.float32, False, False, 256**2)
    assert variants.choose(name, key, 1) == table[key][0][1]
    assert variants.advice() is None
    # As another process finds it.
    variants._loaded.clear()
    variants.forget()
    assert variants.of_user() == {name: {elsewhere: {k: [list(s) for s in steps] for k, steps in table.items()}}}
    assert variants.choose(name, key, 1) == table[key][0][1]
    assert variants.advice() is None
    assert (variants.path_of_user().stat().st_mode & 0o777) & 0o022 == 0


@compiled
@pytest.mark.usefixtures("nothing_known")
def test_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "measure_variants", lambda _: {"int8 plain rows large": [(8, "dot"), (None, "tile")]})
    path = tmp_path / "ways.json"
    path.write_text('{"portable on Acme family 7 with portable": {"int8 plain rows small": [[null, "tile"]]}}')
    table = qtorch.kernels.tune_cpu(path)
    tables = variants.read(path)
    assert tables.pop("portable")["Acme family 7 with portable"] == {"int8 plain rows small": [[None, "tile"]]}
    ((name, of_set),) = tables.items()
    assert (name, set(of_set)) == (compiled_library.library().instruction_set, {variants.processor_kind()})
    assert of_set[variants.processor_kind()] == {key: [list(step) for step in steps] for key, steps in table.items()}
    assert not variants.path_of_user().exists()


def test_not_over_a_file_of_something_else(tmp_path: Path) -> None:
    if compiled_library.library() is None:
        pytest.skip("nothing is compiled")
    path = tmp_path / "shopping.json"
    path.write_text('["milk"]')
    with pytest.raises(ValueError, match="got a list, want tables"):
        qtorch.tune_cpu(path)
    assert path.read_text() == '["milk"]'


def test_without_compiled_kernels() -> None:
    with compiled_library.use(None), pytest.raises(RuntimeError, match="the compiled kernels, which are missing"):
        qtorch.tune_cpu()


def test_where_the_cache_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if compiled_library.library() is None:
        pytest.skip("nothing is compiled")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="QTORCH_CPU_CHOICES"):
        qtorch.tune_cpu()


@compiled
@pytest.mark.usefixtures("elsewhere")
def test_reports_say_it_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    report = qtorch.quantize_(model, qtorch.int8_weight_only())
    assert str(report).count("tune_cpu") == 1
    assert str(report).splitlines()[-1] == report.advice[0] == report.to_json()["advice"][0]
    assert str(qtorch.explain(model)).count("tune_cpu") == 1
    assert str(qtorch.explain(model[0].weight)).count("tune_cpu") == 1
    with compiled_library.use(None):
        assert "tune_cpu" not in str(qtorch.explain(model))


@compiled
def test_reports_do_not_say_it_where_it_was_measured(nothing_known: Path) -> None:
    name = compiled_library.library().instruction_set
    table = {"float32 plain rows small": [[None, "dot"]]}
    variants._loaded[name] = {variants.processor_kind(): table}
    variants.forget()
    model = layer()
    assert "tune_cpu" not in str(qtorch.explain(model))
    assert qtorch.quantize_(nn.Linear(64, 64), qtorch.int8_weight_only()).advice == ()


def test_this_vendor_before_others(monkeypatch: pytest.MonkeyPatch, nothing_known: Path) -> None:
    """What one table lacks, the next one has."""
    kinds = {"Other family 1 with x": "dot", "Acme family 6 with x": "tile", "Acme family 7 with x": "float"}
    keys = {"Acme family 7 with x": "float32 plain rows small"}
    tables = {kind: {keys.get(kind, "int8 plain rows small"): [[None, variant]]} for kind, variant in kinds.items()}
    monkeypatch.setattr(variants, "_loaded", {"avx2": tables})
    monkeypatch.setattr(variants, "processor_kind", lambda: "Acme family 7 with x")
    assert [kind for kind, _ in variants._tables("avx2")][:3] == list(reversed(kinds))
    assert variants.choose("avx2", "float32 plain rows small", 5) == "float"
    assert variants.choose("avx2", "int8 plain rows small", 5) == "tile"
    assert variants.choose("avx2", "int8 plain rows large", 5) in ("dot", "tile")  # as shipped


def test_the_kind_of_this_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\n\nprocessor\t: 1\nvendor_id\t: Other\n"
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(variants, "CPUINFO", tmp_path / "cpuinfo")
    assert variants._vendor_and_family() == "GenuineIntel family 6"
    (tmp_path / "cpuinfo").write_text("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\n")
    assert variants._vendor_and_family() == "0x41 family 0xd40"
    monkeypatch.setattr(variants, "CPUINFO", tmp_path / "missing")
    assert variants._vendor_and_family()
    assert variants.processor_kind().endswith(tuple(f" with {name}" for name in compiled_library.instruction_sets()))


WRONG = {
    "not JSON": "{",
    "a list": "[]",
    "a table that is none": '{"avx2": []}',
    "no steps": '{"avx2": {"int8 plain rows small": []}}',
    "no list": '{"avx2": {"int8 plain rows small": 8}}',
    "no end": '{"avx2": {"int8 plain rows small": [[8, "dot"]]}}',
    "huge": '{"avx2": {"int8 plain rows small": [[9999999999999999999999, "dot"], [null, "tile"]]}}',
    "not a number": '{"avx2": {"int8 plain rows small": [[true, "dot"], [null, "tile"]]}}',
    "falling": '{"avx2": {"int8 plain rows small": [[8, "dot"], [4, "dot"], [null, "tile"]]}}',
    "no variant": '{"avx2": {"int8 plain rows small": [[null, "guess"]]}}',
    "not a variant of codes": '{"avx2": {"int8 plain rows small": [[null, "fixed"]]}}',
    "not a variant of the set": '{"avx2": {"float32 plain rows small": [[null, "amx"]]}}',
    "an unhashable variant": '{"avx2": {"float32 plain rows small": [[null, ["dot"]]]}}',
    "too large": " " * (variants.MOST_BYTES + 1),
    "not text": b"\xff\xfe{}",
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_a_file_is_checked(content: str | bytes, nothing_known: Path) -> None:
    path = variants.path_of_user()
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError):  # noqa: PT011 (also those of json)
        variants.load(path)
    assert variants._loaded == {}
    with pytest.warns(UserWarning, match="are not used"):
        assert variants.choose("avx2", "int8 plain rows small", 1) in ("dot", "tile", "torch")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs owners of files")
def test_a_file_that_others_can_write_is_not_read(nothing_known: Path) -> None:
    path = variants.path_of_user()
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    variants.write(path, {"avx2": {variants.processor_kind(): {"int8 plain rows small": [[None, "torch"]]}}})
    assert variants.of_user()["avx2"]
    path.chmod(0o666)
    with pytest.warns(UserWarning, match="not trusted"):
        assert variants.of_user() == {}


def test_of_another_processor_in_the_same_home(nothing_known: Path) -> None:
    path = variants.path_of_user()
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    variants.write(path, {"avx2": {"Acme family 7 with x": {"int8 plain rows small": [[None, "torch"]]}}})
    assert variants.of_user() == {}


def test_writing_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ways.json"
    variants.write(path, {"avx2": {"Acme": {"int8 plain rows small": [[None, "tile"]]}}})
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        variants.write(path, {"avx2": {}})
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["ways.json"]


@compiled
def test_another_process_uses_it(nothing_known: Path) -> None:
    """One variant for all, which no table of ours has."""
    name = compiled_library.library().instruction_set
    path = variants.path_of_user()
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    key = variants.key_of(torch.float32, False, False, 64 * 64)
    variants.write(path, {name: {variants.processor_kind(): {key: [[None, "torch"]]}}})
    program = (
        "import torch, qtorch\nfrom qtorch.kernels import record_kernels\n"
        "layer = torch.nn.Linear(64, 64)\nqtorch.quantize_(layer, qtorch.int8_weight_only())\n"
        "with record_kernels() as ran: layer(torch.randn(3, 64))\nprint(ran)"
    )
    environment = {**os.environ, "QTORCH_CPU_ISA": name}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "cpu_weight_only_mm.torch" in done.stdout, done.stderr
