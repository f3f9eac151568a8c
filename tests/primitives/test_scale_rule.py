"""Scale rules: the range that the codes of a block should cover."""

import pytest
import torch

from qtorch import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, QuantSpec, ZeroPointDomain
from qtorch.primitives import AbsMaxRule, AbsMeanRule, FixedRangeRule, HQQRule, MinMaxRule, MSERule, compute_error
from qtorch.primitives.granularity import BlockView, Granularity
from qtorch.primitives.scale_rules import LSQRule, PercentileRule, PowerMeanRule, ScaleRule
from tests import rounding
from tests.refusals import refuses

RULES = [
    MinMaxRule(), AbsMaxRule(), AbsMaxRule(0.5), AbsMeanRule(), PowerMeanRule(2.0, 1.5), FixedRangeRule(-1, 1),
    PercentileRule(90), MSERule(5), HQQRule(iterations=3, starts=2),
    # And those that a user has defined.
    *(rule() for rule in ScaleRule.__subclasses__() if rule.__module__.partition(".")[0] not in ("qtorch", "tests")),
]  # fmt: skip
GRANULARITIES = [PerTensor(), PerRow(), PerAxis(-1), PerGroup(16), PerBlock((4, 16))]


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def squared_error(x: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Sum over each block, of the scale's shape."""
    scale, zero_point = spec.choose_qparams(x)
    real = spec.dequantize(spec.quantize(x, scale, zero_point), scale, zero_point)
    view = BlockView(x.shape, spec.block_size(x.shape))
    return view.split((real - x).square()).sum(view.dims).reshape(view.scale_shape)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_range_is_fp32_of_the_scales_shape(dtype: torch.dtype, granularity: Granularity, rule: ScaleRule) -> None:
    spec = QuantSpec("int8", granularity, scale_rule=rule)
    low, high = spec.choose_range(data(8, 48).to(dtype))
    assert low.dtype == high.dtype == torch.float32
    assert low.shape == high.shape == spec.scale_shape((8, 48))
    assert (low < high).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", [(0, 48), (8, 0), (0,)])
def test_empty_tensors(shape: tuple[int, ...], rule: ScaleRule) -> None:
    spec = QuantSpec("int8", PerRow(), scale_rule=rule)
    scale, zero_point = spec.choose_qparams(torch.empty(shape))
    assert scale.shape == spec.scale_shape(shape)
    assert scale.isfinite().all()
    assert spec.quantize(torch.empty(shape), scale, zero_point).shape == shape


@pytest.mark.parametrize("rule", [r for r in RULES if not isinstance(r, FixedRangeRule)], ids=str)
@pytest.mark.parametrize("mapping", MappingType)
def test_an_all_zero_block_stays_zero(mapping: MappingType, rule: ScaleRule) -> None:
    x = data(4, 16)
    x[2] = 0
    spec = QuantSpec("uint4", PerRow(), mapping, scale_rule=rule)
    scale, zero_point = spec.choose_qparams(x)
    real = spec.dequantize(spec.quantize(x, scale, zero_point), scale, zero_point)
    assert scale.isfinite().all()
    assert torch.equal(real[2], torch.zeros(16))
    assert (real[[0, 1, 3]] != 0).any(-1).all()


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_extremes_per_block(granularity: Granularity) -> None:
    x = data(8, 48)
    spec = QuantSpec("int8", granularity)
    view = BlockView(x.shape, spec.block_size(x.shape))
    low = view.split(x).amin(view.dims).reshape(view.scale_shape)
    high = view.split(x).amax(view.dims).reshape(view.scale_shape)
    assert all(map(torch.equal, MinMaxRule().min_max(x, spec), (low, high)))
    bound = torch.maximum(low.abs(), high.abs())
    assert all(map(torch.equal, AbsMaxRule().min_max(x, spec), (-bound, bound)))
    x = data(8, 48)
    spec = QuantSpec("int8", granularity)
    got, wanted = PercentileRule(100).min_max(x, spec), MinMaxRule().min_max(x, spec)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("mapping", MappingType)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", ["int2", "uint4", "int8"])
def test_mse_is_never_worse_than_min_max(dtype: str, granularity: Granularity, mapping: MappingType) -> None:
    x = data(8, 48)
    best = squared_error(x, QuantSpec(dtype, granularity, mapping, scale_rule=MSERule()))
    plain = squared_error(x, QuantSpec(dtype, granularity, mapping))
    assert (best <= plain).all()
    assert best.sum() > 0


def test_mse_and_percentiles() -> None:
    x = data(16, 256)
    x[:, 0] *= 4
    plain = QuantSpec("int4", PerRow())
    best = QuantSpec("int4", PerRow(), scale_rule=MSERule())
    gain = compute_error(x, best.fake_quantize(x)) - compute_error(x, plain.fake_quantize(x))
    assert 1 < gain < 12
    x = torch.tensor([[-7.5, 7.5] * 8])
    spec = QuantSpec("uint4", PerRow(), MappingType.ASYMMETRIC, scale_rule=MSERule())
    assert all(map(torch.equal, spec.choose_range(x), MinMaxRule().min_max(x, spec)))
    x = torch.arange(10.0).reshape(1, 10)
    low, high = PercentileRule(1e-20).min_max(x, QuantSpec("int8", PerRow()))
    assert (low.item(), high.item()) == (4, 5)
    x = data(1, 1000)
    x[0, 7] = 1e6
    _, high = PercentileRule(99).min_max(x, QuantSpec("int8", PerRow()))
    assert high < 5
    for make, message in REFUSED:
        refuses(message, make)


@pytest.mark.parametrize("percentile", [1e-3, 50, 80, 99])
def test_a_percentile_is_an_order_statistic(percentile: float) -> None:
    x = data(4, 201)
    low, high = PercentileRule(percentile).min_max(x, QuantSpec("int8", PerRow()))
    ordered = x.sort(-1).values
    cut = int((1 - percentile / 100) / 2 * 201)
    assert torch.equal(low, ordered[:, cut : cut + 1])
    assert torch.equal(high, ordered[:, 200 - cut : 201 - cut])
    assert (low <= high).all()


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerGroup(16)], ids=str)
def test_abs_mean_gives_the_ternary_numbers_of_bitnet(granularity: Granularity) -> None:
    x = data(8, 48)
    spec = QuantSpec("int2", granularity, scale_rule=AbsMeanRule(), quant_min=-1)
    scale, zero_point = spec.choose_qparams(x)
    assert zero_point is None

    # arXiv 2402.17764: RoundClip(W / (gamma + eps), -1, 1), gamma = mean |W|; here in fp64.
    view = BlockView(x.shape, spec.block_size(x.shape))
    gamma = view.split(x.double()).abs().mean(view.dims, keepdim=True)
    ternary = view.merge((view.split(x.double()) / (gamma + 1e-12)).round().clamp(-1, 1))
    torch.testing.assert_close(scale.double(), gamma.reshape(scale.shape), rtol=rounding.gamma(x.numel() + 2), atol=0)
    assert torch.equal(spec.quantize(x, scale, zero_point).double(), ternary)
    assert set(ternary.unique().tolist()) == {-1, 0, 1}


