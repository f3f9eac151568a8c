"""Quantized models on this CPU against the float ones, eager and compiled: the sentence model of the demo, and a
decoder of Llama's shape with random weights, which reads a prompt (prefill) and then writes a token (decode).

Figures are the float model's time divided by the candidate's, medians of interleaved turns: above 1 is faster than
float.

    python -m benchmarks.bench_cpu_model [--models sentence llama] [--dtype float32] [--small] [--save] [--write-docs]

It takes some five minutes on two cores, half of them in the compiler.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from benchmarks.common import interleaved_medians, machine, save, write_docs
from qtorch.quantize_api import WeightRecipe

RECIPES: dict[str, WeightRecipe] = {
    "int8_weight_only()": qtorch.int8_weight_only(),
    "int4_weight_only(group_size=128)": qtorch.int4_weight_only(group_size=128),
    "int8_dynamic_activation_int8_weight()": qtorch.int8_dynamic_activation_int8_weight(),
}

Run = Callable[[nn.Module], Any]
"""One call of a model on a fixed input."""

TURN = 0.3
"""Seconds of a turn: a decoder writes several tokens one after the other."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Of the decoder."""

    hidden: int = 2048
    inner: int = 5632
    layers: int = 8
    heads: int = 16
    kv_heads: int = 4
    vocabulary: int = 8192
    prompt: int = 256


