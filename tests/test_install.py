"""Changes of a model are made whole or not at all, wherever an exception comes from."""

import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import qtorch.model.install as module_under_test
from qtorch import int8_weight_only
from qtorch.model.install import REMOVED, Change, all_or_nothing, install, keep_attributes, user_attributes


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


def interrupted(action: Callable[[], object], at: int) -> bool:
    """Run it with a KeyboardInterrupt at the line `at` of those of the module under test and of this file."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in (module_under_test.__file__, __file__):
            return None
        if event == "line":
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(old)
    return False


@pytest.mark.parametrize("act", [exchange, lambda m: install(changes(m))], ids=["all_or_nothing", "install"])
def test_interrupted_at_every_line(act: Callable[[nn.Sequential], None]) -> None:
    done = model()
    act(done)
    new = [part[:-1] for part in state(done)]
    outcomes = []
    for at in range(1, 200):
        m = model()
        before = state(m)
        if not interrupted(lambda m=m: act(m), at):
            break
        assert state(m) == before or [part[:-1] for part in state(m)] == new
        outcomes.append(state(m) == before)
    assert at > 10
    assert outcomes[0]


def test_user_attributes() -> None:
    old = nn.Parameter(torch.ones(4, 4))
    assert user_attributes(old) == {}
    old.tag = "mine"
    old.scale = old.plain = old.fast_linear = 3  # names that a quantized weight has itself
    new = nn.Parameter(int8_weight_only().apply(old.detach()), requires_grad=False)
    inner = new.inner_tensors
    assert keep_attributes(new, old) is new
    assert user_attributes(new) == {"tag": "mine"}
    assert all(new.inner_tensors[name] is tensor for name, tensor in inner.items())
    assert new.fast_linear is None
    assert vars(keep_attributes(nn.Parameter(torch.ones(1)), new)) == {"tag": "mine"}
