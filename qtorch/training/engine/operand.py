"""Operand: one side of a matmul of the engine, codes or floats, with the contracted axis last."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.ops.block_mm import pad_to_blocks
from ...kernels.ops.quantize import dequantize_rows, quantize_dynamic, quantize_rows, quantize_static
from ...kernels.registry import scale_per_row
from ...primitives import AbsMaxRule, MappingType, MinMaxRule, QuantSpec
from ...primitives.affine import real_codes, split_zero_point
from ...primitives.granularity import BlockView, block_of, granularity_of


class Operand(NamedTuple):
    """One side of a matmul, (kept, contracted): codes with their scale and zero point, or floats (spec None).

    Quantized operands may have more rows than `kept`: their blocks are padded with zeros. The scale may have an element
    per row where its spec has one for several rows; see `quantize_rows`.
    """

    values: Tensor
    kept: int
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    spec: QuantSpec | None = None

    @property
    def is_integer(self) -> bool:
        return self.spec is not None and not self.spec.dtype.is_floating_point and self.spec.dtype.bits <= 8

    def transposed(self, kept: int) -> Operand:
        """The transposed operand; the first `kept` indices of its rows are not padding."""
        if self.spec is None:
            return Operand(self.values.t(), kept)
        assert self.scale is not None
        zero_point = None if self.zero_point is None else self.zero_point.t()
        spec = self.spec.with_granularity(granularity_of(self.spec.granularity.pattern(2)[::-1]))
        return Operand(self.values.t(), kept, self.scale.t(), zero_point, spec)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        if self.spec is None:
            return self.values.to(dtype)
        assert self.scale is not None
        return dequantize_rows(self.spec, self.values, self.scale, self.zero_point, dtype)

    def scales_per_row(self) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point with a row for each row of codes."""
        assert self.scale is not None
        rows = self.values.shape[0]
        zero_point = None if self.zero_point is None else scale_per_row(self.zero_point, rows)
        return scale_per_row(self.scale, rows), zero_point

    def in_blocks(self) -> Operand:
        """The operand with a scale for each block of the spec, NaN if one of its rows has NaN."""
        if self.spec is None or self.scale is None or self.spec.dtype.has_nan or not self.values.shape[0]:
            return self
        rows = self.spec.granularity.pattern(2)[0]
        if rows == 1:
            return self
        blocks = (1, -1) if rows == -1 else (-1, rows)
        zero_point = None if self.zero_point is None else self.zero_point.unflatten(0, blocks).select(1, 0)
        return self._replace(scale=self.scale.unflatten(0, blocks).amax(1), zero_point=zero_point)


