"""Canonical form: a quantized tensor as plain named tensors and JSON, independent of its layout.

The tensors of a weight called ``layer.weight`` take their names from compressed-tensors:

    layer.weight               codes of 8 bits
    layer.weight_packed        smaller codes: integers of 1, 2 and 4 bits in int32 words, as compressed-tensors has it;
                               others in uint8 by `pack_bits` (see `primitives.packing`)
    layer.weight_scale, layer.weight_zero_point, layer.weight_table, ...
    layer.input_scale, layer.input_zero_point     of a static activation

Loading packs them again for the layout that the scheme names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..primitives.jsonable import from_json, to_json
from ..primitives.packing import (
    can_pack,
    can_pack_bits,
    pack_codes,
    pack_to_int32,
    unpack_codes,
    unpack_from_int32,
)
from ..primitives.qdtype import QDType
from ..primitives.scheme import Scheme
from .base import QuantizedTensor, quantized_type
from .conv_weight import ConvScheme, ConvWeight

Entry = dict[str, Any]
"""JSON data of one quantized tensor: its scheme, and which stored tensor is what."""


def to_canonical(name: str, tensor: QuantizedTensor) -> tuple[dict[str, Tensor], Entry]:
    """Plain tensors by stored name, and the JSON entry that `from_canonical` reads."""
    codes, others = tensor.canonical()
    dtype = tensor.scheme.weight.dtype
    parent, _, attribute = name.rpartition(".")
    input_name = (f"{parent}.input" if parent else "input") if attribute == "weight" else f"{name}_input"
    packed = can_pack_bits(dtype) and codes.dim() > 0
    parts = {
        "packed" if packed else "codes": (
            f"{name}_packed" if packed else name,
            _packed(codes, dtype) if packed else codes,
        )
    }
    for part, value in others.items():
        stored = f"{input_name}_{part.removeprefix('act_')}" if part.startswith("act_") else f"{name}_{part}"
        parts[part] = (stored, value)
    entry = {"scheme": to_json(tensor.scheme), "tensors": {part: stored for part, (stored, _) in parts.items()}}
    return dict(parts.values()), entry


def from_canonical(entry: Entry, read: Callable[[str], Tensor]) -> QuantizedTensor:
    """Inverse of `to_canonical`.

    Args:
        entry: what `to_canonical` gave.
        read: stored name -> tensor.

    Raises:
        ValueError: the entry does not describe a quantized tensor, or the tensors do not fit it.
    """
    scheme = from_json(entry["scheme"])
    if not isinstance(scheme, Scheme):
        raise ValueError(f"expected a Scheme, got {scheme!r}")
    parts = {part: read(stored) for part, stored in entry["tensors"].items()}
    if "packed" in parts:
        parts["codes"] = _unpacked(parts.pop("packed"), scheme.weight.dtype, scheme.codes_shape[-1])
    codes = parts.pop("codes")
    if tuple(codes.shape) != scheme.codes_shape:
        raise ValueError(f"the codes have shape {tuple(codes.shape)}, the scheme {scheme.codes_shape}")
    kind = ConvWeight if isinstance(scheme, ConvScheme) else quantized_type(scheme.weight)
    return kind.from_canonical(codes, parts, scheme)


def _packed(codes: Tensor, dtype: QDType) -> Tensor:
    return pack_to_int32(codes, dtype) if can_pack(dtype) else pack_codes(codes, dtype)


def _unpacked(packed: Tensor, dtype: QDType, length: int) -> Tensor:
    return unpack_from_int32(packed, dtype, length) if can_pack(dtype) else unpack_codes(packed, dtype, length)
