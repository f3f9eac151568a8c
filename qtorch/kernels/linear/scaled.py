"""Linear with quantized activations and weights, in torch operators.

    y[m, n] = (sum_g (sum_{k in g} (xq[m, k] - xz[m]) (wq[n, k] - wz[n, g])) * ws[n, g]) * xs[m] + bias[n]

The inner sum is an exact integer; the outer one, over the groups g of the weight (one, for a scale per row), runs in
fp32 in the order of the groups. So the result does not depend on the machine, and training with the same spec gets
the same bits. Of a packed weight, a slice of rows is unpacked and multiplied at a time, with the same bits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...primitives import qdtype
from ...primitives.layouts.packed import RowsInSlices
from ..custom_ops import Name, opaque
from ..ops import block_mm, int_matmul
from ..ops.int8_grouped_mm import WEIGHT_SLICE, fusible_int8_mm, int8_grouped_mm
from ..ops.quantize import dequantize_rows, quantize_input, quantize_rows
from ..ops.weight_only_mm import code_arguments, weight_only_mm
from ..registry import Problem, QuantizedWeight, from_rows, needs_matrix, needs_rows, register, to_rows

INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9))
NOTE = "where the weight has groups, on CPU it saves memory, not time"


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
    most = int_matmul.int32_terms(scheme.activation.has_zero_point, of_weight)
    return supports(problem) or (
        f"takes groups of at most {most} columns, the weight has {group}" if group > most else None
    )


@register("linear", layout="plain", weight=INTEGERS, activation=("int8",), priority=20, supports=supports, note=NOTE)
def int8_scaled_mm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, then the equation above."""
    return from_rows(fusible_int8_mm(*quantize_input(to_rows(x), weight), *weight.plain(), x.dtype), x, bias)


@opaque(lambda xq, xs, xz, qdata, *rest: xs.new_empty(xq.shape[0], qdata.shape[0], dtype=rest[-1]))
def packed_int8_mm(
    xq: Tensor, xs: Tensor, xz: Tensor | None, qdata: Tensor,
    ws: Tensor, wz: Tensor | None, weight_dtype: Name, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `int8_grouped_mm`; `qdata` is uint8, (N, K) codes of `weight_dtype`, a `QDType` name, packed by row."""
    kind, k = qdtype(weight_dtype), xq.shape[1]
    return multiply_int8_slices(xq, xs, xz, RowsInSlices(qdata, kind, k), ws, wz, dtype)


def multiply_int8_slices(
    xq: Tensor, xs: Tensor, xz: Tensor | None, rows: Callable[[int, int], Tensor],
    ws: Tensor, wz: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`int8_grouped_mm`, with the same bits, with a weight whose codes are read by ``rows(start, stop)``, a slice at a
    time; `stop` may lie beyond the last row."""
    n = ws.shape[0]
    y = xs.new_empty(xq.shape[0], n, dtype=dtype)
    # An unpacked code takes a byte; for a weight with groups the slice is converted to fp32 next, as a whole.
    step = max(1, WEIGHT_SLICE // (4 * max(1, xq.shape[1])))
    for start in range(0, n, step):
        stop = start + step
        wz_slice = None if wz is None else wz[start:stop]
        y[:, start:stop] = int8_grouped_mm(xq, xs, xz, rows(start, stop), ws[start:stop], wz_slice, dtype)
    return y


def supports_rows(problem: Problem) -> str | None:
    """`supports`, for codes packed along rows."""
    return supports(problem) or needs_rows(problem)


@register(
    "linear", layout="packed", weight=INTEGERS, activation=("int8",), priority=20, supports=supports_rows, note=NOTE
)
def packed_int8_scaled_mm(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, then the equation of `int8_scaled_mm`."""
    xq, xs, xz = quantize_input(to_rows(x), weight)
    kind = weight.scheme.weight.dtype.name
    y = packed_int8_mm(xq, xs, xz, weight.qdata, weight.dense_scale(), weight.zero_point, kind, x.dtype)
    return from_rows(y, x, bias)


def _supports_blocks(problem: Problem) -> str | None:
    scheme = problem.scheme
    activation = scheme.activation
    assert activation is not None
    of_activation = activation.granularity.pattern(2)[1]
    if reason := needs_matrix(problem):
        return reason
    if of_activation in (-1, 1):
        return f"takes activations in blocks along the contracted axis, the scheme has {activation.granularity}"
    if scheme.spec.static:
        return "computes the scales of activations on each call, the scheme has static ones"
    for what, spec in (("weight", scheme.weight), ("activation", activation)):
        if spec.has_zero_point:
            return f"takes symmetric codes, the {what} has {spec.mapping.name}"
    of_weight = scheme.weight.block_size(scheme.shape)[1]
    if scheme.shape[1] % of_activation:
        return f"takes blocks that divide a row: {scheme.shape[1]} % {of_activation}"
    if of_weight % of_activation and of_activation % of_weight:
        return f"takes blocks of which one divides the other, got {of_weight} and {of_activation}"
    return None


@register(
    "linear", layout="plain", weight=tuple(f"int{bits}" for bits in range(1, 9)), activation=("int8",), priority=20,
    supports=_supports_blocks, note="on CPU it has the accuracy of the format, not its speed", name="int8_block_mm",
)  # fmt: skip
def int8_block_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation in blocks, the last rows completed with zeros, then `int8_block_mm`."""
    rows, spec = to_rows(x), weight.scheme.activation
    assert spec is not None
    xq, xs, _ = quantize_rows(block_mm.pad_to_blocks(rows, spec.granularity), spec)
    return from_rows(block_mm.int8_block_mm(xq, xs, *weight.plain()[:2], x.dtype)[: rows.shape[0]], x, bias)


EMULATED = "emulated in fp32: the accuracy of the format, not its speed"


def supports_floats(problem: Problem) -> str | None:
    """Why emulation of activations in floating-point codes does not take the problem, or None."""
    activation = problem.scheme.activation
    if activation is None or not activation.dtype.is_floating_point:
        return "takes activations in floating-point codes"
    return needs_matrix(problem)


@register("linear", priority=5, supports=supports_floats, note=EMULATED, emulates=True, rotated=True)
def emulated_scaled_mm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear with any scheme and layout whose activation is in floating-point codes (float8, MX formats), in fp32."""
    scheme = weight.scheme
    assert scheme.activation is not None
    x32 = dequantize_rows(scheme.activation, *quantize_input(to_rows(x), weight))
    arguments = *weight.plain(), *code_arguments(scheme.weight)
    return from_rows(weight_only_mm(x32, *arguments).to(x.dtype), x, bias)
