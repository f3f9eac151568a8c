"""convert: from weights in training to weights that serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..prepared_module import PreparedModule
from ..recipe import Recipe, register_recipe
from ..statistics import Statistics
from ..targets import Target
from .weights.base import TrainingWeight


@register_recipe("convert")
@dataclass(frozen=True)
class Convert(Recipe):
    """Every weight in training, wherever it is, becomes the weight for inference that its recipe has trained for: the
    codes that the forward has multiplied by, at their true size. The model computes what it computed in training:
    bit for bit where sums are integers, and to the last bit of the same kernel elsewhere.

    Modules whose class was exchanged for training get theirs back. Weights that no recipe has touched are left alone.
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


convert = Convert
