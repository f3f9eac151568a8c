"""convert: from weights in training to weights that serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..quantize_api import Recipe, register_recipe
from .trainable_weight import TrainableWeight


@register_recipe("convert")
@dataclass(frozen=True)
class Convert(Recipe):
    """Every weight in training, wherever it is, becomes the weight for inference that its recipe has trained for: the
    codes that the forward has multiplied by, at their true size. The model computes what it computed in training:
    bit for bit where sums are integers, and to the last bit of the same kernel elsewhere.

    Weights that no recipe has touched are left alone.
    """

    selects: ClassVar[type] = TrainableWeight

    def check(self, weight: Tensor) -> None:
        if not isinstance(weight, TrainableWeight):
            raise ValueError(f"convert takes weights in training, this is a {type(weight).__name__}")
        weight.check_convert()

    def apply(self, weight: Tensor) -> Tensor:
        assert isinstance(weight, TrainableWeight)
        return weight.convert()


convert = Convert
