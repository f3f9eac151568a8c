"""int8 weights and int8 activations with a fixed scale, accumulated in int32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import LinearSpec, MappingType, PerRow, PerTensor, QuantSpec, qdtype
from ..recipe import register_recipe
from .static_activation import StaticActivationRecipe


@register_recipe("int8_static_activation_int8_weight")
@dataclass(frozen=True)
class Int8StaticActivationInt8Weight(StaticActivationRecipe):
    """Weights in int8 per output channel, activations in int8 with one fixed scale; see `StaticActivationRecipe`.

    Codes of both are in [-127, 127]; of asymmetric activations in [-128, 127].

    Args:
        scale: of the activation: its largest magnitude divided by 127; None: from data.
        act_mapping_type: `MappingType` of the activation. ASYMMETRIC, whose zero point only data can tell, is up to a
            bit more accurate where ranges are one-sided, behind a ReLU or GELU.
        scale_dtype: dtype of the scales of the weight; None is fp32. That of the model, so that engines which round
            scales to it compute with the same numbers (see docs/guides/vllm.md).

    Raises:
        TypeError, ValueError: the scale is not a positive number.
        ValueError: a scale together with an asymmetric mapping.
    """

    scale_dtype: torch.dtype | None = None
    act_mapping_type: MappingType = MappingType.SYMMETRIC

    def __post_init__(self) -> None:
        if self.act_mapping_type is MappingType.ASYMMETRIC and self.scale is not None:
            raise ValueError(
                f"{self.name}: an asymmetric activation has a zero point too, which data chooses; leave the scale out"
            )
        super().__post_init__()

    def linear_spec(self) -> LinearSpec:
        weight = QuantSpec(qdtype("int8"), PerRow(), scale_dtype=self.scale_dtype, quant_min=-127)
        lowest = None if self.act_mapping_type is MappingType.ASYMMETRIC else -127
        activation = QuantSpec(qdtype("int8"), PerTensor(), self.act_mapping_type, quant_min=lowest)
        return LinearSpec(weight, activation, static=True)


int8_static_activation_int8_weight = Int8StaticActivationInt8Weight
