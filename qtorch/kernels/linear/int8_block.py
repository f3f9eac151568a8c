"""Integer product of two operands that both have blocks along the contracted axis (tiles of 32 x 32, say).

    y[m, n] = sum_g (sum_{k in g} xq[m, k] wq[n, k]) * ws[n, g] * xs[m, g] + bias[n]

The inner sum is an exact integer; the outer one runs in fp32 in the order of the groups g, the finer of the two
operands' blocks, so that the result does not depend on the machine. Symmetric codes only.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.int8_block_mm import int8_block_mm, pad_to_blocks
from ..ops.quantize_rowwise import quantize_rows
from ..registry import Problem, QuantizedWeight, needs_matrix, register
from ..rows import from_rows, to_rows


def _supports(problem: Problem) -> str | None:
    scheme = problem.scheme
    activation = scheme.activation
    assert activation is not None
    if reason := needs_matrix(problem):
        return reason
    if activation.granularity.pattern(2)[1] in (-1, 1):
        return f"takes activations in blocks along the contracted axis, the scheme has {activation.granularity}"
    if scheme.spec.static:
        return "computes the scales of activations on each call, the scheme has static ones"
    for what, spec in (("weight", scheme.weight), ("activation", activation)):
        if spec.has_zero_point:
            return f"takes symmetric codes, the {what} has {spec.mapping.name}"
    of_weight, of_activation = scheme.weight.block_size(scheme.shape)[1], activation.granularity.pattern(2)[1]
    if scheme.shape[1] % of_activation:
        return f"takes blocks that divide a row: {scheme.shape[1]} % {of_activation}"
    if of_weight % of_activation and of_activation % of_weight:
        return f"takes blocks of which one divides the other, got {of_weight} and {of_activation}"
    return None


@register(
    "linear",
    layout="plain",
    weight=tuple(f"int{bits}" for bits in range(1, 9)),
    activation=("int8",),
    priority=20,
    supports=_supports,
    note="on CPU it has the accuracy of the format, not its speed",
    name="int8_block_mm",
)
def int8_block_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation in blocks, the last rows completed with zeros, then the equation above."""
    wq, ws, _ = weight.plain()
    spec = weight.scheme.activation
    assert spec is not None
    rows = to_rows(x)
    xq, xs, _ = quantize_rows(pad_to_blocks(rows, spec.granularity), spec)
    return from_rows(int8_block_mm(xq, xs, wq, ws, x.dtype)[: rows.shape[0]], x, bias)
