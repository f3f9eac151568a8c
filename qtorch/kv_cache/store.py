"""What a growing and a static store of keys and values share: attention on them, and their numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.cache_form import Parts
from ..kernels.ops.kv_attention import kv_attention
from .spec import KVCacheSpec


class KVStore(ABC):
    """The keys and values of one layer of attention, (B, H, T, D), in codes.

    Attributes:
        spec: how they are quantized.
        dtype, device: of the keys and values that were appended.
        widths: channels of keys and of values.
    """

    def __init__(self, spec: KVCacheSpec) -> None:
        self.spec, self.form = spec, spec.form
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.widths = (0, 0)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Batch, heads, and the number of tokens, or that for which there is room if the store is static."""

    @abstractmethod
    def parts(self) -> tuple[Parts, Parts, Sequence[Tensor], Tensor | None]:
        """Keys, values, recent tokens and length, as `kv_attention` takes them."""

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens (B, H, t, D) in floating point.

        Raises:
            ValueError: their shape, dtype or device is not that of the tokens before.
        """

    @abstractmethod
    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to all tensors that changes the batch, or the device."""

    def attend(
        self,
        query: Tensor,
        mask: Tensor | None = None,
        scaling: float | None = None,
        *,
        causal: bool = False,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Attention of queries on all keys and values: softmax(scaling * q k^T + mask) v.

        Args:
            query: (B, Hq, M, D) in floating point; Hq is a multiple of H, and Hq / H heads share a head of the keys.
            mask: (B or 1, Hq or 1, M, at least T), bool (True: the token is seen) or numbers to add.
            scaling: factor of the products; None: 1 / sqrt(D).
            causal: the last query sees all tokens, each one before it one token less.
            softcap: products become softcap * tanh(product / softcap).
            sinks: (Hq), logits of tokens without values, which take part in the softmax.
            last: the latest tokens only, of a store whose tokens all are in codes with scales of their own.

        Returns:
            (B, Hq, M, D of the values) in the query's dtype; zeros for queries that see no token. It has no gradient:
            a backward pass through it is an error.

        Raises:
            ValueError: shapes do not fit.
        """
        keys, values, recent, length = self.parts()
        if last is not None and last < self.shape[2]:
            keys, values = _last(keys, last), _last(values, last)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        form = self.form
        arguments = (form.dtype, form.block, self.widths[1], float(scaling), float(softcap or 0), causal)
        out = kv_attention(query.detach(), list(keys), list(values), list(recent), length, mask, sinks, *arguments)
        return NoGradient.apply(out, query) if torch.is_grad_enabled() and query.requires_grad else out

    def dequantize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, T, D) in floating point; of a static store also those of tokens that are not there."""
        keys, values, recent, _ = self.parts()
        dtype, form = dtype or self.dtype, self.form
        floats = [
            form.dequantize(part, width, dtype, of_keys)
            for part, width, of_keys in ((keys, self.widths[0], True), (values, self.widths[1], False))
        ]
        if recent:
            floats = [torch.cat([old, new.to(dtype)], 2) for old, new in zip(floats, recent, strict=True)]
        return floats[0], floats[1]

    def reorder(self, rows: Tensor) -> None:
        """Let row i of the batch become row `rows[i]`; rows may be left out or repeated."""
        self.change(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self.change(lambda x: x.repeat_interleave(repeats, 0))

    def to(self, device: torch.device | str) -> None:
        """Move all tensors."""
        self.change(lambda x: x.to(device))
        self.device = torch.device(device)

    @property
    def nbytes(self) -> int:
        """Bytes of all codes, scales and recent tokens; memory that waits for more tokens is not counted."""
        keys, values, recent, _ = self.parts()
        return sum(part.numel() * part.element_size() for part in (*keys, *values, *recent))

    def note_form(self, keys: Tensor, values: Tensor) -> None:
        """Remember widths, dtype and device of the first tokens, and check later ones.

        Raises:
            ValueError: they differ from those of the first.
        """
        found = (keys.shape[3], values.shape[3]), keys.dtype, keys.device
        if self.widths == (0, 0):
            self.widths, self.dtype, self.device = found
        before = self.widths, self.dtype, self.device
        batch, heads, _ = self.shape
        wrong = batch and (keys.shape[:2] != (batch, heads) or found != before)
        if wrong or values.shape[:3] != keys.shape[:3] or values.dtype != keys.dtype:
            raise ValueError(
                f"the cache holds ({batch}, {heads}, tokens, {self.widths}) {before[1]} on {before[2]}; got keys "
                f"{tuple(keys.shape)} {keys.dtype} and values {tuple(values.shape)} {values.dtype} on {keys.device}"
            )


def _last(parts: Parts, count: int) -> Parts:
    return tuple(part.narrow(2, part.shape[2] - count, count) for part in parts)


class NoGradient(torch.autograd.Function):
    """The first tensor; its gradient is an error."""

    @staticmethod
    def forward(ctx: object, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise RuntimeError(
            "attention on a quantized KV cache has no gradient; train without a cache (use_cache=False), or run the "
            "model under torch.no_grad()"
        )
