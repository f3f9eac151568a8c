"""Broken files and interrupted saves: an error that says which, and the old checkpoint whole."""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import qtorch
from qtorch import (
    checkpoint,
    load_quantized,
    quantize_,
    save_quantized,
)
from tests.checkpoint_model import INT8, SMALL, Model, assert_same, error, files, quantized


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# --- broken files ---

NOT_SAFETENSORS = "model.safetensors: truncated, or not a safetensors file ("


def edit_header(path: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the header, with a checksum that fits."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    header = json.loads(metadata["qtorch"])
    change(header)
    text = json.dumps(header)
    save_file(load_file(path), path, {"qtorch": text, "qtorch.crc32": str(zlib.crc32(text.encode()))})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(version=99), "model.safetensors: format version 99; this qtorch reads version 1"),
        (lambda h: h.pop("version"), "model.safetensors: format version None; this qtorch reads version 1"),
        (lambda h: h["plain"].append("more"), "model.safetensors: missing key more"),
        (lambda h: h["checksums"].update(more=1), "model.safetensors: missing key more"),
        (lambda h: h["shards"].update({"gone": ["x"]}), "model.safetensors: its shard gone is missing"),
        (
            lambda h: h["quantized"]["fc.weight"]["scheme"].update(type="NewScheme"),
            "model.safetensors: fc.weight: from_json: unknown type 'NewScheme'",
        ),
        (
            lambda h: h["quantized"]["fc.weight"]["scheme"].update(shape=[32, 31]),
            "model.safetensors: fc.weight: the codes have shape (32, 32), the scheme (32, 31)",
        ),
        (lambda h: h["quantized"]["fc.weight"]["scheme"].pop("dtype"), "model.safetensors: fc.weight: "),
        (
            lambda h: h["quantized"]["fc.weight"]["tensors"].pop("scale"),
            "model.safetensors: fc.weight: scale is",
        ),
    ],
)
def test_header_of_another_version(change: Callable[[dict], object], message: str, path: Path) -> None:
    save_quantized(quantized(), path)
    edit_header(path, change)
    assert error(Model(), path).startswith(message)


def test_not_one_of_ours(path: Path) -> None:
    save_file({"weight": torch.zeros(2, 2)}, path)
    assert_expected_inline(
        error(nn.Linear(2, 2), path),
        """model.safetensors: a safetensors file, but not one of save_quantized (its header has no 'qtorch')""",
    )
    assert error(nn.Linear(2, 2), path.with_name("none"), FileNotFoundError) == "none: no such file"
    for data in (b"", b"\0" * 7, b"PK\3\4" + b"\0" * 99, b"\xff" * 99):
        path.write_bytes(data)
        assert error(nn.Linear(2, 2), path).startswith(NOT_SAFETENSORS)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("sample") / "model.safetensors"
    layer = nn.Linear(16, 4)
    quantize_(layer, INT8)
    save_quantized(layer, path)
    return path


fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(data=st.data())
def test_truncated(data: st.DataObject, sample: Path, path: Path) -> None:
    whole = sample.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert error(nn.Linear(16, 4), path).startswith(NOT_SAFETENSORS)


@fuzz
@given(data=st.data())
def test_one_wrong_byte(data: st.DataObject, sample: Path, path: Path) -> None:
    """An error, or (in a byte that means nothing) the right model; never another one."""
    whole = bytearray(sample.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    model = nn.Linear(16, 4)
    try:
        load_quantized(model, path)
    except ValueError:
        assert type(model.weight) is nn.Parameter
    else:
        assert torch.equal(model.weight, load_quantized(nn.Linear(16, 4), sample).weight)
        assert torch.equal(model.bias, load_quantized(nn.Linear(16, 4), sample).bias)


def test_wrong_data_and_wrong_header(path: Path) -> None:
    save_quantized(quantized(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert_expected_inline(
        error(Model(), path), """model.safetensors: fc.weight is corrupted: its data does not match its checksum"""
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


# --- interrupted saves ---


@pytest.mark.parametrize("step", ["save_file", "os.replace", "os.fsync"])
@pytest.mark.parametrize("times", [0, 1, 2])
def test_failure_while_saving(step: str, times: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = quantized()
    save_quantized(old, path, max_shard_size=SMALL)
    owner, name = (checkpoint.save.os, step.partition(".")[2]) if "." in step else (checkpoint.save, step)
    function, calls = getattr(owner, name), []

    def failing(*args: object) -> object:
        calls.append(args)
        if len(calls) > times:
            raise InterruptedError
        return function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(InterruptedError):
            save_quantized(quantized(), path, max_shard_size=SMALL)
    assert_same(load_quantized(Model(), path), old)
    assert not list(path.parent.glob(".*"))
    save_quantized(old, path)
    assert files(path.parent) == ["model.safetensors"]


def test_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint.save, "save_file", full)
    with pytest.raises(OSError, match=r"save_quantized: cannot write .*model\.safetensors: .*No space left on device"):
        save_quantized(nn.Linear(2, 2), path)
    assert files(path.parent) == []


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from torch import nn
import qtorch
import qtorch.checkpoint.save
from qtorch import checkpoint

def model(value):
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)]).requires_grad_(False).apply(
        lambda m: m.weight.fill_(value) if isinstance(m, nn.Linear) else None)

def kill_after(function, calls):
    def killing(*args):
        nonlocal calls
        if not calls:
            if function is checkpoint.save.save_file.__wrapped__:
                Path(args[1]).write_bytes(b"half a fi")
            os.kill(os.getpid(), signal.SIGKILL)
        calls -= 1
        return function(*args)
    killing.__wrapped__ = function
    return killing

for step in range(6):
    folder = Path(sys.argv[1]) / str(step)
    folder.mkdir()
    qtorch.save_quantized(model(0.0), folder / "model.safetensors", max_shard_size=1)
    if not (child := os.fork()):
        checkpoint.save.save_file = kill_after(checkpoint.save.save_file, step if step < 3 else 99)
        os.replace = kill_after(os.replace, step - 3 if step >= 3 else 99)
        qtorch.save_quantized(model(1.0), folder / "model.safetensors", max_shard_size=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_saving(tmp_path: Path) -> None:
    """At every file that is written and every one that is moved into place."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(qtorch.__file__).parent.parent
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=True, cwd=root, env=environment)
    for step in range(6):
        target = tmp_path / str(step) / "model.safetensors"
        model = load_quantized(nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)]), target)
        assert all(bool((layer.weight == 0).all()) for layer in model)
        assert len(files(target.parent)) > 3
        save_quantized(model, target, max_shard_size=1)
        assert len(files(target.parent)) == 3
