"""INT8 mixed precision: weights in floating point, some or all matmuls in int8 with a scale per row."""

from __future__ import annotations

from dataclasses import dataclass

from ...primitives import Rounding
from ...primitives.jsonable import jsonable
from ...recipe import register_recipe
from ..engine.numerics import int8
from ..engine.spec import GemmSpec, TrainingSpec
from .base import TrainingRecipe


@jsonable
@dataclass(frozen=True)
class Int8MixedPrecisionTrainingConfig:
    """Which matmuls run in int8, the others in full precision.

    Args:
        output: y = x @ w.T
        grad_input: dx = g @ w
        grad_weight: dw = g.T @ x. The first to leave in full precision if training does not converge.
        stochastic_rounding: round gradients stochastically.
    """

    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True
    stochastic_rounding: bool = False


@register_recipe("int8_mixed_precision_training")
@dataclass(frozen=True)
class Int8MixedPrecisionTraining(TrainingRecipe):
    """int8 x int8 -> int32, each operand quantized along its contracted axis on each call (AQT, arXiv 2105.03536).

    Trained with `output`, a model converts to the scheme of `int8_dynamic_activation_int8_weight()`.
    """

    config: Int8MixedPrecisionTrainingConfig = Int8MixedPrecisionTrainingConfig()

    def training_spec(self) -> TrainingSpec:
        config = self.config
        rounding = Rounding.STOCHASTIC if config.stochastic_rounding else Rounding.NEAREST_EVEN
        full, forward, backward = GemmSpec(), GemmSpec(int8(), int8()), GemmSpec(int8(rounding=rounding), int8())
        return TrainingSpec(
            forward if config.output else full,
            backward if config.grad_input else full,
            backward if config.grad_weight else full,
        )


int8_mixed_precision_training = Int8MixedPrecisionTraining
