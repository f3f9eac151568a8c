"""Ways to the memory of a tensor: a quantized one has none of its shape, and says so, naming what to do instead."""

from __future__ import annotations

import functools
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from qtorch.dtypes import QuantizedTensor
from tests.attack.operations import Operation, Refused, add, outputs, same
from tests.attack.subject import Subject

GROUP = "Raw memory"
WORDS = r"save_quantized|dequantize|call F\.linear"


def _to_numpy(layer: nn.Linear) -> object:
    return layer.weight.detach().numpy()


def _from_dlpack(layer: nn.Linear) -> object:
    return torch.from_dlpack(layer.weight.detach())


def _apply(layer: nn.Linear) -> object:
    return layer.weight.detach().apply_(lambda value: value + 1)


def _map(layer: nn.Linear) -> object:
    return layer.weight.detach().map_(torch.ones(layer.weight.shape), lambda a, b: a + b)


def _untyped_storage(layer: nn.Linear) -> object:
    return layer.weight.untyped_storage().data_ptr()


def _data_ptr(layer: nn.Linear) -> object:
    return layer.weight.data_ptr()


def _tolist(layer: nn.Linear) -> object:
    return layer.weight.detach().tolist()


def _item(layer: nn.Linear) -> object:
    return layer.weight.detach()[0, 0].item()


def _jit_script(layer: nn.Linear) -> object:
    return torch.jit.script(layer)(torch.ones(1, layer.in_features))


def _jit_trace(layer: nn.Linear) -> object:
    return torch.jit.trace(layer, torch.ones(1, layer.in_features))(torch.ones(1, layer.in_features))


def _save_file(layer: nn.Linear) -> object:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(layer.state_dict()), Path(folder) / "model.safetensors")
    return None


WAYS: dict[str, Callable[[nn.Linear], object]] = {
    "`torch.from_dlpack(p)`": _from_dlpack,
    "`p.numpy()`": _to_numpy,
    "`p.apply_(f)`": _apply,
    "`p.map_(x, f)`": _map,
    "`p.untyped_storage()`": _untyped_storage,
    "`p.data_ptr()`": _data_ptr,
    "`p.tolist()`": _tolist,
    "`p[0, 0].item()`": _item,
    "`torch.jit.script`": _jit_script,
    "`torch.jit.trace`": _jit_trace,
    "`safetensors.torch.save_file`": _save_file,
}


def _ask(way: Callable[[nn.Linear], object], subject: Subject) -> None:
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


def _is_right(layer: nn.Linear, got: object) -> None:
    """Numbers, if they are given, are those of the weight."""
    assert isinstance(layer.weight, QuantizedTensor)
    values = layer.weight.detach().dequantize()
    if isinstance(got, list | float):
        assert torch.allclose(torch.tensor(got).float(), values if isinstance(got, list) else values[0, 0])
        return
    assert isinstance(got, Tensor), f"it gives {str(got)[:40]}"
    assert got.shape == values.shape or got.shape == (1, layer.out_features)
    if got.shape == values.shape:
        assert torch.allclose(got.float(), values), "it gives other numbers"
    else:
        same([got], [layer(torch.ones(1, layer.in_features)).detach()], "it computes something else")


for _title, _way in WAYS.items():
    add(_way.__name__.strip("_"), Operation(GROUP, _title, functools.partial(_ask, _way), may_kill=True))
