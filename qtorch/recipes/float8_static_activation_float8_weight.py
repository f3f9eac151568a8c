"""float8 weights and float8 activations with a fixed scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import Granularity, LinearSpec, PerTensor, QuantSpec, ZeroPointDomain
from ..recipe import register_recipe
from .float8_weight_only import float8_type, row_or_tensor
from .static_activation import StaticActivationRecipe


@register_recipe("float8_static_activation_float8_weight")
@dataclass(frozen=True)
class Float8StaticActivationFloat8Weight(StaticActivationRecipe):
    """Weights and activations in float8, with one fixed scale for the activations; see `StaticActivationRecipe`.

    Args:
        scale: of the activation: its largest magnitude divided by the largest code, 448 for float8_e4m3fn; None:
            from data.
        activation_dtype, weight_dtype: float8 dtypes of torch.
        granularity: of the weight: `PerTensor()`, or `PerRow()`, a scale per output channel.
        scale_dtype: dtype of the scales of the weight; None is fp32. That of the model, so that engines which round
            scales to it compute with the same numbers (see docs/guides/vllm.md).

    Raises:
        TypeError, ValueError: the scale is not a positive number, or a dtype or the granularity is not one of these.
    """

    activation_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = PerTensor()
    scale_dtype: torch.dtype | None = None

    def linear_spec(self) -> LinearSpec:
        none = ZeroPointDomain.NONE
        granularity = row_or_tensor(self.granularity, self.name)
        dtype = float8_type(self.weight_dtype, self.name)
        weight = QuantSpec(dtype, granularity, zero_point_domain=none, scale_dtype=self.scale_dtype)
        activation = QuantSpec(float8_type(self.activation_dtype, self.name), PerTensor(), zero_point_domain=none)
        return LinearSpec(weight, activation, static=True)


float8_static_activation_float8_weight = Float8StaticActivationFloat8Weight
