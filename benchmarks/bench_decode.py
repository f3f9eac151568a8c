"""One decoding step of a Llama-3-8B-shaped model with random weights, in a CUDA graph: tokens a second.

`python -m benchmarks.bench_decode`; `m` is the batch, `n` the number of layers, `k` the hidden size.
"""

from __future__ import annotations

import argparse
import functools
import gc
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from benchmarks.gpu import DEVICE, DTYPE, ON_GPU, Row, measure, report, sizes
from qtorch.recipes.base import WeightRecipe


@dataclass(frozen=True)
class Shape:
    """Of the decoder; the default is Llama 3 8B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    vocabulary: int = 128256
    context: int = 512


class Block(nn.Module):
    """Attention over a cache of fixed length, and the gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.head = shape, shape.hidden // shape.heads
        linear = lambda k, n: nn.Linear(k, n, bias=False, device=DEVICE, dtype=DTYPE)  # noqa: E731
        self.norm1 = nn.RMSNorm(shape.hidden, device=DEVICE, dtype=DTYPE)
        self.norm2 = nn.RMSNorm(shape.hidden, device=DEVICE, dtype=DTYPE)
        self.qkv = linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * self.head)
        self.out = linear(shape.hidden, shape.hidden)
        self.gate_up = linear(shape.hidden, 2 * shape.inner)
        self.down = linear(shape.inner, shape.hidden)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """x (B, hidden); keys and values (B, kv_heads, context, head), of which the last place is written."""
        s, batch = self.shape, x.shape[0]
        q, k, v = self.qkv(self.norm1(x)).view(batch, -1, self.head).split([s.heads, s.kv_heads, s.kv_heads], 1)
        keys[:, :, -1] = k
        values[:, :, -1] = v
        attended = functional.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True)
        x = x + self.out(attended.reshape(batch, s.hidden))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, 1)
        return x + self.down(functional.silu(gate) * up)


class Decoder(nn.Module):
    """Random weights; one token in, one token out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, device=DEVICE, dtype=DTYPE)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, device=DEVICE, dtype=DTYPE)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, device=DEVICE, dtype=DTYPE)

    def cache(self, batch: int) -> list[tuple[Tensor, Tensor]]:
        s = self.shape
        size = (batch, s.kv_heads, s.context, s.hidden // s.heads)
        pair = lambda: (torch.randn(size, device=DEVICE).to(DTYPE), torch.randn(size, device=DEVICE).to(DTYPE))  # noqa: E731
        return [pair() for _ in range(s.layers)]

    def forward(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = self.embedding(ids)
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            x = block(x, keys, values)
        return self.head(self.norm(x)).argmax(-1)


RECIPES: dict[str, WeightRecipe | None] = {
    "bf16": None,
    "int8": qtorch.int8_weight_only(),
    "int4 g64": qtorch.int4_weight_only(group_size=64 if ON_GPU else 16),
    "int8 dynamic": qtorch.int8_dynamic_activation_int8_weight(),
}


@torch.no_grad()
def _step_times(shape: Shape, recipe: WeightRecipe | None, compiled: bool) -> dict[int, float | None]:
    """Microseconds of a step by batch; batches that do not run are left out."""
    torch.manual_seed(0)
    model = Decoder(shape).eval()
    if recipe is not None:
        qtorch.quantize_(model, recipe)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=True)
    times = {}
    for batch in sizes([1, 8, 32], [2]):
        step = functools.partial(model, torch.zeros(batch, dtype=torch.long, device=DEVICE), model.cache(batch))
        rows = measure("decode", (batch, shape.layers, shape.hidden), {"step": lambda call: step()}, "step", calls=2)  # noqa: B023
        if rows:
            times[batch] = rows[0].us
    return times


def run(compiled: bool = False) -> list[Row]:
    """With `compiled`, what lies between the products is fused by torch.compile: half a minute for each recipe."""
    shape = Shape() if ON_GPU else Shape(1, 32, 4, 2, 48, 40, 8)
    times: dict[int, dict[str, float | None]] = {}
    for name, recipe in RECIPES.items():
        for batch, us in _step_times(shape, recipe, compiled).items():
            times.setdefault(batch, {})[name] = us
        gc.collect()
        torch.cuda.empty_cache()
    found = []
    for batch, by_name in times.items():
        base = by_name["bf16"]
        for name, us in by_name.items():
            ratio = None if us is None or base is None else base / us
            found.append(Row("decode", batch, shape.layers, shape.hidden, name, us, ratio))
            if us is not None:
                print(f"decode, batch {batch}, {name}: {batch * 1e6 / us:.0f} tokens/s")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true")
    report(run(parser.parse_args().compile))
