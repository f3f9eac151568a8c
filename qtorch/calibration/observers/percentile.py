"""percentile: the range without the outermost elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...primitives import QuantSpec
from ...statistics import Histogram, Statistic
from .base import MinMax, Observer, register_observer


@register_observer("percentile")
@dataclass(frozen=True, repr=False)
class PercentileObserver(Observer):
    """The range without the outermost (1 - p/100) / 2 of the elements on either side, as `PercentileRule`; its ends are
    the outer edges of bins of the histogram.

    Args:
        percentile: p, above 0 and at most 100.

    Raises:
        ValueError: it is out of range.
    """

    statistic: ClassVar[type[Statistic]] = Histogram

    percentile: float = 99.99

    def __post_init__(self) -> None:
        if not 0 < self.percentile <= 100:
            raise ValueError(f"percentile: percentile is above 0 and at most 100, got {self.percentile}")

    def range(self, seen: Histogram, spec: QuantSpec) -> MinMax:
        values, counts = seen.occupied()
        count = int(counts.double().sum())
        left_out = min(int((1 - self.percentile / 100) / 2 * count), (count - 1) // 2)
        low = values[_bin_of(left_out, counts)] - seen.width / 2
        high = values.flip(0)[_bin_of(left_out, counts.flip(0))] + seen.width / 2
        return torch.clamp(low, min=seen.low), torch.clamp(high, max=seen.high)


def _bin_of(rank: int, counts: Tensor) -> Tensor:
    """The bin of the element that `rank` elements precede."""
    total = counts.double().cumsum(0)
    return torch.searchsorted(total, torch.full_like(total[:1], rank), right=True)[0]


percentile = PercentileObserver
