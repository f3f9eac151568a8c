"""Quantized tensors as parameters: what they are not made of, and what reads memory that they do not have."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qtorch import int4_weight_only, int8_weight_only, lut_weight_only, quantize_
from qtorch.dtypes import QuantizedTensor
from qtorch.recipes.base import Recipe
from qtorch.training import bitnet_training, int8_mixed_precision_training, int8_weight_only_quantized_training, qat

RECIPES: list[Recipe] = [
    int8_weight_only(),
    int4_weight_only(group_size=32),
    lut_weight_only(3),
    int8_mixed_precision_training(),
    int8_weight_only_quantized_training(stochastic_rounding=False),
    bitnet_training(),
    qat(int8_weight_only()),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)


def layer(recipe: Recipe) -> nn.Linear:
    linear = nn.Linear(64, 32)
    quantize_(linear, recipe)
    return linear


@every_recipe
def test_a_class_does_not_make_a_parameter_of_floats(recipe: Recipe) -> None:
    with pytest.raises(TypeError, match="takes inner tensors and a scheme"):
        type(layer(recipe).weight)(torch.randn(32, 64), requires_grad=False)  # type: ignore[arg-type]


@every_recipe
def test_data_that_does_not_fit(recipe: Recipe) -> None:
    """tests/attack assigns what fits, before and after calls."""
    weight = layer(recipe).weight
    with pytest.raises(ValueError, match=r"\(32, 64\) takes a tensor of that shape, got \(64, 32\)"):
        weight.data = torch.randn(64, 32)
    with pytest.raises(TypeError, match="takes a tensor"):
        weight.data = [1.0]
    assert weight.shape == (32, 64)
    weight.data = weight.data.to(torch.bfloat16)
    assert weight.dtype == torch.bfloat16


READERS: dict[str, Any] = {
    "asarray": np.asarray,
    "np.from_dlpack": np.from_dlpack,
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "storage": lambda w: w.storage()[0],
    "storage bytes": lambda w: bytes(w.untyped_storage()),
}
"""Beside those of tests/attack/raw_memory.py."""


@every_recipe
@pytest.mark.parametrize("reader", READERS)
def test_memory_that_is_not_there(recipe: Recipe, reader: str) -> None:
    weight = layer(recipe).weight.detach()
    assert isinstance(weight, QuantizedTensor)
    with pytest.raises((TypeError, RuntimeError), match=r"dequantize\(\)|data pointer|not allocated"):
        READERS[reader](weight)
