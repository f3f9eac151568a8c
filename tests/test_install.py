"""Changes of a model are made whole or not at all, also where they are interrupted."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import qtorch
import qtorch.model.install as module_under_test
from qtorch import training
from qtorch.model.install import REMOVED, Change, all_or_nothing, install
from qtorch.recipes.base import Recipe
from tests.quantize_model import lines_run
from tests.refusals import refuses


class Other(nn.Linear):
    pass


def state(model: nn.Module) -> list[Any]:
    """Everything that can be told apart, with the order of what is in tables."""
    parts = []
    for name, module in model.named_modules():
        tables = [(key, list(value)) for key, value in vars(module).items() if isinstance(value, dict)]
        objects = [(key, id(value)) for key, value in [*module._parameters.items(), *module._buffers.items()]]
        parts.append((name, type(module), list(vars(module)), tables, objects))
    return parts


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def changes(m: nn.Sequential) -> list[Change]:
    return [
        Change(m[0]._parameters, "weight", nn.Parameter(torch.zeros(3, 2))),
        Change(m[0]._parameters, "bias", REMOVED),
        Change(m[1]._buffers, "running_mean", torch.ones(3)),
        Change(m[2]._parameters, "scale", nn.Parameter(torch.ones(1))),
        Change(vars(m[2]), "remark", "new"),
    ]


def test_install_ordered_tables_and_other_recipes() -> None:
    m = model()
    install(changes(m))
    assert bool((m[0].weight == 0).all())
    assert list(m[0]._parameters) == ["weight"]
    assert m[1].running_mean.tolist() == [1, 1, 1]
    assert m[2].remark == "new"
    assert list(m[2]._parameters) == ["weight", "bias", "scale"]
    m = model()
    before = state(m)
    with pytest.raises(KeyError):
        install([*changes(m), Change(m[0]._parameters, "none", REMOVED)])
    assert state(m) == before
    m = model()
    m[0]._parameters = OrderedDict(m[0]._parameters)
    before = state(m)
    with pytest.raises(KeyError):
        install([*changes(m), Change(m[0]._parameters, "none", REMOVED)])
    assert state(m) == before
    install(changes(m))
    assert list(m[0]._parameters) == ["weight"]
    made = model_of_all()
    qtorch.quantize_(made, qtorch.int8_weight_only())
    refuses("is already quantized", lambda: qtorch.quantize_(made, qtorch.int4_weight_only(group_size=32)))
    qtorch.quantize_(static := model_of_all(), qtorch.int8_static_activation_int8_weight(0.1))
    refuses("is already quantized", lambda: qtorch.quantize_(static, qtorch.int8_static_activation_int8_weight(0.2)))


def exchange(m: nn.Sequential) -> None:
    """As recipes that change modules do it."""
    with all_or_nothing([m, *m]):
        m[0].__class__ = Other
        m[0].quantizer = nn.Linear(1, 1)
        m[0].remark = "new"
        del m[0].bias
        m[2].weight = nn.Parameter(torch.zeros(2, 3))
        m[2].register_buffer("steps", torch.zeros(1), persistent=False)
        m[1] = nn.Identity()


@pytest.mark.parametrize("act", [exchange, lambda m: install(changes(m))], ids=["all_or_nothing", "install"])
def test_interrupted_at_every_line(act: Callable[[nn.Sequential], None]) -> None:
    done = model()
    act(done)
    new = [part[:-1] for part in state(done)]
    outcomes = []
    for at in range(1, 200):
        m = model()
        before = state(m)
        if lines_run(lambda m=m: act(m), (module_under_test.__file__, __file__).__contains__, at) is not None:
            break
        assert state(m) == before or [part[:-1] for part in state(m)] == new
        outcomes.append(state(m) == before)
    assert at > 10
    assert outcomes[0]


SERVING: list[Recipe] = [
    qtorch.int8_weight_only(), qtorch.int4_weight_only(group_size=32), qtorch.lut_weight_only(3),
    qtorch.int8_static_activation_int8_weight(0.1),
]  # fmt: skip
TRAINING: list[Recipe] = [
    training.int8_mixed_precision_training(), training.int8_weight_only_quantized_training(),
    training.qat(qtorch.int8_weight_only()), training.qat(qtorch.int8_weight_only(), start_step=3),
    training.bitnet_training(), training.lsq(edge_bits=8), training.lora_qat(qtorch.int8_weight_only(), rank=4),
]  # fmt: skip
every_recipe = pytest.mark.parametrize("recipe", [*SERVING, *TRAINING], ids=str)


def model_of_all() -> nn.Sequential:
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
    made = model_of_all()
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
    made, whole, x = model_of_all(), model_of_all(), torch.randn(3, 64)
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
    made, x = model_of_all(), torch.randn(3, 64)
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
