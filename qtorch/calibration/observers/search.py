"""Observers that search for the range that scores best, among those that shrink the extremes of what was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...primitives import MappingType, PerRow, QuantSpec
from ...statistics import Histogram, Statistic
from .base import MinMax, Observer

Score = Callable[[Tensor, Tensor], Tensor]
"""(lows (C,), highs (C,)) -> (C,), the smallest is best."""

ROUNDS = 2
"""In which the two ends of an asymmetric range are moved, one after the other."""


@dataclass(frozen=True, repr=False)
class RangeSearch(Observer):
    """Base class of observers that try `steps` factors from 1 to `smallest`.

    Args:
        steps: number of factors, 2 or more.
        smallest: the last of them, above 0 and below 1.

    Raises:
        ValueError: an argument is out of range.
    """

    statistic: ClassVar[type[Statistic]] = Histogram

    steps: int = 100
    smallest: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < 2 or not 0 < self.smallest < 1:
            raise ValueError(
                f"{self.name}: needs steps >= 2 and 0 < smallest < 1, got {self.steps} and {self.smallest}"
            )


def best_range(low: Tensor, high: Tensor, spec: QuantSpec, steps: int, smallest: float, score: Score) -> MinMax:
    """The best of the ranges f low, f high with `steps` factors f from 1 to `smallest`; the widest of equal ones.

    With an asymmetric mapping, whose ends are free, each end is then moved alone by such factors.
    """
    factors = torch.linspace(1, smallest, steps, device=low.device, dtype=torch.float32)
    low, high = low.clamp(max=0), high.clamp(min=0)
    best = factors[score(low * factors, high * factors).argmin()]
    if spec.mapping is not MappingType.ASYMMETRIC:
        return low * best, high * best
    of_low = of_high = best
    for _ in range(ROUNDS):
        of_low = factors[score(low * factors, (high * of_high).expand(steps)).argmin()]
        of_high = factors[score((low * of_low).expand(steps), high * factors).argmin()]
    return low * of_low, high * of_high


def quantized(values: Tensor, lows: Tensor, highs: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(codes, what they stand for in fp32), both (C, V), of `values` (V,) with each of C ranges."""
    spec = replace(spec.to_nearest(), granularity=PerRow())
    scale, zero_point = spec.choose_qparams_from_range(lows.unsqueeze(1), highs.unsqueeze(1))
    codes = spec.quantize(values.expand(len(lows), -1), scale, zero_point)
    return codes, spec.dequantize(codes, scale, zero_point)
