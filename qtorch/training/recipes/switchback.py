"""SwitchBack: int8 forward and input gradient, weight gradient in full precision."""

from __future__ import annotations

from dataclasses import dataclass

from ...primitives import PerTensor
from ...recipe import register_recipe
from ..engine.numerics import int8
from ..engine.spec import GemmSpec, TrainingSpec
from .base import TrainingRecipe


@register_recipe("switchback_training")
@dataclass(frozen=True)
class SwitchbackTraining(TrainingRecipe):
    """Activations and gradients in int8 with a scale per row, weights in int8 with one scale; forward and
    backward use the same codes (Wortsman et al., arXiv 2304.13013, algorithm 1). The gradient of a weight sums over
    many more terms than the other two matmuls, so it stays in full precision.
    """

    def training_spec(self) -> TrainingSpec:
        return TrainingSpec(GemmSpec(int8(), int8(PerTensor())), GemmSpec(int8(), reuse_forward=True))


switchback_training = SwitchbackTraining
