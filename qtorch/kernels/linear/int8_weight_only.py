"""Linear with an int8 weight, one scale per output channel, and a bf16 or fp16 activation on CPU.

    y[m, n] = (sum_k x[m, k] * wq[n, k]) * ws[n] + bias[n]

`aten::_weight_int8pack_mm` reads the int8 codes once, without a dequantized copy, and beats bf16 F.linear by 2 to 3
times at small M. At larger M it is slower, from the fewer rows on the faster the CPU multiplies bf16 (measured:
docs/performance/how_it_works.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import features
from ..custom_ops import note, opaque
from ..ops.weight_only_mm import weight_only_mm
from ..registry import Problem, QuantizedWeight, needs_matrix, register
from ..rows import from_rows, to_rows

MAX_ROWS = {True: 16, False: 1 << 30}
"""Largest M for the packed product, by whether the CPU has bf16 products."""


@opaque(lambda x, codes, scale: x.new_empty(x.shape[0], codes.shape[0]))
def int8_weight_mm(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """The equation above without bias.

    Args:
        x: (M, K) bf16 or fp16.
        codes: (N, K) int8.
        scale: (N, 1); rounded to the dtype of x.

    Returns:
        (M, N) in the dtype of x.
    """
    if x.shape[0] <= MAX_ROWS[features.cpu_has("bf16")]:
        note("int8_weight_mm.int8pack")
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
    "linear",
    layout="plain",
    weight=("int8",),
    activation=(),
    device="cpu",
    priority=20,
    supports=_supports,
    note="scales are rounded to the activation's dtype: relative error about 3e-3 in bf16",
    name="int8_weight_mm",
)
def int8_weight_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Linear with a per-channel int8 weight."""
    codes, scale, _ = weight.plain()
    y = int8_weight_mm(to_rows(x), codes, scale)
    return from_rows(y, x, bias)
