"""Quantized tensors as parameters: assigned to, made anew, and what reads memory that they do not have."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qtorch
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


def output(linear: nn.Linear) -> Tensor:
    return linear(torch.linspace(-1, 1, 3 * 64).reshape(3, 64)).detach()


@every_recipe
def test_a_class_does_not_make_a_parameter_of_floats(recipe: Recipe) -> None:
    with pytest.raises(TypeError, match="takes inner tensors and a scheme"):
        type(layer(recipe).weight)(torch.randn(32, 64), requires_grad=False)  # type: ignore[arg-type]


@every_recipe
@pytest.mark.parametrize("copies", [0, 1 << 20])
def test_data_is_assigned(recipe: Recipe, copies: int) -> None:
    linear, other = layer(recipe), layer(recipe)
    other.bias = linear.bias
    with qtorch.config.patch(float_copy_bytes=copies), torch.no_grad():
        for _ in range(3):
            output(linear)
        linear.weight.data = other.weight.data
        assert torch.equal(output(linear), output(other))
        floats = torch.randn(32, 64)
        linear.weight.data = floats
        other.weight.copy_(floats)
        assert torch.equal(output(linear), output(other))
        before = output(linear)
        with pytest.raises(ValueError, match=r"\(32, 64\) takes a tensor of that shape, got \(64, 32\)"):
            linear.weight.data = torch.randn(64, 32)
        with pytest.raises(TypeError, match="takes a tensor"):
            linear.weight.data = [1.0]
        assert tuple(linear.weight.shape) == (32, 64)
        assert torch.equal(output(linear), before)
        linear.weight.data = linear.weight.data.to(torch.bfloat16)
        assert linear.weight.dtype == torch.bfloat16


@every_recipe
@pytest.mark.parametrize("copies", [0, 1 << 20])
def test_nothing_is_kept_of_old_numbers(recipe: Recipe, copies: int) -> None:
    """Weights that train in codes, and copies of weights in floating point beside them."""
    linear = layer(recipe)
    x = torch.randn(300, 64)  # so many rows that a copy is multiplied with, where there is one
    with qtorch.config.patch(float_copy_bytes=copies):
        for _ in range(3):
            linear(x)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(32, 64))
        fresh = nn.Linear(64, 32)
        fresh.load_state_dict(linear.state_dict(), assign=True)
        assert torch.equal(linear(x), fresh(x))
        if not linear.weight.trains:  # type: ignore[attr-defined]
            return
        before = linear(x).detach()
        optimizer = torch.optim.SGD([linear.weight], lr=0.5, weight_decay=0.1)
        linear(x).square().mean().backward()
        optimizer.step()
        fresh.load_state_dict(linear.state_dict(), assign=True)
        assert torch.equal(linear(x), fresh(x))
        assert not torch.allclose(linear(x), before, rtol=1e-3)


READERS: dict[str, Any] = {
    "numpy": lambda w: w.numpy(),
    "asarray": np.asarray,
    "from_dlpack": torch.from_dlpack,
    "np.from_dlpack": np.from_dlpack,
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "data_ptr": lambda w: w.data_ptr(),
    "storage": lambda w: w.storage()[0],
    "untyped_storage": lambda w: w.untyped_storage().data_ptr(),
    "storage bytes": lambda w: bytes(w.untyped_storage()),
    "apply_": lambda w: w.apply_(lambda value: value),
    "tolist": lambda w: w.tolist(),
}


@every_recipe
@pytest.mark.parametrize("reader", READERS)
def test_memory_that_is_not_there(recipe: Recipe, reader: str) -> None:
    weight = layer(recipe).weight.detach()
    assert isinstance(weight, QuantizedTensor)
    with pytest.raises((TypeError, RuntimeError), match=r"dequantize\(\)|data pointer|not allocated"):
        READERS[reader](weight)


@every_recipe
def test_safetensors_of_its_own_writer(recipe: Recipe, tmp_path: Any) -> None:
    from safetensors.torch import save_file

    with pytest.raises((TypeError, RuntimeError), match=r"save_quantized"):
        save_file({"weight": layer(recipe).weight.detach()}, tmp_path / "model.safetensors")
