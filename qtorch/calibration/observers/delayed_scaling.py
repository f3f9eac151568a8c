"""delayed_scaling: the range is that of the batches before, so that no pass over the data precedes quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...primitives import QuantSpec
from ...statistics import BatchRanges, Statistic
from .base import MinMax, Observer, register_observer


@register_observer("delayed_scaling")
@dataclass(frozen=True, repr=False)
class DelayedScalingObserver(Observer):
    """[-a, a] with a the largest magnitude of the last `history` batches before this one (Micikevicius et al., arXiv
    2209.05433; AQT, `DelayedScalingCalibration`). The first batch has its own. What grows clips once.

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
        newest = torch.where(measured.isfinite(), measured, known)
        return torch.cat([newest, memory[:-1]]), (-bound, bound)


delayed_scaling = DelayedScalingObserver
