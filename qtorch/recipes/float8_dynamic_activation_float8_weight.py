"""float8 weights and float8 activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import Granularity, LinearSpec, PerRow, PerTensor, QuantSpec, ZeroPointDomain, qdtype
from ..quantize_api import WeightRecipe, register_recipe


@register_recipe("float8_dynamic_activation_float8_weight")
@dataclass(frozen=True)
class Float8DynamicActivationFloat8Weight(WeightRecipe):
    """Weights and activations in float8, the scales of the activations computed on each call.

    Args:
        granularity: `PerRow()`, a scale per output channel and per token; `PerTensor()`, one of each.
        activation_dtype, weight_dtype: float8 dtypes of torch.
    """

    granularity: Granularity = PerRow()
    activation_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if not isinstance(self.granularity, PerRow | PerTensor):
            raise ValueError(f"{self.name}: granularity is PerRow() or PerTensor(), got {self.granularity}")

    def linear_spec(self) -> LinearSpec:
        none = ZeroPointDomain.NONE
        weight = QuantSpec(qdtype(self.weight_dtype), self.granularity, zero_point_domain=none)
        activation = QuantSpec(qdtype(self.activation_dtype), self.granularity, zero_point_domain=none)
        return LinearSpec(weight, activation)


float8_dynamic_activation_float8_weight = Float8DynamicActivationFloat8Weight
