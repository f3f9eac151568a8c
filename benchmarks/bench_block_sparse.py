"""Block-sparse layers against the dense int8 layer, the float layer, and torch's own block-sparse product.

Figures are the dense int8 layer's time divided by the candidate's, medians of interleaved turns: above 1 is faster than
the dense layer. Weights rotate through more than 100 MB, so that they come from memory as they do in a model.

    python -m benchmarks.bench_block_sparse [--size 4096] [--rows 1 4 64 256] [--threads 1] [--save]
        [--write-docs]
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch import Tensor, nn

import qtorch
from benchmarks.bench_cpu_linear import FOOTPRINT, turns
from benchmarks.common import interleaved_medians, machine, save, write_docs
from qtorch.primitives import prune_blocks

DENSE = qtorch.int8_dynamic_activation_int8_weight()


class TorchBlockSparse(nn.Module):
    """torch's BSR weight in fp32, as the left operand, which is its faster way."""

    def __init__(self, weight: Tensor, block_size: int) -> None:
        super().__init__()
        self.weight = weight.to_sparse_bsr((block_size, block_size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.t()).t()


def candidates(size: int) -> dict[str, list[nn.Module]]:
    """Layers by name, of each as many as fill FOOTPRINT; those in blocks have dense weights' numbers."""
    base = nn.Linear(size, size, bias=False).requires_grad_(False)
    made: dict[str, list[nn.Module]] = {"float": [base], "int8": []}
    for block_size in (16, 32, 64):
        for sparsity in (0.5, 0.8, 0.9):
            recipe = qtorch.block_sparse(DENSE, sparsity=sparsity, block_size=block_size)
            made[f"int8, blocks of {block_size}, {sparsity:.0%}"] = many(quantized(base, recipe))
    made["int4 g32 weights, blocks of 64, 80%"] = many(
        quantized(base, qtorch.block_sparse(qtorch.int8_dynamic_activation_int4_weight(group_size=32)))
    )
    made["int8 weight-only, blocks of 64, 80%"] = many(quantized(base, qtorch.block_sparse(qtorch.int8_weight_only())))
    made["torch bsr, blocks of 64, 80%"] = [TorchBlockSparse(prune_blocks(base.weight.data, 64, 0.8), 64)]
    made["int8"] = many(quantized(base, DENSE))
    return made


def quantized(layer: nn.Module, recipe: qtorch.quantize_api.Recipe) -> nn.Module:
    layer = copy.deepcopy(layer)
    qtorch.quantize_(layer, recipe)
    return layer


def many(layer: nn.Module) -> list[nn.Module]:
    weight = layer.weight
    return [layer, *(copy.deepcopy(layer) for _ in range(FOOTPRINT // weight.nbytes))]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 64, 256])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write results/block_sparse.json")
    parser.add_argument("--write-docs", action="store_true", help="also write the table of docs/performance")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    layers = candidates(args.size)
    results: list[dict[str, Any]] = []
    for rows in args.rows:
        x = torch.randn(rows, args.size)
        medians = interleaved_medians({name: turns(those, x) for name, those in layers.items()})
        for name, seconds in medians.items():
            ratio = medians["int8"] / seconds
            results.append({"layer": name, "rows": rows, "us": round(seconds, 1), "ratio": round(ratio, 2)})
            print(f"{rows:4d} rows  {name:40s} {seconds:8.0f} us  {ratio:6.2f}", flush=True)
    if args.save:
        save("block_sparse", results)
    if args.write_docs:
        write_docs("block_sparse", table(args.size, results))


def table(size: int, results: list[dict[str, Any]]) -> str:
    """The table for docs/performance."""
    rows = list(dict.fromkeys(row["rows"] for row in results))
    names = list(dict.fromkeys(row["layer"] for row in results))
    ratios = {(row["layer"], row["rows"]): row["ratio"] for row in results}
    about = machine()
    lines = [
        f"{about['processor']}, {about['threads']} thread(s), {size} x {size}, fp32 inputs: the time of the dense",
        "layer of `int8_dynamic_activation_int8_weight` divided by that of the layer.",
        "",
        f"| | {' | '.join(f'{n} rows' if n > 1 else '1 row' for n in rows)} |",
        "|---" * (len(rows) + 1) + "|",
        *(f"| {name} | {' | '.join(f'{ratios[name, n]:.2f}' for n in rows)} |" for name in names),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
