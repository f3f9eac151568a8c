"""The defaults of the process, dtype and device: they change neither a number nor a place."""

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from qtorch import load_quantized, quantize_, save_quantized
from qtorch.dtypes import QuantizedTensor
from qtorch.model.install import PreparedModule
from qtorch.training import convert
from tests.attack.operations import Operation, add, inputs
from tests.attack.subject import FEW, Experts, K, Subject
from tests.movement.holding import through_file

Scope = Callable[[], AbstractContextManager[object]]


@contextlib.contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def numbers(subject: Subject, scope: Scope) -> dict[str, torch.Tensor]:
    """What weights give that are quantized, called, trained, saved and loaded in a scope."""
    torch.manual_seed(0)
    layer, other, (row, few, many) = subject.float_layer(), subject.float_layer(2), inputs()
    rate, found = torch.tensor(0.1), {}
    others = {
        "embedding": (torch.nn.Embedding(40, K), torch.arange(40)),
        "convolution": (torch.nn.Conv2d(32, 32, 3), many.view(2, 32, 8, 8)),
        "experts": (Experts(3, 32), few),
    }
    with scope():
        subject.quantize(layer)
        for number, x in enumerate((row, few, many) * 2):
            found[f"output {number}"] = layer(x)
        x = few.clone().requires_grad_()
        for step in range(2 if subject.trains else 1):
            y = found[f"output in step {step}"] = layer(x)
            y.square().mean().backward()
            with torch.no_grad():
                for name, parameter in layer.named_parameters():
                    if parameter.grad is not None:
                        found[f"gradient {step} of {name}"] = parameter.grad
                        parameter.sub_(parameter.grad * rate)
                        parameter.grad = None
        assert x.grad is not None
        found["gradient of x"] = x.grad
        again = copy.deepcopy(layer)
        again.load_state_dict(through_file(layer.state_dict()), assign=True)
        found["output of what was loaded"] = again(many)
        if subject.name in FEW:
            found["output of a graph"] = torch.compile(again, backend="aot_eager")(few)
        if subject.trains:
            quantize_(layer.eval(), convert())
        found["served"] = layer(many)
        if isinstance(layer.weight, QuantizedTensor) and not isinstance(layer, PreparedModule):
            found |= layer.weight.inner_tensors
            with tempfile.TemporaryDirectory() as folder:
                save_quantized(layer, Path(folder) / "layer.safetensors")
                found["served from a file"] = load_quantized(other, Path(folder) / "layer.safetensors")(many)
        for name, (module, x) in others.items():
            with contextlib.suppress(ValueError):  # not every recipe takes every kind of weight
                quantize_(torch.nn.ModuleDict({"part": module}), {r"part\.weight|part": subject.recipe})
                found[name] = module(x)
    return {name: tensor.detach() for name, tensor in found.items()}


def _are_the_same(scopes: list[Scope], subject: Subject) -> None:
    """What is computed in each scope, before anything is remembered of the process as it usually is, and without."""
    every = [numbers(subject, scope) for scope in scopes]
    wanted = numbers(subject, contextlib.nullcontext)
    for found in every:
        assert found.keys() == wanted.keys(), f"only one has {found.keys() ^ wanted.keys()}"
        for name, tensor in found.items():
            like = wanted[name]
            assert (tensor.dtype, tensor.device) == (like.dtype, like.device), f"{name}: {tensor.dtype} {tensor.device}"
            same_bits = torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, like)))
            assert same_bits, f"{name} has other numbers"


ROWS: dict[str, tuple[str, list[Scope]]] = {
    "another_default_dtype": (
        "`torch.set_default_dtype`: float64, float16, bfloat16",
        [functools.partial(_dtype, dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16)],
    ),
    "a_default_device": (
        '`torch.set_default_device("meta")`, `with torch.device("meta")`',
        [_device, lambda: torch.device("meta")],
    ),
}

for _name, (_title, _scopes) in ROWS.items():
    _run = functools.partial(_are_the_same, _scopes)
    add(_name, Operation("Defaults of the process", _title, _run, may_kill=True))
