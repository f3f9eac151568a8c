"""Convolution with a quantized weight and a floating-point activation: dequantize the weight, then call torch.

    y = conv(x, dequantize(w)) + bias

A convolution uses each weight once for every output position, so that dequantizing all of it costs little.
Convolutions with quantized activations are products of windows (see `im2col`), by the kernels of ``linear``.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from .im2col import Window, from_matrix, is_channels_last
from .registry import QuantizedWeight, register

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
"""torch's functions by the number of axes of an image."""


@register(
    "conv",
    spec=None,
    activation=(),
    priority=10,
    note="dequantizes the weight on each call: it saves memory, not time",
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
