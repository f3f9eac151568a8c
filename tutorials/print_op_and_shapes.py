"""Every operation of a model with the shapes of its operands: in floating point and quantized.

    python -m tutorials.print_op_and_shapes
    python -m tutorials.print_op_and_shapes --recipe int8_dynamic_activation_int8_weight --train

Three levels are printed, indented below each other:

    F.linear      what the model calls: a torch function. A quantized weight takes the call over at this level.
      aten.mm     what torch runs below autograd: an operator. Its operands are plain tensors.
      > kernel    what qtorch runs: a kernel of its registry, or an operator that is opaque to compilers.

So one sees where a quantized layer leaves torch's path, which operators remain, and which tensors it makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import qtorch
from qtorch.dtypes import QuantizedTensor
from qtorch.kernels import record_kernels

Say = Callable[[str], None]

SHORT_NAMES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}


def describe(value: Any) -> str:
    """A tensor as its dtype and shape: ``fp32[3, 64]``; a quantized one with the type of its codes and its
    layout."""
    shape = list(value.shape)
    if isinstance(value, QuantizedTensor) and not value.trains:
        return f"{value.scheme.weight.dtype}{shape} ({value.scheme.layout.name})"
    name = SHORT_NAMES.get(str(value.dtype), str(value.dtype).removeprefix("torch."))
    return f"{name}{shape}{' (in training)' if isinstance(value, QuantizedTensor) else ''}"


def operands(*values: Any) -> str:
    return ", ".join(describe(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class PrintFunctions(TorchFunctionMode):
    """Torch functions as a model calls them; those of a tensor's attributes are left out."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self.say = say

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        if not name.endswith(("__get__", "__set__")):
            short = name.replace("torch.nn.functional.", "F.").removeprefix("torch.")
            self.say(f"{short}({operands(args, kwargs)})")
        return func(*args, **(kwargs or {}))


class PrintOperators(TorchDispatchMode):
    """Operators as torch runs them, with their results."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self.say = say

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.say(f"  {func}({operands(args, kwargs)}) -> {operands(result)}")
        return result


@contextmanager
def print_op_and_shapes(say: Say = print) -> Iterator[None]:
    """Print, or give to `say`, what runs inside the ``with`` block."""
    printed = 0

    def say_in_order(line: str) -> None:
        # Kernels are recorded, not printed: print those that have begun since the last line.
        nonlocal printed
        for kernel in ran[printed:]:
            say(f"    > {kernel}")
        printed = len(ran)
        say(line)

    with record_kernels() as ran:
        with PrintFunctions(say_in_order), PrintOperators(say_in_order):
            yield
        for kernel in ran[printed:]:
            say(f"    > {kernel}")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))


def show(name: str, recipe: Any, train: bool, say: Say) -> None:
    say(f"--- {name}{', forward and backward' if train else ''}")
    net, x = model(), torch.randn(3, 64)
    if recipe is not None:
        qtorch.quantize_(net, recipe)
    if not train:
        net.requires_grad_(False)
    net(x)  # the first call chooses kernels and prepares them
    with print_op_and_shapes(say):
        y = net(x)
        if train:
            y.square().sum().backward()


def main(arguments: list[str] | None = None, say: Say = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="int8_weight_only", help="name of a recipe that needs no arguments")
    parser.add_argument("--train", action="store_true", help="with the backward, and a recipe for training beside it")
    given = parser.parse_args(arguments)
    show("float", None, given.train, say)
    show(given.recipe, getattr(qtorch, given.recipe)(), False, say)
    if given.train:
        show("int8_mixed_precision_training", qtorch.training.int8_mixed_precision_training(), True, say)


if __name__ == "__main__":
    main()
