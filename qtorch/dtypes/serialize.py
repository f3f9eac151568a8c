"""Canonical form: a quantized tensor as plain named tensors and JSON, independent of its layout.

The tensors of a weight called ``layer.weight`` take their names from compressed-tensors:

    layer.weight               codes of 8 bits, or that do not fill a 32-bit word
    layer.weight_packed        smaller codes, in int32 words (see `primitives.packing`)
    layer.weight_scale, layer.weight_zero_point
    layer.input_scale, layer.input_zero_point     of a static activation

Loading packs them again for the layout that the scheme names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..primitives.jsonable import from_json, to_json
from ..primitives.packing import can_pack, pack_to_int32, unpack_from_int32
from ..primitives.scheme import Scheme
from .affine_quantized_tensor import AffineQuantizedTensor

Entry = dict[str, Any]
"""JSON data of one quantized tensor: its scheme, and which stored tensor is what."""


def to_canonical(name: str, tensor: AffineQuantizedTensor) -> tuple[dict[str, Tensor], Entry]:
    """Plain tensors by stored name, and the JSON entry that `from_canonical` reads."""
    codes, scale, zero_point = tensor.plain()
    dtype = tensor.scheme.weight.dtype
    parent, _, attribute = name.rpartition(".")
    input_name = (f"{parent}.input" if parent else "input") if attribute == "weight" else f"{name}_input"
    packed = can_pack(dtype)
    parts = {
        "packed" if packed else "codes": (
            f"{name}_packed" if packed else name,
            pack_to_int32(codes, dtype) if packed else codes,
        ),
        "scale": (f"{name}_scale", scale),
        "zero_point": (f"{name}_zero_point", zero_point),
        "act_scale": (f"{input_name}_scale", tensor.act_scale),
        "act_zero_point": (f"{input_name}_zero_point", tensor.act_zero_point),
    }
    present = {part: (stored, value) for part, (stored, value) in parts.items() if value is not None}
    entry = {"scheme": to_json(tensor.scheme), "tensors": {part: stored for part, (stored, _) in present.items()}}
    return dict(present.values()), entry


def from_canonical(entry: Entry, read: Callable[[str], Tensor]) -> AffineQuantizedTensor:
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
        parts["codes"] = unpack_from_int32(parts["packed"], scheme.weight.dtype, scheme.shape[-1])
    if tuple(parts["codes"].shape) != scheme.shape:
        raise ValueError(f"the codes have shape {tuple(parts['codes'].shape)}, the scheme {scheme.shape}")
    return AffineQuantizedTensor.from_plain(
        parts["codes"],
        parts["scale"],
        parts.get("zero_point"),
        scheme.spec,
        scheme.dtype,
        parts.get("act_scale"),
        parts.get("act_zero_point"),
    )
