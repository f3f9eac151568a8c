"""`int8_scaled_mm` for a weight in the packed layout: a slice of rows is unpacked and multiplied at a time.

The equation and the bits of the result are those of `int8_scaled_mm`: each output channel depends on its own row only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..primitives.packing import unpack_codes
from ..primitives.qdtype import qdtype
from .int8_scaled_mm import INTEGERS, WEIGHT_SLICE, int8_grouped_mm, supports
from .library import opaque
from .quantize_rowwise import quantize_input
from .registry import Problem, register
from .rows import from_rows, to_rows


def _fake(
    xq: Tensor,
    xs: Tensor,
    xz: Tensor | None,
    qdata: Tensor,
    ws: Tensor,
    wz: Tensor | None,
    weight_dtype: str,
    dtype: torch.dtype,
) -> Tensor:
    return xs.new_empty(xq.shape[0], qdata.shape[0], dtype=dtype)


@opaque(
    "packed_int8_mm(Tensor xq, Tensor xs, Tensor? xz, Tensor qdata, Tensor ws, Tensor? wz, str weight_dtype, "
    "ScalarType dtype) -> Tensor",
    _fake,
)
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
    k = xq.shape[1]
    y = xs.new_empty(xq.shape[0], qdata.shape[0], dtype=dtype)
    # Unpacked codes take a byte; where the weight has groups they become fp32 next, a slice of them in one go.
    step = max(1, WEIGHT_SLICE // (4 * max(1, k)))
    for start in range(0, qdata.shape[0], step):
        rows = slice(start, start + step)
        wq = unpack_codes(qdata[rows], qdtype(weight_dtype), k)
        y[:, rows] = int8_grouped_mm(xq, xs, xz, wq, ws[rows], None if wz is None else wz[rows], dtype)
    return y


def _supports(problem: Problem) -> str | None:
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
    supports=_supports,
    note="where the weight has groups, on CPU it saves memory, not time",
)
def packed_int8_scaled_mm(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, then the equation of `int8_scaled_mm`."""
    xq, xs, xz = quantize_input(to_rows(x), weight)
    kind = weight.scheme.weight.dtype.name
    y = packed_int8_mm(xq, xs, xz, weight.qdata, weight.dense_scale(), weight.zero_point, kind, x.dtype)
    return from_rows(y, x, bias)
