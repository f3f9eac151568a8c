"""The header of GGUF: files of gguf's own writer, and damaged ones, whose errors name the file."""

import struct
from pathlib import Path

import pytest
from torch import nn

pytest.importorskip("gguf")

import gguf
import numpy as np
from gguf import GGMLQuantizationType

import qtorch
from qtorch.checkpoint.formats.gguf.reading import GgufFile
from qtorch.checkpoint.sources import open_source
from tests.formats.gguf.random_blocks import QUANTIZED, random_bytes, write
from tests.refusals import refuses

METADATA = {
    "a.string": "text with ü",
    "a.float": 0.5,
    "a.list": [1, 2, 3],
    "a.list_of_strings": [f"token {i}" for i in range(300)],
    "general.alignment": 64,
}


def file(path: Path, names: tuple[str, ...] = ("Q4_K", "Q8_0", "IQ4_NL")) -> Path:
    tensors = {}
    for name in names:
        number, kind = QUANTIZED[name]
        tensors[f"{name}.weight"] = random_bytes(kind, (4, 256)), GGMLQuantizationType(number)
    tensors["bias"] = np.arange(12, dtype=np.float32).reshape(3, 4), None
    return write(path, tensors, "other", METADATA)


def test_as_gguf_reads_it(tmp_path: Path) -> None:
    path = file(tmp_path / "x.gguf")
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info == (int(tensor.tensor_type), tuple(tensor.shape.tolist())[::-1], tensor.data_offset)
        assert ours.read(tensor.name, 0, tensor.n_bytes).numpy().tobytes() == tensor.data.tobytes()
    # Vocabularies are not kept.
    assert ours.metadata == {**METADATA, "general.architecture": "other", "a.list_of_strings": None}
    ours.close()


def header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 1, entries: int = 0, rest: bytes = b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, entries) + rest


def info(name: bytes = b"w", shape: tuple[int, ...] = (32,), kind: int = 8, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + sizes + struct.pack("<IQ", kind, offset)


def entry(kind: int, *sizes: int, item: int | None = None, key: bytes = b"k", times: int = 1) -> bytes:
    """A header with one entry of metadata, of this kind, and what follows it; items of arrays have a kind too."""
    packed = b"".join(struct.pack("<Q", size) for size in sizes)
    of_items = b"" if item is None else struct.pack("<I", item)
    rest = struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + (of_items + packed) * times
    return header(entries=1, rest=rest + info())


HUGE, STRING, ARRAY = 2**62, 8, 9
DAMAGED = {
    "empty": (b"GGUF", "its header would have 4 bytes more, the file has 0"),
    "version": (header(version=4, rest=info()), "version 4; read are 2 and 3"),
    "big-endian": (header(version=3 << 24, rest=info()), "big-endian, which is not read"),
    "tensors": (header(tensors=HUGE, rest=info()), r"its header would have \d+ bytes more"),
    "entries": (header(entries=HUGE, rest=info()), r"its header would have \d+ bytes more"),
    "a long string": (entry(STRING, HUGE), "would have .* bytes more"),
    "a string without end": (entry(STRING, 90), "would have 90 bytes more"),
    "not UTF-8": (header(rest=info(b"\xff\xfe")), "can't decode"),
    "a long array": (entry(ARRAY, HUGE, item=4), "an array would have"),
    "an array of strings": (entry(ARRAY, HUGE, item=STRING), "an array would have"),
    "nested": (entry(ARRAY, 1, item=ARRAY, times=5), "nested more than 4 times"),
    "a type of value": (entry(13), "a value has the type 13"),
    "items": (entry(ARRAY, 1, item=77), "items of an array have the type 77"),
    "no axes": (header(rest=info(shape=()) + bytes(64)), "'w' has 0 axes"),
    "many axes": (header(rest=info(shape=(1,) * 5)), "'w' has 5 axes"),
    "a huge shape": (header(rest=info(shape=(2**40, 2**40))), "'w' has the shape"),
    "twice": (header(tensors=2, rest=info() + info()), "it has two tensors 'w'"),
    "an odd offset": (header(rest=info(offset=7)), "the offset 7 of w is not a multiple of 32"),
    "alignment": (entry(10, 48, key=b"general.alignment"), "general.alignment is a power of two, got 48"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_headers(name: str, tmp_path: Path) -> None:
    data, message = DAMAGED[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    refuses(rf"x\.gguf: truncated, or not a GGUF file \(.*{message}", lambda: open_source(path))


BEYOND = {
    "of the file": (info(shape=(32, 1000)), r"w \(w\): truncated: its data ends at 34"),
    "of numbers": (info(shape=(2**40, 2**20), kind=0, offset=2**40), r"w \(w\): truncated: its data ends at"),
    "by its offset": (info(offset=2**63 - 32), r"w \(w\): truncated: its data ends at"),
    "type": (info(kind=1000), r"w \(w\): it has the type 1000; known are F32"),
    "row": (info(shape=(33,)), r"w \(w\): rows of Q8_0 have a multiple of 32 elements, got shape \(33,\)"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_data_beyond_the_end(name: str, tmp_path: Path) -> None:
    rest, message = BEYOND[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(header(rest=rest) + bytes(64))
    with open_source(path) as source, pytest.raises(ValueError, match=rf"x\.gguf: {message}"):
        source.tensor("w")


def test_an_error_leaves_the_model(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    number, kind = QUANTIZED["Q8_0"]
    model = nn.Linear(64, 8)
    before = model.weight
    data = random_bytes(kind, (8, 64)), GGMLQuantizationType(number)
    write(path, {"weight": data, "bias": (np.zeros(9, np.float32), None)}, "other")
    refuses(r"x\.gguf: bias has shape \(9,\), the model's has \(8,\)", lambda: qtorch.load_quantized(model, path))
    write(path, {"blk.0.attn_q.weight": data}, "starcoder")
    message = (
        r"x\.gguf: missing key weight, bias; unexpected key blk.0.attn_q.weight; the model is unchanged; tensors have "
        "their names of llama.cpp, since the architecture 'starcoder' is not one of llama, qwen2"
    )
    refuses(message, lambda: qtorch.load_quantized(model, path))
    assert model.weight is before
