"""The real numbers of a matrix of codes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.affine import ZeroPointDomain, dequantize_affine
from ...primitives.granularity import block_of
from ...primitives.qdtype import QDType
from ..custom_ops import by_device


@by_device
def dequantize_codes(
    codes: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    kind: QDType,
    low: float,
    high: float,
    domain: ZeroPointDomain,
    dtype: torch.dtype,
) -> Tensor:
    """`dequantize_affine` of codes (M, K), whose blocks follow from the shape of the scale; without a scale, the values
    of the codes themselves.

    Args:
        kind: of the codes, whose bounds are `low` and `high`.
        dtype: of the result, (M, K).
    """
    if scale is None:
        return kind.decode(codes).to(dtype) if kind.format else codes.to(dtype)
    block = block_of(codes.shape, scale.shape)
    return dequantize_affine(codes, block, scale, zero_point, kind, low, high, domain, dtype)
