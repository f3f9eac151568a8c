"""k-means tables weighted by the inputs of a layer: the first recipe that looks at data."""

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import int4_weight_only, lut_weight_only, nf4_weight_only, quantize_
from qtorch.calibration import importance_weighted
from qtorch.dtypes import LUTQuantizedTensor

# Inputs of which a few are far larger than the others: the columns that matter.
SIZES = torch.logspace(-2, 1, 64)


def inputs(seed: int, rows: int = 256) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) * SIZES


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outputs_are_nearer_than_without_data(bits: int) -> None:
    x, floats = inputs(1), model()
    errors = []
    for recipe in (lut_weight_only(bits), importance_weighted(lut_weight_only(bits), [inputs(2)])):
        quantized = model()
        quantize_(quantized[0], recipe)
        with torch.no_grad():
            wanted, got = floats[0](x), quantized[0](x)
        errors.append(float((got - wanted).norm() / wanted.norm()))
    plain, weighted = errors
    assert 0 < weighted < 0.95 * plain


def test_it_is_the_weighted_table_of_the_mean_square() -> None:
    quantized, batches = model(), [inputs(3, 5), inputs(4, 11)]
    weight = quantized[0].weight.detach().clone()
    report = quantize_(quantized, importance_weighted(lut_weight_only(3), batches))
    importance = torch.cat(batches).square().mean(0).expand_as(weight)
    wanted = LUTQuantizedTensor.from_float(weight, lut_weight_only(3).linear_spec(), importance)
    torch.testing.assert_close(quantized[0].weight.dequantize(), wanted.dequantize(), rtol=1e-3, atol=1e-3)
    assert str(report.layers[0].detail) == "importance_weighted(recipe=lut_weight_only(bits=3))"


def test_one_pass_over_data_that_can_be_read_once() -> None:
    reads = []

    def batches():
        for seed in range(3):
            reads.append(seed)
            yield (inputs(seed),)

    quantized = model()
    quantize_(quantized, importance_weighted(lut_weight_only(2), batches()))
    assert reads == [0, 1, 2]
    assert all(isinstance(layer.weight, LUTQuantizedTensor) for layer in (quantized[0], quantized[2]))


def test_a_convolution() -> None:
    quantized = nn.Sequential(nn.Conv2d(4, 8, 3))
    quantize_(quantized, {"0": importance_weighted(lut_weight_only(4), [torch.randn(2, 4, 6, 6)])})
    assert qtorch.explain(quantized[0].weight).kernel


def test_errors_leave_the_model_as_it_was() -> None:
    for recipe in (int4_weight_only(), nf4_weight_only()):
        with pytest.raises(ValueError, match="importance_weighted takes a recipe whose tables are fitted by k-means"):
            importance_weighted(recipe, [])
    floats = model()
    with pytest.raises(ValueError, match="at least one batch"):
        quantize_(floats, importance_weighted(lut_weight_only(3), []))
    with pytest.raises(RuntimeError):
        quantize_(floats, importance_weighted(lut_weight_only(3), [torch.randn(2, 63)]))
    assert type(floats[0].weight) is nn.Parameter
    assert floats.training
