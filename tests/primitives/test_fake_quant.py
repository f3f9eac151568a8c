"""Fake quantization: the numbers of quantize and dequantize, the straight-through gradient."""

import itertools

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtorch import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, ZeroPointDomain
from qtorch.primitives import choose_qparams_affine, compute_error, dequantize_affine, quantize_affine
from qtorch.primitives import fake_quantize_affine as fake_quantize
from qtorch.primitives import fake_quantize_affine_cachemask as cachemask
from tests.rounding import same_bits

RANGES = [
    (torch.int8, -128, 127),
    (torch.int8, -127, 127),
    (torch.uint8, 0, 255),
    (torch.uint8, 0, 15),
    (torch.int8, -8, 7),
]
MAPPINGS = [
    (mapping, domain)
    for mapping, domain in itertools.product(MappingType, ZeroPointDomain)
    if (mapping, domain) != (MappingType.ASYMMETRIC, ZeroPointDomain.NONE)
]


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forward_and_backward(function, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    (gradient,) = torch.autograd.grad(y, x, data(*x.shape, seed=7))
    return y.detach(), gradient


@pytest.mark.parametrize(("dtype", "low", "high"), RANGES)
@pytest.mark.parametrize(("axis", "shape"), [
    *((None, shape) for shape in ((40,), (17, 9), (2, 3, 4, 5), (0, 3))), *((axis, (7, 6, 5)) for axis in range(3))
])  # fmt: skip
def test_numbers_and_gradients_are_those_of_torch(
    axis: int | None, shape: tuple[int, ...], dtype: torch.dtype, low: int, high: int
) -> None:
    """Per tensor, where there is no axis, and per channel."""
    x = data(*shape[::-1]).permute(*range(len(shape))[::-1])
    block = shape if axis is None else PerAxis(axis).block(shape)
    # Half of the range, so that both ends clip.
    scale, zero = choose_qparams_affine(x / 2, MappingType.ASYMMETRIC, block, dtype, low, high)
    options = (scale.flatten(), zero.flatten(), *(() if axis is None else (axis,)), low, high)
    theirs = [torch.fake_quantize_per_tensor_affine]
    if axis is not None:
        theirs = [torch.fake_quantize_per_channel_affine, torch.ops.quantized_decomposed.fake_quant_per_channel]
    got = forward_and_backward(lambda x: fake_quantize(x, block, scale, zero, dtype, low, high), x)
    for function in theirs:
        wanted = forward_and_backward(lambda x: function(x, *options), x)  # noqa: B023
        assert all(map(same_bits, got, wanted))
    assert not x.numel() or 0 < (got[1] == 0).sum() < x.numel()


def test_the_ends_of_the_range_do_not_clip() -> None:
    x = torch.tensor([-4.5, -4.49, -4.0, 0.0, 3.0, 3.49, 3.5, 3.51])
    scale, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    wanted = torch.ops.aten.fake_quantize_per_tensor_affine_cachemask(x, 1.0, 0, -4, 3)
    got = cachemask(x, (8,), scale, zero, "int3")
    assert all(map(torch.equal, got, wanted))
    # -4.5 is a tie that goes to -4, 3.5 one that goes to 4 and clips.
    assert got[1].tolist() == [True, True, True, True, True, True, False, False]


@pytest.mark.parametrize(("mapping", "domain"), MAPPINGS)
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerAxis(-1), PerGroup(8), PerBlock((4, 8))], ids=str)
def test_the_numbers_are_those_of_quantize_and_dequantize(granularity, mapping, domain) -> None:
    kinds = ("int4", "uint8", *(["float8_e4m3fn"] if domain is ZeroPointDomain.NONE else []))
    for dtype, code in itertools.product((torch.float32, torch.float16, torch.bfloat16), kinds):
        x = data(8, 32).to(dtype)
        block = granularity.block(x.shape)
        qparams = choose_qparams_affine(x, mapping, block, code, zero_point_domain=domain)
        codes = quantize_affine(x, block, *qparams, code, zero_point_domain=domain)
        wanted = dequantize_affine(codes, block, *qparams, code, zero_point_domain=domain, output_dtype=dtype)
        got = fake_quantize(x, block, *qparams, code, zero_point_domain=domain)
        assert got.dtype == dtype
        assert torch.equal(got, wanted)
        assert compute_error(x, got) < 60


@pytest.mark.parametrize("domain", ZeroPointDomain)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_pass_where_nothing_clips(dtype: torch.dtype, domain: ZeroPointDomain) -> None:
    x = data(8, 32).to(dtype).requires_grad_()
    scale = torch.full((8, 1), 0.25, requires_grad=True)
    zero = torch.zeros(8, 1)
    y, unclipped = cachemask(x, (1, 32), scale, zero, "int4", None, None, domain)
    assert unclipped.dtype == torch.bool
    assert 0 < unclipped.sum() < x.numel()
    assert torch.equal(unclipped, (x / 0.25).round().clamp(-8, 7) == (x / 0.25).round())
    upstream = data(8, 32, seed=1).to(dtype)
    y.backward(upstream)
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, upstream * unclipped)
    # Steps are learned elsewhere: here the scale is data.
    assert scale.grad is None
    assert not fake_quantize(x.detach(), (1, 32), scale.detach(), None, "int4").requires_grad


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    code=st.sampled_from(["int2", "int4", "uint4"]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    mapping=st.sampled_from([m for m in MAPPINGS if not m[1].is_real]),
    seed=st.integers(0, 1000),
)
def test_a_second_time_changes_nothing(code: str, dtype: torch.dtype, mapping, seed: int) -> None:
    x = data(4, 24, seed=seed).to(dtype)
    qparams = choose_qparams_affine(x, mapping[0], (1, 8), code, zero_point_domain=mapping[1])
    options = (code, None, None, mapping[1])
    once = fake_quantize(x, (1, 8), *qparams, *options)
    assert torch.equal(fake_quantize(once, (1, 8), *qparams, *options), once)
    assert not torch.equal(once, x)
