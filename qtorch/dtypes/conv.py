"""Convolutions with a quantized weight.

They are the operation ``conv`` of the kernel registry. Where no kernel takes the whole convolution, the windows of the
input are gathered into rows, the input of a linear layer with the matrix of the weight, or of each group. Kernels are
chosen as for linear layers, and each group is a product of its own: with many small groups, weight-only is faster.

A scale per token is one for each window; one along axis 0, ``PerAxis(0)``, is one for each image.

Gradients flow to the input and the bias, straight through the quantization of the input; the weight is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import conv as by_windows
from ..kernels.conv import CONVOLUTIONS, Size, Window, multiply_windows, prepare_conv, windows, with_bias
from ..kernels.registry import Problem, choose
from ..primitives import Scheme, jsonable, tracing
from ..primitives.layouts import layout_for
from . import dispatch, linear, matrix_weight, views
from .base import QuantizedTensor

# Codes, scales and layout of a `ConvWeight` (N, C / groups, *kernel) are those of the matrix (N, T * C / groups), T
# being the product of the kernel's sizes: a scale per output channel, or groups along (kernel position, channel).
# `kernels.conv` defines the order of the elements.

aten = torch.ops.aten


@jsonable
@dataclass(frozen=True, eq=False)
class ConvScheme(matrix_weight.MatrixScheme):
    """Scheme of a convolution's weight (N, C / groups, *kernel), whose codes are those of a matrix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shape) not in (3, 4, 5):
            raise ValueError(f"the weight of a convolution has 3 to 5 dimensions, got shape {self.shape}")

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return self.shape[0], math.prod(self.shape[1:])


