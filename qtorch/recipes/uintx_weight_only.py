"""Weights in unsigned integers of 1 to 7 bits, in groups; activations stay in floating point."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dtypes import Layout, PackedLayout
from ..primitives import (
    LinearSpec,
    MinMaxRule,
    QDType,
    ScaleRule,
    ZeroPointDomain,
    qdtype,
)
from ..recipe import WeightRecipe, register_recipe
from .intx_weight_only import rule_or_hqq, sub_byte_type, unsigned_spec


@register_recipe("uintx_weight_only")
@dataclass(frozen=True)
class UIntxWeightOnly(WeightRecipe):
    """Weights in 1 to 7 bits, asymmetric, with a scale and a zero point per group of input channels.

    Args:
        dtype: ``torch.uint1`` to ``torch.uint7``, or their names.
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        scale_rule: how the range of a group is chosen.
        layout: how weights are stored in memory; `PackedLayout()` packs codes to their true size.
        zero_point_domain: INT, zero points are codes; FLOAT or OFFSET, real numbers, so the range of a group need not
            include 0.
        use_hqq: short for `scale_rule=HQQRule()`.

    Raises:
        ValueError: the dtype is not one of these, or use_hqq is given with another scale rule.
    """

    dtype: QDType | torch.dtype | str
    group_size: int = 64
    scale_rule: ScaleRule = MinMaxRule()
    layout: Layout = PackedLayout()
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT
    use_hqq: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", sub_byte_type(self.dtype, "uint", self.name))
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        rule = rule_or_hqq(self.scale_rule, self.use_hqq, self.name)
        return unsigned_spec(qdtype(self.dtype), self.group_size, self.zero_point_domain, rule, self.layout)


uintx_weight_only = UIntxWeightOnly
