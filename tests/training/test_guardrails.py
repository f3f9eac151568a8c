"""Warnings about training that runs but does not do what was hoped: each once, and only where it is so."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from qtorch import quantize_, training
from qtorch.training import Int8MixedPrecisionTrainingConfig, int8_mixed_precision_training, switchback_training
from qtorch.training.engine import contraction
from qtorch.training.recipes.base import TrainingRecipe
from tests.attack import training_recipes

FLOATS = ("float8", "mxfp8", "mxfp4", "nvfp4")


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(contraction, "_given", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def layer(recipe: object, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(32, 32, dtype=dtype))
    quantize_(made, recipe)
    return made


def test_few_tokens() -> None:
    made = layer(int8_mixed_precision_training())
    with pytest.warns(UserWarning, match="int8 gradients of weights from 255 tokens a batch: fewer than 256"):
        made(torch.randn(255, 32)).sum().backward()
    made(torch.randn(5, 32)).sum().backward()


def test_no_warning_where_there_is_no_reason() -> None:
    layer(int8_mixed_precision_training())(torch.randn(256, 32)).sum().backward()
    without = int8_mixed_precision_training(Int8MixedPrecisionTrainingConfig(grad_weight=False))
    for recipe in (switchback_training(), without):
        layer(recipe)(torch.randn(5, 32)).sum().backward()
    made = layer(switchback_training(), torch.bfloat16)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, foreach=False)
    for _ in range(12):
        made(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    made = layer(switchback_training())
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-30)
    made(torch.randn(8, 32)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", training_recipes.NAMES)
def test_products_that_a_cpu_computes_in_fp32(name: str) -> None:
    recipe = training_recipes.make(name).placed(1, 3)
    spec = recipe.training_spec() if isinstance(recipe, TrainingRecipe) else training.TrainingSpec()
    if slow := [each.dtype.name for each in spec.operands if each.dtype.is_floating_point or each.dtype.bits > 8]:
        with pytest.warns(UserWarning, match=rf"^qtorch: {name} .*{slow[0]}.* int8_mixed_precision_training\(\)"):
            layer(recipe)
    assert bool(slow) is (name in ("binary_training", *(f"{each}_training" for each in FLOATS)))
    layer(recipe)  # and only once


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_bf16_updates_that_vanish(kind: type) -> None:
    made = layer(switchback_training(), torch.bfloat16)
    optimizer = kind(made.parameters(), lr=1e-6, foreach=False)
    made(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()
    with pytest.warns(UserWarning, match=r"of an update of a bfloat16 weight of shape \(32, 32\) vanish in rounding"):
        optimizer.step()
    optimizer.step()
