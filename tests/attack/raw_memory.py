"""Ways to the memory of a tensor: a quantized one has none of its shape, and says so, naming what to do instead."""

import functools
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from qtorch.dtypes import QuantizedTensor
from tests.attack.operations import Operation, Refused, add, outputs, same
from tests.attack.subject import Subject

GROUP = "Raw memory"
WORDS = r"save_quantized|dequantize|call F\.linear"


def _save_file(layer: torch.nn.Linear) -> object:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(layer.state_dict()), Path(folder) / "model.safetensors")
    return None


def _ones(layer: torch.nn.Linear) -> torch.Tensor:
    return torch.ones(1, layer.in_features)


WAYS: dict[str, tuple[str, Callable[[torch.nn.Linear], object]]] = {
    "from_dlpack": ("`torch.from_dlpack(p)`", lambda layer: torch.from_dlpack(layer.weight.detach())),
    "to_numpy": ("`p.numpy()`", lambda layer: layer.weight.detach().numpy()),
    "apply": ("`p.apply_(f)`", lambda layer: layer.weight.detach().apply_(lambda value: value + 1)),
    "map": (
        "`p.map_(x, f)`",
        lambda layer: layer.weight.detach().map_(torch.ones(layer.weight.shape), lambda a, b: a + b),
    ),
    "untyped_storage": ("`p.untyped_storage()`", lambda layer: layer.weight.untyped_storage().data_ptr()),
    "data_ptr": ("`p.data_ptr()`", lambda layer: layer.weight.data_ptr()),
    "tolist": ("`p.tolist()`", lambda layer: layer.weight.detach().tolist()),
    "item": ("`p[0, 0].item()`", lambda layer: layer.weight.detach()[0, 0].item()),
    "jit_script": ("`torch.jit.script`", lambda layer: torch.jit.script(layer)(_ones(layer))),
    "jit_trace": ("`torch.jit.trace`", lambda layer: torch.jit.trace(layer, _ones(layer))(_ones(layer))),
    "save_file": ("`safetensors.torch.save_file`", _save_file),
}


def _ask(way: Callable[[torch.nn.Linear], object], subject: Subject) -> None:
    layer = subject.layer().eval()
    before = outputs(layer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = way(layer)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        if isinstance(layer.weight, QuantizedTensor) and not re.search(WORDS, str(error)):
            raise AssertionError(f"{type(error).__name__} that names no way out: {str(error)[:200]}") from error
        same(outputs(layer), before, "after the error the layer has changed", 0)
        raise Refused(str(error)) from error
    if not isinstance(layer.weight, QuantizedTensor):
        return
    _is_right(layer, got)


def _is_right(layer: torch.nn.Linear, got: object) -> None:
    """Numbers, if they are given, are those of the weight."""
    assert isinstance(layer.weight, QuantizedTensor)
    values = layer.weight.detach().dequantize()
    if isinstance(got, list | float):
        assert torch.allclose(torch.tensor(got).float(), values if isinstance(got, list) else values[0, 0])
        return
    assert isinstance(got, torch.Tensor), f"it gives {str(got)[:40]}"
    assert got.shape == values.shape or got.shape == (1, layer.out_features)
    if got.shape == values.shape:
        assert torch.allclose(got.float(), values), "it gives other numbers"
    else:
        same([got], [layer(torch.ones(1, layer.in_features)).detach()], "it computes something else")


for _name, (_title, _way) in WAYS.items():
    add(_name, Operation(GROUP, _title, functools.partial(_ask, _way), may_kill=True))
