"""Linear with a weight of vectors in bytes on CUDA, by Triton (triton/vector_codebook_mm.py)."""

from typing import Any

from torch import Tensor

from .. import features
from ..custom_ops import opaque
from ..linear.vector_codebook import LAYOUT, rotated_input, rotation_of
from ..linear.vector_codebook import supports as has_rows
from ..registry import Problem, from_rows, needs_floats, register, to_rows


@opaque(lambda x, codes, scale, rotation, bias: x.new_empty(x.shape[0], codes.shape[0]))
def cuda_vector_codebook_mm(x: Tensor, codes: Tensor, scale: Tensor, rotation: int, bias: Tensor | None) -> Tensor:
    """`vector_codebook_mm` of linear/vector_codebook.py, plus bias (N), in the dtype of x, or None."""
    from .triton.vector_codebook_mm import vector_codebook_mm

    return vector_codebook_mm(rotated_input(x, rotation), codes, scale, bias)


def _supports(problem: Problem) -> str | None:
    return features.cuda_lacks("triton") or has_rows(problem) or needs_floats(problem)


@register(
    "linear",
    layout=LAYOUT,
    activation=(),
    device="cuda",
    priority=30,
    supports=_supports,
    rotated=True,
    name="cuda_vector_codebook_mm",
)
def _linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    fused = bias if bias is not None and bias.dtype == x.dtype else None
    y = cuda_vector_codebook_mm(to_rows(x), weight.qdata, weight.scale, rotation_of(weight), fused)
    return from_rows(y, x, None if fused is not None else bias)
