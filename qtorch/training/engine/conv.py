"""Convolutions through the engine, each as a contraction over (kernel position, input channel).

The windows of the input are gathered into rows, one for each output position, so that a scale per row is one for each
window; the weight is a matrix (N, T * C), so that a scale per row is one for each output channel. See `kernels.im2col`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...dtypes.conv import convolution, with_bias
from ...kernels.im2col import Size, Window, multiply_windows, to_matrix
from .contraction import contraction
from .spec import TrainingSpec


class QuantizedConvolution(Protocol):
    """`F.conv1d`, `F.conv2d` or `F.conv3d` with the spec of its three matmuls."""

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        spec: TrainingSpec,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
    ) -> Tensor: ...


def _quantized(ndim: int, axes: str) -> QuantizedConvolution:
    name = f"quantized_conv{ndim}d"

    def conv(
        input: Tensor,
        weight: Tensor,
        spec: TrainingSpec,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
    ) -> Tensor:
        def run(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
            matrices = to_matrix(weight).chunk(window.groups, 0)
            y = multiply_windows(x, window, lambda rows, group: contraction(rows, matrices[group], spec))
            return with_bias(y, bias)

        return convolution(ndim, name, run)(input, weight, bias, stride, padding, dilation, groups)

    conv.__name__ = conv.__qualname__ = name
    kernel = ", ".join(["T"] * ndim)
    conv.__doc__ = f"`F.conv{ndim}d`: input (B, C, {axes}) or (C, {axes}), weight (N, C / groups, {kernel})."
    return conv


quantized_conv1d = _quantized(1, "L")
quantized_conv2d = _quantized(2, "H, W")
quantized_conv3d = _quantized(3, "D, H, W")
