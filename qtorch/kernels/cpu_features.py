"""What this processor can do, as far as the choice of a kernel depends on it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


@functools.cache
def has(feature: str) -> bool:
    """Whether the CPU has `feature`: ``"vnni"`` (8-bit dot products) or ``"bf16"`` (AMX or AVX-512 bf16 products)."""
    checks = {"vnni": ("_is_vnni_supported",), "bf16": ("_is_amx_tile_supported", "_is_avx512_bf16_supported")}
    never: Callable[[], bool] = lambda: False  # noqa: E731
    return any(getattr(torch.cpu, check, never)() for check in checks[feature])
