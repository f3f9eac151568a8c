"""quantize_, convert and dequantize_ change all or nothing, and go on where they were interrupted between chunks."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from qtorch import (
    dequantize_,
    int4_weight_only,
    int8_static_activation_int8_weight,
    int8_weight_only,
    lut_weight_only,
    quantize_,
    quantize_api,
)
from qtorch.recipes.base import Recipe
from qtorch.training import (
    bitnet_training,
    convert,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
    lora_qat,
    lsq,
    qat,
)

SERVING: list[Recipe] = [
    int8_weight_only(),
    int4_weight_only(group_size=32),
    lut_weight_only(3),
    int8_static_activation_int8_weight(0.1),
]
TRAINING: list[Recipe] = [
    int8_mixed_precision_training(),
    int8_weight_only_quantized_training(),
    qat(int8_weight_only()),
    qat(int8_weight_only(), start_step=3),
    bitnet_training(),
    lsq(edge_bits=8),
    lora_qat(int8_weight_only(), rank=4),
]
every_recipe = pytest.mark.parametrize("recipe", [*SERVING, *TRAINING], ids=str)


def model() -> nn.Sequential:
    made = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    for layer in made:
        layer.weight.tag = "mine"
    return made


def kinds(made: nn.Sequential) -> list[tuple[type, type]]:
    return [(type(layer), type(layer.weight)) for layer in made]


def contents(made: nn.Sequential) -> list[object]:
    return [(type(m), dict(vars(m)), dict(m._parameters), dict(m._buffers), dict(m._modules)) for m in made.modules()]


class Interrupted:
    """A function that is interrupted at a call."""

    def __init__(self, function: Callable[..., object], at: int) -> None:
        self.function, self.left = function, at

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)


def interrupt(patch: pytest.MonkeyPatch, owner: object, name: str, at: int) -> None:
    patch.setattr(owner, name, Interrupted(getattr(owner, name), at))


@pytest.mark.parametrize(
    ("step", "at"), [("quantized_row", 3), ("show_quantized", 1), ("show_quantized", 4)], ids=["made", "first", "last"]
)
@every_recipe
def test_interrupted(recipe: Recipe, step: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While weights are made, and while they are installed."""
    made = model()
    before = contents(made)
    with monkeypatch.context() as patch:
        interrupt(patch, quantize_api, step, at)
        with pytest.raises(KeyboardInterrupt):
            quantize_(made, recipe)
    assert contents(made) == before
    assert len(quantize_(made, recipe).quantized) == 4


@every_recipe
def test_goes_on_after_what_is_done(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one weight each: three are made before the interrupt, two of them installed."""
    made, whole, x = model(), model(), torch.randn(3, 64)
    whole.load_state_dict(made.state_dict())
    monkeypatch.setattr(quantize_api, "CHUNK_BYTES", 1)
    with monkeypatch.context() as patch:
        interrupt(patch, quantize_api, "quantized_row", 3)
        with pytest.raises(KeyboardInterrupt):
            quantize_(made, recipe)
    started = kinds(made)
    assert started[1] != started[2] == (nn.Linear, nn.Parameter)
    assert [layer.name for layer in quantize_(made, recipe).quantized] == ["2.weight", "3.weight"]
    quantize_(whole, recipe)
    assert kinds(made) == kinds(whole)
    assert all(layer.weight.tag == "mine" for layer in made)
    if recipe in TRAINING:
        made.train(), whole.train()
        made(x), whole(x)
        quantize_(made, convert())
        quantize_(whole, convert())
    if recipe != TRAINING[-1]:  # its adapters start at random
        assert torch.equal(made(x), whole(x))
    assert not quantize_(made, recipe).quantized if recipe in SERVING else True


@pytest.mark.parametrize("recipe", TRAINING, ids=str)
def test_interrupted_convert(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = model(), torch.randn(3, 64)
    quantize_(made, recipe)
    made.train()
    made(x)
    made.eval()
    before, y = contents(made), made(x)
    for at in (1, 3):
        with monkeypatch.context() as patch:
            interrupt(patch, quantize_api, "show_quantized", at)
            with pytest.raises(KeyboardInterrupt):
                quantize_(made, convert())
        assert contents(made) == before
        assert torch.equal(made(x), y)
    quantize_(made, convert())
    assert all(type(layer) is nn.Linear and layer.weight.tag == "mine" for layer in made)


def test_interrupted_dequantize(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    quantize_(made, int8_weight_only())
    before = contents(made)
    with monkeypatch.context() as patch:
        interrupt(patch, quantize_api, "show_quantized", 3)
        with pytest.raises(KeyboardInterrupt):
            dequantize_(made)
    assert contents(made) == before
    dequantize_(made)
    assert all(type(layer.weight) is nn.Parameter and layer.weight.tag == "mine" for layer in made)


def test_another_recipe_does_not_go_on() -> None:
    made = model()
    quantize_(made, int8_weight_only())
    with pytest.raises(ValueError, match="is already quantized"):
        quantize_(made, int4_weight_only(group_size=32))
    quantize_(static := model(), int8_static_activation_int8_weight(0.1))
    with pytest.raises(ValueError, match="is already quantized"):
        quantize_(static, int8_static_activation_int8_weight(0.2))
