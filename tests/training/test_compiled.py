"""Recipes of training with compiled operands and products: the numbers of torch's operators."""

import pytest
import torch
from torch import Tensor, nn

from qtorch import quantize_, training
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.recipes.base import Recipe
from tests.kernels.cpu.builds import NEEDS_LIBRARY
from tests.training.reference import RECIPES

pytestmark = NEEDS_LIBRARY

INTEGERS: dict[str, Recipe] = {name: RECIPES[name] for name in ("int8", "int4, int8", "tilewise")}
INTEGERS |= {
    "int8 stochastic": training.int8_mixed_precision_training(
        training.Int8MixedPrecisionTrainingConfig(stochastic_rounding=True)
    ),
    "small tiles": training.int8_tilewise_training(tile=16),
}
FLOATS = {name: RECIPES[name] for name in ("switchback", "float8 rowwise", "float8 tensorwise", "mxfp8")}
DTYPES = (torch.float32, torch.bfloat16)


def step(recipe: Recipe, x: Tensor, dtype: torch.dtype, of_sum: bool) -> tuple[list[Tensor], list[str]]:
    """Output and gradients of a layer, and what ran. Each element of the gradient of a sum is the same in memory."""
    torch.manual_seed(2)
    layer = nn.Sequential(nn.Linear(96, 64, bias=False)).to(dtype)
    quantize_(layer, recipe)
    x = x.to(dtype, copy=True).requires_grad_()
    with record_kernels() as ran:
        y = layer(x)
        y.sum().backward() if of_sum else y.backward(torch.randn(y.shape).to(dtype) * torch.arange(64))
    weight = layer[0].weight.grad
    assert x.grad is not None
    assert weight is not None
    return [y.detach(), x.grad, weight], ran


def both(
    recipe: Recipe, x: Tensor, dtype: torch.dtype = torch.float32, of_sum: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    ours, ran = step(recipe, x, dtype, of_sum)
    assert sum(name.startswith("quantize_matrix.") for name in ran) >= 4
    with compiled_library.use(None):
        expected, ran = step(recipe, x, dtype, of_sum)
    assert not any(name.startswith("quantize_matrix.") for name in ran)
    return ours, expected


@pytest.mark.parametrize("recipe", INTEGERS.values(), ids=INTEGERS)
def test_integers_have_the_same_bits(recipe: Recipe) -> None:
    for dtype in DTYPES:
        ours, expected = both(recipe, torch.randn(70, 96), dtype)
        assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("recipe", FLOATS.values(), ids=FLOATS)
def test_floats_are_sums_in_another_order_at_most(recipe: Recipe) -> None:
    for dtype in DTYPES:
        ours, expected = both(recipe, torch.randn(70, 96), dtype)
        for a, b in zip(ours, expected, strict=True):
            assert (a - b).norm() <= b.norm() * (1e-6 if dtype is torch.float32 else 1e-3)


@pytest.mark.parametrize("recipe", [*INTEGERS.values(), *FLOATS.values()], ids=[*INTEGERS, *FLOATS])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_lost_is_lost_in_both(recipe: Recipe, value: float) -> None:
    x = torch.randn(70, 96)
    x[3, 5] = value
    for a, b in zip(*both(recipe, x), strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())


@pytest.mark.parametrize("recipe", INTEGERS.values(), ids=INTEGERS)
def test_a_gradient_without_memory_of_its_own(recipe: Recipe) -> None:
    assert all(map(torch.equal, *both(recipe, torch.randn(70, 96), of_sum=True)))
