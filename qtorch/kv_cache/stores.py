"""GrowingKV, of any number of tokens, and StaticKV, with room for a fixed number, for `torch.compile`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.cache_form import Parts
from ..kernels.ops.quantize import quantize_keys_and_values
from ..primitives.tracing import is_compiling
from .store import KVCacheSpec, KVStore

SMALLEST = 64
"""Tokens for which memory is taken at least."""


class GrowingTensor:
    """A tensor (B, H, T, X) of growing T, in memory that doubles when it is full. `torch.cat` would copy all tokens for
    each new one. Here a token is copied twice on average, and up to half of the memory waits for more."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.first = self.length = 0

    @property
    def used(self) -> Tensor:
        """The tensor, a view of its memory."""
        if self.memory is None:
            raise ValueError("the cache has no tokens yet")
        return self.memory.narrow(2, self.first, self.length)

    def append(self, more: Tensor) -> None:
        """Append tokens (B, H, t, X)."""
        length = self.length + more.shape[2]
        capacity = 0 if self.memory is None else self.memory.shape[2]
        if self.memory is None or self.first + length > capacity:
            memory, old = self.memory, None if self.memory is None else self.used
            # Where half of it was dropped, there is room without more memory.
            if memory is None or self.first < self.length or length > capacity:
                memory = _empty_like(more, max(length, 2 * capacity, SMALLEST))
            if old is not None:
                memory.narrow(2, 0, self.length).copy_(old)
            self.memory, self.first = memory, 0
        self.memory.narrow(2, self.first + self.length, more.shape[2]).copy_(more)
        self.length = length

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor by a function of it that leaves the number of tokens."""
        if self.memory is not None:
            changed = function(self.used)
            self.memory, self.first = _empty_like(changed, self.memory.shape[2]), 0
            self.used.copy_(changed)


def _empty_like(x: Tensor, tokens: int) -> Tensor:
    return torch.empty(*x.shape[:2], tokens, x.shape[3], dtype=x.dtype, device=x.device)


class GrowingKV(KVStore):
    """The keys and values of one layer, which grow; see `KVStore`.

    The latest tokens stay in floating point as long as `KVCacheSpec` says, and until they fill a block whose keys share
    scales. Tokens in codes are never quantized again, with one exception: where `crop` cuts a block of keys, what is
    left of it becomes floating point, and part of a new block.

    Args:
        spec: how tokens are quantized; a string is the `dtype` of a `KVCacheSpec`.
    """

    def __init__(self, spec: KVCacheSpec | str) -> None:
        super().__init__(spec, True)
        self.keys, self.values = ([GrowingTensor() for _ in self.form.stored(1, keys)] for keys in (True, False))
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
        new = list(self._rotate(keys.detach(), values.detach()))
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
        of_keys, of_values = quantize_keys_and_values(keys, values, self.form)
        for tensor, part in zip((*self.keys, *self.values), (*of_keys, *of_values), strict=True):
            tensor.append(part)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; if there are fewer, it raises `ValueError`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"crop: the cache has {self.length} tokens, got {length}")
        step, left = self.spec.step, min(length, self.tokens)
        whole = left // step * step
        for recent in self.recent:
            recent.length = max(0, length - self.tokens)
        if whole < left:
            floats = self._floats(self.dtype)
            self.recent = [GrowingTensor(), GrowingTensor()]
            for recent, x in zip(self.recent, floats, strict=True):
                recent.append(x.narrow(2, whole, left - whole))
        for stored, of_keys in ((self.keys, True), (self.values, False)):
            for tensor, (_, _, each) in zip(stored, self.form.stored(1, of_keys).values(), strict=True):
                tensor.length = whole // each

    def drop(self, count: int) -> None:
        """Remove the first `count` tokens.

        Raises:
            ValueError: the spec's tokens share scales or stay in floating point, or there are fewer tokens.
        """
        if self.spec.step > 1 or self.spec.kept or not 0 <= count <= self.length:
            raise ValueError(f"drop: removes up to {self.length} tokens, each with scales of its own, got {count}")
        for tensor in (*self.keys, *self.values):
            tensor.first, tensor.length = tensor.first + count, tensor.length - count

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


class StaticKV(KVStore):
    """The keys and values of one layer, at fixed addresses; see `KVStore`.

    The number of tokens is a tensor, so that a compiled graph serves every length.

    Args:
        spec: as for `GrowingKV`; each token is quantized by itself, and none stays in floating point.
        max_length: tokens for which there is room.

    Raises:
        ValueError: the spec's tokens share scales or stay in floating point, or `max_length` is not positive.
    """

    def __init__(self, spec: KVCacheSpec | str, max_length: int) -> None:
        super().__init__(spec, False)
        if self.spec.step > 1 or self.spec.kept:
            raise ValueError(
                'a static cache quantizes each token when it comes: keys="token" and no recent tokens, got '
                f"{self.spec}; leave max_length out for a cache that grows"
            )
        if not isinstance(max_length, int) or max_length < 1:
            raise ValueError(f"max_length is a positive integer, got {max_length!r}")
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
        if keys.is_cpu and not is_compiling() and int(self.length) + count > self.max_length:
            raise ValueError(f"a static cache of {self.max_length} tokens has {int(self.length)}, got {count} more")
        positions = torch.arange(count, device=keys.device) + self.length
        of_keys, of_values = quantize_keys_and_values(*self._rotate(keys.detach(), values.detach()), self.form)
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