class StaticRange(Protocol):
    """What keeps the range of an operand from call to call."""

    def qparams(self, x: Tensor, observe: bool) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point; `observe` lets the range follow `x`."""


class Total(NamedTuple):
    """The sum of parts of a product that processes have.

    Attributes:
        add: the sum of a tensor and those of other processes, in the same memory.
        length: of the contracted axis on all processes.
    """

    add: Callable[[Tensor], Tensor]
    length: int

    def __call__(self, part: Tensor) -> Tensor:
        return self.add(part)


class ContractionState(Protocol):
    """What a contraction takes from outside of a call: from which step on it quantizes, which operands have ranges of
    their own (`training.scheduled`), and which products are parts of a sum over processes (`split`)."""

    @property
    def active(self) -> bool:
        """Whether operands are quantized."""

    @property
    def observes(self) -> bool:
        """Whether ranges follow what passes."""

    def range_of(self, operand: str, x: Tensor, spec: QuantSpec) -> StaticRange | None:
        """The range of an operand such as ``"output.lhs"``, None if its scale is that of each call."""

    def total_of(self, product: str) -> Total | None:
        """How the parts of a product such as ``"output"`` become the whole of it; None: it is whole."""


def observed(x: Tensor, operand: str, spec: QuantSpec | None, state: ContractionState | None) -> None:
    """Show the range of `operand`, if it has one, the values that would be quantized."""
    if spec is None or state is None or not state.observes:
        return
    padded = pad_to_blocks(x, spec.granularity)
    if (static := state.range_of(operand, padded, spec)) is not None:
        static.qparams(padded, True)


def quantize_operand(
    x: Tensor,
    spec: QuantSpec | None,
    contracted: int = 1,
    tokens: bool = False,
    operand: str = "",
    state: ContractionState | None = None,
) -> Operand:
    """Quantize `x` (kept, contracted) by `spec`, padded with zeros to whole blocks and to a multiple of `contracted`.

    Args:
        tokens: rows are independent: a NaN or an infinity in a row of x affects that row of a product only.
        operand, state: the name of the operand, and where its range is kept, if it is.

    Raises:
        ValueError: zeros would have to be added along the contracted axis, and the codes have none.
    """
    if spec is None:
        return Operand(x, x.shape[0])
    padded = pad_to_blocks(x, spec.granularity, contracted)
    if padded.shape[1] != x.shape[1] and not spec.dtype.has_zero:
        raise ValueError(
            f"{spec.dtype} has no code for zero, so the contracted axis, of {x.shape[1]} elements, cannot be completed "
            f"to {padded.shape[1]}; use PerRow() or PerTensor(), or blocks that divide the axis"
        )
    static = None if state is None else state.range_of(operand, padded, spec)
    if static is not None:
        assert state is not None
        quantized = quantize_static(padded, spec, *static.qparams(padded, state.observes))
        made = Operand(quantized[0], x.shape[0], quantized[1], quantized[2], spec)
        return made if tokens else made.in_blocks()
    codes, scale, zero_point = (quantize_rows if tokens else quantize_dynamic)(padded, spec)
    return Operand(codes, x.shape[0], scale, zero_point, spec)


def lengthened(x: Tensor, other: Operand) -> Tensor:
    """`x` in floating point, padded to the length of `other` along the contracted axis."""
    if other.spec is None or max(other.spec.granularity.pattern(2)) <= 1:
        return x
    missing = other.values.shape[1] - x.shape[1]
    return pad(x, (0, missing)) if torch.compiler.is_compiling() or missing else x


def with_scale_in(x: Tensor, operand: Operand) -> tuple[Tensor, Operand]:
    """The scale (1, C) of `operand`, one for each contracted index, multiplied into the other operand `x`:
    sum_c x (q s) = sum_c (x s) q. Other scales stay where they are."""
    assert operand.spec is not None
    assert operand.scale is not None
    if operand.spec.granularity.pattern(2) != (-1, 1):
        return x, operand
    scaled = lengthened(x, operand) * operand.scale.amax(0, keepdim=True).to(torch.float32)
    ones = torch.ones_like(operand.scale[:1, :1])
    return scaled, operand._replace(scale=ones, spec=operand.spec.with_granularity(_WHOLE))


_WHOLE = granularity_of((-1, -1))

# --------------------------------------------------------------------------------------------------
# The gradient that a dynamic scale passes to the elements it is chosen from.
#
# An operand is multiplied as x_hat = s q, s = max |x| / Q, q = round(x / s). Passing rounding straight through, with s
# held fixed, dL/dx = dL/dx_hat. With s a function of x, the elements of largest magnitude in a block also get
#
#     dL/ds ds/dx,   dL/ds = sum_block dL/dx_hat (q - x / s),   ds/dx = sign(x) / (Q c)
#
# with c the number of elements that share the maximum (Esser et al., arXiv 1902.08153, eq. 3, for dL/ds).
#
# Where a scale leaves elements outside the codes, these may get no gradient instead: see `where_unclipped`.


def check_scale_gradient(spec: QuantSpec) -> None:
    """Raise `ValueError` where the scale of `spec` is no smooth function of a block's absmax."""
    absmax = spec.scale_rule in (MinMaxRule(), AbsMaxRule()) and spec.preserve_max_val
    smooth = absmax and spec.scale_dtype is not torch.float8_e8m0fnu
    if not smooth or spec.mapping is not MappingType.SYMMETRIC or spec.has_zero_point:
        raise ValueError(f"scale_gradient takes symmetric specs whose scale is absmax, got {spec}")


def with_scale_gradient(grad: Tensor, x: Tensor, spec: QuantSpec) -> Tensor:
    """dL/dx from `grad` = dL/dx_hat, both of the shape of the matrix `x`; the equation above."""
    values = pad_to_blocks(x, spec.granularity)
    extra = (0, values.shape[1] - x.shape[1], 0, values.shape[0] - x.shape[0])
    view = BlockView(values.shape, spec.block_size(values.shape))
    scale, _ = spec.choose_qparams(values)
    q = view.split(spec.dtype.decode(spec.to_nearest().quantize(values, scale, None)))
    s, v, g = view.split_scale(scale).float(), view.split(values).float(), view.split(pad(grad, extra)).float()
    magnitude = v.abs()
    largest = magnitude == magnitude.amax(view.dims, keepdim=True)
    low, high = spec.code_range
    of_scale = (g * (q - v / s)).sum(view.dims, keepdim=True) / ((high - low) / 2)
    result = g + of_scale * torch.sign(v) * largest / largest.sum(view.dims, keepdim=True)
    return view.merge(result)[: x.shape[0], : x.shape[1]].to(grad.dtype)


def where_unclipped(x: Tensor, operand: Operand) -> Tensor | None:
    """Whether x / s lies within the bounds of the codes, for each element of the matrix `x` that `operand` is made of;
    None: it was not quantized."""
    spec, scale = operand.spec, operand.scale
    if spec is None or scale is None:
        return None
    low, high = spec.code_range
    padded = pad(x, (0, operand.values.shape[1] - x.shape[1], 0, operand.values.shape[0] - x.shape[0]))
    view = BlockView(padded.shape, block_of(padded.shape, scale.shape))
    s, z = view.split_scale(scale), split_zero_point(view, operand.zero_point)
    codes = real_codes(view.split(padded.float()), s, z, spec.dtype, (low, high), spec.zero_point_domain)
    return view.merge((codes >= low) & (codes <= high))[: x.shape[0], : x.shape[1]]
