"""Which kernel of `linear` runs for a scheme, and its error, bounded on both sides; test_every_kernel.py has more."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec
from qtorch.kernels import features, record_kernels
from qtorch.kernels.linear import reference
from qtorch.kernels.ops.weight_only_mm import slice_length
from qtorch.primitives import ZeroPointDomain, compute_error

# The kernels made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

INT8 = QuantSpec("int8", quant_min=-127)
TOKEN = QuantSpec("int8", PerRow(), quant_min=-127)
TILE = QuantSpec("int8", PerBlock((8, 16)), quant_min=-127)
FLOAT8 = QuantSpec("float8_e4m3fn", zero_point_domain=ZeroPointDomain.NONE)
FLOAT4 = QuantSpec("float4_e2m1", PerGroup(16), zero_point_domain=ZeroPointDomain.NONE)
ASYMMETRIC = MappingType.ASYMMETRIC
REAL_ZERO = QuantSpec("uint4", PerGroup(32), ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
OFFSET = replace(REAL_ZERO, zero_point_domain=ZeroPointDomain.OFFSET)

# name: (spec, kernel for fp32 on CPU, SQNR of the layer's output in dB: at least, at most)
SCHEMES = {
    "int8 row": (LinearSpec(INT8), "weight_only_mm", 38, 50),
    "int8 tensor": (LinearSpec(QuantSpec("int8", PerTensor())), "weight_only_mm", 32, 46),
    "uint8 row": (LinearSpec(QuantSpec("uint8", PerRow(), ASYMMETRIC)), "weight_only_mm", 38, 52),
    "uint4 group": (LinearSpec(QuantSpec("uint4", PerGroup(32), ASYMMETRIC)), "weight_only_mm", 18, 26),
    "int3 group": (LinearSpec(QuantSpec("int3", PerGroup(16))), "weight_only_mm", 11, 20),
    "uint4 float zero": (LinearSpec(REAL_ZERO), "weight_only_mm", 18, 26),
    "uint4 offset": (LinearSpec(OFFSET), "weight_only_mm", 18, 26),
    "uint4 fractional zero": (
        LinearSpec(QuantSpec("uint4", PerGroup(32), ASYMMETRIC, ZeroPointDomain.FRACTIONAL)), "weight_only_mm", 18, 26,
    ),
    "int4 block": (LinearSpec(QuantSpec("int4", PerBlock((8, 16)))), "weight_only_mm", 14, 24),
    "float8 row": (LinearSpec(FLOAT8), "weight_only_mm", 26, 36),
    "float4 group": (LinearSpec(FLOAT4.with_granularity(PerGroup(32))), "weight_only_mm", 16, 24),
    "float4 group, float8 scales": (
        LinearSpec(replace(FLOAT4, scale_spec=FLOAT8.with_granularity(PerTensor()))), "weight_only_mm", 16, 24,
    ),
    "float8, float8": (LinearSpec(FLOAT8, FLOAT8), "emulated_scaled_mm", 25, 33),
    "int8, int8": (LinearSpec(INT8, TOKEN), "int8_scaled_mm", 35, 48),
    "int8, int8 tensor": (LinearSpec(INT8, QuantSpec("int8", PerTensor())), "int8_scaled_mm", 33, 46),
    "int8, int8 asymmetric": (LinearSpec(INT8, QuantSpec("int8", PerRow(), ASYMMETRIC)), "int8_scaled_mm", 35, 48),
    "int4 group, int8": (LinearSpec(QuantSpec("int4", PerGroup(32)), TOKEN), "int8_scaled_mm", 16, 26),
    "uint4 group, int8 asymmetric": (
        LinearSpec(QuantSpec("uint4", PerGroup(32), ASYMMETRIC), QuantSpec("int8", PerRow(), ASYMMETRIC)),
        "int8_scaled_mm",
        17,
        27,
    ),
    "int8 tile, int8 tile": (LinearSpec(TILE, TILE), "int8_block_mm", 35, 48),
    "int8 row, int8 group": (LinearSpec(INT8, TILE.with_granularity(PerGroup(16))), "int8_block_mm", 35, 48),
    "uint8 row, int8": (LinearSpec(QuantSpec("uint8", PerRow(), ASYMMETRIC), TOKEN), "int8_scaled_mm", 35, 50),
}  # fmt: skip


def layer(spec: LinearSpec, dtype: torch.dtype = torch.float32, n: int = 40, k: int = 96):
    """(input, float weight, quantized weight, bias), of odd sizes in the batch."""
    weight, x = torch.randn(n, k, dtype=dtype), torch.randn(3, 5, k, dtype=dtype)
    return x, weight, AffineQuantizedTensor.from_float(weight, spec), torch.randn(n).to(dtype)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_and_the_error(name, dtype):
    spec, kernel, at_least, at_most = SCHEMES[name]
    x, weight, quantized, bias = layer(spec, dtype)
    with record_kernels() as ran:
        y = functional.linear(x, quantized, bias)
    assert [name for name in ran if name.startswith("linear:")] == [ran[0]]
    assert ran[0] == f"linear:{kernel}" or (dtype != torch.float32 and ran[0] == "linear:int8_weight_mm")
    assert y.dtype == dtype
    error = compute_error(functional.linear(x.float(), weight.float(), bias.float()), y)
    assert min(at_least, 38) - 1 < error < at_most + 1


@pytest.mark.parametrize("name", ["int8, int8", "int4 group, int8", "uint4 group, int8 asymmetric"])
def test_integer_results_do_not_depend_on_the_processor(name, monkeypatch):
    """A scale per row: one product in int32. Groups: exact products in fp32, inside the operator."""
    x, _, quantized, bias = layer(SCHEMES[name][0], k=2080)
    results = []
    # Without 8-bit dot products torch._int_mm saturates, so it is not to be forced where they are not.
    for vnni in (features.cpu_has("vnni"), False):
        monkeypatch.setattr(features, "cpu_has", lambda feature, vnni=vnni: vnni)
        with record_kernels() as ran:
            results.append(functional.linear(x, quantized, bias))
        assert ran[1] == ("int_matmul" if name == "int8, int8" else "int8_grouped_mm")
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("rows, packed_with_bf16", [(1, True), (16, True), (17, False), (200, False)])
def test_int8_weight_mm_chooses_by_rows_and_processor(dtype, has_bf16, rows, packed_with_bf16, monkeypatch):
    monkeypatch.setattr(features, "cpu_has", lambda feature: has_bf16)
    weight = torch.randn(40, 96, dtype=dtype)
    quantized = AffineQuantizedTensor.from_float(weight, INT8)
    x = torch.randn(rows, 96, dtype=dtype)
    with record_kernels() as ran:
        y = functional.linear(x, quantized)
    packed = packed_with_bf16 or not has_bf16
    assert ran == ["linear:int8_weight_mm", "int8_weight_mm", "int8_weight_mm.int8pack" if packed else "weight_only_mm"]
    error = compute_error(reference.linear(x, quantized, None), y)
    assert (40 if dtype == torch.bfloat16 else 55) < error < 90


@pytest.mark.parametrize(("block", "limit", "want"), [
    (1, 292, 256), (1, 128, 128), (1, 127, 127), (1, 0, 1), (32, 292, 256), (32, 100, 96), (100, 292, 200),
    (300, 292, 300),
])  # fmt: skip
def test_slices_are_whole_blocks_and_even_where_there_is_room(block, limit, want):
    for dtype in (torch.float32, torch.bfloat16):
        assert slice_length(torch.empty(2, 64, dtype=dtype), 64, block, limit * 64 * dtype.itemsize) == want
