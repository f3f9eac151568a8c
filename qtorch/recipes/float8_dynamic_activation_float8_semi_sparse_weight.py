"""float8 weights, 2:4 sparse, and float8 activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..dtypes import SemiSparseLayout
from ..primitives import Granularity, LinearSpec, PerRow, PerTensor, QuantSpec, ZeroPointDomain, mask_2_4, qdtype
from ..recipe import WeightRecipe, register_recipe


@register_recipe("float8_dynamic_activation_float8_semi_sparse_weight")
@dataclass(frozen=True)
class Float8DynamicActivationFloat8SemiSparseWeight(WeightRecipe):
    """Weights and activations in float8_e4m3fn, the weights pruned to 2:4 and packed at 5 bits per element.

    Weights are pruned as by `int8_dynamic_activation_int8_semi_sparse_weight`.

    Args:
        granularity: `PerRow()`, a scale per output channel and per token; `PerTensor()`, one of each.

    Raises:
        ValueError: the granularity is neither.
    """

    prunes: ClassVar[bool] = True

    granularity: Granularity = PerRow()

    def __post_init__(self) -> None:
        if not isinstance(self.granularity, PerRow | PerTensor):
            raise ValueError(f"{self.name}: granularity is PerRow() or PerTensor(), got {self.granularity}")
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        codes = QuantSpec(qdtype("float8_e4m3fn"), self.granularity, zero_point_domain=ZeroPointDomain.NONE)
        return LinearSpec(codes, codes, layout=SemiSparseLayout())

    def kept(self, importance: Tensor) -> Tensor:
        return mask_2_4(importance)


float8_dynamic_activation_float8_semi_sparse_weight = Float8DynamicActivationFloat8SemiSparseWeight
