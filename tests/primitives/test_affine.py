"""Affine quantization: what holds for every dtype, granularity, mapping, domain and shape."""

from collections.abc import Callable
from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from qtorch.primitives import (
    Granularity,
    MappingType,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
    ZeroPointDomain,
    choose_qparams_affine,
    choose_qparams_affine_with_min_max,
    compute_error,
    dequantize_affine,
    qdtype,
    quantize_affine,
)
from qtorch.primitives.granularity import BlockView

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
GRANULARITIES: list[Granularity] = [
    PerTensor(),
    PerRow(),
    PerToken(),
    PerAxis(0),
    PerAxis(-1),
    PerGroup(3),
    PerBlock((3,)),
    PerBlock((-1, 3)),
]
SHAPES = [(9,), (5, 9), (3, 7, 15), (2, 3, 5, 9), (0, 9), (4, 0), (1, 3)]
CASES = [
    (granularity, shape)
    for granularity in GRANULARITIES
    for shape in SHAPES
    if not (isinstance(granularity, PerBlock) and len(granularity.sizes) > len(shape))
]
MAPPINGS = [
    (mapping, domain)
    for mapping in MappingType
    for domain in ZeroPointDomain
    if (mapping, domain) != (MappingType.ASYMMETRIC, ZeroPointDomain.NONE)
]


