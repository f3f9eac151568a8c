"""The SQNR of a quantized weight against the float one, without a dequantized copy of the whole."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .dtypes import MatrixWeight, QuantizedTensor, TransposedWeight
from .primitives import compute_error
from .primitives.slices import needs_slices, slice_elements
from .primitives.sqnr import combined_norms, norms, sqnr


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
