"""A quantized weight as the compiled kernels read it: the struct `Weight` of src/weight.h."""

from __future__ import annotations

from torch import Tensor

from ...primitives.qdtype import QDType
from ..registry import Problem, needs_matrix
from .library import TYPES, missing

FORMAT = "14qd"


def fields(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    shape: tuple[int, int],
    kind: QDType,
    packed: bool,
    domain: str = "INT",
    middle: float = 0.0,
) -> tuple[float, ...] | None:
    """Values of the struct; None if the tensors do not lie in memory as the kernels need them.

    Args:
        codes: (N, K) int8 or uint8, or with `packed` the result of `pack_codes` along K.
        scale: (N, G) or (1, 1).  zero_point: like scale, or None.
        shape: (N, K).
        middle: code of a FLOAT zero point, (low + high + 1) / 2.
    """
    n, k = shape
    tensors = [scale] if zero_point is None else [scale, zero_point]
    if (
        codes.stride(1) != 1
        or (n > 1 and codes.stride(0) < codes.shape[1])
        or not all(t.is_contiguous() and t.dtype in TYPES for t in tensors)
    ):
        return None
    half = 2 ** (kind.bits - 1)
    center = half if packed or not kind.is_signed else 0
    zero_code = 0 if kind.is_signed else half
    groups = scale.shape[1]
    return (
        codes.data_ptr(),
        codes.stride(0),
        kind.bits if packed else 0,
        center,
        n,
        k,
        k // groups,
        groups,
        scale.data_ptr(),
        TYPES[scale.dtype],
        groups if scale.shape[0] > 1 else 0,
        0 if zero_point is None else zero_point.data_ptr(),
        0 if zero_point is None else TYPES[zero_point.dtype],
        domain != "FLOAT",
        zero_code - (middle if domain == "FLOAT" else 0.0),
    )


def supports(problem: Problem) -> str | None:
    """What all compiled kernels ask of a weight; why not, or None."""
    if reason := needs_matrix(problem):
        return reason
    scheme = problem.scheme
    if scheme.layout.packed_axis not in (None, -1):
        return "takes codes packed along rows, this weight is transposed"
    shape = scheme.weight.scale_shape(scheme.shape)
    if 0 in scheme.shape or (shape[0] != scheme.shape[0] and shape != (1, 1)):
        return f"takes scales per row, group of a row or tensor, the weight has {scheme.weight.granularity}"
    return missing()
