"""Layers with the value of the converted layer, and the gradient of fake quantization.

    y          = product of the codes of x and w, scaled        where the recipe sums integers
               = x_hat @ w_hat.T                                where it does not
    dL/dx_hat  = g @ w_hat
    dL/dw_hat  = g.T @ x_hat

x_hat and w_hat are the reals that the codes stand for. Sums of integers are exact and the fp32 arithmetic around them
has a fixed order, so that y has the same bits as with the converted weight, in any layout and by any kernel. The
gradients of x, w and learned scales follow by the differentiable fake quantization that made x_hat and w_hat. So for
convolutions, with conv(x_hat, w_hat) in place of the product.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels import conv, registry
from ...primitives import LinearSpec, QuantSpec, tracing
from ..engine.gemm_spec import GemmSpec
from ..engine.operand import STATELESS, ContractionState, Operand, Total, multiply

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of x_hat, w_hat and bias."""
_PLAIN = GemmSpec()  # made here: Dynamo of torch 2.11 traces no `__post_init__` of a frozen class


def sums_integers(spec: LinearSpec) -> bool:
    """Whether a layer of this spec adds up products of codes in int32; in floating point otherwise."""
    return all(
        isinstance(each, QuantSpec) and not each.zero_point_domain.is_real and each.dtype.is_small_integer
        for each in (spec.weight, spec.activation)
    )


def converted_linear(
    x_hat: Tensor, w_hat: Tensor, bias: Tensor | None, x: Operand | None = None, w: Operand | None = None,
    split: ContractionState = STATELESS,
) -> Tensor:  # fmt: skip
    """x (..., K) times w (N, K), plus bias (N): (..., N) in the dtype of x_hat; see the top of the file.

    Differentiable in x_hat, w_hat and bias. Where `x` and `w` are given and no gradient is asked for, only the shapes
    of x_hat and w_hat and the dtype of x_hat are read: they may be the input and the weight before quantization.

    Args:
        x_hat: (..., K), the input fake-quantized; the input itself where the recipe leaves it in floating point.
        w_hat: (N, K), the weight fake-quantized.
        x: where the recipe sums integers (`sums_integers`), codes (M, K) of the input's M rows, with their spec, scale
            (M, 1) or (1, 1) and zero point.
        w: there, codes of the weight, in the same way; a scale per row, group, block or tensor.
        split: how the weight is cut over processes, if it is; without a bias.
    """
    return _converted(_LinearLayer(split), x_hat, w_hat, bias, x, w)


def converted_conv(
    x_hat: Tensor, w_hat: Tensor, bias: Tensor | None, window: conv.Window, x: Operand | None = None,
    w: Operand | None = None,
) -> Tensor:  # fmt: skip
    """x (B, C, *sizes) and w (N, C / groups, *kernel), plus bias (N): (B, N, *positions) in the dtype of x_hat, for an
    input that is quantized before its windows are gathered: with one scale for all of it, or for each image.

    Args:
        x_hat, w_hat: as of `converted_linear`.
        x: where the recipe sums integers, codes of the input in its shape, with scale and zero point (1, 1), or (B, 1).
        w: there, codes of the weight's matrix (N, T * C / groups).
    """
    if x is None or w is None:
        return conv.CONVOLUTIONS[len(window.kernel)](x_hat, w_hat, bias, *window[1:])
    return _converted(_ConvLayer(window), x_hat, w_hat, bias, x, w)


def check_width(input: Tensor, weight: Tensor) -> None:
    """Raise `ValueError` where the rows of `input` are not as long as those of `weight`."""
    if not input.dim() or input.shape[-1] != weight.shape[-1]:
        shapes = tuple(input.shape), tuple(weight.shape)
        raise ValueError(f"linear: an input of shape {shapes[0]} does not fit a weight of shape {shapes[1]}")


