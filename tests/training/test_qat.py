"""Quantization-aware training: what is prepared computes what is converted, for every inference recipe."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qtorch import compute_error, load_quantized, quantize_, save_quantized
from qtorch.kernels.cpu import library
from qtorch.training import TrainableWeight, convert, qat
from qtorch.training.served_linear import sums_integers
from tests.every_recipe import NAMES, make

every_recipe = pytest.mark.parametrize("name", NAMES)
INTEGERS = [name for name in NAMES if sums_integers(make(name).linear_spec())]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s)qtorch: .* runs")
        yield


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """With the compiled CPU kernels, where there are any, and without."""
    with library.use(None) if request.param == "torch" else nullcontext():
        yield request.param


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False)).to(dtype)


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dtype = model[0].bias.dtype
    for _ in range(steps):
        functional.mse_loss(model(torch.randn(32, 64, dtype=dtype)).float(), torch.ones(32, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()


def codes(weight: Tensor) -> list[Tensor]:
    return [part for part in weight.plain() if part is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_recipe
def test_converted_equals_prepared(name: str, dtype: torch.dtype, kernels: str, tmp_path: Path) -> None:
    recipe, model = make(name, 32), make_model(dtype)
    quantize_(model, qat(recipe))
    before = model[0].weight.dequantize().clone()
    train(model)
    assert not torch.equal(model[0].weight.dequantize(), before)
    model.eval()
    masters = [model[i].weight.dequantize() for i in (0, 2)]
    inputs = [torch.randn(*shape, 64).to(dtype) for shape in ((), (1,), (5, 7), (100,))]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
    with_gradient = [model(x) for x in inputs]
    quantize_(model, convert())
    for i, master in zip((0, 2), masters):
        assert not isinstance(model[i].weight, TrainableWeight)
        assert model[i].weight.scheme == recipe.apply(master).scheme
        for mine, theirs in zip(codes(model[i].weight), codes(recipe.apply(master)), strict=True):
            assert torch.equal(mine, theirs)
    for x, y, z in zip(inputs, wanted, with_gradient):
        got = model(x)
        if name in INTEGERS:
            assert torch.equal(got, y)
            assert torch.equal(got, z)
        else:
            assert compute_error(y, got) > (70 if dtype is torch.float32 else 35)
            assert compute_error(z, got) > (70 if dtype is torch.float32 else 35)
    loaded = make_model(dtype).to("meta")
    save_quantized(model, tmp_path / "model.safetensors")
    load_quantized(loaded, tmp_path / "model.safetensors")
    assert torch.equal(loaded(inputs[2]), model(inputs[2]))
