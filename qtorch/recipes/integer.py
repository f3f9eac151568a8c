"""Integer weights, with activations in floating point or in int8."""

from dataclasses import replace
from typing import ClassVar

import torch

from ..dtypes import Layout, PackedLayout
from ..primitives import HQQRule, LinearSpec, MappingType, MinMaxRule, QuantSpec, ScaleRule, ZeroPointDomain
from ..primitives.granularity import Granularity, PerAxis, PerGroup, PerRow, PerToken
from ..primitives.qdtype import QDType, qdtype
from .base import WeightRecipe, register_recipe


def int8_rows(scale_dtype: torch.dtype | None) -> QuantSpec:
    """Spec of weights in symmetric int8 per output channel."""
    return QuantSpec(qdtype("int8"), PerRow(), scale_dtype=scale_dtype, quant_min=-127)


def double_quantized(domain: ZeroPointDomain = ZeroPointDomain.INT) -> QuantSpec:
    """Spec of scales that are quantized themselves: int8 in groups of 256 of them, as those of NF4. Zero points of the
    OFFSET domain are quantized too, by multiples of one number a group."""
    of_scales = ZeroPointDomain.NONE if domain is ZeroPointDomain.OFFSET else ZeroPointDomain.INT
    return QuantSpec(qdtype("int8"), PerGroup(256), zero_point_domain=of_scales, quant_min=-127)


def int8_activation(granularity: Granularity, mapping: MappingType) -> QuantSpec:
    """Spec of activations in int8: codes in [-127, 127], asymmetric ones in [-128, 127]."""
    lowest = None if mapping is MappingType.ASYMMETRIC else -127
    return QuantSpec(qdtype("int8"), granularity, mapping, quant_min=lowest)


@register_recipe("int8_weight_only")
class Int8WeightOnly(WeightRecipe):
    """Weights in symmetric int8, codes in [-127, 127], with one fp32 scale per output channel: a quarter of fp32.

    Args:
        scale_rule: how the range of a channel is chosen.
        group_size: elements of a row that share a scale, which then has the dtype of the weight; None for the whole
            row. It must divide the row.
        scale_dtype: dtype of the scales of the weight; None is fp32 for rows. That of the model, so that engines which
            round scales to it compute with the same numbers (see docs/guides/vllm.md).
        double_quantize: quantize the scales to int8 in blocks of 256: 8.25 bits per weight in groups of 32.
    """

    scale_rule: ScaleRule = MinMaxRule()
    group_size: int | None = None
    scale_dtype: torch.dtype | None = None
    double_quantize: bool = False

    def linear_spec(self) -> LinearSpec:
        blocks = PerRow() if self.group_size is None else PerGroup(self.group_size)
        scales = double_quantized() if self.double_quantize else None
        rule, scale_dtype = self.scale_rule, self.scale_dtype
        spec = QuantSpec(qdtype("int8"), blocks, scale_rule=rule, scale_dtype=scale_dtype, quant_min=-127)
        return LinearSpec(replace(spec, scale_spec=scales))


class _Grouped(WeightRecipe):
    """Weights with a scale per group of input channels, by the fields that recipes declare."""

    group_size: int
    scale_rule: ScaleRule
    layout: Layout
    use_hqq: bool
    double_quantize: bool

    def spec_of(self, dtype: QDType, mapping: MappingType, domain: ZeroPointDomain = ZeroPointDomain.INT) -> LinearSpec:
        """Spec of these codes. In domains that add zero points, the range of a group need not include zero."""
        if self.use_hqq and self.scale_rule not in (MinMaxRule(), HQQRule()):
            raise ValueError(f"{self.name}: use_hqq=True is scale_rule=HQQRule(), got {self.scale_rule!r} too")
        rule = HQQRule() if self.use_hqq else self.scale_rule
        if self.double_quantize and domain is ZeroPointDomain.FLOAT:
            raise ValueError(f"{self.name}: double_quantize=True takes INT or OFFSET zero points, got {domain}")
        group, preserve_zero = PerGroup(self.group_size), not domain.adds_zero_point
        scales = double_quantized(domain) if self.double_quantize else None
        spec = QuantSpec(dtype, group, mapping, domain, rule, preserve_zero=preserve_zero, scale_spec=scales)
        return LinearSpec(spec, layout=self.layout)


class _SubByte(_Grouped):
    """Weights in a `dtype` of 1 to 7 bits."""

    kind: ClassVar[str]
    dtype: QDType | torch.dtype | str

    def __post_init__(self) -> None:
        kind, dtype = self.kind, self.dtype
        if isinstance(dtype, int) and not isinstance(dtype, bool):
            hint = f": write torch.{kind}{dtype}" if 1 <= dtype <= 7 else ""
            raise TypeError(f"{self.name} takes a dtype, torch.{kind}1 to torch.{kind}7, got {dtype}{hint}")
        found = qdtype(dtype)
        if found.name not in [f"{kind}{bits}" for bits in range(1, 8)]:
            raise ValueError(f"{self.name} takes {kind}1 to {kind}7, got {found.name}")
        object.__setattr__(self, "dtype", found)
        super().__post_init__()


