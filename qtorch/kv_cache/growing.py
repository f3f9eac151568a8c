"""GrowingTensor: a tensor that is appended to along its tokens, in memory that doubles when it is full."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST = 64
"""Tokens for which memory is taken at least."""


class GrowingTensor:
    """A tensor (B, H, T, X) of growing T.

    `torch.cat` would copy all tokens for each new one. Here a token is copied twice on average, however many there are,
    and up to half of the memory waits for more.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.first = self.length = 0

    @property
    def capacity(self) -> int:
        """Tokens for which there is memory."""
        return 0 if self.memory is None else self.memory.shape[2]

    @property
    def used(self) -> Tensor:
        """The tensor, a view of its memory."""
        if self.memory is None:
            raise ValueError("the cache has no tokens yet")
        return self.memory.narrow(2, self.first, self.length)

    def append(self, more: Tensor) -> None:
        """Append tokens (B, H, t, X)."""
        length = self.length + more.shape[2]
        if self.memory is None or self.first + length > self.capacity:
            before, old = self.memory, None if self.memory is None else self.used
            # Where half of it was dropped, there is room without more memory.
            if before is None or self.first < self.length or length > self.capacity:
                before = _empty_like(more, max(length, 2 * self.capacity, SMALLEST))
            if old is not None:
                before.narrow(2, 0, self.length).copy_(old)
            self.memory, self.first = before, 0
        self.memory.narrow(2, self.first + self.length, more.shape[2]).copy_(more)
        self.length = length

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; their memory stays."""
        self.length = length

    def drop(self, count: int) -> None:
        """Remove the first tokens; their memory is used again."""
        self.first, self.length = self.first + count, self.length - count

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor by a function of it that leaves the number of tokens."""
        if self.memory is not None:
            changed, capacity = function(self.used), self.capacity
            self.memory, self.first = _empty_like(changed, capacity), 0
            self.used.copy_(changed)


def _empty_like(x: Tensor, tokens: int) -> Tensor:
    return torch.empty(*x.shape[:2], tokens, x.shape[3], dtype=x.dtype, device=x.device)
