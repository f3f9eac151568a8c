"""int4 weights in groups and int8 activations, accumulated in int32 within a group."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import Layout, PackedLayout
from ..primitives import LinearSpec, MappingType, MinMaxRule, PerGroup, PerToken, QuantSpec, ScaleRule, qdtype
from ..recipe import WeightRecipe, register_recipe


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
