"""Blocks of other packages as ours, and the schemes of what is read.

Elsewhere the last block of an axis may be shorter than the others, and blocks may run over the ends of rows. Here
blocks divide an axis. So blocks are cut into equal parts that do, and each part gets a copy of the scale.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives import CodebookSpec, LinearSpec, MappingType, QDType, QuantSpec, Scheme, ZeroPointDomain, qdtype
from ...primitives.granularity import Granularity, PerGroup, PerRow
from ...primitives.layouts.packed import unpack_dense
from ...primitives.layouts.plain import smallest_layout
from ..hf_folder import HFFolder
from ..tensor_file import Stored

SMALLEST_PART = 8
"""With smaller parts, scales would take more memory than floats do."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Cut(NamedTuple):
    """How blocks of `block` elements along an axis of `size` are cut into parts of `part`, which divide both."""

    size: int
    block: int
    part: int

    @classmethod
    def of(cls, size: int, block: int, *, flattened: bool = False, smallest: int = SMALLEST_PART) -> "Cut":
        """The largest parts that divide the block and the axis; `flattened` blocks may hold parts of several rows."""
        part = math.gcd(size, block) if flattened or block < size else size
        if part < min(smallest, size):
            raise ValueError(f"groups of {block} in rows of {size} end inside rows; dequantize this weight")
        return cls(size, block, part)

    def copies(self, scale: Tensor, axis: int) -> Tensor:
        """One element for each part, along `axis`, of a scale with one for each block."""
        if self.part == self.block or scale.shape[axis] == 1:
            return scale
        return scale.repeat_interleave(self.block // self.part, axis).narrow(axis, 0, self.size // self.part)

    @property
    def granularity(self) -> Granularity:
        """For the last axis, in blocks of one row."""
        return PerRow() if self.part == self.size else PerGroup(self.part)


def integer_spec(bits: int, granularity: Granularity, scale_dtype: torch.dtype | None) -> QuantSpec:
    """Unsigned codes with zero points that are codes: w = (q - z) * s."""
    return QuantSpec(qdtype(f"uint{bits}"), granularity, MappingType.ASYMMETRIC, scale_dtype=scale_dtype)


def symmetric_spec(
    dtype: QDType | torch.dtype | str, granularity: Granularity, scale_dtype: torch.dtype | None
) -> QuantSpec:
    """Codes without zero points: w = q * s."""
    none = ZeroPointDomain.NONE
    return QuantSpec(qdtype(dtype), granularity, zero_point_domain=none, scale_dtype=scale_dtype)


def weight_only(spec: QuantSpec | CodebookSpec, shape: Sequence[int], dtype: torch.dtype) -> Scheme:
    """The scheme of a weight whose activations stay in floating point."""
    return Scheme(LinearSpec(spec, layout=smallest_layout(spec.dtype)), tuple(shape), dtype)


def check_stored(folder: HFFolder, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]) -> Stored:
    """A stored tensor; `ValueError` unless it has one of these dtypes and this shape, in which None is any size."""
    stored = folder.stored.get(name)
    if stored is None:
        raise ValueError(f"{folder.path}: {name} is missing")
    fits = len(stored.shape) == len(shape) and all(w in (None, n) for n, w in zip(stored.shape, shape, strict=True))
    if not fits or stored.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{folder.file_of(name)}: {name} has shape {stored.shape} and dtype "
            f"{str(stored.dtype).removeprefix('torch.')}, its format says ({sizes}) and {wanted}"
        )
    return stored


def with_suffix(folder: HFFolder, suffix: str) -> list[str]:
    """What stands before `suffix` in the names of stored tensors, sorted."""
    return sorted(name.removesuffix(suffix) for name in folder.stored if name.endswith(suffix))