@pytest.mark.parametrize("mapping", [MappingType.ASYMMETRIC, MappingType.SYMMETRIC_NO_CLIPPING_ERR])
def test_abs_mean_is_the_scale_of_other_types_too(mapping: MappingType) -> None:
    x = data(8, 48)
    scale, _ = QuantSpec("int4", PerRow(), mapping, scale_rule=AbsMeanRule()).choose_qparams(x)
    wanted = x.abs().mean(-1, keepdim=True)
    torch.testing.assert_close(scale, wanted, rtol=2 * rounding.gamma(x.shape[-1] + 2), atol=0)


@pytest.mark.parametrize("mapping", [MappingType.SYMMETRIC, MappingType.ASYMMETRIC])
def test_a_fixed_range_ignores_the_data(mapping: MappingType) -> None:
    spec = QuantSpec("uint8", PerRow(), mapping, scale_rule=FixedRangeRule(-1, 1))
    first, second = spec.choose_qparams(data(4, 8)), spec.choose_qparams(data(4, 8, seed=1) * 9)
    assert all(map(torch.equal, first, second))
    assert torch.equal(first[0], torch.full((4, 1), 2 / 255))


def test_fixed_ranges() -> None:
    rule = FixedRangeRule(0, 1)
    spec = QuantSpec("uint8", PerTensor(), MappingType.ASYMMETRIC, scale_rule=rule)
    scale, zero_point = spec.choose_qparams(data(4, 8))
    assert zero_point.item() == 0
    codes = spec.quantize(torch.tensor([[0.0, 1.0, 2.0, -1.0]]), scale, zero_point)
    assert codes.tolist() == [[0, 255, 255, 0]]
    rule, domain = FixedRangeRule(2, 17), ZeroPointDomain.FLOAT
    spec = QuantSpec("uint4", PerTensor(), MappingType.ASYMMETRIC, domain, rule, preserve_zero=False)
    x = torch.arange(2.0, 18.0)
    scale, zero_point = spec.choose_qparams(x)
    codes = spec.quantize(x, scale, zero_point)
    assert torch.equal(codes, torch.arange(16, dtype=torch.uint8))
    assert torch.equal(spec.dequantize(codes, scale, zero_point), x)


