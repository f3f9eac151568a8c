"""Codes of 1, 2, 4 or 8 bits in int32 words along the last axis, as compressed-tensors stores them.

    word = sum_i (code[i] + offset) << (bits * i),   offset = 2^(bits-1) for signed codes, 0 for unsigned

The first code is in the lowest bits; the last word of a row is padded with zero bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..primitives.qdtype import QDType

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
    per_word = _WORD // dtype.bits
    length = codes.shape[-1]
    words = -(-length // per_word)
    offset = -int(dtype.quant_min)
    unsigned = torch.nn.functional.pad(codes.to(torch.int64) + offset, (0, words * per_word - length))
    shifts = torch.arange(0, _WORD, dtype.bits, device=codes.device)
    packed = (unsigned.unflatten(-1, (words, per_word)) << shifts).sum(-1)
    # Words of 2^31 and above wrap around to negative int32.
    return packed.to(torch.int32)


def unpack_from_int32(packed: Tensor, dtype: QDType, length: int) -> Tensor:
    """Inverse of `pack_to_int32`: the first `length` codes of each row, in the storage dtype."""
    shifts = torch.arange(0, _WORD, dtype.bits, device=packed.device, dtype=torch.int32)
    codes = (packed.unsqueeze(-1) >> shifts) & (2**dtype.bits - 1)
    return (codes.flatten(-2)[..., :length] + int(dtype.quant_min)).to(dtype.storage)