def group_sizes(config: Mapping[str, Any]) -> list[int]:
    """The group sizes that a quantization_config names, for the model or for single layers."""
    parts: list[Any] = [config]
    for key in ("dynamic", "extra_config"):
        of_layers = config.get(key)
        parts += list(of_layers.values()) if isinstance(of_layers, dict) else []
    sizes = [part.get(key) for part in parts if isinstance(part, dict) for key in ("group_size", "q_group_size")]
    return [size for size in sizes if type(size) is int and (size > 0 or size == -1)]


def block_of_groups(length: int, count: int, sizes: Sequence[int]) -> int:
    """The number of elements of a group, in rows of `length` that have `count` groups; the last one may be shorter. It
    is the one of `sizes`, which the configuration names, that gives this number of groups."""
    if count == 1:
        return length
    if not sizes and length % count == 0:
        return length // count
    fitting = {size for size in sizes if size > 0 and -(-length // size) == count}
    if len(fitting) != 1:
        named = ", ".join(map(str, sizes)) or "none"
        raise ValueError(f"rows of {length} have {count} groups; the group_size of the configuration is {named}")
    return fitting.pop()


# Codes of 1 to 8 bits in int32 words or bytes, as other packages pack them.
#
#     dense      code j in the bits j b to j b + b - 1 of the row, lowest bits first; codes may straddle words
#     planar     for every 32 codes, the parts of 4, 2 and 1 bits of the codes, the low part first, each part dense
#     nibbles    two codes in a byte, the low or the high bits first
#
# Words are little-endian, so the bytes of a row of words are its dense bits in order.


WORD = 32  # bits


def unpack_planar(words: Tensor, bits: int, length: int) -> Tensor:
    """Codes (..., length) in uint8 of planar rows (..., W) of int32; `length` is a multiple of 32."""
    if length % WORD or words.shape[-1] * WORD != length * bits:
        raise ValueError(f"{length} codes of {bits} bits take {length * bits} bits, a row has {words.shape[-1] * WORD}")
    blocks = words.unflatten(-1, (-1, bits))
    codes, low = None, 0
    for width in (8, 4, 2, 1):
        if bits & width:
            part = unpack_dense(blocks[..., low : low + width], width, WORD) << low
            codes = part if codes is None else codes | part
            low += width
    assert codes is not None
    return codes.flatten(-2)


def unpack_nibbles(data: Tensor, *, high_first: bool = False) -> Tensor:
    """Codes (..., 2 B) in uint8 of bytes (..., B); of two the first is in the low bits, or in the high ones."""
    low, high = data & 0xF, data >> 4
    return torch.stack([high, low] if high_first else [low, high], -1).flatten(-2)


# Unsigned codes of 1 to 8 bits in int32 words, in the two ways that compressed-tensors has packed them.
#
#     dense     from version 0.18 on, and what vLLM allocates: code i begins at bit i * bits of the row, so that it may
#               lie in two words; ceil(C * bits / 32) words
#     padded    up to 0.17: floor(32 / bits) codes in each word, the lowest bits first, and the rest of the word zero
#
# Codes of 1, 2, 4 and 8 bits are packed alike by both. Small floats lie in bytes, two in each.


def dense_words(length: int, bits: int) -> int:
    """Number of words of a row of `length` codes, packed densely."""
    return -(-length * bits // WORD)


def padded_words(length: int, bits: int) -> int:
    """Number of words of a row of `length` codes, packed with padding."""
    return -(-length // (WORD // bits))


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
    takes = dense_words(length, bits), padded_words(length, bits)
    is_dense, is_padded = (words == each for each in takes)
    if words not in takes:
        found = f"{takes[0]} words, or {takes[1]} up to version 0.17, got {words}"
        raise ValueError(f"rows of {length} codes of {bits} bits take {found}")
    if is_dense and is_padded and WORD % bits:
        used = WORD // bits * bits
        has_padding = not bool(((packed >> used) & (2 ** (WORD - used) - 1)).any())
        is_dense = not has_padding if dense is None else dense
    return unpack_dense(packed, bits, length).contiguous() if is_dense else unpack_padded(packed, bits, length)


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
