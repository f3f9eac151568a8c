"""Blocks of GGUF decoded: from bytes to codes, scales and offsets, all blocks of a tensor at a time.

A block holds 32 or 256 consecutive elements of a row. With d, m and dmin in fp16, and sc and mn integers of few bits,

    Q8_0, Q5_0, Q4_0              w = q * d
    Q5_1, Q4_1                    w = q * d + m
    Q6_K, Q3_K                    w = q * (d * sc)                 a signed sc for 16 elements
    Q5_K, Q4_K, Q2_K              w = q * (d * sc) - dmin * mn     sc and mn for 32 elements, in Q2_K for 16
    TQ1_0, TQ2_0                  w = q * d                        q in {-1, 0, 1}
    IQ4_NL, IQ4_XS                w = table[q] * d,                w = table[q] * (d * sc)
    MXFP4                         w = q * 2^(e - 127)              q in e2m1

Scales stay as they are stored: d, m and dmin in fp16, sc and mn as codes of scales (`QuantSpec.scale_spec`), a byte
each. Everything that `gguf.quants.dequantize` computes is computed with the same numbers in fp32, in the same order.

Source: ggml/src/ggml-quants.c and ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

K = 256
"""Elements of a super-block."""


class Parts(NamedTuple):
    """Blocks, decoded: codes (blocks, size), scales and zero points (blocks, groups), and where those are codes, their
    scales (blocks, 1)."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    scale_scale: Tensor | None = None
    zero_point_scale: Tensor | None = None


def _fields(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """The bytes of each block cut into fields of these sizes."""
    return blocks.split(list(sizes), 1)


def _halves(field: Tensor) -> Tensor:
    """fp16 numbers (blocks, n) of a field of 2 n bytes."""
    return field.contiguous().view(torch.float16)


def _items(field: Tensor, bits: int, run: int) -> Tensor:
    """Codes of `bits` bits: of each `run` bytes first their lowest bits, then the next; (blocks, bytes * 8 / bits)."""
    runs = field.unflatten(1, (-1, run))
    mask = 2**bits - 1
    return torch.stack([(runs >> shift) & mask for shift in range(0, 8, bits)], 2).flatten(1)


def _signed(codes: Tensor, zero: int) -> Tensor:
    return (codes - zero).view(torch.int8)


def _q4_0(blocks: Tensor) -> Parts:
    d, qs = _fields(blocks, 2, 16)
    return Parts(_signed(_items(qs, 4, 16), 8), _halves(d))


def _q4_1(blocks: Tensor) -> Parts:
    d, m, qs = _fields(blocks, 2, 2, 16)
    return Parts(_items(qs, 4, 16), _halves(d), _halves(m))


def _q5_0(blocks: Tensor) -> Parts:
    d, qh, qs = _fields(blocks, 2, 4, 16)
    return Parts(_signed(_items(qs, 4, 16) | _items(qh, 1, 1) << 4, 16), _halves(d))


def _q5_1(blocks: Tensor) -> Parts:
    d, m, qh, qs = _fields(blocks, 2, 2, 4, 16)
    return Parts(_items(qs, 4, 16) | _items(qh, 1, 1) << 4, _halves(d), _halves(m))


def _q8_0(blocks: Tensor) -> Parts:
    d, qs = _fields(blocks, 2, 32)
    return Parts(qs.view(torch.int8), _halves(d))


def _q2_k(blocks: Tensor) -> Parts:
    scales, qs, d, dmin = _fields(blocks, K // 16, K // 4, 2, 2)
    return Parts(_items(qs, 2, 32), scales & 15, scales >> 4, _halves(d), -_halves(dmin))


def _q3_k(blocks: Tensor) -> Parts:
    high, qs, low_scales, high_scales, d = _fields(blocks, K // 8, K // 4, 8, 4, 2)
    scales = _items(low_scales, 4, 8) | _items(high_scales, 2, 4) << 4
    # The third bit is set where nothing is subtracted.
    codes = _signed(_items(qs, 2, 32) | _items(high, 1, 32) << 2, 4)
    return Parts(codes, _signed(scales, 32), scale_scale=_halves(d))


def _scales_and_mins(field: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima of 6 bits: the first 4 of each in 4 bytes, whose highest 2 bits belong to the others."""
    scale, least, low = field.split(4, 1)
    return (
        torch.cat([scale & 63, low & 15 | scale >> 2 & 48], 1),
        torch.cat([least & 63, low >> 4 | least >> 2 & 48], 1),
    )


def _q4_k(blocks: Tensor) -> Parts:
    d, dmin, field, qs = _fields(blocks, 2, 2, 12, K // 2)
    scales, mins = _scales_and_mins(field)
    return Parts(_items(qs, 4, 32), scales, mins, _halves(d), -_halves(dmin))


def _q5_k(blocks: Tensor) -> Parts:
    d, dmin, field, qh, qs = _fields(blocks, 2, 2, 12, K // 8, K // 2)
    scales, mins = _scales_and_mins(field)
    return Parts(_items(qs, 4, 32) | _items(qh, 1, 32) << 4, scales, mins, _halves(d), -_halves(dmin))


def _q6_k(blocks: Tensor) -> Parts:
    ql, qh, scales, d = _fields(blocks, K // 2, K // 4, K // 16, 2)
    codes = _signed(_items(ql, 4, 64) | _items(qh, 2, 32) << 4, 32)
    return Parts(codes, scales.view(torch.int8), scale_scale=_halves(d))


def _tq1_0(blocks: Tensor) -> Parts:
    """Five digits of base 3 in a byte, as a fraction of 256: the next digit is what a multiplication by 3 carries."""
    first, second, last, d = _fields(blocks, 32, 16, 4, 2)
    powers = blocks.new_tensor([1, 3, 9, 27, 81]).reshape(1, 5, 1)
    fractions = [(field.unsqueeze(1) * powers[:, :n]).flatten(1) for field, n in ((first, 5), (second, 5), (last, 4))]
    digits = (torch.cat(fractions, 1).to(torch.int16) * 3) >> 8
    return Parts((digits - 1).to(torch.int8), _halves(d))


def _tq2_0(blocks: Tensor) -> Parts:
    qs, d = _fields(blocks, K // 4, 2)
    scale = _halves(d)
    return Parts(_items(qs, 2, 32), scale, torch.ones_like(scale, dtype=torch.uint8))


def _iq4_nl(blocks: Tensor) -> Parts:
    d, qs = _fields(blocks, 2, 16)
    return Parts(_items(qs, 4, 16), _halves(d))


def _iq4_xs(blocks: Tensor) -> Parts:
    d, high, low, qs = _fields(blocks, 2, 2, K // 64, K // 2)
    scales = _signed(_items(low, 4, 1) | _items(high, 2, 1) << 4, 32)
    return Parts(_items(qs, 4, 16), scales, scale_scale=_halves(d))


def _mxfp4(blocks: Tensor) -> Parts:
    e, qs = _fields(blocks, 1, 16)
    if bool((e == 255).any()):
        raise ValueError("it has blocks with the exponent 255, which is NaN in the OCP specification, not in llama.cpp")
    return Parts(_items(qs, 4, 16), e.contiguous().view(torch.float8_e8m0fnu))


DECODERS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""From bytes (blocks, bytes of a block), uint8, by the name of the type."""
