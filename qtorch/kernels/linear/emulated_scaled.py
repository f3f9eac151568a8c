"""Linear with activations in floating-point codes (float8, MX formats), where no hardware multiplies such codes.

    y[m, n] = sum_k dequantize(quantize(x))[m, k] * dequantize(w)[n, k] + bias[n]

The real numbers of the codes are multiplied in fp32: the result has the accuracy of the format, but not its speed. The
kernel reads any layout, and unpacks it on each call.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.quantize_rowwise import dequantize_rows, quantize_input
from ..ops.weight_only_mm import weight_only_mm
from ..registry import Problem, QuantizedWeight, needs_matrix, register
from ..rows import from_rows, to_rows


def _supports(problem: Problem) -> str | None:
    activation = problem.scheme.activation
    if activation is None or not activation.dtype.is_floating_point:
        return "takes activations in floating-point codes"
    return needs_matrix(problem)


@register(
    "linear",
    priority=5,
    supports=_supports,
    note="emulated in fp32: the accuracy of the format, not its speed",
    emulates=True,
    rotated=True,
)
def emulated_scaled_mm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear with any scheme whose activation is in floating-point codes."""
    scheme = weight.scheme
    assert scheme.activation is not None
    rows = to_rows(x)
    quantized = dequantize_rows(scheme.activation, *quantize_input(rows, weight))
    codes, scale, zero_point = weight.plain()
    low, high = scheme.weight.code_range
    domain = scheme.weight.zero_point_domain.name
    name = scheme.weight.dtype.name
    y = weight_only_mm(quantized, codes, scale, zero_point, name, float(low), float(high), domain).to(x.dtype)
    return from_rows(y, x, bias)
