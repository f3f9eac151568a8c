"""Affine quantization against torch's own primitives, bit for bit on fp32."""

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from torch import Tensor

from qtorch.primitives import MappingType, choose_qparams_affine, dequantize_affine, quantize_affine
from tests.rounding import same_bits

OPS = torch.ops.quantized_decomposed

RANGES = [
    (torch.int8, -128, 127),
    (torch.int8, -127, 127),
    (torch.int8, -8, 7),
    (torch.uint8, 0, 255),
    (torch.uint8, 0, 15),
    (torch.int16, -32768, 32767),
    (torch.int32, -(2**20), 2**20),
]
INPUTS = {
    "normal": lambda g: torch.randn(33, 21, generator=g),
    "positive": lambda g: torch.rand(33, 21, generator=g) + 3,
    "negative": lambda g: -torch.rand(33, 21, generator=g) - 3,
    "small": lambda g: torch.randn(33, 21, generator=g) * 1e-6,
    "large": lambda g: torch.randn(33, 21, generator=g) * 1e30,
    "zero": lambda g: torch.zeros(33, 21),
    # With 254 steps the scale is 1 and the zero point of the lower end a tie.
    "tie": lambda g: torch.linspace(-2.5, 251.5, 33 * 21).reshape(33, 21),
    "not contiguous": lambda g: torch.randn(21, 33, generator=g).T,
}


def data(name: str = "normal") -> Tensor:
    return INPUTS[name](torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("dtype", "low", "high"), RANGES)
@pytest.mark.parametrize("name", INPUTS)
def test_choose_qparams(name: str, dtype: torch.dtype, low: int, high: int) -> None:
    x, eps = data(name), 2.0**-40
    theirs = {MappingType.ASYMMETRIC: OPS.choose_qparams, MappingType.SYMMETRIC: OPS.choose_qparams_symmetric}
    for mapping, function in theirs.items():
        if mapping is MappingType.SYMMETRIC and high == 15:
            continue
        wanted = function.tensor(x, low, high, eps, dtype)
        got = choose_qparams_affine(x, mapping, x.shape, dtype, low, high, eps)
        assert torch.equal(got[0].double().flatten(), wanted[0])
        assert torch.equal(got[1].long().flatten(), wanted[1])


def test_choose_qparams_per_token() -> None:
    x = data()
    symmetric, _ = choose_qparams_affine(x, MappingType.SYMMETRIC, (1, 21), torch.int8, -127, 127)
    assert same_bits(symmetric, OPS.choose_qparams_per_token(x, torch.int8)[0])
    scale, zero_point = OPS.choose_qparams_per_token_asymmetric(x, torch.int8)
    got = choose_qparams_affine(x, MappingType.ASYMMETRIC, (1, 21), torch.int8)
    assert torch.equal(got[0].double(), scale)
    # XNNPACK's rule takes the zero point from the end that it serves better.
    assert (got[1] - zero_point).abs().max() <= 1


@pytest.mark.parametrize(("dtype", "low", "high"), RANGES)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_per_tensor(input_dtype: torch.dtype, name: str, dtype: torch.dtype, low: int, high: int) -> None:
    x = data(name).clamp(-6e4, 6e4).to(input_dtype)
    whole, zero_point = choose_qparams_affine(x, MappingType.ASYMMETRIC, x.shape, dtype, low, high, 2.0**-40)
    # With half of the scale some elements clip.
    for scale in (whole, whole / 2):
        options = (scale.flatten(), zero_point.flatten(), low, high, dtype)
        wanted = OPS.quantize_per_tensor.tensor(x, *options)
        codes = quantize_affine(x, x.shape, scale, zero_point, dtype, low, high)
        assert codes.dtype == dtype
        assert torch.equal(codes, wanted)
        real = dequantize_affine(codes, x.shape, scale, zero_point, dtype, low, high)
        assert same_bits(real, OPS.dequantize_per_tensor.tensor(codes, *options))


@pytest.mark.parametrize(("dtype", "low", "high"), RANGES)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("mapping", MappingType)
def test_per_channel(mapping: MappingType, axis: int, dtype: torch.dtype, low: int, high: int) -> None:
    x = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(0))
    block = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    scale, zero_point = choose_qparams_affine(x, mapping, block, dtype, low, high)
    options = (scale.flatten(), zero_point.flatten(), axis, low, high, dtype)
    codes = quantize_affine(x, block, scale, zero_point, dtype, low, high)
    assert torch.equal(codes, OPS.quantize_per_channel(x, *options))
    real = dequantize_affine(codes, block, scale, zero_point, dtype, low, high)
    assert same_bits(real, OPS.dequantize_per_channel(codes, *options))


# torch adds the zero point after rounding in quantize_per_tensor and per_channel, as we do, but
# before rounding in quantize_per_token and per_channel_group.
def assert_equal_but_for_ties(codes: Tensor, wanted: Tensor, quotient: Tensor) -> None:
    difference = (codes.int() - wanted.int()).abs()
    # The sum of quotient and zero point rounds to a multiple of 2^-16 or finer.
    tie = (quotient - quotient.floor() - 0.5).abs() <= 2**-16
    assert difference.max() <= 1
    assert (tie | (difference == 0)).all()


@pytest.mark.parametrize("zero_point", [0, 7])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("groups", [False, True])
def test_per_token_and_per_channel_group(groups: bool, ties: bool, zero_point: int) -> None:
    shape, dtype, block = ((16, 96), "uint4", (1, 32)) if groups else ((20, 64), torch.int8, (1, 64))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * (3 if groups else 30)
    scale = torch.rand(shape[0], shape[1] // block[1], generator=torch.Generator().manual_seed(1)) + 0.2
    if ties:
        x, scale = (x * 4).round() / 2 if groups else x.round() / 2, torch.ones_like(scale)
    zero = torch.full(scale.shape, zero_point)
    if groups:
        options = (scale, zero, 0, 15, torch.uint8, 32)
        wanted = OPS.quantize_per_channel_group(x, *options)
    else:
        options = (scale, zero, -128, 127, torch.int8)
        wanted = OPS.quantize_per_token(x, *options)
    codes = quantize_affine(x, block, scale, zero, dtype)
    if zero_point == 0:
        assert torch.equal(codes, wanted)
    else:
        assert_equal_but_for_ties(codes, wanted, x * (1 / scale).repeat_interleave(block[1], 1))
        assert torch.equal(codes, wanted) != ties
    back = OPS.dequantize_per_channel_group if groups else OPS.dequantize_per_token
    # torch computes codes - zero_point in int64 and then in fp32: the same numbers.
    assert same_bits(dequantize_affine(codes, block, scale, zero, dtype), back(codes, *options, torch.float32))


def test_per_channel_group_without_a_zero_point() -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8).reshape(4, 64)
    scale = torch.rand(4, 2, generator=torch.Generator().manual_seed(1)) + 0.2
    wanted = OPS.dequantize_per_channel_group(codes, scale, None, -128, 127, torch.int8, 32, torch.float32)
    assert same_bits(dequantize_affine(codes, (1, 32), scale, None, torch.int8), wanted)
