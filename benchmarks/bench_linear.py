"""A quantized layer against the float layer, and against torchao's where it is importable, eager, on this CPU.

Weights rotate through more than 64 MiB, so that they come from memory as they do in a model. Figures are the float
layer's time divided by the candidate's, medians of interleaved turns: above 1 is faster than float.

    python -m benchmarks.bench_linear [--shape N K] [--rows 1 16 256] [--dtype float32] [--save]
"""

from __future__ import annotations

import argparse
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

FOOTPRINT = 64 << 20

RECIPES = [
    qtorch.int8_weight_only(),
    qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int4_weight_only(group_size=32),
    qtorch.int8_dynamic_activation_int4_weight(),
]


def torchao_configs() -> dict[str, Any]:
    """Its counterparts of the recipes, by name; none where it is not installed."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    return {
        "torchao int8_weight_only": Int8WeightOnlyConfig(),
        "torchao int8_dynamic_activation_int8_weight": Int8DynamicActivationInt8WeightConfig(),
    }


def rotating(layers: list[nn.Module], x: Tensor) -> Callable[[], Tensor]:
    """Call the layers in turn."""
    turns = itertools.cycle(layers)
    return lambda: next(turns)(x)


@torch.no_grad()
def measure(n: int, k: int, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """One row of the table: speed relative to float by recipe."""
    copies = max(1, FOOTPRINT // (n * k))
    layer = nn.Linear(k, n, bias=False, dtype=dtype)
    x = torch.randn(rows, k, dtype=dtype)
    floats = [copy.deepcopy(layer) for _ in range(max(1, FOOTPRINT // (n * k * dtype.itemsize)))]
    candidates = {"float": rotating(floats, x)}
    for recipe in RECIPES:
        quantized = copy.deepcopy(layer)
        qtorch.quantize_(quantized, recipe)
        candidates[str(recipe)] = rotating([copy.deepcopy(quantized) for _ in range(copies)], x)
    for name, config in torchao_configs().items():
        from torchao.quantization import quantize_

        theirs = nn.Sequential(copy.deepcopy(layer))
        quantize_(theirs, config)
        candidates[name] = rotating([copy.deepcopy(theirs) for _ in range(copies)], x)
    times = interleaved_medians(candidates, rounds=5)
    ratios = {name: times["float"] / time for name, time in times.items() if name != "float"}
    return {"shape": [n, k], "rows": rows, "dtype": str(dtype), "float us": times["float"], **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=[4096, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/linear_cpu.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torchao")
    print(machine())
    rows = [measure(*options.shape, m, getattr(torch, dtype)) for dtype in options.dtype for m in options.rows]
    for name in [key for key in rows[0] if key not in ("shape", "rows", "dtype")]:
        print(f"{name:52s}" + "".join(f"{row[name]:10.2f}" for row in rows))
    print(f"{'rows, dtype':52s}" + "".join(f"{row['rows']:>5d} {row['dtype'][6:9]:>4s}" for row in rows))
    if options.save:
        save("linear_cpu", rows)


if __name__ == "__main__":
    main()
