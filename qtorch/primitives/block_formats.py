"""Specs of floating-point elements in short blocks whose scales have 8 bits: the MX formats, and NVFP4.

MX (OCP Microscaling specification v1.0): blocks of 32 along a row, with a power of two, e8m0, as the scale of each.

NVFP4: elements in e2m1 in blocks of 16 with an e4m3 scale each, and an fp32 scale for the tensor:

    w = e2m1 code * e4m3 scale of the block * scale of the tensor,    scale of the tensor = absmax / (6 * 448)

so the block with the largest element has the largest e4m3 scale.
"""

import torch

from .affine import ZeroPointDomain
from .granularity import PerGroup, PerTensor
from .qdtype import QDType, qdtype
from .spec import QuantSpec

MX_BLOCK = 32
NVFP4_BLOCK = 16


def mx_spec(dtype: QDType | torch.dtype | str) -> QuantSpec:
    """Spec of elements of `dtype`, ``"float8_e4m3fn"``, ``"float6_e2m3"`` or ``"float4_e2m1"``, in blocks of 32 that
    share an e8m0 scale."""
    none = ZeroPointDomain.NONE
    return QuantSpec(qdtype(dtype), PerGroup(MX_BLOCK), zero_point_domain=none, scale_dtype=torch.float8_e8m0fnu)


def nvfp4_spec() -> QuantSpec:
    """Spec of elements in e2m1, in blocks of 16 with scales in e4m3, which share an fp32 scale."""
    none = ZeroPointDomain.NONE
    scale_spec = QuantSpec(qdtype(torch.float8_e4m3fn), PerTensor(), zero_point_domain=none)
    return QuantSpec(qdtype("float4_e2m1"), PerGroup(NVFP4_BLOCK), zero_point_domain=none, scale_spec=scale_spec)
