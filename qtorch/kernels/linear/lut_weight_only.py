"""Linear with a weight of look-up tables and a floating-point activation, a slice of the weight at a time.

    y[m, n] = sum_k x[m, k] * table[codes[n, k]] * scale[n, k] + bias[n]

A slice is some rows of a weight packed along K; of one packed along N, as that of a backward pass is, some columns.
"""

from typing import Protocol

from torch import Tensor

from ...primitives import CodebookSpec, dequantize_codebook, granularity
from ...primitives.layouts.packed import unpack_bits
from ..custom_ops import opaque
from ..ops.weight_only_mm import multiply_slices, scale_of_slice, slice_length
from ..registry import QuantizedWeight, from_rows, needs_matrix, register, to_rows


class CodebookWeight(QuantizedWeight, Protocol):
    """The further attributes of a weight of look-up tables that a kernel may use."""

    qdata: Tensor
    scale: Tensor
    table: Tensor

    def dense_scale(self, rows: Tensor | None = None) -> Tensor:
        """The scale in floating point, of these rows of blocks or of all."""


@opaque(lambda x, qdata, scale, table, bits, axis, n: x.new_empty(x.shape[0], n))
def lut_weight_mm(x: Tensor, qdata: Tensor, scale: Tensor, table: Tensor, bits: int, axis: int, n: int) -> Tensor:
    """The equation above without bias, (M, N) in the dtype of x (M, K), in which the product runs.

    Args:
        qdata: codes (N, K) of `bits` bits packed along `axis`, 0 or 1, by `pack_bits`; with 8 bits, one code a byte.
        scale: one element per block of the weight; the blocks follow from its shape.
        table: (L,), or one per block (*scale.shape, L).
    """
    shape = (n, x.shape[1])
    if axis == 0:
        # Work on the transpose, whose rows are contiguous in memory.
        qdata, scale, shape = qdata.t(), scale.t(), shape[::-1]
        table = table if table.dim() == 1 else table.transpose(0, 1)
    block, columns = granularity.block_of(shape, scale.shape), shape[1]

    def dequantize(start: int, stop: int) -> Tensor:
        codes = unpack_bits(qdata[start:stop], bits, columns)
        own_scale = scale_of_slice(scale, start, stop, block[0])
        own_table = table if table.dim() == 1 else scale_of_slice(table, start, stop, block[0])
        return dequantize_codebook(codes, (min(block[0], stop - start), block[1]), own_scale, own_table, x.dtype)

    return multiply_slices(x, n, slice_length(x, columns, block[0]), dequantize, axis - 2)


@register("linear", spec=CodebookSpec, activation=(), priority=10, supports=needs_matrix, name="lut_weight_mm")
def lut_weight_linear(x: Tensor, weight: CodebookWeight, bias: Tensor | None) -> Tensor:
    """Linear with any table."""
    scheme = weight.scheme
    packed_axis = scheme.layout.packed_axis
    bits, axis = (8, 1) if packed_axis is None else (scheme.weight.dtype.bits, packed_axis + 2)
    y = lut_weight_mm(to_rows(x), weight.qdata, weight.dense_scale(), weight.table, bits, axis, scheme.shape[0])
    return from_rows(y, x, bias)
