"""int8 weights and int8 activations, accumulated in int32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import Granularity, LinearSpec, MappingType, PerAxis, PerRow, PerToken, QuantSpec, qdtype
from ..recipe import WeightRecipe, register_recipe


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
