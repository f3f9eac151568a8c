"""RotatedSpec: blocks rotated by Hadamard matrices, from the numbers to layers, files and calibration."""

import copy
from pathlib import Path

import pytest
import torch

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, PerGroup, QuantSpec, explain, quantize_
from qtorch.calibration import Gptq, Nearest, calibrated
from qtorch.primitives import PerBlock, PerRow, RotatedSpec, from_json, rotated_spec, to_json
from qtorch.training import qat
from tests.refusals import refuses

ROTATED = qtorch.mxfp4_dynamic_activation_mxfp4_weight(rotated=True)
PLAIN = qtorch.mxfp4_dynamic_activation_mxfp4_weight()
INT4 = RotatedSpec(torch.int4, PerGroup(32))


def outliers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x[:, ::32] *= 20
    return x


@pytest.mark.parametrize("size", [2, 8, 32, 128])
def test_the_matrix(size: int) -> None:
    h = rotated_spec.sylvester(size, torch.device("cpu"), torch.float64)
    assert torch.equal(h, h.t())
    torch.testing.assert_close(h @ h, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(h.abs(), torch.full_like(h, size**-0.5))


@pytest.mark.parametrize("spec", [INT4, ROTATED.linear_spec().weight], ids=str)
def test_codes_are_those_of_the_rotated_values(spec: RotatedSpec) -> None:
    x = outliers(6, 96)
    by_hand = (x.unflatten(1, (3, 32)) @ rotated_spec.sylvester(32, x.device, x.dtype)).flatten(1)
    torch.testing.assert_close(spec.rotated(x), by_hand)
    torch.testing.assert_close(spec.rotated(spec.rotated(x)), x)
    scale, zero_point = spec.choose_qparams(x)
    plain_scale, _ = spec.unrotated.choose_qparams(spec.rotated(x))
    assert torch.equal(scale, plain_scale)
    codes = spec.quantize(x, scale, zero_point)
    assert torch.equal(codes, spec.unrotated.quantize(spec.rotated(x), scale, zero_point))
    values = spec.dequantize(codes, scale, zero_point)
    torch.testing.assert_close(spec.rotated(values), spec.unrotated.dequantize(codes, scale, zero_point))
    torch.testing.assert_close(spec.fake_quantize(x), values)
    assert spec.with_granularity(PerBlock((32, 1))).rotation == 32
    torch.testing.assert_close(spec.with_granularity(PerBlock((32, 1))).rotated(x.t()), spec.rotated(x).t())


def test_forms_outliers_and_gptq() -> None:
    assert from_json(to_json(INT4)) == INT4
    assert INT4.unrotated != INT4
    assert type(INT4.unrotated) is QuantSpec
    assert str(INT4).endswith("rotated")
    for granularity in (PerGroup(48), PerRow(), PerBlock((2, 32))):
        refuses("a power of two", lambda granularity=granularity: RotatedSpec(torch.int4, granularity))
    refuses("rotated as the weight is", lambda: LinearSpec(INT4, INT4.unrotated))
    refuses("rotated as the weight is", lambda: LinearSpec(INT4.unrotated, RotatedSpec(torch.int4, PerGroup(16))))
    x, errors = outliers(50, 64), []
    layer = torch.nn.Linear(64, 16)
    wanted = layer(x).detach()
    for recipe in (PLAIN, ROTATED):
        quantized = copy.deepcopy(layer)
        quantize_(quantized, recipe)
        errors.append(float((quantized(x) - wanted).detach().norm() / wanted.norm()))
    assert 0 < errors[1] < errors[0]
    layer, x = torch.nn.Linear(64, 32), outliers(400, 64) @ torch.randn(64, 64)
    errors = []
    for rounding in (Nearest(), Gptq()):
        quantized = copy.deepcopy(layer)
        report = quantize_(quantized, calibrated(ROTATED, [x], None, rounding))
        (row,) = report.layers
        assert row.calibration is not None
        values = quantized.weight.dequantize()
        weight = layer.weight.detach()
        error = float((x @ (values - weight).t()).square().sum() / (x @ weight.t()).square().sum())
        assert row.calibration.error == pytest.approx(error, rel=1e-3)
        errors.append(error)
    assert 0 < errors[1] < 0.7 * errors[0]


def test_a_layer_computes_with_rotated_codes(tmp_path: Path) -> None:
    layer, x = torch.nn.Linear(64, 16), outliers(9, 64)
    layer.weight.data[:, 3] *= 10
    before = copy.deepcopy(layer)
    quantize_(layer, ROTATED)
    h = rotated_spec.sylvester(32, x.device, torch.float64)
    spec = PLAIN.linear_spec().weight

    def rounded(values: torch.Tensor) -> torch.Tensor:
        turned = (values.double().unflatten(1, (2, 32)) @ h).flatten(1).float()
        return spec.dequantize(spec.quantize(turned, *(q := spec.choose_qparams(turned))), *q).double()

    wanted = rounded(x) @ rounded(before.weight.detach()).t() + before.bias.double()
    torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-5, atol=1e-4)
    assert "emulated_scaled_mm" in str(explain(layer.weight))
    weight = layer.weight
    assert isinstance(weight, AffineQuantizedTensor)
    assert 12 < qtorch.compute_error(before.weight, weight.dequantize()) < 25
    torch.testing.assert_close(weight.t().dequantize(), weight.dequantize().t())
    x.requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand_as(x), rtol=1e-4, atol=1e-4)
    qtorch.save_quantized(layer, tmp_path / "layer.safetensors")
    other = torch.nn.Linear(64, 16)
    qtorch.load_quantized(other, tmp_path / "layer.safetensors")
    assert torch.equal(other(x), layer(x))
    assert quantize_(copy.deepcopy(before), ROTATED).layers[0].kernel == "emulated_scaled_mm"


def test_embeddings_experts_and_what_refuses() -> None:
    """What has no kernel of its own for rotated codes runs the reference, in the same numbers."""
    weight = outliers(12, 64)
    tensor = AffineQuantizedTensor.from_float(weight, LinearSpec(INT4))
    torch.testing.assert_close(torch.nn.functional.linear(weight, tensor), weight @ tensor.dequantize().t())
    assert torch.equal(torch.nn.functional.embedding(torch.tensor([3, 7]), tensor), tensor.dequantize()[[3, 7]])
    spec = ROTATED.linear_spec()
    experts, x = outliers(24, 64).reshape(2, 12, 64), outliers(10, 64, 1).reshape(2, 5, 64)
    fused = AffineQuantizedTensor.from_float(experts, spec)
    for index, y in enumerate(torch.bmm(x, fused.transpose(-1, -2))):
        single = AffineQuantizedTensor.from_float(experts[index], spec)
        torch.testing.assert_close(y, torch.nn.functional.linear(x[index], single), rtol=1e-5, atol=1e-4)
    layer = torch.nn.Linear(64, 16)
    refuses("leave rotated=True out", lambda: quantize_(layer, qat(ROTATED)))
    quantize_(layer, ROTATED)
    from qtorch.checkpoint.formats.compressed_tensors.scheme import args_of

    refuses("has rotated blocks", lambda: args_of(layer.weight))
