"""The primitives under torch.compile(fullgraph=True) give the numbers of eager mode."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qtorch import PerBlock, PerGroup, PerRow, PerTensor, QuantSpec, ZeroPointDomain, compute_error
from qtorch.dtypes.serialize import pack_to_int32, unpack_from_int32
from qtorch.primitives import CodebookSpec, HQQRule, MappingType, MSERule, PerAxis, learned_step_fake_quantize, qdtype
from tests.fast_part import matrix_but

SPECS = [
    QuantSpec("int8", PerTensor()),
    QuantSpec("uint8", PerRow(), MappingType.ASYMMETRIC),
    QuantSpec("uint4", PerGroup(16), MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT),
    QuantSpec("int4", PerBlock((4, 16)), MappingType.SYMMETRIC_NO_CLIPPING_ERR),
    QuantSpec("int8", PerAxis(-1), MappingType.SYMMETRIC, ZeroPointDomain.NONE),
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
