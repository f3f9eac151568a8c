"""HQQRule: never worse than MinMaxRule, by its own measure, and how much better where."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qtorch import PerBlock, PerGroup, PerRow, PerTensor, QuantSpec, ZeroPointDomain, compute_error
from qtorch.primitives import Granularity, HQQRule, MappingType, MinMaxRule, MSERule, PerAxis, Rounding, scale_rules
from qtorch.primitives.granularity import BlockView
from tests.fast_part import MATRIX, matrix_but

INT, FLOAT, NONE = ZeroPointDomain.INT, ZeroPointDomain.FLOAT, ZeroPointDomain.NONE
ASYMMETRIC, SYMMETRIC = MappingType.ASYMMETRIC, MappingType.SYMMETRIC
NO_CLIPPING = MappingType.SYMMETRIC_NO_CLIPPING_ERR
KINDS = [(ASYMMETRIC, INT), (ASYMMETRIC, FLOAT), (SYMMETRIC, INT), (SYMMETRIC, FLOAT), (SYMMETRIC, NONE)]
KINDS += [(NO_CLIPPING, INT), (NO_CLIPPING, FLOAT), (NO_CLIPPING, NONE)]
GRANULARITIES = [PerTensor(), PerRow(), PerAxis(-1), PerGroup(16), PerGroup(-1), PerBlock((4, 16)), PerBlock((1, 1))]

every_kind = pytest.mark.parametrize(("mapping", "domain"), KINDS, ids=lambda value: value.name)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def student_t(*shape: int) -> Tensor:
    """Four degrees of freedom: normal / sqrt(chi^2 / 4)."""
    draws = torch.randn((5, *shape), generator=torch.Generator().manual_seed(0))
    return draws[0] / draws[1:].square().mean(0).sqrt()


def spec_of(dtype: str, mapping: MappingType, domain: ZeroPointDomain, blocks: Granularity = PerGroup(32)) -> QuantSpec:
    preserve_zero = not (mapping is ASYMMETRIC and domain is FLOAT)
    return QuantSpec(dtype, blocks, mapping, domain, preserve_zero=preserve_zero)


def stored(x: Tensor, spec: QuantSpec) -> Tensor:
    """What the codes stand for, fp32."""
    scale, zero_point = spec.choose_qparams(x)
    return spec.dequantize(spec.quantize(x, scale, zero_point), scale, zero_point)


def loss(x: Tensor, spec: QuantSpec, p: float) -> Tensor:
    """Mean |error|^p of each block, fp64."""
    view = BlockView(x.shape, spec.block_size(x.shape))
    error = view.split((x.double() - stored(x, spec).double()).abs().pow(p))
    return error.mean(view.dims) if view.dims else error


def losses(x: Tensor, spec: QuantSpec, rule: HQQRule) -> tuple[Tensor, Tensor]:
    """Of the rule, and of min-max."""
    return loss(x, replace(spec, scale_rule=rule), rule.p), loss(x, spec, rule.p)


@every_kind
@pytest.mark.parametrize("p", [0.7, 2.0])
@pytest.mark.parametrize("bits", matrix_but((3,), (1, 2, 3, 4, 8)))
def test_no_block_is_worse_than_min_max(bits: int, p: float, mapping: MappingType, domain: ZeroPointDomain) -> None:
    for sign in ("int", "uint"):
        spec = spec_of(f"{sign}{bits}", mapping, domain)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got, plain = losses(student_t(8, 64).to(dtype), spec, HQQRule(p, iterations=5, starts=3))
            assert (got <= plain * (1 + 1e-5)).all()
            assert got.sum() > 0


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize(("mapping", "domain"), KINDS[:3], ids=lambda value: value.name)
def test_no_block_is_worse_in_any_form(granularity: Granularity, mapping: MappingType, domain: ZeroPointDomain) -> None:
    spec = spec_of("uint3" if mapping is ASYMMETRIC else "int3", mapping, domain, granularity)
    got, plain = losses(student_t(8, 48), spec, HQQRule())
    assert (got <= plain * (1 + 1e-5)).all()
    if granularity != PerBlock((1, 1)):
        assert 0 < got.sum() < 0.95 * plain.sum()


# Mean |error|^p of HQQ over that of min-max, at most, of Student's t; then of normal weights the SQNR in dB, at least
# and at most, and its gain over min-max, at least. In groups of 32.
BOUNDS = [
    (ASYMMETRIC, INT, 4, 0.97, 21.8, 22.6, 0.25), (ASYMMETRIC, INT, 3, 0.92, 15.4, 16.3, 0.45),
    (ASYMMETRIC, INT, 2, 0.84, 9.0, 10.0, 1.4), (ASYMMETRIC, FLOAT, 4, 0.97, 22.4, 23.2, 0.5),
    (ASYMMETRIC, FLOAT, 3, 0.93, 16.0, 16.9, 0.75), (ASYMMETRIC, FLOAT, 2, 0.83, 9.9, 10.8, 1.8),
    (SYMMETRIC, INT, 4, 0.91, 20.7, 21.7, 0.5), (SYMMETRIC, INT, 3, 0.85, 14.4, 15.4, 0.75),
    (SYMMETRIC, INT, 2, 0.83, 8.1, 9.1, 1.6),
]  # fmt: skip


@pytest.mark.parametrize(("mapping", "domain", "bits", "ratio", "low", "high", "gain"), [
    *BOUNDS[2::3], *(pytest.param(*each, marks=MATRIX) for each in BOUNDS if each not in BOUNDS[2::3])
])  # fmt: skip
def test_how_much_better(
    mapping: MappingType, domain: ZeroPointDomain, bits: int, ratio: float, low: float, high: float, gain: float
) -> None:
    spec = spec_of(f"{'uint' if mapping is ASYMMETRIC else 'int'}{bits}", mapping, domain)
    for dtype, p in itertools.product((torch.float32, torch.bfloat16), (0.7, 1.0, 2.0)):
        got, plain = losses(student_t(64, 256).to(dtype), spec, HQQRule(p))
        assert 0.3 * plain.sum() < got.sum() < ratio * plain.sum()
        assert (got < plain).double().mean() > 0.6
    x, rules = normal(64, 256), (HQQRule(p=2), MinMaxRule(), MSERule())
    best, plain, shrunk = (compute_error(x, stored(x, replace(spec, scale_rule=rule))) for rule in rules)
    assert low < best < high
    assert best > plain + gain
    assert best > shrunk - 0.05


def test_updates_and_narrow_codes() -> None:
    """Without them, and without factors, the rule is min-max; with them both scale and zero point move."""
    x = student_t(8, 64)
    spec = spec_of("uint3", ASYMMETRIC, FLOAT)
    plain = spec.choose_qparams(x)
    assert all(map(torch.equal, replace(spec, scale_rule=HQQRule(iterations=0, starts=1)).choose_qparams(x), plain))
    updated = replace(spec, scale_rule=HQQRule(starts=1))
    assert all((got != old).double().mean() > 0.9 for got, old in zip(updated.choose_qparams(x), plain))
    got, old = losses(x, spec, HQQRule(starts=1))
    assert 0.5 * old.sum() < got.sum() < 0.9 * old.sum()
    x = student_t(8, 64)
    for spec in (
        QuantSpec("int4", PerGroup(32), quant_min=-7),
        QuantSpec("uint4", PerGroup(32), ASYMMETRIC, quant_max=5),
        QuantSpec("int4", PerGroup(32), scale_dtype=torch.float8_e8m0fnu),
    ):
        got, plain = losses(x, spec, HQQRule())
        assert (got <= plain * (1 + 1e-5)).all()
        assert 0 < got.sum() < plain.sum()


@every_kind
@pytest.mark.parametrize(
    "dtype", matrix_but((torch.bfloat16,), (torch.float32, torch.bfloat16, torch.float16)), ids=str
)
def test_constant_blocks(dtype: torch.dtype, mapping: MappingType, domain: ZeroPointDomain) -> None:
    spec, values = replace(spec_of("int4", mapping, domain), scale_rule=HQQRule()), (0.0, 0.3, -7.0, 1e-3)
    x = torch.tensor(values, dtype=dtype).reshape(4, 1).expand(4, 64)
    assert all(bound.isfinite().all() for bound in spec.choose_range(x))
    # The scale of groups has the input's dtype, 8 bits of it in bf16.
    assert ((stored(x, spec) - x.float()).abs() <= 0.005 * x.float().abs()).all()


@every_kind
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1e30])
def test_the_size_of_weights_does_not_matter(magnitude: float, mapping: MappingType, domain: ZeroPointDomain) -> None:
    spec = replace(spec_of("int3", mapping, domain), scale_rule=HQQRule())
    x = student_t(4, 64)
    at_one = compute_error(x, stored(x, spec))
    assert abs(compute_error(x, stored(x * magnitude, spec) / magnitude) - at_one) < 0.1


def test_chunks_shrink_and_quantized_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([-3.0, -0.5, 0.0, 0.5, 1.5, 4.0])
    assert torch.equal(scale_rules.shrink(x, 1, 1), torch.tensor([-2.0, 0.0, 0.0, 0.0, 0.5, 3.0]))
    assert torch.equal(scale_rules.shrink(x, 2, 2), x / 2)
    torch.testing.assert_close(scale_rules.shrink(x, 0.5, 4), x.sign() * (x.abs() - x.abs().pow(-0.5) / 4).clamp(min=0))
    for scale_spec in (QuantSpec("float8_e4m3fn", PerTensor()), QuantSpec("int8", PerGroup(16))):
        spec = QuantSpec("int3", PerGroup(32), scale_spec=scale_spec)
        got, plain = losses(student_t(8, 256), spec, HQQRule())
        assert 0.3 * plain.sum() < got.sum() < 0.9 * plain.sum()
    spec = replace(spec_of("uint3", ASYMMETRIC, INT), scale_rule=HQQRule(), rounding=Rounding.STOCHASTIC)
    x = normal(8, 64)
    wanted = replace(spec, rounding=Rounding.NEAREST_EVEN).choose_range(x)
    assert all(map(torch.equal, spec.choose_range(x), wanted))
    x = student_t(8, 64).bfloat16()
    spec = spec_of("uint3", ASYMMETRIC, FLOAT)
    spec = replace(spec, scale_rule=HQQRule())
    whole = spec.choose_range(x)
    for size in (1, 32, 160):
        monkeypatch.setattr(scale_rules, "CHUNK", size)
        assert all(map(torch.equal, spec.choose_range(x), whole))
