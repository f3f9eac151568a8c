"""Linear with quantized activations and weights, accumulated in integers.

    y[m, n] = (sum_g (sum_{k in g} (xq[m, k] - xz[m]) (wq[n, k] - wz[n, g])) * ws[n, g]) * xs[m] + bias[n]

The inner sum is an exact integer; the outer one, over the groups g of the weight (one, for a scale per row), runs in
fp32 in the order of the groups. So the result does not depend on the machine, and training with the same spec gets
the same bits.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.int8_grouped_mm import fusible_int8_mm
from ..ops.int_matmul import int32_terms
from ..ops.quantize_rowwise import quantize_input
from ..registry import Problem, QuantizedWeight, needs_matrix, register
from ..rows import from_rows, to_rows

INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9))


def supports(problem: Problem) -> str | None:
    """Why integer accumulation cannot run the problem, or None."""
    scheme = problem.scheme
    activation = scheme.activation
    assert activation is not None
    if reason := needs_matrix(problem):
        return reason
    if scheme.weight.block_size(scheme.shape)[0] != 1:
        return f"takes a scale of its own for each output channel, the weight has {scheme.weight.granularity}"
    if activation.granularity.pattern(2) not in ((1, -1), (-1, -1)):
        return f"takes a scale per token or tensor for activations, the scheme has {activation.granularity}"
    for what, spec in (("weight", scheme.weight), ("activation", activation)):
        if spec.has_zero_point and spec.zero_point_domain.name != "INT":
            return f"takes integer zero points, the {what} has {spec.zero_point_domain.name}"
    return None


def supports_int32(problem: Problem) -> str | None:
    """`supports`, for kernels that add up a group in int32."""
    scheme = problem.scheme
    group = scheme.weight.block_size(scheme.shape)[-1]
    assert scheme.activation is not None
    of_weight = scheme.weight.has_zero_point or not scheme.weight.dtype.is_signed
    most = int32_terms(scheme.activation.has_zero_point, of_weight)
    return supports(problem) or (
        f"takes groups of at most {most} columns, the weight has {group}" if group > most else None
    )


@register(
    "linear",
    layout="plain",
    weight=INTEGERS,
    activation=("int8",),
    priority=20,
    supports=supports,
    note="where the weight has groups, on CPU it saves memory, not time",
)
def int8_scaled_mm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, then the equation above."""
    wq, ws, wz = weight.plain()
    rows = to_rows(x)
    xq, xs, xz = quantize_input(rows, weight)
    return from_rows(fusible_int8_mm(xq, xs, xz, wq, ws, wz, x.dtype), x, bias)
