"""int4 weights in groups and float8 activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dtypes import Layout, PackedLayout
from ..primitives import LinearSpec, PerGroup, PerRow, QuantSpec, ZeroPointDomain, qdtype
from ..recipe import WeightRecipe, register_recipe
from .float8_weight_only import float8_type


@register_recipe("float8_dynamic_activation_int4_weight")
@dataclass(frozen=True)
class Float8DynamicActivationInt4Weight(WeightRecipe):
    """Weights in symmetric int4 per group of input channels, activations in float8 per token.

    The scales of the activations are computed on each call.

    Args:
        group_size: elements of a row that share a scale; -1 for the whole row. It must divide the row.
        activation_dtype: a float8 dtype of torch.
        layout: how weights are stored in memory.

    Raises:
        ValueError: the group size is below 1 and not -1, or the dtype is not float8.
    """

    group_size: int = 128
    activation_dtype: torch.dtype = torch.float8_e4m3fn
    layout: Layout = PackedLayout()

    def linear_spec(self) -> LinearSpec:
        weight = QuantSpec(qdtype("int4"), PerGroup(self.group_size))
        activation = QuantSpec(
            float8_type(self.activation_dtype, self.name), PerRow(), zero_point_domain=ZeroPointDomain.NONE
        )
        return LinearSpec(weight, activation, layout=self.layout)


float8_dynamic_activation_int4_weight = Float8DynamicActivationInt4Weight
