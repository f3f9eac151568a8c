"""What the tensor subclass costs a layer: `F.linear` with a quantized weight against the same kernel on plain tensors.

The layer is small (64 x 64, one row), so that nearly all of its time is overhead. Times are microseconds a call,
medians of interleaved turns. `python -m benchmarks.bench_dispatch [--save]`

The second table is of the compiled kernels: the layer eager and in a compiled graph, whose operator is in C++; or in
Python where QTORCH_CPU_LIBRARIES names a folder without `libqtorch_operators.so`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from benchmarks.common import interleaved_medians, machine, save
from qtorch.dtypes import AffineQuantizedTensor
from qtorch.kernels import int_matmul, quantize_int8_rowwise
from qtorch.kernels.cpu import compiled_library, operators
from qtorch.kernels.ops.int8_grouped_mm import int8_grouped_mm
from qtorch.kernels.ops.weight_only_mm import weight_only_mm
from qtorch.recipes.base import WeightRecipe

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


def measure_graph(recipe: WeightRecipe) -> dict[str, float | str]:
    """One row of the second table."""
    plain = nn.Linear(SIZE, SIZE).requires_grad_(False)
    layer, x = nn.Linear(SIZE, SIZE).requires_grad_(False), torch.randn(1, SIZE)
    qtorch.quantize_(layer, recipe)
    graph, plain_graph = torch.compile(layer), torch.compile(plain)
    candidates = {
        "float": lambda: plain(x),
        "layer": lambda: layer(x),
        "float graph": lambda: plain_graph(x),
        "graph": lambda: graph(x),
    }
    runs = "C++" if operators.attached() else "Python"
    with torch.no_grad():
        return {"recipe": str(recipe), "runs": runs, **interleaved_medians(candidates)}


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
    columns = ["float", "layer", "float graph", "graph"]
    print(
        f"\nThe operator of graphs is in {graphs[0]['runs'] if graphs else 'Python'}\n{'us a call':66s}"
        + "".join(f"{name:>17s}" for name in columns)
    )
    for row in graphs:
        print(f"{row['recipe']:66s}" + "".join(f"{row[name]:17.1f}" for name in columns))
    if options.save:
        save("dispatch", [*rows, *graphs])


if __name__ == "__main__":
    main()
