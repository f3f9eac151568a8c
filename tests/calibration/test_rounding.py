"""Algorithms that choose codes: in the order of columns, by clipping, by learning."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import MappingType, PerGroup, PerTensor, QuantSpec, ZeroPointDomain, quantize_
from qtorch.calibration import auto, awq, calibrated, clip, entropy, moving_average, mse, percentile, rotate, smooth
from qtorch.calibration.rounding import AutoRound, Descent, FloatTarget, Gptq, Grid, Learnable, Nearest, ScaleSearch
from qtorch.calibration.rounding.auto_round import LearnedGrid
from qtorch.calibration.rounding.grid import Columns, damped, loss
from qtorch.calibration.rounding.scale_search import ScaleRefit, four_over_six
from qtorch.dtypes import AffineQuantizedTensor, QuantizedTensor
from qtorch.primitives.scale_rules import elements_last
from tests.calibration.test_in_order import Model, batches

ROWS, COUNT = 24, 64

SPECS = {
    "int4": qtorch.int4_weight_only(group_size=32).linear_spec().weight,
    "int2": qtorch.intx_weight_only("int2", group_size=16).linear_spec().weight,
    "int3 asymmetric": QuantSpec(torch.uint3, PerGroup(16), MappingType.ASYMMETRIC),
    "uint4 float zero point": QuantSpec(
        torch.uint4, PerGroup(16), MappingType.ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False
    ),
    "int8 rows": qtorch.int8_weight_only().linear_spec().weight,
    "int8 tensor": replace(qtorch.int8_weight_only().linear_spec().weight, granularity=PerTensor()),
    "nf4": qtorch.nf4_weight_only().linear_spec().weight,
    "k-means": qtorch.lut_weight_only(bits=3).linear_spec().weight,
    "fp6": qtorch.fpx_weight_only(3, 2).linear_spec().weight,
    "mxfp4": qtorch.mxfp4_weight_only().linear_spec().weight,
    "nvfp4": qtorch.nvfp4_weight_only().linear_spec().weight,
    "int4, twice quantized": qtorch.int4_weight_only(16, double_quantize=True).linear_spec().weight,
    "uint2 with offsets, twice quantized": qtorch.uintx_weight_only(
        "uint2", 16, zero_point_domain=ZeroPointDomain.OFFSET, double_quantize=True
    )
    .linear_spec()
    .weight,
}

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def inputs(rows: int = 400, count: int = COUNT, seed: int = 0) -> Tensor:
    """Correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(count, count, generator=generator) / count**0.5
    return torch.randn(rows, count, generator=generator) @ mixing + 0.1 * torch.randn(rows, count, generator=generator)


def moment_of(x: Tensor) -> Tensor:
    return x.t() @ x / len(x)


def weights(rows: int = ROWS, count: int = COUNT) -> Tensor:
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(1))


@every_spec
def test_the_error_falls_and_the_tensor_holds_the_grid(spec: QuantSpec) -> None:
    w, h = weights(), moment_of(inputs())
    grid = Grid.of(w, spec, w.dtype, h.diagonal())
    nearest = loss(w - grid.values(), h).sum()
    damping = Gptq().round(w, h, grid)
    by_gptq = loss(w - grid.values(), damped(h, damping))
    assert 0 < by_gptq.sum() < 0.9 * nearest
    descended = Descent().refine(w, damped(h, damping), grid)
    by_descent = loss(w - descended.values(), damped(h, damping))
    # Sums of COUNT^2 products in fp32.
    slack = 1 + COUNT**2 * torch.finfo(torch.float32).eps
    assert (by_descent <= by_gptq * slack).all()
    assert by_descent.sum() < by_gptq.sum()
    refitted = qtorch.calibration.rounding.ScaleRefit().refine(w, damped(h, damping), descended)
    by_refit = loss(w - refitted.values(), damped(h, damping))
    assert by_refit.sum() <= by_descent.sum() * slack
    if spec.scale_spec is None:  # else scales change with those of other rows
        assert (by_refit <= by_descent * slack).all()
    w, h = weights(), moment_of(inputs())
    for dtype in (torch.float32, torch.bfloat16):
        grid = Grid.of(w.to(dtype), spec, dtype, h.diagonal())
        Gptq().round(w.to(dtype).float(), h, grid)
        made = grid.quantized(qtorch.LinearSpec(spec))
        assert made.dtype == dtype
        assert torch.equal(made.dequantize(torch.float32), grid.values())
    w = weights()
    for h in (3.0 * torch.eye(COUNT), torch.zeros(COUNT, COUNT)):
        grid = Grid.of(w, spec, w.dtype, torch.ones(COUNT))
        nearest = grid.codes.clone()
        Gptq().round(w, h, grid)
        assert torch.equal(grid.codes, nearest)
        Nearest().round(w, h, grid)
        assert torch.equal(grid.codes, nearest)


