"""Split: a contraction whose weight lies in parts on the processes of a group, with the numbers of one process.

    axis   each process has                    sums over the group
    n      rows of w, columns of y and g       dx[m, k] = sum_n g[m, n] w[n, k]
    k      columns of w and of x               y[m, n]  = sum_k x[m, k] w[n, k]

A block whose elements lie on several processes has one scale: its range is joined, by one all-reduce of two numbers a
block, before codes are chosen. Then codes are those of one process, and so are sums of integers, which are added up
before they are scaled; sums of floats differ in their order.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.ops.quantize import shares_scales
from ...primitives import QuantSpec, affine, scale_rules
from .gemm_spec import GemmSpec, TrainingSpec
from .operand import ContractionState, StaticRange, Total

AXES = {
    "output.lhs": "mk", "output.rhs": "nk", "grad_input.lhs": "mn", "grad_input.rhs": "kn", "grad_weight.lhs": "nm",
    "grad_weight.rhs": "km",
}  # fmt: skip
"""The axes of each operand, (kept, contracted), in the letters of `spec`."""


@dataclass(frozen=True)
class Split(ContractionState):
    """See the top of the file: `axis`, ``"n"`` or ``"k"``, of the weight is cut over a process `group`; its `length` is
    that on all processes."""

    group: Any
    axis: str
    length: int
    repeats = False

    def range_of(self, operand: str, x: Tensor, spec: QuantSpec) -> StaticRange | None:
        axis = AXES[operand].find(self.axis)
        if axis < 0 or spec.granularity.pattern(2)[axis] != -1:
            return None  # blocks are whole on one process
        return JoinedRange(spec, self.group, cuts_rows=axis == 1)

    def total_of(self, product: str) -> Total | None:
        return Total(self._sum, self.length) if AXES[f"{product}.lhs"][1] == self.axis else None

    def _sum(self, part: Tensor) -> Tensor:
        return summed(part.contiguous(), self.group)


@dataclass(frozen=True)
class JoinedRange:
    """The range of blocks that lie on all processes of a group, each with a part of each row (`cuts_rows`), or some
    rows."""

    spec: QuantSpec
    group: Any
    cuts_rows: bool

    def qparams(self, x: Tensor, observe: bool = False) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point of the blocks that `x` (M, K) is a part of, the same on all processes. Rows with a NaN
        or an infinity are left out where rows share a scale; otherwise their scale is NaN."""
        if shares_scales(self.spec):
            lost = affine.lost_rows(x)
            x = affine.without_rows(x, summed(lost, self.group) if self.cuts_rows else lost)
        low, high = self.spec.choose_range(x)
        if self.spec.scale_rule.joins is scale_rules.Joins.MEAN:
            elements = x.numel() / max(1, low.numel())
            low, high, count = summed(torch.stack([low, high, torch.ones_like(low)]) * elements, self.group)
            low, high = low / count, high / count
        else:
            low, high = joined_extremes(low, high, self.group)
        return self.spec.choose_qparams_from_range(low, high, x.dtype)


def summed(part: Tensor, group: Any) -> Tensor:
    """The sum of `part` over a group, in its memory."""
    torch.distributed.all_reduce(part, group=group)
    return part


def joined_extremes(low: Tensor, high: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The lowest of `low` and the highest of `high` over a group, NaN where one of them is NaN or infinite."""
    # What the maximum of a NaN is depends on the backend.
    extremes = torch.stack([-low, high]).nan_to_num(torch.inf, torch.inf, torch.inf)
    torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group)
    extremes = torch.where(extremes == torch.inf, torch.nan, extremes)
    return -extremes[0], extremes[1]


def check_split(spec: TrainingSpec, axis: str, part: int, whole: int) -> None:
    """Raise `ValueError` where a contraction cut along `axis`, of `whole` elements and at most `part` on a process,
    could not have the numbers of one process."""
    if spec.scale_gradient:
        raise ValueError("scale_gradient needs the elements of whole blocks; leave it out")
    for product in ("output", "grad_input", "grad_weight"):
        gemm: GemmSpec = getattr(spec, product)
        if gemm.mid_alpha is not None:
            raise ValueError(f"{product} balances whole operands; leave mid_alpha out")
        if gemm.hadamard is not None and AXES[f"{product}.lhs"][1] == axis:
            raise ValueError(f"{product} transforms whole operands; leave hadamard out")
        for side in ("lhs", "rhs"):
            operand = getattr(gemm, side)
            if operand is not None:
                check_operand(operand, f"{product}.{side}", axis, part, whole)


def check_operand(spec: QuantSpec, operand: str, axis: str, part: int, whole: int) -> None:
    """`check_split` of one operand."""
    position = AXES[operand].find(axis)
    if position < 0:
        return
    block = spec.granularity.pattern(2)[position]
    if block > 1 and part % block and part < whole:
        raise ValueError(f"blocks of {block} do not divide the {part} elements that a process has of {operand}")
    if spec.scale_spec is not None:
        raise ValueError(f"{operand} has scales that are quantized themselves, by numbers of the whole: {spec}")
    if block == -1 and spec.scale_rule.joins is None:
        raise ValueError(
            f"{operand} has ranges by {spec.scale_rule}, which do not follow from those of parts; take MinMaxRule(), "
            "AbsMaxRule() or AbsMeanRule()"
        )


CUT_HERE: list[nn.Module] = []
"""Layers whose weights our styles of tensor parallelism are cutting; those of torch refuse weights in training."""
