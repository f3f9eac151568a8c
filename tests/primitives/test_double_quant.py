"""Scales that are quantized themselves: accuracy, shapes, rows, and what a spec refuses."""

import math
from dataclasses import replace

import pytest
import torch

from qtorch import MappingType, PerGroup, PerRow, PerTensor, QuantSpec, ZeroPointDomain, compute_error
from qtorch.primitives import from_json, to_json
from qtorch.primitives.double_quant import dequantize_scale, quantize_scale, scale_tensor_shapes

NONE = ZeroPointDomain.NONE
INT8 = QuantSpec("int8", PerGroup(256), quant_min=-127)
FLOAT8 = QuantSpec("float8_e4m3fn", PerTensor(), zero_point_domain=NONE)
FLOAT8_GROUPS = replace(FLOAT8, granularity=PerGroup(32))
NVFP4 = QuantSpec("float4_e2m1", PerGroup(16), zero_point_domain=NONE, scale_spec=FLOAT8)

SPECS = {"int8": (INT8, 58, 66), "float8": (FLOAT8, 30, 34), "float8 groups": (FLOAT8_GROUPS, 30, 40)}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(64, 16), (7, 100), (1, 1), (3, 1), (5,), (2, 3, 40), ()], ids=str)
def test_there_and_back(name: str, shape: tuple[int, ...]) -> None:
    spec, low, high = SPECS[name]
    scale = torch.rand(shape) + 1
    tensors = quantize_scale(scale, spec)
    assert {key: tuple(value.shape) for key, value in tensors.items()} == scale_tensor_shapes(shape, spec)
    assert tensors["scale"].dtype == spec.dtype.storage
    assert tensors["scale_scale"].dtype == torch.float32
    y = dequantize_scale(tensors, spec)
    assert y.shape == scale.shape
    assert bool((y > 0).all())
    if scale.numel() > 256:
        assert low < compute_error(scale, y) < high
    else:
        torch.testing.assert_close(y, scale, rtol=0.07, atol=0)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(12, 50), (300, 1), (1, 700), (4, 3, 40)], ids=str)
def test_rows_are_those_of_the_whole(name: str, shape: tuple[int, ...]) -> None:
    spec = SPECS[name][0]
    tensors = quantize_scale(torch.rand(shape) + 0.1, spec)
    rows = torch.randint(shape[0], (9,))
    assert torch.equal(dequantize_scale(tensors, spec, rows), dequantize_scale(tensors, spec)[rows])
    assert dequantize_scale(tensors, spec, rows[:0]).shape == (0, *shape[1:])


def test_without_a_spec_scales_stay() -> None:
    scale = torch.rand(4, 3)
    assert dequantize_scale(quantize_scale(scale, None), None) is scale
    assert torch.equal(dequantize_scale({"scale": scale}, None, torch.tensor([2, 0])), scale[[2, 0]])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_empty(name: str, shape: tuple[int, ...]) -> None:
    spec = SPECS[name][0]
    assert dequantize_scale(quantize_scale(torch.ones(shape), spec), spec).shape == shape


def test_nvfp4_follows_its_equation() -> None:
    """w = e2m1 code * e4m3 scale of 16 * fp32 scale of the tensor, whose largest block has the largest e4m3 code."""
    x = torch.randn(8, 64)
    tensors, zero_point = NVFP4.choose_stored_qparams(x)
    absmax = x.reshape(8, 4, 16).abs().amax(-1)
    assert zero_point is None
    assert tensors["scale"].dtype == torch.float8_e4m3fn
    torch.testing.assert_close(tensors["scale_scale"], absmax.max().reshape(1) / (6 * 448))
    assert float(tensors["scale"].float().max()) == 448
    expected = (absmax / 6 / tensors["scale_scale"]).to(torch.float8_e4m3fn)
    assert int((expected.float() != tensors["scale"].float()).sum()) <= 1  # a tie may fall either way
    dense, _ = NVFP4.choose_qparams(x)
    assert torch.equal(dense, tensors["scale"].float() * tensors["scale_scale"])
    # Codes are chosen for the scale that is kept, so that no element is more than half a step from its own.
    y = NVFP4.fake_quantize(x)
    step = torch.where(y.abs() >= 3.99 * dense.repeat_interleave(16, 1), 2, 1) * dense.repeat_interleave(16, 1)
    inside = x.abs() <= 6 * dense.repeat_interleave(16, 1)
    assert bool(((x - y).abs() <= step / 2 * 1.0001)[inside].all())
    assert 17 < compute_error(x, y) < 23


def test_blocks_far_below_the_largest_vanish() -> None:
    x = torch.cat([torch.full((1, 16), 1e6), torch.full((1, 16), 1e-6), torch.zeros(1, 16)])
    y = NVFP4.fake_quantize(x)
    torch.testing.assert_close(y[0], x[0], rtol=0.07, atol=0)
    assert bool((y[1].abs() <= 1e-6).all())
    assert not y[2].any()


def test_json_and_str() -> None:
    assert from_json(to_json(NVFP4)) == NVFP4
    assert str(NVFP4).endswith("zero point none scale float8_e4m3fn PerTensor()")
    # Written before specs had the field.
    old = {key: value for key, value in to_json(QuantSpec("int8")).items() if key != "scale_spec"}
    assert from_json(old) == QuantSpec("int8")


def test_what_is_refused() -> None:
    for scale_spec in (QuantSpec("int8", PerRow()), QuantSpec("uint8", PerGroup(256)), NVFP4):
        with pytest.raises(ValueError, match="scales are quantized in groups or as a whole, symmetric, and only once"):
            QuantSpec("int4", PerGroup(32), scale_spec=scale_spec)
    with pytest.raises(ValueError, match="quantized scales need a mapping without zero points, got uint4"):
        QuantSpec("uint4", PerGroup(32), MappingType.ASYMMETRIC, scale_spec=INT8)


def test_traces_in_one_graph() -> None:
    x = torch.randn(6, 32)
    compiled = torch.compile(NVFP4.fake_quantize, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), NVFP4.fake_quantize(x))
    assert math.isfinite(float(compute_error(x, compiled(x))))
