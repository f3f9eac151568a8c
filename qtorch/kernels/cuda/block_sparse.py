"""Linear with a block-sparse integer weight on CUDA, by Triton: the equation of `linear/block_sparse.py`."""

import functools
from typing import Any

import torch
from torch import Tensor

from .. import features
from ..custom_ops import Name, opaque
from ..linear.scaled import INTEGERS, supports_int32
from ..ops.quantize import quantize_input
from ..registry import Problem, from_rows, needs_floats, needs_matrix, register, split_bias, to_rows


@opaque(lambda x, xs, xz, qdata, columns, ws, kind, dtype, bias: x.new_empty(x.shape[0], qdata.shape[0], dtype=dtype))
def cuda_block_sparse_mm(
    x: Tensor, xs: Tensor | None, xz: Tensor | None, qdata: Tensor, columns: Tensor, ws: Tensor, weight_dtype: Name,
    dtype: torch.dtype, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `cpu_block_sparse_mm`."""
    from .triton.block_sparse_mm import block_sparse_mm

    y = block_sparse_mm(x, xs, xz, qdata, columns, ws, weight_dtype, dtype, bias)
    # Columns of x that no block reads count as well: 0 times NaN is NaN.
    return y if xs is not None else y.masked_fill_(~torch.isfinite(x).all(1, keepdim=True), torch.nan)


def _supports(problem: Problem) -> str | None:
    scheme = problem.scheme
    if reason := features.cuda_lacks("triton") or needs_matrix(problem):
        return reason
    if reason := (supports_int32(problem) if scheme.activation is not None else None) or needs_floats(problem):
        return reason
    size, (rows, group) = scheme.layout.block_size, scheme.weight.block_size(scheme.shape)
    if rows != 1 or size not in (32, 64, 128) or group < 32:
        return f"takes blocks of 32, 64 or 128 with scales per row or groups of 32 or more, got {size} and {group}"
    return None


_register = functools.partial(
    register, "linear", layout="block_sparse", weight=INTEGERS, device="cuda", priority=30, supports=_supports
)


@_register(activation=("int8",), name="cuda_block_sparse_int8_mm")
@_register(activation=(), name="cuda_block_sparse_weight_mm")
def cuda_block_sparse_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with an integer weight, and the input quantized or not."""
    rows, xs, xz = to_rows(x), None, None
    if weight.scheme.activation is not None:
        rows, xs, xz = quantize_input(rows, weight)
    fused, bias = split_bias(bias, x, weight.scheme.shape[0])
    kind = weight.scheme.weight.dtype.name
    y = cuda_block_sparse_mm(rows, xs, xz, weight.qdata, weight.columns, weight.scale, kind, x.dtype, fused)
    return from_rows(y, x, bias)
