"""Quantization of tokens for a cache, compiled: one call in place of a dozen of torch's."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..cache_form import CacheForm, Parts, cache_form
from ..custom_ops import implement, note, opaque, portable
from ..ops.quantize_tokens import quantize_tokens
from .compiled_library import TYPES, library, threads
from .kv_attention import FLOATS, FORMATS
from .memory import address
from .structs import Tokens, struct_of

_pack = struct_of(Tokens).pack


def _empty_parts(x: Tensor, dtype: str, scale_dtype: torch.dtype) -> list[Tensor]:
    stored = cache_form(dtype, 0, scale_dtype).stored(x.shape[3], False).values()
    return [x.new_empty(*x.shape[:3], row, dtype=kind) for row, kind, _ in stored]


@functools.cache
def _bounds(form: CacheForm) -> tuple[float, float]:
    """The smallest and the largest scale, as `choose_qparams_affine_with_min_max` has them."""
    (low, high), limits = form.values.code_range, torch.finfo(form.scale_dtype)
    huge = torch.finfo(torch.bfloat16).max
    largest = min(limits.max, huge / ((high - low + 1) / 2))
    if form.values.has_zero_point:
        largest = min(largest, huge / max(-low, high))
    return limits.tiny, largest


@opaque(_empty_parts)
def cpu_quantize_tokens(x: Tensor, dtype: str, scale_dtype: torch.dtype) -> list[Tensor]:
    """See `quantize_tokens`.

    Args:
        x: (B, H, T, D) fp32, bf16 or fp16.
        dtype, scale_dtype: of a `CacheForm`.
    """
    form, compiled = cache_form(dtype, 0, scale_dtype), library()
    if compiled is None or x.dtype not in FLOATS or not x.numel():
        note("cpu_quantize_tokens.torch")
        return list(portable(quantize_tokens)(x, form))
    note(f"cpu_quantize_tokens.{compiled.instruction_set}")
    x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
    parts = _empty_parts(x, dtype, scale_dtype)
    pointers = [address(part) for part in parts]
    compiled.quantize_tokens(
        _pack(
            address(x),
            TYPES[x.dtype],
            *x.stride()[:3],
            *x.shape,
            FORMATS[form.values.dtype.name],
            pointers[0],
            pointers[1],
            pointers[2] if len(pointers) > 2 else 0,
            TYPES[scale_dtype],
            *_bounds(form),
            threads(),
        )
    )
    return parts


@implement("quantize_tokens", "cpu")
def _quantize_tokens(x: Tensor, form: CacheForm) -> Parts:
    return tuple(cpu_quantize_tokens(x, form.dtype, form.scale_dtype))