@register_recipe("intx_weight_only")
class IntxWeightOnly(_SubByte):
    """Weights in 1 to 7 bits, with a scale per group of input channels, and a zero point if asymmetric.

    Args:
        dtype: ``torch.int1`` to ``torch.int7``, or their names. Symmetric int1 has the two values 0 and -scale.
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        mapping_type: SYMMETRIC, zero in the middle, SYMMETRIC_NO_CLIPPING_ERR or ASYMMETRIC.
        scale_rule: how the range of a group is chosen.
        layout: how weights are stored in memory; `PackedLayout()` packs codes to their true size.
        use_hqq: short for `scale_rule=HQQRule()`.
        double_quantize: quantize the scales to int8 in blocks of 256: a quarter of a bit per weight in groups of 32.

    Raises:
        ValueError: the dtype is not one of these, use_hqq is given with another scale rule, or double_quantize with
            FLOAT zero points.
    """

    kind = "int"
    dtype: QDType | torch.dtype | str
    group_size: int = 64
    mapping_type: MappingType = MappingType.SYMMETRIC
    scale_rule: ScaleRule = MinMaxRule()
    layout: Layout = PackedLayout()
    use_hqq: bool = False
    double_quantize: bool = False

    def linear_spec(self) -> LinearSpec:
        return self.spec_of(qdtype(self.dtype), self.mapping_type)


@register_recipe("int4_weight_only")
class Int4WeightOnly(_Grouped):
    """Weights in asymmetric 4-bit codes, with a scale and a zero point per group of input channels.

    Args:
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        zero_point_domain: INT, zero points are codes; FLOAT, the convention of the tinygemm kernels; see
            `ZeroPointDomain` for others.
        scale_rule: how the range of a group is chosen.
        layout: how weights are stored in memory: `PackedLayout()`, half a byte per code; `TensorCoreTiledLayout()`, the
            same for the tinygemm kernels, which needs the FLOAT domain and groups of 32, 64, 128 or 256.
        use_hqq: short for `scale_rule=HQQRule()`.
        double_quantize: quantize the scales to int8 in blocks of 256: 4.5 bits per weight in groups of 32, with a byte
            for the zero point.

    Raises:
        ValueError: the layout cannot hold such weights, use_hqq is given with another scale rule, or double_quantize
            with FLOAT zero points.
    """

    group_size: int = 128
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT
    scale_rule: ScaleRule = MinMaxRule()
    layout: Layout = PackedLayout()
    use_hqq: bool = False
    double_quantize: bool = False

    def linear_spec(self) -> LinearSpec:
        return self.spec_of(qdtype("uint4"), MappingType.ASYMMETRIC, self.zero_point_domain)


@register_recipe("uintx_weight_only")
class UIntxWeightOnly(_SubByte):
    """Weights in 1 to 7 bits, asymmetric, with a scale and a zero point per group of input channels.

    Args:
        dtype: ``torch.uint1`` to ``torch.uint7``, or their names.
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        scale_rule: how the range of a group is chosen.
        layout: how weights are stored in memory; `PackedLayout()` packs codes to their true size.
        zero_point_domain: INT, zero points are codes; FLOAT or OFFSET, real numbers, so the range of a group need not
            include 0.
        use_hqq: short for `scale_rule=HQQRule()`.
        double_quantize: quantize the scales to int8 in blocks of 256: a quarter of a bit per weight in groups of 32.

    Raises:
        ValueError: the dtype is not one of these, use_hqq is given with another scale rule, or double_quantize with
            FLOAT zero points.
    """

    kind = "uint"
    dtype: QDType | torch.dtype | str
    group_size: int = 64
    scale_rule: ScaleRule = MinMaxRule()
    layout: Layout = PackedLayout()
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT
    use_hqq: bool = False
    double_quantize: bool = False

    def linear_spec(self) -> LinearSpec:
        return self.spec_of(qdtype(self.dtype), MappingType.ASYMMETRIC, self.zero_point_domain)


@register_recipe("int8_dynamic_activation_int8_weight")
class Int8DynamicActivationInt8Weight(WeightRecipe):
    """Weights in int8 per output channel, activations in int8 per token, their scales computed on each call.

    Args:
        act_mapping_type: SYMMETRIC, codes in [-127, 127]; ASYMMETRIC, [-128, 127] with a zero point per token.
        scale_dtype: dtype of the scales of the weight; None is fp32. See `int8_weight_only`.
        act_granularity: PerToken(), for a convolution a scale for each of its windows; or PerAxis(0), for a convolution
            a scale for each image: several times as fast, and up to a bit less accurate. To a linear layer they are
            the same.

    Raises:
        ValueError: `act_granularity` is another one.
    """

    act_mapping_type: MappingType = MappingType.SYMMETRIC
    scale_dtype: torch.dtype | None = None
    act_granularity: Granularity = PerToken()

    def linear_spec(self) -> LinearSpec:
        if self.act_granularity not in (PerToken(), PerAxis(0)):
            raise ValueError(f"{self.name}: act_granularity is PerToken() or PerAxis(0), got {self.act_granularity!r}")
        return LinearSpec(int8_rows(self.scale_dtype), int8_activation(self.act_granularity, self.act_mapping_type))


@register_recipe("int8_dynamic_activation_int4_weight")
class Int8DynamicActivationInt4Weight(WeightRecipe):
    """Weights in 4 bits per group of input channels, activations in int8 per token, scales computed on each call.

    Args:
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        mapping_type: of the weights.
        act_mapping_type: of the activations; SYMMETRIC uses codes in [-127, 127].
        scale_rule: how the range of a weight group is chosen.
        layout: how weights are stored in memory.
        double_quantize: quantize the scales of the weight to int8 in blocks of 256.
    """

    group_size: int = 32
    mapping_type: MappingType = MappingType.SYMMETRIC
    act_mapping_type: MappingType = MappingType.ASYMMETRIC
    scale_rule: ScaleRule = MinMaxRule()
    layout: Layout = PackedLayout()
    double_quantize: bool = False

    def linear_spec(self) -> LinearSpec:
        weight = QuantSpec(qdtype("int4"), PerGroup(self.group_size), self.mapping_type, scale_rule=self.scale_rule)
        weight = replace(weight, scale_spec=double_quantized() if self.double_quantize else None)
        return LinearSpec(weight, int8_activation(PerToken(), self.act_mapping_type), layout=self.layout)
