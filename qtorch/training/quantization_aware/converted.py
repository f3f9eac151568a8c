"""converted_linear: a linear layer with the value of the converted layer, and the gradient of fake quantization.

    y          = product of the codes of x and w, scaled        where the recipe sums integers
               = x_hat @ w_hat.T                                where it does not
    dL/dx_hat  = g @ w_hat
    dL/dw_hat  = g.T @ x_hat

x_hat and w_hat are the reals that the codes stand for. Sums of integers are exact and the fp32 arithmetic around them
has a fixed order, so that y has the same bits as with the converted weight, in any layout and by any kernel. The
gradients of x, w and learned scales follow by the differentiable fake quantization that made x_hat and w_hat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...dtypes.conv import with_bias
from ...kernels.conv import CONVOLUTIONS, Window, by_images
from ...kernels.registry import from_rows, to_rows
from ...primitives import LinearSpec, QuantSpec
from ...primitives.tracing import apply, starts_no_graph
from ..engine.contraction import multiply
from ..engine.gemm_spec import GemmSpec
from ..engine.operand import Operand
from ..engine.split import Split


def sums_integers(spec: LinearSpec) -> bool:
    """Whether a layer of this spec adds up products of codes in int32; in floating point otherwise."""
    return _is_integer(spec.weight) and _is_integer(spec.activation)


def _is_integer(spec: QuantSpec | Any) -> bool:
    if not isinstance(spec, QuantSpec) or spec.zero_point_domain.is_real:
        return False
    return not spec.dtype.is_floating_point and spec.dtype.bits <= 8


def converted_linear(
    x_hat: Tensor,
    w_hat: Tensor,
    bias: Tensor | None,
    x: Operand | None = None,
    w: Operand | None = None,
    split: Split | None = None,
) -> Tensor:
    """x (..., K) times w (N, K), plus bias (N): (..., N) in the dtype of x_hat; see the top of the file.

    Differentiable in x_hat, w_hat and bias. Where `x` and `w` are given and no gradient is asked for, only the shapes
    of x_hat and w_hat and the dtype of x_hat are read: they may be the input and the weight before quantization.

    Args:
        x_hat: (..., K), the input fake-quantized; the input itself where the recipe leaves it in floating point.
        w_hat: (N, K), the weight fake-quantized.
        x: where the recipe sums integers (`sums_integers`), codes (M, K) of the input's M rows, with their spec, scale
            (M, 1) or (1, 1) and zero point: ``quantize_operand(to_rows(input), spec.activation)`` for a dynamic scale,
            ``Operand(spec.activation.quantize(rows, scale, zero_point), M, scale, zero_point, spec.activation)``
            for a static or learned one.
        w: there, codes of the weight, in the same way; a scale per row, group, block or tensor.
        split: how the weight is cut over processes, if it is; without a bias.

    Raises:
        ValueError: the rows of x_hat and w_hat differ in length; codes of one side only, or not of integers.
    """
    check_width(x_hat, w_hat)
    if x is None and w is None:
        return apply(_FloatProduct, x_hat, w_hat, bias, split)
    if x is None or w is None or not (_is_integer(x.spec) and _is_integer(w.spec)):
        raise ValueError(
            f"converted_linear takes integer codes of both sides or of neither, got {_kind(x)} and {_kind(w)}"
        )
    # A tuple within the arguments would hide its tensors from autograd.
    return apply(_IntegerProduct, x_hat, w_hat, bias, split, *signed(x), *w)


def check_width(input: Tensor, weight: Tensor) -> None:
    """Raise `ValueError` where the rows of `input` are not as long as those of `weight`."""
    if not input.dim() or input.shape[-1] != weight.shape[-1]:
        shapes = tuple(input.shape), tuple(weight.shape)
        raise ValueError(f"linear: an input of shape {shapes[0]} does not fit a weight of shape {shapes[1]}")


def _kind(operand: Operand | None) -> str:
    return "no codes" if operand is None else str(operand.spec)


def signed(x: Operand) -> Operand:
    """Codes that products of integers take: unsigned ones become signed, shifted together with their zero point."""
    if x.values.dtype != torch.uint8:
        return x
    assert x.scale is not None
    zero_point = torch.zeros_like(x.scale) if x.zero_point is None else x.zero_point
    return x._replace(values=(x.values ^ 128).view(torch.int8), zero_point=zero_point.to(torch.int32) - 128)


class _IntegerProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_hat: Tensor, w_hat: Tensor, bias: Tensor | None, split: Split | None, *operands: Any
    ) -> Tensor:
        ctx.save_for_backward(x_hat, w_hat)
        ctx.split = split
        size, total = len(Operand._fields), None if split is None else split.total_of("output")
        y = multiply(Operand(*operands[:size]), Operand(*operands[size:]), GemmSpec(), x_hat.dtype, total)
        return from_rows(y, x_hat, bias)

    @staticmethod
    @once_differentiable
    @starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad_outputs[0]), *(None,) * (1 + 2 * len(Operand._fields))


class _FloatProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_hat: Tensor, w_hat: Tensor, bias: Tensor | None, split: Split | None) -> Tensor:
        ctx.save_for_backward(x_hat, w_hat)
        ctx.split = split
        # Under autocast, the activation has the dtype to compute in, and the weight its own.
        y = functional.linear(x_hat, w_hat.to(x_hat.dtype), bias)
        total = None if split is None else split.total_of("output")
        return y if total is None else total(y)

    @staticmethod
    @once_differentiable
    @starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad_outputs[0]), None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x_hat, w_hat and bias."""
    x_hat, w_hat = ctx.saved_tensors
    of_x = of_w = of_bias = None
    rows = to_rows(grad)
    if ctx.needs_input_grad[0]:
        of_x = torch.mm(rows, w_hat.to(grad.dtype))
        total = None if ctx.split is None else ctx.split.total_of("grad_input")
        of_x = (of_x if total is None else total(of_x)).reshape(x_hat.shape)
    if ctx.needs_input_grad[1]:
        of_w = torch.mm(rows.t(), to_rows(x_hat)).to(w_hat.dtype)
    if ctx.needs_input_grad[2]:
        of_bias = rows.sum(0)
    return of_x, of_w, of_bias


# --------------------------------------------------------------------------------------------------
# converted_conv: a convolution with the value of the converted layer, and the gradient of fake quantization.
#
# As `converted_linear`, for an input that is quantized before its windows are gathered: with one scale for all of it,
# or for each image.
#
#     y          = sums of products of the codes, scaled     where the recipe sums integers
#                = conv(x_hat, w_hat)                        where it does not
#     gradients  = those of conv(x_hat, w_hat)


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
