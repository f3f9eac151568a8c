"""converted_conv: a convolution with the value of the converted layer, and the gradient of fake quantization.

As `converted_linear`, for an input that is quantized before its windows are gathered: with one scale for all of it, or
for each image.

    y          = sums of products of the codes, scaled     where the recipe sums integers
               = conv(x_hat, w_hat)                        where it does not
    gradients  = those of conv(x_hat, w_hat)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...dtypes.conv import with_bias
from ...kernels.conv import CONVOLUTIONS
from ...kernels.im2col import Window
from ...kernels.image_conv import by_images
from ...tracing.function_transforms import apply
from ...tracing.outside_graphs import starts_no_graph
from ..engine.contraction import Operand, multiply
from ..engine.spec import GemmSpec
from .converted_linear import signed

aten = torch.ops.aten


def converted_conv(
    x_hat: Tensor,
    w_hat: Tensor,
    bias: Tensor | None,
    window: Window,
    x: Operand | None = None,
    w: Operand | None = None,
) -> Tensor:
    """x (B, C, *sizes) and w (N, C / groups, *kernel), plus bias (N): (B, N, *positions) in the dtype of x_hat.

    Args:
        x_hat: the input fake-quantized; the input itself where the recipe leaves it in floating point.
        w_hat: the weight fake-quantized.
        x: where the recipe sums integers, codes of the input in its shape, with scale and zero point (1, 1), or (B, 1).
        w: there, codes of the weight's matrix (N, T * C / groups).
    """
    if x is None or w is None:
        return CONVOLUTIONS[len(window.kernel)](x_hat, w_hat, bias, *window[1:])
    # A tuple within the arguments would hide its tensors from autograd.
    return apply(_IntegerConv, x_hat, w_hat, bias, window, *signed(x), *w)


class _IntegerConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_hat: Tensor, w_hat: Tensor, bias: Tensor | None, window: Window, *operands: Any) -> Tensor:
        ctx.save_for_backward(x_hat, w_hat)
        ctx.window, ctx.channels = window, None if bias is None else bias.shape
        size = len(Operand._fields)
        y = _product(Operand(*operands[:size]), Operand(*operands[size:]), window, x_hat.dtype)
        return with_bias(y, bias)

    @staticmethod
    @once_differentiable
    @starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, w_hat = ctx.saved_tensors
        _, stride, padding, dilation, groups = ctx.window
        needs = list(ctx.needs_input_grad[:3])
        zero = [0] * len(stride)
        grads = aten.convolution_backward.default(
            grad_outputs[0], x_hat, w_hat, ctx.channels, stride, padding, dilation, False, zero, groups, needs
        )
        return *grads, *(None,) * (1 + 2 * len(Operand._fields))


def _product(x: Operand, w: Operand, window: Window, dtype: torch.dtype) -> Tensor:
    assert x.scale is not None
    parts = [rows_of(w, group, window.groups) for group in range(window.groups)]

    def run(rows: Tensor, group: int, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        of_rows = x._replace(values=rows, kept=rows.shape[0], scale=scale, zero_point=zero_point)
        return multiply(of_rows, parts[group], GemmSpec(), dtype)

    with torch.no_grad():
        return by_images(x.values, x.scale, x.zero_point, window, run)


def rows_of(w: Operand, group: int, groups: int) -> Operand:
    """The codes of one group's output channels."""
    if groups == 1:
        return w
    values = w.values.chunk(groups)[group]
    scale, zero_point = (t if t is None or t.shape[0] == 1 else t.chunk(groups)[group] for t in (w.scale, w.zero_point))
    return w._replace(values=values, kept=values.shape[0], scale=scale, zero_point=zero_point)
