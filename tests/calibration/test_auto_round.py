"""AutoRound: learning starts from codes that were chosen before, lowers the error of a block, and is what is served."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import quantize_
from qtorch.calibration import auto, calibrated
from qtorch.calibration.rounding import AutoRound, Grid, Learnable
from qtorch.calibration.rounding.auto_round import LearnedGrid
from qtorch.dtypes import AffineQuantizedTensor, QuantizedTensor
from tests.calibration.test_in_order import Model, batches

INT2 = qtorch.uintx_weight_only("uint2", group_size=16)


def grid_of(recipe: qtorch.recipes.base.WeightRecipe, weight: Tensor) -> Grid:
    return Grid.of(weight, recipe.linear_spec().weight, weight.dtype)


@pytest.mark.parametrize(
    "recipe",
    [INT2, qtorch.intx_weight_only("int3", group_size=32), qtorch.int8_weight_only(), qtorch.int4_weight_only(32)],
    ids=["uint2", "int3", "int8", "int4"],
)
def test_learning_starts_at_the_codes(recipe: qtorch.recipes.base.WeightRecipe) -> None:
    weight = torch.randn(24, 64)
    grid = grid_of(recipe, weight)
    # Values of other codes, too: they are moved to the edge of the code that was chosen.
    learned = LearnedGrid(grid, weight + 0.3 * torch.randn(24, 64))
    torch.testing.assert_close(learned.weight(), grid.values(), rtol=1e-6, atol=1e-7)
    assert torch.equal(learned.learned().codes, grid.codes)
    assert torch.equal(learned.learned().scale, grid.scale)


def test_gradients_are_those_of_a_learned_step() -> None:
    weight = torch.randn(3, 16)
    grid = grid_of(INT2, weight)
    learned = LearnedGrid(grid, weight)
    upstream = torch.randn(3, 16)
    of_offset, of_factor = torch.autograd.grad((learned.weight() * upstream).sum(), [learned.offset, learned.factor])
    inside = (learned.base.round() >= 0) & (learned.base.round() <= 3)
    torch.testing.assert_close(of_offset, upstream * grid.scale * inside)
    torch.testing.assert_close(of_factor, (upstream * grid.values()).sum(1, keepdim=True))


def error_of_first_block(model: Model, reference: Model, data: list[Tensor]) -> float:
    """Of its output, on the calibration data; its inputs are those of a layer that is not learned."""

    def output(of: Model, x: Tensor) -> Tensor:
        result: Tensor = of.blocks[0](of.front(x))
        return result

    with torch.no_grad():
        return sum(float((output(model, x) - output(reference, x)).square().mean()) for x in data)


def test_the_error_of_a_block_falls() -> None:
    model, data = Model(2), batches(12)
    without, learned = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(without, auto(INT2, data, learn=None))
    report = quantize_(learned, auto(INT2, data, learn=AutoRound(60)))
    assert 0 < error_of_first_block(learned, model, data) < error_of_first_block(without, model, data)
    methods = {layer.name: layer.calibration.method for layer in report.quantized if layer.calibration is not None}
    assert "autoround" in methods["blocks.0.down.weight"]
    assert "autoround" not in methods["front.weight"]  # stands in no block
    assert all(isinstance(p, QuantizedTensor) for n, p in learned.named_parameters() if n.endswith("weight"))


def test_what_is_learned_is_what_is_served() -> None:
    """The loss that decides is that of the weights that are installed."""
    weight, x = torch.randn(32, 64), torch.randn(100, 64)
    wanted = (x @ weight.t()).relu()
    grid = grid_of(INT2, weight)
    start = Learnable([grid], lambda: [weight], lambda parts: parts[0], lambda grids, seconds: grids)
    key = nn.Parameter(weight)

    def loss(batch: int, weights: Mapping[Tensor, Tensor]) -> Tensor:
        return ((x @ weights[key].t()).relu() - wanted).square().mean()

    before = loss(0, {key: grid.values()})
    (found,) = AutoRound(100, lr=1e-3, scale_lr=2e-3).learn({key: start}, loss, 1)[key]
    served = found.quantized(INT2.linear_spec())
    assert isinstance(served, AffineQuantizedTensor)
    assert torch.equal(served.dequantize(), found.values())
    assert 0 < float(loss(0, {key: served.dequantize()})) < float(before)
    assert not torch.equal(found.scale, grid.scale)


def test_what_does_not_help_is_not_taken() -> None:
    """With steps far too large the error grows, and the codes stay."""
    model, data = Model(2), batches(4)
    without, learned = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(without, auto(INT2, data, learn=None))
    quantize_(learned, auto(INT2, data, learn=AutoRound(1, lr=10.0, scale_lr=10.0)))
    for name, parameter in learned.named_parameters():
        other = without.get_parameter(name)
        if isinstance(parameter, QuantizedTensor) and isinstance(other, QuantizedTensor):
            assert torch.equal(parameter.dequantize(), other.dequantize()), name


def test_formats_without_integers_are_left_to_the_others() -> None:
    model, data = Model(), batches(4)
    report = quantize_(model, calibrated(qtorch.mxfp4_weight_only(), data, learn=AutoRound(5)), lambda m, n: "up" in n)
    assert all("autoround" not in layer.calibration.method for layer in report.quantized if layer.calibration)
