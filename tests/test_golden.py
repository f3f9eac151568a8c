"""The golden checkpoints, written by earlier versions, load and give the numbers that they gave then."""

import pytest
import torch
from safetensors.torch import load_file

from qtorch import load_quantized
from qtorch.recipes.base import RECIPES
from tests.golden.make import FOLDER, GOLDEN, layer_and_input
from tests.rounding import EXTRA, gamma

NAMES = sorted(path.name.removesuffix(".numbers.safetensors") for path in FOLDER.glob("*.numbers.safetensors"))


@pytest.mark.parametrize("name", NAMES)
def test_loads_and_gives_the_same_numbers(name: str) -> None:
    numbers = load_file(FOLDER / f"{name}.numbers.safetensors")
    with torch.device("meta"):
        layer, _ = layer_and_input(name)
    load_quantized(layer, FOLDER / f"{name}.safetensors")
    assert torch.equal(layer.weight.dequantize(), numbers["weight"])
    output = layer(numbers["input"])
    # Weights are the same bits; sums of floats may be added up in another order on another processor. What is summed is
    # as large as the largest input times the sum of a row's weights; in bf16, weights and results are rounded too.
    rows = numbers["weight"].flatten(1).double().abs().sum(1)
    size = float(numbers["input"].double().abs().max() * rows.max() + layer.bias.double().abs().max())
    terms = numbers["weight"][0].numel() + EXTRA
    atol = 2 * (gamma(terms) + (2 * gamma(1, torch.bfloat16) if output.dtype == torch.bfloat16 else 0)) * size
    torch.testing.assert_close(output, numbers["output"], rtol=0, atol=atol)


def test_every_weight_recipe_has_one() -> None:
    assert set(NAMES) == set(GOLDEN)
    # A dynamic form stores the same weight as the weight-only one.
    dynamic = {f"{name}_dynamic_activation_{name}_weight" for name in ("mxfp8", "mxfp4", "nvfp4")}
    assert {recipe.name for recipe in GOLDEN.values()} | dynamic == {
        name for name, cls in RECIPES.items() if cls.__module__.startswith("qtorch.recipes")
    }
