"""The models of `bench_cpu_model`, and what is measured of each.

The weights of all but the sentence model are random: they cost what trained ones cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

Run = Callable[[Any], Tensor]
"""One call of a model on a fixed input."""

GENERATED = 20
"""Tokens of a sequence that a decoder writes."""


class Score(NamedTuple):
    """How outputs are compared with those of the float model."""

    name: str
    of: Callable[[Tensor, Tensor], float]


def mean_cosine(outputs: Tensor, of_float: Tensor) -> float:
    """Of the vectors in the last dimension."""
    return float(functional.cosine_similarity(outputs.double(), of_float.double(), dim=-1).mean())


COSINE = Score("cosine", mean_cosine)


def perplexity_ratio(tokens: Tensor, outputs: Tensor, of_float: Tensor) -> float:
    """The perplexity of these tokens (T) by logits (T, vocabulary), over that by the logits of the float model."""
    loss, float_loss = (functional.cross_entropy(logits.double(), tokens) for logits in (outputs, of_float))
    return float((loss - float_loss).exp())


@dataclass(frozen=True)
class Workload:
    """A float model, and what is measured of it.

    Attributes:
        model: from tensors to a tensor.
        runs: by name.
        compile: compiles it in place.
        scores: of runs whose outputs are not compared by their cosine.
        example: arguments, for engines that take a graph of the model, and which of their axes are dynamic; None where
            a graph would need the cache, which the model writes in place.
        prepare: is called with each copy that qtorch quantized.
    """

    model: nn.Module
    runs: dict[str, Run]
    compile: Callable[[Any], object]
    scores: dict[str, Score]
    example: tuple[tuple[Tensor, ...], tuple[Any, ...]] | None = None
    prepare: Callable[[Any], object] = id


# ---------------------------------------------------------------------------------------------- decoder


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
    """One layer: attention over a cache, of which the places of these tokens are written, and a gated feed-forward
    layer."""

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

    def forward(self, x: Tensor, rotation: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """x (tokens, hidden); rotation (2, tokens, head / 2); position (tokens); keys and values
        (kv_heads, places, head)."""
        tokens = x.shape[0]
        h = self.norm1(x)
        q, k, v = (layer(h).view(tokens, -1, self.head).transpose(0, 1) for layer in (self.q, self.k, self.v))
        keys.index_copy_(1, position, rotate(k, rotation))
        values.index_copy_(1, position, v)
        seen = torch.arange(keys.shape[1]) <= position.unsqueeze(1)
        attended = functional.scaled_dot_product_attention(
            rotate(q, rotation)[None], keys[None], values[None], attn_mask=seen, enable_gqa=True
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
        """Keys and values of each layer, with places for a prompt and what is generated."""
        s, dtype = self.shape, self.norm.weight.dtype
        size = (s.kv_heads, s.prompt + GENERATED, s.hidden // s.heads)
        return [(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)) for _ in range(s.layers)]

    def forward(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]], start: int = 0) -> Tensor:
        """ids (tokens) from position `start` on; (1, vocabulary)."""
        s = self.shape
        x = self.embedding(ids)
        frequencies = 10000.0 ** -torch.linspace(0, 1, s.hidden // s.heads // 2)
        position = torch.arange(start, start + len(ids))
        angles = position.unsqueeze(1) * frequencies
        rotation = torch.stack((angles.cos(), angles.sin())).to(x.dtype)
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            x = block(x, rotation, position, keys, values)
        return self.lm_head(self.norm(x[-1:]))

    def compile_blocks(self) -> None:
        for block in self.blocks:  # all share a graph
            block.compile(fullgraph=True, dynamic=False)


def llama(small: bool, dtype: torch.dtype) -> Workload:
    """The decoder reads a prompt, or its last token only, or the prompt and then token after token of a sequence that
    the float model sampled."""
    torch.manual_seed(0)
    shape = Shape(256, 640, 2, 4, 2, 512, 32) if small else Shape()
    model = Decoder(shape).to(dtype)
    ids, cache = torch.randint(0, shape.vocabulary, (shape.prompt,)), model.cache()

    def follow(decoder: Any, tokens: list[int]) -> Tensor:
        """Logits (T + 1, vocabulary) after the prompt, and after each of the T tokens."""
        logits = [decoder(ids, cache)]
        for i, token in enumerate(tokens):
            logits.append(decoder(torch.tensor([token]), cache, shape.prompt + i))
        return torch.cat(logits)

    sampled: list[int] = []
    with torch.no_grad():
        for _ in range(GENERATED):
            sampled.append(int(follow(model, sampled)[-1].float().softmax(0).multinomial(1)))
    generate = f"decoder, prompt and {GENERATED} tokens"
    runs: dict[str, Run] = {
        f"decoder, prefill {shape.prompt}": lambda decoder: decoder(ids, cache),
        "decoder, decode 1": lambda decoder: decoder(ids[-1:], cache, shape.prompt - 1),
        generate: lambda decoder: follow(decoder, sampled[:-1]),
    }
    score = Score("perplexity", functools.partial(perplexity_ratio, torch.tensor(sampled)))
    return Workload(model, runs, Decoder.compile_blocks, {generate: score})


# ----------------------------------------------------------------------------------- mixture of experts


class Logits(nn.Module):
    """A language model of transformers, from ids (1, tokens) to logits (tokens, vocabulary)."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        return self.language_model(ids, past_key_values=cache, use_cache=cache is not None).logits[0]


