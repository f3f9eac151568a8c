"""Layers with state and weights without take one path of fake quantization, and give the same numbers; so do all
recipes of training with a gradient and without, and when they serve."""

import copy
from types import ModuleType

import pytest
import torch

import qtorch
from qtorch.training import convert, lsq, pact, qat, scheduled_qat
from qtorch.training.quantization_aware import fake_quantize
from qtorch.training.quantization_aware.converted import sums_integers
from tests.attack import training_recipes

RECIPES: list[qtorch.recipes.base.WeightRecipe] = [
    qtorch.int8_dynamic_activation_int4_weight(group_size=32),
    qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int8_static_activation_int8_weight(0.03),
    qtorch.int4_weight_only(group_size=32),
]

LAYERS = {
    "linear": (torch.nn.Linear(64, 32), (3, 5, 64)),
    "conv": (torch.nn.Conv2d(64, 32, 3, padding=1, groups=2, bias=False), (2, 64, 6, 6)),
}


def prepared(kind: str, recipe: qtorch.recipes.base.Recipe) -> tuple[torch.nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    layer, shape = LAYERS[kind]
    model = torch.nn.Sequential(copy.deepcopy(layer))
    qtorch.quantize_(model, recipe, lambda module, name: name == "0")
    return model, torch.randn(shape, requires_grad=True)


def count_calls(name: str, monkeypatch: pytest.MonkeyPatch, module: ModuleType = fake_quantize) -> list[str]:
    """The names of the calls of a function of a module, as they come."""
    calls, function = [], getattr(module, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_same_numbers(kind: str, recipe: qtorch.recipes.base.WeightRecipe) -> None:
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
@pytest.mark.parametrize("make", [qat, scheduled_qat, lambda base: lsq(recipe=base)], ids=["qat", "schedule", "lsq"])
def test_same_functions(make, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared(kind, make(RECIPES[0]))
    operands = count_calls("Operand", monkeypatch)
    products = count_calls("converted_linear", monkeypatch)
    model(x)
    groups = 1 if kind == "linear" else 2
    assert len(products) == groups
    assert len(operands) == 1 + groups


@pytest.mark.parametrize("make", [qat, scheduled_qat], ids=["qat", "schedule"])
def test_only_codes_are_made_without_a_gradient(make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared("linear", make(RECIPES[0]))
    calls = count_calls("straight_through", monkeypatch, qtorch.primitives.fake_quant)
    with torch.no_grad():
        model(x)
    assert not calls
    model(x)
    assert len(calls) == 2


TRAINING: dict[str, qtorch.recipes.base.Recipe] = {
    name: training_recipes.make(name) for name in [*training_recipes.NAMES, *training_recipes.VARIANTS]
}
TRAINING["pact"] = pact()
TRAINING["schedule"] = scheduled_qat(qtorch.int8_dynamic_activation_int8_weight(), start_step=1, freeze_step=2)


class Model(torch.nn.Module):
    """What it returns is the output of each of its layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = None if kind == "conv" else torch.nn.Embedding(96, 64)
        self.conv = torch.nn.Conv1d(64, 64, 3, padding=1) if kind == "conv" else None
        self.head = torch.nn.Linear(64, 96, bias=False)
        if kind == "tied":
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        if self.embed is not None:
            outputs.append(self.embed(ids))
        else:
            outputs.append(self.conv(torch.sin(ids[..., None] * torch.arange(64)).mT).mT)
        return [*outputs, self.head(torch.tanh(outputs[0]))]


@pytest.mark.parametrize("kind", ["tied", "untied", "conv"])
@pytest.mark.parametrize("name", TRAINING)
def test_without_a_gradient_and_served(name: str, kind: str) -> None:
    """The loss of a validation is that of training, and of the converted model."""
    model, ids = Model(kind), torch.arange(96).reshape(4, 24)
    refuses = {"lora_qat": ("tied", "untied", "conv"), "scheduled_training": ("tied", "untied")}.get(name, ())
    if kind in refuses:
        with pytest.raises(ValueError, match=r"^quantize_: (embed|conv): "):
            qtorch.quantize_(model, TRAINING[name], targets="all")
        return
    qtorch.quantize_(model, TRAINING[name], targets="all")
    for step in range(4):
        other = copy.deepcopy(model)
        torch.manual_seed(step)
        wanted = (model if step < 3 else model.eval())(ids)
        torch.manual_seed(step)
        with torch.no_grad():
            got = (other if step < 3 else other.eval())(ids)
        assert all(map(torch.equal, got, wanted)), (step, model.training)
    qtorch.quantize_(model, convert())
    spec = getattr(getattr(model.head.weight, "scheme", None), "spec", None)
    for y, served in zip(wanted, model(ids), strict=True):
        assert torch.equal(y, served) or (not (spec and sums_integers(spec)) and qtorch.compute_error(y, served) > 100)


@pytest.mark.parametrize("name", TRAINING)
def test_a_float64_model_computes_the_same(name: str) -> None:
    """As of `model.double()`, which no compiled kernel reads."""
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64)), torch.randn(40, 64)
    qtorch.quantize_(model, TRAINING[name])
    double = copy.deepcopy(model).double()  # a schedule counts the calls
    wanted, y = model(x), double(x := x.double().requires_grad_())
    assert y.dtype == torch.float64
    assert qtorch.compute_error(wanted, y.float()) > 100
    y.square().sum().backward()
    assert 0 < x.grad.abs().max() < torch.inf
