"""Linear with a quantized weight and a floating-point activation, by dequantizing a slice of the weight at a time.

    y[m, n] = sum_k x[m, k] * dequantize(w)[n, k] + bias[n]

The slice stays in cache, and no full copy of the weight is made. int8 codes with a scale per row are not dequantized
where `fixed_point_mm` accepts the input.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.weight_only_mm import weight_only_mm
from ..registry import QuantizedWeight, needs_matrix, register
from ..rows import from_rows, to_rows


@register(
    "linear",
    layout="plain",
    activation=(),
    priority=10,
    supports=needs_matrix,
    note="dequantizes on each call: on CPU it saves memory, not time",
    name="weight_only_mm",
)
def weight_only_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear with any weight-only scheme."""
    codes, scale, zero_point = weight.plain()
    spec = weight.scheme.weight
    low, high = spec.code_range
    rows = to_rows(x)
    domain = spec.zero_point_domain.name
    y = weight_only_mm(rows, codes, scale, zero_point, spec.dtype.name, float(low), float(high), domain)
    return from_rows(y, x, bias)
