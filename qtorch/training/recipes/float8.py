"""float8: all three matmuls in float8, with a scale per row or per tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...primitives import Granularity, PerRow, PerTensor, mx_spec
from ...recipes.base import register_recipe
from ..engine import gemm_spec, numerics
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

    def training_spec(self) -> gemm_spec.TrainingSpec:
        by_granularity = torch.float8_e4m3fn if isinstance(self.granularity, PerRow) else torch.float8_e5m2
        gradient = self.gradient_dtype or by_granularity
        return numerics.fully_quantized_float8(self.granularity, gradient=gradient, grad_weight=self.grad_weight)


@register_recipe("mxfp8_training")
@dataclass(frozen=True)
class Mxfp8Training(TrainingRecipe):
    """Every operand in e4m3, with a power-of-two scale for each 32 elements of its contracted axis (OCP Microscaling
    specification v1.0; Rouhani et al., arXiv 2310.10537, section 4). 32 divides the rows of every weight; elsewhere
    zeros complete the blocks.
    """

    def training_spec(self) -> gemm_spec.TrainingSpec:
        spec = mx_spec("float8_e4m3fn")
        gemm = gemm_spec.GemmSpec(spec, spec)
        return gemm_spec.TrainingSpec(gemm, gemm, gemm)
