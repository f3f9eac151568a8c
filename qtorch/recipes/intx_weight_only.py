"""Weights in signed integers of 1 to 7 bits, in groups; activations stay in floating point."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dtypes import Layout, PackedLayout
from ..primitives import (
    HQQRule,
    LinearSpec,
    MappingType,
    MinMaxRule,
    PerGroup,
    QDType,
    QuantSpec,
    ScaleRule,
    ZeroPointDomain,
    qdtype,
)
from ..recipe import WeightRecipe, register_recipe


def sub_byte_type(dtype: QDType | torch.dtype | str, kind: str, recipe: str) -> QDType:
    """The `QDType` of `dtype`, which must be one of ``<kind>1`` to ``<kind>7``.

    Raises:
        TypeError: `dtype` is a number of bits; the message says what to write instead.
        ValueError: it is another type; the message names `recipe`.
    """
    if isinstance(dtype, int):
        hint = f": write torch.{kind}{dtype}" if 1 <= dtype <= 7 else ""
        raise TypeError(f"{recipe} takes a dtype, torch.{kind}1 to torch.{kind}7, got {dtype}{hint}")
    found = qdtype(dtype)
    if found.name not in [f"{kind}{bits}" for bits in range(1, 8)]:
        raise ValueError(f"{recipe} takes {kind}1 to {kind}7, got {found.name}")
    return found


def rule_or_hqq(rule: ScaleRule, use_hqq: bool, recipe: str) -> ScaleRule:
    """`rule`, or `HQQRule()` if `use_hqq`.

    Raises:
        ValueError: `use_hqq` and another rule are given; the message names `recipe`.
    """
    if not use_hqq:
        return rule
    if rule not in (MinMaxRule(), HQQRule()):
        raise ValueError(f"{recipe}: use_hqq=True is scale_rule=HQQRule(), got scale_rule={rule!r} too")
    return HQQRule()


def unsigned_spec(
    dtype: QDType, group_size: int, domain: ZeroPointDomain, rule: ScaleRule, layout: Layout
) -> LinearSpec:
    """Unsigned codes in groups, with zero points; in domains that add those, the range of a group need not include
    zero."""
    preserve_zero = not domain.adds_zero_point
    group = PerGroup(group_size)
    weight = QuantSpec(dtype, group, MappingType.ASYMMETRIC, domain, rule, preserve_zero=preserve_zero)
    return LinearSpec(weight, layout=layout)


@register_recipe("intx_weight_only")
@dataclass(frozen=True)
class IntxWeightOnly(WeightRecipe):
    """Weights in 1 to 7 bits, with a scale per group of input channels, and a zero point if asymmetric.

    Args:
        dtype: ``torch.int1`` to ``torch.int7``, or their names. Symmetric int1 has the two values 0 and -scale.
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        mapping_type: SYMMETRIC, zero in the middle, SYMMETRIC_NO_CLIPPING_ERR or ASYMMETRIC.
        scale_rule: how the range of a group is chosen.
        layout: how weights are stored in memory; `PackedLayout()` packs codes to their true size.
        use_hqq: short for `scale_rule=HQQRule()`.

    Raises:
        ValueError: the dtype is not one of these, or use_hqq is given with another scale rule.
    """

    dtype: QDType | torch.dtype | str
    group_size: int = 64
    mapping_type: MappingType = MappingType.SYMMETRIC
    scale_rule: ScaleRule = MinMaxRule()
    layout: Layout = PackedLayout()
    use_hqq: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", sub_byte_type(self.dtype, "int", self.name))
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        group = PerGroup(self.group_size)
        rule = rule_or_hqq(self.scale_rule, self.use_hqq, self.name)
        weight = QuantSpec(qdtype(self.dtype), group, self.mapping_type, scale_rule=rule)
        return LinearSpec(weight, layout=self.layout)


intx_weight_only = IntxWeightOnly
