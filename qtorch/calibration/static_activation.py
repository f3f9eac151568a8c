"""The fixed scale of a static activation, as an observer chooses it or as the recipe gives it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dtypes import AffineQuantizedTensor, QuantizedTensor
from ..primitives import LinearSpec, QuantSpec
from ..recipe import ExpertStatistics, WeightRecipe
from ..statistics import Statistic, Statistics
from .observers import Observer


class StaticActivation(NamedTuple):
    """Attributes:
    spec: of the activation.
    scale, zero_point: (1, 1); None if it is always zero.
    range: (low, high) of the reals that the codes stand for; None if the scale was given.
    rows: the number of inputs that were seen.
    """

    spec: QuantSpec
    scale: Tensor
    zero_point: Tensor | None = None
    range: tuple[float, float] | None = None
    rows: int = 0

    @classmethod
    def given_by(cls, recipe: WeightRecipe, device: torch.device) -> StaticActivation | None:
        """That of a recipe with a scale of its own; None for other recipes."""
        spec, scale = recipe.linear_spec(), recipe.act_scale(device)
        return None if not spec.static or spec.activation is None or scale is None else cls(spec.activation, scale)

    @classmethod
    def observed(
        cls, recipe: WeightRecipe, observer: Observer, statistics: Statistics | ExpertStatistics, weight: Tensor
    ) -> StaticActivation:
        """That of a recipe without: from the inputs of `weight`, which has one scale, also for all its experts.

        Raises:
            ValueError: no input was seen, or the recipe needs more than one scale.
        """
        spec = recipe.linear_spec().activation
        assert spec is not None
        if (shape := spec.scale_shape((1, weight.shape[-1]))) != (1, 1):
            raise ValueError(f"observers choose one scale for the input of a layer, {recipe} has {shape[-1]}")
        seen = _seen(statistics, observer.statistic)
        if seen is None or not seen.rows:
            raise ValueError(
                f"{recipe} takes the scale of the activation from data, and no batch has used this weight in a "
                "product; give batches that reach it, or None for it in a mapping"
            )
        low, high = (end.float().reshape(1, 1).to(weight.device) for end in observer.range(seen, spec))
        scale, zero_point = spec.choose_qparams_from_range(low, high)
        return cls(spec, scale, zero_point, reals(spec, scale, zero_point), seen.rows)

    def attached(self, weight: QuantizedTensor) -> QuantizedTensor:
        """`weight`, whose input is quantized by this."""
        assert isinstance(weight, AffineQuantizedTensor)
        return weight.with_activation(self.spec, self.scale, self.zero_point)


def reals(spec: QuantSpec, scale: Tensor, zero_point: Tensor | None) -> tuple[float, float]:
    """What the lowest and the highest code stand for."""
    ends = torch.tensor([spec.code_range], device=scale.device, dtype=torch.float32).to(spec.dtype.storage)
    low, high = spec.dequantize(ends, scale, zero_point)[0].tolist()
    return low, high


def without_scale(spec: LinearSpec) -> LinearSpec:
    """`spec` of a weight that gets its static activation later, by `StaticActivation.attached`."""
    return replace(spec, activation=None, static=False) if spec.static else spec


def _seen(statistics: Any, kind: type[Statistic]) -> Statistic | None:
    """The statistic of a weight; experts have one together."""
    found = statistics if kind in statistics else next((s for s in statistics.values() if isinstance(s, dict)), {})
    return found.get(kind)
