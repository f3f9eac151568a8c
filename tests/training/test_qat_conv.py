"""Quantization-aware training of convolutions for every inference recipe: converting changes nothing."""

import warnings

import pytest
import torch
from torch import nn

from qtorch import MappingType, PerAxis, compute_error, int8_dynamic_activation_int8_weight, quantize_
from qtorch.dtypes import ConvWeight
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.recipes.base import RECIPES
from qtorch.training import convert, qat
from tests.every_recipe import NAMES, make
from tests.test_convolutions import CONVS, ConvNet, X

pytestmark = pytest.mark.filterwarnings("ignore:qtorch. linear")  # of emulations


def prepared(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = ConvNet()
    try:
        recipe = qat(make(name, 32))
    except ValueError as error:
        pytest.skip(str(error))
    quantize_(model, {CONVS: recipe})
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    before = model.convs[0].weight.dequantize().detach().clone()
    model(X).square().sum().backward()
    assert all(conv.weight.grad.shape == conv.weight.shape for conv in model.convs)
    optimizer.step()
    assert not torch.equal(before, model.convs[0].weight.dequantize())
    return model


@pytest.mark.parametrize("name", NAMES)
def test_converted(name: str) -> None:
    model = prepared(name)
    floats = [conv.weight.dequantize().detach() for conv in model.convs]
    with torch.no_grad():
        y = model(X)
    assert torch.equal(model(X).detach(), y)
    quantize_(model, convert())
    with torch.no_grad(), record_kernels() as ran:
        served = model(X)
    assert all(type(conv.weight) is ConvWeight for conv in model.convs)
    if any("int8" in kernel for kernel in ran if kernel.startswith("linear:")):
        assert torch.equal(served, y)
    else:
        assert compute_error(y, served) > 70
    for conv, values in zip(model.convs, floats):
        alone = nn.Conv2d(*values.shape[1::-1], values.shape[2:])
        alone.weight = nn.Parameter(values)
        quantize_(alone, {"weight": make(name, 32)})
        assert torch.equal(conv.weight.plain()[0], alone.weight.plain()[0])


def test_groups_and_padding_modes() -> None:
    recipe = RECIPES["int8_dynamic_activation_int8_weight"]()
    for options in ({"groups": 4, "padding": 1}, {"padding": 2, "padding_mode": "reflect"}):
        model = nn.Sequential(nn.Conv1d(16, 8, 3, **options))
        quantize_(model, {"0": qat(recipe)})
        x = torch.randn(3, 16, 20)
        y = model(x)
        y.sum().backward()
        quantize_(model, convert())
        assert torch.equal(model(x), y)


def test_scheduled() -> None:
    model = ConvNet()
    recipe = RECIPES["scheduled_qat"](RECIPES["int8_static_activation_int8_weight"](0.03), observer="moving_average")
    quantize_(model, {CONVS: recipe})
    model(X).sum().backward()
    model.eval()
    y = model(X).detach()
    quantize_(model, convert())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(X), y)


@pytest.mark.parametrize("mapping", list(MappingType))
@pytest.mark.parametrize("groups", [1, 4, 64])
def test_a_scale_for_each_image(mapping: MappingType, groups: int) -> None:
    """Trained with one scale per image, served with the same bits by the kernel for whole convolutions."""
    if mapping is MappingType.SYMMETRIC_NO_CLIPPING_ERR:
        pytest.skip("not of this recipe")
    torch.manual_seed(0)
    recipe = int8_dynamic_activation_int8_weight(mapping, act_granularity=PerAxis(0))
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, stride=2, groups=groups))
    x = X.clone().requires_grad_()
    quantize_(model, {"0": qat(recipe)})
    y = model(x)
    y.square().sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    assert x.grad.abs().sum() > 0
    broken = X.clone()
    broken[1, 3, 2, 2] = float("nan")
    trained_broken = model(broken).detach()
    quantize_(model, convert())
    with torch.no_grad(), record_kernels() as ran:
        served = model(X)
    assert ran[0] in ("conv:cpu_conv", "conv:image_conv")
    assert torch.equal(served, y.detach())
    assert torch.equal(served.isnan(), y.isnan())
    with torch.no_grad():
        served_broken = model(broken)
    assert torch.equal(served_broken.isnan(), trained_broken.isnan())
    assert served_broken[1].isnan().all()
    assert not served_broken[0].isnan().any()
    with compiled_library.use(None), torch.no_grad():
        assert torch.equal(model(X), served)
