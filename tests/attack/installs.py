"""Installs that are interrupted at any line: the model is wholly old or can be gone on with, and every module runs."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qtorch
from qtorch import dequantize_, load_quantized, quantize_, save_quantized
from qtorch.dtypes import QuantizedTensor
from qtorch.training import convert
from tests.attack.operations import inputs, operation
from tests.attack.subject import FEW, K, Subject
from tests.quantize_model import lines_run

GROUP = "Interruptions"

FILES = (
    "quantize_api", "model/install", "checkpoint/save_load", "training/recipes/base", "training/recipes/scheduled",
    *(f"training/quantization_aware/{name}" for name in ("layers", "fold_batch_norm", "recipes/lora_qat")),
    *(f"training/quantization_aware/recipes/{name}" for name in ("base", "lsq", "qat")),
)  # fmt: skip
PATHS = {str(Path(qtorch.__file__).parent / f"{name}.py") for name in FILES}
assert all(Path(path).exists() for path in PATHS)
"""Where models are changed: an interruption anywhere else is one at the line that called."""

EACH, SAMPLE = 60, 6
"""Interruptions, evenly apart, of a recipe that is among the few, and of one that is not."""


def _changes_models(file: str) -> bool:
    return file in PATHS


def _lines(call: Callable[[], Any], subject: Subject) -> list[int]:
    total = lines_run(call, _changes_models)
    assert total is not None
    assert total > 10, "nothing was traced"
    numbers = list(range(1, total + 1))
    return numbers[:: max(1, total // (EACH if subject.name in FEW else SAMPLE))]


def _model(subject: Subject) -> nn.Sequential:
    first, second = subject.float_layer(), nn.Linear(subject.float_layer().out_features, 32)
    return nn.Sequential(first, nn.Tanh(), second)


def _runs(model: nn.Module, when: str) -> None:
    x = inputs()[1]
    for layer in (model[0], nn.Sequential(model[0], model[1], model[2])):
        try:
            with torch.no_grad():
                y = layer(x)
        except Exception as error:
            raise AssertionError(f"{when}: a layer no longer runs: {type(error).__name__}: {error}") from error
        assert bool(y.isfinite().all()), f"{when}: not finite"
    repr(model)


def _state(model: nn.Module) -> list[str]:
    return [f"{type(module).__name__} {type(getattr(module, 'weight', None)).__name__}" for module in model]


def _attack(subject: Subject, make: Callable[[], nn.Module], change: Callable[[nn.Module], Any]) -> None:
    """Interrupt ``change(make())`` at lines all over it; then every module runs, and the same call finishes."""
    done = make()
    change(done)
    wanted = _state(done)
    for number in _lines(lambda: change(make()), subject):
        model = make()
        old = _state(model)
        lines_run(lambda model=model: change(model), _changes_models, number)
        when = f"interrupted at line {number}"
        states = _state(model)
        assert all(state in (a, b) for state, a, b in zip(states, old, wanted)), f"{when}: a layer is half installed"
        _runs(model, when)
        if states != wanted:
            try:
                change(model)
            except (ValueError, TypeError, RuntimeError, AttributeError) as error:
                raise AssertionError(f"{when}: the same call does not finish: {error}") from error
        assert _state(model) == wanted, f"{when}: the same call does not finish the work"
        _runs(model, f"{when}, and resumed")


@operation(GROUP, "`quantize_`")
def interrupted_quantize(subject: Subject) -> None:
    _attack(subject, lambda: _model(subject), lambda model: quantize_(model, subject.recipe))


@operation(GROUP, "`quantize_(model, convert())`")
def interrupted_convert(subject: Subject) -> None:
    if not subject.trains:
        return
    trained = subject.quantize(_model(subject))
    _attack(subject, lambda: copy.deepcopy(trained), lambda model: quantize_(model, convert()))


@operation(GROUP, "`dequantize_`")
def interrupted_dequantize(subject: Subject) -> None:
    quantized = subject.quantize(_model(subject))
    if any(isinstance(p, QuantizedTensor) for p in quantized.parameters()):
        _attack(subject, lambda: copy.deepcopy(quantized), lambda model: dequantize_(model))


@operation(GROUP, "`load_quantized`")
def interrupted_load(subject: Subject) -> None:
    if subject.trains:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_quantized(subject.quantize(_model(subject)), path)
        _attack(subject, lambda: _model(subject), lambda model: load_quantized(model, path))


@operation(GROUP, "no memory for the third weight")
def out_of_memory(subject: Subject) -> None:
    """The model is as it was, or the same call goes on."""
    made = 0
    cls = type(subject.recipe.placed(1, 6))  # not at an edge
    original = cls.make

    def make(self: Any, *args: Any) -> Any:
        nonlocal made
        made += 1
        if made == 3:
            raise MemoryError("no memory")
        return original(self, *args)

    model = nn.Sequential(*(nn.Linear(K, K) for _ in range(6)))
    cls.make = make  # type: ignore[method-assign]
    try:
        quantize_(model, subject.recipe)
    except MemoryError:
        pass
    else:
        raise AssertionError("no error")
    finally:
        cls.make = original  # type: ignore[method-assign]
    with torch.no_grad():
        model(torch.randn(64, K))
    quantize_(model, subject.recipe)
    names = {(type(layer).__name__, type(layer.weight).__name__) for layer in model}
    assert len(names) == 1, f"after the same call: {names}"
    with torch.no_grad():
        model(torch.randn(64, K))


@operation(GROUP, "`quantize_` of a quantized model", refuses=r"already|in training|nothing to quantize")
def quantize_again(subject: Subject) -> None:
    """It says so and changes nothing, or there is nothing left to do."""
    model = subject.quantize(_model(subject))
    before = list(model.parameters())
    try:
        quantize_(model, subject.recipe)
    finally:
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True)), "weights have changed"
