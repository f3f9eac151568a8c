"""Changes of a model are made whole or not at all, wherever an exception comes from."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import qtorch.model.install as module_under_test
from qtorch.model.install import REMOVED, Change, all_or_nothing, install
from tests.quantize_model import interrupted


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


def test_install() -> None:
    m = model()
    install(changes(m))
    assert bool((m[0].weight == 0).all())
    assert list(m[0]._parameters) == ["weight"]
    assert m[1].running_mean.tolist() == [1, 1, 1]
    assert m[2].remark == "new"
    assert list(m[2]._parameters) == ["weight", "bias", "scale"]


def test_a_change_that_fails_takes_those_before_it_back() -> None:
    m = model()
    before = state(m)
    with pytest.raises(KeyError):
        install([*changes(m), Change(m[0]._parameters, "none", REMOVED)])
    assert state(m) == before


def test_tables_that_are_ordered_dicts() -> None:
    m = model()
    m[0]._parameters = OrderedDict(m[0]._parameters)
    before = state(m)
    with pytest.raises(KeyError):
        install([*changes(m), Change(m[0]._parameters, "none", REMOVED)])
    assert state(m) == before
    install(changes(m))
    assert list(m[0]._parameters) == ["weight"]


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
        if not interrupted(lambda m=m: act(m), at, (module_under_test.__file__, __file__).__contains__):
            break
        assert state(m) == before or [part[:-1] for part in state(m)] == new
        outcomes.append(state(m) == before)
    assert at > 10
    assert outcomes[0]
