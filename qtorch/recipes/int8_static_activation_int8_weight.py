"""int8 weights and int8 activations with a fixed scale, accumulated in int32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..primitives import LinearSpec, PerRow, PerTensor, QuantSpec, qdtype
from ..recipe import register_recipe
from .static_activation import StaticActivationRecipe


@register_recipe("int8_static_activation_int8_weight")
@dataclass(frozen=True)
class Int8StaticActivationInt8Weight(StaticActivationRecipe):
    """Weights in int8 per output channel, activations in int8 with one fixed scale; see `StaticActivationRecipe`.

    Codes of both are in [-127, 127].

    Args:
        scale: of the activation: its largest magnitude divided by 127; None: from data.
        scale_dtype: dtype of the scales of the weight; None is fp32. That of the model, so that engines which round
            scales to it compute with the same numbers (see docs/guides/vllm.md).

    Raises:
        TypeError, ValueError: the scale is not a positive number.
    """

    scale_dtype: torch.dtype | None = None

    def linear_spec(self) -> LinearSpec:
        weight = QuantSpec(qdtype("int8"), PerRow(), scale_dtype=self.scale_dtype, quant_min=-127)
        activation = QuantSpec(qdtype("int8"), PerTensor(), quant_min=-127)
        return LinearSpec(weight, activation, static=True)


int8_static_activation_int8_weight = Int8StaticActivationInt8Weight