class Block(nn.Module):
    """One layer: attention over a cache of the prompt's length, whose last places are written, and a gated
    feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.hidden // shape.heads
        linear = functools.partial(nn.Linear, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.q = linear(shape.hidden, shape.hidden)
        self.k = linear(shape.hidden, shape.kv_heads * self.head)
        self.v = linear(shape.hidden, shape.kv_heads * self.head)
        self.out = linear(shape.hidden, shape.hidden)
        self.gate = linear(shape.hidden, shape.inner)
        self.up = linear(shape.hidden, shape.inner)
        self.down = linear(shape.inner, shape.hidden)

    def forward(self, x: Tensor, rotation: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """x (tokens, hidden); rotation (2, tokens, head / 2); keys and values (kv_heads, prompt, head)."""
        tokens = x.shape[0]
        h = self.norm1(x)
        q, k, v = (layer(h).view(tokens, -1, self.head).transpose(0, 1) for layer in (self.q, self.k, self.v))
        keys[:, -tokens:] = rotate(k, rotation)
        values[:, -tokens:] = v
        attended = functional.scaled_dot_product_attention(
            rotate(q, rotation)[None], keys[None], values[None], is_causal=tokens > 1, enable_gqa=True
        )
        x = x + self.out(attended[0].transpose(0, 1).reshape(tokens, -1))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding of x (heads, tokens, head)."""
    (a, b), (cos, sin) = x.chunk(2, -1), rotation
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Decoder(nn.Module):
    """Token ids in, the logits of the next one out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def cache(self) -> list[tuple[Tensor, Tensor]]:
        s, dtype = self.shape, self.norm.weight.dtype
        size = (s.kv_heads, s.prompt, s.hidden // s.heads)
        return [(torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)) for _ in range(s.layers)]

    def forward(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """ids (tokens), which end the prompt."""
        s = self.shape
        x = self.embedding(ids)
        frequencies = 10000.0 ** -torch.linspace(0, 1, s.hidden // s.heads // 2)
        angles = torch.arange(s.prompt - len(ids), s.prompt).unsqueeze(1) * frequencies
        rotation = torch.stack((angles.cos(), angles.sin())).to(x.dtype)
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            x = block(x, rotation, keys, values)
        return self.lm_head(self.norm(x[-1:]))


def torchao_configs() -> dict[str, Any]:
    """Its counterparts of the recipes, by name; none where it is not installed."""
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
    except ImportError:
        return {}
    return {
        "torchao int8 weight-only": Int8WeightOnlyConfig(),
        "torchao int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
    }


def candidates(model: nn.Module, torchao: bool) -> dict[str, nn.Module]:
    """The float model and quantized copies of it, by name."""
    found = {"float": model}
    for name, recipe in RECIPES.items():
        found[name] = copy.deepcopy(model)
        qtorch.quantize_(found[name], recipe)
    for name, config in (torchao_configs() if torchao else {}).items():
        from torchao.quantization import quantize_

        found[name] = copy.deepcopy(model)
        quantize_(found[name], config)
    return found


@dataclass(frozen=True)
class Workload:
    """A float model, what is measured of it, by name, and how it is compiled."""

    model: nn.Module
    runs: dict[str, Run]
    compile: Callable[[nn.Module], object]


def llama(small: bool, dtype: torch.dtype) -> Workload:
    """The decoder reads a prompt, or its last token only."""
    torch.manual_seed(0)
    shape = Shape(256, 640, 2, 4, 2, 512, 32) if small else Shape()
    model = Decoder(shape).to(dtype)
    ids, cache = torch.randint(0, shape.vocabulary, (shape.prompt,)), model.cache()
    runs: dict[str, Run] = {
        f"decoder, prefill {shape.prompt}": lambda decoder: decoder(ids, cache),
        "decoder, decode 1": lambda decoder: decoder(ids[-1:], cache),
    }

    def compile(decoder: nn.Module) -> None:
        for block in decoder.blocks:  # all share a graph
            block.compile(fullgraph=True, dynamic=False)

    return Workload(model, runs, compile)


def sentence(small: bool, dtype: torch.dtype) -> Workload:
    """The sentence model embeds a few batches of texts of different lengths."""
    from examples.sentence_model import embed, pretrained_encoder, tokenized_batches
    from examples.sentence_pairs import docstring_pairs

    pairs = docstring_pairs(8 if small else 200)
    batches = tokenized_batches([text for pair in pairs for text in (pair.query, pair.document)])
    batches = batches[:: max(1, len(batches) // 3)]
    # Batches are sorted by length; `embed` wants their rows to count from zero.
    sizes = [len(batch.rows) for batch in batches]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    batches = [replace(b, rows=tuple(range(s, s + n))) for b, s, n in zip(batches, starts, sizes)]
    tokens = sum(batch.ids.numel() for batch in batches)
    name = f"sentence model, {sum(sizes)} texts, {tokens} tokens"
    return Workload(
        pretrained_encoder().to(dtype),
        {name: lambda encoder: embed(encoder, batches)},
        lambda encoder: encoder.compile(fullgraph=True, dynamic=True),
    )


WORKLOADS = {"sentence": sentence, "llama": llama}


@torch.no_grad()
def measure(
    make: Callable[[bool, torch.dtype], Workload], dtype: torch.dtype, options: argparse.Namespace
) -> list[Row]:
    """Rows of the table: speed relative to float."""
    workload = make(options.small, dtype)
    models = candidates(workload.model, options.torchao)
    rows = []
    for mode in options.modes:
        for model in models.values() if mode == "compiled" else ():
            workload.compile(model)
        for what, run in workload.runs.items():
            calls = {name: functools.partial(run, model) for name, model in models.items()}
            times = interleaved_medians(calls, rounds=options.rounds, seconds=TURN)
            ratios = {name: times["float"] / time for name, time in times.items() if name != "float"}
            about = {"what": what, "mode": mode, "dtype": str(dtype).removeprefix("torch.")}
            rows.append({**about, "float ms": times["float"] / 1000, **ratios})
            print(f"{what}, {mode}, {about['dtype']}: float {times['float'] / 1000:.1f} ms", flush=True)
            for name, ratio in ratios.items():
                print(f"  {name:46s}{ratio:9.2f}", flush=True)
    return rows


def markdown(rows: list[Row]) -> str:
    """A column for each workload, mode and dtype; a row for each candidate."""
    names = [key for key in rows[0] if key not in ("what", "mode", "dtype")]
    heads = [f"{row['what']}, {row['mode']}, {row['dtype']}" for row in rows]
    lines = [f"| | {' | '.join(heads)} |", f"|{'---|' * (len(rows) + 1)}"]
    for name in names:
        cells = [f"{row[name]:.1f}" if name == "float ms" else f"{row[name]:.2f}" for row in rows]
        lines.append(
            f"| {name if name == 'float ms' or name.startswith('torchao') else f'`{name}`'} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-torchao", dest="torchao", action="store_false")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cpu_model.json")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance/results.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torchao")
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 64  # one graph for each candidate and number of tokens
    print(machine())
    rows = []
    for name, dtype in itertools.product(options.models, options.dtype):
        rows += measure(WORKLOADS[name], getattr(torch, dtype), options)
    if options.save:
        save("cpu_model", rows)
    if options.write_docs:
        write_docs("cpu_model", markdown(rows))


if __name__ == "__main__":
    main()
