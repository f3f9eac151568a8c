"""From its second call on, a convolution runs what the first one prepared: the same bits; what changes is seen."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from qtorch import PerAxis, quantize_
from qtorch.dtypes import linear
from tests.kernels.cpu.builds import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY

RECIPES = {
    "weight-only": qtorch.int8_weight_only(),
    "dynamic": qtorch.int8_dynamic_activation_int8_weight(act_granularity=PerAxis(0)),
    "static": qtorch.int8_static_activation_int8_weight(0.04),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def layer(name: str, ndim: int = 2, groups: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    conv = (nn.Conv1d, nn.Conv2d)[ndim - 1](8, 16, 3, padding=1, groups=groups, dtype=dtype).requires_grad_(False)
    quantize_(conv, {"weight": RECIPES[name]})
    return conv


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each convolution that looks its kernel up."""
    names, find = [], linear.find_kernel
    monkeypatch.setattr(linear, "find_kernel", lambda op, *args: names.append(op) or find(op, *args))
    return names


@every_recipe
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_call_gives_the_bits_of_the_first(
    name: str, groups: int, ndim: int, dtype: torch.dtype, looked_up: list[str]
) -> None:
    conv = layer(name, ndim, groups, dtype)
    for images, last in ((1, False), (3, False), (2, True)):
        x = torch.randn(images, 8, *(9, 7)[:ndim], dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last) if last and ndim == 2 else x
        first = conv(x)
        looked_up.clear()
        second = conv(x)
        prepared = name != "weight-only" or dtype is torch.float32 or groups == 8
        assert looked_up == ([] if prepared else ["conv"])
        assert torch.equal(first, second)
        assert (first.dtype, first.stride()) == (second.dtype, second.stride())


@every_recipe
def test_images_of_one_pixel_and_one_feature(name: str, looked_up: list[str]) -> None:
    for features, size in ((16, 3), (1, 5), (1, 3)):
        conv = nn.Conv2d(8, features, 3).requires_grad_(False)
        quantize_(conv, {"weight": RECIPES[name]})
        x = torch.randn(2, 8, size, size).contiguous(memory_format=torch.channels_last)
        wanted = functional.conv2d(x, conv.weight.dequantize(), conv.bias)
        for _ in range(2):
            assert qtorch.compute_error(wanted, conv(x)) > 20
            assert qtorch.compute_error(wanted, conv(x.contiguous())) > 20


@every_recipe
@pytest.mark.parametrize("groups", [1, 8])
def test_what_changes_is_seen(name: str, groups: int, looked_up: list[str]) -> None:
    conv, x = layer(name, groups=groups), torch.randn(2, 8, 6, 6)
    conv(x), conv(x)
    looked_up.clear()

    def check(changed: nn.Module, x: Tensor = x) -> None:
        fresh = copy.deepcopy(changed)
        assert torch.equal(changed(x), fresh(x))

    changes = [
        lambda: conv.bias.add_(1),  # the bias is read on each call
        lambda: conv.weight.copy_(torch.randn_like(conv.weight.dequantize())),
        lambda: conv.weight.scale.mul_(2),
        lambda: conv.weight.qdata.share_memory_(),
        lambda: conv.weight.act_scale.mul_(3) if name == "static" else None,
        lambda: setattr(conv, "weight", nn.Parameter(layer(name, groups=groups).weight, False)),
        lambda: setattr(conv, "bias", None),
    ]
    for change in changes:
        change()
        check(conv)
    check(conv, torch.randn(2, 8, 7, 6))
    check(conv, x[:, :, ::2])
    assert looked_up


@every_recipe
@pytest.mark.parametrize("groups", [1, 8])
def test_other_calls_take_the_full_path(name: str, groups: int, looked_up: list[str]) -> None:
    conv, x = layer(name, groups=groups), torch.randn(2, 8, 6, 6)
    y = conv(x)
    looked_up.clear()
    sizes = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": groups}
    assert torch.equal(functional.conv2d(x, conv.weight, conv.bias, **sizes), y)
    assert torch.equal(functional.conv2d(x, conv.weight, conv.bias, padding="same", groups=groups), y)
    grown = x.clone().requires_grad_()
    conv(grown).sum().backward()
    assert grown.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(x).dtype == torch.bfloat16
    assert len(looked_up) >= 4
    for wrong in (x.bfloat16(), x.double(), x[:, :4], x.to("meta")):
        with pytest.raises((ValueError, TypeError)):
            conv(wrong)
    with pytest.raises((ValueError, TypeError)):
        functional.conv1d(x, conv.weight, conv.bias, (1,), (1,), (1,), groups)


@every_recipe
def test_a_nan_is_seen(name: str) -> None:
    conv, x = layer(name), torch.randn(2, 8, 6, 6)
    first = conv(x)
    x[1, 0, 0, 0] = torch.nan
    second = conv(x)
    assert torch.equal(first[0], second[0])
    assert second[1].isnan().any()


@every_recipe
def test_copies_have_none_of_it(name: str) -> None:
    conv, x = layer(name), torch.randn(2, 8, 6, 6)
    conv(x)
    assert conv.weight.fast_conv is not None
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert other.weight.fast_conv is None
        assert torch.equal(other(x), conv(x))
    assert "fast_conv" not in conv.weight._extra_state()
