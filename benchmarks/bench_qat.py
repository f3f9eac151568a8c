"""Forward and backward of a Llama-shaped stack of layers under quantization-aware training, eager and compiled, against
the float stack and torchao's QAT of the same scheme, on this CPU.

Figures are the candidate's time divided by the float stack's in the same mode, medians of interleaved turns.

    python -m benchmarks.bench_qat [--width 512] [--layers 2] [--tokens 512] [--save]
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from benchmarks.common import interleaved_medians, machine, save
from qtorch.recipes.base import WeightRecipe

RECIPES: dict[str, WeightRecipe] = {
    "int8 dynamic, int4 g32": qtorch.int8_dynamic_activation_int4_weight(),
    "int4 g32 weight-only": qtorch.int4_weight_only(group_size=32),
    "int8 dynamic, int8": qtorch.int8_dynamic_activation_int8_weight(),
}

HEADS = 8


class Block(nn.Module):
    """Attention and gated MLP, each with a norm and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = -(-width * 8 // 3 // 64) * 64
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def torchao_qat(model: nn.Module, name: str) -> nn.Module | None:
    """The model prepared by torchao for the same scheme, up to zero points; None without torchao."""
    try:
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
    except ImportError:
        return None
    grouped = "g32" in name
    weight = (
        IntxFakeQuantizeConfig(torch.int4, group_size=32, is_symmetric="weight-only" not in name)
        if grouped
        else IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
    )
    activation = None
    if "dynamic" in name:
        # Symmetric ones it has not.
        activation = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    quantize_(model, QATConfig(activation_config=activation, weight_config=weight, step="prepare"))
    return model


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """The float stack, and every scheme in qtorch and in torchao."""
    made: dict[str, nn.Module] = {"float": model}
    for name, recipe in RECIPES.items():
        made[name] = copy.deepcopy(model)
        qtorch.quantize_(made[name], qtorch.training.qat(recipe))
        if (other := torchao_qat(copy.deepcopy(model), name)) is not None:
            made[f"torchao {name}"] = other
    return made


def step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return run


def measure(model: nn.Module, x: Tensor, compiled: bool, rounds: int) -> dict[str, Any]:
    """Time relative to float, by candidate."""
    steps = {}
    for name, candidate in candidates(model).items():
        steps[name] = step(torch.compile(candidate) if compiled else candidate, x)
    times = interleaved_medians(steps, rounds=rounds)
    ratios = {name: time / times["float"] for name, time in times.items() if name != "float"}
    return {"mode": "compiled" if compiled else "eager", "float us": times["float"], **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/qat_cpu.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(machine())
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(options.width) for _ in range(options.layers)))
    x = torch.randn(4, options.tokens // 4, options.width)
    rows = [measure(model, x, compiled, options.rounds) for compiled in (False, True)]
    for row in rows:
        row.update(width=options.width, layers=options.layers, tokens=options.tokens)
    print(f"{'':36s}" + "".join(f"{row['mode']:>10s}" for row in rows))
    for name in [key for key in rows[0] if key not in ("mode", "width", "layers", "tokens")]:
        print(f"{name:36s}" + "".join(f"{row[name]:10.2f}" for row in rows))
    if options.save:
        save("qat_cpu", rows)


if __name__ == "__main__":
    main()
