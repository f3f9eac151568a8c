"""Recipes with static activations, whose scale is fixed instead of computed on each call."""

from dataclasses import dataclass
from typing import Any

import torch

from ..dtypes import AffineQuantizedTensor
from ..primitives import Granularity, LinearSpec, MappingType, PerTensor
from .base import WeightRecipe, register_recipe
from .float8 import check_row_or_tensor, float8_spec
from .integer import int8_activation, int8_rows


@dataclass(frozen=True)
class StaticActivationRecipe(WeightRecipe):
    """Activations quantized with a fixed scale; values beyond the range of the codes are clipped.

    Layers need different scales: leave the scale out, and `calibrated` or `observed` choose one for each from data.

    Args:
        scale: of the activation: its largest expected magnitude divided by the largest code; a number, or a tensor of
            one element. None: from data.

    Raises:
        TypeError: `scale` is neither.
        ValueError: `scale` is not positive, finite and a normal number in fp32.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        scale: Any = self.scale
        if isinstance(scale, torch.Tensor) and scale.numel() == 1 and not scale.is_meta:
            scale = scale.item()
        if scale is not None:
            if isinstance(scale, torch.Tensor):
                got = f"a tensor of shape {tuple(scale.shape)}"
                raise TypeError(f"{self.name}: scale takes a number or a tensor of one element, got {got}")
            # Numbers that are not normal have no finite inverse.
            if not torch.finfo(torch.float32).tiny <= float(scale) <= torch.finfo(torch.float32).max:
                raise ValueError(f"{self.name}: scale is positive, finite and a normal number in fp32, got {scale}")
            object.__setattr__(self, "scale", float(scale))
        super().__post_init__()

    def act_scale(self, device: torch.device) -> torch.Tensor | None:
        return None if self.scale is None else torch.full((1, 1), self.scale, dtype=torch.float32, device=device)

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        self.check_complete()
        return AffineQuantizedTensor.from_float(weight, self.linear_spec(), self.act_scale(weight.device))


@register_recipe("float8_static_activation_float8_weight")
class Float8StaticActivationFloat8Weight(StaticActivationRecipe):
    """Weights and activations in float8, with one fixed scale for the activations; see `StaticActivationRecipe`.

    Args:
        scale: of the activation: its largest magnitude divided by the largest code, 448 for float8_e4m3fn; None:
            from data.
        activation_dtype, weight_dtype: float8 dtypes of torch.
        granularity: of the weight: `PerTensor()`, or `PerRow()`, a scale per output channel.
        scale_dtype: dtype of the scales of the weight; None is fp32. See `int8_weight_only`.

    Raises:
        TypeError, ValueError: the scale is not a positive number, or a dtype or the granularity is not one of these.
    """

    activation_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = PerTensor()
    scale_dtype: torch.dtype | None = None

    def linear_spec(self) -> LinearSpec:
        check_row_or_tensor(self, self.granularity)
        weight = float8_spec(self, self.weight_dtype, self.granularity, self.scale_dtype)
        return LinearSpec(weight, float8_spec(self, self.activation_dtype, PerTensor()), static=True)


@register_recipe("int8_static_activation_int8_weight")
class Int8StaticActivationInt8Weight(StaticActivationRecipe):
    """Weights in int8 per output channel, activations in int8 with one fixed scale; see `StaticActivationRecipe`.

    Codes of both are in [-127, 127]; of asymmetric activations in [-128, 127].

    Args:
        scale: of the activation: its largest magnitude divided by 127; None: from data.
        act_mapping_type: `MappingType` of the activation. ASYMMETRIC, whose zero point only data can tell, is up to a
            bit more accurate where ranges are one-sided, behind a ReLU or GELU.
        scale_dtype: dtype of the scales of the weight; None is fp32. See `int8_weight_only`.

    Raises:
        TypeError, ValueError: the scale is not a positive number.
        ValueError: a scale together with an asymmetric mapping.
    """

    scale_dtype: torch.dtype | None = None
    act_mapping_type: MappingType = MappingType.SYMMETRIC

    def __post_init__(self) -> None:
        if self.act_mapping_type is MappingType.ASYMMETRIC and self.scale is not None:
            raise ValueError(f"{self.name}: an asymmetric activation has a zero point, chosen by data; leave scale out")
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        activation = int8_activation(PerTensor(), self.act_mapping_type)
        return LinearSpec(int8_rows(self.scale_dtype), activation, static=True)
