"""The domains of zero points that are real numbers: q * s + m (OFFSET) and (q - z) * s with any real z (FRACTIONAL)."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, MappingType, PackedLayout, PerGroup, PlainLayout, QuantSpec
from qtorch.kernels import record_kernels
from qtorch.primitives import HQQRule, ZeroPointDomain, choose_qparams_affine, compute_error, from_json, to_json

OFFSET, FRACTIONAL = ZeroPointDomain.OFFSET, ZeroPointDomain.FRACTIONAL
DOMAINS = (OFFSET, FRACTIONAL)
ASYMMETRIC = MappingType.ASYMMETRIC


def spec_of(domain: ZeroPointDomain, dtype: str = "uint4", **options: object) -> QuantSpec:
    return QuantSpec(dtype, PerGroup(32), ASYMMETRIC, domain, **options)


def by_equation(domain: ZeroPointDomain, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """In fp32, an operation at a time."""
    q, s, z = codes.float(), scale.float().repeat_interleave(32, 1), zero.float().repeat_interleave(32, 1)
    return q * s + z if domain is OFFSET else (q - z) * s


@pytest.mark.parametrize("dtype", ["uint1", "uint4", "int5", "int8", "uint8"])
@pytest.mark.parametrize("domain", DOMAINS, ids=str)
def test_dequantize_is_the_equation_bit_for_bit(domain: ZeroPointDomain, dtype: str) -> None:
    """Whoever dequantizes: the tensor in either layout, and a gather of rows."""
    spec = spec_of(domain, dtype)
    low, high = map(int, spec.code_range)
    codes = torch.randint(low, high + 1, (24, 96)).to(spec.dtype.storage)
    scale, zero = torch.randn(24, 3), torch.randn(24, 3) * 5
    wanted = by_equation(domain, codes, scale, zero)
    for layout in (PlainLayout(), PackedLayout())[: 1 if spec.dtype.bits == 8 else 2]:
        weight = AffineQuantizedTensor.from_plain(codes, scale, zero, LinearSpec(spec, layout=layout), torch.float32)
        assert torch.equal(weight.dequantize(), wanted)
        ids = torch.tensor([5, 0, 23, 5])
        with record_kernels() as ran:
            assert torch.equal(functional.embedding(ids, weight), wanted[ids])
        assert ran[0] in ("embedding:cpu_embedding", "embedding:gather_rows", "embedding:gather_packed_rows")
        assert compute_error(torch.ones(2, 96) @ wanted.T, functional.linear(torch.ones(2, 96), weight)) > 100


def test_offset_of_code_zero() -> None:
    """The least element has the least code; zero need not be in the range."""
    x = torch.linspace(3.0, 6.0, 16).reshape(1, 16)
    for dtype, code in (("uint4", 0), ("int4", -8)):
        spec = QuantSpec(dtype, PerGroup(16), ASYMMETRIC, OFFSET, preserve_zero=False)
        scale, zero = spec.choose_qparams(x)
        assert zero is not None
        codes = spec.quantize(x, scale, zero)
        assert codes.tolist() == [list(range(code, code + 16))]
        assert torch.allclose(zero, 3.0 - code * scale)
        assert compute_error(x, spec.dequantize(codes, scale, zero)) > 110
        including_zero = QuantSpec(dtype, PerGroup(16), ASYMMETRIC, OFFSET)
        assert torch.allclose(including_zero.choose_qparams(x)[0], torch.tensor(6.0 / 15))


def test_fractional_zero_point_is_not_rounded() -> None:
    x = torch.tensor([[-0.4, 0.0, 0.3, 1.0]])
    scale, zero = choose_qparams_affine(x, ASYMMETRIC, (1, 4), "uint4", zero_point_domain=FRACTIONAL)
    assert zero is not None
    assert torch.allclose(zero, torch.tensor(0.4 / (1.4 / 15)))
    assert zero != zero.round()
    spec = QuantSpec("uint4", PerGroup(4), ASYMMETRIC, FRACTIONAL)
    codes = spec.quantize(x, scale, zero)
    assert (codes.min(), codes.max()) == (0, 15)
    # The ends of the range are codes, whereas a rounded zero point moves them by up to half a step.
    real = spec.dequantize(codes, scale, zero)
    assert torch.allclose(real[0, [0, 3]], x[0, [0, 3]])


@pytest.mark.parametrize("domain", DOMAINS, ids=str)
def test_symmetric_unsigned_codes_keep_zero(domain: ZeroPointDomain) -> None:
    x = torch.randn(4, 64)
    x[:, ::5] = 0
    spec = QuantSpec("uint4", PerGroup(32), MappingType.SYMMETRIC, domain)
    real = AffineQuantizedTensor.from_float(x, spec).dequantize()
    assert bool((real[:, ::5] == 0).all())
    signed = QuantSpec("int4", PerGroup(32), MappingType.SYMMETRIC, domain)
    assert not signed.has_zero_point
    # The largest magnitude of a block is a tie of codes, which an offset breaks otherwise.
    error = compute_error(x, AffineQuantizedTensor.from_float(x, signed).dequantize())
    assert abs(error - compute_error(x, real)) < 0.5


@pytest.mark.parametrize("domain", DOMAINS, ids=str)
def test_error_and_hqq(domain: ZeroPointDomain) -> None:
    x = torch.distributions.StudentT(3.0).sample((32, 128))
    plain = compute_error(x, AffineQuantizedTensor.from_float(x, spec_of(domain)).dequantize())
    searched = AffineQuantizedTensor.from_float(x, spec_of(domain, scale_rule=HQQRule()))
    assert 14 < plain < 28
    assert plain + 0.3 < compute_error(x, searched.dequantize()) < plain + 4


@pytest.mark.parametrize("domain", DOMAINS, ids=str)
def test_recipe_json_and_file(domain: ZeroPointDomain, tmp_path) -> None:
    spec = spec_of(domain)
    assert from_json(to_json(spec)) == spec
    recipe = qtorch.int4_weight_only(group_size=32, zero_point_domain=domain)
    model = nn.Sequential(nn.Linear(64, 48))
    x = torch.randn(3, 64)
    float_output = model(x)
    qtorch.quantize_(model, recipe)
    with record_kernels() as ran:
        wanted = model(x)
    assert ran[0] in ("linear:cpu_weight_only_mm", "linear:packed_weight_mm")
    assert 15 < compute_error(float_output, wanted) < 40
    qtorch.save_quantized(model, tmp_path / "model.safetensors")
    other = nn.Sequential(nn.Linear(64, 48))
    qtorch.load_quantized(other, tmp_path / "model.safetensors")
    assert torch.equal(other(x), wanted)
    assert other[0].weight.scheme.weight.zero_point_domain is domain


def test_domains_are_refused_where_they_have_no_meaning() -> None:
    with pytest.raises(ValueError, match="preserve_zero=False needs the FLOAT or OFFSET domain, got FRACTIONAL"):
        spec_of(FRACTIONAL, preserve_zero=False)
    for domain in DOMAINS:
        with pytest.raises(ValueError, match="takes zero points of the FLOAT domain"):
            AffineQuantizedTensor.from_float(
                torch.randn(32, 64), LinearSpec(spec_of(domain), layout=qtorch.TensorCoreTiledLayout())
            )
        codes, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1)
        with pytest.raises(ValueError, match="zero_point"):
            AffineQuantizedTensor.from_plain(codes, scale, scale.int(), spec_of(domain), torch.float32)
