"""int8 weights, one scale per output channel or per group; activations stay in floating point."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import LinearSpec, MinMaxRule, PerGroup, PerRow, QuantSpec, ScaleRule, qdtype
from ..recipe import WeightRecipe, register_recipe


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
