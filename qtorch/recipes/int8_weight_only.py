"""int8 weights, one scale per output channel; activations stay in floating point."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import LinearSpec, MinMaxRule, PerRow, QuantSpec, ScaleRule, qdtype
from ..recipe import WeightRecipe, register_recipe


@register_recipe("int8_weight_only")
@dataclass(frozen=True)
class Int8WeightOnly(WeightRecipe):
    """Weights in symmetric int8, codes in [-127, 127], with one fp32 scale per output channel: a quarter of fp32.

    Args:
        scale_rule: how the range of a channel is chosen.
        scale_dtype: dtype of the scales of the weight; None is fp32. That of the model, so that engines which round
            scales to it compute with the same numbers (see docs/guides/vllm.md).
    """

    scale_rule: ScaleRule = MinMaxRule()
    scale_dtype: torch.dtype | None = None

    def linear_spec(self) -> LinearSpec:
        rule, scale_dtype = self.scale_rule, self.scale_dtype
        return LinearSpec(QuantSpec(qdtype("int8"), PerRow(), scale_rule=rule, scale_dtype=scale_dtype, quant_min=-127))


int8_weight_only = Int8WeightOnly
