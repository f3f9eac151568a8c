"""PackedLayout: codes of less than 8 bits, packed to their true size along one axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...primitives.packing import can_pack_bits, pack_codes, packed_length, unpack_codes
from ...primitives.scheme import Scheme
from ...primitives.spec import QuantSpec
from .base import Layout, Plain, register_layout
from .inner_tensors import Form


@register_layout
@dataclass(frozen=True, repr=False)
class PackedLayout(Layout):
    """Codes in uint8 at their true size (see `primitives.packing`), signed ones offset; scale and zero point beside
    them.

    Args:
        axis: the one codes are packed along, counted from the end. A transposed view has it elsewhere than last.

    Raises:
        ValueError: `axis` is not negative.
    """

    name = "packed"
    tensors = ("qdata", "scale", "zero_point")

    axis: int = -1

    def __post_init__(self) -> None:
        if self.axis >= 0:
            raise ValueError(f"PackedLayout: the axis is counted from the end, got {self.axis}")

    def __repr__(self) -> str:
        return "PackedLayout()" if self.axis == -1 else f"PackedLayout(axis={self.axis})"

    def check_spec(self, weight: QuantSpec) -> None:
        if not can_pack_bits(weight.dtype):
            raise ValueError(f"PackedLayout packs codes of 1 to 7 bits, the weight has {weight.dtype}")

    def check(self, scheme: Scheme) -> None:
        super().check(scheme)
        if len(scheme.shape) < -self.axis:
            raise ValueError(f"PackedLayout: a tensor of shape {scheme.shape} has no axis {self.axis}")

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        shape = list(scheme.codes_shape)
        shape[self.axis] = packed_length(shape[self.axis], scheme.weight.dtype.bits)
        return (Form(tuple(shape), {torch.uint8}),)

    def pack(self, plain: Plain, scheme: Scheme) -> dict[str, Tensor]:
        codes, scale, zero_point = plain
        tensors = {"qdata": pack_codes(codes, scheme.weight.dtype, self.axis), "scale": scale}
        return tensors if zero_point is None else {**tensors, "zero_point": zero_point}

    def unpack(self, tensors: dict[str, Tensor | None], scheme: Scheme) -> Plain:
        qdata = tensors["qdata"]
        assert qdata is not None
        codes = unpack_codes(qdata, scheme.weight.dtype, scheme.shape[self.axis], self.axis)
        return codes, tensors["scale"], tensors["zero_point"]  # type: ignore[return-value]

    @property
    def packed_axis(self) -> int:
        return self.axis

    def with_packed_axis(self, axis: int) -> PackedLayout:
        return PackedLayout(axis)