REFUSED = [
    (lambda: FixedRangeRule(1, 1), r"a fixed range needs low < high, got \[1, 1\]"),
    (lambda: PercentileRule(0), r"percentile must be in \(0, 100\], got 0"),
    (lambda: PercentileRule(100.5), r"percentile must be in \(0, 100\], got 100.5"),
    (lambda: MSERule(1), "needs steps >= 2 and 0 < smallest < 1, got 1 and 0.5"),
    (lambda: MSERule(9, 1.0), "needs steps >= 2 and 0 < smallest < 1, got 9 and 1.0"),
    (lambda: HQQRule(p=0), r"p must be in \(0, 2\], got 0"),
    (lambda: HQQRule(p=2.5), r"p must be in \(0, 2\], got 2.5"),
    (lambda: HQQRule(beta=0.5), "needs beta >= 1 and kappa >= 1, got 0.5 and 1.01"),
    (lambda: HQQRule(kappa=0.5), "needs beta >= 1 and kappa >= 1, got 1.0 and 0.5"),
    (lambda: HQQRule(starts=0), "starts >= 1 and 0 < smallest < 1, got 20, 0 and 0.5"),
    (lambda: HQQRule(smallest=1.0), "got 20, 8 and 1.0"),
    (
        lambda: QuantSpec("float8_e4m3fn", scale_rule=HQQRule()).choose_range(data(2, 32)),
        "takes integer codes, got float8",
    ),
]


def test_ranges_by_hand():
    """Zeros are no part of a power mean; the codes above that of zero count for LSQ; a search ends at its smallest."""
    x = torch.tensor([[0.0, 3.0, 0.0, -1.0]])
    assert PowerMeanRule(1.0, 1.5).min_max(x, QuantSpec("int8", PerRow()))[1].item() == 3.0
    codes_above_zero, mean = 7, 1.0
    high = LSQRule().min_max(x, QuantSpec("uint4", PerRow(), MappingType.ASYMMETRIC))[1]
    torch.testing.assert_close(high, torch.tensor([[2 * mean / codes_above_zero**0.5 * 7.5]]))
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    spec = QuantSpec("int2", PerRow())
    found = MSERule(steps=2, smallest=0.5).min_max(x, spec)[1] / MinMaxRule().min_max(x, spec)[1]
    assert 0.5 in found
    assert set(found.flatten().tolist()) <= {0.5, 1.0}
