"""moving_average: the mean of the ranges of batches, which forgets old ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...primitives import QuantSpec
from ...statistics import BatchRanges, Statistic
from .base import MinMax, Observer, register_observer


@register_observer("moving_average")
@dataclass(frozen=True, repr=False)
class MovingAverageObserver(Observer):
    """The mean of the ranges of the batches b = 1 ... B, with weights (1 - momentum)^(B - b).

    In training, r <- r + momentum (range of the batch - r), from the range of the first batch on (as in torch's
    `MovingAverageMinMaxObserver`), or from the mean that `calibrate` has found.

    Args:
        momentum: above 0 and at most 1; with 1, the last batch alone counts.

    Raises:
        ValueError: momentum is out of range.
    """

    statistic: ClassVar[type[Statistic]] = BatchRanges
    follows: ClassVar[bool] = True

    momentum: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise ValueError(f"moving_average: momentum is above 0 and at most 1, got {self.momentum}")

    def range(self, seen: BatchRanges, spec: QuantSpec) -> MinMax:
        lows, highs = torch.stack(seen.lows), torch.stack(seen.highs)
        ages = torch.arange(len(lows) - 1, -1, -1, dtype=torch.float32, device=lows.device)
        weights = (1 - self.momentum) ** ages
        weights = weights / weights.sum()
        return (lows * weights).sum(), (highs * weights).sum()

    def follow(self, now: MinMax, batch: MinMax) -> MinMax:
        return self._mixed(now[0], batch[0]), self._mixed(now[1], batch[1])

    def _mixed(self, now: Tensor, batch: Tensor) -> Tensor:
        return torch.where(now.isnan(), batch, torch.lerp(now, batch, self.momentum))


moving_average = MovingAverageObserver
