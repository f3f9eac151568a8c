"""quantize_checkpoint is interrupted at any step, and continued by the next call, whatever lies where it stopped."""

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import qtorch
from qtorch import quantize_checkpoint
from qtorch.checkpoint import part_file
from qtorch.checkpoint.streaming import forms, partial
from tests.float_checkpoints import assert_same, decoder, expected, save_shards, stored


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_shards(decoder().state_dict(), tmp_path / "float", 3)


class Interruption(Exception):
    pass


STRIDE = {"qtorch": 7, "transformers": 13, "compressed-tensors": 17}
"""The test of each format stops at every 7th, 13th, 17th step."""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["qtorch", "transformers", "compressed-tensors"])
def test_any_break_is_continued(format: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop at every step that changes the disk, and continue once."""
    monkeypatch.setattr(partial, "JOURNAL_BYTES", 1)
    monkeypatch.setattr(partial, "_DATA_PER_JOURNAL", 0)
    recipe = qtorch.int4_weight_only(group_size=32)
    target = tmp_path / ("q.safetensors" if format == "qtorch" else "q")

    def run() -> qtorch.QuantizeReport:
        return quantize_checkpoint(source, target, recipe, format=format, max_shard_size=6000)

    wanted_report = run()
    wanted = _files(tmp_path)
    _clean(tmp_path)
    seen: list[None] = []
    with monkeypatch.context() as patch:
        _steps(patch, lambda: seen.append(None))
        run()
    steps = len(seen)
    assert steps > 30
    _clean(tmp_path)
    for stop in range(0, steps, STRIDE[format]):
        with monkeypatch.context() as patch:
            _stop_at(patch, stop)
            with pytest.raises(Interruption):
                run()
        assert run() == wanted_report
        assert _files(tmp_path) == wanted
        _clean(tmp_path)


def _steps(patch: pytest.MonkeyPatch, before: object) -> None:
    """Call `before` before each step that changes the disk."""

    def watched(function: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            before()
            return function(*args, **kwargs)

        return call

    patch.setattr(os, "replace", watched(os.replace))
    patch.setattr(os, "fsync", watched(os.fsync))
    patch.setattr(shutil, "rmtree", watched(shutil.rmtree))
    patch.setattr(Path, "rename", watched(Path.rename))
    patch.setattr(forms.shutil, "copyfile", watched(shutil.copyfile))
    patch.setattr(part_file.PartFile, "write", watched(part_file.PartFile.write))
    patch.setattr(part_file, "header_of", watched(part_file.header_of))


def _stop_at(patch: pytest.MonkeyPatch, step: int) -> None:
    left = step

    def check() -> None:
        nonlocal left
        if left == 0:
            raise Interruption
        left -= 1

    _steps(patch, check)


def _files(folder: Path) -> dict[str, bytes]:
    """All files but those of the source."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {str(name): path.read_bytes() for name, path in found.items() if name.parts[0] != "float"}


def _clean(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "float":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def interrupted(source: Path, target: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a checkpoint that was begun."""
    with monkeypatch.context() as patch:
        patch.setattr(partial, "JOURNAL_BYTES", 1)
        patch.setattr(partial, "_DATA_PER_JOURNAL", 0)
        _stop_at(patch, 30)
        with pytest.raises(Interruption):
            quantize_checkpoint(source, target, qtorch.int8_weight_only(), format=format, max_shard_size=6000)
    return target.with_name(f".{target.name}.partial")


def edit_journal(folder: Path, change: Callable[[Any], object], fits: bool = True) -> None:
    content = json.loads((folder / "journal.json").read_text())
    change(content["data"])
    if fits:
        content["crc32"] = zlib.crc32(json.dumps(content["data"]).encode())
    (folder / "journal.json").write_text(json.dumps(content))


JOURNALS: dict[str, Callable[[Any], object]] = {
    "a file elsewhere": lambda data: data["files"][0].update(path="../../../victim"),
    "fewer are done": lambda data: data["counts"].pop(),
    "more are done": lambda data: data["counts"].extend([1] * 999),
    "one more is done": lambda data: data["counts"].append(1),
    "a negative count": lambda data: data["counts"].append(-1),
    "room": lambda data: data["files"][0].update(room=2**60),
    "negative room": lambda data: data["files"][0].update(room=-8),
    "a shape": lambda data: data["files"][0]["written"][0].__setitem__(2, [-1]),
    "a size": lambda data: data["files"][0]["written"][0].__setitem__(3, 2**62),
    "a dtype": lambda data: data["files"][0]["written"][0].__setitem__(1, "F64"),
    "a checksum": lambda data: data["files"][0]["written"][0].__setitem__(5, 7),
    "a name": lambda data: data["files"][0]["written"][0].__setitem__(0, "__metadata__"),
    "a row": lambda data: data["rows"].append({"name": "x"}),
    "a report": lambda data: data["rows"][0].update(sqnr="high"),
    "no form": lambda data: data.pop("form"),
    "lists": lambda data: data.update(files={}, rows=[], counts=[]),
}


@pytest.mark.parametrize(("name", "format"), [
    *((name, "qtorch") for name in [*JOURNALS, "unfit checksum", "data", "a link", "links", "deep", "folder"]),
    *((name, format) for name in ("no form", "a row", "data") for format in ("transformers", "compressed-tensors")),
])  # fmt: skip
def test_a_journal_of_somebody_else_begins_anew(
    name: str, format: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {kind: tmp_path / kind for kind in ("wanted", "damaged")}
    target = {kind: folder / ("q.safetensors" if format == "qtorch" else "q") for kind, folder in folders.items()}
    for folder in folders.values():
        folder.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    recipe = qtorch.int8_weight_only()
    quantize_checkpoint(source, target["wanted"], recipe, format=format, max_shard_size=6000)
    left = interrupted(source, target["damaged"], format, monkeypatch)
    part = min(left.glob("files/*"))
    if name in JOURNALS:
        edit_journal(left, JOURNALS[name])
    elif name == "data":
        written = json.loads((left / "journal.json").read_text())["data"]["files"][0]["written"]
        start = next(start for _, _, _, size, start, _ in written if size % 64 == 0)
        part = next(part for part in left.glob("files/00000.*") if part.suffix != ".odd")
        data = bytearray(part.read_bytes())
        data[start] ^= 1
        part.write_bytes(data)
    elif name == "a link":
        part.unlink()
        part.symlink_to(victim)
    elif name == "links":
        shutil.rmtree(left)
        left.mkdir()
        for entry in ("lock", "journal.json", "journal.new", "files"):
            (left / entry).symlink_to(victim)
    elif name == "deep":
        (left / "journal.json").write_text("[" * 100_000 + "]" * 100_000)
    elif name == "folder":
        (left / "journal.json").unlink()
        (left / "journal.json").mkdir()
    else:
        edit_journal(left, lambda data: data["counts"].append(1), fits=False)
    anew = nullcontext() if name == "a file elsewhere" else pytest.warns(match=r"begun anew, since .* is damaged: ")
    with anew:
        quantize_checkpoint(source, target["damaged"], recipe, format=format, max_shard_size=6000)
    assert _files(folders["damaged"]) == _files(folders["wanted"])
    assert victim.read_text() == "precious"


def test_two_processes_and_other_arguments(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "p.safetensors"
    form = forms.form_of("qtorch", source, {}, None, {})
    with (
        partial.Partial(target, {}, form, [], 1 << 30),
        pytest.raises(BlockingIOError, match="another process is writing it"),
    ):
        quantize_checkpoint(source, target, qtorch.int8_weight_only())
    monkeypatch.setattr(partial, "JOURNAL_BYTES", 1)
    target = tmp_path / "q.safetensors"
    with monkeypatch.context() as patch:
        _stop_at(patch, 20)
        with pytest.raises(Interruption):
            quantize_checkpoint(source, target, qtorch.int4_weight_only(group_size=32))
    assert (tmp_path / ".q.safetensors.partial" / "journal.json").exists()
    quantize_checkpoint(source, target, qtorch.int8_weight_only())
    assert_same(stored(target), expected(tmp_path / "wanted.safetensors", qtorch.int8_weight_only()))
    # So that the test above is one of the damage.
    interrupted(source, tmp_path / "whole.safetensors", "qtorch", monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_checkpoint(source, tmp_path / "whole.safetensors", qtorch.int8_weight_only(), max_shard_size=6000)
