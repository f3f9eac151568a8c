"""min_max: the extremes of all data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...primitives import QuantSpec
from ...statistics import Range, Statistic
from .base import MinMax, Observer, register_observer


@register_observer("min_max")
@dataclass(frozen=True, repr=False)
class MinMaxObserver(Observer):
    """[min x, max x] over all batches: nothing that was seen clips. One outlier makes all codes coarse."""

    statistic: ClassVar[type[Statistic]] = Range
    follows: ClassVar[bool] = True

    def range(self, seen: Range, spec: QuantSpec) -> MinMax:
        return seen.low, seen.high

    def follow(self, now: MinMax, batch: MinMax) -> MinMax:
        return torch.fmin(now[0], batch[0]), torch.fmax(now[1], batch[1])


min_max = MinMaxObserver
