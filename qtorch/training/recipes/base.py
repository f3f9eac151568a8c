"""TrainingRecipe: a recipe that a `TrainingSpec` describes, and that keeps weights in floating point."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ...recipe import Recipe, check_float_weight
from ...targets import Target
from ...weight_kinds import WeightKind
from ..engine.spec import TrainingSpec
from ..weights.master import MasterWeight


class TrainingRecipe(Recipe):
    """Weights stay in floating point; their matmuls run as `training_spec` says. No value is read: a model may be on
    the meta device, to be sharded, materialized and initialized after `quantize_`.

    Raises:
        ValueError: `training_spec` does.
    """

    trains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.training_spec()

    def training_spec(self) -> TrainingSpec:
        raise NotImplementedError

    def check(self, weight: Tensor) -> None:
        check_trainable(weight, matrices=True)
        spec = self.training_spec().output.rhs
        if spec is not None:
            # Training could complete blocks with zeros, but the weight would not convert.
            spec.block_size(weight.shape)

    def apply(self, weight: Tensor) -> Tensor:
        return MasterWeight.of(weight, self.training_spec())

    def has_made(self, target: Target[Any]) -> bool:
        weight = target.parameter
        return isinstance(weight, MasterWeight) and weight.scheme.training == self.training_spec()  # type: ignore[attr-defined]


def declines_experts(recipe: Recipe, kind: WeightKind) -> str | None:
    """`Recipe.declines` of recipes that take matrices."""
    return f"experts in one parameter, and {recipe.name} takes matrices" if kind.name == "experts" else None


def check_trainable(weight: Tensor, matrices: bool = False) -> None:
    """Raise `ValueError` unless `weight` is a float matrix; or, with `matrices`, those of experts."""
    check_float_weight(weight)
    if weight.dim() != 2 and not (matrices and weight.dim() == 3):
        raise ValueError(f"takes matrices, this weight has shape {tuple(weight.shape)}")
