"""Operands of training products, compiled: the codes, scales and reals of the operators of torch, bit for bit."""

import itertools

import pytest
import torch
from torch import Tensor

from qtorch import ZeroPointDomain
from qtorch.kernels import quantize_int8_rowwise, record_kernels
from qtorch.kernels.custom_ops import portable
from qtorch.kernels.ops.quantize import quantize_dynamic, quantize_rows
from qtorch.kernels.ops.weight_only_mm import dequantize_codes
from qtorch.primitives import (
    Noise,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    QuantSpec,
    Rounding,
    mx_spec,
    qdtype,
)
from qtorch.primitives.scale_rules import AbsMeanRule
from qtorch.training.engine.numerics import float8, int8, integer

from .builds import NEEDS_LIBRARY

SPECS = {
    "int8 rows": int8(),
    "int8 stochastic": int8(rounding=Rounding.STOCHASTIC),
    "int8 tensor": int8(PerTensor()),
    "int8 tiles": int8(PerBlock((32, 32))),
    "int8 stochastic tiles": int8(PerBlock((32, 32)), Rounding.STOCHASTIC),
    "int8 groups": QuantSpec(qdtype("int8"), PerGroup(16), scale_dtype=torch.float32, eps=1e-3),
    "int8 without the edge": integer(8, preserve_max_val=False),
    "int4 rows": integer(4),
    "e4m3 rows": float8(),
    "e4m3 tensor": float8(granularity=PerTensor()),
    "e4m3 tiles": float8(granularity=PerBlock((16, 32))),
    "e5m2 rows": float8(torch.float8_e5m2),
    "mxfp8": mx_spec("float8_e4m3fn"),
    "mx e5m2": mx_spec("float8_e5m2"),
}
SHAPES = [(64, 96), (32, 544)]
ODD_SHAPES = [(1, 1), (1, 37), (5, 3), (33, 16), (70, 131)]
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


def shapes_of(spec: QuantSpec) -> list[tuple[int, int]]:
    return SHAPES if max(spec.granularity.pattern(2)) > 1 else SHAPES + ODD_SHAPES


def orders(x: Tensor) -> list[Tensor]:
    """The same matrix: rows contiguous, columns contiguous, rows with a gap, and neither."""
    wide = torch.zeros(x.shape[0], 2 * x.shape[1] + 3, dtype=x.dtype)
    padded, spread = wide[:, : x.shape[1]].copy_(x), wide.clone()[:, 1 : 2 * x.shape[1] + 1 : 2].copy_(x)
    return [x, x.t().contiguous().t(), padded, spread]


def values(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many magnitudes, ties among them, with zeros of both signs and a row of zeros."""
    x = torch.randn(rows, columns, dtype=torch.float64) * torch.randint(-12, 12, (rows, 1)).double().exp2()
    x[:, ::3] = x[:, ::3].mul(4).round().div(8)
    x[:, 1::5] = -0.0
    x[rows // 2] *= 0
    return x.to(dtype)


def equal(ours: Tensor, reference: Tensor) -> bool:
    if ours.dtype != reference.dtype or ours.shape != reference.shape:
        return False
    lost = ours.float().isnan()
    same = ours.view(torch.int8) == reference.view(torch.int8) if ours.element_size() == 1 else ours == reference
    return bool(torch.equal(lost, reference.float().isnan()) and (same | lost).all())


def check(x: Tensor, spec: QuantSpec, build: str) -> None:
    """Both functions give what torch's operators do; codes count where they have a scale."""
    for function in (quantize_dynamic, quantize_rows):
        with record_kernels() as ran:
            torch.manual_seed(1)
            codes, scale, zero_point = function(x, spec)
        assert ran == [f"quantize_matrix.{build}"]
        assert zero_point is None
        assert codes.is_contiguous()
        torch.manual_seed(1)
        expected, expected_scale, _ = portable(function)(x, spec)
        case = (x.shape, x.stride(), x.dtype, function.__name__)
        assert equal(scale, expected_scale), case
        if spec.dtype.has_nan:
            assert equal(codes, expected), case
            continue
        blocks = [n // s for n, s in zip(x.shape, scale.shape, strict=True)]
        known = scale.isfinite().repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
        assert torch.equal(codes * known, expected * known), case
        # What is lost is not an infinity after all: no code of it is anything but zero.
        assert not codes[~x.isfinite() & ~known].any() or scale.isnan().any(), case


@pytest.mark.parametrize("name", SPECS)
def test_quantize(build: str, name: str) -> None:
    spec = SPECS[name]
    for shape, dtype in itertools.product(shapes_of(spec), (torch.float32, torch.bfloat16, torch.float16)):
        x = values(*shape, dtype)
        for order in orders(x)[: None if dtype is torch.float32 else 2]:
            check(order, spec, build)


@pytest.mark.parametrize("name", SPECS)
def test_numbers_that_are_not_finite(build: str, name: str) -> None:
    x = values(64, 96)
    for i, value in enumerate(NOT_FINITE):
        x[7 * i, 40 * i] = value
    for order in orders(x)[:2]:
        check(order, SPECS[name], build)


@pytest.mark.parametrize("name", [name for name in SPECS if "stochastic" not in name])
def test_extremes(build: str, name: str) -> None:
    """The largest and the smallest numbers, whose scales are at their limits."""
    x = torch.zeros(96, 96)
    x[:32] = torch.randn(32, 96) * 3e38
    x[32:64] = torch.randn(32, 96) * 1e-38
    x[64] = 3.4e38
    x[65:80, ::2] = 1e-45
    check(x.nan_to_num(), SPECS[name], build)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.usefixtures("build")
def test_every_rounding_to_float8(kind: str) -> None:
    """Each number, the middle to the next one, and the fp32 numbers beside these."""
    numbers = torch.arange(127, dtype=torch.uint8).view(qdtype(kind).storage).float()
    numbers = numbers[numbers.isfinite()]
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([numbers, middles, *(torch.nextafter(middles, torch.tensor(to)) for to in (-1e9, 1e9))])
    x = torch.cat([near, -near]).unsqueeze(0)
    spec = float8(qdtype(kind).storage)
    codes, scale, _ = quantize_dynamic(x, spec)
    assert scale.item() == 1
    assert torch.equal(codes.view(torch.uint8), x.to(codes.dtype).view(torch.uint8))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "int8", "int4"])
