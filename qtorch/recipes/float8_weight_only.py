"""float8 weights, one scale per output channel; activations stay in their floating-point dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import Granularity, LinearSpec, PerRow, QuantSpec, ZeroPointDomain, qdtype
from ..quantize_api import WeightRecipe, register_recipe


@register_recipe("float8_weight_only")
@dataclass(frozen=True)
class Float8WeightOnly(WeightRecipe):
    """Weights in float8, the largest code at the largest magnitude of a channel.

    Args:
        dtype: a float8 dtype of torch.
        granularity: which elements share a scale.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = PerRow()

    def linear_spec(self) -> LinearSpec:
        return LinearSpec(QuantSpec(qdtype(self.dtype), self.granularity, zero_point_domain=ZeroPointDomain.NONE))


float8_weight_only = Float8WeightOnly
