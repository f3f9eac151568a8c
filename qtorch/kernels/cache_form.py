"""CacheForm: how the keys and values of an attention cache are held in codes.

The keys and values of a layer have the shape (B, H, T, D): batch, heads, tokens, channels. Codes have it too, packed
along the channels if they have less than 8 bits. A scale belongs to a token of a head, (B, H, T, 1); or, for keys with
`block` > 0, to a channel of `block` consecutive tokens, (B, H, T / block, D). Zero points are of the OFFSET domain:

    k = code * scale + zero_point
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..primitives import MappingType, PerBlock, PerToken, QuantSpec, ZeroPointDomain, qdtype
from ..primitives.layouts import can_pack_bits, packed_length, unpack_codes


def _with_zeros(bits: int) -> QuantSpec:
    asymmetric = MappingType.ASYMMETRIC, ZeroPointDomain.OFFSET
    return QuantSpec(qdtype(f"uint{bits}"), PerToken(), *asymmetric, preserve_zero=False)


# Codes of few bits have zero points: the keys of many models are far from zero.
TOKENS = {
    "int8": QuantSpec(qdtype("int8"), PerToken(), quant_min=-127, quant_max=127),
    "int4": _with_zeros(4),
    "int3": _with_zeros(3),
    "int2": _with_zeros(2),
    "float8_e4m3fn": QuantSpec(qdtype("float8_e4m3fn"), PerToken()),
}
"""Name of a format -> how a token of a head is quantized."""

Parts = tuple[torch.Tensor, ...]
"""Codes, scale, and the zero point if the format has one."""


@dataclass(frozen=True)
class CacheForm:
    """How keys and values are quantized, and what their tensors look like.

    Attributes:
        dtype: of the keys, a name in `TOKENS`.
        value_dtype: of the values.
        block: consecutive tokens in which each channel of the keys has a scale; 0: each token of a head has one.
        scale_dtype: dtype in which scales and zero points are kept.
        values, keys: how each is quantized.
    """

    dtype: str
    value_dtype: str
    block: int = 0
    scale_dtype: torch.dtype = torch.float32
    values: QuantSpec = field(init=False, repr=False, compare=False)
    keys: QuantSpec = field(init=False, repr=False, compare=False)
    _of_key_tokens: "CacheForm | None" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keys, values = (replace(TOKENS[name], scale_dtype=self.scale_dtype) for name in (self.dtype, self.value_dtype))
        object.__setattr__(self, "values", values)
        keys = keys.with_granularity(PerBlock((self.block, 1))) if self.block else keys
        object.__setattr__(self, "keys", keys)
        # Made here: the compiler does not follow functions that remember their results.
        is_own = self.dtype == self.value_dtype and not self.block
        of_key_tokens = None if is_own else CacheForm(self.dtype, self.dtype, 0, self.scale_dtype)
        object.__setattr__(self, "_of_key_tokens", of_key_tokens)

    @property
    def of_key_tokens(self) -> "CacheForm":
        """The form whose values are quantized as these keys, where each token has a scale."""
        return self._of_key_tokens or self

    def stored(self, width: int, keys: bool) -> dict[str, tuple[int, torch.dtype, int]]:
        """Length of the last axis, dtype, and tokens to one index of the token axis, for each tensor of `Parts`."""
        spec = self.keys if keys else self.values
        codes = torch.int8 if spec.dtype.storage is torch.int8 else torch.uint8
        row = packed_length(width, spec.dtype.bits) if can_pack_bits(spec.dtype) else width
        tokens, channels = (self.block, width) if keys and self.block else (1, 1)
        scales = (channels, self.scale_dtype, tokens)
        of_zeros = {"zero_point": scales} if spec.has_zero_point else {}
        return {"codes": (row, codes, 1), "scale": scales, **of_zeros}

    def dequantize(self, parts: Sequence[torch.Tensor], width: int, dtype: torch.dtype, keys: bool) -> torch.Tensor:
        """The numbers (B, H, T, width) of keys or values; computed in fp32, given in `dtype`."""
        spec = self.keys if keys else self.values
        codes, scale = parts[0], parts[1]
        if can_pack_bits(spec.dtype):
            codes = unpack_codes(codes, spec.dtype, width)
        elif spec.dtype.storage is not codes.dtype:
            codes = codes.view(spec.dtype.storage)
        return spec.dequantize(codes, scale, parts[2] if len(parts) > 2 else None, dtype)


cache_form = functools.cache(CacheForm)
"""The form of these arguments, made once."""
