"""Statistics of how large the inputs of a weight are: the extremes, of all batches or of each.

Rows that hold a NaN or an infinity do not count: inference keeps such rows apart too (see `primitives.non_finite`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..primitives.non_finite import finite_rows
from .base import Statistic


class Range(Statistic):
    """The smallest and the largest of all inputs, `low` and `high`, 0-d fp32."""

    per_expert: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.low: Tensor = torch.tensor(torch.inf, dtype=torch.float32, device="cpu")
        self.high: Tensor = torch.tensor(-torch.inf, dtype=torch.float32, device="cpu")

    def update(self, rows: Tensor) -> None:
        rows = finite_rows(rows)
        if rows.numel():
            low, high = rows.aminmax()
            self._widen(low.float(), high.float(), rows.shape[0])

    def merge(self, other: Range) -> None:
        self._widen(other.low, other.high, other.rows)

    def _widen(self, low: Tensor, high: Tensor, rows: int) -> None:
        self.low = torch.minimum(self.low.to(low.device), low)
        self.high = torch.maximum(self.high.to(high.device), high)
        self.rows += rows


class BatchMagnitudes(Statistic):
    """All magnitudes of each batch, in the order seen, up to `LIMIT` of a batch at equal distances: `batches`, fp32."""

    per_expert: ClassVar[bool] = False

    LIMIT: ClassVar[int] = 1 << 16

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []
        self.current: list[Tensor] = []

    def update(self, rows: Tensor) -> None:
        rows = finite_rows(rows)
        if rows.numel():
            self.rows += rows.shape[0]
            self.current.append(rows.abs().reshape(-1)[:: -(-rows.numel() // self.LIMIT)].float())

    def end_batch(self) -> None:
        if self.current:
            self.batches.append(torch.cat(self.current))
        self.current = []

    def merge(self, other: BatchMagnitudes) -> None:
        """Add the batches of `other` after those of this one; both are between two batches."""
        self.batches += other.batches
        self.rows += other.rows


class BatchRanges(Statistic):
    """The range of each batch, in the order seen: `lows` and `highs`, 0-d fp32; batches without rows have none."""

    per_expert: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.lows: list[Tensor] = []
        self.highs: list[Tensor] = []
        self.batch = Range()

    def update(self, rows: Tensor) -> None:
        before = self.batch.rows
        self.batch.update(rows)
        self.rows += self.batch.rows - before

    def end_batch(self) -> None:
        if self.batch.rows:
            self.lows.append(self.batch.low)
            self.highs.append(self.batch.high)
        self.batch = Range()

    def merge(self, other: BatchRanges) -> None:
        """Add the batches of `other` after those of this one; both are between two batches."""
        self.lows += other.lows
        self.highs += other.highs
        self.rows += other.rows