def unclipped() -> QuantSpec:
    """int8 for which no code is clipped: errors are at most half a scale."""
    return QuantSpec(torch.int8, PerTensor(), eps=0.05)


def test_the_loss_is_the_sum_of_the_squared_errors_of_the_columns() -> None:
    """sum_j e_j^2 = tr(D H D^T), at most the sum of (s / 2)^2 / U_jj^2 where no code is clipped."""
    w, h = 0.5 * weights(), moment_of(inputs())
    grid = Grid.of(w, unclipped(), w.dtype)
    assert float(grid.scale) == pytest.approx(0.05)
    damping = Gptq(act_order=False).round(w, h, grid)
    assert (grid.codes.abs() < 120).all()
    full = damped(h, damping).double()
    upper = torch.linalg.cholesky(torch.linalg.inv(full), upper=True)
    rest, total = w.double().clone(), torch.zeros(ROWS, dtype=torch.float64)
    values = grid.values().double()
    for j in range(COUNT):
        error = (rest[:, j] - values[:, j]) / upper[j, j]
        rest[:, j:] -= error[:, None] * upper[j, j:]
        total += error**2
    torch.testing.assert_close(loss(w.double() - values, full), total, rtol=1e-9, atol=0)
    bound = (0.05**2 / 4 / upper.diagonal().square()).sum()
    assert (total <= bound * 1.001).all()
    assert (total > 0).all()


def test_it_is_optimal_brain_quantization_in_a_fixed_order() -> None:
    """Against its definition: after each column, the best values of all later ones, by solving for them."""
    count = 12
    w, h = weights(8, count), moment_of(inputs(count=count)).double()
    spec = QuantSpec(torch.int4, PerGroup(4))
    grid = Grid.of(w, spec, w.dtype)
    damping = Gptq(act_order=False).round(w, h.float(), grid)
    full = damped(h.float(), damping).double()
    values, columns = w.double().clone(), Columns(grid)
    for j in range(count):
        free = slice(j + 1, count)
        _, found = columns.nearest(j, values[:, j].float())
        assert torch.equal(found, grid.values()[:, j])
        change = found.double() - values[:, j]
        # The inverse of H of the columns j and later gives the step of the others that costs least.
        inverse = torch.linalg.inv(full[j:, j:])
        values[:, free] += change[:, None] * inverse[0, 1:] / inverse[0, 0]
        values[:, j] = found.double()


@pytest.mark.parametrize("block_size", [1, 7, 32, 200])
def test_blocks_change_no_code(block_size: int) -> None:
    w, h = weights().double().float(), moment_of(inputs())
    spec = SPECS["int3 asymmetric"]
    grids = [Grid.of(w, spec, w.dtype) for _ in range(2)]
    Gptq(block_size=COUNT).round(w, h, grids[0])
    Gptq(block_size=block_size).round(w, h, grids[1])
    # A sum in another order may move a value over the border between two codes, and what follows from it.
    assert (grids[0].codes == grids[1].codes).float().mean() > 0.98
    whole, blocked = (float(loss(w - grid.values(), h).sum()) for grid in grids)
    assert blocked == pytest.approx(whole, rel=0.02)


def test_permuted_and_singular_moments() -> None:
    w, h = weights(), moment_of(inputs())
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(2))
    spec = qtorch.int8_weight_only().linear_spec().weight
    grid, permuted = Grid.of(w, spec, w.dtype), Grid.of(w[:, order], spec, w.dtype)
    Gptq().round(w, h, grid)
    Gptq().round(w[:, order], h[order][:, order], permuted)
    assert (permuted.codes == grid.codes[:, order]).float().mean() > 0.98
    assert torch.equal(ScaleRefit(most=1.0).refine(w, h, grid).scale, grid.scale)
    assert not torch.equal(ScaleRefit().refine(w, h, grid).scale, grid.scale)
    assert damped(torch.diag(torch.tensor([1.0, 3.0])), 0.5).diagonal().tolist() == [2.0, 4.0]
    w, x = weights(), inputs()[:, :1] * torch.ones(COUNT)
    h = moment_of(x)
    grid = Grid.of(w, SPECS["int4"], w.dtype)
    assert Gptq(damping=0.0).round(w, h, grid) > 0
    assert torch.isfinite(grid.values()).all()
    with pytest.raises(ValueError, match="not finite"):
        Gptq().round(w, h * torch.nan, grid)


