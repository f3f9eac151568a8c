"""Base class of recipes with static activations, whose scale is fixed instead of computed on each call."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..dtypes import AffineQuantizedTensor
from ..recipe import WeightRecipe


@dataclass(frozen=True)
class StaticActivationRecipe(WeightRecipe):
    """Activations quantized with a fixed scale; values beyond the range of the codes are clipped.

    Layers need different scales: leave the scale out, and `calibrated` or `observed` choose one for each from data.

    Args:
        scale: of the activation: its largest expected magnitude divided by the largest code; a number, or a tensor of
            one element. None: from data.

    Raises:
        TypeError: `scale` is neither.
        ValueError: `scale` is not positive, finite and a normal number in fp32.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            object.__setattr__(self, "scale", _number(self.scale, self.name))
        super().__post_init__()

    def act_scale(self, device: torch.device) -> Tensor | None:
        return None if self.scale is None else torch.full((1, 1), self.scale, dtype=torch.float32, device=device)

    def apply(self, weight: Tensor) -> Tensor:
        self.check_complete()
        return AffineQuantizedTensor.from_float(weight, self.linear_spec(), self.act_scale(weight.device))


def _number(scale: Any, recipe: str) -> float:
    if isinstance(scale, Tensor) and scale.numel() == 1 and not scale.is_meta:
        scale = scale.item()
    if isinstance(scale, bool) or not isinstance(scale, Real):
        got = f"a tensor of shape {tuple(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
        raise TypeError(f"{recipe}: scale is a number or a tensor of one element, got {got}")
    value, fp32 = float(scale), torch.finfo(torch.float32)
    # Smaller numbers have no finite inverse.
    if not fp32.tiny <= value <= fp32.max:
        raise ValueError(f"{recipe}: scale is positive, finite and a normal number in fp32, got {scale}")
    return value
