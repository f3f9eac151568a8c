"""Fake quantization of a layer: its operands as the reals that their codes stand for, with a gradient.

    w_hat = dequantize(quantize(w)),   x_hat = dequantize(quantize(x)),   y = converted_linear(x_hat, w_hat)

Every layer in quantization-aware training takes this path. A `Quantization` chooses the scales: from the values of each
call (`QATSpec`), or with state (`FakeQuantizedLayer`). `fake_quantize` makes x_hat and the codes of one operand;
`fake_quantized_linear` and `fake_quantized_conv` multiply two of them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels import conv, registry
from ...kernels.ops.quantize import dequantize_rows, quantize_static
from ...primitives import AbsMaxRule, MinMaxRule, QuantSpec, affine, fake_quant, granularity
from ..engine.operand import STATELESS, ContractionState, Operand
from .converted import check_width, converted_conv, converted_linear, rows_of


class Scaled(NamedTuple):
    """What a matrix is quantized by; `other` is the zero point, or the table of a `CodebookSpec`. Codes are given where
    they are known already; they are those of fp32 arithmetic."""

    spec: QuantSpec | Any
    scale: Tensor
    other: Tensor | None = None
    codes: Tensor | None = None


class FakeQuantized(NamedTuple):
    """One operand of a product: `values`, x_hat, differentiable; where products of codes are added up, the codes, and
    what gave them. Without a gradient only shape and dtype of the values are read then, and they may be x."""

    values: Tensor
    codes: Operand | None = None
    scaled: Scaled | None = None


class Quantization(Protocol):
    """How a layer quantizes its operands.

    Attributes:
        product_dtype: the dtype in which floats are multiplied; None for their own.
        precedes_windows: whether a convolution quantizes an image before it gathers the windows: there is one scale for
            all of it, or the input stays in floating point.
    """

    @property
    def product_dtype(self) -> torch.dtype | None: ...

    @property
    def precedes_windows(self) -> bool: ...

    def quantize_input(self, rows: Tensor) -> FakeQuantized:
        """`rows` (M, K), fake-quantized."""

    def quantize_weight(self, matrix: Tensor) -> FakeQuantized:
        """`matrix` (N, K), fake-quantized; it may be a weight in training."""


def fake_quantized_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, quantization: Quantization, split: ContractionState = STATELESS
) -> Tensor:
    """`F.linear` with the value that the converted weight will give, differentiable in all three.

    Args:
        weight: (N, K) floating point, plain or in training.
        split: how the weight is cut over processes, if it is.
    """
    check_width(input, weight)
    bias = None if bias is None else bias.to(input.dtype)
    x, w = quantization.quantize_input(registry.to_rows(input)), quantization.quantize_weight(weight)
    if quantization.product_dtype is None:
        return registry.from_rows(converted_linear(x.values, w.values, bias, x.codes, w.codes, split), input, None)
    return registry.from_rows(converted_linear(x.values, w.values, None, split=split).to(input.dtype), input, bias)


def fake_quantized_conv(
    input: Tensor, matrix: Tensor, bias: Tensor | None, quantization: Quantization, window: conv.Window
) -> Tensor:
    """The convolution of an input (B, C, *sizes), with the value that the converted weight will give; `matrix` is the
    weight as `to_matrix` makes it."""
    bias = None if bias is None else bias.to(input.dtype)
    if quantization.precedes_windows:
        return _conv_of_images(input, matrix, bias, quantization, window)
    w = quantization.quantize_weight(matrix)
    parts = w.values.chunk(window.groups)

    def run(rows: Tensor, group: int) -> Tensor:
        x = quantization.quantize_input(rows)
        of_w = None if w.codes is None else rows_of(w.codes, group, window.groups)
        return converted_linear(x.values, parts[group], None, x.codes, of_w).to(input.dtype)

    return conv.with_bias(conv.multiply_windows(input, window, run), bias)


def _conv_of_images(
    input: Tensor, matrix: Tensor, bias: Tensor | None, quantization: Quantization, window: conv.Window
) -> Tensor:
    images = input.flatten(1)
    x, w = quantization.quantize_input(images), quantization.quantize_weight(matrix)
    x_hat = input if x.values is images else x.values.reshape(input.shape)
    kernel = (matrix.shape[0], input.shape[1] // window.groups, *window.kernel)
    w_hat = conv.from_matrix(w.values, kernel).contiguous().to(input.dtype)
    if x.codes is None:
        return converted_conv(x_hat, w_hat, bias, window)
    assert x.scaled is not None
    assert x.codes.scale is not None
    # Windows have one scale; that of an image says whether it holds a NaN or an infinity.
    of_images = x.codes.scale.reshape(-1, *(1,) * (input.dim() - 1))
    codes = x.codes._replace(
        values=x.codes.values.reshape(input.shape), scale=x.scaled.scale, zero_point=x.scaled.other
    )
    y = converted_conv(x_hat, w_hat, bias, window, codes, w.codes)
    return affine.with_non_finite(y, of_images.to(y.dtype))


def fake_quantize(values: Tensor, scaled: Scaled, x_hat: Callable[[], Tensor], multiplied: bool) -> FakeQuantized:
    """Fake-quantize one operand, `values` (rows, K).

    Args:
        x_hat: makes the reals that the codes stand for, with their gradient: `straight_through_rounding`, or that of
            learned scales.
        multiplied: the product is one of codes. Then x_hat is for the gradient alone, and not made without one.
    """
    codes = None
    if multiplied:
        with torch.no_grad():
            spec, scale, other, of_values = scaled
            if of_values is None:
                of_values, scale, other = quantize_static(values, spec, scale, other)
            codes = Operand(of_values, values.shape[0], scale, other, spec)
        if not torch.is_grad_enabled():
            return FakeQuantized(values, codes, scaled)
    return FakeQuantized(x_hat(), codes, scaled)


def straight_through_rounding(
    input: Tensor, values: Tensor, scaled: Scaled, mask: Callable[[Tensor], Tensor | None] | None,
    dtype: torch.dtype | None = None, compute_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The reals that the codes of a tensor stand for. Their gradient is passed straight through rounding (Bengio et
    al., arXiv 1308.3432): dL/dx = dL/dx_hat. Scales are constants to it.

    Args:
        input: gets the gradient; a plain tensor or a weight in training.
        values: those of `input`, a plain tensor.
        mask: from a mask of the elements that are not clipped to one of those that get the gradient, or None for all;
            None: all do, whatever is clipped.
        dtype: of the result; None for that of `values`.
        compute_dtype: of the arithmetic, where there are no codes.
    """
    spec, scale, other, codes = scaled
    result = passes = None
    with torch.no_grad():
        if codes is not None:
            dequantize = functools.partial(dequantize_rows, spec) if isinstance(spec, QuantSpec) else spec.dequantize
            result = dequantize(codes, scale, other, dtype or values.dtype)
        if codes is None or mask is not None:
            (low, high), domain = spec.code_range, spec.zero_point_domain
            block = granularity.block_of(values.shape, scale.shape)
            by_blocks, unclipped = affine.fake_quantize_blocks(
                values, block, scale, other, spec.dtype, low, high, domain, compute_dtype=compute_dtype
            )
            result = by_blocks if result is None else result
            passes = None if mask is None else mask(unclipped)
    assert result is not None
    return fake_quant.straight_through(input, result, passes)


def clips(spec: QuantSpec | Any) -> bool:
    """Whether the scale of a block is meant to leave elements outside the range of the codes. One that covers its block
    clips nothing: what the rounding of a power of two leaves outside gets its gradient, for without one it would stay
    there."""
    if not isinstance(spec, QuantSpec) or isinstance(spec.scale_rule, MinMaxRule):
        return False
    return not isinstance(spec.scale_rule, AbsMaxRule) or spec.scale_rule.clipping_scale < 1
