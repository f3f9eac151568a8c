"""quantize_, convert and dequantize_ change all or nothing, and go on where they were interrupted between chunks."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import qtorch
from qtorch import training
from qtorch.recipes.base import Recipe
from tests.refusals import refuses

SERVING: list[Recipe] = [
    qtorch.int8_weight_only(),
    qtorch.int4_weight_only(group_size=32),
    qtorch.lut_weight_only(3),
    qtorch.int8_static_activation_int8_weight(0.1),
]
TRAINING: list[Recipe] = [
    training.int8_mixed_precision_training(),
    training.int8_weight_only_quantized_training(),
    training.qat(qtorch.int8_weight_only()),
    training.qat(qtorch.int8_weight_only(), start_step=3),
    training.bitnet_training(),
    training.lsq(edge_bits=8),
    training.lora_qat(qtorch.int8_weight_only(), rank=4),
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
        interrupt(patch, qtorch.quantize_api, step, at)
        with pytest.raises(KeyboardInterrupt):
            qtorch.quantize_(made, recipe)
    assert contents(made) == before
    assert len(qtorch.quantize_(made, recipe).quantized) == 4


@every_recipe
def test_goes_on_after_what_is_done(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one weight each: three are made before the interrupt, two of them installed."""
    made, whole, x = model(), model(), torch.randn(3, 64)
    whole.load_state_dict(made.state_dict())
    monkeypatch.setattr(qtorch.quantize_api, "CHUNK_BYTES", 1)
    with monkeypatch.context() as patch:
        interrupt(patch, qtorch.quantize_api, "quantized_row", 3)
        with pytest.raises(KeyboardInterrupt):
            qtorch.quantize_(made, recipe)
    started = kinds(made)
    assert started[1] != started[2] == (nn.Linear, nn.Parameter)
    assert [layer.name for layer in qtorch.quantize_(made, recipe).quantized] == ["2.weight", "3.weight"]
    qtorch.quantize_(whole, recipe)
    assert kinds(made) == kinds(whole)
    assert all(layer.weight.tag == "mine" for layer in made)
    if recipe in TRAINING:
        made.train(), whole.train()
        made(x), whole(x)
        qtorch.quantize_(made, training.convert())
        qtorch.quantize_(whole, training.convert())
    if recipe != TRAINING[-1]:  # its adapters start at random
        assert torch.equal(made(x), whole(x))
    assert not qtorch.quantize_(made, recipe).quantized if recipe in SERVING else True


@pytest.mark.parametrize("recipe", TRAINING, ids=str)
def test_interrupted_convert(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = model(), torch.randn(3, 64)
    qtorch.quantize_(made, recipe)
    made.train()
    made(x)
    made.eval()
    before, y = contents(made), made(x)
    for at in (1, 3):
        with monkeypatch.context() as patch:
            interrupt(patch, qtorch.quantize_api, "show_quantized", at)
            with pytest.raises(KeyboardInterrupt):
                qtorch.quantize_(made, training.convert())
        assert contents(made) == before
        assert torch.equal(made(x), y)
    qtorch.quantize_(made, training.convert())
    assert all(type(layer) is nn.Linear and layer.weight.tag == "mine" for layer in made)


def test_another_recipe_does_not_go_on() -> None:
    made = model()
    qtorch.quantize_(made, qtorch.int8_weight_only())
    refuses("is already quantized", lambda: qtorch.quantize_(made, qtorch.int4_weight_only(group_size=32)))
    qtorch.quantize_(static := model(), qtorch.int8_static_activation_int8_weight(0.1))
    refuses("is already quantized", lambda: qtorch.quantize_(static, qtorch.int8_static_activation_int8_weight(0.2)))
