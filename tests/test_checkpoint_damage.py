"""Broken files: an error that says which, and what is wrong with it. `tests/attack` has more, at random."""

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from safetensors.torch import save_file
from torch import nn

from qtorch import load_quantized, save_quantized
from tests.checkpoint_model import Model, edit_header, error, quantized

NOT_SAFETENSORS = "model.safetensors: truncated, or not a safetensors file ("


def header(**values: object) -> Callable[[dict], object]:
    return lambda whole: whole.update(values)


def of_fc(change: Callable[[dict], object]) -> Callable[[dict], object]:
    return lambda whole: change(whole["quantized"]["fc.weight"])


def scheme(**values: object) -> Callable[[dict], object]:
    return of_fc(lambda entry: entry["scheme"].update(values))


def spec(**values: object) -> Callable[[dict], object]:
    return of_fc(lambda entry: entry["scheme"]["spec"].update(values))


def renamed(old: str, new: str) -> Callable[[dict], object]:
    return of_fc(lambda entry: entry["tensors"].update({new: entry["tensors"].pop(old)}))


def shard(name: str, *tensors: str) -> Callable[[dict], object]:
    return lambda whole: whole["shards"].update({name: list(tensors)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (header(version=99), "format version 99; this qtorch reads version 1"),
        (lambda h: h.pop("version"), "format version None; this qtorch reads version 1"),
        (lambda h: (h["plain"].append("more"), h["checksums"].update(more=1)), "missing key more"),
        (shard("gone"), "its shard gone is missing"),
        (scheme(type="NewScheme"), "fc.weight: from_json: unknown type 'NewSch"),
        (scheme(shape=[32, 31]), "fc.weight has shape (32, 31), the model's has (32, 32); the model is unchanged"),
        (of_fc(lambda entry: entry["scheme"].pop("dtype")), "fc.weight: "),
        (lambda h: h["checksums"].pop(h["quantized"]["fc.weight"]["tensors"].pop("scale")), "fc.weight: scale is"),
        (header(version=1.0), "format version 1.0; this qtorch reads version 1"),
        (header(version=[]), "format version []; this qtorch reads version 1"),
        (lambda h: h.pop("plain"), "its header is wrong: plain is not a list of names"),
        (lambda h: h["plain"].append(3), "its header is wrong: plain is not a list of names"),
        (header(quantized=[]), "its header is wrong: quantized is not an object"),
        (header(shards=None), "its header is wrong: shards is not an object"),
        (header(shards={"a": "steps"}), "its header is wrong: the shard a has no list of names"),
        (header(aliases={"head.weight": {}}), "its header is wrong: head.weight is another name of {}"),
        (lambda h: h["checksums"].update(steps=True), "its header is wrong: steps has the checksum True"),
        (lambda h: h["checksums"].update(steps=2**32), "its header is wrong: steps has the checksum 4294967296"),
        (lambda h: h["checksums"].pop("steps"), "its header is wrong: 'steps' has no checksum"),
        (lambda h: h["checksums"].update(more=1), "its header is wrong: 'more' has a checksum, but is not used"),
        (lambda h: h["plain"].remove("steps"), "its header is wrong: 'steps' has a checksum, but is not used"),
        (lambda h: h["plain"].append("steps"), "its header is wrong: 'steps' names more than one tensor"),
        (lambda h: h["aliases"].update(steps="steps"), "its header is wrong: 'steps' names more than one tensor"),
        (
            lambda h: h["aliases"].update({"head.weight": "head.weights"}),
            "its header is wrong: head.weight is another name of 'head.weights', which is missing",
        ),
        (
            lambda h: h["aliases"].update({"x": "head.weight"}),
            "its header is wrong: x is another name of 'head.weight', which is missing",
        ),
        (
            of_fc(lambda entry: entry["tensors"].update(scale="experts_scale")),
            "its header is wrong: 'experts_scale' is used more than once",
        ),
        (shard("a", "x"), "its header is wrong: 'x' is in a shard, but is not used"),
        (shard("../a"), "its header is wrong: '../a' is not the name of a"),
        (shard(".."), "its header is wrong: '..' is not the name of a"),
        (shard("/etc/passwd"), "its header is wrong: '/etc/passwd' is not the name of a"),
        (shard("a\0"), "its header is wrong: 'a\\x00' is not the name of a"),
        (shard("model.safetensors", "steps"), "steps is in it and in its shard model.safet"),
        (of_fc(lambda entry: entry.pop("scheme")), "fc.weight: its entry has no scheme"),
        (of_fc(lambda entry: entry.update(tensors=[])), "fc.weight: its entry has no names of tensors"),
        (renamed("scale", "scales"), "fc.weight: its tensors are codes, scales; the codes of int8"),
        (renamed("codes", "packed"), "fc.weight: its tensors are packed, scale; the codes of int8"),
        (scheme(shape=[-32, -32]), "fc.weight: no tensor has the shape (-32, -3"),
        (scheme(shape=[2**70]), "fc.weight: no tensor has the shape (1180591"),
        (scheme(shape=[32, None]), "fc.weight: from_json: Scheme.shape takes tuple[int, ...], got (32, None)"),
        (scheme(shape=32), "fc.weight: from_json: Scheme.shape takes tuple[int, ...], got 32"),
        (scheme(dtype="torch.int8"), "fc.weight: a quantized tensor has the dty"),
        (scheme(dtype=None), "fc.weight: from_json: Scheme.dtype takes torch.dtype, got None"),
        (spec(layout="PlainLayout"), "fc.weight: a layout is one of BlockSparseLayout, PackedLayout, PlainLayout"),
        (spec(weight=None), "fc.weight: no quantized tensor has a None"),
        (spec(static=0), "fc.weight: from_json: LinearSpec.static takes True or False, got 0"),
        (scheme(type="ConvScheme"), "fc.weight: the weight of a convolution has 3 to 5 dimensions, got shape (32, 32)"),
    ],
)
def test_edited_header(change: Callable[[dict], object], message: str, path: Path) -> None:
    """Of another version, or what an attacker makes of a header, with a checksum that fits."""
    save_quantized(quantized(), path)
    edit_header(path, change)
    for target in (Model(), quantized()):
        assert error(target, path).startswith(f"model.safetensors: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its header is not JSON: "),
        ("[" * 100_000 + "]" * 100_000, "its header is not JSON: the JSON is nested too deep"),
        ('{"version": 1, "version": 1}', "its header is not JSON: the key 'version' occurs twice"),
        ("[]", "its header is wrong: its header is not an object"),
        ('{"version": 1' + "0" * 5000 + "}", "its header is not JSON: "),
    ],
)
def test_header_that_is_no_header(text: str, message: str, path: Path) -> None:
    save_file({"weight": torch.zeros(2, 2)}, path, {"qtorch": text, "qtorch.crc32": str(zlib.crc32(text.encode()))})
    assert error(nn.Linear(2, 2), path).startswith(f"model.safetensors: {message}")


