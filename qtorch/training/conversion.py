"""convert: from weights in training to weights for inference."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..calibration.statistics import Statistics
from ..model.install import PreparedModule
from ..model.targets import Target
from ..recipes.base import Recipe, register_recipe
from .weights.base import TrainingWeight


@register_recipe("convert")
@dataclass(frozen=True)
class Convert(Recipe):
    """Replace every weight in training by the weight for inference that its recipe has trained it for: the codes that
    the forward multiplied by, at their true size. The model computes what it computed in training: the same bits where
    sums are integers, and elsewhere the same up to the rounding of sums, which is equal where the same kernel runs.

    Modules whose class was exchanged for training get their own class back. Weights in floating point that no training
    recipe has changed stay as they are.
    """

    selects: ClassVar[tuple[type, ...]] = (TrainingWeight, PreparedModule)

    def check(self, weight: Tensor) -> None:
        if not isinstance(weight, TrainingWeight):
            raise ValueError(f"convert takes weights in training, this is a {type(weight).__name__}")
        weight.check_convert()

    def apply(self, weight: Tensor) -> Tensor:
        assert isinstance(weight, TrainingWeight)
        return weight.convert()

    def check_target(self, target: Target[Any]) -> None:
        prepared = _prepared(target)
        for module in prepared:
            module.check_convert()
        if not prepared:
            super().check_target(target)

    def make(self, target: Target[Any], weight: Tensor, statistics: Statistics | None = None) -> Tensor:
        prepared = _prepared(target)
        return prepared[0].convert() if prepared else super().make(target, weight)

    def install(self, target: Target[Any], made: Tensor) -> None:
        for module in _prepared(target):
            module.restore()
        super().install(target, made)


def _prepared(target: Target[Any]) -> list[PreparedModule]:
    return [module for module in target.modules if isinstance(module, PreparedModule)]
