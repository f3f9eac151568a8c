"""`int8_scaled_mm` on CUDA, by Triton: int8 activations, integer weights of 1 to 8 bits, plain or packed.

The equation, and the bits of the result, are those of `int8_scaled_mm`. One scale per output channel without zero
points: one product in int32 (`triton/int8_scaled_mm.py`). Groups, zero points, packed codes: one product for each group
(`triton/int8_grouped_mm.py`).
"""

from typing import Any

import torch
from torch import Tensor

from .. import features
from ..custom_ops import Name, implement, note, opaque, portable
from ..linear.scaled import supports_int32
from ..ops import int_matmul, quantize
from ..ops.int8_grouped_mm import int8_grouped_mm
from ..registry import Problem, from_rows, needs_clear_width, needs_rows, split_bias, to_rows
from .weight_only import reads_integers

_HAS_TRITON = features.cuda_lacks("triton") is None


@opaque(lambda xq, xs, xz, qdata, *rest: xs.new_empty(xq.shape[0], qdata.shape[0], dtype=rest[-1]))
def cuda_int8_mm(
    xq: Tensor, xs: Tensor, xz: Tensor | None, qdata: Tensor, ws: Tensor, wz: Tensor | None, weight_dtype: Name,
    bias: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `int8_grouped_mm`.

    Args:
        xq, xs, xz, ws, wz: as there.
        qdata: (N, K) codes of `weight_dtype`, a `QDType` name; or uint8, those codes packed by row.
        bias: (N,), added to the rounded result; or None.
        dtype: of the result, (M, N).
    """
    if qdata.dtype == torch.int8 and ws.shape[1] == 1 and wz is None:
        from .triton.int8_scaled_mm import int8_scaled_mm

        note("cuda_int8_mm.one_product")
        return int8_scaled_mm(xq, qdata.t(), xs, ws.t(), dtype, bias, xz)
    from .triton.int8_grouped_mm import int8_grouped_mm as launch

    note("cuda_int8_mm.grouped")
    return launch(xq, xs, xz, qdata, ws, wz, weight_dtype, bias, dtype)


@implement("int8_grouped_mm", "cuda", where=_HAS_TRITON)
def triton_grouped_mm(
    xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See `int8_grouped_mm`."""
    if not wq.shape[1]:
        return xs.new_zeros(xq.shape[0], wq.shape[0], dtype=dtype)
    if wq.shape[1] // ws.shape[1] > int_matmul.int32_terms(xz is not None, wz is not None or wq.dtype == torch.uint8):
        return portable(int8_grouped_mm)(xq, xs, xz, wq, ws, wz, dtype)
    return cuda_int8_mm(xq, xs, xz, wq, ws, wz, "int8" if wq.dtype == torch.int8 else "uint8", None, dtype)


@implement("int8_product", "cuda", where=_HAS_TRITON)
def triton_product(
    xq: Tensor, xs: Tensor, xz: Tensor | None, wq: Tensor, ws: Tensor, wz: Tensor | None, group: int, dtype: torch.dtype
) -> Tensor:
    """See `int8_product`: one kernel does all of it."""
    return int8_grouped_mm(xq, xs, xz, wq, ws, wz, dtype)


def _supports(problem: Problem) -> str | None:
    return needs_rows(problem) or needs_clear_width(problem) or features.cuda_lacks("triton") or supports_int32(problem)


@reads_integers("linear", activation=("int8",), supports=_supports, name="cuda_int8_mm")
def cuda_int8_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, then the equation of `int8_scaled_mm`."""
    xq, xs, xz = quantize.quantize_input(to_rows(x), weight)
    fused, bias = split_bias(bias, x, weight.scheme.shape[0])
    codes = weight.qdata, weight.dense_scale(), weight.zero_point, weight.scheme.weight.dtype.name
    return from_rows(cuda_int8_mm(xq, xs, xz, *codes, fused, x.dtype), x, bias)
