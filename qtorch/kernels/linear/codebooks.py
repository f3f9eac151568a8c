"""Linear with a weight of look-up tables or of vectors in bytes and a floating-point activation, a slice at a time.

    y[m, n] = sum_k x[m, k] * table[codes[n, k]] * scale[n, k] + bias[n]

A slice is some rows of a weight packed along K; of one packed along N, as that of a backward pass is, some columns.

    y[m, n] = sum_k (x R)[m, k] * entry[byte[n, k / 4]][k % 4] * scale[n, g] + bias[n]

is the product with vectors (`primitives.vector_spec`). R rotates the input, block by block, as the weight is rotated,
so that the two cancel; the identity if it is not. In the gradient of x, whose weight is transposed, the result is
rotated instead.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...primitives import CodebookSpec, dequantize_codebook, granularity
from ...primitives.layouts.packed import unpack_bits
from ...primitives.vector_spec import VECTOR, rotate_vectors, unpack_vectors
from ..custom_ops import opaque
from ..ops.weight_only_mm import LARGE, multiply_slices, scale_of_slice, slice_length
from ..registry import Problem, QuantizedWeight, from_rows, needs_matrix, needs_rows, power_if_larger, register, to_rows

LAYOUT = "vector_codebook"


class CodebookWeight(QuantizedWeight, Protocol):
    """The further attributes of a weight of look-up tables that a kernel may use."""

    qdata: Tensor
    scale: Tensor
    table: Tensor

    def dense_scale(self, rows: Tensor | None = None) -> Tensor:
        """The scale in floating point, of these rows of blocks or of all."""


@opaque(lambda x, qdata, scale, table, bits, axis, n: x.new_empty(x.shape[0], n))
def lut_weight_mm(x: Tensor, qdata: Tensor, scale: Tensor, table: Tensor, bits: int, axis: int, n: int) -> Tensor:
    """The first equation above without bias, (M, N) in the dtype of x (M, K), in which the product runs.

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


@opaque(lambda x, codes, *_: x.new_empty(x.shape[0], codes.shape[0]))
def vector_codebook_mm(x: Tensor, codes: Tensor, scale: Tensor, rotation: int) -> Tensor:
    """The second equation above without bias, (M, N) in the dtype of x (M, K), in which the product runs.

    Args:
        codes: (N, K / 4) uint8.
        scale: (N, G), of K / G columns each.
        rotation: columns of a block that is rotated, 0 for none.
    """
    columns = codes.shape[1] * VECTOR
    read = _reader(codes, scale, x.dtype)
    # The sum of a block may be 16 times its largest number: a row near that of the dtype is rotated as a smaller one.
    limit, power = (2.0**12, 2.0**4) if x.dtype == torch.float16 else (LARGE, LARGE)
    up = power_if_larger(x.abs(), limit, power)
    return multiply_slices(rotated_input(x / up, rotation), len(codes), slice_length(x, columns), read).mul_(up)


@opaque(lambda x, codes, *_: x.new_empty(x.shape[0], codes.shape[1] * VECTOR))
def transposed_vector_codebook_mm(x: Tensor, codes: Tensor, scale: Tensor, rotation: int) -> Tensor:
    """x (M, N) times the weight of `vector_codebook_mm`: (M, K)."""
    columns = codes.shape[1] * VECTOR
    y = multiply_slices(x, columns, slice_length(x, columns), _reader(codes, scale, x.dtype), -2)
    return rotated_input(y, rotation)


def _reader(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    """(start, stop) -> these rows of the weight, as it is rotated."""

    def read(start: int, stop: int) -> Tensor:
        values = unpack_vectors(codes[start:stop]).float().unflatten(1, (scale.shape[1], -1))
        return (values * scale[start:stop].float().unsqueeze(2)).flatten(1).to(dtype)

    return read


def rotated_input(x: Tensor, size: int) -> Tensor:
    """x (M, K) with each block of this size rotated, in the dtype of x; x itself for 0."""
    return rotate_vectors(x, size).to(x.dtype) if size else x


def rotation_of(weight: Any) -> int:
    """Columns of a block of a quantized weight that is rotated, 0 for none."""
    scheme = weight.scheme
    return math.gcd(scheme.weight.rotation, scheme.shape[scheme.layout.packed_axis]) if scheme.weight.rotation else 0


def supports(problem: Problem) -> str | None:
    """Why compiled kernels of this layout do not take the problem, or None."""
    return needs_matrix(problem) or needs_rows(problem)


@register(
    "linear", layout=LAYOUT, activation=(), priority=10, supports=needs_matrix, rotated=True, name="vector_codebook_mm"
)
def vector_codebook_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with any weight in this layout."""
    rows, rotation = to_rows(x), rotation_of(weight)
    if weight.scheme.layout.packed_axis == -1:
        return from_rows(vector_codebook_mm(rows, weight.qdata, weight.scale, rotation), x, bias)
    return from_rows(transposed_vector_codebook_mm(rows, weight.qdata.t(), weight.scale.t(), rotation), x, bias)
