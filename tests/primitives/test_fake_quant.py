"""Fake quantization with gradients, and steps that are learned."""

import itertools
import math

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import qtorch
from qtorch import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec, ZeroPointDomain
from qtorch.primitives import choose_qparams_affine, compute_error, learned_step_fake_quantize, lsq_scale, qdtype
from qtorch.primitives import fake_quantize_affine as fake_quantize
from qtorch.primitives import fake_quantize_affine_cachemask as cachemask
from tests.primitives.test_affine import MAPPINGS
from tests.rounding import same_bits

RANGES = [
    (torch.int8, -128, 127), (torch.int8, -127, 127), (torch.uint8, 0, 255), (torch.uint8, 0, 15), (torch.int8, -8, 7),
]  # fmt: skip


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grads(function, *inputs: Tensor) -> tuple[Tensor, ...]:
    """(result, gradient of each input) for one random gradient of the result."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    y = function(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, data(*y.shape, seed=7))


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
    got = grads(lambda x: fake_quantize(x, block, scale, zero, dtype, low, high), x)
    for function in theirs:
        wanted = grads(lambda x: function(x, *options), x)  # noqa: B023
        assert all(map(same_bits, got, wanted))
    assert not x.numel() or 0 < (got[1] == 0).sum() < x.numel()


def test_ends_of_the_range_and_pact() -> None:
    x = torch.tensor([-4.5, -4.49, -4.0, 0.0, 3.0, 3.49, 3.5, 3.51])
    scale, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    wanted = torch.ops.aten.fake_quantize_per_tensor_affine_cachemask(x, 1.0, 0, -4, 3)
    got = cachemask(x, (8,), scale, zero, "int3")
    assert all(map(torch.equal, got, wanted))
    # -4.5 is a tie that goes to -4, 3.5 one that goes to 4 and clips.
    assert got[1].tolist() == [True, True, True, True, True, True, False, False]
    w = data(4, 6)
    assert qtorch.primitives.lsq_grad_scale(24, 7) == 1 / math.sqrt(24 * 7)
    torch.testing.assert_close(lsq_scale(w, (-1, -1), 7), (2 * w.abs().mean() / math.sqrt(7)).reshape(1, 1))
    torch.testing.assert_close(lsq_scale(w, (1, 3), 1), 2 * w.abs().reshape(4, 2, 3).mean(2))
    assert (lsq_scale(torch.zeros(2, 3), (1, -1), 7) > 0).all()
    with pytest.raises(ValueError, match="learned_step_fake_quantize takes an integer type, got float8_e4m3fn"):
        learned_step_fake_quantize(data(4), (-1,), torch.ones(1), None, qdtype("float8_e4m3fn"))
    # dx_hat/da = 1 where x >= a, 0 elsewhere (arXiv 1805.06085, eq. 3).
    x, a = data(100).relu(), torch.tensor([0.7])

    def pact(x: Tensor, a: Tensor) -> Tensor:
        return learned_step_fake_quantize(x, (-1,), a / 15, None, "uint4", through_rounding=False)

    y, dx, da = grads(pact, x, a)
    g = data(100, seed=7)
    assert 0 < (x > a).sum() < 50
    torch.testing.assert_close(da, g[x > a].sum().reshape(1))
    # Half a step above a still rounds to a.
    assert torch.equal(dx[x < a], g[x < a])
    assert dx[x > a * (1 + 1 / 30)].count_nonzero() == 0
    torch.testing.assert_close(y, (x.clamp(max=0.7) * 15 / 0.7).round() * 0.7 / 15)


@pytest.mark.parametrize(("mapping", "domain"), MAPPINGS)
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerAxis(-1), PerGroup(8), PerBlock((4, 8))], ids=str)
def test_the_numbers_are_those_of_quantize_and_dequantize(granularity, mapping, domain) -> None:
    kinds = ("int4", "uint8", *(["float8_e4m3fn"] if domain is ZeroPointDomain.NONE else []))
    for dtype, code in itertools.product((torch.float32, torch.float16, torch.bfloat16), kinds):
        x = data(8, 32).to(dtype)
        block = granularity.block(x.shape)
        qparams = choose_qparams_affine(x, mapping, block, code, zero_point_domain=domain)
        codes = qtorch.primitives.quantize_affine(x, block, *qparams, code, zero_point_domain=domain)
        wanted = qtorch.primitives.dequantize_affine(
            codes, block, *qparams, code, zero_point_domain=domain, output_dtype=dtype
        )
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


STEPS_RANGES = [
    ("int8", -128, 127), ("int8", -127, 127), ("uint8", 0, 255), ("uint4", 0, 15), ("int4", -8, 7), ("int2", -2, 1),
]  # fmt: skip
every_range = pytest.mark.parametrize(("dtype", "low", "high"), STEPS_RANGES)
GRANULARITIES = [PerTensor(), PerRow(), PerAxis(0), PerGroup(4), PerBlock((2, 4))]


def qparams(shape: tuple[int, ...], low: int, high: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A scale by which some elements clip, and a real zero point anywhere in the range of codes."""
    g = torch.Generator().manual_seed(seed)
    scale = (0.5 + torch.rand(shape, generator=g)) * (2 / (high - low))
    return scale, low + torch.rand(shape, generator=g) * (high - low)


