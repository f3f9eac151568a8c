"""The factories under torchao's names give what QuantSpec gives, and `*_static` takes scales from outside."""

import inspect

import pytest
import torch

import qtorch
from qtorch import AffineQuantizedTensor, MappingType, PerBlock, PerTensor, QuantSpec, ZeroPointDomain, compute_error
from qtorch.dtypes import to_affine_quantized_floatx, to_affine_quantized_fpx, to_affine_quantized_intx
from qtorch.dtypes.factories import (
    to_affine_quantized_floatx_static,
    to_affine_quantized_intx_static,
    to_linear_activation_quantized,
)
from tests.dtypes.specs import ASYMMETRIC, DTYPES, TOKEN, quantized

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

SYMMETRIC = MappingType.SYMMETRIC


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mapping", "block", "target", "domain"), [
    (SYMMETRIC, (1, 64), torch.int8, ZeroPointDomain.INT),
    (SYMMETRIC, (1, 64), torch.int8, ZeroPointDomain.NONE),
    (ASYMMETRIC, (1, 32), torch.uint4, ZeroPointDomain.INT),
    (ASYMMETRIC, (1, 32), torch.uint4, ZeroPointDomain.FLOAT),
    (SYMMETRIC, (32, 64), torch.uint8, ZeroPointDomain.INT),
    (MappingType.SYMMETRIC_NO_CLIPPING_ERR, (8, 16), torch.int4, ZeroPointDomain.INT),
])  # fmt: skip
def test_intx(mapping: MappingType, block: tuple, target: torch.dtype, domain: ZeroPointDomain, dtype) -> None:
    x = torch.randn(32, 64, dtype=dtype)
    preserve_zero = domain is not ZeroPointDomain.FLOAT
    w = to_affine_quantized_intx(x, mapping, block, target, preserve_zero=preserve_zero, zero_point_domain=domain)
    spec = QuantSpec(target, PerBlock(block), mapping, domain, preserve_zero=preserve_zero)
    assert w.scheme == AffineQuantizedTensor.from_float(x, spec).scheme
    assert torch.equal(w.dequantize(), spec.fake_quantize(x))


def test_options_arguments_and_activations() -> None:
    x = torch.randn(4, 64)
    w = to_affine_quantized_intx(x, SYMMETRIC, (1, 64), torch.int8, -127, 127, 0.5, torch.bfloat16)
    assert w.scale.dtype == torch.bfloat16
    assert w.qdata.min() >= -127
    assert bool((w.scale >= 0.5).all())
    orders = {
        to_affine_quantized_intx: "input_float mapping_type block_size target_dtype quant_min quant_max eps "
        "scale_dtype zero_point_dtype preserve_zero zero_point_domain _layout",
        to_affine_quantized_intx_static: "input_float scale zero_point block_size target_dtype quant_min quant_max "
        "zero_point_domain _layout",
        to_affine_quantized_floatx: "input_float block_size target_dtype _layout scale_dtype",
        to_affine_quantized_floatx_static: "input_float scale block_size target_dtype _layout",
    }
    for function, order in orders.items():
        assert " ".join(inspect.signature(function).parameters) == order
    weight, x = quantized("int8 row"), torch.randn(3, 64)
    dynamic = to_linear_activation_quantized(weight, TOKEN)
    static = to_linear_activation_quantized(weight, QuantSpec("int8", PerTensor()), x.abs().max().reshape(1, 1) / 127)
    assert type(dynamic) is type(static) is AffineQuantizedTensor
    wanted = torch.nn.functional.linear(x, weight)
    for w in [dynamic, static]:
        with qtorch.kernels.record_kernels() as ran:
            y = torch.nn.functional.linear(x, w)
        assert ran[0] == "linear:int8_scaled_mm"
        assert 35 < compute_error(wanted, y) < 50
    weight = quantized("int8 row")
    with pytest.raises(TypeError, match="takes a QuantSpec, got function"):
        to_linear_activation_quantized(weight, lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a quantized weight, got Tensor"):
        to_linear_activation_quantized(torch.randn(4, 4), TOKEN)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_static_reproduces_the_dynamic_one_from_its_scales(dtype: torch.dtype) -> None:
    x = torch.randn(32, 64, dtype=dtype)
    for domain in [ZeroPointDomain.INT, ZeroPointDomain.FLOAT]:
        preserve_zero = domain is ZeroPointDomain.INT
        w = to_affine_quantized_intx(
            x, ASYMMETRIC, (1, 32), torch.uint4, preserve_zero=preserve_zero, zero_point_domain=domain
        )
        again = to_affine_quantized_intx_static(
            x, w.scale.flatten(), w.zero_point.flatten(), (1, 32), torch.uint4, zero_point_domain=domain
        )
        assert torch.equal(again, w)


@pytest.mark.parametrize("target", [torch.int8, torch.uint8])
def test_static_without_a_zero_point_has_none(target: torch.dtype) -> None:
    x = torch.rand(32, 64)
    w = to_affine_quantized_intx_static(x, torch.full((32,), 1 / 127), None, (1, 64), target)
    assert w.zero_point is None
    assert 40 < compute_error(x, w.dequantize()) < 60
    # Neither does what is copied into it later get one.
    other = torch.rand(32, 64)
    assert 35 < compute_error(other, w.copy_(other).dequantize()) < 60


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floatx(target: torch.dtype) -> None:
    x = torch.randn(32, 64)
    w = to_affine_quantized_floatx(x, (1, 64), target, scale_dtype=torch.bfloat16)
    assert (w.qdata.dtype, w.scale.dtype, w.zero_point) == (target, torch.bfloat16, None)
    low, high = {torch.float8_e4m3fn: (29, 35), torch.float8_e5m2: (23, 29)}[target]
    assert low < compute_error(x, w.dequantize()) < high


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("block", [(1, 64), (32, 64), (1, 16)])
def test_floatx_static_reproduces_the_dynamic_one_from_its_scales(target: torch.dtype, block: tuple) -> None:
    x = torch.randn(32, 64)
    w = to_affine_quantized_floatx(x, block, target)
    again = to_affine_quantized_floatx_static(x, w.scale.flatten(), block, target)
    assert torch.equal(again, w)
    assert again.scheme == w.scheme
    larger = to_affine_quantized_floatx_static(100 * x, w.scale, block, target)
    assert bool((larger.dequantize().abs() <= w.scale.max() * torch.finfo(target).max).all()), "it clips"


@pytest.mark.parametrize(("ebits", "mbits"), [(3, 2), (2, 3), (2, 2), (3, 1), (2, 1), (2, 0)])
def test_fpx_is_what_the_recipe_makes(ebits: int, mbits: int) -> None:
    x = torch.randn(32, 64)
    w = to_affine_quantized_fpx(x, ebits, mbits)
    wanted = qtorch.fpx_weight_only(ebits, mbits).apply(x)
    assert w.scheme == wanted.scheme
    assert torch.equal(w, wanted)
    assert w.qdata.nbytes * 8 == (1 + ebits + mbits) * x.numel()
    with pytest.raises(ValueError, match="float7_e3m3 is not a quantized type"):
        to_affine_quantized_fpx(x, 3, 3)