class ConvWeight(matrix_weight.MatrixWeight):
    """The quantized weight of a convolution, held as a matrix. Make one with `of` or `from_float`.

    It can be copied, moved and saved like any quantized tensor, and sliced along its first axis, the output channels.
    That of a depthwise one, (N, 1, k), can be squeezed to (N, k), its matrix. Other views raise an error; take them of
    `matrix`.
    """

    scheme_type = ConvScheme
    scheme: ConvScheme
    to_matrix = staticmethod(by_windows.to_matrix)
    from_matrix = staticmethod(by_windows.from_matrix)

    def cut(self, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> ConvWeight:
        if axis % len(self.scheme.shape):
            raise _unlike_matrix(aten.slice.Tensor)
        return self._of_rows(self.new_matrix().cut(0, start, stop, step))

    def taken(self, axis: int, index: Tensor) -> ConvWeight:
        if axis % len(self.scheme.shape):
            raise _unlike_matrix(aten.index_select.default)
        return self._of_rows(self.new_matrix().taken(0, index))

    def _of_rows(self, matrix: QuantizedTensor) -> ConvWeight:
        part: ConvWeight = views.part_of(self, ConvWeight.of(matrix, (matrix.scheme.shape[0], *self.scheme.shape[1:])))
        return part

    def permuted(self, axes: Sequence[int]) -> QuantizedTensor:
        raise _unlike_matrix(aten.permute.default)

    def reshaped(self, size: Sequence[int]) -> QuantizedTensor:
        shape = self.scheme.shape
        if tuple(size) == shape:
            return self.map_inner(lambda inner: inner)
        if len(shape) == 3 and tuple(size) == (shape[0], shape[2]) and shape[1] == 1:
            return self.new_matrix()
        raise _unlike_matrix(aten.view.default)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in dispatch.ATEN and func not in matrix_weight.AS_A_WHOLE and func not in _VIEWS_OF_ROWS:
            raise _unlike_matrix(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


_VIEWS_OF_ROWS = {
    *(aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.index_select.default),
    *(aten.squeeze.dim, aten.view.default),
}


def _unlike_matrix(func: Any) -> NotImplementedError:
    return NotImplementedError(
        f"{func} is not implemented for the weight of a convolution, which can be sliced along its first axis only; "
        "call .dequantize() first if you want a float tensor"
    )


def as_conv_weight(weight: Any) -> Any:
    """A frozen quantized tensor (N, 1, *kernel) as the weight of a depthwise convolution: models view such weights, or
    parameters (N, k), as they need them. Anything else is returned as it is."""
    if not isinstance(weight, QuantizedTensor) or weight.trains or isinstance(weight, ConvWeight):
        return weight
    shape = weight.scheme.shape
    if len(shape) < 3 or shape[1] != 1:
        return weight
    matrix: Any = weight.reshape(shape[0], math.prod(shape[2:]))
    return ConvWeight.of(matrix, shape)


CONVS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose weight is that of a convolution."""

WINDOWS_NOTE = "on windows of the input, gathered first: on CPU slower than fp32 where images are large, channels few"
"""What to know of a product that is a convolution."""


def convolution(
    ndim: int, name: str, run: Callable[[Tensor, Any, Tensor | None, Window], Tensor],
    checked_shape: Callable[[str, Tensor, Any], Sequence[int]] = lambda name, input, weight: weight.shape,
) -> Callable[..., Tensor]:  # fmt: skip
    """`F.conv1d` to `F.conv3d`, of images with `ndim` axes: with or without a batch axis, sizes in all spellings.

    Args:
        name: of the function in errors.
        run: ``run(input, weight, bias, window)`` of a batch of images.
        checked_shape: ``checked_shape(name, input, weight)`` checks the two and returns the shape of the weight.
    """

    def conv(
        input: Tensor, weight: Any, bias: Tensor | None = None, stride: Size = 1, padding: Size | str = 0,
        dilation: Size = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        if not tracing.is_compiling() and (fast_conv := linear.fast_of("fast_conv", input, weight)) is not None:
            differentiates = torch.is_grad_enabled() and (input.requires_grad or linear.requires_grad(bias))
            if not differentiates and input.dim() == ndim + 2:
                y = fast_conv(input, weight, bias, stride, padding, dilation, groups)
                if y is not None:
                    return y
        weight = as_conv_weight(weight)
        shape = checked_shape(name, input, weight)
        if input.dim() == ndim + 1:
            return conv(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
        input, window = prepare_conv(ndim, input, shape, stride, padding, dilation, groups, name)
        return run(input, weight, bias, window)

    conv.__name__ = conv.__qualname__ = name
    return conv


def conv_problem(scheme: Scheme, groups: int, dtype: torch.dtype, device: str) -> Problem:
    """The problem to look up for a weight (N, C / groups, *kernel), for inference or in training: a whole convolution
    where a kernel takes it, else the product with the windows of one group."""
    spec = replace(scheme.spec, layout=scheme.layout)
    shown = ConvScheme(spec, scheme.shape, scheme.dtype)
    whole = Problem("conv", shown, dtype, device)
    if choose(whole).function is not windows:
        return whole
    matrix = shown.matrix
    if groups > 1:
        matrix = replace(matrix, shape=(matrix.shape[0] // groups, matrix.shape[1]))
        matrix = replace(matrix, spec=replace(spec, layout=layout_for(matrix)))
    return Problem("linear", matrix, dtype, device)


def _checked_shape(name: str, input: Tensor, weight: Any) -> Sequence[int]:
    tracing.refuse_jit_trace()
    takes = isinstance(weight, ConvWeight) or (isinstance(weight, QuantizedTensor) and weight.trains)
    if not takes or isinstance(input, QuantizedTensor):
        raise TypeError(f"{name} takes floats and a ConvWeight, or one in training, got {linear.kinds(input, weight)}")
    shape: tuple[int, ...] = weight.scheme.shape
    linear.check_dtype(name, input, weight.scheme.dtype)
    linear.check_device(name, input, weight)
    if not tracing.is_compiling():
        weight.check_inner_tensors()
    return shape


def _differentiable(x: Tensor, weight: Any, bias: Tensor | None, window: Window) -> Tensor:
    if tracing.transforms_active():
        whole = (_differentiable, x, weight, None, window)
        return with_bias(tracing.run_whole(*whole) if weight.trains else _Transformed.apply(x, weight, window), bias)
    if weight.trains:
        return with_bias(weight.conv(x, window), bias)
    if torch.is_grad_enabled() and (x.requires_grad or linear.requires_grad(bias)):
        return _Conv.apply(x, weight, bias, window)
    return _run(x, weight, bias, window)


for _ndim, _function in CONVOLUTIONS.items():
    _run_cast = partial(dispatch.cast_for_product, _differentiable)
    dispatch.implements_function(_function)(convolution(_ndim, f"conv{_ndim}d", _run_cast, _checked_shape))


def _run(x: Tensor, weight: ConvWeight, bias: Tensor | None, window: Window) -> Tensor:
    kernel = linear.find_kernel("conv", weight.scheme, x.dtype, x.device.type)
    if kernel.function is not windows:
        return kernel(x, weight, bias, window)
    of_groups: Any = [weight] if window.groups == 1 else weight.chunk(window.groups)
    matrices = [part.matrix for part in of_groups]
    with torch.no_grad():
        y = multiply_windows(x, window, lambda rows, group: linear.multiply(rows, matrices[group]))
    return with_bias(y, bias)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ConvWeight, bias: Tensor | None, window: Window) -> Tensor:
        linear.save_weight(ctx, weight)
        ctx.size, ctx.window = x.shape, window
        return _run(x, weight, bias, window)

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        grad_input = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = _grad_input(grad, linear.saved_weight(ctx), ctx.size, ctx.window)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum([0, *range(2, grad.dim())])
        return grad_input, None, grad_bias, None


def _grad_input(grad: Tensor, weight: ConvWeight, size: Sequence[int], window: Window) -> Tensor:
    _, stride, padding, dilation, groups = window
    like = grad.new_empty(1).expand(size)  # only its shape is read
    values, zero = weight.dequantize(grad.dtype), [0] * len(stride)
    return aten.convolution_backward.default(
        grad, like, values, None, stride, padding, dilation, False, zero, groups, [True, False, False]
    )[0]


class _Transformed(torch.autograd.Function):
    """The convolution without bias with a frozen weight under the transforms of torch.func."""

    @staticmethod
    def forward(x: Tensor, weight: ConvWeight, window: Window) -> Tensor:
        return _run(x, weight, None, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.weight, ctx.size, ctx.window = tracing.unwrapped_subclass(inputs[1]), inputs[0].shape, inputs[2]

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[1]:
            raise linear.frozen_error(ctx.weight)
        return _grad_input(grad_outputs[0], ctx.weight, ctx.size, ctx.window), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: ConvWeight, window: Window) -> tuple[Tensor, int]:
        if not linear.rows_are_independent(weight.scheme):
            return tracing.one_by_one(info, in_dims, _Transformed.apply, (x, weight, window))
        x = x.movedim(in_dims[0], 0)
        return _Transformed.apply(x.flatten(0, 1), weight, window).unflatten(0, x.shape[:2]), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return CONVOLUTIONS[len(ctx.window.kernel)](
            tangents[0], ctx.weight.dequantize(tangents[0].dtype), None, *ctx.window[1:]
        )
