"""StaticKV: keys and values in codes, with room for a fixed number of tokens, for `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.cache_form import Parts
from ..kernels.ops.quantize_tokens import quantize_keys_and_values
from .spec import KVCacheSpec
from .store import KVStore


class StaticKV(KVStore):
    """The keys and values of one layer, at fixed addresses; see `KVStore`.

    The number of tokens is a tensor, so that a compiled graph serves every length.

    Args:
        spec: how tokens are quantized; each by itself, and none stays in floating point.
        max_length: tokens for which there is room.

    Raises:
        ValueError: the spec's tokens share scales or stay in floating point, or `max_length` is not positive.
    """

    def __init__(self, spec: KVCacheSpec, max_length: int) -> None:
        super().__init__(spec)
        if spec.step > 1 or spec.kept:
            raise ValueError(
                f'a static cache quantizes each token when it comes: keys="token" and no recent tokens, got {spec}; '
                "leave max_length out for a cache that grows"
            )
        if max_length < 1:
            raise ValueError(f"max_length is positive, got {max_length}")
        self.max_length = max_length
        self.length = torch.zeros((), dtype=torch.int64, device="cpu")
        self.keys: Parts = ()
        self.values: Parts = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.values[0].shape[:2], self.max_length) if self.values else (0, 0, 0)

    def parts(self) -> tuple[Parts, Parts, Sequence[Tensor], Tensor | None]:
        return self.keys, self.values, (), self.length

    def initialize(self, keys: Tensor, values: Tensor) -> None:
        """Take the memory for keys and values like these (B, H, any, D)."""
        self.note_form(keys, values)
        device, form = keys.device, self.form
        made = []
        for width, of_keys in zip(self.widths, (True, False), strict=True):
            forms = form.stored(width, of_keys).values()
            shapes = [((*keys.shape[:2], self.max_length, row), dtype) for row, dtype, _ in forms]
            made.append(tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes))
        self.keys, self.values = made
        self.length = self.length.to(device)

    def append(self, keys: Tensor, values: Tensor) -> None:
        if not self.values:
            self.initialize(keys, values)
        self.note_form(keys, values)
        count = keys.shape[2]
        # Reading the length would stop a GPU, and a compiler; elsewhere an index beyond the end is an error of torch.
        if keys.is_cpu and not torch.compiler.is_compiling() and int(self.length) + count > self.max_length:
            raise ValueError(f"a static cache of {self.max_length} tokens has {int(self.length)}, got {count} more")
        positions = torch.arange(count, device=keys.device) + self.length
        of_keys, of_values = quantize_keys_and_values(keys.detach(), values.detach(), self.form)
        for stored, part in zip((*self.keys, *self.values), (*of_keys, *of_values), strict=True):
            stored.index_copy_(2, positions, part)
        self.length.add_(count)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        self.keys = tuple(function(part) for part in self.keys)
        self.values = tuple(function(part) for part in self.values)
        device = self.values[0].device if self.values else self.length.device
        self.length = self.length.to(device)

    def reset(self) -> None:
        """Forget all tokens; memory and addresses stay."""
        self.length.zero_()
