"""GrowingKV: keys and values in codes, of any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.cache_form import Parts
from ..kernels.ops.quantize_tokens import quantize_keys_and_values
from .growing import GrowingTensor
from .spec import KVCacheSpec
from .store import KVStore


class GrowingKV(KVStore):
    """The keys and values of one layer, which grow; see `KVStore`.

    The latest tokens stay in floating point as long as `KVCacheSpec` says, and until they fill a block whose keys share
    scales. Tokens in codes are never quantized again, with one exception: where `crop` cuts a block of keys, what is
    left of it becomes floating point, and part of a new block.

    Args:
        spec: how tokens are quantized.
    """

    def __init__(self, spec: KVCacheSpec) -> None:
        super().__init__(spec)
        parts = spec.form.stored(1, True)
        self.keys, self.values = ([GrowingTensor() for _ in parts] for _ in range(2))
        self.recent = [GrowingTensor(), GrowingTensor()]

    @property
    def tokens(self) -> int:
        """Tokens in codes."""
        return self.values[0].length

    @property
    def length(self) -> int:
        """All tokens."""
        return self.tokens + self.recent[0].length

    @property
    def shape(self) -> tuple[int, int, int]:
        memory = self.values[0].memory
        memory = self.recent[0].memory if memory is None else memory
        return (0, 0, 0) if memory is None else (memory.shape[0], memory.shape[1], self.length)

    def parts(self) -> tuple[Parts, Parts, Sequence[Tensor], Tensor | None]:
        recent = [x.used for x in self.recent] if self.recent[0].length else []
        return tuple(x.used for x in self.keys), tuple(x.used for x in self.values), recent, None

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.note_form(keys, values)
        new = [keys.detach(), values.detach()]
        step, kept = self.spec.step, self.spec.kept
        if step == 1 and not kept:
            self._quantize(*new)
            return
        ready = (self.recent[0].length + keys.shape[2] - kept) // step * step
        if ready > 0:
            if self.recent[0].length:
                new = [torch.cat([old.used, more], 2) for old, more in zip(self.recent, new, strict=True)]
            self._quantize(*(x.narrow(2, 0, ready) for x in new))
            new = [x.narrow(2, ready, x.shape[2] - ready) for x in new]
            self.recent = [GrowingTensor(), GrowingTensor()]
        elif self.values[0].memory is None:
            self._quantize(*(x.narrow(2, 0, 0) for x in new))
        for old, more in zip(self.recent, new, strict=True):
            old.append(more)

    def _quantize(self, keys: Tensor, values: Tensor) -> None:
        for stored, parts in zip(
            (self.keys, self.values), quantize_keys_and_values(keys, values, self.form), strict=True
        ):
            for tensor, part in zip(stored, parts, strict=True):
                tensor.append(part)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens.

        Raises:
            ValueError: there are fewer.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"crop: the cache has {self.length} tokens, got {length}")
        step, left = self.spec.step, min(length, self.tokens)
        whole = left // step * step
        for recent in self.recent:
            recent.crop(max(0, length - self.tokens))
        if whole < left:
            floats = self.dequantize()
            self.recent = [GrowingTensor(), GrowingTensor()]
            for recent, x in zip(self.recent, floats, strict=True):
                recent.append(x.narrow(2, whole, left - whole))
        for stored, of_keys in ((self.keys, True), (self.values, False)):
            for tensor, (_, _, each) in zip(stored, self.form.stored(1, of_keys).values(), strict=True):
                tensor.crop(whole // each)

    def drop(self, count: int) -> None:
        """Remove the first `count` tokens.

        Raises:
            ValueError: the spec's tokens share scales or stay in floating point, or there are fewer tokens.
        """
        if self.spec.step > 1 or self.spec.kept or not 0 <= count <= self.length:
            raise ValueError(f"drop: removes up to {self.length} tokens, each with scales of its own, got {count}")
        for tensor in (*self.keys, *self.values):
            tensor.drop(count)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        for tensor in (*self.keys, *self.values, *self.recent):
            tensor.change(function)

    def reset(self) -> None:
        """Forget all tokens and give back their memory."""
        GrowingKV.__init__(self, self.spec)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all memory that is held, that for more tokens included."""
        tensors = (x.memory for x in (*self.keys, *self.values, *self.recent) if x.memory is not None)
        return sum(x.numel() * x.element_size() for x in tensors)
