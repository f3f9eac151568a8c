"""Linear with a weight of vectors in bytes (`primitives.vector_codebook`), a slice of the weight at a time.

    y[m, n] = sum_k (x R)[m, k] * entry[byte[n, k / 4]][k % 4] * scale[n, g] + bias[n]

R rotates the input, block by block, as the weight is rotated, so that the two cancel; the identity if it is not.
"""

import math
from typing import Any

from torch import Tensor

from ...primitives.vector_codebook import VECTOR, rotate_vectors, unpack_vectors
from ..custom_ops import opaque
from ..ops.weight_only_mm import multiply_slices, slice_length
from ..registry import Problem, from_rows, needs_matrix, needs_rows, register, to_rows

LAYOUT = "vector_codebook"


@opaque(lambda x, codes, scale, rotation: x.new_empty(x.shape[0], codes.shape[0]))
def vector_codebook_mm(x: Tensor, codes: Tensor, scale: Tensor, rotation: int) -> Tensor:
    """The equation above without bias, (M, N) in the dtype of x (M, K), in which the product runs.

    Args:
        codes: (N, K / 4) uint8.
        scale: (N, G), of K / G columns each.
        rotation: columns of a block that is rotated, 0 for none.
    """
    (n, quarter), groups = codes.shape, scale.shape[1]
    x = rotated_input(x, rotation)

    def dequantize(start: int, stop: int) -> Tensor:
        values = unpack_vectors(codes[start:stop]).float().unflatten(1, (groups, -1))
        return (values * scale[start:stop].float().unsqueeze(2)).flatten(1).to(x.dtype)

    return multiply_slices(x, n, slice_length(x, quarter * VECTOR), dequantize)


def rotated_input(x: Tensor, size: int) -> Tensor:
    """x (M, K) with each block of this size rotated, in the dtype of x; x itself for 0."""
    return rotate_vectors(x, size).to(x.dtype) if size else x


def rotation_of(weight: Any) -> int:
    """Columns of a block of a quantized weight that is rotated, 0 for none."""
    scheme = weight.scheme
    return math.gcd(scheme.weight.rotation, scheme.shape[-1]) if scheme.weight.rotation else 0


def supports(problem: Problem) -> str | None:
    """Why kernels of this layout do not take the problem, or None."""
    return needs_matrix(problem) or needs_rows(problem)


@register(
    "linear", layout=LAYOUT, activation=(), priority=10, supports=supports, rotated=True, name="vector_codebook_mm"
)
def vector_codebook_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with any weight in this layout."""
    return from_rows(vector_codebook_mm(to_rows(x), weight.qdata, weight.scale, rotation_of(weight)), x, bias)