def _converted(
    layer: Any, x_hat: Tensor, w_hat: Tensor, bias: Tensor | None, x: Operand | None, w: Operand | None
) -> Tensor:
    if x is None or w is None:
        return tracing.apply(_Converted, layer, x_hat, w_hat, bias)
    if x.values.dtype == torch.uint8:
        # Products of integers take signed codes: shifted together with their zero point.
        assert x.scale is not None
        zero_point = torch.zeros_like(x.scale) if x.zero_point is None else x.zero_point
        x = x._replace(values=(x.values ^ 128).view(torch.int8), zero_point=zero_point.to(torch.int32) - 128)
    # A tuple within the arguments would hide its tensors from autograd.
    return tracing.apply(_Converted, layer, x_hat, w_hat, bias, *x, *w)


class _Converted(torch.autograd.Function):
    """The `value` of a layer, and its `gradients`, those that are needed; of the bias these get the shape."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x_hat: Tensor, w_hat: Tensor, bias: Tensor | None, *operands: Any) -> Tensor:
        ctx.save_for_backward(x_hat, w_hat)
        ctx.layer, ctx.bias, ctx.constants = layer, None if bias is None else bias.shape, len(operands)
        size = len(Operand._fields)
        x, w = (Operand(*operands[:size]), Operand(*operands[size:])) if operands else (None, None)
        return layer.value(x_hat, w_hat, bias, x, w)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, w_hat = ctx.saved_tensors
        grads = ctx.layer.gradients(grad_outputs[0], x_hat, w_hat, ctx.bias, list(ctx.needs_input_grad[1:4]))
        return None, *grads, *(None,) * ctx.constants


@dataclass(frozen=True)
class _LinearLayer:
    split: ContractionState

    def value(self, x_hat: Tensor, w_hat: Tensor, bias: Tensor | None, x: Operand | None, w: Operand | None) -> Tensor:
        total = self.split.total_of("output")
        if x is not None and w is not None:
            return registry.from_rows(multiply(x, w, _PLAIN, x_hat.dtype, total), x_hat, bias)
        # Under autocast, the activation has the dtype to compute in, and the weight its own.
        return _whole(torch.nn.functional.linear(x_hat, w_hat.to(x_hat.dtype), bias), total)

    def gradients(self, grad: Tensor, x_hat: Tensor, w_hat: Tensor, bias: Any, needed: list[bool]) -> Gradients:
        of_x = of_w = None
        rows = registry.to_rows(grad)
        if needed[0]:
            of_x = _whole(torch.mm(rows, w_hat.to(grad.dtype)), self.split.total_of("grad_input")).reshape(x_hat.shape)
        if needed[1]:
            of_w = torch.mm(rows.t(), registry.to_rows(x_hat)).to(w_hat.dtype)
        return of_x, of_w, rows.sum(0) if needed[2] else None


def _whole(part: Tensor, total: Total | None) -> Tensor:
    return part if total is None else total.add(part)


@dataclass(frozen=True)
class _ConvLayer:
    window: conv.Window

    def value(self, x_hat: Tensor, w_hat: Tensor, bias: Tensor | None, x: Operand | None, w: Operand | None) -> Tensor:
        assert x is not None
        assert x.scale is not None
        assert w is not None
        groups = self.window.groups
        parts = [rows_of(w, group, groups) for group in range(groups)]

        def run(rows: Tensor, group: int, scale: Tensor, zero_point: Tensor | None) -> Tensor:
            of_rows = x._replace(values=rows, kept=rows.shape[0], scale=scale, zero_point=zero_point)
            return multiply(of_rows, parts[group], _PLAIN, x_hat.dtype)

        return conv.with_bias(conv.by_images(x.values, x.scale, x.zero_point, self.window, run), bias)

    def gradients(self, grad: Tensor, x_hat: Tensor, w_hat: Tensor, bias: Any, needed: list[bool]) -> Gradients:
        _, stride, padding, dilation, groups = self.window
        grads: Gradients = torch.ops.aten.convolution_backward.default(
            grad, x_hat, w_hat, bias, stride, padding, dilation, False, [0] * len(stride), groups, needed
        )
        return grads


def rows_of(w: Operand, group: int, groups: int) -> Operand:
    """The codes of one group's output channels."""
    if groups == 1:
        return w
    values = w.values.chunk(groups)[group]
    scale, zero_point = (t if t is None or t.shape[0] == 1 else t.chunk(groups)[group] for t in (w.scale, w.zero_point))
    return w._replace(values=values, kept=values.shape[0], scale=scale, zero_point=zero_point)
