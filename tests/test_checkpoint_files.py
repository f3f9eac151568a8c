"""The files themselves: alignment, other readers and writers, memory, and what happens to a file after it was read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import qtorch
from qtorch import load_quantized, save_quantized
from qtorch.checkpoint.tensor_file import ALIGNMENT, DTYPES, TensorFile, write_tensors
from tests.checkpoint_model import assert_same, contents, meta, quantized
from tests.refusals import refuses

ROOT = Path(qtorch.__file__).parent.parent


def tensors() -> dict[str, Tensor]:
    """Of every dtype, of sizes that are and are not multiples of 64 bytes."""
    made = {}
    for name, dtype in DTYPES.items():
        for shape in [(), (0, 3), (3,), (5, 7), (8, 16)]:
            data = torch.randint(0, 2, shape)
            made[f"{name} {shape}"] = data.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else data.to(dtype)
    return made


def plain(values: list[Tensor]) -> list[Tensor]:
    return [inner for value in values for inner in getattr(value, "inner_tensors", {"": value}).values()]


def same(a: Tensor, b: Tensor) -> bool:
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def test_what_we_write_is_read_by_the_library_and_aligned(path: Path) -> None:
    written = tensors()
    write_tensors(path, written, {"format": "pt", "a": "é"})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "a": "é"}
        assert set(file.keys()) == written.keys()
        assert all(same(file.get_tensor(name), tensor) for name, tensor in written.items())
    # Of every tensor to its dtype, and to 64 bytes of those in front, whose sizes are multiples of it.
    for extra in range(9):
        write_tensors(path, tensors(), {"a": "x" * extra})
        file = TensorFile(path)
        begin = min(stored.start for stored in file.stored.values())
        assert begin % ALIGNMENT == 0
        for stored in file.stored.values():
            assert stored.start % stored.dtype.itemsize == 0
            assert stored.start % ALIGNMENT == 0 or (stored.stop - stored.start) % ALIGNMENT
        file.close()


@pytest.mark.parametrize("method", ["read", "map"])
def test_we_read_what_the_library_writes(method: str, path: Path) -> None:
    written = tensors()
    save_file(written, path, {"a": "é"})
    file = TensorFile(path)
    assert file.metadata == {"a": "é"}
    assert file.stored.keys() == written.keys()
    for name, tensor in written.items():
        assert same(getattr(file, method)(name), tensor)
    file.close()


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("misaligned_by", [0, 1, 8, 24])
def test_alignment_in_memory(mmap: bool, misaligned_by: int, path: Path) -> None:
    """Also where the file has tensors anywhere, as files of other writers do."""
    saved = quantized()
    save_quantized(saved, path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    path.write_bytes((length + misaligned_by).to_bytes(8, "little") + whole[8 : 8 + length] + b" " * misaligned_by)
    with path.open("ab") as file:
        file.write(whole[8 + length :])
    model = load_quantized(meta(), path, mmap=mmap)
    assert all(t.data_ptr() % ALIGNMENT == 0 for t in plain([t for _, t in contents(model)]) if len(t.shape))
    assert_same(model, saved)


DAMAGED_LATER = """
import itertools, sys, torch
from pathlib import Path
from qtorch import load_quantized, save_quantized
from tests.checkpoint_model import IDS, meta, quantized

def damage(file, how):
    if how == "truncated":
        file.open("r+b").truncate(0)
    elif how == "overwritten":
        file.open("r+b").write(b"\\xff" * file.stat().st_size)
    else:
        file.unlink()

saved = quantized()
for how, shard_size in itertools.product(["truncated", "overwritten", "removed"], [1, 2**30]):
    folder = Path(sys.argv[1]) / f"{how}-{shard_size}"
    folder.mkdir()
    save_quantized(saved, folder / "model.safetensors", max_shard_size=shard_size)
    model = load_quantized(meta(), folder / "model.safetensors")
    with torch.no_grad():
        before = model(IDS)
        for file in folder.iterdir():
            damage(file, how)
        assert torch.equal(before, model(IDS))
    print(how, shard_size)
"""


def run(script: str, *arguments: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    return subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
def test_what_happens_to_the_file_later(tmp_path: Path) -> None:
    """SIGBUS, where the file was mapped; so in a process of its own."""
    assert len(run(DAMAGED_LATER, tmp_path).splitlines()) == 6


PEAK = """
import re, sys, torch
from pathlib import Path
from torch import nn
from qtorch import load_quantized

def memory(what):
    return int(re.search(what + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)])
load_quantized(nn.Linear(4, 4), sys.argv[2])
before = memory("VmRSS")
load_quantized(model, sys.argv[1])
print((memory("VmHWM") - before) / sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_peak_memory(path: Path) -> None:
    """The model once, and a tensor."""
    save_quantized(nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)]), path)
    save_quantized(nn.Linear(4, 4), small := path.with_name("small"))
    assert 0.8 < float(run(PEAK, path, small)) < 1.4


@pytest.mark.parametrize(("header", "message"), [
    ({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}, "x has the dtype 'F4'; known: BOOL, "),
    ({"x": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}, "x has the dtype []; known: BOOL, "),
    ({"x": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}, "x has the shape [-2, -1]"),
    ({"x": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, "x has the shape [True, 2]"),
    ({"x": {"dtype": "F32", "shape": [0, 2**62, 2], "data_offsets": [0, 8]}}, "x has the shape [0, 46116860184"),
    ({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "x takes 12 bytes, its offsets are [0, 8]"),
    ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [8]}}, "x has the offsets [8]"),
    ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "the data of x begins at "),
    ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "the data ends at "),
    ({"x": {"dtype": "F32", "shape": [2]}}, "x is not described by dtype, shape and data_offsets"),
    ({"x": 3}, "x is not described by dtype, shape and data_offsets"),
    ([], "its header is not an object"),
    ({"__metadata__": {"a": 1}}, "its __metadata__ is not an object of strings"),
    (
        {
            "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        },
        "the data of y begins at ",
    ),
])  # fmt: skip
def test_headers_that_are_refused(header: object, message: str, path: Path) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        TensorFile(path)
    assert str(error.value).startswith(f"{path}: truncated, or not a safetensors file ({message}")


def test_booleans_and_what_is_no_checkpoint(path: Path) -> None:
    """torch reads and copies the byte as it is, and then 2 is neither True nor False."""
    module = nn.Module()
    module.register_buffer("mask", torch.tensor([True, False]))
    save_quantized(module, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + b"\x02\x00")
    for mmap in (True, False):
        with pytest.raises(ValueError, match="mask has bytes that are not booleans"):
            load_quantized(module, path, verify=False, mmap=mmap)
    path.unlink()
    os.mkfifo(path)
    refuses(r"model\.safetensors: it is not a regular file", lambda: load_quantized(nn.Linear(2, 2), path))
    path.unlink()
    path.mkdir()
    refuses(r"model\.safetensors: the folder is empty", lambda: load_quantized(nn.Linear(2, 2), path))
    path.rmdir()
    refuses("__metadata__ is reserved by the format", lambda: save_quantized({"__metadata__": torch.zeros(1)}, path))
    assert not list(path.parent.iterdir())
