"""int8 weights, one scale per output channel; activations stay in floating point."""

from __future__ import annotations

from dataclasses import dataclass

from ..primitives import LinearSpec, MinMaxRule, PerRow, QuantSpec, ScaleRule, qdtype
from ..recipe import WeightRecipe, register_recipe


@register_recipe("int8_weight_only")
@dataclass(frozen=True)
class Int8WeightOnly(WeightRecipe):
    """Weights in symmetric int8, codes in [-127, 127], with one fp32 scale per output channel: a quarter of fp32.

    Args:
        scale_rule: how the range of a channel is chosen.
    """

    scale_rule: ScaleRule = MinMaxRule()

    def linear_spec(self) -> LinearSpec:
        return LinearSpec(QuantSpec(qdtype("int8"), PerRow(), scale_rule=self.scale_rule, quant_min=-127))


int8_weight_only = Int8WeightOnly