def data(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, not contiguous where the shape allows it."""
    x = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(0))
    return x.permute(*range(len(shape))[::-1]).to(dtype)


@pytest.mark.parametrize(("mapping", "domain"), MAPPINGS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("granularity", "shape"), CASES, ids=str)
def test_the_error_is_at_most_half_a_step(
    granularity: Granularity,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mapping: MappingType,
    domain: ZeroPointDomain,
) -> None:
    x = data(*shape, dtype=dtype)
    block = granularity.block(shape)
    view = BlockView(shape, block)
    for code in map(qdtype, ("int8", "uint4")):
        if domain is ZeroPointDomain.NONE and not code.is_signed:
            continue
        scale, zero_point = choose_qparams_affine(x, mapping, block, code, zero_point_domain=domain)
        codes = quantize_affine(x, block, scale, zero_point, code, zero_point_domain=domain)
        real = dequantize_affine(codes, block, scale, zero_point, code, zero_point_domain=domain)
        assert scale.shape == view.scale_shape
        assert scale.dtype == torch.float32
        assert (zero_point is None) == (domain is ZeroPointDomain.NONE)
        assert codes.shape == real.shape == shape
        assert codes.dtype == code.storage
        assert real.dtype == torch.float32
        # The outermost codes clip: the range may end half a step beyond the last of them.
        inside = (codes > code.quant_min) & (codes < code.quant_max)
        steps = ((view.split(x).float() - view.split(real)) / view.split_scale(scale)).abs()
        assert (steps <= torch.where(view.split(inside), 0.5, 1.0) + 1e-4).all()


@pytest.mark.parametrize(("mapping", "domain"), MAPPINGS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerAxis(-1), PerGroup(32), PerBlock((8, 16))], ids=str)
@pytest.mark.parametrize("code", ["int3", "int4", "int8"])
def test_sqnr_is_bounded_on_both_sides(
    code: str,
    granularity: Granularity,
    dtype: torch.dtype,
    mapping: MappingType,
    domain: ZeroPointDomain,
) -> None:
    x = data(64, 64, dtype=dtype)
    block = granularity.block(x.shape)
    qparams = choose_qparams_affine(x, mapping, block, code, zero_point_domain=domain)
    codes = quantize_affine(x, block, *qparams, code, zero_point_domain=domain)
    real = dequantize_affine(codes, block, *qparams, code, zero_point_domain=domain)
    bits = qdtype(code).bits
    assert 6.02 * bits - 12 < compute_error(x, real) < 6.02 * bits + 2


@pytest.mark.parametrize(("mapping", "domain"), MAPPINGS)
@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0, 0.0, 0.0],
        [0.1, 0.1, 0.1, 0.1],
        [-5.0, -5.0, -5.0, -5.0],
        [1e-40, -1e-44, 0.0, 1e-42],
        [3e38, -3e38, 0.0, 1e38],
        [-3e38, -3e38, 0.0, -3e38],
        [3e38, 1e-40, 0.0, 1.0],
    ],
    ids=str,
)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_blocks_stay_finite_and_zeros_stay_zero(
    scale_dtype: torch.dtype, values: list[float], mapping: MappingType, domain: ZeroPointDomain
) -> None:
    x = torch.tensor([values])
    for code in ("int2", "int3", "int4", "uint4", "int8", "uint8"):
        scale, zero_point = choose_qparams_affine(
            x, mapping, (1, 4), code, scale_dtype=scale_dtype, zero_point_domain=domain
        )
        codes = quantize_affine(x, (1, 4), scale, zero_point, code, zero_point_domain=domain)
        real = dequantize_affine(codes, (1, 4), scale, zero_point, code, zero_point_domain=domain)
        assert scale.isfinite().all()
        assert (scale > 0).all()
        assert real.isfinite().all()
        # With real zero points zero need not be a code, and zero_point - scale * middle overflows.
        if not domain.is_real or not x.any():
            assert (real[x == 0] == 0).all()


def test_a_zero_point_that_is_not_zero_keeps_zero_exact() -> None:
    x = data(16, 32)
    x[:, ::3] = 0
    qparams = choose_qparams_affine(x, MappingType.ASYMMETRIC, (1, 8), "uint4")
    real = dequantize_affine(quantize_affine(x, (1, 8), *qparams, "uint4"), (1, 8), *qparams, "uint4")
    assert (real[:, ::3] == 0).all()
    assert 15 < compute_error(x, real) < 30


@pytest.mark.parametrize("code", ["int4", "uint4", "int8", "uint8"])
def test_no_clipping_err_does_not_clip(code: str) -> None:
    x = data(32, 64)
    x[::2] *= -1
    qparams = choose_qparams_affine(x, MappingType.SYMMETRIC_NO_CLIPPING_ERR, (1, 64), code)
    codes = quantize_affine(x, (1, 64), *qparams, code)
    real = dequantize_affine(codes, (1, 64), *qparams, code)
    assert ((x - real).abs() <= qparams[0] * 0.50001).all()
    symmetric = choose_qparams_affine(x, MappingType.SYMMETRIC, (1, 64), code)
    assert (symmetric[0] < qparams[0] * 1.01).any()


@pytest.mark.parametrize(("mapping", "domain"), MAPPINGS)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_with_min_max_is_the_same_on_the_same_ranges(
    dtype: torch.dtype, granularity: Granularity, mapping: MappingType, domain: ZeroPointDomain
) -> None:
    x = data(3, 7, 15, dtype=dtype)
    block = granularity.block(x.shape)
    view = BlockView(x.shape, block)
    ends = [f(view.split(x), view.dims).reshape(view.scale_shape) for f in (torch.amin, torch.amax)]
    for options in ({}, {"eps": 1.0}, {"quant_min": -7}, {"scale_dtype": torch.bfloat16}):
        options = {**options, "zero_point_domain": domain}
        wanted = choose_qparams_affine(x, mapping, block, "int4", **options)
        got = choose_qparams_affine_with_min_max(*ends, mapping, block, "int4", **options)
        assert torch.equal(got[0], wanted[0])
        assert got[0].dtype == wanted[0].dtype
        assert (got[1] is wanted[1] is None) or torch.equal(got[1], wanted[1])


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


@pytest.mark.parametrize("storage", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floating_point_codes(dtype: torch.dtype, storage: str) -> None:
    x = data(64, 64, dtype=dtype)
    scale, zero_point = choose_qparams_affine(
        x, MappingType.SYMMETRIC, (1, 64), storage, zero_point_domain=ZeroPointDomain.NONE
    )
    codes = quantize_affine(x, (1, 64), scale, zero_point, storage)
    assert codes.dtype == getattr(torch, storage)
    assert torch.equal(codes.float().abs().amax(-1), torch.full((64,), qdtype(storage).quant_max))
    wanted = (x.float() * (1 / scale)).to(codes.dtype)
    assert torch.equal(codes.float(), wanted.float())
    real = dequantize_affine(codes, (1, 64), scale, zero_point, storage)
    assert 20 < compute_error(x, real) < 40


def test_error_texts() -> None:
    x, one = torch.ones(2, 8), torch.ones(2, 1)
    symmetric, asymmetric = MappingType.SYMMETRIC, MappingType.ASYMMETRIC
    choose, none = choose_qparams_affine, ZeroPointDomain.NONE
    cases: dict[str, Callable[[], object]] = {
        "block": lambda: choose(x, symmetric, (1, 3), "int8"),
        "rank": lambda: quantize_affine(x, (8,), one, None, "int8"),
        "range": lambda: choose(x, symmetric, (1, 8), torch.int8, -129, 127),
        "empty": lambda: quantize_affine(x, (1, 8), one, None, "uint4", 9, 3),
        "no zero": lambda: choose(x, asymmetric, (1, 8), "int8", zero_point_domain=none),
        "preserve": lambda: choose(x, asymmetric, (1, 8), "int8", preserve_zero=False),
        "storage": lambda: dequantize_affine(x.to(torch.uint8), (1, 8), one, None, "int4"),
        "scales": lambda: quantize_affine(x, (1, 4), one, None, "int4"),
        "zero points": lambda: quantize_affine(x, (1, 8), one, torch.ones(3), "int4"),
    }
    texts = []
    for name, call in cases.items():
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the texts follow)
            call()
        texts.append(fill(f"{name}: {error.value}", 96))
    assert_expected_inline(
        "\n".join(texts),
        """\
block: block_size (1, 3) does not divide shape (2, 8): 8 % 3 along axis 1
rank: block_size (8,) has 1 axes, the tensor has shape (2, 8)
range: quant_min=-129, quant_max=127 is not a range within int8's [-128, 127]
empty: quant_min=9, quant_max=3 is not a range within uint4's [0, 15]
no zero: an asymmetric mapping needs a zero point: zero_point_domain is NONE
preserve: preserve_zero=False needs zero_point_domain FLOAT or OFFSET, got INT
storage: codes of int4 are stored as torch.int8, got torch.uint8
scales: a tensor of shape (2, 8) in blocks of (1, 4) has 4 scales of shape (2, 2), got shape (2,
1)
zero points: a tensor of shape (2, 8) in blocks of (1, 8) has 2 scales of shape (2, 1), got
shape (3,)""",
    )
