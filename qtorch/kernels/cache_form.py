"""CacheForm: how the keys and values of an attention cache are held in codes.

The keys and values of a layer have the shape (B, H, T, D): batch, heads, tokens, channels. Codes have it too, packed
along the channels if they have 4 bits. A scale belongs to a token of a head, (B, H, T, 1); or, for keys with
`block` > 0, to a channel of `block` consecutive tokens, (B, H, T / block, D). Zero points are of the OFFSET domain:

    k = code * scale + zero_point
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..primitives import MappingType, PerBlock, PerToken, QuantSpec, ZeroPointDomain, qdtype
from ..primitives.layouts import can_pack_bits, packed_length, unpack_codes

# 4-bit codes have zero points: the keys of many models are far from zero.
TOKENS = {
    "int8": QuantSpec(qdtype("int8"), PerToken(), quant_min=-127, quant_max=127),
    "int4": QuantSpec(qdtype("uint4"), PerToken(), MappingType.ASYMMETRIC, ZeroPointDomain.OFFSET, preserve_zero=False),
    "float8_e4m3fn": QuantSpec(qdtype("float8_e4m3fn"), PerToken()),
}
"""Name of a format -> how a token of a head is quantized."""

Parts = tuple[Tensor, ...]
"""Codes, scale, and the zero point if the format has one."""


@dataclass(frozen=True)
class CacheForm:
    """How keys and values are quantized, and what their tensors look like.

    Attributes:
        dtype: a name in `TOKENS`.
        block: consecutive tokens in which each channel of the keys has a scale; 0: each token of a head has one.
        scale_dtype: dtype in which scales and zero points are kept.
        values, keys: how each is quantized.
        is_packed: two codes share a byte.
    """

    dtype: str
    block: int = 0
    scale_dtype: torch.dtype = torch.float32
    values: QuantSpec = field(init=False, repr=False, compare=False)
    keys: QuantSpec = field(init=False, repr=False, compare=False)
    is_packed: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = replace(TOKENS[self.dtype], scale_dtype=self.scale_dtype)
        object.__setattr__(self, "values", values)
        keys = values.with_granularity(PerBlock((self.block, 1))) if self.block else values
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "is_packed", can_pack_bits(values.dtype))

    def stored(self, width: int, keys: bool) -> dict[str, tuple[int, torch.dtype, int]]:
        """Length of the last axis, dtype, and tokens to one index of the token axis, for each tensor of `Parts`."""
        dtype = self.values.dtype
        codes = torch.int8 if dtype.storage is torch.int8 else torch.uint8
        row = packed_length(width, dtype.bits) if self.is_packed else width
        tokens, channels = (self.block, width) if keys and self.block else (1, 1)
        scales = (channels, self.scale_dtype, tokens)
        of_zeros = {"zero_point": scales} if self.values.has_zero_point else {}
        return {"codes": (row, codes, 1), "scale": scales, **of_zeros}

    def dequantize(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype, keys: bool) -> Tensor:
        """The numbers (B, H, T, width) of keys or values; computed in fp32, given in `dtype`."""
        spec = self.keys if keys else self.values
        codes, scale = parts[0], parts[1]
        if self.is_packed:
            codes = unpack_codes(codes, spec.dtype, width)
        elif spec.dtype.storage is not codes.dtype:
            codes = codes.view(spec.dtype.storage)
        return spec.dequantize(codes, scale, parts[2] if len(parts) > 2 else None, dtype)


cache_form = functools.cache(CacheForm)
"""The form of these arguments, made once."""
