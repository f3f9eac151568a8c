"""Convolutions through the engine, each as a contraction over (kernel position, input channel).

The windows of the input are gathered into rows, one for each output position, so that a scale per row is one for each
window; the weight is a matrix (N, T * C), so that a scale per row is one for each output channel. See `kernels.im2col`.
"""

from __future__ import annotations

from torch import Tensor

from ...kernels.im2col import Size, multiply_windows, prepare_conv, to_matrix
from .contraction import contraction
from .spec import TrainingSpec


def quantized_conv1d(
    input: Tensor,
    weight: Tensor,
    spec: TrainingSpec,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv1d`: input (B, C, L) or (C, L), weight (N, C / groups, T)."""
    return _conv(1, input, weight, spec, bias, stride, padding, dilation, groups)


def quantized_conv2d(
    input: Tensor,
    weight: Tensor,
    spec: TrainingSpec,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d`: input (B, C, H, W) or (C, H, W), weight (N, C / groups, T, T)."""
    return _conv(2, input, weight, spec, bias, stride, padding, dilation, groups)


def quantized_conv3d(
    input: Tensor,
    weight: Tensor,
    spec: TrainingSpec,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv3d`: input (B, C, D, H, W) or (C, D, H, W), weight (N, C / groups, T, T, T)."""
    return _conv(3, input, weight, spec, bias, stride, padding, dilation, groups)


def _conv(
    ndim: int,
    x: Tensor,
    weight: Tensor,
    spec: TrainingSpec,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
) -> Tensor:
    if x.dim() == ndim + 1:
        return _conv(ndim, x.unsqueeze(0), weight, spec, bias, stride, padding, dilation, groups).squeeze(0)
    name = f"quantized_conv{ndim}d"
    x, window = prepare_conv(ndim, x, weight.shape, stride, padding, dilation, groups, name)
    matrices = to_matrix(weight).chunk(groups, 0)
    y = multiply_windows(x, window, lambda rows, group: contraction(rows, matrices[group], spec))
    return y if bias is None else y + bias.reshape(-1, *(1,) * ndim)
