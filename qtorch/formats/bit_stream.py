"""Codes of 1 to 8 bits in int32 words or bytes, as other packages pack them.

    dense      code j in the bits j b to j b + b - 1 of the row, lowest bits first; codes may straddle words
    planar     for every 32 codes, the parts of 4, 2 and 1 bits of the codes, the low part first, each part dense
    nibbles    two codes in a byte, the low or the high bits first

Words are little-endian, so the bytes of a row of words are its dense bits in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS_OF_WORD = 32
_CODES = 8
"""Codes of b bits that fill b bytes."""


def unpack_dense(words: Tensor, bits: int, length: int) -> Tensor:
    """Codes (..., length) in uint8 of dense rows (..., W) of int32 or uint8.

    Raises:
        ValueError: a row does not hold `length` codes.
    """
    data = words.contiguous().view(torch.uint8)
    if data.shape[-1] * 8 < length * bits:
        raise ValueError(f"{length} codes of {bits} bits take {length * bits} bits, a row has {data.shape[-1] * 8}")
    if 8 % bits == 0:
        codes = [(data >> low) & (2**bits - 1) for low in range(0, 8, bits)]
        return (torch.stack(codes, -1).flatten(-2) if bits < 8 else data)[..., :length]
    groups = -(-length // _CODES)
    missing = groups * bits - data.shape[-1]
    if missing > 0:
        data = torch.nn.functional.pad(data, (0, missing))
    parts = data[..., : groups * bits].unflatten(-1, (groups, bits))
    return torch.stack([_code(parts, j * bits, bits) for j in range(_CODES)], -1).flatten(-2)[..., :length]


def unpack_planar(words: Tensor, bits: int, length: int) -> Tensor:
    """Codes (..., length) in uint8 of planar rows (..., W) of int32; `length` is a multiple of 32.

    Raises:
        ValueError: a row does not hold `length` codes.
    """
    if length % _BITS_OF_WORD or words.shape[-1] * _BITS_OF_WORD != length * bits:
        raise ValueError(f"{length} codes of {bits} bits take {length * bits} bits, a row has {words.shape[-1] * 32}")
    blocks = words.unflatten(-1, (-1, bits))
    codes, low = None, 0
    for width in (8, 4, 2, 1):
        if bits & width:
            part = unpack_dense(blocks[..., low : low + width], width, _BITS_OF_WORD) << low
            codes = part if codes is None else codes | part
            low += width
    assert codes is not None
    return codes.flatten(-2)


def unpack_nibbles(data: Tensor, *, high_first: bool = False) -> Tensor:
    """Codes (..., 2 B) in uint8 of bytes (..., B)."""
    low, high = data & 0xF, data >> 4
    return torch.stack([high, low] if high_first else [low, high], -1).flatten(-2)


def _code(parts: Tensor, first: int, bits: int) -> Tensor:
    """The code at bit `first` of the bytes along the last axis."""
    byte, shift = first // 8, first % 8
    code = parts[..., byte] >> shift
    if shift + bits > 8:
        code = code | (parts[..., byte + 1] << (8 - shift))
    return code & (2**bits - 1)
