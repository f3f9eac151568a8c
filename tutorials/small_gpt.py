"""The model and the text of the tutorials that run on several processes: a transformer that predicts the next byte of
the files in this folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD = 32
"""Size of an attention head."""


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # The number of heads is not written here: a process may have some of them.
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in layers)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """Logits (rows, length, 256) of the next byte, for bytes (rows, length)."""

    def __init__(self, width: int = 128, blocks: int = 3, length: int = 64) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bytes(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def is_in_block(module: nn.Module, name: str) -> bool:
    """Which weights are quantized: the linear layers in the blocks."""
    return isinstance(module, nn.Linear) and "blocks" in name


def batch(step: int, rows: int, length: int = 64) -> tuple[Tensor, Tensor]:
    """(inputs, targets), both (rows, length), the same for a step whoever asks."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    starts = torch.randint(len(text) - length - 1, (rows,), generator=torch.Generator().manual_seed(step)).tolist()
    ids = torch.tensor([list(text[start : start + length + 1]) for start in starts])
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
