"""Fake quantization: quantize and dequantize in one function, with the straight-through gradient.

y      = dequantize(quantize(x))
dL/dx  = dL/dy where x did not clip, 0 elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..tracing.function_transforms import apply
from ..tracing.outside_graphs import starts_no_graph
from .affine import ZeroPointDomain, check_floating_point, fake_quantize_blocks
from .qdtype import QDType
from .rounding import Noise, Rounding


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, result: Tensor, unclipped: Tensor | None) -> Tensor:
        ctx.save_for_backward(unclipped)
        ctx.dtype = input.dtype
        return result.view_as(result)

    @staticmethod
    @starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (unclipped,) = ctx.saved_tensors
        grad = grad_outputs[0].to(ctx.dtype)
        return grad if unclipped is None else grad * unclipped, None, None


def straight_through(input: Tensor, result: Tensor, unclipped: Tensor | None = None) -> Tensor:
    """Return `result`, an approximation of `input` of the same shape, whose gradient is passed to `input`: everywhere,
    or where the mask `unclipped` is true."""
    return apply(_StraightThrough, input, result, unclipped)


def fake_quantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    quant_dtype: torch.dtype | QDType,
    quant_min: float | None = None,
    quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    *,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    generator: torch.Generator | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """`dequantize_affine(quantize_affine(input))` in the dtype of `input`, with the straight-through gradient.

    Arguments and errors as in `quantize_affine`.
    """
    return fake_quantize_affine_cachemask(
        input,
        block_size,
        scale,
        zero_point,
        quant_dtype,
        quant_min,
        quant_max,
        zero_point_domain,
        rounding=rounding,
        generator=generator,
        noise=noise,
    )[0]


def fake_quantize_affine_cachemask(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    quant_dtype: torch.dtype | QDType,
    quant_min: float | None = None,
    quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    *,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    generator: torch.Generator | None = None,
    noise: Noise | None = None,
) -> tuple[Tensor, Tensor]:
    """`fake_quantize_affine`, and the boolean mask of the elements that did not clip, which receive gradients."""
    check_floating_point("fake_quantize_affine", input)
    with torch.no_grad():
        result, unclipped = fake_quantize_blocks(
            input,
            block_size,
            scale,
            zero_point,
            quant_dtype,
            quant_min,
            quant_max,
            zero_point_domain,
            rounding,
            generator,
            noise=noise,
        )
    return straight_through(input, result, unclipped), unclipped
