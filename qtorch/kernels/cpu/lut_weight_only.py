"""Linear with a weight of look-up tables and a floating-point activation, compiled; see `linear/lut_weight_only.py`.

One table for the whole weight, such as NF4, or one for each row; tables for groups of a row run in torch operators.
"""

from __future__ import annotations

from torch import Tensor

from ...primitives.codebooks import CodebookSpec
from ..custom_ops import opaque
from ..linear.lut_weight_only import CodebookWeight, lut_weight_mm
from ..registry import Problem, from_rows, to_rows
from . import weight
from .code_values import TABLE
from .weight import register_compiled
from .weight_only import multiply, supports


@opaque(lambda x, codes, n, *_: x.new_empty(x.shape[0], n))
def cpu_lut_mm(
    x: Tensor, codes: Tensor, n: int, scale: Tensor, table: Tensor, bits: int, packed: bool, bias: Tensor | None
) -> Tensor:
    """y[m, n] = sum_k x[m, k] * table[codes[n, k]] * scale[n, g] + bias[n], (M, N) in the dtype of x.

    Args:
        x: (M, K) fp32, bf16 or fp16.
        codes: (N, K) uint8; or of `bits` bits, packed along K.
        scale: (N, G), G groups of a row, or (1, 1), in floating point.
        table: (L,), or (N, 1, L).
        bias: (N) in the dtype of x, or None.
    """
    about = (n, x.shape[1], f"uint{bits}", packed, TABLE, 0.0)
    in_torch = lambda: lut_weight_mm(x, codes, scale, table, bits if packed else 8, 1, n)  # noqa: E731
    return multiply("cpu_lut_mm", x, (codes, scale, table), about, bias, in_torch)


def _supports_table(problem: Problem) -> str | None:
    of_weight = problem.scheme.weight
    assert isinstance(of_weight, CodebookSpec)
    if of_weight.table is None and of_weight.scale_shape(problem.scheme.shape)[1] > 1:
        return f"takes one table, or one for each row, the weight has {of_weight.granularity}"
    return supports(problem)


@register_compiled(
    "linear",
    spec=CodebookSpec,
    weight=None,
    activation=(),
    supports=_supports_table,
    checks_memory=True,
    name="cpu_lut_mm",
)
def _linear(x: Tensor, quantized: CodebookWeight, bias: Tensor | None) -> Tensor:
    scheme = quantized.scheme
    packed, n = scheme.layout.packed_axis is not None, scheme.shape[0]
    added, bias = weight.split_bias(bias, x, n)
    scale, bits = quantized.dense_scale(), scheme.weight.dtype.bits
    return from_rows(cpu_lut_mm(to_rows(x), quantized.qdata, n, scale, quantized.table, bits, packed, added), x, bias)
