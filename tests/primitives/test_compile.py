"""Primitives traced in one graph, and computed slice by slice."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import PerBlock, PerGroup, PerRow, PerTensor, QuantSpec, ZeroPointDomain, compute_error
from qtorch.dtypes.serialize import pack_to_int32, to_canonical, unpack_from_int32
from qtorch.model.report import quantization_error
from qtorch.primitives import CodebookSpec, HQQRule, MappingType, MSERule, learned_step_fake_quantize, qdtype, slices
from qtorch.recipes.base import WeightRecipe
from tests.fast_part import matrix_but

SPECS = [
    QuantSpec("int8", PerTensor()),
    QuantSpec("uint8", PerRow(), MappingType.ASYMMETRIC),
    QuantSpec("uint4", PerGroup(16), MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT),
    QuantSpec("int4", PerBlock((4, 16)), MappingType.SYMMETRIC_NO_CLIPPING_ERR),
    QuantSpec("int8", qtorch.primitives.granularity.PerAxis(-1), MappingType.SYMMETRIC, ZeroPointDomain.NONE),
    QuantSpec("float8_e4m3fn", PerRow()),
    QuantSpec("int4", PerRow(), scale_rule=MSERule(3)),
    QuantSpec("uint4", PerGroup(16), MappingType.ASYMMETRIC, scale_rule=HQQRule(iterations=2, starts=2)),
]


def compiled(function: Callable, backend: str) -> Callable:
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=False)


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def round_trip(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor]:
    scale, zero_point = spec.choose_qparams(x)
    codes = spec.quantize(x, scale, zero_point)
    return scale, codes.float(), spec.dequantize(codes, scale, zero_point, x.dtype)


@pytest.mark.parametrize("spec", matrix_but(SPECS[:6:5], SPECS), ids=str)
@pytest.mark.parametrize("dtype", matrix_but((torch.float32,), (torch.float32, torch.bfloat16)), ids=str)
def test_traces_without_a_break(dtype: torch.dtype, spec: QuantSpec) -> None:
    x = data(8, 48).to(dtype)
    got, wanted = compiled(round_trip, "aot_eager")(x, spec), round_trip(x, spec)
    assert all(map(torch.equal, got, wanted))
    assert compute_error(x, got[-1]) < 60


TABLE = CodebookSpec("uint3", PerGroup(16), scale_spec=QuantSpec("int8", PerGroup(256), quant_min=-127))
FLOAT8 = QuantSpec("float8_e4m3fn", PerTensor(), zero_point_domain=ZeroPointDomain.NONE)
NVFP4 = QuantSpec("float4_e2m1", PerGroup(16), zero_point_domain=ZeroPointDomain.NONE, scale_spec=FLOAT8)


def table_round_trip(x: Tensor) -> Tensor:
    scale, table = TABLE.choose_qparams(x)
    return TABLE.dequantize(TABLE.quantize(x, scale, table), scale, table)


def learned_steps(x: Tensor) -> Tensor:
    scale, zero_point = x[:, :6].abs() + 0.1, x[:, 6:12] + 1
    return learned_step_fake_quantize(x, (1, 8), scale, zero_point, "int4", grad_scale=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("function", [table_round_trip, NVFP4.fake_quantize, learned_steps])
def test_other_functions_trace_without_a_break(function: Callable[[Tensor], Tensor]) -> None:
    results = []
    for run in (function, compiled(function, "aot_eager")):
        x = data(8, 48).requires_grad_(function is not table_round_trip)
        y = run(x)
        results.append([y.detach(), *(torch.autograd.grad(y.square().sum(), x) if y.requires_grad else ())])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS[:4], ids=str)
def test_inductor_equals_eager(spec: QuantSpec) -> None:
    x = data(8, 48)
    got, wanted = compiled(round_trip, "inductor")(x, spec), round_trip(x, spec)
    assert all(map(torch.equal, got, wanted))
    assert compute_error(x, got[-1]) < 60


@pytest.mark.slow
def test_fake_quantize_and_its_gradient() -> None:
    spec = QuantSpec("int4", PerGroup(16), MappingType.ASYMMETRIC, quant_max=5)

    def run(function: Callable) -> tuple[Tensor, Tensor]:
        x = data(8, 48).requires_grad_()
        y = function(x)
        (gradient,) = torch.autograd.grad((y * y).sum(), x)
        return y.detach(), gradient

    got, wanted = run(compiled(spec.fake_quantize, "inductor")), run(spec.fake_quantize)
    assert all(map(torch.equal, got, wanted))
    assert got[1].any()


@pytest.mark.parametrize("name", ["int4", "uint2"])
def test_packing(name: str) -> None:
    dtype = qdtype(name)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (3, 37), generator=generator).to(dtype.storage)

    def there_and_back(codes: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_to_int32(codes, dtype)
        return packed, unpack_from_int32(packed, dtype, codes.shape[-1])

    packed, back = compiled(there_and_back, "aot_eager")(codes)
    assert torch.equal(packed, pack_to_int32(codes, dtype))
    assert torch.equal(back, codes)


RECIPES = [
    qtorch.int4_weight_only(group_size=32),
    qtorch.int4_weight_only(group_size=32, zero_point_domain=qtorch.ZeroPointDomain.FLOAT),
    qtorch.int8_weight_only(),
    qtorch.int8_dynamic_activation_int4_weight(group_size=64),
    qtorch.float8_weight_only(),
    qtorch.nf4_weight_only(),
    qtorch.lut_weight_only(bits=2),
    qtorch.fpx_weight_only(3, 2),
    qtorch.nvfp4_weight_only(),
    qtorch.int8_dynamic_activation_int8_semi_sparse_weight(),
]


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_ELEMENTS", 1 << 40)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_ELEMENTS", 300)


def stored(recipe: WeightRecipe, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    quantized = recipe.apply(weight)
    return {**to_canonical("weight", quantized)[0], "dequantized": quantized.dequantize()}


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", [(24, 128), (3, 8, 128), (1, 1024)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recipes(
    recipe: WeightRecipe, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recipe.prunes and len(shape) > 2:
        pytest.skip("2:4 pruning takes matrices")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole(monkeypatch)
    wanted = stored(recipe, weight)
    small(monkeypatch)
    found = stored(recipe, weight)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype
        bits = [t.reshape(-1).view(torch.uint8) for t in (tensor, wanted[name])]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_packing_of_slices(bits: int, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 2**bits, (5, 40, 24), dtype=torch.uint8)
    whole(monkeypatch)
    wanted = qtorch.primitives.layouts.packed.pack_bits(codes, bits, axis)
    small(monkeypatch)
    assert torch.equal(qtorch.primitives.layouts.packed.pack_bits(codes, bits, axis), wanted)
    assert torch.equal(qtorch.primitives.layouts.packed.unpack_bits(wanted, bits, codes.shape[axis], axis), codes)
    if bits in (1, 2, 4):
        kind = qdtype(f"uint{bits}")
        assert torch.equal(unpack_from_int32(pack_to_int32(codes, kind), kind, 24), codes)


@pytest.mark.parametrize("granularity", [
    qtorch.PerTensor(), qtorch.PerRow(), qtorch.PerBlock((8, 16)), qtorch.PerGroup(8), qtorch.PerAxis(1)
], ids=str)  # fmt: skip
def test_granularities(granularity: qtorch.primitives.granularity.Granularity, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weight = qtorch.QuantSpec(torch.int4, granularity), torch.randn(32, 64)
    whole(monkeypatch)
    scale, zero_point = spec.choose_qparams(weight)
    codes = spec.quantize(weight, scale, zero_point)
    real = spec.dequantize(codes, scale, zero_point)
    small(monkeypatch)
    assert torch.equal(spec.choose_qparams(weight)[0], scale)
    assert torch.equal(spec.quantize(weight, scale, zero_point), codes)
    assert torch.equal(spec.dequantize(codes, scale, zero_point), real)
    quantized = qtorch.AffineQuantizedTensor.from_float(weight, spec)
    assert quantization_error(weight, quantized) == pytest.approx(float(compute_error(weight, real)), rel=1e-5)


def test_slices_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    seen: list[int] = []

    def double(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        seen.append(x.numel())
        return x * scale

    x, scale = torch.randn(2, 30, 100), torch.randn(2, 1, 1)
    assert torch.equal(slices.in_slices(double, x, scale, axes=2), x * scale)
    assert len(seen) > 5
    assert max(seen) <= slices.slice_elements()


def test_what_is_recorded_is_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    calls: list[int] = []

    def count(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2

    with torch.enable_grad():
        slices.in_slices(count, torch.randn(32, 64, requires_grad=True))
    slices.in_slices(count, torch.randn(64, 32).t())
    slices.in_slices(count, torch.randn(32, 64, device="meta"))
    torch.func.vmap(lambda x: slices.in_slices(count, x))(torch.randn(2, 32, 64))
    assert len(calls) == 4


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_error_of_the_report(recipe: WeightRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    model = nn.Sequential(nn.Linear(128, 24, bias=False))
    weight = model[0].weight.detach().clone()
    report = qtorch.quantize_(model, recipe)
    wanted = float(compute_error(weight, model[0].weight.dequantize()))
    assert 0 < wanted < 60
    assert report.layers[0].sqnr == pytest.approx(wanted, rel=1e-5)
