"""int8 weights, 2:4 sparse, and int8 activations, accumulated in int32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..dtypes import SemiSparseLayout
from ..primitives import LinearSpec, mask_2_4
from ..recipe import register_recipe
from .int8_dynamic_activation_int8_weight import Int8DynamicActivationInt8Weight


@register_recipe("int8_dynamic_activation_int8_semi_sparse_weight")
@dataclass(frozen=True)
class Int8DynamicActivationInt8SemiSparseWeight(Int8DynamicActivationInt8Weight):
    """`int8_dynamic_activation_int8_weight` with weights pruned to 2:4 and packed at 5 bits per element.

    The two largest magnitudes of each four elements along a row are kept, and scales are chosen for those. A dense
    weight becomes inaccurate (SQNR of 7 to 9 dB); one that was trained to be 2:4 sparse loses nothing.

    Args:
        act_mapping_type: SYMMETRIC, codes in [-127, 127]; ASYMMETRIC, [-128, 127] with a zero point per token.
    """

    prunes: ClassVar[bool] = True

    def linear_spec(self) -> LinearSpec:
        return replace(super().linear_spec(), layout=SemiSparseLayout())

    def kept(self, importance: Tensor) -> Tensor:
        return mask_2_4(importance)


int8_dynamic_activation_int8_semi_sparse_weight = Int8DynamicActivationInt8SemiSparseWeight
