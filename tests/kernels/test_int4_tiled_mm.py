"""The tinygemm kernels against the reference, which path ran, and the CUDA one where there is a GPU."""

import pytest
import torch
from torch.nn import functional

from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, PerGroup, QuantSpec, TensorCoreTiledLayout
from qtorch.kernels import features, record_kernels
from qtorch.kernels.linear import reference
from qtorch.kernels.linear.int4_tiled import MAX_ROWS
from qtorch.primitives import ZeroPointDomain, compute_error


def layer(dtype: torch.dtype, n: int = 72, k: int = 160, group: int = 32, rows: int = 5):
    """(input, float weight, quantized weight, bias)."""
    weight = torch.randn(n, k, dtype=dtype)
    spec = QuantSpec("uint4", PerGroup(group), MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
    quantized = AffineQuantizedTensor.from_float(weight, LinearSpec(spec, layout=TensorCoreTiledLayout()))
    return torch.randn(rows, k, dtype=dtype), weight, quantized, torch.randn(n, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("rows", [0, 1, MAX_ROWS[True], MAX_ROWS[True] + 1])
def test_against_reference_and_float(dtype, has_bf16, rows, monkeypatch):
    monkeypatch.setattr(features, "cpu_has", lambda feature: has_bf16)
    x, weight, quantized, bias = layer(dtype, rows=rows)
    with record_kernels() as ran:
        y = functional.linear(x, quantized, bias)
    packed = dtype == torch.bfloat16 and 0 < rows <= MAX_ROWS[has_bf16]
    assert ran == ["linear:int4_tiled_mm", "int4_tiled_mm"] + ["int4_tiled_mm.int4pack"] * packed
    assert (y.dtype, y.shape) == (dtype, (rows, 72))
    if rows:
        expected = reference.linear(x, quantized, bias)
        assert compute_error(expected, y) > {torch.float32: 110, torch.float16: 55, torch.bfloat16: 40}[dtype]
        error = compute_error(functional.linear(x.float(), weight.float(), bias.float()), y)
        assert 18 < error < 28


@pytest.mark.parametrize("k, group", [(32, 32), (64, 32), (96, 32), (512, 64), (512, 128), (512, 256)])
@pytest.mark.parametrize("n", [1, 16, 32, 64, 65, 130])
def test_groups_and_sizes(n, k, group):
    for dtype in (torch.float32, torch.bfloat16):
        x, _, quantized, _ = layer(dtype, n, k, group, rows=2)
        with record_kernels() as ran:
            y = functional.linear(x, quantized)
        assert (ran[-1] == "int4_tiled_mm.int4pack") == (dtype == torch.bfloat16)
        assert compute_error(reference.linear(x, quantized, None), y) > (40 if dtype == torch.bfloat16 else 110)


def test_another_input_dtype_than_the_scales():
    """Weights quantized in fp32, activations in bf16, as under autocast: scales are rounded on the way."""
    x, _, quantized, _ = layer(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.linear(x, quantized)
    assert 35 < compute_error(reference.linear(x.bfloat16(), quantized, None), y) < 70


@pytest.mark.gpu
@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 17, 200])
def test_cuda(rows, inner_k_tiles):
    x, _, quantized, bias = layer(torch.bfloat16, rows=rows)
    quantized = quantized.to_layout(TensorCoreTiledLayout(inner_k_tiles)).cuda()
    with record_kernels() as ran:
        y = functional.linear(x.cuda(), quantized, bias.cuda())
    assert ran == ["linear:int4_tiled_mm", "int4_tiled_mm", "int4_tiled_mm.int4pack"]
    assert 38 < compute_error(reference.linear(x.cuda(), quantized, bias.cuda()), y) < 90
    x32 = x.float().cuda()
    assert compute_error(reference.linear(x32, quantized, None), functional.linear(x32, quantized)) > 60
