"""Attention on keys and values in codes.

    y[m] = sum_t p[m, t] v[t],    p[m] = softmax_t(scaling * q[m] . k[t] + mask[m, t])

The queries (B, H G, M, D) of G heads share a head of the keys. The portable code, which is the reference, dequantizes a
head of the keys at a time; kernels read codes.
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives import LinearSpec, Scheme
from ...primitives.layouts import smallest_layout
from ..cache_form import CacheForm, cache_form
from ..custom_ops import Name, by_device, opaque
from ..registry import FLOATS, REFERENCE, Problem, lookup, register

FOLDED_ROWS = 16  # up to so many tokens, queries of a head become rows of one matrix: a mask is repeated for them


class KVAttention(NamedTuple):
    """The arguments of a kernel; see `kv_attention`."""

    query: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    recent: Sequence[Tensor]
    used: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    form: CacheForm
    width: int
    scaling: float
    softcap: float
    causal: bool

    @property
    def tokens(self) -> int:  # in codes
        return self.values[0].shape[2]

    @property
    def length(self) -> int:  # of all tokens
        return self.tokens + (self.recent[0].shape[2] if self.recent else 0)

    def cut(self) -> "KVAttention":
        """The same with the tokens in use alone; reads their number on the host."""
        if self.used is None:
            return self
        used = int(self.used)
        keys, values = ([part.narrow(2, 0, used) for part in parts] for parts in (self.keys, self.values))
        return self._replace(keys=keys, values=values, used=None)


@opaque(lambda query, keys, values, recent, *rest: query.new_empty(*query.shape[:3], rest[6]))
def kv_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], recent: Sequence[Tensor],
    length: Tensor | None, mask: Tensor | None, sinks: Tensor | None,
    dtype: Name, value_dtype: Name, block: int, width: int, scaling: float, softcap: float, causal: bool,
) -> Tensor:  # fmt: skip
    """The equation above; the registry chooses the kernel.

    Args:
        query: (B, H G, M, D) in floating point.
        keys, values: `Parts` of a `CacheForm`, of T tokens; values have `width` channels.
        recent: keys (B, H, R, D) and values (B, H, R, width) of the tokens that follow, in floating point; or nothing.
        length: of the T tokens, the number that is in use, a tensor of one int64 on their device, without recent ones;
            None: all of them.
        mask: (B or 1, H G or 1, M, at least T + R), bool (True: the token is seen) or numbers to add.
        sinks: (H G), logits of tokens without values.
        dtype, value_dtype, block: of the `CacheForm`.
        width: channels of the values.
        scaling: factor of the products.
        softcap: products become softcap * tanh(product / softcap); 0: they stay.
        causal: the query in row m sees the tokens up to T + R - M + m only.

    Returns:
        (B, H G, M, width) in the query's dtype. Queries that see no token get zeros.
    """
    form = cache_form(dtype, value_dtype, block, values[1].dtype)
    kernel = lookup("kv_attention", scheme_of(form, query.shape[-1]), query.dtype, query.device.type)
    return kernel(KVAttention(query, keys, values, recent, length, mask, sinks, form, width, scaling, softcap, causal))


@opaque(lambda query, keys, values, *_: query.new_empty(*query.shape[:3], values.shape[3]))
def float_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None,
    scaling: float, softcap: float, causal: bool,
) -> Tensor:  # fmt: skip
    """The same on keys (B, H, T, D) and values (B, H, T, D') in floating point; without gradients."""
    all_of = (query, keys, values)
    wanted = (*values.shape[:3], query.shape[-1]) if query.dim() == values.dim() == 4 else None
    alike = {(x.dtype, x.device) for x in all_of} == {(query.dtype, query.device)}
    if tuple(keys.shape) != wanted or not alike or not query.is_floating_point():
        got = ", ".join(f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in all_of)
        raise ValueError(
            "float_attention: queries (B, Hq, M, D), keys (B, H, T, D) and values (B, H, T, D') have one dtype in "
            f"floating point and one device, got {got}"
        )
    batch, heads, tokens = values.shape[:3]
    _check_queries("float_attention", query, batch, heads, tokens, mask, sinks)
    return attend_floats(query, keys, values, mask, sinks, scaling, softcap, causal)


@by_device
def attend_floats(query: Tensor, keys: Tensor, values: Tensor, *more: Any) -> Tensor:
    """`float_attention` of checked arguments."""
    return attend(query, keys, values, *more)


@functools.cache
def scheme_of(form: CacheForm, width: int) -> Scheme:
    """The keys of a token, or of a block of tokens, as a scheme, by which kernels are looked up."""
    layout = smallest_layout(form.keys.dtype)
    return Scheme(LinearSpec(form.keys, layout=layout), (max(form.block, 1), width), torch.float32)


def problem_of(form: CacheForm, width: int, dtype: torch.dtype, device: str) -> Problem:
    """What `kv_attention` looks up for queries of this dtype."""
    return Problem("kv_attention", scheme_of(form, width), dtype, device)


def check_call(call: KVAttention) -> None:
    """Raise `ValueError` if a tensor has not the shape, dtype or memory by which a kernel reads it."""
    query, form = call.query, call.form
    batch, heads, tokens = call.values[0].shape[:3]
    key_width = query.shape[3]
    for name, parts, width in (("keys", call.keys, key_width), ("values", call.values, call.width)):
        stored = form.stored(width, name == "keys")
        if len(parts) != len(stored):
            raise ValueError(f"kv_attention: {name} are {', '.join(stored)}, got {len(parts)} tensors")
        for part, (what, (row, dtype, each)) in zip(parts, stored.items(), strict=True):
            _check(what, name, part, query.device, (batch, heads, -(-tokens // each), row), {dtype})
            if part.stride() != parts[-1].stride() and what == "scale":
                raise ValueError(f"kv_attention: scale and zero point of the {name} differ in their strides")
    for name, part, width in zip(("keys", "values"), call.recent, (key_width, call.width), strict=False):
        _check("recent", name, part, query.device, (batch, heads, call.length - tokens, width), FLOATS)
    if call.used is not None and (call.used.shape != () or call.used.dtype != torch.int64 or call.recent):
        raise ValueError("kv_attention: a length is one int64, and there are no recent tokens behind it")
    _check_queries("kv_attention", query, batch, heads, call.length, call.mask, call.sinks)


def _check_queries(
    op: str, query: Tensor, batch: int, heads: int, length: int, mask: Tensor | None, sinks: Tensor | None
) -> None:
    if query.shape[0] != batch or (query.shape[1] % heads if heads else query.shape[1]):
        raise ValueError(f"{op}: queries {tuple(query.shape)} do not fit {batch} x {heads} heads of keys")
    if mask is not None:
        some = tuple(mask.shape)
        fits = len(some) == 4 and all(a in (1, b) for a, b in zip(some, query.shape[:3], strict=False))
        if not fits or some[3] < length or mask.dtype not in (*FLOATS, torch.bool):
            wanted = f"{tuple(query.shape[:3])} or 1 each, and at least {length} tokens"
            raise ValueError(f"{op}: a mask has {wanted}, bool or in floating point, got {some}")
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(f"{op}: sinks have shape ({query.shape[1]},), got {tuple(sinks.shape)}")


def _check(
    what: str, of: str, x: Tensor, device: torch.device, shape: tuple[int, ...], dtypes: Collection[torch.dtype]
) -> None:
    if x.shape != shape or x.dtype not in dtypes or x.device != device:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"kv_attention: {what} of the {of} must be {shape} {wanted} on {device}, got {tuple(x.shape)} {x.dtype} on "
            f"{x.device}"
        )
    # Scales of tokens are read as one row.
    axis = 2 if shape[3] == 1 else 3
    if shape[axis] > 1 and x.stride(axis) != 1 and x.numel():
        raise ValueError(f"kv_attention: {what} of the {of} must be contiguous along axis {axis}, strides {x.stride()}")


@register("kv_attention", priority=REFERENCE, name="reference")
def attend_portably(call: KVAttention) -> Tensor:
    """The equation in fp32, on dequantized keys and values of one head after the other."""
    return attend_by_heads(call._replace(query=call.query.float())).to(call.query.dtype)


def attend_by_heads(call: KVAttention) -> Tensor:
    """The equation in the dtype of the queries: what is fastest for many of them."""
    return torch.cat([attend(*arguments) for arguments in _heads(call.cut(), call.query.dtype)], 1)


def _heads(call: KVAttention, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments of `attend` for each head of keys."""
    heads = call.values[0].shape[1]
    group = call.query.shape[1] // heads
    for h in range(heads):
        of_queries = slice(h * group, (h + 1) * group)
        keys = call.form.dequantize([part[:, h : h + 1] for part in call.keys], call.query.shape[-1], dtype, True)
        values = call.form.dequantize([part[:, h : h + 1] for part in call.values], call.width, dtype, False)
        if call.recent:
            keys = torch.cat([keys, call.recent[0][:, h : h + 1].to(dtype)], 2)
            values = torch.cat([values, call.recent[1][:, h : h + 1].to(dtype)], 2)
        mask = call.mask
        if mask is not None:
            mask = mask[:, of_queries] if mask.shape[1] > 1 else mask
            mask = mask[..., : call.length]
        sinks = None if call.sinks is None else call.sinks[of_queries]
        yield call.query[:, of_queries], keys, values, mask, sinks, call.scaling, call.softcap, call.causal


def attend(
    query: Tensor, keys: Tensor, values: Tensor,
    mask: Tensor | None, sinks: Tensor | None, scaling: float, softcap: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attention on keys (B, H, T, D) and values (B, H, T, D') in floating point; else as `kv_attention`."""
    (batch, all_heads, rows, width), (heads, tokens) = query.shape, keys.shape[1:3]
    group = all_heads // heads
    if causal and rows > 1 and (mask is not None or rows != tokens or softcap or sinks is not None):
        own = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).tril(tokens - rows)[None, None]
        mask = own if mask is None else mask & own if mask.dtype is torch.bool else mask.masked_fill(~own, -torch.inf)
    causal = causal and mask is None and rows > 1
    if not softcap and sinks is None:
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        if group == 1 or causal or rows > FOLDED_ROWS:
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, mask, is_causal=causal, scale=scaling, enable_gqa=group > 1
            )
        folded = query.reshape(batch, heads, group * rows, width)
        if mask is not None:
            mask = mask.expand(-1, all_heads, rows, -1).reshape(len(mask), heads, group * rows, tokens)
        out = torch.nn.functional.scaled_dot_product_attention(folded, keys, values, mask, scale=scaling)
        return out.reshape(batch, all_heads, rows, -1)
    scores = query.reshape(batch, heads, group * rows, width) @ keys.mT * scaling
    scores = scores.float().reshape(batch, all_heads, rows, tokens)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(batch, -1, rows, 1)
        scores = torch.cat([scores, column], -1)
    # Zeros where no token is seen.
    weights = scores.softmax(-1).masked_fill(scores.amax(-1, keepdim=True) == -torch.inf, 0)[..., :tokens]
    folded = weights.to(values.dtype).reshape(batch, heads, group * rows, tokens)
    return (folded @ values).reshape(batch, all_heads, rows, -1)
