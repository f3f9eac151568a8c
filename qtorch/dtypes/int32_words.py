"""Codes of 1, 2, 4 or 8 bits in int32 words along the last axis, as compressed-tensors stores them.

    word = sum_i (code[i] + offset) << (bits * i),   offset = 2^(bits-1) for signed codes, 0 for unsigned

The first code is in the lowest bits; the last word of a row is padded with zero bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..primitives.qdtype import QDType
from ..primitives.slices import in_slices

_WORD = 32


def can_pack(dtype: QDType) -> bool:
    """Whether codes of this type are stored in int32 words: integers of 1, 2 or 4 bits."""
    return not dtype.is_floating_point and dtype.bits < 8 and _WORD % dtype.bits == 0


def pack_to_int32(codes: Tensor, dtype: QDType) -> Tensor:
    """Pack codes (..., K) of `dtype` into int32 words (..., ceil(K * bits / 32)).

    Raises:
        ValueError: codes of `dtype` do not fill a word.
    """
    if dtype.is_floating_point or _WORD % dtype.bits:
        raise ValueError(f"pack_to_int32 takes integers of 1, 2, 4 or 8 bits, got {dtype}")
    return in_slices(lambda part: _pack(part, dtype), codes, axes=codes.dim() - 1)


def _pack(codes: Tensor, dtype: QDType) -> Tensor:
    per_word = _WORD // dtype.bits
    unsigned = codes.view(torch.uint8) + -int(dtype.quant_min) if dtype.is_signed else codes
    padded = torch.nn.functional.pad(unsigned, (0, -codes.shape[-1] % per_word))
    # Two codes of `bits` bits, in the halves of an integer, become one of 2 * bits bits in its lower half.
    flat, bits = padded.reshape(-1), dtype.bits
    while bits < 8:
        pairs = flat.view(torch.int16)
        flat = (pairs | (pairs >> (8 - bits))).to(torch.uint8)
        bits *= 2
    return flat.view(torch.int32).reshape(*codes.shape[:-1], padded.shape[-1] // per_word)


def unpack_from_int32(packed: Tensor, dtype: QDType, length: int) -> Tensor:
    """Inverse of `pack_to_int32`: the first `length` codes of each row, in the storage dtype."""
    return in_slices(lambda part: _unpack(part, dtype, length), packed, axes=packed.dim() - 1)


def _unpack(packed: Tensor, dtype: QDType, length: int) -> Tensor:
    shifts = torch.arange(0, _WORD, dtype.bits, device=packed.device, dtype=torch.int32)
    codes = (packed.unsqueeze(-1) >> shifts) & (2**dtype.bits - 1)
    return (codes.flatten(-2)[..., :length] + int(dtype.quant_min)).to(dtype.storage)
