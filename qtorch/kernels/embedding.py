"""Embedding: gather the rows asked for, then dequantize only those.

y[i] = dequantize(w)[ids[i]]
"""

from __future__ import annotations

from torch import Tensor

from ..primitives.affine import dequantize_affine
from ..primitives.granularity import block_of
from .registry import Problem, QuantizedWeight, register


def _supports(problem: Problem) -> str | None:
    shape = problem.scheme.shape
    return None if len(shape) == 2 else f"takes a 2-d weight, this one has shape {shape}"


@register("embedding", layout="plain", priority=10, supports=_supports)
def gather_rows(ids: Tensor, weight: QuantizedWeight) -> Tensor:
    """Rows `ids` (any shape, int) of a (V, D) weight: (*ids.shape, D) in the weight's logical dtype."""
    codes, scale, zero_point = weight.plain()
    scheme = weight.scheme
    rows, columns = block_of(codes.shape, scale.shape)
    flat = ids.reshape(-1)
    block_ids = flat // rows
    y = dequantize_affine(
        codes.index_select(0, flat),
        (1, columns),
        scale.index_select(0, block_ids),
        None if zero_point is None else zero_point.index_select(0, block_ids),
        scheme.weight.dtype,
        *scheme.weight.code_range,
        scheme.weight.zero_point_domain,
        scheme.dtype,
    )
    return y.reshape(*ids.shape, codes.shape[1])
