"""`int8_scaled_mm` for a weight in the packed layout: a slice of rows is unpacked and multiplied at a time.

The equation and the bits of the result are those of `int8_scaled_mm`: each output channel depends on its own row only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...layouts.packed import RowsInSlices
from ...primitives.qdtype import qdtype
from ..custom_ops import opaque
from ..ops.int8_grouped_mm import WEIGHT_SLICE, int8_grouped_mm
from ..ops.quantize_rowwise import quantize_input
from ..registry import Problem, register
from ..rows import from_rows, to_rows
from .int8_scaled import INTEGERS, supports


@opaque(lambda xq, xs, xz, qdata, *rest: xs.new_empty(xq.shape[0], qdata.shape[0], dtype=rest[-1]))
def packed_int8_mm(
    xq: Tensor,
    xs: Tensor,
    xz: Tensor | None,
    qdata: Tensor,
    ws: Tensor,
    wz: Tensor | None,
    weight_dtype: str,
    dtype: torch.dtype,
) -> Tensor:
    """See `int8_grouped_mm`; `qdata` is uint8, (N, K) codes of `weight_dtype`, a `QDType` name, packed by row."""
    kind, k = qdtype(weight_dtype), xq.shape[1]
    return multiply_int8_slices(xq, xs, xz, RowsInSlices(qdata, kind, k), ws, wz, dtype)


def multiply_int8_slices(
    xq: Tensor,
    xs: Tensor,
    xz: Tensor | None,
    rows: Callable[[int, int], Tensor],
    ws: Tensor,
    wz: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`int8_grouped_mm` with a weight whose codes are read by ``rows(start, stop)``, a slice at a time.

    `stop` may lie beyond the last row. Where the codes come from does not change the result.
    """
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
    """Why integer accumulation cannot run the problem with codes packed along rows, or None."""
    reason = supports(problem)
    if reason is None and problem.scheme.layout.packed_axis != -1:
        return "takes codes packed along rows, this weight is transposed"
    return reason


@register(
    "linear",
    layout="packed",
    weight=INTEGERS,
    activation=("int8",),
    priority=20,
    supports=supports_rows,
    note="where the weight has groups, on CPU it saves memory, not time",
)
def packed_int8_scaled_mm(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, then the equation of `int8_scaled_mm`."""
    xq, xs, xz = quantize_input(to_rows(x), weight)
    kind = weight.scheme.weight.dtype.name
    y = packed_int8_mm(xq, xs, xz, weight.qdata, weight.dense_scale(), weight.zero_point, kind, x.dtype)
    return from_rows(y, x, bias)
