"""Convolutions through the engine, each as a contraction over (kernel position, input channel).

The windows of the input are gathered into rows, one for each output position, so that a scale per row is one for each
window; the weight is a matrix (N, T * C), so that a scale per row is one for each output channel. See `kernels.im2col`.

A transposed convolution is the convolution of the input with zeros between its elements and the weight flipped along
its kernel: a contraction of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.nn.functional import pad

from ...dtypes.conv import convolution, with_bias
from ...kernels.conv import Size, Window, both_ends, multiply_windows, to_matrix
from .contraction import contraction
from .gemm_spec import TrainingSpec

GroupProduct = Callable[[Tensor, Tensor, int], Tensor]
"""(windows (M, K), matrix (N, K), index of the group) -> (M, N)"""


def conv_by(product: GroupProduct, ndim: int, *args: Any, **kwargs: Any) -> Tensor:
    """`F.conv1d`, `F.conv2d` or `F.conv3d` of these arguments, its matrices multiplied by `product`."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
        matrices = to_matrix(weight).chunk(window.groups, 0)
        return with_bias(multiply_windows(x, window, lambda rows, g: product(rows, matrices[g], g)), bias)

    return convolution(ndim, f"quantized_conv{ndim}d", run)(*args, **kwargs)


def conv_transpose_by(
    product: GroupProduct,
    ndim: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Tensor:
    """`F.conv_transpose1d`, `2d` or `3d` of these arguments, its matrices multiplied by `product`.

    Raises:
        ValueError: the shapes do not fit.
    """
    if input.dim() == ndim + 1:
        batch = input.unsqueeze(0)
        return conv_transpose_by(
            product, ndim, batch, weight, bias, stride, padding, output_padding, groups, dilation
        ).squeeze(0)
    if input.dim() != ndim + 2 or weight.dim() != ndim + 2 or input.shape[1] != weight.shape[0]:
        raise ValueError(
            f"conv_transpose{ndim}d: an input of shape {tuple(input.shape)} does not fit a weight of shape "
            f"{tuple(weight.shape)}, (C, N / groups, *kernel)"
        )
    steps, ends, extra, spread = (_sizes(each, ndim) for each in (stride, padding, output_padding, dilation))
    kernel = weight.shape[2:]
    for axis, step in enumerate(steps, 2):
        if step > 1:  # zeros between the elements
            input = pad(input.unsqueeze(axis + 1), [0, 0] * (input.dim() - axis - 1) + [0, step - 1])
            input = input.flatten(axis, axis + 1)
            input = input.narrow(axis, 0, input.shape[axis] - (step - 1))
    before = [d * (k - 1) - p for d, k, p in zip(spread, kernel, ends, strict=True)]
    widths = both_ends(before)
    for axis in range(ndim):
        widths[2 * (ndim - 1 - axis) + 1] += extra[axis]
    # (C, N / groups, *kernel) -> (N, C / groups, *kernel)
    flipped = weight.flip(tuple(range(2, ndim + 2))).unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return conv_by(product, ndim, pad(input, widths), flipped, bias, 1, 0, dilation, groups)


def _sizes(value: Size, ndim: int) -> tuple[int, ...]:
    return (value,) * ndim if isinstance(value, int) else tuple(value) * (ndim if len(value) == 1 else 1)


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


class QuantizedTransposedConvolution(Protocol):
    """`F.conv_transpose1d`, `2d` or `3d` with the spec of its three matmuls."""

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        spec: TrainingSpec,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        dilation: Size = 1,
    ) -> Tensor: ...


def _by(spec: TrainingSpec) -> GroupProduct:
    return lambda rows, matrix, group: contraction(rows, matrix, spec)


def _quantized(ndim: int, axes: str) -> QuantizedConvolution:
    def conv(input: Tensor, weight: Tensor, spec: TrainingSpec, *args: Any, **kwargs: Any) -> Tensor:
        return conv_by(_by(spec), ndim, input, weight, *args, **kwargs)

    conv.__name__ = conv.__qualname__ = f"quantized_conv{ndim}d"
    kernel = ", ".join(["T"] * ndim)
    conv.__doc__ = f"`F.conv{ndim}d`: input (B, C, {axes}) or (C, {axes}), weight (N, C / groups, {kernel})."
    return conv


def _quantized_transposed(ndim: int, axes: str) -> QuantizedTransposedConvolution:
    def conv(input: Tensor, weight: Tensor, spec: TrainingSpec, *args: Any, **kwargs: Any) -> Tensor:
        return conv_transpose_by(_by(spec), ndim, input, weight, *args, **kwargs)

    conv.__name__ = conv.__qualname__ = f"quantized_conv_transpose{ndim}d"
    kernel = ", ".join(["T"] * ndim)
    conv.__doc__ = f"`F.conv_transpose{ndim}d`: input (B, C, {axes}) or (C, {axes}), weight (C, N / groups, {kernel})."
    return conv


quantized_conv1d = _quantized(1, "L")
quantized_conv2d = _quantized(2, "H, W")
quantized_conv3d = _quantized(3, "D, H, W")
quantized_conv_transpose1d = _quantized_transposed(1, "L")
quantized_conv_transpose2d = _quantized_transposed(2, "H, W")
quantized_conv_transpose3d = _quantized_transposed(3, "D, H, W")
