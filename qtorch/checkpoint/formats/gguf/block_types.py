"""The types of GGUF: each is an entry of `TYPES`, with the spec of its tensors and how its blocks are decoded.

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

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....dtypes.base import quantized_type
from ....primitives import CodebookSpec, MappingType, PerGroup, QuantSpec, ZeroPointDomain, qdtype
from ....primitives.spec import Scheme
from ....recipes.gguf import IQ4_TABLE, GgufIQ4_NL
from ..blocks import weight_only

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


def _q4_0(d: Tensor, qs: Tensor) -> Parts:
    return Parts(_signed(_items(qs, 4, 16), 8), _halves(d))


def _q4_1(d: Tensor, m: Tensor, qs: Tensor) -> Parts:
    return Parts(_items(qs, 4, 16), _halves(d), _halves(m))


def _q5_0(d: Tensor, qh: Tensor, qs: Tensor) -> Parts:
    return Parts(_signed(_items(qs, 4, 16) | _items(qh, 1, 1) << 4, 16), _halves(d))


def _q5_1(d: Tensor, m: Tensor, qh: Tensor, qs: Tensor) -> Parts:
    return Parts(_items(qs, 4, 16) | _items(qh, 1, 1) << 4, _halves(d), _halves(m))


def _q2_k(scales: Tensor, qs: Tensor, d: Tensor, dmin: Tensor) -> Parts:
    return Parts(_items(qs, 2, 32), scales & 15, scales >> 4, _halves(d), -_halves(dmin))


def _q3_k(high: Tensor, qs: Tensor, low_scales: Tensor, high_scales: Tensor, d: Tensor) -> Parts:
    scales = _items(low_scales, 4, 8) | _items(high_scales, 2, 4) << 4
    # The third bit is set where nothing is subtracted.
    codes = _signed(_items(qs, 2, 32) | _items(high, 1, 32) << 2, 4)
    return Parts(codes, _signed(scales, 32), scale_scale=_halves(d))


def _with_mins(d: Tensor, dmin: Tensor, field: Tensor, codes: Tensor) -> Parts:
    """8 scales and 8 minima of 6 bits: the first 4 of each in 4 bytes, whose highest 2 bits belong to the others."""
    scale, least, low = field.split(4, 1)
    scales = torch.cat([scale & 63, low & 15 | scale >> 2 & 48], 1)
    mins = torch.cat([least & 63, low >> 4 | least >> 2 & 48], 1)
    return Parts(codes, scales, mins, _halves(d), -_halves(dmin))


def _q4_k(d: Tensor, dmin: Tensor, field: Tensor, qs: Tensor) -> Parts:
    return _with_mins(d, dmin, field, _items(qs, 4, 32))


def _q5_k(d: Tensor, dmin: Tensor, field: Tensor, qh: Tensor, qs: Tensor) -> Parts:
    return _with_mins(d, dmin, field, _items(qs, 4, 32) | _items(qh, 1, 32) << 4)


def _q6_k(ql: Tensor, qh: Tensor, scales: Tensor, d: Tensor) -> Parts:
    codes = _signed(_items(ql, 4, 64) | _items(qh, 2, 32) << 4, 32)
    return Parts(codes, scales.view(torch.int8), scale_scale=_halves(d))


def _tq1_0(first: Tensor, second: Tensor, last: Tensor, d: Tensor) -> Parts:
    """Five digits of base 3 in a byte, as a fraction of 256: the next digit is what a multiplication by 3 carries."""
    powers = first.new_tensor([1, 3, 9, 27, 81]).reshape(1, 5, 1)
    fractions = [(field.unsqueeze(1) * powers[:, :n]).flatten(1) for field, n in ((first, 5), (second, 5), (last, 4))]
    digits = (torch.cat(fractions, 1).to(torch.int16) * 3) >> 8
    return Parts((digits - 1).to(torch.int8), _halves(d))


def _tq2_0(qs: Tensor, d: Tensor) -> Parts:
    return Parts(_items(qs, 2, 32), _halves(d), torch.ones_like(_halves(d), dtype=torch.uint8))


def _iq4_xs(d: Tensor, high: Tensor, low: Tensor, qs: Tensor) -> Parts:
    scales = _signed(_items(low, 4, 1) | _items(high, 2, 1) << 4, 32)
    return Parts(_items(qs, 4, 16), scales, scale_scale=_halves(d))


def _mxfp4(e: Tensor, qs: Tensor) -> Parts:
    if bool((e == 255).any()):
        raise ValueError("it has blocks with the exponent 255, which is NaN in the OCP specification, not in llama.cpp")
    return Parts(_items(qs, 4, 16), e.contiguous().view(torch.float8_e8m0fnu))


class BlockType(NamedTuple):
    """A type of GGUF: elements of a block, sizes of the fields of its bytes, the spec of its tensors, and what decodes
    fields (blocks, size), uint8. Plain numbers have a `dtype` in place of a spec; what cannot be kept has neither."""

    name: str
    size: int
    fields: tuple[int, ...]
    spec: QuantSpec | CodebookSpec | None = None
    decode: Callable[..., Parts] | None = None
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(self.fields)

    def row_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a row of a tensor of this shape, which must be whole blocks."""
        if shape[-1] % self.size:
            raise ValueError(f"rows of {self.name} have a multiple of {self.size} elements, got shape {tuple(shape)}")
        return shape[-1] // self.size * self.nbytes

    def tensor_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape."""
        return math.prod(shape[:-1]) * self.row_bytes(shape)

    def scheme(self, shape: Sequence[int]) -> Scheme | None:
        """The scheme of a tensor of this shape; None if it is stored as plain numbers."""
        if self.dtype is not None:
            return None
        if self.spec is None:
            raise ValueError(f"it is stored as {self.name}, which no spec of this package can hold exactly")
        return weight_only(self.spec, shape, torch.float32)

    def tensor(self, data: Tensor, shape: Sequence[int]) -> Tensor:
        """The tensor of this shape from its bytes, uint8: quantized, with logical dtype fp32, or plain numbers."""
        shape = tuple(shape)
        if self.dtype is not None:
            return data.view(self.dtype).reshape(shape)
        scheme = self.scheme(shape)
        assert scheme is not None
        assert self.decode is not None
        parts = self.decode(*data.reshape(-1, self.nbytes).split(self.fields, 1))
        groups = (*shape[:-1], shape[-1] // self.size * parts.scale.shape[1])
        others = {
            name: part.reshape(-1) if name.endswith("_scale") else part.reshape(groups)
            for name, part in parts._asdict().items()
            if name != "codes" and part is not None
        }
        if isinstance(self.spec, CodebookSpec):
            others["table"] = torch.tensor(self.spec.table, dtype=torch.float32, device="cpu")
        return quantized_type(scheme.weight).from_canonical(parts.codes.reshape(shape), others, scheme)


_HALF, _POWER = torch.float16, torch.float8_e8m0fnu


def _scaled_codes(dtype: str, group: int, scale: torch.dtype | None = _HALF, of_scale: str | None = None) -> QuantSpec:
    """q * scale; `of_scale` is the type of scales that are codes."""
    none = ZeroPointDomain.NONE
    scale_spec = _scaled_codes(of_scale, K // group) if of_scale else None
    return QuantSpec(qdtype(dtype), PerGroup(group), zero_point_domain=none, scale_dtype=scale, scale_spec=scale_spec)


def _with_offset(dtype: str, group: int, scale: torch.dtype | None = _HALF, of_scale: str | None = None) -> QuantSpec:
    """q * scale + offset."""
    return replace(
        _scaled_codes(dtype, group, scale, of_scale),
        mapping=MappingType.ASYMMETRIC,
        zero_point_domain=ZeroPointDomain.OFFSET,
        preserve_zero=False,
    )


_IQ4_XS = CodebookSpec(qdtype("uint4"), PerGroup(32), IQ4_TABLE, scale_spec=_scaled_codes("int6", K // 32))
_TERNARY = QuantSpec(qdtype("uint2"), PerGroup(K), MappingType.ASYMMETRIC, scale_dtype=_HALF)

TYPES = {
    0: BlockType("F32", 1, (4,), dtype=torch.float32),
    1: BlockType("F16", 1, (2,), dtype=torch.float16),
    2: BlockType("Q4_0", 32, (2, 16), _scaled_codes("int4", 32), _q4_0),
    3: BlockType("Q4_1", 32, (2, 2, 16), _with_offset("uint4", 32), _q4_1),
    6: BlockType("Q5_0", 32, (2, 4, 16), _scaled_codes("int5", 32), _q5_0),
    7: BlockType("Q5_1", 32, (2, 2, 4, 16), _with_offset("uint5", 32), _q5_1),
    8: BlockType("Q8_0", 32, (2, 32), _scaled_codes("int8", 32), lambda d, qs: Parts(qs.view(torch.int8), _halves(d))),
    9: BlockType("Q8_1", 32, (40,)),
    10: BlockType("Q2_K", K, (K // 16, K // 4, 2, 2), _with_offset("uint2", 16, None, "uint4"), _q2_k),
    11: BlockType("Q3_K", K, (K // 8, K // 4, 8, 4, 2), _scaled_codes("int3", 16, None, "int6"), _q3_k),
    12: BlockType("Q4_K", K, (2, 2, 12, K // 2), _with_offset("uint4", 32, None, "uint6"), _q4_k),
    13: BlockType("Q5_K", K, (2, 2, 12, K // 8, K // 2), _with_offset("uint5", 32, None, "uint6"), _q5_k),
    14: BlockType("Q6_K", K, (K // 2, K // 4, K // 16, 2), _scaled_codes("int6", 16, None, "int8"), _q6_k),
    15: BlockType("Q8_K", K, (292,)),
    16: BlockType("IQ2_XXS", K, (66,)),
    17: BlockType("IQ2_XS", K, (74,)),
    18: BlockType("IQ3_XXS", K, (98,)),
    19: BlockType("IQ1_S", K, (50,)),
    20: BlockType(
        "IQ4_NL", 32, (2, 16), GgufIQ4_NL().linear_spec().weight, lambda d, qs: Parts(_items(qs, 4, 16), _halves(d))
    ),
    21: BlockType("IQ3_S", K, (110,)),
    22: BlockType("IQ2_S", K, (82,)),
    23: BlockType("IQ4_XS", K, (2, 2, K // 64, K // 2), _IQ4_XS, _iq4_xs),
    24: BlockType("I8", 1, (1,), dtype=torch.int8),
    25: BlockType("I16", 1, (2,), dtype=torch.int16),
    26: BlockType("I32", 1, (4,), dtype=torch.int32),
    27: BlockType("I64", 1, (8,), dtype=torch.int64),
    28: BlockType("F64", 1, (8,), dtype=torch.float64),
    29: BlockType("IQ1_M", K, (56,)),
    30: BlockType("BF16", 1, (2,), dtype=torch.bfloat16),
    34: BlockType("TQ1_0", K, (32, 16, 4, 2), _scaled_codes("int2", K), _tq1_0),
    35: BlockType("TQ2_0", K, (K // 4, 2), _TERNARY, _tq2_0),
    39: BlockType("MXFP4", 32, (1, 16), _scaled_codes("float4_e2m1", 32, _POWER), _mxfp4),
    40: BlockType("NVFP4", 64, (36,)),
    41: BlockType("Q1_0", 128, (18,)),
}
"""Every type of ggml, by its number."""
