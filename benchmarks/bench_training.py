"""Forward and backward of one linear layer in each training recipe, against the float layer, eager, on this CPU.

Figures are the float layer's time divided by the candidate's, medians of interleaved turns: above 1 is faster.

    python -m benchmarks.bench_training [--shape N K] [--tokens 256] [--save]
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks.common import interleaved_medians, machine, save
from benchmarks.pretrain_llama import RECIPES


def step(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).sum().backward()

    return run


def measure(n: int, k: int, tokens: int) -> dict[str, Any]:
    """Speed relative to float, by recipe."""
    x = torch.randn(tokens, k, requires_grad=True)
    layer = nn.Sequential(nn.Linear(k, n, bias=False))
    candidates = {}
    for name, recipe in RECIPES.items():
        candidate = copy.deepcopy(layer)
        if recipe is not None:
            qtorch.quantize_(candidate, recipe)
        candidates[name] = step(candidate, x)
    times = interleaved_medians(candidates, rounds=5)
    ratios = {name: times["float"] / time for name, time in times.items() if name != "float"}
    return {"shape": [n, k], "tokens": tokens, "float us": times["float"], **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=[1024, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/training_cpu.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(machine())
    rows = [measure(*options.shape, tokens) for tokens in options.tokens]
    for name in [key for key in rows[0] if key not in ("shape", "tokens")]:
        print(f"{name:28s}" + "".join(f"{row[name]:10.2f}" for row in rows))
    if options.save:
        save("training_cpu", rows)


if __name__ == "__main__":
    main()
