"""One rank of `test_two_processes`: uneven shards, and layers cut by column and row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, parallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from qtorch import (
    PerTensor,
    float8_dynamic_activation_float8_weight,
    int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    quantize_,
)
from qtorch.integrations.tensor_parallel import RowwiseParallel
from qtorch.kernels import record_kernels
from tests import every_recipe
from tests.attack import training_recipes
from tests.distributed.processes import worker


def build(recipe: Any, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 64))
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    quantize_(model, recipe)
    return model


def check_uneven(mesh: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 97).requires_grad_(False)
    quantize_(layer, int8_weight_only())
    expected = layer.weight.dequantize()
    sharded = distribute_tensor(layer.weight, mesh, [Shard(0)])
    assert sharded.to_local().shape[0] == (49, 48)[dist.get_rank()]
    assert torch.equal(sharded.full_tensor().dequantize(), expected)


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def check_columns_and_rows(mesh: Any) -> None:
    """A column-wise and a row-wise layer after another, with biases, give what they give in one process.

    The order of the sum over columns differs, so the results do by the rounding of fp32: 2e-7 in kernels that sum
    codes, and twice that in those that dequantize the weight and call torch's matmul.
    """
    for name in every_recipe.NAMES:
        recipe = every_recipe.make(name, group_size=32)
        model = build(recipe)
        whole = copy.deepcopy(model)
        if name.startswith("nvfp4_dynamic"):  # on every rank
            with pytest.raises(ValueError, match="more than the extremes"):
                parallelize_module(model, mesh, {"2": RowwiseParallel()})
            continue
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        results = [m(x) for m, x in zip((model, whole), inputs, strict=True)]
        for result in results:
            result.square().mean().backward()
        assert 0 < relative(*results) < (2e-7 if name.startswith(("int", "uint")) else 4e-7), (name, relative(*results))
        assert relative(inputs[0].grad, inputs[1].grad) < 5e-7, name  # type: ignore[arg-type]
        for index in (0, 2):
            got = model[index].bias.grad.full_tensor()
            assert relative(got, whole[index].bias.grad) < 5e-7, (name, index)


def check_scales_of_whole_rows(mesh: Any) -> None:
    """The codes of an input on two ranks are those in one process, and kernels of integers run on them.

    With torch's style each rank chooses scales of its part, which is 1e-3 or more from one process.
    """
    for recipe, kernel in (
        (int8_dynamic_activation_int8_weight(), "int8_mm"),
        (float8_dynamic_activation_float8_weight(PerTensor()), "scaled_mm"),
        (int8_dynamic_activation_int4_weight(group_size=32), "weight_only_mm"),  # with zero points
    ):
        models = [build(recipe) for _ in range(3)]
        styles = (RowwiseParallel(), parallel.RowwiseParallel())
        x = 3 * torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(1))
        expected = models[2](x)
        for model, style in zip(models, styles, strict=False):
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": style})
        hidden = models[0][1](models[0][0](x))
        with record_kernels() as ran:
            y = models[0][2](hidden)
        assert any(kernel in name for name in ran), ran
        assert y.shape == expected.shape
        assert relative(y, expected) < 1e-6
        assert relative(models[1](x), expected) > 1e-4
    # Along the tokens, as sequence parallelism wants it.
    model, whole = build(recipe), build(recipe)
    style = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": style})
    x = torch.randn(2, 6, 256, generator=torch.Generator().manual_seed(1))
    assert relative(model(x), whole(x).chunk(2, 1)[dist.get_rank()]) < 1e-6


def check_styles_of_torch_are_refused(mesh: Any) -> None:
    """For every weight in training, at once, with the styles that know it."""
    for name in training_recipes.NAMES:
        for style in (parallel.ColwiseParallel(), parallel.RowwiseParallel()):
            layer = nn.Linear(64, 64)
            quantize_(layer, training_recipes.make(name))
            weight, words = layer.weight, r"parallelized|RowwiseParallel of qtorch\.integrations"
            with pytest.raises((ValueError, NotImplementedError), match=words):
                parallelize_module(nn.Sequential(layer), mesh, {"0": style})
            assert layer.weight is weight


def main() -> None:
    mesh = init_device_mesh("cpu", (2,))
    check_uneven(mesh)
    check_columns_and_rows(mesh)
    check_scales_of_whole_rows(mesh)
    check_styles_of_torch_are_refused(mesh)


if __name__ == "__main__":
    worker(main)
