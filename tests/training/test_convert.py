"""What you train is what you serve: the converted model computes what the model in training computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from qtorch import AffineQuantizedTensor, PackedLayout, PerRow, QuantSpec, compute_error, quantize_
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.primitives import PerGroup
from qtorch.recipes.base import Recipe
from qtorch.training import (
    GemmSpec,
    Int8MixedPrecisionTrainingConfig,
    TrainingSpec,
    TrainingWeight,
    bitnet_training,
    convert,
    float8_training,
    fully_quantized,
    int4_weight_only_quantized_training,
    int8_mixed_precision_training,
    int8_tilewise_training,
    int8_weight_only_quantized_training,
    mixed_precision_training,
    mxfp8_training,
    switchback_training,
)
from qtorch.training.engine.numerics import int8

W4A8 = TrainingSpec(GemmSpec(int8(), QuantSpec("int4", PerGroup(32), quant_min=-7)))

# recipe: (kernel that serves, dtype of the weight's codes, bits of a code)
SERVED = {
    int8_mixed_precision_training(): ("int8_scaled_mm", "int8", 8),
    switchback_training(): ("int8_scaled_mm", "int8", 8),
    mixed_precision_training(W4A8): ("packed_int8_scaled_mm", "int4", 4),
    bitnet_training(): ("packed_int8_scaled_mm", "int2", 2),
    int8_tilewise_training(): ("int8_block_mm", "int8", 8),
    mixed_precision_training(fully_quantized(granularity=PerGroup(16))): ("int8_block_mm", "int8", 8),
    float8_training(): ("emulated_scaled_mm", "float8_e4m3fn", 8),
    float8_training("tensorwise"): ("emulated_scaled_mm", "float8_e4m3fn", 8),
    mxfp8_training(): ("emulated_scaled_mm", "float8_e4m3fn", 8),
    int8_weight_only_quantized_training(): ("weight_only_mm", "int8", 8),
    int4_weight_only_quantized_training(): ("packed_weight_mm", "int4", 4),
}
every_recipe = pytest.mark.parametrize("recipe", SERVED, ids=[f"{i} {r.name}" for i, r in enumerate(SERVED)])


def trained(recipe: Recipe, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model after a few steps."""
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False)).to(dtype)
    quantize_(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(256, 64, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """With the compiled CPU kernels, where there are any, and without."""
    with compiled_library.use(None) if request.param == "torch" else nullcontext():
        yield request.param


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_bit_for_bit(recipe: Recipe, dtype: torch.dtype, kernels: str) -> None:
    model = trained(recipe, dtype)
    inputs = [torch.randn(*shape, 64).to(dtype) for shape in ((1,), (5, 7), (64,), (100,))]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
    before = model[0].weight.dequantize()
    quantize_(model, convert())
    weight = model[0].weight
    kernel, codes, bits = SERVED[recipe]
    assert weight.scheme.weight.dtype.name == codes
    assert not isinstance(weight, TrainingWeight)
    assert weight.nbytes == weight.numel() * bits // 8 + weight.scales()[0].nbytes
    for x, y in zip(inputs, wanted):
        with record_kernels() as ran:
            got = model(x)
        if dtype is torch.float32 and kernels == "torch":
            assert ran[0] == f"linear:{kernel}"
        assert torch.equal(got, y)
    if recipe.name.endswith("quantized_training"):
        assert torch.equal(weight.dequantize(), before)
    else:
        assert (4 if codes == "int2" else 15) < compute_error(before, weight.dequantize()) < 55


@every_recipe
def test_equal_under_autocast(recipe: Recipe) -> None:
    model, x = trained(recipe), torch.randn(40, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        quantize_(model, convert())
        assert torch.equal(model(x), wanted)


def test_the_weight_is_that_of_the_inference_recipe() -> None:
    from qtorch import int8_dynamic_activation_int8_weight, int8_weight_only

    for trains, serves in (
        (int8_mixed_precision_training(), int8_dynamic_activation_int8_weight()),
        (int8_weight_only_quantized_training(), int8_weight_only()),
    ):
        layer = nn.Sequential(nn.Linear(64, 32))
        wanted = serves.apply(layer[0].weight.detach())
        quantize_(layer, trains)
        quantize_(layer, convert())
        weight = layer[0].weight
        assert torch.equal(weight.dequantize(), wanted.dequantize())
        assert weight.scheme.weight == wanted.scheme.weight
        assert str(weight.scheme.activation).replace("PerToken", "PerRow") == str(wanted.scheme.activation).replace(
            "PerToken", "PerRow"
        )


def test_bitnet_weights_are_ternary_and_packed() -> None:
    model = trained(bitnet_training())
    master = model[0].weight.floats().clone()
    quantize_(model, convert())
    weight = model[0].weight
    codes, scale, _ = weight.plain()
    assert isinstance(weight, AffineQuantizedTensor)
    assert weight.scheme.layout == PackedLayout()
    assert weight.qdata.nbytes * 4 == weight.numel()
    mean = master.abs().mean()
    assert set(codes.unique().tolist()) == {-1, 0, 1}
    torch.testing.assert_close(scale, mean.expand(96, 1))
    assert torch.equal(codes.float(), (master / mean).round().clamp(-1, 1))


def test_a_forward_in_full_precision_converts_to_a_float_weight() -> None:
    recipe = int8_mixed_precision_training(Int8MixedPrecisionTrainingConfig(output=False))
    model, x = trained(recipe), torch.randn(8, 64)
    wanted = model(x)
    quantize_(model, convert())
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model(x), wanted)


def test_stochastic_weights_serve_rounded_to_nearest() -> None:
    from qtorch.primitives import Rounding

    spec = TrainingSpec(GemmSpec(int8(), int8(rounding=Rounding.STOCHASTIC)))
    model = nn.Sequential(nn.Linear(64, 32))
    values = model[0].weight.detach().clone()
    quantize_(model, mixed_precision_training(spec))
    quantize_(model, convert())
    wanted = int8().quantize(values, *int8().choose_qparams(values))
    assert torch.equal(model[0].weight.plain()[0], wanted)
    assert model[0].weight.scheme.weight.granularity == PerRow()
