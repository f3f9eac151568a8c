"""Layers with state and weights without take one path of fake quantization, and give the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from qtorch import (
    int4_weight_only,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_weight,
    int8_static_activation_int8_weight,
    quantize_,
)
from qtorch.quantize_api import Recipe, WeightRecipe
from qtorch.training import lsq, qat, scheduled_qat
from qtorch.training.quantization_aware import fake_quantize

RECIPES: list[WeightRecipe] = [
    int8_dynamic_activation_int4_weight(group_size=32),
    int8_dynamic_activation_int8_weight(),
    int8_static_activation_int8_weight(0.03),
    int4_weight_only(group_size=32),
]

LAYERS = {
    "linear": (nn.Linear(64, 32), (3, 5, 64)),
    "conv": (nn.Conv2d(64, 32, 3, padding=1, groups=2, bias=False), (2, 64, 6, 6)),
}


def prepared(kind: str, recipe: Recipe) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    layer, shape = LAYERS[kind]
    model = nn.Sequential(copy.deepcopy(layer))
    quantize_(model, recipe, lambda module, name: name == "0")
    return model, torch.randn(shape, requires_grad=True)


def count_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls of a function of `fake_quantize`, as they come."""
    calls, function = [], getattr(fake_quantize, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(fake_quantize, name, counted)
    return calls


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_same_numbers(kind: str, recipe: WeightRecipe) -> None:
    results = []
    for training in (qat(recipe), scheduled_qat(recipe)):
        model, x = prepared(kind, training)
        y = model(x)
        y.square().mean().backward()
        with torch.no_grad():
            results.append([y, model(x), x.grad, model[0].weight.grad])
    for one, other in zip(*results, strict=True):
        if kind == "conv" and recipe.linear_spec().static:
            # With state an image is quantized before its windows are gathered: sums of gradients in another order.
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "make", [qat, scheduled_qat, lambda recipe: lsq(recipe=recipe)], ids=["qat", "schedule", "lsq"]
)
def test_same_functions(make, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared(kind, make(RECIPES[0]))
    operands = count_calls("_operand", monkeypatch)
    products = count_calls("converted_linear", monkeypatch)
    model(x)
    groups = 1 if kind == "linear" else 2
    assert len(products) == groups
    assert len(operands) == 1 + groups


@pytest.mark.parametrize("make", [qat, scheduled_qat], ids=["qat", "schedule"])
def test_only_codes_are_made_without_a_gradient(make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared("linear", make(RECIPES[0]))
    calls = count_calls("straight_through", monkeypatch)
    with torch.no_grad():
        model(x)
    assert not calls
    model(x)
    assert len(calls) == 2
