"""Linear with a weight in the block-sparse layout, in torch operators: the blocks of zeros are skipped.

For a row of blocks i with the columns of blocks J(i),

    y[:, i] = sum_{j in J(i)} x[:, j] w[i, j]^T

so those columns of x are gathered, and multiplied with what is stored of the row, which is a dense matrix. With int8
activations the result has the bits of the dense weight's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...primitives import QDType, ZeroPointDomain, qdtype
from ...primitives.layouts import can_pack_bits, unpack_codes
from ..custom_ops import Name, opaque
from ..ops.int8_grouped_mm import int8_grouped_mm
from ..ops.quantize import dequantize_rows, quantize_input
from ..ops.weight_only_mm import code_arguments, dequantize_codes, scale_of_slice
from ..registry import from_rows, needs_matrix, register, to_rows
from .scaled import EMULATED, INTEGERS, supports, supports_floats


@opaque(lambda xq, xs, xz, qdata, columns, ws, kind, dtype: xs.new_empty(xq.shape[0], qdata.shape[0], dtype=dtype))
def block_sparse_int8_mm(
    xq: Tensor, xs: Tensor, xz: Tensor | None,
    qdata: Tensor, columns: Tensor, ws: Tensor, weight_dtype: Name, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `int8_grouped_mm`; `qdata` (of `weight_dtype`), `columns` and `ws` are those of `BlockSparseLayout`."""

    def product(x: Tensor, codes: Tensor, rows: slice) -> Tensor:
        return int8_grouped_mm(x, xs, xz, codes, ws if ws.shape[0] == 1 else ws[rows], None, dtype)

    return _multiply_rows_of_blocks(xq, qdata, columns, qdtype(weight_dtype), product, dtype)


@opaque(lambda x, qdata, *_: x.new_empty(x.shape[0], qdata.shape[0]))
def block_sparse_weight_mm(
    x: Tensor, qdata: Tensor, columns: Tensor, scale: Tensor, dtype: Name, low: float, high: float
) -> Tensor:
    """The equation without bias, for an input (M, K) that is not quantized, in its dtype; the codes are of `dtype`, a
    `QDType` name, and between `low` and `high`."""
    kind = qdtype(dtype)

    def product(x: Tensor, codes: Tensor, rows: slice) -> Tensor:
        own_scale = scale_of_slice(scale, rows.start, rows.stop, qdata.shape[0] // scale.shape[0])
        return x @ dequantize_codes(codes, own_scale, None, kind, low, high, ZeroPointDomain.NONE, x.dtype).t()

    y = _multiply_rows_of_blocks(x, qdata, columns, kind, product, x.dtype)
    # Columns of x that no block reads count as well: 0 times NaN is NaN.
    return y.masked_fill_(~torch.isfinite(x).all(1, keepdim=True), torch.nan)


def _multiply_rows_of_blocks(
    x: Tensor, qdata: Tensor, columns: Tensor, kind: QDType,
    product: Callable[[Tensor, Tensor, slice], Tensor], dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """y (M, N) by ``product(columns, codes, rows)`` for each row of blocks: what it reads of x (M, K), its codes,
    and which rows of the weight they are."""
    n, (rows, kept) = qdata.shape[0], columns.shape
    size = n // rows
    blocks = x.unflatten(1, (-1, size))
    y = x.new_empty(x.shape[0], n, dtype=dtype)
    for i in range(rows):
        part = slice(i * size, (i + 1) * size)
        codes = unpack_codes(qdata[part], kind, kept * size) if can_pack_bits(kind) else qdata[part]
        y[:, part] = product(blocks.index_select(1, columns[i]).flatten(1), codes, part)
    return y


@register("linear", layout="block_sparse", weight=INTEGERS, activation=("int8",), priority=20, supports=supports)
def block_sparse_int8_scaled_mm(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear: quantize the activation, then the equation."""
    xq, xs, xz = quantize_input(to_rows(x), weight)
    kind = weight.scheme.weight.dtype.name
    y = block_sparse_int8_mm(xq, xs, xz, weight.qdata, weight.columns, weight.scale, kind, x.dtype)
    return from_rows(y, x, bias)


@register("linear", layout="block_sparse", priority=10, supports=supports_floats, note=EMULATED, emulates=True)
def emulated_block_sparse_mm(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear: quantize and dequantize the activation, then the equation in fp32."""
    x32 = dequantize_rows(weight.scheme.activation, *quantize_input(to_rows(x), weight))
    return from_rows(_multiply_reals(x32, weight).to(x.dtype), x, bias)


@register("linear", layout="block_sparse", activation=(), priority=10, supports=needs_matrix)
def block_sparse_weight_only_mm(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with an input in floating point."""
    return from_rows(_multiply_reals(to_rows(x), weight), x, bias)


def _multiply_reals(rows: Tensor, weight: Any) -> Tensor:
    numerics = code_arguments(weight.scheme.weight)[:3]
    return block_sparse_weight_mm(rows, weight.qdata, weight.columns, weight.scale, *numerics)