def test_dequantize(build: str, kind: str) -> None:
    dtype = qdtype(kind)
    codes = torch.arange(256, dtype=torch.int32).to(torch.int8).repeat(64, 3)
    codes = (codes % 8 - 4 if kind == "int4" else codes).view(dtype.storage)
    powers = torch.tensor([0.0, 1.0, 200.0, 255.0]).to(torch.uint8).repeat(16, 6).view(torch.float8_e8m0fnu)
    scales = [None, torch.rand(64, 1), torch.rand(1, 1), torch.rand(4, 16), powers.view(64, 6)[:, :6]]
    scales.append(torch.rand(2, 24).t()[:1].expand(64, 2))
    low, high = integer(dtype.bits).code_range if not dtype.has_nan else float8(dtype.storage).code_range
    for scale, transposed in itertools.product(scales, (False, True)):
        a, s = codes, scale
        if transposed:
            a, s = a.t(), None if s is None else s.t()
        arguments = (a, s, None, dtype, low, high, ZeroPointDomain.NONE)
        with record_kernels() as ran:
            ours = dequantize_codes(*arguments, torch.float32)
        assert ran == [f"dequantize_matrix.{build}"]
        assert equal(ours, portable(dequantize_codes)(*arguments, torch.float32)), (a.shape, s is None or s.shape)


@NEEDS_LIBRARY
@pytest.mark.parametrize("spec", [
    int8(PerAxis(1)),
    int8(PerBlock((32, 8))),
    integer(8, preserve_zero=False),
    integer(12),
    QuantSpec(qdtype("int8"), scale_rule=AbsMeanRule()),
    int8().with_granularity(PerGroup(32)),
    integer(8, rounding=Rounding.STOCHASTIC, noise=Noise(bits=8)),
], ids=str)  # fmt: skip
def test_other_specs_run_in_torch(spec: QuantSpec) -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with record_kernels() as ran:
        quantize_dynamic(x, spec)
    assert ran == []


@NEEDS_LIBRARY
def test_what_is_recorded_runs_in_torch() -> None:
    """A scale has a gradient, where one is recorded; a compiler sees operators that it can fuse."""
    x = torch.randn(4, 32, requires_grad=True)
    spec = QuantSpec(qdtype("int8"), PerRow())
    with record_kernels() as ran:
        assert quantize_rows(x, spec)[1].requires_grad
        torch.compile(lambda x: quantize_rows(x, spec)[0], backend="eager", fullgraph=True)(x.detach())
    assert ran == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_int8_have_the_bits_of_the_primitives(dtype: torch.dtype) -> None:
    """Also of the largest and the smallest numbers; codes reach both ends."""
    spec, extremes = QuantSpec("int8", quant_min=-127), torch.tensor([0.0, 1e-45, 1e-38, 3e38, -3e38, 65504.0])
    shapes = [torch.randn(shape) * torch.logspace(-6, 4, shape[0])[:, None] for shape in ((1, 1), (64, 128), (0, 16))]
    for x in (*shapes, torch.randn(3, 0), torch.stack([extremes, 0 * extremes, -extremes], 1)):
        x = x.to(dtype).nan_to_num(posinf=0, neginf=0)
        codes, scale = quantize_int8_rowwise(x)
        assert torch.equal(scale, spec.choose_qparams(x)[0])
        assert torch.equal(codes, spec.quantize(x, scale, None))
        used = scale[:, 0] > 1e-30
        assert (codes.abs().amax(1) == 127)[used].all() if x.numel() else not codes.numel()