def mixture(small: bool, dtype: torch.dtype) -> Workload:
    """A decoder in the shape of Qwen3-MoE, 4 layers of 32 experts, 4 for each token: it reads a prompt, and then token
    after token of a sequence."""
    from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4, "num_hidden_layers": 2, "head_dim": 32}
    if not small:
        size = {"hidden_size": 1024, "moe_intermediate_size": 768, "num_experts": 32, "num_hidden_layers": 4}
        size["head_dim"] = 64
    heads = {"num_attention_heads": 4 if small else 16, "num_key_value_heads": 2 if small else 4}
    config = Qwen3MoeConfig(vocab_size=1024, num_experts_per_tok=2 if small else 4, **size, **heads)
    language_model = Qwen3MoeForCausalLM(config).to(dtype).eval().requires_grad_(False)
    language_model.set_experts_implementation("grouped_mm")
    prompt = 16 if small else 128
    ids = torch.randint(0, config.vocab_size, (1, prompt + GENERATED))

    def follow(model: Any) -> Tensor:
        cache = DynamicCache()
        logits = [model(ids[:, :prompt], cache)]
        logits += [model(ids[:, i : i + 1], cache) for i in range(prompt, prompt + GENERATED - 1)]
        return torch.cat(logits)

    runs: dict[str, Run] = {
        f"MoE decoder, prefill {prompt}": lambda model: model(ids[:, :prompt]),
        f"MoE decoder, prompt and {GENERATED} tokens": follow,
    }

    def compile(model: Any) -> None:
        for layer in model.language_model.model.layers:
            layer.mlp.compile(dynamic=False)

    def prepare(model: Any) -> None:
        model.language_model.set_experts_implementation("qtorch")

    return Workload(Logits(language_model).eval(), runs, compile, {}, prepare=prepare)


# ----------------------------------------------------------------------------------------------- vision


class ImageTokens(nn.Module):
    """A vision transformer, from pixels to the vectors of all patches."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, pixels: Tensor) -> Tensor:
        return self.transformer(pixels).last_hidden_state


def vision(small: bool, dtype: torch.dtype) -> Workload:
    """ViT-B with patches of 16 x 16 on 4 images of 224 x 224: 788 rows for each layer, bound by arithmetic."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(image_size=64, **size) if small else ViTConfig()
    transformer = ViTModel(config, add_pooling_layer=False).to(dtype).eval().requires_grad_(False)
    pixels = torch.randn(1 if small else 4, 3, config.image_size, config.image_size, dtype=dtype)
    return Workload(
        ImageTokens(transformer).eval(),
        {f"ViT-B, {len(pixels)} images": lambda model: model(pixels)},
        lambda model: model.compile(fullgraph=True, dynamic=False),
        {},
        ((pixels,), (None,)),
    )


# -------------------------------------------------------------------------------------------- sentences


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
    axes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    return Workload(
        pretrained_encoder().to(dtype),
        {f"sentence model, {sum(sizes)} texts, {tokens} tokens": lambda encoder: embed(encoder, batches)},
        lambda encoder: encoder.compile(fullgraph=True, dynamic=True),
        {},
        ((batches[0].ids, batches[0].mask), (axes, axes)),
    )


WORKLOADS: dict[str, Callable[[bool, torch.dtype], Workload]] = {
    "sentence": sentence,
    "llama": llama,
    "mixture": mixture,
    "vision": vision,
}
