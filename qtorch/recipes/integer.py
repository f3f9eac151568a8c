"""int8 weights, one scale per output channel or per group; activations stay in floating point."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dtypes import Layout, PackedLayout
from ..primitives import (
    Granularity,
    HQQRule,
    LinearSpec,
    MappingType,
    MinMaxRule,
    PerAxis,
    PerGroup,
    PerRow,
    PerToken,
    QDType,
    QuantSpec,
    ScaleRule,
    ZeroPointDomain,
    qdtype,
)
from .base import WeightRecipe, register_recipe


@register_recipe("int8_weight_only")
@dataclass(frozen=True)
class Int8WeightOnly(WeightRecipe):
    """Weights in symmetric int8, codes in [-127, 127], with one fp32 scale per output channel: a quarter of fp32.

    Args:
        scale_rule: how the range of a channel is chosen.
        group_size: elements of a row that share a scale, which then has the dtype of the weight; None for the whole
            row. It must divide the row.
        scale_dtype: dtype of the scales of the weight; None is fp32 for rows. That of the model, so that engines which
            round scales to it compute with the same numbers (see docs/guides/vllm.md).
    """

    scale_rule: ScaleRule = MinMaxRule()
    group_size: int | None = None
    scale_dtype: torch.dtype | None = None

    def linear_spec(self) -> LinearSpec:
        blocks = PerRow() if self.group_size is None else PerGroup(self.group_size)
        rule, scale_dtype = self.scale_rule, self.scale_dtype
        return LinearSpec(QuantSpec(qdtype("int8"), blocks, scale_rule=rule, scale_dtype=scale_dtype, quant_min=-127))


int8_weight_only = Int8WeightOnly


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


@register_recipe("int4_weight_only")
@dataclass(frozen=True)
class Int4WeightOnly(WeightRecipe):
    """Weights in asymmetric 4-bit codes, with a scale and a zero point per group of input channels.

    Args:
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        zero_point_domain: INT, zero points are codes; FLOAT, the convention of the tinygemm kernels; see
            `ZeroPointDomain` for others.
        scale_rule: how the range of a group is chosen.
        layout: how weights are stored in memory: `PackedLayout()`, half a byte per code; `TensorCoreTiledLayout()`, the
            same for the tinygemm kernels, which needs the FLOAT domain and groups of 32, 64, 128 or 256.
        use_hqq: short for `scale_rule=HQQRule()`.

    Raises:
        ValueError: the layout cannot hold such weights, or use_hqq is given with another scale rule.
    """

    group_size: int = 128
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT
    scale_rule: ScaleRule = MinMaxRule()
    layout: Layout = PackedLayout()
    use_hqq: bool = False

    def linear_spec(self) -> LinearSpec:
        rule = rule_or_hqq(self.scale_rule, self.use_hqq, self.name)
        return unsigned_spec(qdtype("uint4"), self.group_size, self.zero_point_domain, rule, self.layout)


int4_weight_only = Int4WeightOnly


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


@register_recipe("int8_dynamic_activation_int8_weight")
@dataclass(frozen=True)
class Int8DynamicActivationInt8Weight(WeightRecipe):
    """Weights in int8 per output channel, activations in int8 per token, their scales computed on each call.

    Args:
        act_mapping_type: SYMMETRIC, codes in [-127, 127]; ASYMMETRIC, [-128, 127] with a zero point per token.
        scale_dtype: dtype of the scales of the weight; None is fp32. That of the model, so that engines which round
            scales to it compute with the same numbers (see docs/guides/vllm.md).
        act_granularity: PerToken(), for a convolution a scale for each of its windows; or PerAxis(0), for a convolution
            a scale for each image: several times as fast, and up to a bit less accurate. To a linear layer they are
            the same.

    Raises:
        ValueError: `act_granularity` is another one.
    """

    act_mapping_type: MappingType = MappingType.SYMMETRIC
    scale_dtype: torch.dtype | None = None
    act_granularity: Granularity = PerToken()

    def __post_init__(self) -> None:
        if self.act_granularity not in (PerToken(), PerAxis(0)):
            raise ValueError(f"{self.name}: act_granularity is PerToken() or PerAxis(0), got {self.act_granularity!r}")
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        symmetric = self.act_mapping_type is not MappingType.ASYMMETRIC
        weight = QuantSpec(qdtype("int8"), PerRow(), scale_dtype=self.scale_dtype, quant_min=-127)
        lowest = -127 if symmetric else None
        activation = QuantSpec(qdtype("int8"), self.act_granularity, self.act_mapping_type, quant_min=lowest)
        return LinearSpec(weight, activation)


int8_dynamic_activation_int8_weight = Int8DynamicActivationInt8Weight


@register_recipe("int8_dynamic_activation_int4_weight")
@dataclass(frozen=True)
class Int8DynamicActivationInt4Weight(WeightRecipe):
    """Weights in 4 bits per group of input channels, activations in int8 per token, scales computed on each call.

    Args:
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        mapping_type: of the weights.
        act_mapping_type: of the activations; SYMMETRIC uses codes in [-127, 127].
        scale_rule: how the range of a weight group is chosen.
        layout: how weights are stored in memory.
    """

    group_size: int = 32
    mapping_type: MappingType = MappingType.SYMMETRIC
    act_mapping_type: MappingType = MappingType.ASYMMETRIC
    scale_rule: ScaleRule = MinMaxRule()
    layout: Layout = PackedLayout()

    def linear_spec(self) -> LinearSpec:
        group = PerGroup(self.group_size)
        weight = QuantSpec(qdtype("int4"), group, self.mapping_type, scale_rule=self.scale_rule)
        lowest = None if self.act_mapping_type is MappingType.ASYMMETRIC else -127
        activation = QuantSpec(qdtype("int8"), PerToken(), self.act_mapping_type, quant_min=lowest)
        return LinearSpec(weight, activation, layout=self.layout)


int8_dynamic_activation_int4_weight = Int8DynamicActivationInt4Weight
