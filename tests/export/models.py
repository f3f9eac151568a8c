"""Small models of the kinds that are exported, in evaluation mode."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Convnet(nn.Module):
    """Convolutions of two and one axes, with groups, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=2)
        self.line = nn.Conv1d(32, 32, 3, padding=1, bias=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(nn.functional.relu(self.stem(x))).relu()
        return self.head(nn.functional.relu(self.line(x.flatten(2))).mean(-1))


class Llama(nn.Module):
    """An embedding, one block of Llama (RMSNorm, rotary embedding, grouped attention, SwiGLU), a tied head."""

    def __init__(self, width: int = 64, heads: int = 4, shared: int = 2, vocabulary: int = 128) -> None:
        super().__init__()
        self.heads, self.shared, size = heads, shared, width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, size * shared, bias=False)
        self.v = nn.Linear(width, size * shared, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, size, 2) / size), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), self.frequencies)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        batch, length = ids.shape
        y = self.norm(x)
        q = self.rotate(self.q(y).view(batch, length, self.heads, -1).transpose(1, 2))
        k = self.rotate(self.k(y).view(batch, length, self.shared, -1).transpose(1, 2))
        v = self.v(y).view(batch, length, self.shared, -1).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.shared, 1) for t in (k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        y = self.norm_mlp(x)
        return self.head(x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval().requires_grad_(False)
