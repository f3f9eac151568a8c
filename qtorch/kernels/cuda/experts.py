"""Products with the matrices of experts on CUDA, by Triton: one launch for all experts of a product.

    y[t * R + r] = x[t] dequantize(w[experts[t, r]])^T

The index of experts is read on the device, so the call can be captured in a CUDA graph.
"""

from typing import Any

import torch
from torch import Tensor

from .. import features
from ..custom_ops import Name, opaque
from ..linear import scaled
from ..ops.experts import scheme_of_expert
from ..ops.quantize import quantize_input
from ..registry import Problem, needs_clear_width, needs_floats, needs_rows, register
from .weight_only import name_of_numbers, operands, reads_integers, supports_numbers, weight_arguments


@opaque(lambda x, experts, qdata, *_: x.new_empty(experts.numel(), qdata.shape[1]))
def cuda_experts_mm(
    x: Tensor, experts: Tensor, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: Name, middle: float,
    domain: Name, numbers: str = "",
) -> Tensor:  # fmt: skip
    """The equation above, x in floating point: (T * R, N) in the dtype of x.

    Args:
        x: (T, K) fp32, fp16 or bf16.
        experts: (T, R) integers; an index that names no expert gives a row of zeros.
        qdata: (E, N, K) codes of `dtype`, a `QDType` name; or uint8, those codes packed by row.
        scale: (E, N, groups) or (1, 1, 1).  zero_point: like it, or None.
        middle, domain, numbers: see `cuda_weight_mm`.
    """
    from .triton.experts_mm import experts_weight_mm

    tensors = operands(qdata, scale, zero_point, dtype, domain, numbers)
    return experts_weight_mm(x, experts, *tensors, dtype, middle, domain)


@opaque(lambda xq, experts, xs, xz, qdata, *rest: xq.new_empty(experts.numel(), qdata.shape[1], dtype=rest[-1]))
def cuda_experts_int8_mm(
    xq: Tensor, experts: Tensor, xs: Tensor, xz: Tensor | None, qdata: Tensor, ws: Tensor, wz: Tensor | None,
    weight_dtype: Name, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The equation above with both operands in codes; the equation and the bits of `int8_grouped_mm`.

    Args:
        xq, xs, xz: as there, xq (T, K).
        experts, qdata: as in `cuda_experts_mm`.  ws, wz: (E, N, groups).
        weight_dtype: name of a `QDType`.
        dtype: of the result, (T * R, N).
    """
    from .triton.experts_mm import experts_int8_mm

    return experts_int8_mm(xq, experts, xs, xz, qdata, ws, wz, weight_dtype, dtype)


def _lacks(problem: Problem) -> str | None:
    """Why no kernel of this file takes the weight, or None."""
    shape = problem.scheme.shape
    of_experts = None if len(shape) == 3 else f"takes experts (E, N, K), the weight has shape {shape}"
    lacks = features.cuda_lacks("triton") or of_experts
    return lacks or needs_rows(problem) or needs_clear_width(problem) or needs_floats(problem)


def _supports(problem: Problem) -> str | None:
    if reason := _lacks(problem):
        return reason
    weight, shape = problem.scheme.weight, problem.scheme.shape
    block = weight.block_size(shape)
    if block[:2] != (1, 1) and block != shape:
        return f"takes a scale of its own for each output channel, or one for all, got {weight.granularity}"
    return None


def _supports_int8(problem: Problem) -> str | None:
    if reason := _lacks(problem):
        return reason
    scheme, activation = scheme_of_expert(problem.scheme), problem.scheme.activation
    if scheme is None:
        return f"takes a scale of its own for each output channel, the weight has {problem.scheme.weight.granularity}"
    assert activation is not None
    if not scheme.spec.static and activation.granularity.pattern(2)[0] != 1:
        return f"takes activations whose rows are quantized by themselves, the scheme has {activation.granularity}"
    return scaled.supports_int32(problem._replace(op="linear", scheme=scheme))


@register(
    "grouped_linear", layout=("plain", "packed"), spec=None, activation=(), device="cuda", priority=30,
    supports=lambda problem: supports_numbers(problem) or _supports(problem), name="cuda_number_experts_mm",
)  # fmt: skip
@reads_integers("grouped_linear", activation=(), supports=_supports, name="cuda_experts_mm")
def _grouped_linear(x: Tensor, weight: Any, experts: Tensor) -> Tensor:
    return cuda_experts_mm(x, experts, *weight_arguments(weight), name_of_numbers(weight.scheme.weight))


@reads_integers("grouped_linear", activation=("int8",), supports=_supports_int8, name="cuda_experts_int8_mm")
def _grouped_linear_int8(x: Tensor, weight: Any, experts: Tensor) -> Tensor:
    xq, xs, xz = quantize_input(x, weight)
    kind, scale = weight.scheme.weight.dtype.name, weight.dense_scale()
    return cuda_experts_int8_mm(xq, experts, xs, xz, weight.qdata, scale, weight.zero_point, kind, x.dtype)
