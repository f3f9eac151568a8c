"""What the tensor subclass costs a layer: `F.linear` with a quantized weight against the same kernel on plain tensors.

The layer is small (64 x 64, one row), so that nearly all of its time is overhead. Times are microseconds a call,
medians of interleaved turns. `python -m benchmarks.bench_dispatch [--save]`

The second table is of the compiled kernels: the layer eager and in a compiled graph, and the operator that the graph
calls, in C++ and in Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import qtorch
from benchmarks.common import interleaved_medians, machine, save
from qtorch.dtypes import AffineQuantizedTensor
from qtorch.kernels import int_matmul, quantize_int8_rowwise
from qtorch.kernels.cpu import compiled_library, operators
from qtorch.kernels.ops.int8_grouped_mm import int8_grouped_mm
from qtorch.kernels.ops.weight_only_mm import weight_only_mm
from qtorch.quantize_api import WeightRecipe

SIZE = 64


def raw_call(x: Tensor, weight: AffineQuantizedTensor, bias: Tensor) -> Callable[[], Tensor]:
    """The layer written out on plain tensors, with the kernel that the registry chooses."""
    codes, scale, zero_point = weight.plain()
    spec, activation = weight.scheme.weight, weight.scheme.activation
    low, high = spec.code_range
    if activation is None:
        name, domain = spec.dtype.name, spec.zero_point_domain.name
        return lambda: weight_only_mm(x, codes, scale, zero_point, name, float(low), float(high), domain) + bias
    if scale.shape[1] == 1:

        def one_product() -> Tensor:
            xq, xs = quantize_int8_rowwise(x)
            return int_matmul(xq, codes.t()).float() * scale.t() * xs + bias

        return one_product

    def by_group() -> Tensor:
        xs, xz = activation.choose_qparams(x)
        return int8_grouped_mm(activation.quantize(x, xs, xz), xs, xz, codes, scale, zero_point, x.dtype) + bias

    return by_group


def measure(recipe: WeightRecipe) -> dict[str, float | str]:
    """One row of the table."""
    weight, bias, x = torch.randn(SIZE, SIZE), torch.randn(SIZE), torch.randn(1, SIZE)
    quantized = torch.nn.Parameter(recipe.apply(weight), requires_grad=False)
    trained = x.clone().requires_grad_()

    def with_gradient() -> Tensor:
        with torch.enable_grad():
            return functional.linear(trained, quantized, bias)

    def float_with_gradient() -> Tensor:
        with torch.enable_grad():
            return functional.linear(trained, weight, bias)

    with torch.no_grad():
        times = interleaved_medians(
            {
                "float": lambda: functional.linear(x, weight, bias),
                "float, gradient": float_with_gradient,
                "kernel": raw_call(x, quantized, bias),
                "layer": lambda: functional.linear(x, quantized, bias),
                "layer, gradient": with_gradient,
            }
        )
    kernel = qtorch.explain(quantized).kernel
    return {"recipe": str(recipe), "runs": kernel, **times, "overhead": times["layer"] - times["kernel"]}


class _Operators(TorchDispatchMode):
    """Keeps the calls of qtorch's operators that go through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "qtorch":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def measure_graph(recipe: WeightRecipe) -> dict[str, float | str]:
    """One row of the second table."""
    plain = nn.Linear(SIZE, SIZE).requires_grad_(False)
    layer, x = nn.Linear(SIZE, SIZE).requires_grad_(False), torch.randn(1, SIZE)
    qtorch.quantize_(layer, recipe)
    traced = torch.compile(layer, backend="aot_eager")
    traced(x)
    with _Operators() as seen:
        traced(x)
    ((operator, args),) = seen.calls
    torch._dynamo.reset()
    graph, plain_graph = torch.compile(layer), torch.compile(plain)
    candidates = {
        "float": lambda: plain(x),
        "layer": lambda: layer(x),
        "float graph": lambda: plain_graph(x),
        "graph": lambda: graph(x),
        "operator": lambda: operator(*args),
    }
    if operators.attached():
        by_python = getattr(torch.ops.qtorch, operator.__name__.partition(".")[0]).fallback
        candidates["in Python"] = lambda: by_python(*args)
    with torch.no_grad():
        return {"recipe": str(recipe), "runs": str(operator), **interleaved_medians(candidates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/dispatch.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipes = [
        qtorch.int8_weight_only(),
        qtorch.int8_dynamic_activation_int8_weight(),
        # In the plain layout, so that the arithmetic on plain tensors is the same.
        qtorch.int4_weight_only(group_size=32, layout=qtorch.PlainLayout()),
        qtorch.int8_dynamic_activation_int4_weight(layout=qtorch.PlainLayout()),
    ]
    with compiled_library.use(None):  # the arithmetic on plain tensors is that of torch's operators
        rows = [measure(recipe) for recipe in recipes]
    print(machine())
    columns = ["float", "float, gradient", "kernel", "layer", "layer, gradient", "overhead"]
    print(f"{'us a call':66s}" + "".join(f"{name:>17s}" for name in columns))
    for row in rows:
        print(f"{row['recipe']:66s}" + "".join(f"{row[name]:17.1f}" for name in columns))
    recipes = [
        qtorch.int8_weight_only(),
        qtorch.int4_weight_only(group_size=32),
        qtorch.int8_dynamic_activation_int8_weight(),
        qtorch.int8_dynamic_activation_int4_weight(),
    ]
    graphs = [measure_graph(recipe) for recipe in recipes] if compiled_library.library() else []
    columns = ["float", "layer", "float graph", "graph", "operator", "in Python"]
    print(f"\n{'us a call':66s}" + "".join(f"{name:>17s}" for name in columns))
    for row in graphs:
        print(f"{row['recipe']:66s}" + "".join(f"{row.get(name, nan):17.1f}" for name in columns))
    if options.save:
        save("dispatch", [*rows, *graphs])


if __name__ == "__main__":
    main()
