"""Affine quantization: its error, its bounds, and the numbers of torch."""

import itertools
import re

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken, ZeroPointDomain, primitives
from qtorch.primitives import Granularity, QDType, choose_qparams_affine, compute_error, qdtype
from qtorch.primitives.affine import dequantize_affine, quantize_affine
from qtorch.primitives.granularity import BlockView
from tests.refusals import refuses
from tests.rounding import same_bits

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
GRANULARITIES = [PerTensor(), PerRow(), PerToken(), PerAxis(0), PerAxis(-1), PerGroup(3), PerBlock((-1, 3))]
SHAPES = [(9,), (5, 9), (3, 7, 15), (2, 3, 5, 9), (0, 9), (4, 0), (1, 3)]
MAPPINGS = [
    (mapping, domain)
    for mapping, domain in itertools.product(MappingType, ZeroPointDomain)
    if (mapping, domain) != (MappingType.ASYMMETRIC, ZeroPointDomain.NONE)
]
mappings = pytest.mark.parametrize(("mapping", "domain"), MAPPINGS)
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


def data(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, not contiguous where the shape allows it."""
    x = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(0))
    return x.permute(*range(len(shape))[::-1]).to(dtype)


def round_trip(x: torch.Tensor, mapping: MappingType, block: tuple[int, ...], code: QDType | str, **options) -> tuple:
    """(scale, zero point, codes, reals)."""
    domain = options.get("zero_point_domain", ZeroPointDomain.INT)
    scale, zero_point = choose_qparams_affine(x, mapping, block, code, **options)
    codes = quantize_affine(x, block, scale, zero_point, code, zero_point_domain=domain)
    return scale, zero_point, codes, dequantize_affine(codes, block, scale, zero_point, code, zero_point_domain=domain)


@mappings
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_error_is_at_most_half_a_step(granularity: Granularity, mapping: MappingType, domain: ZeroPointDomain) -> None:
    for shape, dtype, code in itertools.product(SHAPES, FLOATS, map(qdtype, ("int8", "uint4"))):
        if (domain is ZeroPointDomain.NONE and not code.is_signed) or (
            isinstance(granularity, PerBlock) and len(shape) < 2
        ):
            continue
        x, block = data(*shape, dtype=dtype), granularity.block(shape)
        view = BlockView(shape, block)
        scale, zero_point, codes, real = round_trip(x, mapping, block, code, zero_point_domain=domain)
        assert (scale.shape, scale.dtype, real.dtype) == (view.scale_shape, torch.float32, torch.float32)
        assert (zero_point is None) == (domain is ZeroPointDomain.NONE)
        assert codes.shape == real.shape == shape
        assert codes.dtype == code.storage
        # The outermost codes clip: the range may end half a step beyond the last of them.
        inside = (codes > code.quant_min) & (codes < code.quant_max)
        steps = ((view.split(x).float() - view.split(real)) / view.split_scale(scale)).abs()
        assert (steps <= torch.where(view.split(inside), 0.5, 1.0) + 1e-4).all(), (shape, dtype, code)


@mappings
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerAxis(-1), PerGroup(32), PerBlock((8, 16))], ids=str)
def test_sqnr_is_bounded_on_both_sides(granularity: Granularity, mapping: MappingType, domain: ZeroPointDomain) -> None:
    for code, dtype in itertools.product(map(qdtype, ("int3", "int4", "int8")), FLOATS):
        x = data(64, 64, dtype=dtype)
        *_, real = round_trip(x, mapping, granularity.block(x.shape), code, zero_point_domain=domain)
        assert 6.02 * code.bits - 12 < compute_error(x, real) < 6.02 * code.bits + 2


EXTREMES = [
    [0.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1], [-5.0, -5.0, -5.0, -5.0], [1e-40, -1e-44, 0.0, 1e-42],
    [3e38, -3e38, 0.0, 1e38], [-3e38, -3e38, 0.0, -3e38], [3e38, 1e-40, 0.0, 1.0],
]  # fmt: skip


@mappings
def test_extreme_blocks_stay_finite_and_zeros_stay_zero(mapping: MappingType, domain: ZeroPointDomain) -> None:
    codes = ("int2", "int3", "int4", "uint4", "int8", "uint8")
    for scale_dtype, values, code in itertools.product((torch.float32, torch.bfloat16), EXTREMES, codes):
        x, options = torch.tensor([values]), {"scale_dtype": scale_dtype, "zero_point_domain": domain}
        scale, _, _, real = round_trip(x, mapping, (1, 4), code, **options)
        assert scale.isfinite().all()
        assert ((scale.abs() if mapping is MappingType.SYMMETRIC_SIGNED else scale) > 0).all()
        assert real.isfinite().all()
        # With real zero points zero need not be a code, and zero_point - scale * middle overflows.
        if not domain.is_real or not x.any():
            assert (real[x == 0] == 0).all()


@pytest.mark.parametrize("code", ["int4", "uint4", "int8", "uint8"])
def test_no_clipping_err_does_not_clip(code: str) -> None:
    x = data(32, 64)
    x[::2] *= -1
    scale, _, _, real = round_trip(x, MappingType.SYMMETRIC_NO_CLIPPING_ERR, (1, 64), code)
    assert ((x - real).abs() <= scale * 0.50001).all()
    symmetric = choose_qparams_affine(x, MappingType.SYMMETRIC, (1, 64), code)
    assert (symmetric[0] < scale * 1.01).any()


@pytest.mark.parametrize("options", [{}, {"eps": 1.0}, {"quant_min": -7}, {"scale_dtype": torch.bfloat16}], ids=str)
def test_with_min_max_is_the_same_on_the_same_ranges(options: dict) -> None:
    x = data(3, 15)
    wanted = choose_qparams_affine(x, MappingType.ASYMMETRIC, (1, 15), "int4", **options)
    ends = (x.amin(1, keepdim=True), x.amax(1, keepdim=True))
    got = primitives.choose_qparams_affine_with_min_max(*ends, MappingType.ASYMMETRIC, (1, 15), "int4", **options)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("scale_dtype", FLOATS, ids=str)
def test_eps_and_the_dtypes_of_the_qparams(scale_dtype: torch.dtype) -> None:
    x, tiny = torch.zeros(2, 4), torch.finfo(scale_dtype).tiny
    scale, zero_point = choose_qparams_affine(
        x, MappingType.SYMMETRIC, (1, 4), "uint8", None, None, None, scale_dtype, torch.int64
    )
    assert torch.equal(scale, torch.full((2, 1), tiny, dtype=scale_dtype))
    assert torch.equal(zero_point, torch.full((2, 1), 128))
    scale, _ = choose_qparams_affine(x, MappingType.SYMMETRIC, (1, 4), "int8", eps=2**-10)
    assert torch.equal(scale, torch.full((2, 1), 2**-10))
    ends = torch.tensor([-8.0, -1.0]), torch.tensor([8.0, torch.inf])
    for mapping, preserve in ((MappingType.SYMMETRIC_SIGNED, True), (MappingType.SYMMETRIC, False)):
        scale, _ = primitives.choose_qparams_affine_with_min_max(*ends, mapping, (), "int4", preserve_max_val=preserve)
        assert scale[0] == 1
        assert scale[1].isnan()


@pytest.mark.parametrize("storage", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floating_point_codes(dtype: torch.dtype, storage: str) -> None:
    x = data(64, 64, dtype=dtype)
    none = ZeroPointDomain.NONE
    scale, _, codes, real = round_trip(x, MappingType.SYMMETRIC, (1, 64), storage, zero_point_domain=none)
    assert codes.dtype == getattr(torch, storage)
    assert torch.equal(codes.float().abs().amax(-1), torch.full((64,), qdtype(storage).quant_max))
    wanted = (x.float() * (1 / scale)).to(codes.dtype)
    assert torch.equal(codes.float(), wanted.float())
    assert 20 < compute_error(x, real) < 40


@PROPERTY
@given(
    code=st.sampled_from(["int2", "int4", "uint4", "int8", "uint8", "float8_e4m3fn"]),
    scale=st.floats(2**-60, 2**60, width=32),
    zero_point=st.integers(0, 255),
    domain=st.sampled_from(ZeroPointDomain),
)
def test_quantize_undoes_dequantize(code: str, scale: float, zero_point: int, domain: ZeroPointDomain) -> None:
    kind = qdtype(code)
    span = int(kind.quant_max - kind.quant_min) + 1
    if kind.is_floating_point:
        codes = torch.linspace(-448, 448, 999).to(kind.storage).reshape(1, -1)
        domain = ZeroPointDomain.NONE
    else:
        codes = torch.arange(kind.quant_min, kind.quant_max + 1).to(kind.storage).reshape(1, -1)
    s = torch.tensor([[scale]])
    z = torch.tensor([[kind.quant_min + zero_point % span]])
    if domain.adds_zero_point:
        z = z * s
    block = tuple(codes.shape)
    real = dequantize_affine(codes, block, s, z, code, zero_point_domain=domain)
    again = quantize_affine(real, block, s, z, code, zero_point_domain=domain)
    assert torch.equal(again.float(), codes.float())


@PROPERTY
@given(
    x=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=20), scale=st.floats(2**-10, 1024, width=32),
    zero_point=st.integers(-8, 7), domain=st.sampled_from(ZeroPointDomain),
)  # fmt: skip
def test_quantize_is_monotonic(x: list[float], scale: float, zero_point: int, domain: ZeroPointDomain) -> None:
    s, z = torch.tensor([scale]), torch.tensor([zero_point])
    ordered = torch.tensor(x).sort().values
    codes = quantize_affine(ordered, (len(x),), s, z, "int4", zero_point_domain=domain)
    assert (codes.diff() >= 0).all()
    real = dequantize_affine(codes, (len(x),), s, z, "int4", zero_point_domain=domain)
    assert (real.diff() >= 0).all()


X, ONE, SYMMETRIC, ASYMMETRIC = torch.ones(2, 8), torch.ones(2, 1), MappingType.SYMMETRIC, MappingType.ASYMMETRIC


NONE, CHOOSE = ZeroPointDomain.NONE, choose_qparams_affine
REFUSED = {
    "block_size (1, 3) does not divide shape (2, 8): 8 % 3 along axis 1": lambda: CHOOSE(X, SYMMETRIC, (1, 3), "int8"),
    "quant_min=-129, quant_max=127 is not a range within int8's [-128, 127]":
        lambda: CHOOSE(X, SYMMETRIC, (1, 8), torch.int8, -129, 127),
    "quant_min=3, quant_max=3 is not a range within uint4's [0, 15]":
        lambda: quantize_affine(X, (1, 8), ONE, None, "uint4", 3, 3),
    "an asymmetric mapping needs a zero point: zero_point_domain is NONE":
        lambda: CHOOSE(X, ASYMMETRIC, (1, 8), "int8", zero_point_domain=NONE),
    "preserve_zero=False needs the FLOAT or OFFSET domain, got INT":
        lambda: CHOOSE(X, ASYMMETRIC, (1, 8), "int8", preserve_zero=False),
    "codes of int4 are stored as torch.int8, got torch.uint8":
        lambda: dequantize_affine(X.to(torch.uint8), (1, 8), ONE, None, "int4"),
    "a tensor of shape (2, 8) in blocks of (1, 8) has 2 scales of shape (2, 1), got shape (3,)":
        lambda: quantize_affine(X, (1, 8), ONE, torch.ones(3), "int4"),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    refuses(re.escape(message), REFUSED[message])


OPS = torch.ops.quantized_decomposed

RANGES = [
    (torch.int8, -128, 127), (torch.int8, -127, 127), (torch.int8, -8, 7), (torch.uint8, 0, 255), (torch.uint8, 0, 15),
    (torch.int16, -32768, 32767), (torch.int32, -(2**20), 2**20),
]  # fmt: skip
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


def data_of_torch(name: str = "normal") -> torch.Tensor:
    return INPUTS[name](torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("dtype", "low", "high"), RANGES)
@pytest.mark.parametrize("name", INPUTS)
def test_choose_qparams(name: str, dtype: torch.dtype, low: int, high: int) -> None:
    x, eps = data_of_torch(name), 2.0**-40
    theirs = {MappingType.ASYMMETRIC: OPS.choose_qparams, MappingType.SYMMETRIC: OPS.choose_qparams_symmetric}
    for mapping, function in theirs.items():
        if mapping is MappingType.SYMMETRIC and high == 15:
            continue
        wanted = function.tensor(x, low, high, eps, dtype)
        got = choose_qparams_affine(x, mapping, x.shape, dtype, low, high, eps)
        assert torch.equal(got[0].double().flatten(), wanted[0])
        assert torch.equal(got[1].long().flatten(), wanted[1])


def test_rows_and_groups() -> None:
    x = data_of_torch()
    symmetric, _ = choose_qparams_affine(x, MappingType.SYMMETRIC, (1, 21), torch.int8, -127, 127)
    assert same_bits(symmetric, OPS.choose_qparams_per_token(x, torch.int8)[0])
    scale, zero_point = OPS.choose_qparams_per_token_asymmetric(x, torch.int8)
    got = choose_qparams_affine(x, MappingType.ASYMMETRIC, (1, 21), torch.int8)
    assert torch.equal(got[0].double(), scale)
    # XNNPACK's rule takes the zero point from the end that it serves better.
    assert (got[1] - zero_point).abs().max() <= 1
    codes = torch.arange(-128, 128, dtype=torch.int8).reshape(4, 64)
    scale = torch.rand(4, 2, generator=torch.Generator().manual_seed(1)) + 0.2
    wanted = OPS.dequantize_per_channel_group(codes, scale, None, -128, 127, torch.int8, 32, torch.float32)
    assert same_bits(dequantize_affine(codes, (1, 32), scale, None, torch.int8), wanted)


@pytest.mark.parametrize(("dtype", "low", "high"), RANGES)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_per_tensor(input_dtype: torch.dtype, name: str, dtype: torch.dtype, low: int, high: int) -> None:
    x = data_of_torch(name).clamp(-6e4, 6e4).to(input_dtype)
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
def assert_equal_but_for_ties(codes: torch.Tensor, wanted: torch.Tensor, quotient: torch.Tensor) -> None:
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
