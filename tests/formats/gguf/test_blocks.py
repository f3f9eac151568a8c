"""Every type of GGUF: the numbers of `gguf.quants.dequantize`, bit for bit, kept packed, and multiplied by a kernel."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

pytest.importorskip("gguf")

import gguf
import numpy as np
from gguf import GGMLQuantizationType

import qtorch
from qtorch.checkpoint.formats.gguf.block_types import TYPES
from qtorch.checkpoint.sources import open_source
from qtorch.dtypes import QuantizedTensor
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu.compiled_library import library
from tests.formats.gguf.random_blocks import QUANTIZED, random_bytes, write

from ...rounding import assert_same_product

# Bits of an element in memory: of the code, scale and offset.
BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q8_0": 8.5,
    "Q2_K": 3.125,
    "Q3_K": 3.5625,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.3125,
    "TQ1_0": 2.0625,
    "TQ2_0": 2.09375,
    "MXFP4": 4.25,
}


def expected(data: np.ndarray, number: int) -> torch.Tensor:
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.array(gguf.quants.dequantize(data, GGMLQuantizationType(number))))


def test_the_table_has_every_type_and_its_size() -> None:
    known = {number: (kind.name, kind.size, kind.nbytes) for number, kind in TYPES.items()}
    wanted = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: sizes for number, sizes in known.items() if number in wanted} == wanted
    assert QUANTIZED.keys() == BITS.keys()


@pytest.mark.parametrize("shape", [(6, 512), (3, 2, 256), (0, 256)], ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_numbers_of_gguf(name: str, shape: tuple[int, ...]) -> None:
    number, kind = QUANTIZED[name]
    for seed in range(3):
        data = random_bytes(kind, shape, seed)
        wanted = expected(data, number) if data.size else torch.empty(shape)
        tensor = kind.tensor(torch.from_numpy(data.reshape(-1)), shape)
        assert isinstance(tensor, QuantizedTensor)
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
    integers = of_torch if library() is None else "cpu_weight_only_mm"
    tables = "lut_weight_mm" if library() is None else "cpu_lut_mm"
    kernel = {"IQ4_NL": tables, "IQ4_XS": tables}.get(name, integers)
    x = torch.randn(5, 512)
    with record_kernels() as ran:
        y = functional.linear(x, weight)
    assert ran[0] == f"linear:{kernel}"
    assert qtorch.explain(weight).kernel == kernel
    assert_same_product(y, x @ expected(data, number).T, x, expected(data, number))


def test_mxfp4_with_an_exponent_that_is_nan_elsewhere_is_refused() -> None:
    _, kind = QUANTIZED["MXFP4"]
    data = torch.zeros(17, dtype=torch.uint8)
    data[0] = 255
    with pytest.raises(ValueError, match="exponent 255, which is NaN in the OCP specification"):
        kind.tensor(data, (1, 32))


def test_the_smallest_and_largest_exponents_of_mxfp4() -> None:
    number, kind = QUANTIZED["MXFP4"]
    for exponent in (0, 1, 2, 3, 252, 253):
        data = random_bytes(kind, (1, 32))
        data[0, 0] = exponent
        assert torch.equal(kind.tensor(torch.from_numpy(data[0]), (1, 32)).dequantize(), expected(data, number))


@pytest.mark.parametrize("name", [kind.name for kind in TYPES.values() if kind.spec is None and kind.dtype is None])
def test_what_no_spec_holds_is_refused_by_name(name: str, tmp_path: Path) -> None:
    number, kind = next((number, kind) for number, kind in TYPES.items() if kind.name == name)
    data = np.zeros((2, 512 // kind.size * kind.nbytes), dtype=np.uint8)
    path = write(tmp_path / "x.gguf", {"w": (data, GGMLQuantizationType(number))}, "other")
    with open_source(path) as source:
        assert source.names == {"w"}
        for read in (source.contents, source.tensor):
            with pytest.raises(ValueError, match=rf"x\.gguf: w \(w\): it is stored as {name}, which no spec"):
                read("w")


def test_plain_numbers(tmp_path: Path) -> None:
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


def test_contents_of_quantized_tensors_are_known_without_reading(tmp_path: Path) -> None:
    tensors = {
        name: (random_bytes(kind, (4, 256)), GGMLQuantizationType(number)) for name, (number, kind) in QUANTIZED.items()
    }
    path = write(tmp_path / "x.gguf", tensors, "other")
    with open_source(path) as source:
        for name, (data, _) in tensors.items():
            contents = source.contents(name)
            tensor = source.tensor(name)
            assert contents == ((4, 256), torch.float32, data.nbytes, tensor.scheme)
