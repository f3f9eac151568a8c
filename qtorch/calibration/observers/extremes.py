"""Observers whose range follows from extremes and means of batches, and which follow a model in training."""

from typing import ClassVar

import torch
from torch import Tensor

from ...primitives import QuantSpec
from ..statistics import BatchMagnitudes, BatchRanges, Range, Statistic
from .base import MinMax, Observer, register_observer


@register_observer("min_max")
class MinMaxObserver(Observer):
    """[min x, max x] over all batches: nothing that was seen clips. One outlier makes all codes coarse."""

    statistic: ClassVar[type[Statistic]] = Range
    follows: ClassVar[bool] = True

    def range(self, seen: Range, spec: QuantSpec) -> MinMax:
        return seen.low, seen.high

    def follow(self, now: MinMax, batch: MinMax) -> MinMax:
        return torch.fmin(now[0], batch[0]), torch.fmax(now[1], batch[1])


@register_observer("moving_average")
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
        low, high = (torch.where(a.isnan(), b, torch.lerp(a, b, self.momentum)) for a, b in zip(now, batch))
        return low, high


@register_observer("delayed_scaling")
class DelayedScalingObserver(Observer):
    """[-a, a] with a the largest magnitude of the last `history` batches before this one, so that no pass over the data
    precedes quantization. The first batch has its own. What grows clips once.

    Source: Micikevicius et al., arXiv 2209.05433; AQT, `DelayedScalingCalibration`.

    Raises:
        ValueError: a history below 1.
    """

    statistic: ClassVar[type[Statistic]] = BatchRanges
    follows: ClassVar[bool] = True

    history: int = 1024

    def __post_init__(self) -> None:
        if self.history < 1:
            raise ValueError(f"delayed_scaling: history is at least 1, got {self.history}")

    @property
    def memory(self) -> int:  # type: ignore[override]
        return self.history

    def range(self, seen: BatchRanges, spec: QuantSpec) -> MinMax:
        lows, highs = torch.stack(seen.lows[-self.history :]), torch.stack(seen.highs[-self.history :])
        bound = torch.maximum(-lows, highs).amax()
        return -bound, bound

    def measure(self, blocks: Tensor) -> Tensor:
        return blocks.float().abs().amax(-1).unsqueeze(0)

    def follow_measured(self, memory: Tensor, measured: Tensor) -> tuple[Tensor, MinMax]:
        known = memory.amax(0)
        bound = torch.where(known > 0, known, measured[0])
        # A batch that is not finite leaves the history as it is.
        return torch.cat([torch.where(measured.isfinite(), measured, known), memory[:-1]]), (-bound, bound)


@register_observer("weighted_stats")
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
