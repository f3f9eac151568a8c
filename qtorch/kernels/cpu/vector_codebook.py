"""Linear with a weight of vectors in bytes, compiled (src/vectors.h); the equation is in linear/codebooks.py."""

from typing import Any

from torch import Tensor

from ...primitives.tracing import is_compiling
from ..custom_ops import opaque
from ..linear.codebooks import LAYOUT, rotation_of, vector_codebook_mm
from ..linear.codebooks import supports as has_rows
from ..registry import Problem, from_rows, needs_floats, split_bias, to_rows
from . import code_values, weight, weight_only


@opaque(lambda x, codes, scale, rotation, bias: x.new_empty(x.shape[0], codes.shape[0]))
def cpu_vector_codebook_mm(x: Tensor, codes: Tensor, scale: Tensor, rotation: int, bias: Tensor | None) -> Tensor:
    """`vector_codebook_mm` plus bias (N), in the dtype of x, or None."""
    about = (len(codes), x.shape[1], "int2", True, code_values.VECTORS, float(rotation))
    in_torch = lambda: vector_codebook_mm(x, codes, scale, rotation)  # noqa: E731
    return weight_only.multiply("cpu_vector_codebook_mm", x, (codes, scale, None), about, bias, in_torch)


def _supports(problem: Problem) -> str | None:
    if reason := has_rows(problem) or needs_floats(problem) or weight.supports(problem):
        return reason
    columns = problem.scheme.shape[1]
    return f"takes rows of a multiple of 8 columns, the weight has {columns}" if columns % 8 else None


@weight.register_compiled(
    "linear", layout=LAYOUT, weight=None, activation=(), supports=_supports, checks_memory=True, rotated=True,
    name="cpu_vector_codebook_mm",
)  # fmt: skip
def _linear(x: Tensor, quantized: Any, bias: Tensor | None) -> Tensor:
    added, bias = split_bias(bias, x, quantized.scheme.shape[0])
    y = cpu_vector_codebook_mm(to_rows(x), quantized.qdata, quantized.scale, rotation_of(quantized), added)
    if not is_compiling():
        weight_only.WeightOnlyLinear.prepare(quantized)
    return from_rows(y, x, bias)
