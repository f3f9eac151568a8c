"""float8: all three matmuls in float8, with a scale per row or per tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...primitives import Granularity, PerRow, PerTensor
from ...recipe import register_recipe
from ..engine.numerics import fully_quantized_float8
from ..engine.spec import TrainingSpec
from .base import TrainingRecipe

_WORDS: dict[str, Granularity] = {"rowwise": PerRow(), "tensorwise": PerTensor()}


@register_recipe("float8_training")
@dataclass(frozen=True)
class Float8Training(TrainingRecipe):
    """Weights and activations in e4m3, gradients in `gradient_dtype` (Micikevicius et al., arXiv 2209.05433).

    Args:
        granularity: `PerRow()` or ``"rowwise"``; `PerTensor()` or ``"tensorwise"``.
        gradient_dtype: of the gradients that come in. None is e4m3 per row, where a scale spans few magnitudes, and
            e5m2, of less precision and more range, per tensor.
        grad_weight: quantize the gradient of the weight too.
    """

    granularity: Granularity = PerRow()
    gradient_dtype: torch.dtype | None = None
    grad_weight: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.granularity, str):
            object.__setattr__(self, "granularity", _WORDS.get(self.granularity, self.granularity))
        if not isinstance(self.granularity, PerRow | PerTensor):
            raise ValueError(f"{self.name}: granularity is 'rowwise' or 'tensorwise', got {self.granularity!r}")
        super().__post_init__()

    def training_spec(self) -> TrainingSpec:
        by_granularity = torch.float8_e4m3fn if isinstance(self.granularity, PerRow) else torch.float8_e5m2
        gradient = self.gradient_dtype or by_granularity
        return fully_quantized_float8(self.granularity, gradient=gradient, grad_weight=self.grad_weight)


float8_training = Float8Training
