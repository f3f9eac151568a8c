"""KVCacheSpec: how a cache of keys and values is quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.cache_form import TOKENS, CacheForm
from ..primitives.jsonable import jsonable
from ..primitives.qdtype import qdtype


@jsonable
@dataclass(frozen=True)
class KVCacheSpec:
    """How the keys and values of attention are quantized. Hashable, JSON-able.

    Every token is quantized once, when it is appended or leaves the recent tokens; its codes never change afterwards.

    Args:
        dtype: ``"int8"`` (symmetric), ``"int4"`` (with zero points, two codes a byte) or ``"float8_e4m3fn"``; a torch
            dtype works too.
        keys: ``"token"``, a scale for each token of a head; or ``"channel"``, a scale for each channel of `block`
            consecutive tokens, which keys with a few large channels want (KIVI, arXiv 2402.02750). Values have a scale
            for each token of a head.
        block: tokens whose keys share the scales of channels.
        recent: the number of latest tokens, at least, that stay in floating point; None: as many as a block, or none
            with keys by token.
        scale_dtype: dtype in which scales and zero points are kept.

    Raises:
        ValueError: there is no such format, or a size is negative.
    """

    dtype: str = "int8"
    keys: str = "token"
    block: int = 32
    recent: int | None = None
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        name: Any = self.dtype if isinstance(self.dtype, str) else qdtype(self.dtype).name
        if name not in TOKENS:
            raise ValueError(f"KVCacheSpec: dtype is one of {', '.join(TOKENS)}, got {self.dtype!r}")
        object.__setattr__(self, "dtype", name)
        if self.keys not in ("token", "channel"):
            raise ValueError(f'KVCacheSpec: keys is "token" or "channel", got {self.keys!r}')
        if self.block < 1 or (self.recent or 0) < 0:
            raise ValueError(f"KVCacheSpec: block is positive, recent not negative, got {self.block}, {self.recent}")
        if self.scale_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"KVCacheSpec: scale_dtype is fp32, bf16 or fp16, got {self.scale_dtype}")

    @property
    def form(self) -> CacheForm:
        """What kernels know of it."""
        return CacheForm(self.dtype, self.block if self.keys == "channel" else 0, self.scale_dtype)

    @property
    def step(self) -> int:
        """Tokens that are quantized together."""
        return self.block if self.keys == "channel" else 1

    @property
    def kept(self) -> int:
        """The number of latest tokens, at least, that stay in floating point."""
        return (self.block if self.keys == "channel" else 0) if self.recent is None else self.recent
