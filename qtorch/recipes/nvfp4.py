"""NVFP4: 4-bit floating-point elements in blocks of 16 with an e4m3 scale each, and an fp32 scale for the tensor.

    w = e2m1 code * e4m3 scale of the block * scale of the tensor,    scale of the tensor = absmax / (6 * 448)

so the block with the largest element has the largest e4m3 scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..dtypes import PackedLayout
from ..primitives import LinearSpec, PerGroup, PerTensor, QuantSpec, ZeroPointDomain, qdtype
from ..recipe import WeightRecipe, register_recipe

BLOCK = 16


def nvfp4_spec() -> QuantSpec:
    """Spec of elements in e2m1 with scales in e4m3."""
    none = ZeroPointDomain.NONE
    scale_spec = QuantSpec(qdtype(torch.float8_e4m3fn), PerTensor(), zero_point_domain=none)
    return QuantSpec(qdtype("float4_e2m1"), PerGroup(BLOCK), zero_point_domain=none, scale_spec=scale_spec)


@register_recipe("nvfp4_weight_only")
@dataclass(frozen=True)
class Nvfp4WeightOnly(WeightRecipe):
    """Weights in NVFP4, 4.5 bits per weight."""

    quantizes_activations: ClassVar[bool] = False

    def linear_spec(self) -> LinearSpec:
        activation = nvfp4_spec() if self.quantizes_activations else None
        return LinearSpec(nvfp4_spec(), activation, layout=PackedLayout())


@register_recipe("nvfp4_dynamic_activation_nvfp4_weight")
@dataclass(frozen=True)
class Nvfp4DynamicActivationNvfp4Weight(Nvfp4WeightOnly):
    """Weights and activations in NVFP4, with activation scales computed on each call.

    The fp32 scale of an activation is computed from the whole batch.
    """

    quantizes_activations = True


nvfp4_weight_only = Nvfp4WeightOnly
nvfp4_dynamic_activation_nvfp4_weight = Nvfp4DynamicActivationNvfp4Weight
