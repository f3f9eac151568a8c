"""The block formats of the OCP Microscaling specification v1.0: blocks of 32 along a row, with power-of-two scales."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch

from ..dtypes import PackedLayout
from ..primitives import LinearSpec, PerGroup, QDType, QuantSpec, RotatedSpec, ZeroPointDomain, qdtype
from ..recipe import WeightRecipe, register_recipe

BLOCK = 32


def mx_spec(dtype: QDType) -> QuantSpec:
    """Spec of elements of `dtype` in blocks of 32 that share an e8m0 scale."""
    none = ZeroPointDomain.NONE
    return QuantSpec(dtype, PerGroup(BLOCK), zero_point_domain=none, scale_dtype=torch.float8_e8m0fnu)


class _Mx(WeightRecipe):
    element: ClassVar[str]
    quantizes_activations: ClassVar[bool] = False

    def linear_spec(self) -> LinearSpec:
        spec = mx_spec(qdtype(self.element))
        layout = PackedLayout() if spec.dtype.bits < 8 else None
        return LinearSpec(spec, spec if self.quantizes_activations else None, layout=layout)


@register_recipe("mxfp8_weight_only")
@dataclass(frozen=True)
class Mxfp8WeightOnly(_Mx):
    """Weights in MXFP8 (e4m3)."""

    element = "float8_e4m3fn"


@register_recipe("mxfp6_weight_only")
@dataclass(frozen=True)
class Mxfp6WeightOnly(_Mx):
    """Weights in MXFP6 (e2m3)."""

    element = "float6_e2m3"


@register_recipe("mxfp4_weight_only")
@dataclass(frozen=True)
class Mxfp4WeightOnly(_Mx):
    """Weights in MXFP4 (e2m1)."""

    element = "float4_e2m1"


@register_recipe("mxfp8_dynamic_activation_mxfp8_weight")
@dataclass(frozen=True)
class Mxfp8DynamicActivationMxfp8Weight(Mxfp8WeightOnly):
    """Weights and activations in MXFP8 (e4m3), with activation scales computed on each call."""

    quantizes_activations = True


@register_recipe("mxfp4_dynamic_activation_mxfp4_weight")
@dataclass(frozen=True)
class Mxfp4DynamicActivationMxfp4Weight(Mxfp4WeightOnly):
    """Weights and activations in MXFP4 (e2m1), with activation scales computed on each call.

    Args:
        rotated: multiply each block of 32 weights, and of the activation on each call, by a Hadamard matrix before it
            is quantized (see `RotatedSpec`): outliers are spread over their block.
    """

    quantizes_activations = True
    rotated: bool = False

    def linear_spec(self) -> LinearSpec:
        spec = super().linear_spec()
        if not self.rotated:
            return spec
        rotated = RotatedSpec(**{f.name: getattr(spec.weight, f.name) for f in fields(spec.weight)})
        return replace(spec, weight=rotated, activation=rotated)


mxfp8_weight_only = Mxfp8WeightOnly
mxfp6_weight_only = Mxfp6WeightOnly
mxfp4_weight_only = Mxfp4WeightOnly
mxfp8_dynamic_activation_mxfp8_weight = Mxfp8DynamicActivationMxfp8Weight
mxfp4_dynamic_activation_mxfp4_weight = Mxfp4DynamicActivationMxfp4Weight
