"""Small models for the tests of transforms: pre-norm blocks in several forms, and tiny ones of transformers."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, VOCABULARY = 32, 4, 2, 8, 64, 40


class RmsNorm(nn.Module):
    """In the dtype of the input, multiplied by (shift + weight)."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 - shift + 0.3 * torch.randn(WIDTH))
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return normed * (self.shift + self.weight) if self.shift else self.weight * normed


class Attention(nn.Module):
    """Grouped queries; `repeat` spells the repetition of k and v out; `gated` has q and a gate in one matrix."""

    def __init__(self, repeat: bool = False, gated: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD * (2 if gated else 1))
        self.k, self.v = nn.Linear(WIDTH, KV_HEADS * HEAD), nn.Linear(WIDTH, KV_HEADS * HEAD)
        self.o = nn.Linear(HEADS * HEAD, WIDTH)
        self.repeat, self.gated = repeat, gated

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q(x).chunk(2, -1) if self.gated else (self.q(x), None)
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (q, self.k(x), self.v(x)))
        if self.repeat:
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
            y = torch.softmax(q @ k.transpose(-1, -2) / HEAD**0.5, -1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        y = y.transpose(1, 2).flatten(2)
        return self.o(y if gate is None else y * torch.sigmoid(gate))


class Mlp(nn.Module):
    """up * silu(gate), from two matrices or from one."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN)
        else:
            self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(nn.functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shift: float = 0.0, repeat: bool = False, gated: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = RmsNorm(shift), Attention(repeat, gated)
        self.norm2, self.mlp = RmsNorm(shift), Mlp(fused)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PreNorm(nn.Module):
    """A language model; tokens (B, T) -> (B, T, vocabulary)."""

    def __init__(self, blocks: int = 2, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(blocks))
        self.norm = RmsNorm(options.get("shift", 0.0))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens(count: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (4, 16), generator=generator) for _ in range(count)]


def randomize(model: nn.Module) -> nn.Module:
    """Give vectors (norms, biases) values that are not all the same; in eval mode."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model.eval()


FEWER = {"gpt2": {"n_layer": 1}, "t5": {"num_layers": 1}}
ONE = {"num_hidden_layers": 1, "num_attention_heads": 4}


def of_transformers(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A model of the zoo with one layer, and grouped queries where there are any, and a batch."""
    from tests.zoo.architectures import built

    model, batch = built(name, **FEWER.get(name, ONE))
    return randomize(model), {key: value for key, value in batch.items() if key != "attention_mask"}
