"""Linear with a quantized weight, plain or packed, and a floating-point activation, in torch operators.

    y[m, n] = sum_k x[m, k] * dequantize(w)[n, k] + bias[n]

A slice of the weight is unpacked, dequantized and multiplied at a time (`ops/weight_only_mm.py`).
"""

from typing import Any

import torch
from torch import Tensor

from ...primitives import ZeroPointDomain, qdtype
from ...primitives.layouts.packed import RowsInSlices, unpack_codes
from .. import custom_ops, features
from ..ops.weight_only_mm import CodeNumerics, code_arguments, multiply_codes, weight_only_mm
from ..registry import Problem, QuantizedWeight, from_rows, needs_matrix, register, to_rows

NOTE = "dequantizes on each call: on CPU it saves memory, not time"


@register("linear", layout="plain", activation=(), priority=10, supports=needs_matrix, note=NOTE, name="weight_only_mm")
def weight_only_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear with any weight-only scheme."""
    arguments = *weight.plain(), *code_arguments(weight.scheme.weight)
    return from_rows(weight_only_mm(to_rows(x), *arguments), x, bias)


@custom_ops.opaque(lambda x, qdata, n, *_: x.new_empty(x.shape[0], n))
def packed_weight_mm(
    x: Tensor, qdata: Tensor, n: int, axis: int,
    scale: Tensor, zero_point: Tensor | None, dtype: custom_ops.Name, low: float, high: float, domain: custom_ops.Name,
) -> Tensor:  # fmt: skip
    """`weight_only_mm` of codes (N, K) that are packed along `axis`, -1 or -2, as uint8."""
    kind, k = qdtype(dtype), x.shape[1]
    read = RowsInSlices(qdata, kind, k) if axis == -1 else lambda a, b: unpack_codes(qdata.t()[a:b], kind, n)
    numerics = CodeNumerics(scale, zero_point, kind, low, high, ZeroPointDomain[domain])
    return multiply_codes(x, (n, k), read, numerics, axis)


@register(
    "linear", layout="packed", activation=(), priority=10, supports=needs_matrix, note=NOTE, name="packed_weight_mm"
)
def packed_weight_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with any weight-only scheme in the packed layout."""
    scheme, scale, zero_point = weight.scheme, weight.dense_scale(), weight.dense_zero_point()
    axis, numerics = scheme.layout.packed_axis, code_arguments(scheme.weight)
    y = packed_weight_mm(to_rows(x), weight.qdata, scheme.shape[0], axis, scale, zero_point, *numerics)
    return from_rows(y, x, bias)


MAX_ROWS = {True: 16, False: 1 << 30}  # of x for the packed product, by whether the CPU has bf16 products


@custom_ops.opaque(lambda x, codes, scale: x.new_empty(x.shape[0], codes.shape[0]))
def int8_weight_mm(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """y[m, n] = (sum_k x[m, k] * codes[n, k]) * scale[n]. `aten::_weight_int8pack_mm` reads the int8 codes once,
    without a dequantized copy, and beats bf16 F.linear by 2 to 3 times at small M. At larger M it is slower, from the
    fewer rows on the faster the CPU multiplies bf16 (measured: docs/performance/how_it_works.md). x is bf16 or fp16,
    the codes int8, and the scale (N, 1) is rounded to the dtype of x, which is that of the result."""
    if x.shape[0] <= MAX_ROWS[features.cpu_has("bf16")]:
        custom_ops.note("int8_weight_mm.int8pack")
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), codes.contiguous(), scale.reshape(-1).to(x.dtype))
    return weight_only_mm(x, codes, scale, None, "int8", -128.0, 127.0, "NONE")


def _supports(problem: Problem) -> str | None:
    scheme = problem.scheme
    if reason := needs_matrix(problem):
        return reason
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 or fp16 activations, got {str(problem.dtype).removeprefix('torch.')}"
    if scheme.weight.scale_shape(scheme.shape) != (scheme.shape[0], 1) or scheme.weight.has_zero_point:
        return f"takes a symmetric scale per output channel, the weight has {scheme.weight}"
    return None


@register(
    "linear", layout="plain", weight=("int8",), activation=(), device="cpu", priority=20, supports=_supports,
    note="scales are rounded to the activation's dtype: relative error about 3e-3 in bf16", name="int8_weight_mm",
)  # fmt: skip
def int8_weight_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear with a per-channel int8 weight."""
    return from_rows(int8_weight_mm(to_rows(x), *weight.plain()[:2]), x, bias)
