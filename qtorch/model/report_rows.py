"""The rows of a `QuantizeReport`, made from targets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import MatrixWeight, QuantizedTensor, TransposedWeight
from ..kernels.registry import choose
from ..primitives import compute_error
from ..primitives.slices import needs_slices, slice_elements
from ..primitives.sqnr import combined_norms, norms, sqnr
from ..recipes.base import Recipe
from .explain import problem_of
from .install import PreparedModule
from .report import QUANTIZED_BEFORE, LayerReport
from .targets import Target

# --------------------------------------------------------------------------------------------------
# The SQNR of a quantized weight against the float one, without a dequantized copy of the whole.


def quantization_error(weight: Tensor, quantized: Any) -> float:
    """`compute_error` of ``quantized.dequantize()``, which is computed a slice of rows at a time if it is large.

    Args:
        weight: the float weight.
        quantized: a quantized tensor of the same shape, or anything that has `dequantize`.
    """
    if weight.is_meta:
        return math.inf  # of weights in training that hold the float weight itself; the others need values
    if isinstance(quantized, TransposedWeight) and not quantized.scheme.padding:
        weight, quantized = weight.mT, quantized.matrix
    plain = isinstance(quantized, QuantizedTensor) and not quantized.trains and not isinstance(quantized, MatrixWeight)
    if not plain or not needs_slices(weight):
        return float(compute_error(weight, quantized.dequantize()))
    spec, dtype = quantized.scheme.weight, quantized.scheme.dtype
    codes, scale, other = quantized.plain()
    block = spec.block_size(weight.shape)[0]
    step = max(block, slice_elements() * weight.shape[0] // weight.numel() // block * block)
    # A look-up table that all blocks share is no tensor of rows.
    shared = other is not None and other.dim() < codes.dim()

    def rows(tensor: Tensor | None, start: int) -> Tensor | None:
        if tensor is None or tensor.shape[0] == 1:
            return tensor
        return tensor[start // block : (start + step) // block]

    found = []
    for start in range(0, weight.shape[0], step):
        of_slice = other if shared else rows(other, start)
        part = spec.dequantize(codes[start : start + step], rows(scale, start), of_slice, dtype)
        found.append(norms(weight[start : start + step], part))
    return float(sqnr(combined_norms(torch.stack(found))))


def quantized_row(target: Target[Recipe], weight: Tensor, quantized: Any) -> LayerReport:
    """The report on `weight`, of which `quantized` was made."""
    slot = target.asked
    kernel = None
    if isinstance(quantized, QuantizedTensor) and quantized.scheme.spec is not None:
        kernel = choose(problem_of(quantized, slot.module, weight.dtype, weight.device.type)).name
    return LayerReport(
        slot.name,
        tuple(weight.shape),
        "quantized",
        f"{target.recipe}",
        weight.nbytes,
        quantized.nbytes,
        quantization_error(weight, quantized),
        kernel,
        tuple(other.name for other in target.slots if other is not slot),
    )


def skipped_row(target: Target[Recipe]) -> LayerReport:
    """The report on a weight that is left alone."""
    slot, parameter = target.slots[0], target.parameter
    size = 0 if nn.parameter.is_lazy(parameter) else parameter.nbytes
    shape = () if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)
    also = tuple(other.name for other in target.slots[1:])
    done = isinstance(parameter, QuantizedTensor) or isinstance(slot.module, PreparedModule)
    return LayerReport(slot.name, shape, "skipped", QUANTIZED_BEFORE if done else slot.reason, size, size, also=also)


def why_nothing(targets: list[Target[Recipe]]) -> str:
    """Why none of these weights is quantized."""
    slots = [target.asked for target in targets]
    if not slots:
        return "the model has no weight of two or more dimensions"
    return "; ".join(f"{slot.name}: {slot.reason}" for slot in slots[:4]) + ("; ..." if len(slots) > 4 else "")
