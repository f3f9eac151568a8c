"""Convolutions through the engine, each as a contraction over (input channel, kernel position).

    y[b, n, p] = sum_{c, t} x[b, c, stride p + dilation t - padding] w[n, c, t]

The windows of x are gathered into rows (im2col), one for each output position p, so that a scale per row is one for
each window; the weight is a matrix (N, C * T), so that a scale per row is one for each output channel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .gemm import contraction
from .spec import TrainingSpec

Size = int | Sequence[int]


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
    if weight.dim() != ndim + 2 or x.dim() not in (ndim + 1, ndim + 2):
        raise ValueError(
            f"quantized_conv{ndim}d takes an input of {ndim + 1} or {ndim + 2} axes and a weight of {ndim + 2}, got "
            f"shapes {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dim() == ndim + 1:
        return _conv(ndim, x.unsqueeze(0), weight, spec, bias, stride, padding, dilation, groups).squeeze(0)
    n, channels, *kernel = weight.shape
    if x.shape[1] != channels * groups or n % groups:
        raise ValueError(
            f"quantized_conv{ndim}d: {x.shape[1]} input channels do not fit a weight of shape {tuple(weight.shape)} in "
            f"{groups} groups"
        )
    steps, spread = _per_axis(stride, ndim), _per_axis(dilation, ndim)
    x = functional.pad(x, _padding(padding, kernel, spread, steps, ndim))
    windows = _windows(x, kernel, steps, spread)
    positions = windows.shape[1 : 1 + ndim]
    parts = []
    for of_input, of_output in zip(
        windows.chunk(groups, 1 + ndim), weight.reshape(n, -1).chunk(groups, 0), strict=True
    ):
        parts.append(contraction(of_input.reshape(-1, channels * math.prod(kernel)), of_output, spec))
    y = torch.cat(parts, 1) if groups > 1 else parts[0]
    if bias is not None:
        y = y + bias
    return y.reshape(x.shape[0], *positions, n).movedim(-1, 1)


def _windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """(B, *positions, C, *kernel): the window of each output position, a view where the dilation is 1."""
    ndim = len(kernel)
    sizes = [(x.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(ndim)]
    if min(sizes) < 1:
        raise ValueError(f"the kernel {tuple(kernel)}, dilated by {tuple(dilation)}, exceeds the padded input")
    if all(d == 1 for d in dilation):
        for i in range(ndim):
            x = x.unfold(2 + i, kernel[i], stride[i])
        return x.movedim(1, 1 + ndim)
    parts = []
    for offset in itertools.product(*map(range, kernel)):
        of_axis = [
            slice(t * dilation[i], t * dilation[i] + stride[i] * (sizes[i] - 1) + 1, stride[i])
            for i, t in enumerate(offset)
        ]
        whole = [slice(None)] * 2
        parts.append(x[tuple(whole + of_axis)])
    return torch.stack(parts, -1).movedim(1, 1 + ndim).unflatten(-1, list(kernel))


def _per_axis(value: Size, ndim: int) -> list[int]:
    if isinstance(value, int):
        return [value] * ndim
    values = list(value)
    if len(values) not in (1, ndim):
        raise ValueError(f"stride, padding and dilation take 1 or {ndim} sizes, got {values}")
    return values * ndim if len(values) == 1 else values


def _padding(
    padding: Size | str, kernel: Sequence[int], dilation: Sequence[int], stride: Sequence[int], ndim: int
) -> list[int]:
    """Of `F.pad`: (before, after) of the last axis first."""
    if padding == "same":
        if any(step != 1 for step in stride):
            raise ValueError("padding='same' takes a stride of 1")
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pairs = [(t // 2, t - t // 2) for t in total]
    elif padding == "valid":
        pairs = [(0, 0)] * ndim
    elif isinstance(padding, str):
        raise ValueError(f"padding is 'same', 'valid' or sizes, got {padding!r}")
    else:
        pairs = [(p, p) for p in _per_axis(padding, ndim)]
    return [size for pair in reversed(pairs) for size in pair]