def test_the_target_differs_from_the_float_output_by_a_constant() -> None:
    """|X W^T - X~ Q^T|^2 = |X~ (W* - Q)^T|^2 + constant, for every Q."""
    w = weights().double()
    x = inputs().double()
    seen = x + 0.1 * inputs(seed=5).double()
    h, g = seen.t() @ seen / len(x), x.t() @ seen / len(x)
    target = FloatTarget(damping=0.0).of(w, h, g).double()
    constants = []
    for seed in range(3):
        q = torch.randn(ROWS, COUNT, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        constants.append(float((x @ w.t() - seen @ q.t()).square().sum() - (seen @ (target - q).t()).square().sum()))
    scale = float((x @ w.t()).square().sum())
    assert max(constants) - min(constants) < 1e-4 * scale
    assert torch.equal(FloatTarget(strength=0.0).of(w, h, g), w.float())
    assert not torch.equal(target.float(), w.float())


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Gptq(damping=-1.0), "damping is 0 or more"),
    (lambda: Gptq(block_size=0), "block_size 1 or more"),
    (lambda: FloatTarget(strength=2.0), r"strength lies in \[0, 1\]"),
    (lambda: ScaleSearch(factors=(1.0, 0.0)), "factors are positive"),
    (lambda: AutoRound(0), "iterations is 1 or more, got 0"),
    (lambda: clip(ratios=(0.0,)), "ratios are numbers"),
    (lambda: smooth(alphas=(1.5,)), "alphas are numbers"),
    (lambda: awq(ratios=0), "positive number"),
    (lambda: rotate(residual=False, values=False), "one of residual and values"),
    (lambda: moving_average(0.0), "momentum is above 0 and at most 1, got 0.0"),
    (lambda: percentile(101), "percentile is above 0 and at most 100, got 101"),
    (lambda: mse(steps=1), "needs steps >= 2"),
    (lambda: entropy(smallest=1.0), "needs steps >= 2 and 0 < smallest < 1"),
])  # fmt: skip
def test_arguments_are_checked(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


# --- scale search ---
def block_errors(grid: Grid, weight: Tensor, importance: Tensor) -> Tensor:
    blocks, _ = elements_last((weight - grid.values()).square() * importance, grid.spec)  # type: ignore[arg-type]
    return blocks.sum(-1)


@every_spec
@pytest.mark.parametrize("search", [ScaleSearch(), four_over_six()], ids=["importance", "four over six"])
def test_a_scale_search_never_raises_the_error_of_a_block(spec: QuantSpec, search: ScaleSearch) -> None:
    weight, x = torch.randn(ROWS, COUNT), inputs() * torch.logspace(-1, 1, COUNT)
    moment = x.t() @ x / len(x)
    grid = Grid.of(weight, spec, weight.dtype)
    found = search.search(weight, moment, grid)
    importance = moment.diagonal() if search.importance else torch.ones(COUNT)
    before, after = block_errors(grid, weight, importance), block_errors(found, weight, importance)
    assert float(after.sum()) > 0
    if spec.scale_spec is None:
        assert bool((after <= before).all())
    else:
        # The scale of the scales is chosen anew, which moves those of all blocks by up to half a step of theirs.
        assert float(after.sum()) < 1.02 * float(before.sum())


def layer_with_outliers(data: torch.Tensor) -> nn.Linear:
    """Weights with a few large values for inputs that are small."""
    layer = nn.Linear(64, 24)
    layer.weight.data[:, ::16] *= 6
    data[:, ::16] *= 0.05
    return layer


@pytest.mark.parametrize("recipe", [
    qtorch.intx_weight_only("int3", group_size=16),
    qtorch.uintx_weight_only("uint3", group_size=32),
    qtorch.int8_dynamic_activation_int4_weight(group_size=32),
], ids=str)  # fmt: skip
def test_clipping_lessens_the_error_of_the_output(recipe: Any) -> None:
    x = torch.randn(600, 64)
    layer = layer_with_outliers(x)
    wanted, old = layer(x).detach(), layer.weight.detach().clone()
    errors = []
    for transforms in ((), (clip(tokens=600),)):
        layer.weight = nn.Parameter(old.clone())
        report = quantize_(layer, calibrated(recipe, [x], None, Nearest(), transforms=transforms))
        with torch.no_grad():
            errors.append(float((layer(x) - wanted).square().sum() / wanted.square().sum()))
    assert 0 < errors[1] < 0.8 * errors[0]
    (item,) = report.transforms
    assert (item.action, item.error_before) == ("clipped", pytest.approx(errors[0], rel=0.02))
    assert item.error_after == pytest.approx(errors[1], rel=0.02)


def test_what_is_not_clipped_and_four_over_six() -> None:
    layer, x = nn.Linear(32, 8), torch.randn(40, 32)
    layer.weight.data = layer.weight.data.sign() * 0.5
    report = quantize_(layer, calibrated(qtorch.int8_weight_only(), [x], None, Nearest(), transforms=[clip()]))
    assert [item.action for item in report.transforms] == ["unchanged"]
    layer, x = nn.Linear(64, 8), torch.randn(40, 64)
    report = quantize_(layer, calibrated(qtorch.nf4_weight_only(), [x], None, Nearest(), transforms=[clip()]))
    assert [item.detail for item in report.transforms] == ["look-up tables have no range"]

    class Both(nn.Linear):  # multiplies by its weight both ways, as an autoencoder does
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(super().forward(x), self.weight.t())

    one, both = nn.Linear(64, 8), Both(64, 8)
    both.load_state_dict(one.state_dict())
    for layer in (one, both):
        quantize_(layer, calibrated(qtorch.intx_weight_only("int3", 32), [x], None, Nearest(), transforms=[clip()]))
    assert torch.equal(one.weight.dequantize(), both.weight.dequantize())
    weight, moment = torch.randn(64, 256), torch.eye(256)
    grid = Grid.of(weight, SPECS["nvfp4"], weight.dtype)
    found = four_over_six().search(weight, moment, grid)
    before, after = (float((weight - g.values()).square().sum()) for g in (grid, found))
    assert 0.5 * before < after < 0.95 * before


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


def test_gradients_and_errors_of_learned_rounding() -> None:
    weight = torch.randn(3, 16)
    grid = grid_of(INT2, weight)
    learned = LearnedGrid(grid, weight)
    upstream = torch.randn(3, 16)
    of_offset, of_factor = torch.autograd.grad((learned.weight() * upstream).sum(), [learned.offset, learned.factor])
    inside = (learned.base.round() >= 0) & (learned.base.round() <= 3)
    torch.testing.assert_close(of_offset, upstream * grid.scale * inside)
    torch.testing.assert_close(of_factor, (upstream * grid.values()).sum(1, keepdim=True))
    model, data = Model(2), batches(12)
    without, learned = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(without, auto(INT2, data, learn=None))
    report = quantize_(learned, auto(INT2, data, learn=AutoRound(60)))
    assert 0 < error_of_first_block(learned, model, data) < error_of_first_block(without, model, data)
    methods = {layer.name: layer.calibration.method for layer in report.quantized if layer.calibration is not None}
    assert "autoround" in methods["blocks.0.down.weight"]
    assert "autoround" not in methods["front.weight"]  # stands in no block
    assert all(isinstance(p, QuantizedTensor) for n, p in learned.named_parameters() if n.endswith("weight"))
    # With steps far too large the error grows, and the codes stay.
    model, data = Model(2), batches(4)
    without, learned = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(without, auto(INT2, data, learn=None))
    quantize_(learned, auto(INT2, data, learn=AutoRound(1, lr=10.0, scale_lr=10.0)))
    for name, parameter in learned.named_parameters():
        other = without.get_parameter(name)
        if isinstance(parameter, QuantizedTensor) and isinstance(other, QuantizedTensor):
            assert torch.equal(parameter.dequantize(), other.dequantize()), name
    model, data = Model(), batches(4)
    report = quantize_(model, calibrated(qtorch.mxfp4_weight_only(), data, learn=AutoRound(5)), lambda m, n: "up" in n)
    assert all("autoround" not in layer.calibration.method for layer in report.quantized if layer.calibration)


def error_of_first_block(model: Model, reference: Model, data: list[Tensor]) -> float:
    """Of its output, on the calibration data; its inputs are those of a layer that is not learned."""

    def output(of: Model, x: Tensor) -> Tensor:
        result: Tensor = of.blocks[0](of.front(x))
        return result

    with torch.no_grad():
        return sum(float((output(model, x) - output(reference, x)).square().mean()) for x in data)


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
