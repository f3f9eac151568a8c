"""Fake quantization of a layer: its operands as the reals that their codes will stand for, with a gradient.

    w_hat = dequantize(quantize(w)),   x_hat = dequantize(quantize(x)),   y = served_linear(x_hat, w_hat)

Rounding is passed straight through (Bengio et al., arXiv 1308.3432): dL/dw = dL/dw_hat, and 0 where w is clipped, by a
static scale or one that a rule puts below the largest magnitude. Scales are constants to the gradient. One that covers
its block clips nothing: what the rounding of a power of two leaves outside it is passed through, for with no gradient
it would stay there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.im2col import Window, from_matrix, multiply_windows, to_matrix
from ...kernels.ops.int8_block_mm import pad_to_blocks
from ...kernels.ops.quantize_rowwise import dequantize_rows, quantize_rows, quantize_static, without_lost_rows
from ...kernels.rows import to_rows
from ...primitives import LinearSpec, QuantSpec
from ...primitives.affine import fake_quantize_blocks
from ...primitives.fake_quant import straight_through
from ...primitives.granularity import block_of
from ...primitives.jsonable import jsonable
from ...primitives.scale_rules import AbsMaxRule, MinMaxRule
from ...recipe import WeightRecipe
from ..engine.contraction import Operand
from ..weights.base import TrainableWeight, floats_of
from .served_conv import rows_of, served_conv
from .served_linear import check_width, served_linear, sums_integers


@jsonable
@dataclass(frozen=True)
class QATSpec:
    """How a weight is fake-quantized in training, and what it converts to.

    Args:
        recipe: for inference; see `qat`.
        compute_dtype: see `qat`.
        transposed: of a view of a weight: its last two axes are those of the weight, exchanged.
        partial: of a view: it lacks parts of what its codes depend on.
    """

    recipe: WeightRecipe
    compute_dtype: torch.dtype | None = None
    transposed: bool = False
    partial: bool = False

    def __post_init__(self) -> None:
        # Made once: it is read on each call, and by compilers that trace it.
        object.__setattr__(self, "_linear_spec", self.recipe.linear_spec())

    @property
    def linear_spec(self) -> LinearSpec:
        return self._linear_spec  # type: ignore[attr-defined]

    @property
    def sums_integers(self) -> bool:
        """Whether layers add up products of codes, and not of what they stand for."""
        return self.compute_dtype is None and sums_integers(self.linear_spec)

    @property
    def product_dtype(self) -> torch.dtype | None:
        """In which floats are multiplied, None for their own: fp32, as kernels do that dequantize activations."""
        widens = self.compute_dtype is None and self.linear_spec.activation is not None
        return torch.float32 if widens and not self.sums_integers else None

    @property
    def rows_are_independent(self) -> bool:
        """Whether the codes of a row depend on that row alone."""
        weight = self.linear_spec.weight
        return weight.granularity.pattern(2)[0] == 1 and weight.scale_spec is None

    def of_whole(self) -> QATSpec:
        """Of the weight that this one is a view of."""
        return replace(self, transposed=False, partial=False)

    def __str__(self) -> str:
        views = [name for name in ("transposed", "partial") if getattr(self, name)]
        return " ".join([f"qat({self.recipe})", *views])


def fake_quantized_linear(input: Tensor, weight: Tensor, bias: Tensor | None, spec: QATSpec) -> Tensor:
    """`F.linear` with the value that the converted weight will give, differentiable in all three.

    Args:
        input: (..., K) floating point.
        weight: (N, K) floating point, plain or in training.
        bias: (N) or None.

    Returns:
        (..., N) in the dtype of `input`.

    Raises:
        ValueError: the rows of input and weight are of other lengths.
    """
    check_width(input, weight)
    dtype = spec.product_dtype
    w_hat, w = fake_quantize_weight(weight, spec, dtype, codes_do=True)
    x_hat, x = _fake_quantize_input(input, spec, dtype)
    if dtype is None:
        return served_linear(x_hat, w_hat, bias, x, w)
    y = served_linear(x_hat, w_hat, None).to(input.dtype)
    return y if bias is None else y + bias


def fake_quantized_conv(input: Tensor, weight: Tensor, spec: QATSpec, window: Window) -> Tensor:
    """The convolution without bias of an input (B, C, *sizes), as `fake_quantized_linear` of its windows.

    Args:
        weight: (N, C / groups, *kernel) floating point.
    """
    dtype = spec.product_dtype
    w_hat, w = fake_quantize_weight(to_matrix(weight), spec, dtype, codes_do=True)
    if spec.linear_spec.activation is None:
        return served_conv(input, from_matrix(w_hat, weight.shape).contiguous().to(input.dtype), None, window)
    parts = w_hat.chunk(window.groups)

    def run(rows: Tensor, group: int) -> Tensor:
        x_hat, x = _fake_quantize_input(rows, spec, dtype)
        of_w = None if w is None else rows_of(w, group, window.groups)
        return served_linear(x_hat, parts[group], None, x, of_w).to(input.dtype)

    return multiply_windows(input, window, run)


def fake_quantize_weight(
    weight: Tensor, spec: QATSpec, dtype: torch.dtype | None = None, codes_do: bool = False
) -> tuple[Tensor, Operand | None]:
    """`weight`, plain or in training, fake-quantized, in `dtype` or its own; and its codes, if those are multiplied.

    Args:
        codes_do: where there are codes, the first is for the gradient alone: without one it is `weight` itself.
    """
    if spec.transposed:
        w_hat, w = fake_quantize_weight(weight.transpose(-2, -1), spec.of_whole(), dtype, codes_do)
        return w_hat.transpose(-2, -1), None if w is None else w.transposed(weight.shape[-2])
    if spec.recipe.prunes:
        weight = spec.recipe.prune(floats_of(weight))
    how = spec.linear_spec.weight
    with torch.no_grad():
        values = weight.floats() if isinstance(weight, TrainableWeight) else weight
        scale, other = how.choose_qparams(values)
        codes = None if spec.compute_dtype else how.quantize(values, scale, other)
    return _stand_in(weight, values, _Quantized(how, codes, scale, other, clips(how)), spec, dtype, codes_do)


def _fake_quantize_input(input: Tensor, spec: QATSpec, dtype: torch.dtype | None) -> tuple[Tensor, Operand | None]:
    """The same for the input of a layer; the codes are those of its rows."""
    how = spec.linear_spec.activation
    if how is None:
        return input, None
    rows = to_rows(input)
    count, length = rows.shape
    rows = pad_to_blocks(rows, how.granularity)
    codes = zero_point = None
    with torch.no_grad():
        scale = spec.recipe.act_scale(input.device)
        if scale is not None:
            if not spec.compute_dtype:
                codes, scale, zero_point = quantize_static(rows, how, scale, None)
        elif spec.compute_dtype is None:
            codes, scale, zero_point = quantize_rows(rows, how)
        else:
            scale, zero_point = how.choose_qparams(without_lost_rows(rows, how))
    leaves_some = spec.linear_spec.static or clips(how)
    x_hat, x = _stand_in(rows, rows, _Quantized(how, codes, scale, zero_point, leaves_some), spec, dtype, codes_do=True)
    return x_hat[:count, :length].reshape(input.shape), None if x is None else x._replace(kept=count)


class _Quantized(NamedTuple):
    """Codes (None: not those of fp32 arithmetic), scale, and zero point or table of a tensor; and whether it may have
    elements outside the range of the codes."""

    spec: QuantSpec | Any
    codes: Tensor | None
    scale: Tensor
    other: Tensor | None
    clips: bool


def _stand_in(
    input: Tensor, values: Tensor, quantized: _Quantized, spec: QATSpec, dtype: torch.dtype | None, codes_do: bool
) -> tuple[Tensor, Operand | None]:
    """What `values` are quantized to, with a gradient to `input`, whose values they are; and the codes, if those are
    multiplied."""
    how, codes, scale, other, leaves_some = quantized
    operand = Operand(codes, values.shape[0], scale, other, how) if codes is not None and spec.sums_integers else None
    if codes_do and operand is not None and not torch.is_grad_enabled():
        return values, operand
    result = unclipped = None
    with torch.no_grad():
        if codes is not None:
            dequantize = functools.partial(dequantize_rows, how) if isinstance(how, QuantSpec) else how.dequantize
            result = dequantize(codes, scale, other, dtype or values.dtype)
        if codes is None or leaves_some:
            (low, high), domain = how.code_range, how.zero_point_domain
            block, compute = block_of(values.shape, scale.shape), spec.compute_dtype or torch.float32
            by_blocks, mask = fake_quantize_blocks(
                values, block, scale, other, how.dtype, low, high, domain, compute_dtype=compute
            )
            result = by_blocks if result is None else result
            unclipped = mask if leaves_some else None
    assert result is not None
    return straight_through(input, result, unclipped), operand


def clips(spec: QuantSpec | Any) -> bool:
    """Whether the scale of a block is meant to leave elements outside the range of the codes."""
    return isinstance(spec, QuantSpec) and not isinstance(spec.scale_rule, MinMaxRule | AbsMaxRule)
