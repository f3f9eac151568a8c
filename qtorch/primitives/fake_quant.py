"""Fake quantization: quantize and dequantize in one function, with the straight-through gradient.

y      = dequantize(quantize(x))
dL/dx  = dL/dy where x did not clip, 0 elsewhere
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import granularity, tracing
from .affine import ZeroPointDomain, check_floating_point, code_range, fake_quantize_blocks
from .qdtype import QDType, qdtype
from .rounding import Noise, Rounding


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, result: Tensor, unclipped: Tensor | None) -> Tensor:
        ctx.save_for_backward(unclipped)
        ctx.dtype = input.dtype
        return result.view_as(result)

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (unclipped,) = ctx.saved_tensors
        grad = grad_outputs[0].to(ctx.dtype)
        return grad if unclipped is None else grad * unclipped, None, None


def straight_through(input: Tensor, result: Tensor, unclipped: Tensor | None = None) -> Tensor:
    """`result`, an approximation of `input` of its shape, whose gradient goes to `input` where `unclipped` is true."""
    return tracing.apply(_StraightThrough, input, result, unclipped)


def fake_quantize_affine(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None,
    quant_dtype: torch.dtype | QDType, quant_min: float | None = None, quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, *, rounding: Rounding = Rounding.NEAREST_EVEN,
    generator: torch.Generator | None = None, noise: Noise | None = None,
) -> Tensor:  # fmt: skip
    """`dequantize_affine(quantize_affine(input))` in the dtype of `input`, with the straight-through gradient.

    Arguments and errors as in `quantize_affine`.
    """
    codes = (quant_dtype, quant_min, quant_max, zero_point_domain)
    return fake_quantize_affine_cachemask(
        input, block_size, scale, zero_point, *codes, rounding=rounding, generator=generator, noise=noise
    )[0]


def fake_quantize_affine_cachemask(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None,
    quant_dtype: torch.dtype | QDType, quant_min: float | None = None, quant_max: float | None = None,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, *, rounding: Rounding = Rounding.NEAREST_EVEN,
    generator: torch.Generator | None = None, noise: Noise | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fake_quantize_affine`, and the boolean mask of the elements that did not clip, which receive gradients."""
    check_floating_point("fake_quantize_affine", input)
    codes = (quant_dtype, quant_min, quant_max, zero_point_domain)
    with torch.no_grad():
        result, unclipped = fake_quantize_blocks(
            input, block_size, scale, zero_point, *codes, rounding, generator, noise=noise
        )
    return straight_through(input, result, unclipped), unclipped


# Fake quantization with learned scales and zero points: LSQ (Esser et al., arXiv 1902.08153, eq. 1-3) and LSQ+
# (Bhalgat et al., arXiv 2004.09576, eq. 3-6).
#
#     v = x / s,   q = clamp(round(v) + z, Qn, Qp),   x_hat = (q - z) s
#
#                                 Qn <= round(v) + z <= Qp     elsewhere
#     dx_hat/dx                   1                            0
#     dx_hat/ds                   round(v) - v                 q - z
#     dx_hat/dz                   0                            -s
#
# Rounding is treated as the identity plus a constant (straight-through). The derivatives are those of
# `torch._fake_quantize_learnable_per_tensor_affine` and `_per_channel_affine`. Learned zero points are real numbers; z
# is the nearest code.


class _LearnedStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, scale: Tensor, zero_point: Tensor | None, block: tuple[int, ...], dtype: str,
        low: float, high: float, grad_scale: float, through_rounding: bool,
    ) -> Tensor:  # fmt: skip
        code = None if zero_point is None else zero_point_code(zero_point, low, high)
        # Its gradient is of rounding errors, which `save_in_codes` would lose: that keeps what needs no gradient.
        ctx.save_for_backward(input.detach(), scale, code)
        ctx.block, ctx.bounds, ctx.grad_scale, ctx.through_rounding = block, (low, high), grad_scale, through_rounding
        ctx.has_learned_zero_point = zero_point is not None and zero_point.is_floating_point()
        y, _ = fake_quantize_blocks(input, block, scale, code, qdtype(dtype), low, high, ZeroPointDomain.INT)
        # Graphs of torch 2.11 lose the gradient of a result that is also an earlier tensor, as by `to` its own dtype.
        return y.view_as(y)

    @staticmethod
    @tracing.starts_no_graph
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        input, scale, code = ctx.saved_tensors
        low, high = ctx.bounds
        view = granularity.BlockView(input.shape, ctx.block)
        g = view.split(grad_outputs[0])
        s = view.split_scale(scale).float()
        z = 0 if code is None else view.split_scale(code).float()
        v = view.split(input).float() * (1.0 / s)
        rounded = torch.round(v)
        codes = rounded + z
        inside = (codes >= low) & (codes <= high)

        def sum_in_blocks(values: Tensor) -> Tensor:
            total = values.sum(view.dims, keepdim=True) if view.dims else values
            return (total.reshape(scale.shape) * ctx.grad_scale).to(scale.dtype)

        grad_input = grad_step = grad_zero = None
        if ctx.needs_input_grad[0]:
            grad_input = view.merge(g * inside)
        if ctx.needs_input_grad[1]:
            of_rounding = rounded - v if ctx.through_rounding else torch.zeros_like(v)
            slope = torch.where(inside, of_rounding, codes.clamp(low, high) - z)
            grad_step = sum_in_blocks(g.float() * slope)
        if ctx.needs_input_grad[2] and ctx.has_learned_zero_point:
            grad_zero = sum_in_blocks(torch.where(inside, 0.0, g.float() * -s))
        return grad_input, grad_step, grad_zero, None, None, None, None, None, None


