"""Files of GGUF: the container, and the numbers of every type of block."""

import struct
from pathlib import Path

import pytest

pytest.importorskip("gguf")

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

import qtorch
from qtorch.checkpoint.formats.gguf.block_types import TYPES
from qtorch.checkpoint.formats.gguf.reading import GgufFile
from qtorch.checkpoint.sources import open_source
from tests.formats.gguf.random_blocks import QUANTIZED, random_bytes, write
from tests.refusals import refuses
from tests.rounding import assert_same_product

METADATA = {
    "a.string": "text with ü", "a.float": 0.5, "a.list": [1, 2, 3],
    "a.list_of_strings": [f"token {i}" for i in range(300)], "general.alignment": 64,
}  # fmt: skip


def file(path: Path, names: tuple[str, ...] = ("Q4_K", "Q8_0", "IQ4_NL")) -> Path:
    tensors = {}
    for name in names:
        number, kind = QUANTIZED[name]
        tensors[f"{name}.weight"] = random_bytes(kind, (4, 256)), GGMLQuantizationType(number)
    tensors["bias"] = np.arange(12, dtype=np.float32).reshape(3, 4), None
    return write(path, tensors, "other", METADATA)


def test_as_gguf_reads_it_and_contents_without_reading(tmp_path: Path) -> None:
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
    tensors = {name: (random_bytes(kind, (4, 256)), GGMLQuantizationType(i)) for name, (i, kind) in QUANTIZED.items()}
    path = write(tmp_path / "x.gguf", tensors, "other")
    with open_source(path) as source:
        for name, (data, _) in tensors.items():
            contents = source.contents(name)
            tensor = source.tensor(name)
            assert contents == ((4, 256), torch.float32, data.nbytes, tensor.scheme)


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
    model = torch.nn.Linear(64, 8)
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


# Bits of an element in memory: of the code, scale and offset.
BITS = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q2_K": 3.125, "Q3_K": 3.5625, "Q4_K": 4.625,
    "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "TQ1_0": 2.0625, "TQ2_0": 2.09375, "MXFP4": 4.25,
}  # fmt: skip


def expected(data: np.ndarray, number: int) -> torch.Tensor:
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.array(gguf.quants.dequantize(data, GGMLQuantizationType(number))))


@pytest.mark.parametrize("shape", [(6, 512), (3, 2, 256), (0, 256)], ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_numbers_of_gguf(name: str, shape: tuple[int, ...]) -> None:
    number, kind = QUANTIZED[name]
    for seed in range(3):
        data = random_bytes(kind, shape, seed)
        wanted = expected(data, number) if data.size else torch.empty(shape)
        tensor = kind.tensor(torch.from_numpy(data.reshape(-1)), shape)
        assert isinstance(tensor, qtorch.dtypes.QuantizedTensor)
        assert torch.equal(tensor.dequantize(), wanted)
        assert (tensor.dtype, tensor.scheme) == (torch.float32, kind.scheme(shape))
        table = 0 if getattr(tensor, "table", None) is None else tensor.table.nbytes
        assert tensor.nbytes - table == BITS[name] * tensor.numel() / 8


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_kernel_reads_the_codes(name: str, tmp_path: Path) -> None:
    number, kind = QUANTIZED[name]
    data = random_bytes(kind, (48, 512), scale=0.25)
    path = write(tmp_path / "x.gguf", {"w": (data, GGMLQuantizationType(number))}, "other")
    model = torch.nn.Linear(512, 48, bias=False, device="meta")
    model.register_parameter("w", model._parameters.pop("weight"))
    qtorch.load_quantized(model, path)
    weight = model.w
    of_torch = "weight_only_mm" if kind.spec.dtype.bits == 8 else "packed_weight_mm"
    integers = of_torch if qtorch.kernels.cpu.compiled_library.library() is None else "cpu_weight_only_mm"
    tables = "lut_weight_mm" if qtorch.kernels.cpu.compiled_library.library() is None else "cpu_lut_mm"
    kernel = {"IQ4_NL": tables, "IQ4_XS": tables}.get(name, integers)
    x = torch.randn(5, 512)
    with qtorch.kernels.record_kernels() as ran:
        y = torch.nn.functional.linear(x, weight)
    assert ran[0] == f"linear:{kernel}"
    assert qtorch.explain(weight).kernel == kernel
    assert_same_product(y, x @ expected(data, number).T, x, expected(data, number))


@pytest.mark.parametrize("name", [kind.name for kind in TYPES.values() if kind.spec is None and kind.dtype is None])
def test_what_no_spec_holds_is_refused_by_name(name: str, tmp_path: Path) -> None:
    number, kind = next((number, kind) for number, kind in TYPES.items() if kind.name == name)
    data = np.zeros((2, 512 // kind.size * kind.nbytes), dtype=np.uint8)
    path = write(tmp_path / "x.gguf", {"w": (data, GGMLQuantizationType(number))}, "other")
    with open_source(path) as source:
        assert source.names == {"w"}
        for read in (source.contents, source.tensor):
            refuses(rf"x\.gguf: w \(w\): it is stored as {name}, which no spec", lambda read=read: read("w"))


def test_plain_numbers_and_mxfp4(tmp_path: Path) -> None:
    tensors = {
        "F32": (torch.randn(3, 5), None),
        "F16": (torch.randn(3, 5).half(), None),
        "F64": (torch.randn(4).double(), None),
        "I8": (torch.randint(-128, 128, (7,), dtype=torch.int8), None),
        "I32": (torch.randint(-9, 9, (2, 3, 4), dtype=torch.int32), None),
    }
    bf16 = torch.randn(3, 4).bfloat16()
    data = {name: (tensor.numpy(), kind) for name, (tensor, kind) in tensors.items()}
    data["BF16"] = (bf16.view(torch.uint8).reshape(3, 8).numpy(), GGMLQuantizationType.BF16)
    with open_source(write(tmp_path / "x.gguf", data, "other")) as source:
        for name, wanted in [*((name, tensor) for name, (tensor, _) in tensors.items()), ("BF16", bf16)]:
            got = source.tensor(name)
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)
            contents = source.contents(name)
            assert contents == (tuple(wanted.shape), wanted.dtype, wanted.nbytes, None)
    known = {number: (kind.name, kind.size, kind.nbytes) for number, kind in TYPES.items()}
    wanted = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: sizes for number, sizes in known.items() if number in wanted} == wanted
    assert QUANTIZED.keys() == BITS.keys()
    number, kind = QUANTIZED["MXFP4"]
    for exponent in (0, 1, 2, 3, 252, 253):
        data = random_bytes(kind, (1, 32))
        data[0, 0] = exponent
        assert torch.equal(kind.tensor(torch.from_numpy(data[0]), (1, 32)).dequantize(), expected(data, number))
    data = torch.zeros(17, dtype=torch.uint8)
    data[0] = 255
    refuses("exponent 255, which is NaN in the OCP specification", lambda: kind.tensor(data, (1, 32)))
