"""converted_linear: bit for bit what the converted layer gives, with the gradient of explicit fake quantization."""

import pytest
import torch
from torch import Tensor, nn

from qtorch import AffineQuantizedTensor, PackedLayout, PerGroup, PerRow, PerTensor, QuantSpec, compute_error
from qtorch.kernels.registry import to_rows
from qtorch.primitives import LinearSpec, MappingType, ZeroPointDomain
from qtorch.training.engine.operand import Operand, quantize_operand
from qtorch.training.quantization_aware.converted import converted_linear, sums_integers

ASYMMETRIC = MappingType.ASYMMETRIC
INT8 = QuantSpec("int8", PerRow(), quant_min=-127)
INT8_ASYMMETRIC = QuantSpec("int8", PerRow(), ASYMMETRIC)
STATIC = QuantSpec("int8", PerTensor(), quant_min=-127)
PACKED = PackedLayout()

DYNAMIC = {
    "int8 rows": LinearSpec(INT8, INT8),
    "int8 rows, asymmetric activation": LinearSpec(INT8, INT8_ASYMMETRIC),
    "int4 groups": LinearSpec(QuantSpec("int4", PerGroup(32)), INT8_ASYMMETRIC, layout=PACKED),
    "uint4 groups, asymmetric": LinearSpec(QuantSpec("uint4", PerGroup(16), ASYMMETRIC), INT8_ASYMMETRIC),
    "int3 groups": LinearSpec(QuantSpec("int3", PerGroup(32), ASYMMETRIC), INT8, layout=PACKED),
    "int2 rows": LinearSpec(QuantSpec("int2", PerRow()), INT8, layout=PACKED),
    "int8 weight per tensor": LinearSpec(QuantSpec("int8", PerTensor()), INT8),
    "int8 blocks": LinearSpec(QuantSpec("int8", PerGroup(16), quant_min=-127), INT8.with_granularity(PerGroup(32))),
    "int4 activation": LinearSpec(QuantSpec("int4", PerRow()), QuantSpec("int4", PerRow())),
    "uint8 activation": LinearSpec(QuantSpec("int4", PerGroup(32)), QuantSpec("uint8", PerRow(), ASYMMETRIC)),
}
STATICS = {
    "int8": LinearSpec(INT8, STATIC, static=True),
    "int4 groups": LinearSpec(QuantSpec("int4", PerGroup(32)), STATIC, static=True, layout=PACKED),
    "asymmetric": LinearSpec(INT8, QuantSpec("int8", PerTensor(), ASYMMETRIC), static=True),
    "uint4": LinearSpec(INT8, QuantSpec("uint4", PerTensor(), ASYMMETRIC), static=True),
}
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def weight_operand(weight: Tensor, spec: QuantSpec) -> Operand:
    scale, zero_point = spec.choose_qparams(weight)
    return Operand(spec.quantize(weight, scale, zero_point), weight.shape[0], scale, zero_point, spec)


def served(x: Tensor, layer: nn.Linear, spec: LinearSpec) -> Tensor:
    w = weight_operand(layer.weight.detach(), spec.weight)
    of_x = quantize_operand(to_rows(x.detach()), spec.activation)
    return converted_linear(
        spec.activation.fake_quantize(x), spec.weight.fake_quantize(layer.weight), layer.bias, of_x, w
    )


@pytest.mark.usefixtures("each_library")
@every_dtype
@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 32, 64)], ids=str)
@pytest.mark.parametrize("spec", DYNAMIC.values(), ids=list(DYNAMIC))
def test_equal_to_the_converted_layer(spec: LinearSpec, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer, x = nn.Linear(64, 96, dtype=dtype), torch.randn(*shape, dtype=dtype)
    weight = AffineQuantizedTensor.from_float(layer.weight, spec)
    for bias in (layer.bias, None):
        layer.bias = bias
        with torch.no_grad():
            wanted = nn.functional.linear(x, weight, bias)
        assert torch.equal(served(x, layer, spec), wanted)
    least = 5 if spec.weight.dtype.bits < 4 or spec.activation.dtype.bits < 8 else 15
    assert least < compute_error(nn.functional.linear(x, layer.weight), wanted) < 50


@pytest.mark.usefixtures("each_library")
@every_dtype
@pytest.mark.parametrize("spec", STATICS.values(), ids=list(STATICS))
def test_equal_with_a_static_scale(spec: LinearSpec, dtype: torch.dtype) -> None:
    layer, x = nn.Linear(64, 96, dtype=dtype), torch.randn(5, 7, 64, dtype=dtype)
    scale, zero_point = spec.activation.choose_qparams(0.7 * to_rows(x))
    weight = AffineQuantizedTensor.from_float(layer.weight, spec, scale, zero_point)
    of_x = Operand(spec.activation.quantize(to_rows(x), scale, zero_point), 35, scale, zero_point, spec.activation)
    y = converted_linear(x, layer.weight, layer.bias, of_x, weight_operand(layer.weight.detach(), spec.weight))
    with torch.no_grad():
        assert torch.equal(y, nn.functional.linear(x, weight, layer.bias))


@every_dtype
@pytest.mark.parametrize("spec", DYNAMIC.values(), ids=list(DYNAMIC))
def test_gradients_are_those_of_explicit_fake_quantization(spec: LinearSpec, dtype: torch.dtype) -> None:
    layer, x = nn.Linear(64, 96, dtype=dtype), torch.randn(3, 32, 64, dtype=dtype, requires_grad=True)
    y = served(x, layer, spec)
    x_hat, w_hat = spec.activation.fake_quantize(x), spec.weight.fake_quantize(layer.weight)
    wanted = nn.functional.linear(x_hat, w_hat, layer.bias)
    assert compute_error(wanted, y) > (100 if dtype is torch.float32 else 40)
    inputs, g = [x, layer.weight, layer.bias], torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(wanted, inputs, g)):
        assert a.dtype == dtype
        assert compute_error(b, a) > (100 if dtype is torch.float32 else 40)


def test_without_codes_and_narrow_inputs() -> None:
    layer, x = nn.Linear(64, 96), torch.randn(3, 5, 64, requires_grad=True)
    inputs = [x, layer.weight, layer.bias]
    y = converted_linear(*inputs)
    assert torch.equal(y, layer(x))
    g = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(layer(x), inputs, g)):
        assert compute_error(b, a) > 120
    # As under autocast.
    layer, x = nn.Linear(64, 96), torch.randn(5, 64).bfloat16().requires_grad_()
    y = converted_linear(x, layer.weight, layer.bias.bfloat16())
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    floats = QuantSpec("float8_e4m3fn", PerRow(), zero_point_domain=ZeroPointDomain.NONE)
    tinygemm = QuantSpec("uint4", PerGroup(32), ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
    assert all(sums_integers(spec) for spec in (*DYNAMIC.values(), *STATICS.values()))
    for spec in (LinearSpec(INT8), LinearSpec(INT8, floats), LinearSpec(floats, floats), LinearSpec(tinygemm, INT8)):
        assert not sums_integers(spec)
