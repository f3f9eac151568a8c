"""Canonical form: a quantized tensor as plain named tensors and JSON, independent of its layout.

The tensors of a weight called ``layer.weight`` take their names from compressed-tensors:

    layer.weight               codes of 8 bits
    layer.weight_packed        smaller codes: integers of 1, 2 and 4 bits in int32 words, as in compressed-tensors;
                               vectors in bytes (see `primitives.vector_spec`); others in uint8 by `pack_bits` (see
                               `layouts.packed`)
    layer.weight_scale, layer.weight_zero_point, layer.weight_table, ...
    layer.input_scale, layer.input_zero_point     of a static activation

Loading packs the codes again for the layout that the scheme names.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..primitives import QDType, Scheme, from_json, slices, to_json
from ..primitives.layouts import can_pack_bits, pack_codes, unpack_codes
from ..primitives.layouts.base import check_layout
from ..primitives.layouts.packed import pack_dense, unpack_dense
from ..primitives.vector_spec import VectorSpec, pack_vectors, unpack_vectors
from . import base, low_rank_weight, matrix_weight

# Codes of 1, 2, 4 or 8 bits in int32 words along the last axis, as compressed-tensors stores them.
#
#     word = sum_i (code[i] + offset) << (bits * i),   offset = 2^(bits-1) for signed codes, 0 for unsigned
#
# The first code is in the lowest bits; the last word of a row is padded with zero bits.

_WORD = 32


def can_pack(dtype: QDType) -> bool:
    """Whether codes of this type are stored in int32 words: integers of 1, 2 or 4 bits."""
    return not dtype.is_floating_point and dtype.bits < 8 and _WORD % dtype.bits == 0


def pack_to_int32(codes: Tensor, dtype: QDType) -> Tensor:
    """Pack codes (..., K) of `dtype` into int32 words (..., ceil(K * bits / 32))."""
    if dtype.is_floating_point or _WORD % dtype.bits:
        raise ValueError(f"pack_to_int32 takes integers of 1, 2, 4 or 8 bits, got {dtype}")

    def pack(part: Tensor) -> Tensor:
        return pack_dense(part.view(torch.uint8) + -int(dtype.quant_min), dtype.bits)

    return slices.in_slices(pack, codes, axes=codes.dim() - 1)


def unpack_from_int32(packed: Tensor, dtype: QDType, length: int) -> Tensor:
    """Inverse of `pack_to_int32`: the first `length` codes of each row, in the storage dtype."""

    def unpack(part: Tensor) -> Tensor:
        found = min(length, part.shape[-1] * _WORD // dtype.bits)  # the caller compares shapes
        return unpack_dense(part, dtype.bits, found).view(dtype.storage) + int(dtype.quant_min)

    return slices.in_slices(unpack, packed, axes=packed.dim() - 1)


Entry = dict[str, Any]
"""JSON data of one quantized tensor: its scheme, and the stored name of each of its parts."""

PARTS = frozenset({"codes", "packed", "scale", "zero_point", "table", "act_scale", "act_zero_point"}) | {
    *base.SCALES_OF_SCALES,
    *low_rank_weight.BRANCH,
}
"""The parts of a quantized tensor that can be stored."""

LOGICAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def to_canonical(name: str, tensor: base.QuantizedTensor) -> tuple[dict[str, Tensor], Entry]:
    """Plain tensors by stored name, and the JSON entry that `from_canonical` reads."""
    codes, others = tensor.canonical()
    dtype = tensor.scheme.weight.dtype
    parent, _, attribute = name.rpartition(".")
    input_name = (f"{parent}.input" if parent else "input") if attribute == "weight" else f"{name}_input"
    parts = {"codes": (name, codes)}
    if _is_packed(tensor.scheme):
        if isinstance(tensor.scheme.weight, VectorSpec):
            packed = pack_vectors(codes, tensor.scheme.weight.axis(codes.dim())).contiguous()
        else:
            packed = pack_to_int32(codes, dtype) if can_pack(dtype) else pack_codes(codes, dtype)
        parts = {"packed": (f"{name}_packed", packed)}
    for part, value in others.items():
        stored = f"{input_name}_{part.removeprefix('act_')}" if part.startswith("act_") else f"{name}_{part}"
        parts[part] = (stored, value)
    entry = {"scheme": to_json(tensor.scheme), "tensors": {part: stored for part, (stored, _) in parts.items()}}
    return dict(parts.values()), entry


def from_canonical(entry: Entry, read: Callable[[str], Tensor]) -> base.QuantizedTensor:
    """Inverse of `to_canonical`.

    Args:
        entry: an entry that `to_canonical` returned, or data from a file, which is validated.
        read: stored name -> tensor; called after the scheme has been validated.
    """
    scheme = scheme_of(entry)
    names: dict[str, str] = entry["tensors"]
    wanted = "packed" if _is_packed(scheme) else "codes"
    if wanted not in names or not names.keys() <= PARTS - {"codes", "packed"} | {wanted}:
        raise ValueError(f"its tensors are {', '.join(sorted(names))}; the codes of {scheme.weight} are {wanted!r}")
    parts = {part: read(stored) for part, stored in names.items()}
    codes = parts.pop(wanted)
    if wanted == "packed":
        dtype, length = scheme.weight.dtype, scheme.codes_shape[-1]
        stored = torch.int32 if can_pack(dtype) else torch.uint8
        if codes.dtype != stored or codes.dim() == 0:
            got = f"{codes.dtype} of shape {tuple(codes.shape)}"
            raise ValueError(f"packed codes of {dtype} are rows of {stored}, got {got}")
        if isinstance(scheme.weight, VectorSpec):
            codes = unpack_vectors(codes, scheme.weight.axis(codes.dim()))
        else:
            codes = (unpack_from_int32 if can_pack(dtype) else unpack_codes)(codes, dtype, length)
    if tuple(codes.shape) != scheme.codes_shape:
        raise ValueError(f"the codes have shape {tuple(codes.shape)}, the scheme {scheme.codes_shape}")
    return matrix_weight.type_of_scheme(scheme).from_canonical(codes, parts, scheme)


def check_entry(entry: Any) -> None:
    """Raise `ValueError` if `entry` does not have the form that `to_canonical` returns; its scheme is not parsed."""
    if not isinstance(entry, dict) or not isinstance(entry.get("scheme"), dict):
        raise ValueError("its entry has no scheme")
    names = entry.get("tensors")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in [*names, *names.values()]):
        raise ValueError("its entry has no names of tensors")


def scheme_of(entry: Any) -> Scheme:
    """The validated scheme of an entry."""
    check_entry(entry)
    scheme = from_json(entry["scheme"])
    if not isinstance(scheme, Scheme):
        raise ValueError(f"expected a Scheme, got {scheme!r:.80}")
    base.quantized_type(scheme.weight)
    check_layout(scheme.layout)
    if scheme.dtype not in LOGICAL_DTYPES:
        raise ValueError(f"a quantized tensor has the dtype of floats, got {scheme.dtype}")
    if not all(size >= 0 for size in scheme.shape) or math.prod(max(1, size) for size in scheme.shape) >= 2**63:
        raise ValueError(f"no tensor has the shape {scheme.shape!r:.80}")
    return scheme


def _is_packed(scheme: Scheme) -> bool:
    is_small = can_pack_bits(scheme.weight.dtype) or isinstance(scheme.weight, VectorSpec)
    return is_small and len(scheme.codes_shape) > 0
