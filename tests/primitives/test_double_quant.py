"""Scales that are quantized themselves, and zero points that are real numbers."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import LinearSpec, MappingType, PerGroup, PerRow, PerTensor, QuantSpec, ZeroPointDomain, compute_error
from qtorch.dtypes import AffineQuantizedTensor, PackedLayout, PlainLayout
from qtorch.primitives import HQQRule, choose_qparams_affine, from_json, to_json
from qtorch.primitives.double_quant import dequantize_scale, dequantize_zero_point, quantize_scale, scale_tensor_shapes

NONE = ZeroPointDomain.NONE
INT8 = QuantSpec("int8", PerGroup(256), quant_min=-127)
FLOAT8 = QuantSpec("float8_e4m3fn", PerTensor(), zero_point_domain=NONE)
FLOAT8_GROUPS = replace(FLOAT8, granularity=PerGroup(32))
NVFP4 = QuantSpec("float4_e2m1", PerGroup(16), zero_point_domain=NONE, scale_spec=FLOAT8)

SPECS = {"int8": (INT8, 58, 66), "float8": (FLOAT8, 30, 34), "float8 groups": (FLOAT8_GROUPS, 30, 40)}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "shape", [(64, 16), (7, 100), (1, 1), (3, 1), (5,), (2, 3, 40), (), (0,), (0, 3), (3, 0)], ids=str
)
def test_there_and_back(name: str, shape: tuple[int, ...]) -> None:
    spec, low, high = SPECS[name]
    scale = torch.rand(shape) + 1
    tensors = quantize_scale(scale, spec)
    assert {key: tuple(value.shape) for key, value in tensors.items()} == scale_tensor_shapes(shape, spec)
    assert (tensors["scale"].dtype, tensors["scale_scale"].dtype) == (spec.dtype.storage, torch.float32)
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


def test_nvfp4_multiples_and_domains() -> None:
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
    # Integers of the NONE domain have no mean and no least value: as they are in GGUF.
    spec = QuantSpec("int6", PerGroup(4), zero_point_domain=NONE)
    codes, scale = torch.tensor([[-32, 0, 1, 31, 5, 6, 7, 0]], dtype=torch.int8), torch.tensor([-0.5, 2.0])
    wanted = codes.float() * scale.repeat_interleave(4)
    assert scale_tensor_shapes((1, 8), spec).keys() == {"scale", "scale_scale"}
    assert torch.equal(dequantize_scale({"scale": codes, "scale_scale": scale}, spec), wanted)
    rows = dequantize_scale({"scale": codes, "scale_scale": scale}, spec, torch.tensor([0, 0]))
    assert torch.equal(rows, wanted.expand(2, 8))
    # Scales that codes are chosen with are not zero.
    assert bool((quantize_scale(torch.tensor([[1e-30, 1.0, 0.5, 0.2]]), spec)["scale"] > 0).all())
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


def test_text_small_blocks_and_what_is_refused() -> None:
    assert from_json(to_json(NVFP4)) == NVFP4
    assert str(NVFP4).endswith("zero point none scale float8_e4m3fn PerTensor()")
    # Written before specs had the field.
    old = {key: value for key, value in to_json(QuantSpec("int8")).items() if key != "scale_spec"}
    assert from_json(old) == QuantSpec("int8")
    x = torch.cat([torch.full((1, 16), 1e6), torch.full((1, 16), 1e-6), torch.zeros(1, 16)])
    y = NVFP4.fake_quantize(x)
    torch.testing.assert_close(y[0], x[0], rtol=0.07, atol=0)
    assert bool((y[1].abs() <= 1e-6).all())
    assert not y[2].any()
    scale = torch.rand(4, 3)
    assert dequantize_scale(quantize_scale(scale, None), None) is scale
    assert torch.equal(dequantize_scale({"scale": scale}, None, torch.tensor([2, 0])), scale[[2, 0]])
    for scale_spec in (QuantSpec("int8", PerRow()), QuantSpec("uint8", PerGroup(256)), NVFP4):
        with pytest.raises(ValueError, match="scales are quantized in groups or as a whole, symmetric, and only once"):
            QuantSpec("int4", PerGroup(32), scale_spec=scale_spec)
    with pytest.raises(ValueError, match=r"quantized scales need zero points that are codes, or .* got uint4"):
        QuantSpec("uint4", PerGroup(32), MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT, scale_spec=INT8)


MULTIPLES = QuantSpec("uint6", PerGroup(8), zero_point_domain=NONE)
OFFSETS = QuantSpec("uint4", PerGroup(32), MappingType.ASYMMETRIC, ZeroPointDomain.OFFSET, scale_spec=MULTIPLES)


@pytest.mark.parametrize("shape", [(64, 16), (7, 100), (3, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("sign", [-1, 1])
def test_zero_points_there_and_back(sign: int, shape: tuple[int, ...]) -> None:
    zero_point = sign * torch.rand(shape)
    tensors = qtorch.primitives.double_quant.quantize_zero_point(zero_point, MULTIPLES)
    y = dequantize_zero_point(tensors, MULTIPLES)
    assert y.shape == zero_point.shape
    # Half a step of 63.
    assert bool(((y - zero_point).abs() <= 0.5001 / 63).all())
    rows = torch.randint(shape[0], (5,)) if shape[0] else torch.arange(0)
    assert torch.equal(dequantize_zero_point(tensors, MULTIPLES, rows), y[rows])


def test_a_tensor_with_quantized_zero_points(tmp_path: Path) -> None:
    x = torch.randn(64, 512)
    for layout in (qtorch.PlainLayout(), qtorch.PackedLayout()):
        weight = qtorch.AffineQuantizedTensor.from_float(x, qtorch.LinearSpec(OFFSETS, layout=layout))
        dense = qtorch.AffineQuantizedTensor.from_float(x, replace(OFFSETS, scale_spec=None))
        real = weight.dequantize()
        assert compute_error(x, dense.dequantize()) - 1.5 < compute_error(x, real) < 30
        assert weight.zero_point.dtype == torch.uint8
        codes, scale, zero_point = weight.plain()
        assert torch.equal(real, codes * scale.repeat_interleave(32, 1) + zero_point.repeat_interleave(32, 1))
        assert torch.equal(OFFSETS.fake_quantize(x), real)
        rows = torch.tensor([5, 63, 5])
        for view, wanted in ((weight[3:9], real[3:9]), (weight.t(), real.t()), (weight[:, 32:96], real[:, 32:96])):
            assert torch.equal(view.dequantize(), wanted)
        assert torch.equal(torch.nn.functional.embedding(rows, weight), real[rows])
        y = torch.randn(3, 512)
        with qtorch.kernels.record_kernels() as ran:
            product = torch.nn.functional.linear(y, weight)
        assert ran[0] in ("linear:cpu_weight_only_mm", f"linear:{'packed_' * (layout.name == 'packed')}weight_only_mm")
        assert compute_error(y @ real.T, product) > 100
        model = torch.nn.Linear(512, 64, bias=False)
        model.weight = torch.nn.Parameter(weight, requires_grad=False)
        qtorch.save_quantized(model, tmp_path / "x.safetensors")
        other = qtorch.load_quantized(torch.nn.Linear(512, 64, bias=False), tmp_path / "x.safetensors")
        assert torch.equal(other.weight.dequantize(), real)
        assert torch.equal(copy.deepcopy(weight).dequantize(), real)


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
    assert from_json(to_json(spec)) == spec
    low, high = map(int, spec.code_range)
    codes = torch.randint(low, high + 1, (24, 96)).to(spec.dtype.storage)
    scale, zero = torch.randn(24, 3), torch.randn(24, 3) * 5
    wanted = by_equation(domain, codes, scale, zero)
    for layout in (PlainLayout(), PackedLayout())[: 1 if spec.dtype.bits == 8 else 2]:
        weight = AffineQuantizedTensor.from_plain(codes, scale, zero, LinearSpec(spec, layout=layout), torch.float32)
        assert torch.equal(weight.dequantize(), wanted)
        ids = torch.tensor([5, 0, 23, 5])
        with qtorch.kernels.record_kernels() as ran:
            assert torch.equal(nn.functional.embedding(ids, weight), wanted[ids])
        assert ran[0] in ("embedding:cpu_embedding", "embedding:gather_rows", "embedding:gather_packed_rows")
        assert compute_error(torch.ones(2, 96) @ wanted.T, nn.functional.linear(torch.ones(2, 96), weight)) > 100


def test_offset_and_fraction() -> None:
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
def test_zeros_and_errors_of_domains(domain: ZeroPointDomain) -> None:
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
    x = torch.distributions.StudentT(3.0).sample((32, 128))
    plain = compute_error(x, AffineQuantizedTensor.from_float(x, spec_of(domain)).dequantize())
    searched = AffineQuantizedTensor.from_float(x, spec_of(domain, scale_rule=HQQRule()))
    assert 14 < plain < 28
    assert plain + 0.3 < compute_error(x, searched.dequantize()) < plain + 4
