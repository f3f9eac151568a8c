"""Training by a spec of your own. The other recipes are presets of this one."""

from __future__ import annotations

from dataclasses import dataclass

from ...recipe import register_recipe
from ..engine.numerics import fully_quantized
from ..engine.spec import TrainingSpec
from .base import TrainingRecipe


@register_recipe("mixed_precision_training")
@dataclass(frozen=True)
class MixedPrecisionTraining(TrainingRecipe):
    """Weights in floating point, matmuls as `spec` says.

    Args:
        spec: of the three matmuls. `fully_quantized(fwd_bits=8, bwd_bits=8)` and `fully_quantized_float8()` make one.
    """

    spec: TrainingSpec = fully_quantized()

    def training_spec(self) -> TrainingSpec:
        return self.spec


mixed_precision_training = MixedPrecisionTraining
