"""Schedules: float before the first step, scales held from the last on; observed ranges; conversion."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from qtorch import (
    compute_error,
    float8_dynamic_activation_float8_weight,
    float8_static_activation_float8_weight,
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_semi_sparse_weight,
    int8_static_activation_int8_weight,
    int8_weight_only,
    mxfp4_weight_only,
    nf4_weight_only,
    nvfp4_weight_only,
    quantize_,
)
from qtorch.calibration import moving_average
from qtorch.training import calibrate, convert, lsq, qat, scheduled_qat

STATIC = int8_static_activation_int8_weight(0.03)
STATIC_FLOAT8 = float8_static_activation_float8_weight(0.01)

# Recipe, whether it sums integers.
RECIPES = [
    (scheduled_qat(int8_dynamic_activation_int4_weight(), 2, 5), True),
    (scheduled_qat(int4_weight_only(group_size=32), 2, 5), False),
    (scheduled_qat(STATIC, 2, 5), True),
    (scheduled_qat(STATIC, 2, 5, "moving_average"), True),
    (scheduled_qat(STATIC, observer="min_max"), True),
    (scheduled_qat(STATIC_FLOAT8, 2, 5, "moving_average"), False),
    (scheduled_qat(float8_dynamic_activation_float8_weight(), 2, 5), False),
    (scheduled_qat(mxfp4_weight_only(), 2, 5), False),
    (scheduled_qat(nvfp4_weight_only(), 2), False),
    (lsq(start_step=2, freeze_step=5), True),
    (lsq(weights="clip", activation_offset=True, start_step=2, freeze_step=5), True),
]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False))


def train(model: nn.Module, steps: int, seed: int = 0) -> list[float]:
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for _ in range(steps):
        loss = (model(torch.randn(64, 64, generator=g)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:qtorch")
@pytest.mark.parametrize(("recipe", "integers"), RECIPES, ids=[f"{i} {case[0]}" for i, case in enumerate(RECIPES)])
def test_float_then_fake_quantized_then_frozen(recipe, integers: bool) -> None:
    torch.manual_seed(0)
    floats = mlp()
    model = copy.deepcopy(floats)
    quantize_(model, recipe)
    ours, theirs = train(model, 3), train(floats, 3)
    start = recipe.start_step
    assert ours[:start] == theirs[:start]
    assert all(a != b for a, b in zip(ours[start:], theirs[start:]))
    train(model, 2)
    layer, x = model[0], torch.randn(9, 64)
    frozen = None if layer.schedule is None else layer.schedule.frozen
    scale = layer.weight_quantizer.converted_qparams(layer.weight, frozen)[0]
    weight = layer.weight.detach().clone()
    train(model, 2, seed=1)
    assert not torch.equal(layer.weight, weight)
    again = layer.weight_quantizer.converted_qparams(layer.weight, frozen)[0]
    assert torch.equal(scale, again) or recipe.freeze_step is None
    model.eval()
    with torch.no_grad():
        wanted = model(x)
    quantize_(model, convert())
    assert type(model[0]) is nn.Linear
    served = model[0].weight.dense_scale()
    assert torch.equal(served, again)
    got = model(x)
    assert torch.equal(got, wanted) if integers else compute_error(wanted, got) > 70
    assert 10 < compute_error(layer.weight.dequantize(), weight) < 60


def test_eval_mode_serves_whatever_the_step() -> None:
    model, x = mlp(), torch.randn(9, 64)
    quantize_(model, scheduled_qat(int8_dynamic_activation_int4_weight(), start_step=100))
    floats = model(x)
    assert model[0].schedule.step == 1
    wanted = model.eval()(x)
    assert model[0].schedule.step == 1
    assert 10 < compute_error(floats, wanted) < 40
    quantize_(model, convert())
    assert torch.equal(model(x), wanted)


def test_scales_that_follow_pass_all_gradients_and_held_ones_do_not() -> None:
    layer = nn.Linear(64, 32)
    quantize_(layer, scheduled_qat(int8_dynamic_activation_int4_weight(), freeze_step=1))
    x = torch.randn(16, 64)
    layer(x).sum().backward()
    assert layer.weight.grad.count_nonzero() == layer.weight.numel()
    layer.weight.grad = None
    with torch.no_grad():
        layer.weight[1, 1] = 3.0
    layer(x).sum().backward()
    assert layer.weight.grad[1, 1] == 0
    assert layer.weight.grad.count_nonzero() > 1500


def test_observed_ranges() -> None:
    batches = [torch.full((2, 64), value) for value in (1.0, 3.0, 2.0)]
    for observer, wanted in ((moving_average(0.5), 2.0), ("min_max", 3.0)):
        layer = nn.Linear(64, 32)
        quantize_(layer, scheduled_qat(STATIC, observer=observer))
        for x in batches:
            layer(x)
        assert layer.input_quantizer.max_val.item() == wanted
        quantize_(layer, convert())
        torch.testing.assert_close(layer.weight.act_scale.item(), wanted / 127)
    layer = nn.Linear(64, 32)
    quantize_(layer, scheduled_qat(STATIC, observer="moving_average"))
    with pytest.raises(ValueError, match="no input has been seen"):
        quantize_(layer, convert())
    with pytest.raises(ValueError, match="no scale yet: train on a batch, or call"):
        layer.eval()(batches[0])
    assert calibrate(layer, batches) == 1
    # Weights .99^2, .99, 1.
    torch.testing.assert_close(layer.input_quantizer.max_val.item(), (0.9801 + 2.97 + 2) / 2.9701)
    quantize_(layer, convert())


def test_compiled_graphs_do_not_change_with_the_step() -> None:
    eager = nn.Linear(64, 32)
    quantize_(eager, scheduled_qat(STATIC, 2, 4, "moving_average"))
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True)
    counters = torch._dynamo.utils.counters
    counters.clear()
    g = torch.Generator().manual_seed(0)
    for _ in range(6):
        x = torch.randn(16, 64, generator=g)
        torch.testing.assert_close(run(x), eager(x), rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert compiled.schedule.step == 6
    for ours, theirs in zip(compiled.state_dict().values(), eager.state_dict().values()):
        torch.testing.assert_close(ours, theirs)


def test_what_is_refused() -> None:
    for arguments, message in (
        ((int8_weight_only(), -1), "start_step is -1"),
        ((int8_weight_only(), 5, 5), "freeze_step is 5, start_step 5"),
        ((int8_weight_only(), 0, None, "moving_average"), "no static activations to observe"),
        ((STATIC, 0, None, "mean"), "observer is an observer such as"),
        ((nf4_weight_only(),), "CodebookSpec"),
        ((nvfp4_weight_only(), 0, 3), "cannot freeze"),
        ((int8_dynamic_activation_int8_semi_sparse_weight(),), "prunes its weights"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduled_qat(*arguments)
    for takes in (scheduled_qat, qat, lambda recipe: lsq(recipe=recipe)):
        for recipe in ("int8", lsq()):
            with pytest.raises(TypeError, match="takes an inference recipe"):
                takes(recipe)
