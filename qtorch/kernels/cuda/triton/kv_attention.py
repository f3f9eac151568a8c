"""Attention on keys and values in codes: the queries that share a head of keys are rows of one tile.

    y[m] = sum_t p[m, t] v[t],    p[m] = softmax_t(scaling * q[m] . k[t] + mask[m, t])

A program reads a part of the tokens and writes its sums, their weights and the largest score; torch joins the parts
(flash decoding). Scales of tokens are multiplied into scores and weights, so that codes go into the products as they
are; in bf16 and fp16 all of them are exact. Bytes with two codes are two tiles, whose channels the query is read for.
Codes of 2 and 3 bits are one tile: each channel reads its bytes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...custom_ops import note
from ...ops.kv_attention import KVAttention
from .launch import check_device

FORMATS = {"int8": 0, "uint4": 1, "float8_e4m3fn": 2, "floats": 3, "uint2": 4, "uint3": 5}
MASKS = {None: 0, torch.uint8: 1, torch.float32: 2, torch.bfloat16: 2, torch.float16: 2}
BLOCK_T = 64
PROGRAMS = 264
"""Programs that keep a large GPU busy."""


@triton.jit
def _numbers(codes, FORMAT: tl.constexpr, HIGH: tl.constexpr, dtype: tl.constexpr):
    """The numbers of codes in `dtype`; HIGH: the upper ones of bytes with two."""
    if FORMAT == 1:
        if HIGH:
            w = (codes >> 4).to(dtype)
        else:
            w = (codes & 15).to(dtype)
    elif FORMAT == 2:
        # As fp16 they have the same significand, and an exponent that is less by 8. NaN is in their scale.
        bits = ((codes & 0x80).to(tl.int16) << 8) | ((codes & 0x7F).to(tl.int16) << 7)
        w = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    else:
        w = codes.to(dtype)
    return w


@triton.jit
def _load_codes(at, bytes_, run, seen, inside, FORMAT: tl.constexpr):
    """The bytes (tokens, channels) at `at` (tokens, 1); of codes of 2 and 3 bits, which share them, the codes."""
    mask = seen[:, None] & inside[None, :]
    if FORMAT >= 4:
        item, place = bytes_ // run, bytes_ % run
        two = tl.load(at + ((item // 4) * run + place)[None, :], mask=mask, other=0)
        codes = (two >> (2 * (item % 4)).to(tl.uint8)[None, :]) & 3
        if FORMAT == 5:
            one = tl.load(at + (2 * run + place)[None, :], mask=mask, other=0)
            codes |= ((one >> item.to(tl.uint8)[None, :]) & 1) << 2
    else:
        codes = tl.load(at + bytes_[None, :], mask=mask, other=0)
    return codes


@triton.jit
def _channels(bytes_, run, WIDTH, FORMAT: tl.constexpr, HIGH: tl.constexpr):
    """The channel of each code, and whether there is one."""
    if FORMAT == 1:
        channel = (bytes_ // run) * 2 * run + bytes_ % run
        if HIGH:
            channel += run
        inside = (bytes_ < 4 * run) & (channel < WIDTH)
    else:
        channel = bytes_
        inside = bytes_ < WIDTH
    return channel, inside


@triton.jit
def _key_tile(
    codes, scale, zero, stride_block, tokens, BLOCK, channel, inside, mask,
    FORMAT: tl.constexpr, HIGH: tl.constexpr, PER_CHANNEL: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Numbers of keys (tokens, channels); those of channels with scales are whole keys."""
    if PER_CHANNEL:
        w = _numbers(codes, FORMAT, HIGH, tl.float32)
        at = (tokens // BLOCK)[:, None] * stride_block + channel[None, :]
        seen = mask & inside[None, :]
        w = w * tl.load(scale + at, mask=seen, other=0.0).to(tl.float32)
        if ZERO:
            w += tl.load(zero + at, mask=seen, other=0.0).to(tl.float32)
        w = tl.where(seen, w, 0.0).to(dtype)
    else:
        w = _numbers(codes, FORMAT, HIGH, dtype)
    return w


@triton.jit
def _kv_attention(
    q_ptr, k_ptr, ks_ptr, kz_ptr, v_ptr, vs_ptr, vz_ptr, used_ptr, mask_ptr, y_ptr, high_ptr, sum_ptr,
    heads, group, rows, tokens, part, parts, first_part, before, length, k_width, v_width, k_run, v_run, block,
    scaling, softcap,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ksb, stride_ksh, stride_kst, stride_vsb, stride_vsh, stride_vst,
    stride_mb, stride_mh, stride_mm,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, PER_CHANNEL: tl.constexpr, K_ZERO: tl.constexpr,
    V_ZERO: tl.constexpr, MASK: tl.constexpr, USED: tl.constexpr,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    dtype = q_ptr.dtype.element_ty
    if USED:
        used = tl.load(used_ptr).to(tl.int32)
        length = used
    else:
        used = tokens
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < group * rows
    of_query, m = h * group + row // rows, row % rows
    q_at = q_ptr + b * stride_qb + of_query * stride_qh + m * stride_qm
    byte = tl.arange(0, BLOCK_K)
    v_byte = tl.arange(0, BLOCK_V)
    channel, inside = _channels(byte, k_run, k_width, K_FORMAT, False)
    q = tl.load(q_at[:, None] + channel[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    q_sum = tl.sum(q.to(tl.float32), 1)
    y = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if K_FORMAT == 1:
        up, up_inside = _channels(byte, k_run, k_width, K_FORMAT, True)
        q_up = tl.load(q_at[:, None] + up[None, :], mask=there[:, None] & up_inside[None, :], other=0.0)
        q_sum += tl.sum(q_up.to(tl.float32), 1)
    if V_FORMAT == 1:
        y_up = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    constant = tl.zeros([BLOCK_M], tl.float32)
    k_bytes = 4 * k_run if K_FORMAT == 1 else k_width
    v_bytes = 4 * v_run if V_FORMAT == 1 else v_width
    first = tl.program_id(1) * part
    for t in range(first, min(first + part, used), BLOCK_T):
        at = t + tl.arange(0, BLOCK_T)
        seen = at < used
        k_at = k_ptr + b * stride_kb + h * stride_kh + at[:, None].to(tl.int64) * stride_kt
        codes = _load_codes(k_at, byte, k_run, seen, byte < k_bytes, K_FORMAT)
        ks, kz = ks_ptr + b * stride_ksb + h * stride_ksh, kz_ptr + b * stride_ksb + h * stride_ksh
        k = _key_tile(
            codes, ks, kz, stride_kst, at, block, channel, inside, seen[:, None], K_FORMAT, False, PER_CHANNEL, K_ZERO,
            dtype,
        )  # fmt: skip
        score = tl.dot(q, k.T, input_precision=PRECISION)
        if K_FORMAT == 1:
            k = _key_tile(
                codes, ks, kz, stride_kst, at, block, up, up_inside, seen[:, None], K_FORMAT, True, PER_CHANNEL, K_ZERO,
                dtype,
            )  # fmt: skip
            score = tl.dot(q_up, k.T, score, input_precision=PRECISION)
        if K_FORMAT != 3 and not PER_CHANNEL:
            score *= tl.load(ks + at * stride_kst, mask=seen, other=0.0).to(tl.float32)[None, :]
            if K_ZERO:
                score += q_sum[:, None] * tl.load(kz + at * stride_kst, mask=seen, other=0.0).to(tl.float32)[None, :]
        score *= scaling
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
        visible = there[:, None] & seen[None, :]
        if CAUSAL:
            visible &= (before + at)[None, :] <= (length - rows + m)[:, None]
        if MASK:
            mask_at = mask_ptr + b * stride_mb + of_query * stride_mh + m * stride_mm
            bias = tl.load(mask_at[:, None] + (before + at)[None, :], mask=visible, other=0)
            if MASK == 1:
                visible &= bias != 0
            else:
                score += bias.to(tl.float32)
                visible &= bias.to(tl.float32) != float("-inf")
        score = tl.where(visible, score, float("-inf"))
        highest = tl.maximum(high, tl.max(score, 1))
        less = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.where(visible, tl.exp(score - less[:, None]), 0.0)
        factor = tl.exp(tl.where(high == float("-inf"), float("-inf"), high - less))
        high = highest
        total = total * factor + tl.sum(p, 1)
        if V_FORMAT != 3:
            vs_at = b * stride_vsb + h * stride_vsh + at * stride_vst
            if V_ZERO:
                zeros = tl.load(vz_ptr + vs_at, mask=seen, other=0.0).to(tl.float32)
                constant = constant * factor + tl.sum(tl.where(visible, p * zeros[None, :], 0.0), 1)
            scales = tl.load(vs_ptr + vs_at, mask=seen, other=0.0).to(tl.float32)
            p = tl.where(visible, p * scales[None, :], 0.0)
        v_at = v_ptr + b * stride_vb + h * stride_vh + at[:, None].to(tl.int64) * stride_vt
        codes = _load_codes(v_at, v_byte, v_run, seen, v_byte < v_bytes, V_FORMAT)
        y = tl.dot(p.to(dtype), _numbers(codes, V_FORMAT, False, dtype), y * factor[:, None], input_precision=PRECISION)
        if V_FORMAT == 1:
            y_up = tl.dot(
                p.to(dtype), _numbers(codes, V_FORMAT, True, dtype), y_up * factor[:, None], input_precision=PRECISION
            )
    at = (head * parts + first_part + tl.program_id(1)) * (group * rows) + row
    tl.store(high_ptr + at, high, mask=there)
    tl.store(sum_ptr + at, total, mask=there)
    channel, inside = _channels(v_byte, v_run, v_width, V_FORMAT, False)
    tl.store(
        y_ptr + at[:, None] * v_width + channel[None, :], y + constant[:, None], mask=there[:, None] & inside[None, :]
    )
    if V_FORMAT == 1:
        channel, inside = _channels(v_byte, v_run, v_width, V_FORMAT, True)
        tl.store(
            y_ptr + at[:, None] * v_width + channel[None, :],
            y_up + constant[:, None],
            mask=there[:, None] & inside[None, :],
        )


def kv_attention(call: KVAttention) -> Tensor:
    """See `ops.kv_attention`; the arguments are checked, but for their device."""
    query, form, mask = call.query, call.form, call.mask
    groups = {"keys": call.keys, "values": call.values, "recent": call.recent}
    held = {f"{name} {i}": t for name, tensors in groups.items() for i, t in enumerate(tensors)}
    check_device("kv_attention", query=query, mask=mask, used=call.used, sinks=call.sinks, **held)
    note("triton.kv_attention")
    batch, all_heads, rows, width = query.shape
    heads = call.values[0].shape[1]
    group = all_heads // heads
    query = query if query.stride(3) == 1 else query.contiguous()
    if mask is not None:
        mask = mask.view(torch.uint8) if mask.dtype is torch.bool else mask
        mask = mask if mask.stride(3) == 1 else mask.contiguous()
    all_rows = group * rows
    block_m = min(64, max(16, triton.next_power_of_2(all_rows)))
    tiles = batch * heads * triton.cdiv(all_rows, block_m)
    part = triton.cdiv(triton.cdiv(call.tokens, max(1, PROGRAMS // max(tiles, 1))), 4 * BLOCK_T) * 4 * BLOCK_T
    of_codes = triton.cdiv(call.tokens, part) if part else 0
    parts = of_codes + bool(call.recent)
    new = lambda *shape: torch.empty(batch, heads, parts, all_rows, *shape, dtype=torch.float32, device=query.device)  # noqa: E731
    sums, high, total = new(call.width), new(), new()
    steps = (
        [0] * 3 if mask is None else [0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True)][:3]
    )

    def launch(
        kinds: tuple[str, str], keys: Any, values: Any, tokens: int, part: int, first: int, count: int, before: int
    ) -> None:
        k_run, v_run = runs = [triton.cdiv(size, 8) for size in (width, call.width)]
        rows_of = zip(kinds, runs, (width, call.width), strict=True)
        tiles_of = [4 * run if kind == "uint4" else size for kind, run, size in rows_of]
        scaled, k_zero, v_zero = len(keys) > 1, len(keys) > 2, len(values) > 2
        used = call.used is not None
        _kv_attention[(batch * heads, count, triton.cdiv(all_rows, block_m))](
            query, keys[0], keys[1 if scaled else 0], keys[2 if k_zero else 0],
            values[0], values[1 if scaled else 0], values[2 if v_zero else 0],
            call.used if used else query, query if mask is None else mask, sums, high, total,
            heads, group, rows, tokens, part, parts, first, before, call.length, width, call.width, k_run, v_run,
            max(form.block, 1), call.scaling, call.softcap or 1.0, *query.stride()[:3], *keys[0].stride()[:3],
            *values[0].stride()[:3], *(keys[1].stride()[:3] if scaled else (0, 0, 0)),
            *(values[1].stride()[:3] if scaled else (0, 0, 0)), *steps,
            *(FORMATS[kind] for kind in kinds), scaled and form.block > 0, k_zero, v_zero,
            MASKS[None if mask is None else mask.dtype], used,
            call.softcap != 0, call.causal and rows > 1, "ieee" if query.dtype is torch.float32 else "tf32",
            block_m, BLOCK_T, *(max(16, triton.next_power_of_2(row)) for row in tiles_of), num_warps=4,
        )  # fmt: skip

    if of_codes:
        launch(
            (form.keys.dtype.name, form.values.dtype.name), call.keys, call.values, call.tokens, part, 0, of_codes, 0
        )
    if call.recent:
        keys, values = ([x.to(query.dtype)] for x in call.recent)
        count = call.recent[0].shape[2]
        launch(("floats", "floats"), keys, values, count, count, of_codes, 1, call.tokens)
    return _join(call, sums, high, total).to(query.dtype)


def _join(call: KVAttention, sums: Tensor, high: Tensor, total: Tensor) -> Tensor:
    """The result of parts: sums (B, H, parts, rows, width), largest scores and sums of weights (B, H, parts, rows)."""
    batch, all_heads, rows, _ = call.query.shape
    highest = high.amax(2, keepdim=True)
    if call.sinks is not None:
        heads = high.shape[1]
        sinks = call.sinks.float().reshape(1, heads, 1, -1, 1).expand(batch, -1, -1, -1, rows).flatten(3)
        highest = torch.maximum(highest, sinks)
    factor = (high - highest.nan_to_num(neginf=0.0)).exp()
    weight = (factor * total).sum(2)
    if call.sinks is not None:
        weight = weight + (sinks - highest).exp().squeeze(2)
    y = (factor.unsqueeze(-1) * sums).sum(2)
    # Where no token is seen, the result is zero.
    y = torch.where(weight.unsqueeze(-1) == 0, 0.0, y / weight.unsqueeze(-1))
    return y.reshape(batch, all_heads, rows, call.width)
