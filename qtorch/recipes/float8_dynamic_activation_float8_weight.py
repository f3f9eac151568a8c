"""float8 weights and float8 activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import Granularity, LinearSpec, PerRow, QuantSpec, ZeroPointDomain
from ..recipe import WeightRecipe, register_recipe
from .float8_weight_only import float8_type, row_or_tensor


@register_recipe("float8_dynamic_activation_float8_weight")
@dataclass(frozen=True)
class Float8DynamicActivationFloat8Weight(WeightRecipe):
    """Weights and activations in float8, the scales of the activations computed on each call.

    Args:
        granularity: `PerRow()`, a scale per output channel and per token; `PerTensor()`, one of each.
        activation_dtype, weight_dtype: float8 dtypes of torch.
        scale_dtype: dtype of the scales of the weight; None is fp32. That of the model, so that engines which round
            scales to it compute with the same numbers (see docs/guides/vllm.md).

    Raises:
        ValueError: the granularity or a dtype is not one of these.
    """

    granularity: Granularity = PerRow()
    activation_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn
    scale_dtype: torch.dtype | None = None

    def linear_spec(self) -> LinearSpec:
        none = ZeroPointDomain.NONE
        granularity = row_or_tensor(self.granularity, self.name)
        dtype = float8_type(self.weight_dtype, self.name)
        weight = QuantSpec(dtype, granularity, zero_point_domain=none, scale_dtype=self.scale_dtype)
        activation = QuantSpec(float8_type(self.activation_dtype, self.name), granularity, zero_point_domain=none)
        return LinearSpec(weight, activation)


float8_dynamic_activation_float8_weight = Float8DynamicActivationFloat8Weight
