"""Unsigned codes of 1 to 8 bits in int32 words, in the two ways that compressed-tensors has packed them.

    dense     from version 0.18 on, and what vLLM allocates: code i begins at bit i * bits of the row, so that codes of
              3, 5, 6 or 7 bits may lie in two words; ceil(C * bits / 32) words
    padded    up to 0.17: floor(32 / bits) codes in each word, the lowest bits first, and the rest of the word zero

Codes of 1, 2, 4 and 8 bits are packed alike by both. Codes of two floating-point bits lie in bytes, see `pack_nibbles`.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32
BYTE = 8


def dense_words(length: int, bits: int) -> int:
    """Number of words of a row of `length` codes, packed densely."""
    return -(-length * bits // WORD)


def padded_words(length: int, bits: int) -> int:
    """Number of words of a row of `length` codes, packed with padding."""
    return -(-length // (WORD // bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (R, C), uint8, densely into int32 words (R, ceil(C * bits / 32))."""
    rows, length = codes.shape
    words = dense_words(length, bits)
    if BYTE % bits == 0:
        each = BYTE // bits
        spread = torch.nn.functional.pad(codes, (0, words * WORD // bits - length))
        packed = spread[:, ::each].clone(memory_format=torch.contiguous_format)
        for i in range(1, each):
            packed |= spread[:, i::each] << (bits * i)
        return packed.view(torch.int32)
    groups = -(-length // WORD)
    spread = torch.nn.functional.pad(codes, (0, groups * WORD - length)).reshape(rows, groups, WORD)
    packed = torch.zeros(rows, groups, bits, dtype=torch.int64, device=codes.device)
    for i in range(WORD):
        word, bit = divmod(i * bits, WORD)
        code = spread[:, :, i].to(torch.int64)
        packed[:, :, word] |= code << bit
        if bit + bits > WORD:
            packed[:, :, word + 1] |= code >> (WORD - bit)
    packed &= 2**WORD - 1
    # Words of 2^31 and above wrap around to negative int32.
    return packed.reshape(rows, groups * bits)[:, :words].to(torch.int32).contiguous()


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """Inverse of `pack`: codes (R, length) in uint8."""
    rows, words = packed.shape
    if BYTE % bits == 0:
        stored = packed.contiguous().view(torch.uint8)
        parts = [(stored >> (bits * i)) & (2**bits - 1) for i in range(BYTE // bits)]
        return torch.stack(parts, -1).reshape(rows, words * WORD // bits)[:, :length].contiguous()
    groups = -(-length // WORD)
    spread = torch.nn.functional.pad(packed, (0, groups * bits - words)).reshape(rows, groups, bits)
    codes = torch.empty(rows, groups, WORD, dtype=torch.uint8, device=packed.device)
    mask = 2**bits - 1
    for i in range(WORD):
        word, bit = divmod(i * bits, WORD)
        code = (spread[:, :, word] >> bit) & (mask if bit + bits <= WORD else 2 ** (WORD - bit) - 1)
        if bit + bits > WORD:
            code = code | ((spread[:, :, word + 1] << (WORD - bit)) & mask)
        codes[:, :, i] = code
    return codes.reshape(rows, groups * WORD)[:, :length].contiguous()


def pack_padded(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (R, C), uint8, with padding into int32 words."""
    rows, length = codes.shape
    each, words = WORD // bits, padded_words(length, bits)
    spread = torch.nn.functional.pad(codes, (0, words * each - length)).reshape(rows, words, each).to(torch.int64)
    packed = torch.zeros(rows, words, dtype=torch.int64, device=codes.device)
    for i in range(each):
        packed |= spread[:, :, i] << (i * bits)
    return packed.to(torch.int32)


def unpack_padded(packed: Tensor, bits: int, length: int) -> Tensor:
    """Inverse of `pack_padded`."""
    each = WORD // bits
    mask = 2**bits - 1
    codes = torch.stack([((packed >> (bits * i)) & mask).to(torch.uint8) for i in range(each)], -1)
    return codes.flatten(-2)[:, :length].contiguous()


def unpack_either(packed: Tensor, bits: int, length: int, dense: bool | None) -> Tensor:
    """Codes (R, length), uint8, from words (R, W) in the packing that has so many words.

    Args:
        dense: which one it is where both have W words, for rows shorter than 160 codes; None to look at the bits that
            padding leaves zero.

    Raises:
        ValueError: neither packing has so many words, or the words are not int32.
    """
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
    return unpack(packed, bits, length) if is_dense else unpack_padded(packed, bits, length)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes (R, C) of 4 bits, uint8, C even, in bytes (R, C / 2); the first of two in the low bits."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


# --------------------------------------------------------------------------------------------------
# The scale of the tensor in NVFP4: files hold a divisor, tensors of this package a multiplier.
#
#     of a file   scale of a group = weight_scale / weight_global_scale
#     here        scale of a group = weight_scale * scale_scale
#
# In fp32, the two agree for all the scales of a tensor if the scale is a power of two, and for some other numbers.


_TRIES = 8
"""Neighbours of 1 / scale that are tried as the divisor, on each side."""


def divisor_of(multiplier: Tensor, scale: Tensor) -> Tensor:
    """The fp32 number d for which ``scale / d == scale * multiplier`` in fp32, for all the scales.

    Args:
        multiplier: fp32, one element.
        scale: float8_e4m3fn, any shape.

    Raises:
        ValueError: there is none; the scale of the tensor was not chosen for it.
    """
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
    """The fp32 number m for which ``scale * m == scale / divisor`` in fp32, for all the scales, or None.

    Args:
        divisor: fp32, one element.
        scale: float8_e4m3fn, any shape.
    """
    multiplier = divisor.reshape(()).reciprocal()
    codes = _distinct(scale)
    if bool((codes == 0).any()) or not bool(torch.isfinite(multiplier)):
        return None
    return multiplier if torch.equal(codes * multiplier, codes / divisor.reshape(())) else None


def _distinct(scale: Tensor) -> Tensor:
    """The values that occur in a tensor of float8_e4m3fn, fp32."""
    return scale.view(torch.uint8).reshape(-1).unique().view(torch.float8_e4m3fn).float()
