"""Adapters under quantization-aware training: the base is frozen, the merged weight is what is quantized and served."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import qtorch
from qtorch import compute_error, quantize_
from qtorch.training import convert, lora_qat, qat
from qtorch.training.quantization_aware.recipes.lora_qat import LoRALinear
from tests.refusals import refuses
from tests.training.small_model import fit, mlp

RECIPES = [
    qtorch.int8_dynamic_activation_int4_weight(),
    qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int4_weight_only(group_size=32),
    qtorch.nf4_weight_only(group_size=32),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@every_recipe
def test_the_merged_weight_is_what_is_served(recipe: qtorch.quantize_api.WeightRecipe) -> None:
    model, x = mlp(), torch.randn(5, 7, 64)
    ptq = copy.deepcopy(model)
    quantize_(ptq, recipe)
    base = model[0].weight.detach().clone()
    quantize_(model, qat(recipe, lora_rank=4, lora_alpha=8.0))
    assert compute_error(ptq(x), model(x)) > 70, "b is zero: it starts from the quantized base"
    losses = fit(model, 8)
    assert losses[-1] < losses[0]
    assert torch.equal(model[0].weight, base)
    merged = (base + 2 * model[0].lora_b @ model[0].lora_a).detach()
    assert 5 < compute_error(merged, base) < 60
    quantize_(model, convert())
    assert torch.equal(model[0].weight.dequantize(), recipe.apply(merged).dequantize())


def test_what_is_trained() -> None:
    model = mlp()
    quantize_(model, qat(RECIPES[0], lora_rank=4))
    assert isinstance(model[0], LoRALinear)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["0.bias", "0.lora_a", "0.lora_b", "2.lora_a", "2.lora_b"]
    assert (model[0].lora_a.shape, model[0].lora_b.shape) == ((4, 64), (96, 4))


def test_gradients_are_those_of_the_merged_weight() -> None:
    layer, x = nn.Linear(64, 96), torch.randn(5, 64)
    quantize_(layer, qat(RECIPES[1], lora_rank=4, lora_alpha=2.0))
    nn.init.normal_(layer.lora_b)
    g = torch.randn(5, 96)
    spec = RECIPES[1].linear_spec()
    w = (layer.weight + 0.5 * layer.lora_b @ layer.lora_a).detach().requires_grad_()
    whole = w + (spec.weight.fake_quantize(w) - w).detach()
    (of_w,) = torch.autograd.grad(functional.linear(spec.activation.fake_quantize(x), whole, layer.bias), w, g)
    of_a, of_b = torch.autograd.grad(layer(x), [layer.lora_a, layer.lora_b], g)
    assert compute_error(0.5 * layer.lora_b.t() @ of_w, of_a) > 100
    assert compute_error(0.5 * of_w @ layer.lora_a.t(), of_b) > 100


def test_errors() -> None:
    recipe = RECIPES[1]
    refuses(r"lora_qat: recipe takes an inference recipe .*, got 4", lambda: lora_qat(4, 4), TypeError)
    for rank, alpha, message in (
        (0, 8.0, "the rank of adapters is 1 or more, got 0"),
        (4, -1.0, "alpha is a positive number, got -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            qat(recipe, lora_rank=rank, lora_alpha=alpha)
    refuses("adapters have no schedule and no observer", lambda: qat(recipe, lora_rank=4, start_step=10))
    model = nn.ModuleDict({"embed": nn.Embedding(48, 64), "head": nn.Linear(64, 48)})
    with pytest.raises(ValueError, match=r"embed: adapters are for nn\.Linear, exactly"):
        quantize_(model, {"embed": qat(recipe, lora_rank=4)})
    refuses(r"head: rank 49 exceeds the weight's shape \(48, 64\)", lambda: quantize_(model, qat(recipe, lora_rank=49)))
    model["other"] = nn.Linear(64, 48)
    model["other"].weight = model["head"].weight
    with pytest.raises(ValueError, match="head: adapters are for one layer, the weight is shared by 2"):
        quantize_(model, qat(recipe, lora_rank=4))
    assert type(model["head"]) is nn.Linear
