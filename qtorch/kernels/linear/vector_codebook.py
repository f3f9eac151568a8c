"""Linear with a weight of vectors in bytes (`primitives.vector_spec`), a slice of the weight at a time.

    y[m, n] = sum_k (x R)[m, k] * entry[byte[n, k / 4]][k % 4] * scale[n, g] + bias[n]

R rotates the input, block by block, as the weight is rotated, so that the two cancel; the identity if it is not. In the
gradient of x, whose weight is transposed, the result is rotated instead.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...primitives.vector_spec import VECTOR, rotate_vectors, unpack_vectors
from ..custom_ops import opaque
from ..ops.weight_only_mm import LARGE, multiply_slices, slice_length
from ..registry import Problem, from_rows, needs_matrix, needs_rows, power_if_larger, register, to_rows

LAYOUT = "vector_codebook"


@opaque(lambda x, codes, *_: x.new_empty(x.shape[0], codes.shape[0]))
def vector_codebook_mm(x: Tensor, codes: Tensor, scale: Tensor, rotation: int) -> Tensor:
    """The equation above without bias, (M, N) in the dtype of x (M, K), in which the product runs.

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
    y = multiply_slices(rotated_input(x / up, rotation), len(codes), slice_length(x, columns), read)
    return y.mul_(up)


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
    y = transposed_vector_codebook_mm(rows, weight.qdata.t(), weight.scale.t(), rotation)
    return from_rows(y, x, bias)
