"""Quantization of a weight: scales chosen from its values, and its codes.

    q = clamp(round(w / scale) + zero_point)    (or the other equations of `primitives.affine`)

One operation, so that a device can make both in one pass.
"""

from __future__ import annotations

from torch import Tensor

from ...primitives.spec import QuantSpec
from ..custom_ops import by_device


@by_device
def quantize_weight(weight: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scale, zero_point) of `weight`, any shape in floating point, as `QuantSpec.choose_qparams` and
    `QuantSpec.quantize` give them, bit for bit. A block that holds a NaN or an infinity has NaN for a scale, and its
    codes are undefined unless the code dtype has a NaN.

    Args:
        spec: without a `scale_spec`.
    """
    scale, zero_point = spec.choose_qparams(weight)
    return spec.quantize(weight, scale, zero_point), scale, zero_point