def learned_step_fake_quantize(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None,
    quant_dtype: torch.dtype | QDType, quant_min: float | None = None, quant_max: float | None = None, *,
    grad_scale: float = 1.0, through_rounding: bool = True,
) -> Tensor:  # fmt: skip
    """Fake-quantize `input`, with gradients for `input`, `scale` and `zero_point`: x_hat, in its shape and dtype.

    It equals `dequantize_affine(quantize_affine(input))` with the INT domain. Equations at the top of the file.

    Args:
        input: fp32, fp16 or bf16, any shape.
        block_size: elements that share a scale, one size per axis, -1 for a whole axis.
        scale: positive, one element per block; its gradient is summed over the block.
        zero_point: shaped like `scale`; learned ones are in floating point, and rounded and clamped to a code here,
            others are integer codes; None for zero.
        quant_dtype: an integer type.
        quant_min, quant_max: narrower bounds than those of the type: -Q_N and Q_P of the paper.
        grad_scale: factor of the gradients of `scale` and `zero_point`; see `lsq_grad_scale`.
        through_rounding: False omits round(v) - v, so that only elements that clip change the scale, as in PACT (Choi
            et al., arXiv 1805.06085, eq. 3, where a = s Q_P is learned, dx_hat/da = 1 where x >= a).

    Raises:
        TypeError: `input` is not in floating point.
        ValueError: `quant_dtype` is not an integer type, the bounds exceed it, or `scale` does not have one element per
            block.
    """
    check_floating_point("learned_step_fake_quantize", input)
    kind = qdtype(quant_dtype)
    if kind.is_floating_point:
        raise ValueError(f"learned_step_fake_quantize takes an integer type, got {kind.name}")
    low, high = code_range(kind, quant_min, quant_max)
    block = granularity.BlockView(input.shape, block_size).block
    return tracing.apply(
        _LearnedStep, input, scale, zero_point, block, kind.name, float(low), float(high), grad_scale, through_rounding
    )


def zero_point_code(zero_point: Tensor, low: float, high: float) -> Tensor:
    """The code of a learned zero point: the nearest one within bounds, in the same dtype; codes are returned as is."""
    return torch.round(zero_point).clamp(low, high) if zero_point.is_floating_point() else zero_point


def lsq_grad_scale(count: int, quant_max: float) -> float:
    """1 / sqrt(N Q_P) (LSQ, section 2.2), which makes the relative updates of steps and weights similar in size.

    Args:
        count: N, the number of elements that share the step; for activations, those of one example or batch.
        quant_max: Q_P, the largest code, counted from that of zero.
    """
    return 1 / math.sqrt(max(count, 1) * max(quant_max, 1))


def lsq_scale(input: Tensor, block_size: Sequence[int], quant_max: float) -> Tensor:
    """The initial step of each block, 2 mean|x| / sqrt(Q_P) (LSQ, section 2.1), fp32, in the shape of the scale."""
    check_floating_point("lsq_scale", input)
    view = granularity.BlockView(input.shape, block_size)
    magnitude = view.split(input.detach().float().abs())
    mean = magnitude.mean(view.dims, keepdim=True) if view.dims else magnitude
    scale = mean.reshape(view.scale_shape) * (2 / math.sqrt(max(quant_max, 1)))
    return scale.clamp(min=torch.finfo(torch.float32).tiny)
