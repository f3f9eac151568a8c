"""One matmul of the engine: its operands, codes or floats with the contracted axis last, and their product.

Operands are quantized and multiplied by the same functions as in inference, so that the converted model gives the same
results: bit for bit where sums are exact integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels.ops import block_mm, int8_grouped_mm, quantize
from ...kernels.ops.weight_only_mm import weight_only_mm
from ...kernels.registry import scale_per_row
from ...primitives import QuantSpec, granularity
from .gemm_spec import GemmSpec


class Operand(NamedTuple):
    """One side of a matmul, (kept, contracted): codes with their scale and zero point, or floats (spec None). Quantized
    operands may have more rows than `kept`: their blocks are padded with zeros. The scale may have an element per row
    where its spec has one for several rows; see `quantize_rows`."""

    values: Tensor
    kept: int
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    spec: QuantSpec | None = None

    @property
    def is_integer(self) -> bool:
        return self.spec is not None and self.spec.dtype.is_small_integer

    def transposed(self, kept: int) -> Operand:
        """The transposed operand; the first `kept` indices of its rows are not padding."""
        if self.spec is None:
            return Operand(self.values.t(), kept)
        assert self.scale is not None
        zero_point = None if self.zero_point is None else self.zero_point.t()
        spec = self.spec.with_granularity(granularity.granularity_of(self.spec.granularity.pattern(2)[::-1]))
        return Operand(self.values.t(), kept, self.scale.t(), zero_point, spec)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        if self.spec is None:
            return self.values.to(dtype)
        assert self.scale is not None
        return quantize.dequantize_rows(self.spec, self.values, self.scale, self.zero_point, dtype)

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
    """The sum of the parts of a product that processes have: `add` a tensor to theirs, in its memory; `length` of the
    contracted axis on all processes."""

    add: Callable[[Tensor], Tensor]
    length: int


class ContractionState:
    """What a contraction takes from outside of a call; this one takes nothing. `recipes.scheduled` has schedules and
    ranges that are kept, `split` sums over processes.

    Attributes:
        static: operands whose ranges are kept from call to call.
        active: whether operands are quantized.
        repeats: whether an operand that is quantized again has the same codes.
    """

    static: tuple[str, ...] = ()
    active: bool = True
    repeats: bool = True

    def observes(self, operand: str) -> bool:
        """Whether the range of an operand follows what passes."""
        return False

    def range_of(self, operand: str, x: Tensor, spec: QuantSpec) -> StaticRange | None:
        """The range of an operand such as ``"output.lhs"``, whose values, padded to whole blocks, are `x`; None if its
        scale is that of each call."""

    def total_of(self, product: str) -> Total | None:
        """How the parts of a product such as ``"output"`` become the whole of it; None: it is whole."""


STATELESS = ContractionState()


def observed(x: Tensor, operand: str, spec: QuantSpec | None, state: ContractionState) -> None:
    """Show the range of `operand`, if it has one, the values that would be quantized."""
    if spec is None or not state.observes(operand):
        return
    padded = block_mm.pad_to_blocks(x, spec.granularity)
    if (static := state.range_of(operand, padded, spec)) is not None:
        static.qparams(padded, True)


def quantize_operand(
    x: Tensor, spec: QuantSpec | None, contracted: int = 1, tokens: bool = False, operand: str = "",
    state: ContractionState = STATELESS,
) -> Operand:  # fmt: skip
    """Quantize `x` (kept, contracted) by `spec`, padded with zeros to whole blocks and to a multiple of `contracted`.

    Args:
        tokens: rows are independent: a NaN or an infinity in a row of x affects that row of a product only.
        operand, state: the name of the operand, and where its range is kept, if it is.

    Raises:
        ValueError: zeros would have to be added along the contracted axis, and the codes have none.
    """
    if spec is None:
        return Operand(x, x.shape[0])
    padded = block_mm.pad_to_blocks(x, spec.granularity, contracted)
    if not spec.dtype.has_zero and padded.shape[1] != x.shape[1]:
        raise ValueError(
            f"{spec.dtype} has no code for zero, so the contracted axis, of {x.shape[1]} elements, cannot be completed "
            f"to {padded.shape[1]}; use PerRow() or PerTensor(), or blocks that divide the axis"
        )
    if state is not STATELESS and (static := state.range_of(operand, padded, spec)) is not None:
        quantized = quantize.quantize_static(padded, spec, *static.qparams(padded, state.observes(operand)))
        made = Operand(quantized[0], x.shape[0], quantized[1], quantized[2], spec)
        return made if tokens else made.in_blocks()
    codes, scale, zero_point = (quantize.quantize_rows if tokens else quantize.quantize_dynamic)(padded, spec)
    return Operand(codes, x.shape[0], scale, zero_point, spec)


def as_long_as(x: Tensor, other: Operand) -> Tensor:
    """`x` in floating point, padded to the length of `other` along the contracted axis."""
    if other.spec is None or max(other.spec.granularity.pattern(2)) <= 1:
        return x
    return block_mm.with_zeros(x, other.values.shape[1] - x.shape[1])


def multiply(lhs: Operand, rhs: Operand, gemm: GemmSpec, dtype: torch.dtype, total: Total | None = None) -> Tensor:
    """c[a, b] = sum_c lhs[a, c] rhs[b, c], (lhs.kept, rhs.kept), in `gemm.output_dtype` or else `dtype`.

    Args:
        total: adds the same product of other processes, which have other parts of c: integers before they are scaled.
    """
    dtype = gemm.output_dtype or dtype
    if lhs.spec is None:
        lhs = lhs._replace(values=as_long_as(lhs.values, rhs))
    elif rhs.spec is None:
        rhs = rhs._replace(values=as_long_as(rhs.values, lhs))
    if lhs.spec is None and rhs.spec is None:
        # Under autocast, the activation has the dtype to compute in, and the weight its own.
        compute = gemm.accumulator_dtype or lhs.values.dtype
        result = torch.mm(lhs.values.to(compute), rhs.values.to(compute).t())
    elif gemm.accumulator_dtype is not None and gemm.accumulates_floats:
        compute = gemm.accumulator_dtype
        result = torch.mm(lhs.dequantize(compute), rhs.dequantize(compute).t())
    elif lhs.is_integer and rhs.is_integer:
        gemm.check_sum(lhs.values.shape[1])
        result, total = _integer_product(lhs, rhs, dtype, total)
    elif rhs.spec is None:
        result = torch.mm(lhs.dequantize(torch.float32), rhs.values.float().t())
    elif _are_float8_tiles(lhs, rhs):
        result = block_mm.tile_scaled_mm(lhs.values, rhs.values, lhs.scale, rhs.scale, torch.float32)  # type: ignore[arg-type]
    else:
        # As in inference: the activation in fp32 if it is quantized, else in its own dtype.
        assert rhs.scale is not None
        x = lhs.values if lhs.spec is None else lhs.dequantize(torch.float32)
        low, high = map(float, rhs.spec.code_range)
        domain, name = rhs.spec.zero_point_domain.name, rhs.spec.dtype.name
        result = weight_only_mm(x, rhs.values, rhs.scale, rhs.zero_point, name, low, high, domain)
    return (result if total is None else total.add(result)).to(dtype)[: lhs.kept, : rhs.kept]


def _are_float8_tiles(lhs: Operand, rhs: Operand) -> bool:
    """Whether both are in float8, with an fp32 scale for each block of one size along the contracted axis."""
    blocks = [None if side.spec is None else side.spec.granularity.pattern(2)[1] for side in (lhs, rhs)]
    return blocks[0] == blocks[1] not in (None, -1) and all(
        type(side.spec) is QuantSpec
        and side.values.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        and side.scale is not None
        and side.scale.dtype is torch.float32
        for side in (lhs, rhs)
    )


def _integer_product(
    lhs: Operand, rhs: Operand, dtype: torch.dtype, total: Total | None
) -> tuple[Tensor, Total | None]:
    """The product of codes, and the sum over processes that is still to be taken."""
    assert lhs.spec is not None
    assert lhs.scale is not None
    assert rhs.spec is not None
    assert rhs.scale is not None
    dtype = dtype if total is None else torch.float32
    block = rhs.spec.granularity.pattern(2)[1]
    if lhs.scale.shape[1] > 1:
        return block_mm.int8_block_mm(lhs.values, lhs.scale, rhs.values, rhs.scale, dtype), total
    (xs, xz), (ws, wz) = lhs.scales_per_row(), rhs.scales_per_row()
    if total is None or block != -1 or lhs.spec.granularity.pattern(2)[1] != -1:
        return int8_grouped_mm.int8_product(lhs.values, xs, xz, rhs.values, ws, wz, block, dtype), total
    # One scale of each operand for the whole contracted axis: integers are added up first.
    sums = total.add(int8_grouped_mm.int8_sums(lhs.values, xz, rhs.values, wz, total.length))
    ws, up = int8_grouped_mm.without_large(ws)
    return sums.float().mul_(ws.t()).mul_(xs.float()).mul_(up), None
