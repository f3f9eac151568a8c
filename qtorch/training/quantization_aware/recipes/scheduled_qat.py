"""Quantization-aware training with a schedule, and with observed ranges: the state is in the layers.

step < start_step       floating point
step < freeze_step      fake quantization; scales follow the weights, observed ranges the data
step >= freeze_step     fake quantization with the scales of the last step before it
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....calibration.observers import Observer, observer_of
from ....primitives import LinearSpec, QuantSpec
from ....recipe import WeightRecipe, register_recipe
from ..quantizers.base import Quantizer
from ..quantizers.observed import Dynamic, Fixed, ObservedRange
from .base import ModuleRecipe, check_inference_recipe


@register_recipe("scheduled_qat")
@dataclass(frozen=True)
class ScheduledQAT(ModuleRecipe):
    """Layers, `nn.Linear`, `nn.Embedding` and convolutions exactly, are trained for `recipe`; see the top of the file.

    Args:
        recipe: for inference, what the weights become by `convert()`.
        start_step, freeze_step: forward passes in training mode, of each layer; see `Schedule`.
        observer: of recipes with static activations: None keeps the scale that the recipe gives; an observer, or the
            word for one with its defaults, chooses it from what passes in `qtorch.training.calibrate`.
            ``moving_average()`` and ``min_max()`` follow what passes in training too; the range of the others stays.

    Raises:
        TypeError: `recipe` is not an inference recipe.
        ValueError: steps that make no sense; an unknown observer, or one without static
            activations; weights by look-up
            tables or pruned, or scales in codes of their own that are to freeze: these have no state here.
    """

    recipe: WeightRecipe
    start_step: int = 0
    freeze_step: int | None = None
    observer: Observer | str | None = None

    def __post_init__(self) -> None:
        check_inference_recipe(self.recipe, self.name)
        spec = self.recipe.linear_spec()
        if not isinstance(spec.weight, QuantSpec):
            raise ValueError(f"{self.name}: {self.recipe} has weights of {type(spec.weight).__name__}, not QuantSpec")
        if self.freeze_step is not None and spec.weight.scale_spec is not None:
            raise ValueError(f"{self.name}: the scales of {self.recipe} are codes, which cannot freeze one by one")
        if self.observer is not None:
            object.__setattr__(self, "observer", observer_of(self.observer, self.name))
            if not spec.static:
                raise ValueError(f"{self.name}: {self.recipe} has no static activations to observe")
        super().__post_init__()

    def check_complete(self) -> None:
        if self.observer is None:
            self.recipe.check_complete()

    def linear_spec(self) -> LinearSpec:
        return self.recipe.linear_spec()

    def input_quantizer(self, spec: QuantSpec, static: bool) -> Quantizer:
        if not static:
            return Dynamic(spec, (1, 1))
        if self.observer is None:
            scale = self.recipe.act_scale(torch.device("cpu"))
            assert scale is not None
            return Fixed(spec, scale)
        return ObservedRange(spec, (1, 1), self.freezes, observer_of(self.observer, self.name))


scheduled_qat = ScheduledQAT
