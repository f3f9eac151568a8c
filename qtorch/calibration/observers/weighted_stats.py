"""weighted_stats: a range from moving averages of the mean, the power mean and the largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...primitives import QuantSpec
from ...statistics import BatchMagnitudes, Statistic
from .base import MinMax, Observer, register_observer


@register_observer("weighted_stats")
@dataclass(frozen=True, repr=False)
class WeightedStatsObserver(Observer):
    """[-a, a], a = l1 mean |x| + lp (mean |x|^p)^(1/p) + max_dev max |x| + constant (AQT, `WeightedStatsCalibration`).

    Each is an exponential moving average over batches, v <- v + (batch - v) / updates, from the first batch on: sums
    and counts are averaged, then divided. Zeros do not count, as of a ReLU.

    Args:
        l1, lp, max_dev, constant: coefficients, of which one is not zero.
        p: of the power mean.
        updates: batches that the averages remember.

    Raises:
        ValueError: coefficients below zero or all zero; p or updates below 1.
    """

    statistic: ClassVar[type[Statistic]] = BatchMagnitudes
    follows: ClassVar[bool] = True
    memory: ClassVar[int] = 4

    l1: float = 0.0
    lp: float = 0.0
    max_dev: float = 1.0
    constant: float = 0.0
    p: float = 2.0
    updates: float = 100.0

    def __post_init__(self) -> None:
        coefficients = (self.l1, self.lp, self.max_dev, self.constant)
        if min(coefficients) < 0 or max(coefficients) == 0:
            raise ValueError(f"weighted_stats: coefficients are not negative, and not all zero, got {coefficients}")
        if self.p < 1 or self.updates < 1:
            raise ValueError(f"weighted_stats: p and updates are at least 1, got {self.p} and {self.updates}")

    def range(self, seen: BatchMagnitudes, spec: QuantSpec) -> MinMax:
        memory = torch.zeros(4, device=seen.batches[0].device, dtype=torch.float32)
        for magnitudes in seen.batches:
            memory = self._mixed(memory, self.measure(magnitudes.unsqueeze(0)).squeeze(1))
        return self._bound(memory)

    def measure(self, blocks: Tensor) -> Tensor:
        magnitude = blocks.float().abs()
        count = (magnitude != 0).sum(-1).float()
        return torch.stack([count, magnitude.sum(-1), (magnitude**self.p).sum(-1), magnitude.amax(-1)])

    def follow_measured(self, memory: Tensor, measured: Tensor) -> tuple[Tensor, MinMax]:
        memory = self._mixed(memory, measured)
        return memory, self._bound(memory)

    def _mixed(self, memory: Tensor, measured: Tensor) -> Tensor:
        # What has seen nothing has no count.
        return torch.where(memory[:1] > 0, torch.lerp(memory, measured, 1 / self.updates), measured)

    def _bound(self, memory: Tensor) -> MinMax:
        count, total, powers, largest = memory
        count = count.clamp(min=torch.finfo(torch.float32).tiny)
        power_mean = (powers / count) ** (1 / self.p)
        bound = self.l1 * total / count + self.lp * power_mean + self.max_dev * largest + self.constant
        return -bound, bound


weighted_stats = WeightedStatsObserver
