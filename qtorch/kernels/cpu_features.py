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
    found = any(getattr(torch.cpu, check, never)() for check in checks[feature])
    return found and (feature != "vnni" or _int_mm_is_exact())


def _int_mm_is_exact() -> bool:
    """Without these instructions, or told by ONEDNN_MAX_CPU_ISA not to use them, oneDNN adds pairs of products with
    saturation in 16 bits: `torch._int_mm` is then wrong wherever codes are large."""
    codes = torch.full((64, 256), 127, dtype=torch.int8)
    return bool((torch._int_mm(codes, codes.t()) == 127 * 127 * 256).all())
