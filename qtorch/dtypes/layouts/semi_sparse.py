"""SemiSparseLayout: codes of 8 bits that are 2:4 sparse along one axis, at 5 bits each."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...primitives.scheme import Scheme
from ...primitives.sparsity import (
    compress_cusparselt,
    compressed_shape,
    decompress_cusparselt,
    has_cusparselt,
    pack_2_4,
    packed_length_2_4,
    unpack_2_4,
)
from ...primitives.spec import QuantSpec
from .base import Layout, Plain, register_layout
from .inner_tensors import Form


@register_layout
@dataclass(frozen=True, repr=False)
class SemiSparseLayout(Layout):
    """int8 or float8_e4m3fn codes of which each run of four has at most two that are not zero, and the scale beside
    them. `primitives.sparsity` has the packings: uint8 bytes along the axis; for a matrix on a CUDA device with sparse
    tensor cores, sparse along its rows, the order of cuSPARSELt, in the dtype of the codes.

    Args:
        axis: the one codes are sparse along, counted from the end. A transposed view has it elsewhere than last.

    Raises:
        ValueError: `axis` is not negative.
    """

    name = "semi_sparse"
    tensors = ("qdata", "scale", "zero_point")
    any_codes = False

    axis: int = -1

    def __post_init__(self) -> None:
        if self.axis >= 0:
            raise ValueError(f"SemiSparseLayout: the axis is counted from the end, got {self.axis}")

    def __repr__(self) -> str:
        return "SemiSparseLayout()" if self.axis == -1 else f"SemiSparseLayout(axis={self.axis})"

    def check_spec(self, weight: QuantSpec) -> None:
        if weight.dtype.name not in ("int8", "float8_e4m3fn"):
            raise ValueError(f"SemiSparseLayout packs int8 and float8_e4m3fn codes, the weight has {weight.dtype}")
        if weight.has_zero_point:
            raise ValueError(
                f"SemiSparseLayout takes weights without zero point, whose zeros have the code zero, got {weight}"
            )

    def check(self, scheme: Scheme) -> None:
        super().check(scheme)
        if len(scheme.shape) < -self.axis:
            raise ValueError(f"SemiSparseLayout: a tensor of shape {scheme.shape} has no axis {self.axis}")

    def packing(self, device: torch.device) -> Hashable:
        return "cusparselt" if device.type == "cuda" and self.axis == -1 else None

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        shape = list(scheme.codes_shape)
        shape[self.axis] = packed_length_2_4(shape[self.axis])
        forms = (Form(tuple(shape), {torch.uint8}),)
        if len(shape) != 2 or self.axis != -1:
            return forms
        return (*forms, Form(compressed_shape(*scheme.codes_shape), {scheme.weight.dtype.storage}))

    def pack(self, plain: Plain, scheme: Scheme) -> dict[str, Tensor]:
        codes, scale, _ = plain
        qdata = pack_2_4(codes, self.axis)
        if self.axis == -1 and has_cusparselt(codes):
            qdata = compress_cusparselt(codes)
        return {"qdata": qdata, "scale": scale}

    def unpack(self, tensors: dict[str, Tensor | None], scheme: Scheme) -> Plain:
        qdata, scale = tensors["qdata"], tensors["scale"]
        assert qdata is not None
        assert scale is not None
        if self.can_view(qdata):
            codes = unpack_2_4(qdata, scheme.shape[self.axis], scheme.weight.dtype.storage, self.axis)
        else:
            codes = decompress_cusparselt(qdata, *scheme.shape)
        return codes, scale, None

    @property
    def packed_axis(self) -> int:
        return self.axis

    def can_view(self, qdata: Tensor) -> bool:
        return qdata.dtype == torch.uint8

    def with_packed_axis(self, axis: int) -> SemiSparseLayout:
        return SemiSparseLayout(axis)