@every_range
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("dtype_in", [torch.float32, torch.bfloat16], ids=str)
def test_forward_is_that_of_the_spec(granularity, dtype: str, low: int, high: int, dtype_in: torch.dtype) -> None:
    spec = QuantSpec(dtype, granularity, MappingType.ASYMMETRIC, quant_min=low, quant_max=high)
    x = data(6, 8).to(dtype_in)
    scale, zero = qparams(spec.scale_shape(x.shape), low, high)
    code = zero.round().to(spec.dtype.storage)
    codes = spec.quantize(x, scale, code)
    wanted = spec.dequantize(codes, scale, code, dtype_in)
    assert codes.min() == low
    assert codes.max() == high
    for zero_point in (zero, code):
        got = learned_step_fake_quantize(x, spec.block_size(x.shape), scale, zero_point, dtype, low, high)
        assert got.dtype == dtype_in
        assert torch.equal(got, wanted)


@every_range
@given(
    shape_and_axis=st.sampled_from(
        [*((shape, None) for shape in ((40,), (7, 9), (3, 4, 5), (1,), (2, 3, 4, 5)))]
        + [((4, 10), 0), ((3, 4, 5), 1), ((5, 2, 3, 3), 0), ((1, 7), 1)]
    ),
    factor=st.sampled_from([1.0, 0.25, 1 / math.sqrt(60 * 7)]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_learned_steps_have_the_numbers_and_gradients_of_torch(
    dtype: str, low: int, high: int, shape_and_axis, factor: float, seed: int
) -> None:
    """Per tensor, where there is no axis, and per channel."""
    shape, axis = shape_and_axis
    x, block = data(*shape, seed=seed), shape if axis is None else PerAxis(axis).block(shape)
    scale, zero = qparams((1 if axis is None else shape[axis],), low, high, seed)
    # None below zero, where torch's backward takes another zero point than its forward: trunc(z + 1/2), not round.
    zero = zero.clamp(min=0)
    # Nor a tie: torch's backward multiplies with 1 / scale, which may round it to the other side.
    steps = x.double() / scale.double().reshape(-1, *[1] * (0 if axis is None else x.dim() - axis - 1))
    assume(bool((steps % 1 - 0.5).abs().min() > 1e-5))

    def of_torch(x: Tensor, s: Tensor, z: Tensor) -> Tensor:
        if axis is None:
            return torch._fake_quantize_learnable_per_tensor_affine(x, s, z, low, high, factor)
        return torch._fake_quantize_learnable_per_channel_affine(x, s, z, axis, low, high, factor)

    def ours(x: Tensor, s: Tensor, z: Tensor) -> Tensor:
        return learned_step_fake_quantize(x, block, s, z, dtype, low, high, grad_scale=factor)

    got, wanted = grads(ours, x, scale, zero), grads(of_torch, x, scale, zero)
    for index, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        tolerance = {"rtol": 0, "atol": 0} if index < 2 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(mine, theirs, **tolerance)


@every_range
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("offset", [False, True])
def test_gradients_are_finite_differences_of_the_smooth_part(granularity, dtype, low: int, high: int, offset) -> None:
    """With what rounding adds held fixed, and what clips staying clipped, in fp64."""
    x = data(6, 8)
    block = granularity.block(x.shape)
    spec = QuantSpec("int8", granularity)
    scale, zero = qparams(spec.scale_shape(x.shape), low, high)
    zero = zero.round() if offset else None

    def spread(t: Tensor) -> Tensor:
        return expand(t, x.shape)

    z0 = spread(zero).double() if offset else torch.zeros(x.shape).double()
    s0 = spread(scale).double()
    # As the fp32 arithmetic rounds, which at exact ties is not as fp64 does.
    rounded = torch.round(x * (1 / spread(scale))).double()
    rest = rounded - x.double() / s0
    inside = (rounded + z0 >= low) & (rounded + z0 <= high)

    def smooth(x: Tensor, s: Tensor, z: Tensor) -> Tensor:
        s, z = spread(s), spread(z)
        return torch.where(inside, x / s + rest, (rounded + z0).clamp(low, high) - z) * s

    upstream = data(6, 8, seed=7).double()
    inputs = [x.double(), scale.double(), zero.double() if offset else torch.zeros_like(scale).double()]

    def loss(*values: Tensor) -> Tensor:
        return (smooth(*values) * upstream).sum()

    learned = (scale,) if zero is None else (scale, zero)

    def ours(x: Tensor, s: Tensor, z: Tensor | None = None) -> Tensor:
        return learned_step_fake_quantize(x, block, s, z, dtype, low, high)

    for got, which in zip(grads(ours, x, *learned)[1:], range(3)):
        torch.testing.assert_close(got.double(), difference(loss, inputs, which), rtol=2e-3, atol=2e-4)


def expand(t: Tensor, shape: torch.Size) -> Tensor:
    """One element per block, at every element of the block."""
    for axis, n in enumerate(shape):
        t = t.repeat_interleave(n // t.shape[axis], axis)
    return t


def difference(loss, inputs: list[Tensor], which: int, step: float = 1e-6) -> Tensor:
    result = torch.zeros_like(inputs[which])
    for i in range(result.numel()):
        ends = []
        for sign in (1, -1):
            moved = [value.clone() for value in inputs]
            moved[which].view(-1)[i] += sign * step
            ends.append(loss(*moved))
        result.view(-1)[i] = (ends[0] - ends[1]) / (2 * step)
    return result
