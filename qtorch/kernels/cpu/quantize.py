"""Quantization of tokens for a cache, and of weights, compiled: one call in place of a dozen of torch's.

Each block of a weight is a row of the quantizer of activations, which chooses its scale and writes its codes while it
is in the cache. Scales that it does not choose (of other rules, or rounded to 16 bits) are chosen by torch operators.
"""

import functools
from dataclasses import replace

import torch

from ...primitives import PerRow, QuantSpec, Rounding, ZeroPointDomain, qdtype, slices
from ..cache_form import CacheForm, Parts, cache_form
from ..custom_ops import Name, implement, note, opaque, portable
from ..ops.quantize import Quantized, quantize_tokens, quantize_weight
from ..registry import FLOATS
from . import memory, structs
from .compiled_library import TYPES, library, threads
from .int8_linear import quantize_rows, row_quantizer, static_quantizer
from .kv_attention import FORMATS

_pack = structs.struct_of(structs.Tokens).pack


def _empty_parts(x: torch.Tensor, dtype: str, scale_dtype: torch.dtype) -> list[torch.Tensor]:
    stored = cache_form(dtype, dtype, 0, scale_dtype).stored(x.shape[3], False).values()
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
def cpu_quantize_tokens(x: torch.Tensor, dtype: Name, scale_dtype: torch.dtype) -> list[torch.Tensor]:
    """See `quantize_tokens`; dtype is that of values in a `CacheForm`."""
    form, compiled = cache_form(dtype, dtype, 0, scale_dtype), library()
    if compiled is None or x.dtype not in FLOATS or not x.numel():
        note("cpu_quantize_tokens.torch")
        return list(portable(quantize_tokens)(x, form))
    note(f"cpu_quantize_tokens.{compiled.instruction_set}")
    x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
    parts = _empty_parts(x, dtype, scale_dtype)
    pointers = [memory.address(part) for part in parts]
    compiled.quantize_tokens(_pack(
        memory.address(x), TYPES[x.dtype], *x.stride()[:3], *x.shape, FORMATS[form.values.dtype.name], pointers[0],
        pointers[1], pointers[2] if len(pointers) > 2 else 0, TYPES[scale_dtype], *_bounds(form), threads(),
    ))  # fmt: skip
    return parts


@implement("quantize_tokens", "cpu")
def _quantize_tokens(x: torch.Tensor, form: CacheForm) -> Parts:
    return tuple(cpu_quantize_tokens(x, form.value_dtype, form.scale_dtype))


@functools.cache
def _of_rows(spec: QuantSpec) -> QuantSpec | None:
    """The spec of a block as a row of int8 codes; None if the codes of `spec` cannot be made so."""
    low, high = spec.code_range
    if (
        type(spec) is not QuantSpec
        or spec.dtype.is_floating_point
        or spec.dtype.storage.itemsize != 1
        or not -128 <= low <= high <= 127
        or spec.rounding is not Rounding.NEAREST_EVEN
        or spec.zero_point_domain not in (ZeroPointDomain.INT, ZeroPointDomain.NONE)
    ):
        return None
    return replace(spec, dtype=qdtype("int8"), granularity=PerRow(), quant_min=low, quant_max=high)


@implement("quantize_weight", "cpu")
def _quantize_weight(weight: torch.Tensor, spec: QuantSpec) -> Quantized:
    rows, block, compiled = _of_rows(spec), spec.block_size(weight.shape), library()
    readable = weight.dtype in FLOATS and slices.is_plain_on_cpu(weight) and weight.numel() > 0
    if rows is None or compiled is None or not readable or any(size != 1 for size in block[:-1]):
        note("quantize_weight.torch")
        return portable(quantize_weight)(weight, spec)
    kept, matrix = spec.stored_scale_dtype(weight.dtype), weight.detach().reshape(-1, block[-1])
    chosen = row_quantizer(rows) if kept is torch.float32 else None
    if chosen is not None:
        note(f"quantize_weight.{compiled.instruction_set}")
        codes, scale, zero_point = quantize_rows(matrix, chosen)
    else:
        note(f"quantize_weight.{compiled.instruction_set}.codes")
        given = static_quantizer(rows)
        assert given is not None
        scale, zero_point = spec.choose_qparams(weight)
        of_rows = None if zero_point is None else zero_point.reshape(-1, 1)
        codes = quantize_rows(matrix, given, scale.reshape(-1, 1), of_rows)[0]
    codes = codes.view(spec.dtype.storage).reshape(weight.shape)
    shape = spec.scale_shape(weight.shape)
    if zero_point is not None:
        zero_point = zero_point.to(spec.dtype.storage).reshape(shape)
    return codes, scale.reshape(shape), zero_point
