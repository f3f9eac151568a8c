"""Attention on keys and values in codes or floats, compiled: each is read once for all queries of its head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..custom_ops import implement, note
from ..ops.kv_attention import KVAttention, attend, attend_by_heads, check_call
from ..registry import FLOATS, Problem, needs_floats, register
from .compiled_library import TYPES, Library, library, missing, threads
from .memory import address, empty
from .structs import Attention, Cached, struct_of

# As in src/cached_rows.h.
FORMATS = {"int8": TYPES[torch.int8], "uint4": 16, "float8_e4m3fn": 17, "uint3": 18, "uint2": 19}
MANY_ROWS = 256  # queries of a head of keys, from which on dequantizing and multiplying matrices is faster
NO_ROWS = Cached(*[0] * len(Cached._fields))

_pack = struct_of(Attention).pack


def _supports(problem: Problem) -> str | None:
    return needs_floats(problem) or missing()


@register(
    "kv_attention", layout=("plain", "packed"), weight=FORMATS, activation=(), device="cpu", priority=30,
    supports=_supports,
)  # fmt: skip
def cpu_kv_attention(call: KVAttention) -> Tensor:
    """See `kv_attention`."""
    check_call(call)
    call = call.cut()
    query, compiled, form = call.query, library(), call.form
    _, all_heads, rows, width = query.shape
    heads = call.values[0].shape[1]
    has_elements = call.length and query.numel() and call.width
    if compiled is None or all_heads // heads * rows >= MANY_ROWS or not has_elements:
        note("kv_attention.dequantized")
        return attend_by_heads(call)
    note(f"kv_attention.{compiled.instruction_set}")
    query = _with_whole_rows(query)
    keys = _cached(FORMATS[form.keys.dtype.name], call.keys, width, form.block)
    values = _cached(FORMATS[form.values.dtype.name], call.values, call.width, 0)
    recent = [_with_whole_rows(x.to(query.dtype)) for x in call.recent]
    of_recent = [_cached(TYPES[x.dtype], [x], x.shape[3], 0) for x in recent] or [NO_ROWS, NO_ROWS]
    rows_of = (*keys, *values, *of_recent[0], *of_recent[1])
    lengths = heads, call.tokens, call.length - call.tokens, call.width
    return _attend(compiled, query, rows_of, lengths, call.mask, call.sinks, call.scaling, call.softcap, call.causal)


@implement("attend_floats", "cpu")
def cpu_attend_floats(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None,
    scaling: float, softcap: float, causal: bool,
) -> Tensor:  # fmt: skip
    """See `float_attention`; src/operators.cpp has the same for compiled graphs."""
    compiled, (heads, tokens, width) = library(), values.shape[1:]
    few = query.shape[1] // max(heads, 1) * query.shape[2] < MANY_ROWS
    if compiled is None or not few or not query.numel() or not values.numel() or query.dtype not in FLOATS:
        note("float_attention.torch")
        return attend(query, keys, values, mask, sinks, scaling, softcap, causal)
    note(f"float_attention.{compiled.instruction_set}")
    query, keys, values = map(_with_whole_rows, (query, keys, values))
    of_keys, of_values = (_cached(TYPES[x.dtype], [x], x.shape[3], 0) for x in (keys, values))
    rows_of = (*of_keys, *of_values, *NO_ROWS, *NO_ROWS)
    return _attend(compiled, query, rows_of, (heads, tokens, 0, width), mask, sinks, scaling, softcap, causal)


def _attend(
    compiled: Library, query: Tensor, rows_of: tuple[int, ...], lengths: tuple[int, int, int, int],
    mask: Tensor | None, sinks: Tensor | None, scaling: float, softcap: float, causal: bool,
) -> Tensor:  # fmt: skip
    """The equation for the fields of four `Cached`; `lengths` are heads of keys, tokens, recent ones, and channels."""
    (batch, all_heads, rows, _), (heads, tokens, recent, width) = query.shape, lengths
    of_mask: tuple[int, ...] = (0,) * 5
    if mask is not None:
        mask = _with_whole_rows(mask.view(torch.uint8) if mask.dtype is torch.bool else mask)
        steps = [0 if size == 1 else step for size, step in zip(mask.shape[:3], mask.stride()[:3], strict=True)]
        of_mask = (address(mask), TYPES[mask.dtype], *steps)
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    out = empty((batch, all_heads, rows, width), query.dtype)
    # By position, in the order of the fields: making the named tuple would take several times as long.
    compiled.attention(_pack(
        *rows_of, batch, heads, all_heads // heads, rows, tokens, recent, address(query), TYPES[query.dtype],
        *query.stride()[:3], address(out), *of_mask, address(sinks, torch.float32), causal and rows > 1, scaling,
        softcap, threads(),
    ))  # fmt: skip
    return out


def _with_whole_rows(x: Tensor) -> Tensor:
    """The tensor, its last axis contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _cached(kind: int, parts: Sequence[Tensor], width: int, block: int) -> tuple[int, ...]:
    """The fields of a `Cached`."""
    codes, size = parts[0], parts[0].element_size()
    steps = [size * step for step in codes.stride()[:3]]
    if len(parts) == 1:
        return address(codes), kind, width, *steps, 0, 0, 0, 0, 0, 0, 0
    scale, zero = parts[1], address(parts[2]) if len(parts) > 2 else 0
    return address(codes), kind, width, *steps, address(scale), zero, TYPES[scale.dtype], *scale.stride()[:3], block