def test_not_one_of_ours(path: Path) -> None:
    save_file({"weight": torch.zeros(2, 2)}, path)
    assert_expected_inline(
        error(nn.Linear(2, 2), path),
        """model.safetensors: a safetensors file, but not one of save_quantized (its header has no 'qtorch')""",
    )
    assert error(nn.Linear(2, 2), path.with_name("none"), FileNotFoundError) == "none: no such file"
    for data in (b"", b"\0" * 7, b"\x80" + b"\0" * 99, b"\xff" * 99):
        path.write_bytes(data)
        assert error(nn.Linear(2, 2), path).startswith(NOT_SAFETENSORS)
    for zipped in (True, False):
        torch.save(nn.Linear(2, 2).state_dict(), path, _use_new_zipfile_serialization=zipped)
        assert error(nn.Linear(2, 2), path).startswith("model.safetensors: a file of torch.save, not of save_quantized")


def test_wrong_data_and_wrong_header(path: Path) -> None:
    save_quantized(quantized(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert_expected_inline(
        error(Model(), path),
        """model.safetensors: embed.weight_scale is corrupted: its data does not match its checksum""",
    )
    load_quantized(Model(), path, verify=False)
    path.write_bytes(whole.replace(b'"I64"', b'"U64"'))
    assert error(Model(), path) == "model.safetensors: steps is corrupted: its data does not match its checksum"
    path.write_bytes(whole.replace(b"int8", b"int7"))
    assert_expected_inline(
        error(Model(), path), """model.safetensors: its header is corrupted: it does not match its checksum"""
    )


@pytest.mark.parametrize("damage", ["missing", "truncated", "corrupted", "swapped"])
def test_broken_shard(damage: str, path: Path) -> None:
    save_quantized(quantized(), path, max_shard_size=1)
    first, second, *_ = sorted(path.parent.glob("model-*"))
    if damage == "missing":
        first.unlink()
        says = f"model.safetensors: its shard {first.name} is missing"
    elif damage == "truncated":
        first.write_bytes(first.read_bytes()[:-1])
        says = f"{first.name}: truncated, or not a safetensors file"
    elif damage == "corrupted":
        first.write_bytes(first.read_bytes()[:-1] + b"\x55")
        says = f"{first.name}: experts_scale is corrupted: its data does not match its checksum"
    else:
        second.write_bytes(first.read_bytes())
        says = "model.safetensors: missing key "
    assert error(Model(), path).startswith(says)
