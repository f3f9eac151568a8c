"""Unsigned codes of 1 to 8 bits in int32 words, in the two ways that compressed-tensors has packed them.

    dense     from version 0.18 on, and what vLLM allocates: code i begins at bit i * bits of the row, so that codes of
              3, 5, 6 or 7 bits may lie in two words; ceil(C * bits / 32) words
    padded    up to 0.17: floor(32 / bits) codes in each word, the lowest bits first, and the rest of the word zero

Codes of 1, 2, 4 and 8 bits are packed alike by both. Codes of two floating-point bits lie in bytes, see `pack_nibbles`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import unpack_dense

WORD = 32


def dense_words(length: int, bits: int) -> int:
    """Number of words of a row of `length` codes, packed densely."""
    return -(-length * bits // WORD)


def padded_words(length: int, bits: int) -> int:
    """Number of words of a row of `length` codes, packed with padding."""
    return -(-length // (WORD // bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (R, C), uint8, densely into int32 words (R, ceil(C * bits / 32)); `unpack_dense` is the inverse."""
    rows, length = codes.shape
    nbytes = 4 * dense_words(length, bits)
    # The fewest codes that fill whole bytes: `count` of them take `size` bytes.
    count, size = (8 // bits, 1) if 8 % bits == 0 else (8, bits)
    runs = -(-nbytes // size)
    spread = pad(codes, (0, runs * count - length)).reshape(rows, runs, count)
    packed: list[Tensor] = []
    for i in range(count):
        byte, bit = divmod(i * bits, 8)
        code = spread[:, :, i]
        if bit == 0:
            packed.append(code.clone())
        else:
            packed[byte] |= code << bit
        if bit + bits > 8:
            packed.append(code >> (8 - bit))
    data = torch.stack(packed, -1).flatten(1)[:, :nbytes]
    return data.flatten().view(torch.int32).reshape(rows, nbytes // 4)


def unpack_padded(packed: Tensor, bits: int, length: int) -> Tensor:
    """Codes (R, length), uint8, of words (R, W) with padding."""
    each = WORD // bits
    mask = 2**bits - 1
    codes = torch.stack([((packed >> (bits * i)) & mask).to(torch.uint8) for i in range(each)], -1)
    return codes.flatten(-2)[:, :length].contiguous()


def unpack_either(packed: Tensor, bits: int, length: int, dense: bool | None) -> Tensor:
    """Codes (R, length), uint8, from words (R, W) in the packing that has so many words. `dense` says which where both
    have W words, for rows shorter than 160 codes; None looks at the bits that padding leaves zero."""
    if packed.dtype is not torch.int32 or packed.dim() != 2:
        raise ValueError(f"packed codes are rows of int32, got {packed.dtype} of shape {tuple(packed.shape)}")
    words = packed.shape[1]
    is_dense, is_padded = words == dense_words(length, bits), words == padded_words(length, bits)
    if not is_dense and not is_padded:
        raise ValueError(
            f"rows of {length} codes of {bits} bits take {dense_words(length, bits)} words, or "
            f"{padded_words(length, bits)} up to version 0.17, got {words}"
        )
    if is_dense and is_padded and WORD % bits:
        used = WORD // bits * bits
        has_padding = not bool(((packed >> used) & (2 ** (WORD - used) - 1)).any())
        is_dense = not has_padding if dense is None else dense
    return unpack_dense(packed, bits, length).contiguous() if is_dense else unpack_padded(packed, bits, length)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes (R, C) of 4 bits, uint8, C even, in bytes (R, C / 2); the first of two in the low bits."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


# The scale of the tensor in NVFP4: files hold a divisor, tensors of this package a multiplier.
#
#     of a file   scale of a group = weight_scale / weight_global_scale
#     here        scale of a group = weight_scale * scale_scale
#
# In fp32, the two agree for all the scales of a tensor if the scale is a power of two, and for some other numbers.


_TRIES = 8
"""Neighbours of 1 / scale that are tried as the divisor, on each side."""


def divisor_of(multiplier: Tensor, scale: Tensor) -> Tensor:
    """The fp32 number d for which ``scale / d == scale * multiplier`` in fp32, for all the scales (float8_e4m3fn)."""
    multiplier = multiplier.reshape(())
    codes = _distinct(scale)
    wanted = codes * multiplier
    nearest = multiplier.reciprocal()
    up = down = nearest
    tried = [nearest]
    for _ in range(_TRIES):
        up = torch.nextafter(up, torch.full_like(up, torch.inf))
        down = torch.nextafter(down, torch.zeros_like(down))
        tried += [up, down]
    for divisor in tried:
        if torch.equal(codes / divisor, wanted) and torch.equal(divisor.reciprocal(), multiplier):
            return divisor
    raise ValueError(
        f"has the scale {float(multiplier)!r} for the tensor, and the file holds its inverse, with which the scales of "
        "the groups differ; choose a power of two, nvfp4_weight_only(tensor_scale=...), as recipes_for_vllm() does"
    )


def multiplier_of(divisor: Tensor, scale: Tensor) -> Tensor | None:
    """The fp32 number m for which ``scale * m == scale / divisor`` in fp32, for all the scales, or None."""
    multiplier = divisor.reshape(()).reciprocal()
    codes = _distinct(scale)
    if bool((codes == 0).any()) or not bool(torch.isfinite(multiplier)):
        return None
    return multiplier if torch.equal(codes * multiplier, codes / divisor.reshape(())) else None


def _distinct(scale: Tensor) -> Tensor:
    """The values that occur in a tensor of float8_e4m3fn, fp32."""
    return scale.view(torch.uint8).reshape(-1).unique().view(torch.float8_e4m3fn).float()
