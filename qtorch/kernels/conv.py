"""Convolution with a quantized weight and a floating-point activation: dequantize the weight, then call torch.

    y = conv(x, dequantize(w)) + bias

A convolution uses each weight once for every output position, so that dequantizing all of it costs little.
With quantized activations, where no kernel takes the whole convolution (`image_conv`, `cpu/conv`), it is a product of
windows (see `im2col`), by the kernels of ``linear``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from .im2col import Window, from_matrix, is_channels_last
from .ops.portable import dequantized_weight, fake_quantized
from .registry import Problem, QuantizedWeight, register

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
"""torch's functions by the number of axes of an image."""


@register(
    "conv",
    spec=None,
    activation=(),
    priority=10,
    note="dequantizes the weight on each call: it saves memory, not time",
    rotated=True,
)
def dequantized_conv(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, window: Window) -> Tensor:
    """(B, N, *positions) in the dtype of x.

    Args:
        x: (B, C, *sizes).
        weight: of shape (N, C / groups, *kernel), stored as a matrix.
    """
    values = from_matrix(weight.scheme.weight.dequantize(*weight.plain(), x.dtype), weight.scheme.shape)
    if not is_channels_last(x):  # else the result would be channels-last, which its readers may not support
        values = values.contiguous()
    _, stride, padding, dilation, groups = window
    return CONVOLUTIONS[len(window.kernel)](x, values, bias, stride, padding, dilation, groups)


def _has_activation(problem: Problem) -> str | None:
    return "takes quantized activations" if problem.scheme.activation is None else None


@register("conv", spec=None, supports=_has_activation, rotated=True)
def windows(x: Tensor, weight: Any, bias: Tensor | None, window: Window) -> Tensor:
    """Stands for the product of the windows with a matrix, by a kernel of ``linear``; `dtypes.conv` looks that up."""
    raise NotImplementedError("windows are multiplied by a kernel of linear")


def _is_whole(problem: Problem) -> str | None:
    scheme = problem.scheme
    whole = scheme.activation is None or scheme.layout.whole_convolutions
    return None if whole else "takes codes of activations only where the layout has whole_convolutions"


@register(
    "conv",
    layout="portable",
    spec=None,
    priority=100,
    supports=_is_whole,
    note="operators of torch alone, for export: it dequantizes the weight on each call",
)
def portable_conv(x: Tensor, weight: Any, bias: Tensor | None, window: Window) -> Tensor:
    """`dequantized_conv` by operators of torch alone; a static activation is quantized and dequantized before it."""
    _, stride, padding, dilation, groups = window
    values = dequantized_weight(weight, x.dtype)
    values = values if values.dim() > 2 else from_matrix(values, weight.scheme.shape).contiguous()
    real = x if weight.scheme.activation is None else fake_quantized(x, weight).to(x.dtype)
    return CONVOLUTIONS[len(window.kernel)](real, values, bias, stride, padding, dilation, groups)
