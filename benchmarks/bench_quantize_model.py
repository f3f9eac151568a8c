"""How long `quantize_` takes on a CPU, beside torchao's.

A sentence model has the layers of all-MiniLM-L6-v2 (six of 384 and 1536 channels); the others are two layers of
4096 x 4096. Milliseconds of one call, medians of interleaved turns, each on a copy of the float model.

    python -m benchmarks.bench_quantize_model [--rounds 7] [--save]
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import qtorch
from benchmarks.common import machine, save

Quantize = Callable[[nn.Module], Any]

RECIPES = {
    "int8_weight_only()": qtorch.int8_weight_only(),
    "int8_dynamic_activation_int8_weight()": qtorch.int8_dynamic_activation_int8_weight(),
    "int4_weight_only(group_size=128)": qtorch.int4_weight_only(group_size=128),
    'uintx_weight_only("uint4", group_size=64)': qtorch.uintx_weight_only("uint4", group_size=64),
    "int8_dynamic_activation_int4_weight()": qtorch.int8_dynamic_activation_int4_weight(),
}


def torchao_configs() -> dict[str, Any]:
    """Its counterpart of each recipe; none where it is not installed."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    from torchao import quantization as theirs
    from torchao.quantization import PerGroup

    four_bits = {"weight_dtype": torch.int4, "mapping_type": theirs.quant_primitives.MappingType.ASYMMETRIC}
    configs = (
        theirs.Int8WeightOnlyConfig(),
        theirs.Int8DynamicActivationInt8WeightConfig(),
        theirs.IntxWeightOnlyConfig(granularity=PerGroup(128), **four_bits),
        theirs.IntxWeightOnlyConfig(granularity=PerGroup(64), **four_bits),
        theirs.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)),
    )
    return dict(zip(RECIPES, configs, strict=True))


def sentence_model() -> nn.Module:
    """Six layers of an encoder; its embedding stays in floating point."""
    sizes = [(384, 384)] * 4 + [(384, 1536), (1536, 384)]
    return nn.Sequential(nn.Embedding(30522, 384), *[nn.Linear(*size) for _ in range(6) for size in sizes])


def large_layers(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(*[nn.Linear(4096, 4096, bias=False, dtype=dtype) for _ in range(2)])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sentence model": sentence_model,
    "4096 x 4096, fp32": lambda: large_layers(torch.float32),
    "4096 x 4096, bf16": lambda: large_layers(torch.bfloat16),
}


def candidates(recipe: Any, config: Any) -> dict[str, Quantize]:
    def ours(model: nn.Module) -> None:
        qtorch.quantize_(model, recipe)

    found: dict[str, Quantize] = {"qtorch": ours}
    if config is not None:
        from torchao.quantization import quantize_

        found["torchao"] = lambda model: quantize_(model, config)
    return found


def measure(model: nn.Module, choices: dict[str, Quantize], rounds: int) -> dict[str, float]:
    """Milliseconds of one call of each candidate; the first turn of each is not counted."""
    times: dict[str, list[float]] = {name: [] for name in choices}
    for _ in range(rounds + 1):
        for name, quantize in choices.items():
            given = copy.deepcopy(model)
            start = time.perf_counter()
            quantize(given)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/quantize_model.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torchao")
    print(machine())
    configs, rows = torchao_configs(), []
    for name, make in MODELS.items():
        model = make()
        for recipe in RECIPES:
            times = measure(model, candidates(RECIPES[recipe], configs.get(recipe)), options.rounds)
            rows.append({"model": name, "recipe": recipe, **times})
            print(
                f"{name:20s}{recipe:48s}" + "".join(f"{each:>14s}{ms:9.1f}" for each, ms in times.items()), flush=True
            )
    if options.save:
        save("quantize_model", rows)


if __name__ == "__main__":
    main()
