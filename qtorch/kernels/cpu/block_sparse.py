"""Linear with a block-sparse integer weight, compiled: the equation of `linear/block_sparse.py`.

With int8 activations the sums are exact in int32, and the result has the bits of the dense weight's.
"""

from typing import Any

import torch
from torch import Tensor

from ...primitives.layouts.packed import can_pack_bits
from ...primitives.tracing import see_operators
from ..custom_ops import Name, note, opaque, recording
from ..linear import scaled
from ..linear.block_sparse import block_sparse_int8_mm, block_sparse_weight_mm
from ..ops.quantize import Quantized, quantize_input
from ..registry import Problem, from_rows, needs_floats, split_bias, to_rows
from . import int8_linear, weight, weight_only
from .compiled_library import TYPES, library, missing, threads
from .memory import address, empty
from .structs import BlockCall, Blocks, Input, Output, pack

BLOCK_MULTIPLE = 16  # the size of a block is a multiple of this


@opaque(lambda x, xs, xz, codes, columns, n, *rest: x.new_empty(x.shape[0], n, dtype=rest[-2]))
def cpu_block_sparse_mm(
    x: Tensor, xs: Tensor | None, xz: Tensor | None, codes: Tensor, columns: Tensor,
    n: int, scale: Tensor, packed: bool, weight_dtype: Name, low: float, high: float,
    dtype: torch.dtype, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The equation, y (M, N).

    Args:
        x: (M, K) int8 codes, or fp32, bf16 or fp16.
        xs, xz: scale and zero point of codes, (M, 1) or (1, 1).
        codes, columns, scale: those of `BlockSparseLayout`.
        n: N.
        packed: whether the codes are packed.
        weight_dtype: name of a `QDType`; low, high: bounds of the codes.
        dtype: of the result.
        bias: (N) in that dtype, or None.
    """
    m, k = x.shape
    weight.check_bias(bias, dtype, n)
    rows, kept = columns.shape
    size = n // rows
    _check_columns(columns, n, k)
    stored = weight.CompiledWeight.of(codes, scale, None, n, kept * size, weight_dtype, packed, "NONE", 0.0)
    compiled = stored.compiled

    def in_torch() -> Tensor:
        note("cpu_block_sparse_mm.torch")
        if xs is not None:
            y = block_sparse_int8_mm(x, xs, xz, codes, columns, scale, weight_dtype, dtype)
        else:
            y = block_sparse_weight_mm(x, codes, columns, scale, weight_dtype, low, high)
        return y if bias is None else y.add_(bias)

    if compiled is None:
        return in_torch()
    if recording():
        note(f"cpu_block_sparse_mm.{compiled.instruction_set}")
    x = x if x.stride(1) == 1 else x.contiguous()
    y = empty((m, n), dtype)
    scales = None if xs is None else xs.float().expand(m, 1).contiguous()
    zeros = None if xz is None else xz.to(torch.int32).expand(m, 1).contiguous()
    of_x, of_y = Input(address(x), TYPES[x.dtype], x.stride(0), m), Output(address(y), TYPES[dtype], n, address(bias))
    blocks, factors = Blocks(address(columns, torch.int32), size, kept), address(scales, torch.float32)
    call = BlockCall(of_x, of_y, blocks, k, factors, address(zeros, torch.int32), threads())
    lost = compiled.block_sparse_mm(pack(stored.fields) + pack(call))
    return weight_only.where_finite(y, x, in_torch) if lost else y


def _check_columns(columns: Tensor, n: int, k: int) -> None:
    """Raise `ValueError` unless these are columns of square blocks of a weight (n, k)."""
    rows, kept = columns.shape
    size = n // max(rows, 1)
    if columns.dtype != torch.int32 or not columns.is_contiguous() or rows * size != n or k % size or not kept:
        raise ValueError(
            f"the columns of blocks of a weight of shape {(n, k)} are contiguous int32, a row for each row of blocks, "
            f"got {tuple(columns.shape)} {columns.dtype}"
        )
    lowest, highest = torch.aminmax(columns)
    if int(lowest) < 0 or int(highest) >= k // size:
        raise ValueError(f"a weight {(n, k)} has {k // size} columns of blocks, got {int(lowest)} to {int(highest)}")


def _quantized(x: Tensor, quantized: Any) -> Quantized:
    """(codes, scale, zero point) of the rows of x."""
    quantizer = int8_linear.row_quantizer(quantized.scheme.activation)
    if quantizer is None or see_operators() or library() is None:
        return quantize_input(x, quantized)
    return int8_linear.quantize_rows(x, quantizer)


def _supports(problem: Problem) -> str | None:
    scheme = problem.scheme
    if reason := needs_floats(problem) or (scaled.supports_int32(problem) if scheme.activation is not None else None):
        return reason
    layout: Any = scheme.layout
    group = scheme.weight.block_size(scheme.shape)[1]
    size = layout.block_size
    if size % BLOCK_MULTIPLE or (group != scheme.shape[1] and group % BLOCK_MULTIPLE):
        return f"takes blocks and groups of a multiple of {BLOCK_MULTIPLE}, the weight has {size} and {group}"
    return missing()


@weight.register_compiled(
    "linear", layout="block_sparse", activation=("int8",), supports=_supports, name="cpu_block_sparse_int8_mm"
)
@weight.register_compiled(
    "linear", layout="block_sparse", activation=(), supports=_supports, name="cpu_block_sparse_weight_only_mm"
)
def _linear(x: Tensor, quantized: Any, bias: Tensor | None) -> Tensor:
    scheme, rows = quantized.scheme, to_rows(x)
    spec, xs, xz = scheme.weight, None, None
    if scheme.activation is not None:
        rows, xs, xz = _quantized(rows, quantized)
    added, bias = split_bias(bias, x, scheme.shape[0])
    low, high = spec.code_range
    y = cpu_block_sparse_mm(
        rows, xs, xz, quantized.qdata, quantized.columns, scheme.shape[0], quantized.scale, can_pack_bits(spec.dtype),
        spec.dtype.name, float(low), float(high), x.dtype, added,
    )  # fmt: skip
    return from_rows(y, x, bias)
