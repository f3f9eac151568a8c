"""Quantized layers on this CPU against the float layer, eager: compiled kernels, without a compiler, and torchao's.

Weights rotate through more than 100 MB, so that they come from memory as they do in a model. Figures are the float
layer's time divided by the candidate's, medians of interleaved turns: above 1 is faster than float.

    python -m benchmarks.bench_cpu_linear [--shapes 4096x4096] [--rows 1 4 16 64 256] [--dtype float32] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks.common import interleaved_medians, machine, save
from qtorch.kernels.cpu import compiled_library

FOOTPRINT = 100 << 20

RECIPES = {
    "int8 weight-only": qtorch.int8_weight_only(),
    "int4 g128": qtorch.int4_weight_only(group_size=128),
    "int4 g32": qtorch.int4_weight_only(group_size=32),
    "int8 dynamic": qtorch.int8_dynamic_activation_int8_weight(),
    "int8 dynamic, int4 g32": qtorch.int8_dynamic_activation_int4_weight(),
}


def torchao_configs() -> dict[str, Any]:
    """Its counterparts of the recipes, by name; none where it is not installed."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    return {
        "torchao int8_weight_only": Int8WeightOnlyConfig(),
        "torchao int8_dynamic_activation_int8_weight": Int8DynamicActivationInt8WeightConfig(),
    }


def turns(layers: list[nn.Module], x: Tensor, compiled: bool = True) -> Callable[[], Tensor]:
    """Call the layers one after the other, with or without the compiled kernels."""
    cycle = itertools.cycle(layers)

    def call() -> Tensor:
        with contextlib.nullcontext() if compiled else compiled_library.use(None):
            return next(cycle)(x)

    return call


def copies(layer: nn.Module, size: int) -> list[nn.Module]:
    return [copy.deepcopy(layer) for _ in range(max(2, FOOTPRINT // size))]


@torch.no_grad()
def measure(n: int, k: int, dtype: torch.dtype, rows: list[int], fallback: bool) -> list[dict[str, Any]]:
    """Rows of the table: speed relative to float."""
    layer = nn.Linear(k, n, bias=False, dtype=dtype)
    layers = {"float": copies(layer, layer.weight.nbytes)}
    for name, recipe in RECIPES.items():
        quantized = copy.deepcopy(layer)
        qtorch.quantize_(quantized, recipe)
        layers[name] = copies(quantized, quantized.weight.nbytes)
    for name, config in torchao_configs().items():
        from torchao.quantization import quantize_

        theirs = nn.Sequential(copy.deepcopy(layer))
        quantize_(theirs, config)
        layers[name] = copies(theirs, n * k)
    table = []
    for m in rows:
        x = torch.randn(m, k, dtype=dtype)
        candidates = {name: turns(made, x) for name, made in layers.items()}
        if fallback:
            candidates |= {f"{name}, no compiler": turns(layers[name], x, False) for name in RECIPES}
        times = interleaved_medians(candidates, rounds=7, seconds=0.06)
        ratios = {name: times["float"] / time for name, time in times.items() if name != "float"}
        table.append({"shape": [n, k], "rows": m, "dtype": str(dtype), "float us": times["float"], **ratios})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "11008x4096", "4096x1024"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-fallback", action="store_true", help="leave out the kernels made of torch operators")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cpu_linear.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torchao")
    torch.set_num_threads(options.threads)
    found = compiled_library.library()
    print(machine(), found.instruction_set if found else "no compiled kernels")
    rows = []
    for dtype, shape in itertools.product(options.dtype, options.shapes):
        n, k = map(int, shape.split("x"))
        rows += measure(n, k, getattr(torch, dtype), options.rows, not options.no_fallback)
        last = rows[-len(options.rows) :]
        print(f"{shape} {dtype:38s}" + "".join(f"{row['rows']:>9d}" for row in last))
        for name in [key for key in last[0] if key not in ("shape", "rows", "dtype")]:
            print(f"  {name:46s}" + "".join(f"{row[name]:9.2f}" for row in last))
    if options.save:
        save("cpu_linear", rows)


if __name__ == "__main__":
    main()
