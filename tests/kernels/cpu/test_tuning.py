"""`tune_cpu`: a measured table that is saved for this user and used, and who is told to make one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import qtorch
from qtorch.kernels.cpu import compiled_library, tuning, variants
from tests.kernels.cpu.builds import NEEDS_LIBRARY, run
from tests.refusals import refuses

SMALL, LARGE = "int8 plain rows small", "int8 plain rows large"


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


@pytest.fixture
def of_user(nothing_known: Path) -> Path:
    """The file of the user's tables, in folders that are there."""
    path = variants.path_of_user()
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    return path


@NEEDS_LIBRARY
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


@NEEDS_LIBRARY
@pytest.mark.usefixtures("nothing_known")
def test_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "measure_variants", lambda _: {LARGE: [(8, "dot"), (None, "tile")]})
    path = tmp_path / "choices.json"
    path.write_text(f'{{"portable on Acme family 7 with portable": {{"{SMALL}": [[null, "tile"]]}}}}')
    table = qtorch.kernels.tune_cpu(path)
    tables = variants.read(path)
    assert tables.pop("portable")["Acme family 7 with portable"] == {SMALL: [[None, "tile"]]}
    ((name, of_set),) = tables.items()
    assert (name, set(of_set)) == (compiled_library.library().instruction_set, {variants.processor_kind()})
    assert of_set[variants.processor_kind()] == {key: [list(step) for step in steps] for key, steps in table.items()}
    assert not variants.path_of_user().exists()


@NEEDS_LIBRARY
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of something else, which stays; a cache that cannot be used; nothing to measure."""
    path = tmp_path / "shopping.json"
    path.write_text('["milk"]')
    refuses("got a list, want tables", lambda: qtorch.tune_cpu(path))
    assert path.read_text() == '["milk"]'
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    refuses("QTORCH_CPU_CHOICES", qtorch.tune_cpu, RuntimeError)
    with compiled_library.use(None), pytest.raises(RuntimeError, match="the compiled kernels, which are missing"):
        qtorch.tune_cpu()


@NEEDS_LIBRARY
@pytest.mark.usefixtures("elsewhere")
def test_reports_say_it_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    report = qtorch.quantize_(model, qtorch.int8_weight_only())
    assert str(report).count("tune_cpu") == 1
    assert str(report).splitlines()[-1] == report.advice[0] == report.to_json()["advice"][0]
    assert str(qtorch.explain(model)).count("tune_cpu") == 1
    assert str(qtorch.explain(model[0].weight)).count("tune_cpu") == 1
    with compiled_library.use(None):
        assert "tune_cpu" not in str(qtorch.explain(model))


@NEEDS_LIBRARY
@pytest.mark.usefixtures("nothing_known")
def test_reports_do_not_say_it_where_it_was_measured() -> None:
    table = {"float32 plain rows small": [[None, "dot"]]}
    variants._loaded[compiled_library.library().instruction_set] = {variants.processor_kind(): table}
    variants.forget()
    model = torch.nn.Linear(64, 64)
    assert qtorch.quantize_(model, qtorch.int8_weight_only()).advice == ()
    assert "tune_cpu" not in str(qtorch.explain(model))


@pytest.mark.usefixtures("nothing_known")
def test_this_vendor_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one table lacks, the next one has."""
    kinds = {"Other family 1 with x": "dot", "Acme family 6 with x": "tile", "Acme family 7 with x": "float"}
    keys = {"Acme family 7 with x": "float32 plain rows small"}
    tables = {kind: {keys.get(kind, SMALL): [[None, variant]]} for kind, variant in kinds.items()}
    monkeypatch.setattr(variants, "_loaded", {"avx2": tables})
    monkeypatch.setattr(variants, "processor_kind", lambda: "Acme family 7 with x")
    variants.forget()
    assert [kind for kind, _ in variants._tables("avx2")][:3] == list(reversed(kinds))
    assert variants.choose("avx2", "float32 plain rows small", 5) == "float"
    assert variants.choose("avx2", SMALL, 5) == "tile"
    assert variants.choose("avx2", LARGE, 5) in ("dot", "tile")  # as shipped


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


def of_avx2(steps: str, key: str = SMALL) -> str:
    return f'{{"avx2": {{"{key}": {steps}}}}}'


WRONG = {
    "not JSON": "{",
    "a list": "[]",
    "a table that is none": '{"avx2": []}',
    "no steps": of_avx2("[]"),
    "no list": of_avx2("8"),
    "no end": of_avx2('[[8, "dot"]]'),
    "huge": of_avx2('[[9999999999999999999999, "dot"], [null, "tile"]]'),
    "not a number": of_avx2('[[true, "dot"], [null, "tile"]]'),
    "falling": of_avx2('[[8, "dot"], [4, "dot"], [null, "tile"]]'),
    "no variant": of_avx2('[[null, "guess"]]'),
    "not a variant of codes": of_avx2('[[null, "fixed"]]'),
    "not a variant of the set": of_avx2('[[null, "amx"]]', "float32 plain rows small"),
    "an unhashable variant": of_avx2('[[null, ["dot"]]]', "float32 plain rows small"),
    "too large": " " * (variants.MOST_BYTES + 1),
    "not text": b"\xff\xfe{}",
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_a_file_is_checked(content: str | bytes, of_user: Path) -> None:
    of_user.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError):  # noqa: PT011 (also those of json)
        variants.load(of_user)
    assert variants._loaded == {}
    variants._tables.cache_clear()
    with pytest.warns(UserWarning, match="are not used"):
        assert variants._tables("avx2")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs owners of files")
def test_a_file_of_others_is_not_read(of_user: Path) -> None:
    """One that they can write; one of another processor in the same home."""
    variants.write(of_user, {"avx2": {variants.processor_kind(): {SMALL: [[None, "torch"]]}}})
    assert variants.of_user()["avx2"]
    of_user.chmod(0o666)
    with pytest.warns(UserWarning, match="not trusted"):
        assert variants.of_user() == {}
    variants.write(of_user, {"avx2": {"Acme family 7 with x": {SMALL: [[None, "torch"]]}}})
    of_user.chmod(0o600)
    assert variants.of_user() == {}


def test_writing_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "choices.json"
    variants.write(path, {"avx2": {"Acme": {SMALL: [[None, "tile"]]}}})
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    refuses("no space", lambda: variants.write(path, {"avx2": {}}), OSError)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.slow
@NEEDS_LIBRARY
def test_another_process_uses_it(of_user: Path) -> None:
    """One variant for all, which no table of ours has."""
    name = compiled_library.library().instruction_set
    key = variants.key_of(torch.float32, False, False, 64 * 64)
    variants.write(of_user, {name: {variants.processor_kind(): {key: [[None, "torch"]]}}})
    done = run(QTORCH_CPU_ISA=name)
    assert "cpu_weight_only_mm.torch" in done.stdout, done.stderr
